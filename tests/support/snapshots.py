"""Memory snapshots that torch recorded: validation data, not part of the repository.

``MEMEST_SNAPSHOTS`` names their folder, else they lie beside the checkout. Where there are none,
the tests of them are skipped.
"""

import os
from pathlib import Path

import pytest

from support.paths import SHARED

__all__ = ["FOLDER", "RECORDINGS", "for_each_recording"]

FOLDER = Path(os.environ.get("MEMEST_SNAPSHOTS") or SHARED / "snapshots")
RECORDINGS = sorted(FOLDER.glob("*.pickle"))
_LARGE = 2_000_000
_NONE = pytest.param(None, marks=pytest.mark.skip(reason="no recorded snapshots here"), id="none")


def for_each_recording(*, large_are_slow: bool = False) -> pytest.MarkDecorator:
    """A test's ``path`` is every recording in turn.

    Args:
        large_are_slow: leave those of more than two megabytes to ``--full``.
    """
    cases = [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.slow] if large_are_slow and path.stat().st_size > _LARGE else [],
        )
        for path in RECORDINGS
    ]
    return pytest.mark.parametrize("path", cases or [_NONE])
