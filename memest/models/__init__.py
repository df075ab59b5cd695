"""Facts about models: which architectures are known, and where a configuration comes from."""
