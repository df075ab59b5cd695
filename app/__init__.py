"""The explorer, an app over the same library functions as the command line."""
