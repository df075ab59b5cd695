"""Files that answers are written to: their suffix says what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memest.errors import ConfigError, closest

__all__ = ["check_suffix", "check_target"]


def check_suffix(path: Path, legal: Sequence[str]) -> str:
    """The suffix of a file to write, if it says what to write.

    Raises:
        ConfigError: for any other suffix.
    """
    suffix = path.suffix.lower()
    if suffix in legal:
        return suffix
    near = closest(suffix, legal, limit=1)
    hint = f" Did you mean {path.with_suffix(near[0])}?" if near and path.stem else ""
    raise ConfigError(
        f"{path}: the suffix {suffix!r} does not say what to write.{hint} Legal: "
        f"{', '.join(legal)}."
    )


def check_target(path: Path, legal: Sequence[str]) -> str:
    """The suffix of a file that can be written; asked before anything slow.

    Raises:
        ConfigError: for another suffix, a folder, or a folder that is not there.
    """
    suffix = check_suffix(path, legal)
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"needs the folder {path.parent}"
        raise ConfigError(f"{path} {wrong}: name a file in a folder that exists.")
    return suffix
