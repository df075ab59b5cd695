"""Calibration: real training steps, measured, and what is fitted to them.

Data flows one way: a campaign is a list of cases; the runner has each one run by a worker and keeps
its measurement in a store; predictions are laid beside measurements; a fit of what is left becomes
a calibration, which :mod:`memest.estimation.correction` applies to later estimates.
"""
