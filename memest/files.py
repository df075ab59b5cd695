"""Files: those that answers are written to, whose suffix says what is written; small ones read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from memest.errors import ConfigError, closest
from memest.units import MIB, format_size

__all__ = ["check_suffix", "check_target", "read_json", "read_small", "write_as", "write_beside"]


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


def write_as(path: str | Path, makers: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Write what the suffix of a file asks for; an existing file is overwritten.

    Args:
        path: where to.
        makers: what makes the content, by suffix.

    Raises:
        ConfigError: for any other suffix.
    """
    file = Path(path)
    content = makers[check_suffix(file, tuple(makers))]()
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content, encoding="utf-8", newline="\n")


def write_beside(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file piece by piece beside its place, then move it there: whole or not at all.

    Args:
        path: where to; an existing file is replaced.
        write: writes the content.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's own are for this user alone
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def read_json(given: str | Path) -> Any:
    """A document: the text of a JSON object itself, or what a file holds.

    Raises:
        OSError: the file cannot be read, see :func:`read_small`.
        ValueError: it is no JSON.
    """
    text = str(given)
    if not text.lstrip().startswith("{"):
        text = read_small(Path(text).expanduser())
    return json.loads(text)


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
