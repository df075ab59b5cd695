"""Training scripts and notebooks, read from the syntax tree; nothing of them is run or imported."""
