"""Options of the whole suite."""

from __future__ import annotations

import os
import tempfile

from hypothesis import settings

# what is tested is the package as it is installed: no process that tests start may import the tree
os.environ["PYTHONSAFEPATH"] = "1"

# step profiles of the tests are nobody else's, and those of others are not believed
os.environ["MEMEST_CACHE"] = tempfile.mkdtemp(prefix="memest-tests-")


# how long an example takes says something of the machine, not of the code
settings.register_profile("memest", deadline=None)
settings.load_profile("memest")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
