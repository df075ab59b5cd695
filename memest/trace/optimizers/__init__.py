"""Optimizers of torch, of bitsandbytes and of other libraries, and when they step."""
