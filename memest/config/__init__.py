"""What a run is asked to be: the setup, its options, and which go with which."""
