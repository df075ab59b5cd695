"""What tests of real workers share: one parent of workers, because importing torch takes longer."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from memest.calibration.running import runner
from memest.calibration.running.attendant import Attendant


@pytest.fixture(scope="session")
def attendant():
    """A parent of workers for all tests of this process; it is made anew where one ends it."""
    with Attendant() as made:
        yield made


class _Visit:
    """The shared attendant, as a bench has its own: it outlives the bench."""

    def __init__(self, attendant, command=""):
        attendant._command = command
        self._attendant = attendant

    def __getattr__(self, name):
        return getattr(self._attendant, name)

    def close(self):
        pass


@pytest.fixture(scope="session")
def sharing(attendant):
    """Gives a context in which benches have the shared parent of workers instead of one each."""

    @contextmanager
    def shared():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "Attendant", lambda *words: _Visit(attendant, *words))
            yield

    return shared


@pytest.fixture
def shared_workers(sharing):
    """The test's benches have the shared parent of workers."""
    with sharing():
        yield
