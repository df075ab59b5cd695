"""The speed of memest, kept over time (see ``docs/speed.md``)."""
