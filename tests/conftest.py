"""Options of the whole suite, and the surroundings of every test."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from support.affected.plugin import SlowTestsTouched
from support.tiers import divide, lopsided_folders, misnamed_cases

# what is tested is the package as it is installed: no process that tests start may import the tree
os.environ["PYTHONSAFEPATH"] = "1"

# step profiles of the tests are nobody else's, and those of others are not believed; the workers of
# a run find this in the environment that they are started with, and share them
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MEMEST_CACHE"] = tempfile.mkdtemp(prefix="memest-tests-")


# how long an example takes says something of the machine, not of the code
settings.register_profile("memest", deadline=None)
settings.load_profile("memest")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the slow tests, too")
    parser.addoption(
        "--touched",
        action="store_true",
        help="of the slow tests only those that can notice what differs from the last full run",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/faces/golden"
    )


def pytest_configure(config):
    # what runs in the background ignores Ctrl-C, and so would the processes that tests start
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--touched"):
        config.pluginmanager.register(SlowTestsTouched(config))


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    """Leave slow tests to ``--full``, but for those that somebody asks for by name."""
    by_name = any("::" in argument for argument in config.args)
    if not by_name and (wrong := misnamed_cases(items)):
        raise pytest.UsageError(f"marked as slow, but not there: {'; '.join(wrong)}")
    fast, slow = divide(items)
    here = config.invocation_params.dir
    whole = [here / argument for argument in config.args] == [Path(__file__).parent]
    if whole and (wrong := lopsided_folders(fast, slow)):
        raise pytest.UsageError(f"too much is marked as slow: {'; '.join(wrong)}")
    for item in fast:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
    if not (config.getoption("--full") or by_name):
        items[:] = fast
        config.hook.pytest_deselected(items=slow)
