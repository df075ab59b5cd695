"""Where the package keeps its data."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["data_folder"]


@cache
def data_folder() -> Path:
    """The folder of ``memest.data``.

    ``importlib.resources`` would find it too, and load a fifth of what an answer takes.
    """
    spec = find_spec("memest.data")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("memest.data is missing: install memest again", name="memest")
    return Path(spec.submodule_search_locations[0])
