"""Calibration: measured training runs, and what is fitted to them."""
