"""Where the package keeps its data, and where its users keep theirs."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from memest.errors import ConfigError

__all__ = ["data_folder", "user_folder"]


@cache
def data_folder() -> Path:
    """The folder of ``memest.data``.

    ``importlib.resources`` would find it too, and load a fifth of what an answer takes.
    """
    spec = find_spec("memest.data")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("memest.data is missing: install memest again", name="memest")
    return Path(spec.submodule_search_locations[0])


def user_folder() -> Path:
    """What a user keeps across projects: ``MEMEST_HOME``, else the platform's folder for data.

    Raises:
        ConfigError: there is no such folder, for this user has no home that is known.
    """
    chosen = os.environ.get("MEMEST_HOME")
    try:
        return Path(chosen).expanduser() if chosen else _usual_folder()
    except RuntimeError:
        said = f"MEMEST_HOME={chosen}: the" if chosen else "the"
        raise ConfigError(
            f"{said} home folder of this user is not known: set MEMEST_HOME to a folder, written "
            "out, in which memest may keep measurements and profiles."
        ) from None


def _usual_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "memest"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "memest"
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "memest"
