"""Step profiles on disk: a folder of small documents that many processes share.

Every document is one gzip file of two lines of JSON, a head and the content, named by what it is
and kept in a folder named by the digest of its key. It is written whole or not at all; it carries a
digest of its content, so what was cut short, changed or put there by others is not believed but
made anew. What another release wrote in a form of its own is left to it. The folder has a size
limit: what was used longest ago goes first.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.files.folders import platform_folder
from memest.files.whole import (
    PART_PREFIX,
    PART_SUFFIX,
    is_left_over,
    stat_or_none,
    sweep,
    write_whole,
)
from memest.units import MIB, parse_size

__all__ = [
    "STEPS_OF",
    "VERSION",
    "Document",
    "Entry",
    "Store",
    "cache_folder",
    "digest_of",
    "size_limit",
    "take_unwritable_folders",
]

KIND = "memest step profile"
VERSION = 1
DEFAULT_LIMIT = 512 * MIB
_SUFFIX = ".json.gz"
_KEY = "key"
_MOST_UNPACKED = 256 * MIB
"""Bytes of one document; the largest that were seen have some 20 MiB."""
_CLOCK_SECONDS = 3600  # by which clocks of machines that share a folder may differ
_ALWAYS = ("kind", "of", "name", "sha256")
"""What the head of a document says in every form that documents had or will have."""
_UNWRITABLE_FOLDERS: dict[Path, str] = {}


def take_unwritable_folders() -> dict[Path, str]:
    """Folders that could not be written since this was asked last, and why not.

    No answer depends on it, so none carries it: those who face the user say it once.
    """
    documents = dict(_UNWRITABLE_FOLDERS)
    _UNWRITABLE_FOLDERS.clear()
    return documents


def cache_folder() -> Path | None:
    """Where step profiles are kept: ``MEMEST_CACHE``, else the platform's cache folder.

    None where there is no such folder: a process whose user has no home and that says of none.

    Raises:
        ConfigError: ``MEMEST_CACHE`` is below the home of somebody who is not known.
    """
    path = os.environ.get("MEMEST_CACHE")
    if path:
        try:
            return Path(path).expanduser()
        except RuntimeError:
            raise ConfigError(
                f"MEMEST_CACHE={path}: the home folder that it begins with is not known. Write "
                "the folder out."
            ) from None
    try:
        return platform_folder("cache")
    except RuntimeError:
        return None


def size_limit() -> int:
    """How many bytes the folder may hold: ``MEMEST_CACHE_LIMIT``, else 512 MiB.

    Raises:
        ConfigError: the variable is no size.
    """
    text = os.environ.get("MEMEST_CACHE_LIMIT")
    if not text:
        return DEFAULT_LIMIT
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"MEMEST_CACHE_LIMIT: {error}") from None


def digest_of(key: Any) -> str:
    """The name of a key: plain JSON values in, 32 hexadecimal digits out."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the store.

    Attributes:
        digest: name of its folder.
        key: what the documents are for; empty if it cannot be read.
        documents: their names.
        bytes: on disk.
        used: when it was last written or read, in seconds since 1970 by the clock of then.
    """

    digest: str
    key: dict[str, Any]
    documents: tuple[str, ...]
    bytes: int
    used: float


STEPS_OF = {"few": "steps-few", "all": "steps"}
"""How documents of steps are called: traced from few layers, or all."""


@dataclass(slots=True)
class Document:
    """A document that was found whole.

    Attributes:
        name: of it.
        about: what was said of it when it was written, to be read before the content.
    """

    name: str
    about: Any
    _body: bytes

    @property
    def content(self) -> Any:
        """The content: plain JSON values; None where its head vouches for what is no JSON."""
        try:
            return json.loads(self._body)
        except (ValueError, RecursionError):
            return None


class Store:
    """A folder of documents.

    Nothing that goes wrong here stops an estimate: a folder that cannot be written is not written.

    Args:
        folder: the cache folder, made when first written to; None keeps nothing.
        shipped: it comes with the package: it is not written to and nothing in it is dropped.
        writable: False only reads.
    """

    def __init__(
        self, folder: Path | None, *, shipped: bool = False, writable: bool | None = None
    ) -> None:
        self.folder = folder
        self.shipped = shipped
        self._read_only = shipped if writable is None else not writable

    def read(self, digest: str, prefix: str) -> Iterator[Document]:
        """A key's documents whose names begin so, in order of name.

        Args:
            digest: of the key.
            prefix: of the names.
        """
        if self.folder is None:
            return
        key_folder = self.folder / digest
        names = sorted(
            path.name
            for path in _files(key_folder)
            if path.name.startswith(prefix) and path.name.endswith(_SUFFIX)
        )
        for name in names:
            document = self._load(key_folder / name)
            if document is not None:
                yield document

    def write(
        self, digest: str, name: str, content: Any, key: Any = None, about: Any = None
    ) -> None:
        """Keep a document.

        Args:
            digest: of the key.
            name: of the document, letters, digits, ``-`` and ``_``.
            content: plain JSON values.
            key: kept beside it, for people to read.
            about: see :class:`Document`.
        """
        if self.folder is None or self._read_only:
            return
        key_folder = self.folder / digest
        try:
            key_folder.mkdir(parents=True, exist_ok=True)
            if key is not None and not (key_folder / f"{_KEY}{_SUFFIX}").exists():
                _write(key_folder / f"{_KEY}{_SUFFIX}", key, None)
            _write(key_folder / f"{name}{_SUFFIX}", content, about)
            self._prune(keep=digest)
        except OSError as error:
            _UNWRITABLE_FOLDERS.setdefault(self.folder, error.strerror or str(error))

    def forget(self, digest: str, name: str) -> None:
        """Drop a document that turned out to be none."""
        if self.folder is not None and not self._read_only:
            with contextlib.suppress(OSError):
                (self.folder / digest / f"{name}{_SUFFIX}").unlink()

    def entries(self) -> list[Entry]:
        """Everything that is kept, used last first."""
        entries = []
        for key_folder in self._key_folders():
            files = [f for f in _files(key_folder) if f.name.endswith(_SUFFIX)]
            if not files:
                continue
            stats = [s for f in files if (s := stat_or_none(f)) is not None]
            document = self._load(key_folder / f"{_KEY}{_SUFFIX}", used=False)
            key = None if document is None else document.content
            entries.append(
                Entry(
                    digest=key_folder.name,
                    key=key if isinstance(key, dict) else {},
                    documents=tuple(f.name for f in files if not f.name.startswith(f"{_KEY}.")),
                    bytes=sum(s.st_size for s in stats),
                    used=max((s.st_mtime for s in stats), default=0.0),
                )
            )
        return sorted(entries, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Drop everything; returns the bytes that were freed."""
        freed_bytes = 0
        for key_folder in self._key_folders():
            stats = map(stat_or_none, _files(key_folder))
            freed_bytes += sum(each.st_size for each in stats if each is not None)
            _remove(key_folder)
        return freed_bytes

    def _key_folders(self) -> list[Path]:
        """The folders of keys. Others that somebody put there are none of ours."""
        if self.folder is None:
            return []
        try:
            paths = sorted(self.folder.iterdir())
        except OSError:
            return []
        return [
            path
            for path in paths
            if len(path.name) == 32 and set(path.name) <= set("0123456789abcdef") and path.is_dir()
        ]

    def _load(self, path: Path, *, used: bool = True) -> Document | None:
        """A file's document; None, and the file gone, where it is not what it should be.

        Args:
            path: of the file.
            used: whether that counts as a use: looking at what there is does not.
        """
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        document = None
        try:
            head_line, _, body = _unpack(raw).partition(b"\n")
            head = json.loads(head_line)
            expected = head_of(path, body, head["about"])
            if head == expected:
                document = Document(head["name"], head["about"], body)
            elif all(head[name] == expected[name] for name in _ALWAYS):
                return None  # whole, in the form of another release, which may need it
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, RecursionError):
            document = None
        if not self._read_only:
            with contextlib.suppress(OSError):
                if document is None:
                    path.unlink()
                elif used:
                    os.utime(path)
        return document

    def _prune(self, keep: str) -> None:
        """Let go of what was used longest ago until the limit holds, of ``keep`` last of all."""
        limit = size_limit()
        if self._total() <= limit or self.folder is None:
            return
        for key_folder in self._key_folders():
            sweep(key_folder)
            for part in key_folder.glob(f".*{PART_SUFFIX}"):
                if not part.name.startswith(PART_PREFIX) and is_left_over(part):
                    part.unlink(missing_ok=True)
        total = self._total()
        self._mend_stamps()
        for entry in reversed(self.entries()):
            if total > limit and entry.digest != keep:
                _remove(self.folder / entry.digest)
                total -= entry.bytes
        files = _files(self.folder / keep)
        stats = [(s.st_mtime, s.st_size, f) for f in files if (s := stat_or_none(f))]
        for _, size, path in sorted(stats):
            if total > limit:
                path.unlink(missing_ok=True)
                total -= size

    def _mend_stamps(self) -> None:
        """Let what was used in the future, by a clock that was set since, count as used now."""
        now = time.time()
        for key_folder in self._key_folders():
            for file in _files(key_folder):
                status = stat_or_none(file)
                if status is not None and status.st_mtime > now + _CLOCK_SECONDS:
                    with contextlib.suppress(OSError):
                        os.utime(file, (now, now))

    def _total(self) -> int:
        sizes = (
            s.st_size
            for key_folder in self._key_folders()
            for f in _files(key_folder)
            if (s := stat_or_none(f))
        )
        return sum(sizes)


