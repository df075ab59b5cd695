"""Files written whole or not at all: every writer of memest goes through here.

The content goes to a part beside its place, which is then renamed: whoever looks sees the old file
or the new one, and a process that is killed in between leaves a part and nothing else. A part is
locked while somebody writes it, and the system lets go of the lock when its process ends, so what
the dead left is told from what the living write without asking a clock (``flock(2)``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_LOCKS: Any
try:
    import fcntl as _LOCKS  # noqa: N812 - it may be missing
except ImportError:  # Windows: there a part is told by its age
    _LOCKS = None

__all__ = ["PART_PREFIX", "PART_SUFFIX", "is_left_over", "stat_or_none", "sweep", "write_whole"]

PART_SUFFIX = ".part"
PART_PREFIX = ".memest-"
_ABANDONED_SECONDS = 3600  # seconds after which nobody is writing a part that carries no lock
_MAX_ATTEMPTS = 100
_READ_ONLY_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)  # a folder that takes no new files


def write_whole(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, durable: bool = True
) -> None:
    """Write a file whole or not at all; an existing one is replaced.

    Parts that killed processes left in the folder are removed on the way. Where the folder takes no
    new files, or the file is one that cannot be exchanged (a mount of this one file), it is
    written in place; so is what is no file at all, a pipe for example.

    Args:
        path: where to; a link leads to what is written. An existing file keeps its permissions.
        content: bytes, or what writes them piece by piece.
        durable: wait until the disk has the content: a machine that loses its power then keeps the
            old file or the new one, too.

    Raises:
        OSError: it cannot be written, with the path as its ``filename``; nothing is left behind.
    """
    write = content if callable(content) else lambda file: file.write(content)
    try:
        # a link is followed: renaming would put the file in its place
        target = Path(os.path.realpath(path))
        before = stat_or_none(target)
        if before is not None and not stat.S_ISREG(before.st_mode):
            with target.open("wb") as pipe:
                write(pipe)
            return
        sweep(target.parent)
        try:
            part, file = _new_part(target.parent)
        except OSError as error:
            if before is None or error.errno not in _READ_ONLY_ERRORS:
                raise
            _write_in_place(target, write)
            return
        _write_part(target, part, file, write, before, durable=durable)
    except OSError as error:
        # a full disk names no file, and nobody knows the part's name
        error.filename, error.filename2 = str(path), None
        raise


def sweep(folder: Path) -> None:
    """Remove the parts that killed processes left in a folder."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(PART_PREFIX) and entry.name.endswith(PART_SUFFIX):
                _remove_if_left_over(Path(entry.path))


def is_left_over(part: Path) -> bool:
    """Whether a part without a lock (an older release's) is older than any write lasts.

    A stamp from the future tells as little as one from long ago: the clock was set.
    """
    status = stat_or_none(part)
    return status is not None and abs(time.time() - status.st_mtime) > _ABANDONED_SECONDS


def _new_part(folder: Path) -> tuple[Path, BinaryIO]:
    """A new part, locked; the permissions are those that any new file gets."""
    for _ in range(_MAX_ATTEMPTS):
        # of fixed length: beside the longest name that the file system takes there is room, too
        part = folder / f"{PART_PREFIX}{os.urandom(8).hex()}{PART_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        handle = os.open(part, flags | getattr(os, "O_BINARY", 0), 0o666)
        if _take_lock(handle):
            return part, os.fdopen(handle, "wb")
        os.close(handle)  # somebody swept it away between its birth and its lock
    raise OSError(errno.EBUSY, "parts are swept away as soon as they are made")


def _take_lock(handle: int) -> bool:
    """Take the lock of a part that was just made; False if it is gone."""
    if _LOCKS is None:
        return True
    try:
        _LOCKS.flock(handle, _LOCKS.LOCK_EX | _LOCKS.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: parts there are told by their age
    return os.fstat(handle).st_nlink > 0


def _remove_if_left_over(part: Path) -> None:
    """Remove a part whose writer is gone."""
    with contextlib.suppress(OSError):
        if _LOCKS is None:
            if is_left_over(part):
                part.unlink()
            return
        handle = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            _LOCKS.flock(handle, _LOCKS.LOCK_EX | _LOCKS.LOCK_NB)
            # under the lock its name may be the finished file's by now: this one is not touched
            same = os.fstat(handle).st_ino == part.lstat().st_ino
            if same:
                part.unlink()
        except BlockingIOError:
            return
        except OSError:
            if is_left_over(part):
                part.unlink()
        finally:
            os.close(handle)


def _write_part(
    target: Path,
    part: Path,
    file: BinaryIO,
    write: Callable[[BinaryIO], object],
    before: os.stat_result | None,
    *,
    durable: bool,
) -> None:
    try:
        with file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if before is not None:
                with contextlib.suppress(OSError):
                    part.chmod(stat.S_IMODE(before.st_mode))
            if _LOCKS is not None:
                _move(part, target, before)
        if _LOCKS is None:  # Windows renames no open file
            _move(part, target, before)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _move(part: Path, target: Path, before: os.stat_result | None) -> None:
    try:
        part.replace(target)
    except OSError as error:
        if before is None or error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        with part.open("rb") as whole:
            _write_in_place(target, lambda file: shutil.copyfileobj(whole, file))
        part.unlink()


def _write_in_place(target: Path, write: Callable[[BinaryIO], object]) -> None:
    with target.open("r+b") as file:
        write(file)
        file.truncate()


def stat_or_none(path: Path) -> os.stat_result | None:
    """What a path is, None where it cannot be looked at."""
    try:
        return path.stat()
    except OSError:
        return None
