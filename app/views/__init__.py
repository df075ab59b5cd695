"""The pages: each arranges what the library answers."""
