"""memest inside a training run: predicted first, measured beside it, kept as a record."""
