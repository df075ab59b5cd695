"""From a question to an answer: traces are found or made, composed, replayed and put into words."""
