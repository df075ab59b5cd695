"""Facts about GPUs: what a card has, what the driver keeps, what CUDA itself takes."""
