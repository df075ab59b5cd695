"""Files: those that answers are written to, whose suffix says what is written; small ones read."""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from pathlib import Path

from memest.errors import ConfigError, closest
from memest.units import MIB, format_size

__all__ = ["check_suffix", "check_target", "read_small"]


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


def read_small(path: Path, most: int = 10 * MIB) -> str:
    """The text of a file that cannot be large.

    Args:
        path: of a regular file: a device or a pipe may have no end.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
        UnicodeDecodeError: it is not text.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it is larger than {format_size(most)}")
    return raw.decode("utf-8-sig")
