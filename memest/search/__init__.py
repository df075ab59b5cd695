"""Looking for answers among many runs: largest batch, grids, comparisons, plans."""
