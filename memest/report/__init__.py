"""Reports made from an estimate: for the terminal and for notebooks."""
