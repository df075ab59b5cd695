"""What all proofs share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_kept():
    """What is there when a module's tests begin is no garbage later.

    Every measured step begins with a collection, which would look at all objects of torch and
    transformers: a third of a second each time.
    """
    gc.collect()
    gc.freeze()
