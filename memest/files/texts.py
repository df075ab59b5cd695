"""Files: those that answers are written to, whose suffix says what is written; small ones read."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from memest.errors import ConfigError, closest
from memest.files.whole import write_whole
from memest.units import MIB, format_size

__all__ = [
    "check_suffix",
    "check_target",
    "lfs_problem",
    "of_windows",
    "printable",
    "read_json",
    "read_mapping",
    "read_small",
    "write_as",
    "write_text",
]

_POINTS = b"version https://git-lfs"
_POINTER = (
    "a pointer of Git LFS, and the file that it stands for was not downloaded: run git lfs pull, "
    "then give it again"
)
_JOINERS = "\u200c\u200d"  # parts of emoji and of scripts, which Python does not call printable


def lfs_problem(path: Path, start: bytes) -> str:
    """What is wrong with a file that Git LFS has not fetched; empty for any other.

    Args:
        path: of the file.
        start: its first bytes.
    """
    if not start.startswith(_POINTS):
        return ""
    return f"{path} is {_POINTER}."


def printable(text: str) -> str:
    r"""A name that can be printed: line ends, control characters, broken text by their escapes.

    Example:
        >>> printable("größe\n\x1b[31m")
        'größe\\n\\x1b[31m'
    """
    return "".join(
        c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode() for c in text
    )


def of_windows(path: str | Path) -> bool:
    """Whether a path is one of Windows on a system where its backslashes part nothing."""
    text = str(path)
    return os.sep == "/" and "\\" in text and bool(PureWindowsPath(text).drive)


def check_suffix(path: Path, legal: Sequence[str]) -> str:
    """The suffix of a file to write, if it says what to write.

    Raises:
        ConfigError: for any other suffix.
    """
    suffix = path.suffix.lower()
    if suffix in legal:
        return suffix
    matches = closest(suffix, legal, limit=1)
    hint = f" Did you mean {path.with_suffix(matches[0])}?" if matches and path.stem else ""
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
    if of_windows(path):
        raise ConfigError(
            f"{path} is a path of Windows, and this system parts folders by /: name a file in a "
            "folder that exists."
        )
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"needs the folder {path.parent}"
        raise ConfigError(f"{path} {wrong}: name a file in a folder that exists.")
    return suffix


def write_as(path: str | Path, makers: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Write what the suffix of a file asks for, whole or not at all; an existing one is replaced.

    Args:
        path: where to.
        makers: what makes the content, by suffix.

    Raises:
        ConfigError: for any other suffix.
        OSError: it cannot be written; what was there is there still.
    """
    file = Path(path)
    content = makers[check_suffix(file, tuple(makers))]()
    if isinstance(content, bytes):
        write_whole(file, content)
    else:
        write_text(file, content)


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all.

    Names of files that are no text in UTF-8 may be in it: what has no encoding is escaped.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))


def read_json(source: str | Path) -> Any:
    """A document: the text of a JSON object itself, or what a file holds.

    Raises:
        OSError: the file cannot be read, see :func:`read_small`.
        ValueError: it is no JSON.
    """
    text = str(source)
    if not text.lstrip().startswith("{"):
        text = read_small(Path(text).expanduser())
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_small(path: Path, limit: int = 10 * MIB, *, utf_16: bool = False) -> str:
    """The text of a file that cannot be large.

    Args:
        path: of a regular file: a device or a pipe may have no end.
        limit: bytes that it may have.
        utf_16: it may be UTF-16 with its mark, which PowerShell writes behind ``>``.

    Raises:
        OSError: it cannot be read, is no regular file, is larger, or is a pointer of Git LFS.
        UnicodeDecodeError: it is not text.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file")
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {format_size(limit)}")
    if raw.startswith(_POINTS):
        raise OSError(errno.EINVAL, f"it is {_POINTER}")
    marked = utf_16 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return raw.decode("utf-16" if marked else "utf-8-sig")


def read_mapping(source: Any, option: str, *, takes: str, instead: str) -> dict[str, Any]:
    """The values of a mapping, of an object with ``to_dict``, of JSON, or of a file that holds it.

    Args:
        source: any of these.
        option: how messages call it.
        takes: what to give, said of anything else.
        instead: what to give, said where a file cannot be read.

    Raises:
        ConfigError: it is none of these, or holds no JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    as_dict = getattr(source, "to_dict", None)
    if callable(as_dict):
        mapping = as_dict()
        if isinstance(mapping, Mapping):
            return dict(mapping)
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"{option} is a {type(source).__name__}: {takes}.")
    try:
        values = read_json(source)
    except OSError as error:
        raise ConfigError(
            f"{option} {str(source)!r} cannot be read ({error.strerror}): {instead}."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {str(source)!r} is not text.") from None
    except ValueError as error:
        raise ConfigError(f"{option} {str(source)!r} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{option} {str(source)!r} holds no JSON object.")
    return values
