"""What earlier releases did otherwise."""
