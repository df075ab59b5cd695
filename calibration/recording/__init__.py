"""The allocator's own history of a run, kept small and compared with the predicted stream."""
