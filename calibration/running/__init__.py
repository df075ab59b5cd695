"""Cases run for real: a campaign's runner, its workers, what they train and what they read."""
