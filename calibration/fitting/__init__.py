"""Predictions beside measurements: residuals, robust fits, calibrations and reports."""
