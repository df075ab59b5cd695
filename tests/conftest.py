"""Options of the whole suite."""

from __future__ import annotations

import os
import tempfile

# step profiles of the tests are nobody else's, and those of others are not believed
os.environ["MEMEST_CACHE"] = tempfile.mkdtemp(prefix="memest-tests-")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
