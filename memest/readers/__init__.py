"""Readers of other people's configurations: training arguments, launchers, frameworks, commands.

Files are data. Nothing in them is executed, and only files that a format itself names as
configuration (a DeepSpeed file in training arguments) are opened besides.
"""