def _unpack(raw: bytes) -> bytes:
    """The content of a packed document, in limits: a few bytes may unpack to any number.

    Raises:
        ValueError: it is larger than any document.
    """
    with gzip.open(io.BytesIO(raw)) as file:
        text = file.read(_MOST_UNPACKED + 1)
    if len(text) > _MOST_UNPACKED:
        raise ValueError("larger than any document")
    return text


def _remove(key_folder: Path) -> None:
    """Drop a key's folder with what is in it; what cannot be dropped stays."""
    for file in _files(key_folder):
        with contextlib.suppress(OSError):
            file.unlink()
    with contextlib.suppress(OSError):
        key_folder.rmdir()


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def head_of(path: Path, body: bytes, about: Any) -> dict[str, Any]:
    """What the first line says: what the document is, where it belongs, what its content is."""
    return {
        "kind": KIND,
        "version": VERSION,
        "of": path.parent.name,
        "name": path.name.removesuffix(_SUFFIX),
        "about": about,
        "sha256": hashlib.sha256(body).hexdigest(),
    }


def _write(path: Path, content: Any, about: Any) -> None:
    body = json.dumps(content, separators=(",", ":")).encode()
    head = json.loads(json.dumps(head_of(path, body, about)))

    # no time stamp: the same document is the same file. What a power cut spoils is made anew
    file_bytes = gzip.compress(json.dumps(head).encode() + b"\n" + body, 6, mtime=0)
    write_whole(path, file_bytes, durable=False)
