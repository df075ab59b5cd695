"""Batches: what a model is fed, by kind of model, or as its user gives it."""
