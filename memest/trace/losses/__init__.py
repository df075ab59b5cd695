"""Losses: the models' own, those of users, and those of libraries that save memory."""
