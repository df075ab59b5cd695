"""Facts about models and GPUs: what is known of them, and what CUDA and the driver keep."""
