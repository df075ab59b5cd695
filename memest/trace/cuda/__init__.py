"""What CUDA would do, told to PyTorch's own dispatcher on meta."""
