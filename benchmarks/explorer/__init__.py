"""How long the explorer takes in a real browser."""
