"""Where things lie in the checkout; the tests themselves run on the installed package."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Data beside the checkout, which not everybody has."""
TESTS = ROOT / "tests"
GOLDEN = TESTS / "faces" / "golden"
RUN_CONFIGURATIONS = TESTS / "unit" / "readers" / "examples"
"""Configuration files of other tools, as their users have them."""
RECORDED_RANKS = TESTS / "proof" / "ranks" / "recorded"
"""What DeepSpeed was measured to do."""
IN_TESTS = os.environ | {"PYTHONPATH": str(TESTS)}
"""The environment of a process that imports what tests share."""
