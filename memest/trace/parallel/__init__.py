"""One rank of several, as the model's own code sees it."""
