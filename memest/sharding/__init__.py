"""Several GPUs: what DDP, FSDP and ZeRO do to the stream of allocations of one rank."""
