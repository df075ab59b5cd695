"""Predictions against published and own measurements: case records, scores, the verdict test."""

from memest.calibration.validation.records import CaseRecord, Incomplete, Records, read_records
from memest.calibration.validation.scores import Errors, Scores
from memest.calibration.validation.validate import Validation, validate

__all__ = [
    "CaseRecord",
    "Errors",
    "Incomplete",
    "Records",
    "Scores",
    "Validation",
    "read_records",
    "validate",
]
