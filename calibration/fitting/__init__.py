"""Predictions beside measurements: residuals, robust fits, profiles and reports."""
