"""Where the package keeps its data, and where its users keep theirs."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from memest.errors import ConfigError

__all__ = ["data_folder", "platform_folder", "user_folder"]

_XDG = {"data": ("XDG_DATA_HOME", ".local/share"), "cache": ("XDG_CACHE_HOME", ".cache")}


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
    home = os.environ.get("MEMEST_HOME")
    try:
        return Path(home).expanduser() if home else platform_folder("data")
    except RuntimeError:
        subject = f"MEMEST_HOME={home}: the" if home else "the"
        raise ConfigError(
            f"{subject} home folder of this user is not known: set MEMEST_HOME to a folder, "
            "written out, in which memest may keep measurements and profiles."
        ) from None


def platform_folder(kind: Literal["data", "cache"]) -> Path:
    """Where programs of this platform keep what they have for a user.

    By hand: ``platformdirs`` says the same, and loads 6 ms that every answer would wait for.

    Raises:
        RuntimeError: this user has no home that is known.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "memest"
        return base / "cache" if kind == "cache" else base
    if sys.platform == "darwin":
        place = "Caches" if kind == "cache" else "Application Support"
        return Path.home() / "Library" / place / "memest"
    variable, default = _XDG[kind]
    return Path(os.environ.get(variable) or Path.home() / default) / "memest"
