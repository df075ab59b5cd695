"""From a trace to the stream the allocator sees: phases repeated, workspaces filled in."""
