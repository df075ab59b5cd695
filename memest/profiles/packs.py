"""The step profiles that come with the package: few files, each of many documents.

A folder holds one file for each architecture and an index. A file is a row of xz streams, one for
each model: everything known of it, a document on each line, so ``xzcat qwen3.xz`` shows it all. The
runs of one model differ in little, which xz sees across documents: together they take a seventh of
what they take one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memest.profiles.cache import Document, Entry, Store

__all__ = ["Packs", "write_packs"]

_INDEX = "index.json"
_SUFFIX = ".xz"
_KEY, _MODEL, _STEPS = "key", "model", "steps"
"""Names of documents, or how they begin: a run's key, its model, families of its steps."""
_MARK = 8
"""Digits by which the index tells digests apart: a stream that is opened in vain does no harm."""
_DICTIONARY = 1 << 24
"""Bytes that xz looks back, which whoever reads must have room for: those of a model."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where the documents of one model are.

    Attributes:
        path: of the file.
        start: of the stream in it, in bytes.
        size: of the stream, in bytes.
    """

    path: Path
    start: int
    size: int


class Packs:
    """A folder of packed documents, to be read as a :class:`~memest.profiles.cache.Store` is.

    What is damaged or missing is not there: its questions are traced instead.

    Args:
        folder: of the files.
    """

    shipped = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._streams: dict[str, list[_Stream]] | None = None

    def read(self, digest: str, prefix: str) -> Iterator[Document]:
        """A key's documents whose names begin so, in order of name.

        Args:
            digest: of the key.
            prefix: of the names.
        """
        for stream in self._by_mark().get(digest[:_MARK], ()):
            lines = _lines_of(stream).get(digest, ())
            for name, about, body in lines:
                if name.startswith(prefix):
                    yield Document(name, json.loads(about), body)
            if lines:
                return  # others that share these say the same

    def forget(self, digest: str, name: str) -> None:
        """Nothing: what comes with the package stays as it is."""

    def entries(self) -> list[Entry]:
        """Everything there is, by digest."""
        found: dict[str, Entry] = {}
        for stream in dict.fromkeys(s for streams in self._by_mark().values() for s in streams):
            for digest, lines in _lines_of(stream).items():
                bodies = {name: body for name, _, body in lines}
                size = sum(map(len, bodies.values()))
                key = json.loads(bodies.pop(_KEY, b"{}"))
                found.setdefault(digest, Entry(digest, key, tuple(sorted(bodies)), size, 0.0))
        return [found[digest] for digest in sorted(found)]

    @property
    def models(self) -> tuple[str, ...]:
        """What was packed, by name; models that are alike have the same documents."""
        return tuple(
            sorted(each["model"] for streams in _index(self.folder).values() for each in streams)
        )

    def runs(self, model: str) -> Iterator[tuple[dict[str, Any], str, list[Document]]]:
        """The key of each run of a model that was packed, its task, and its families.

        Args:
            model: one of :attr:`models`.
        """
        for each, stream in self._parts():
            for lines in _lines_of(stream).values() if each["model"] == model else ():
                bodies = {name: body for name, _, body in lines}
                if _MODEL in bodies and _KEY in bodies:
                    families = [
                        Document(name, json.loads(about), body)
                        for name, about, body in lines
                        if name.startswith(_STEPS)
                    ]
                    (_, card), *_ = json.loads(bodies[_MODEL])["cards"]
                    yield json.loads(bodies[_KEY]), card["task"], families

    def unpack(self, model: str, store: Store) -> None:
        """Write all documents of a model into a store; packed again, they are the same bytes.

        Args:
            model: one of :attr:`models`; nothing is written for any other.
            store: to write to.
        """
        for each, stream in self._parts():
            for digest, lines in _lines_of(stream).items() if each["model"] == model else ():
                for name, about, body in lines:
                    store.write(digest, name, json.loads(body), about=json.loads(about))

    def _parts(self) -> Iterator[tuple[dict[str, Any], _Stream]]:
        """All streams, each with what the index says of it."""
        for file, streams in _index(self.folder).items():
            start = 0
            for each in streams:
                yield each, _Stream(self.folder / file, start, each["bytes"])
                start += each["bytes"]

    def _by_mark(self) -> Mapping[str, Sequence[_Stream]]:
        if self._streams is None:
            self._streams = {}
            for each, stream in self._parts():
                marks = each["digests"]
                for place in range(0, len(marks), _MARK):
                    self._streams.setdefault(marks[place : place + _MARK], []).append(stream)
        return self._streams


def _index(folder: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        files: dict[str, list[dict[str, Any]]] = json.loads((folder / _INDEX).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return files


@lru_cache(maxsize=4)
def _lines_of(stream: _Stream) -> dict[str, list[tuple[str, bytes, bytes]]]:
    """The documents of a stream: name, what is said of it, content; by digest."""
    try:
        import lzma
    except ImportError:
        return {}  # a Python that was built without
    try:
        with stream.path.open("rb") as file:
            file.seek(stream.start)
            text = lzma.decompress(file.read(stream.size))
    except (OSError, EOFError, lzma.LZMAError):
        return {}
    lines: dict[str, list[tuple[str, bytes, bytes]]] = {}
    for line in sorted(text.splitlines()):  # a key's documents by name
        digest, name, about, body = line.split(b"\t", 3)
        lines.setdefault(digest.decode(), []).append((name.decode(), about, body))
    return lines


def write_packs(folder: Path, models: Iterable[tuple[str, str, Store]]) -> None:
    """Pack what was traced of some models, in place of what was there of them.

    Args:
        folder: to write to.
        models: of each its architecture, its name, and where its documents are.
    """
    index = _index(folder)
    for architecture, model, store in models:
        file = f"{architecture}{_SUFFIX}"
        streams = {each["model"]: (each, data) for each, data in _parts_of(folder / file, index)}
        lines = list(_lines_to_pack(store))
        data = _compress(b"".join(lines))
        digests = dict.fromkeys(line.partition(b"\t")[0].decode() for line in lines)
        marks = "".join(digest[:_MARK] for digest in digests)
        streams[model] = {"model": model, "bytes": len(data), "digests": marks}, data
        in_order = [streams[name] for name in sorted(streams)]
        index[file] = [each for each, _ in in_order]
        (folder / file).write_bytes(b"".join(data for _, data in in_order))
        text = json.dumps({name: index[name] for name in sorted(index)}, indent=1)
        (folder / _INDEX).write_text(text + "\n", encoding="utf-8")


def _parts_of(
    path: Path, index: Mapping[str, Sequence[dict[str, Any]]]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The streams of a file, each with what the index says of it."""
    start = 0
    for each in index.get(path.name, ()):
        yield each, path.read_bytes()[start : start + each["bytes"]]
        start += each["bytes"]


def _compress(text: bytes) -> bytes:
    import lzma

    best = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": best, "dict_size": _DICTIONARY}]
    return lzma.compress(text, check=lzma.CHECK_CRC64, filters=filters)


def _lines_to_pack(store: Store) -> Iterator[bytes]:
    """Documents as lines; those that are like each other come together."""
    lines = []
    for entry in store.entries():
        for document in store.read(entry.digest, ""):  # the key is one of them
            values = (
                json.dumps(v, separators=(",", ":")) for v in (document.about, document.content)
            )
            line = "\t".join((entry.digest, document.name, *values)).encode() + b"\n"
            lines.append((document.name.partition("-")[0], len(line), line))
    return (line for *_, line in sorted(lines))
