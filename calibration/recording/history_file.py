"""The file that keeps the allocator's history of one run.

It is gzip of JSON lines: a header, tables, blocks of events, and the segments at the end. What
repeats is written once: sizes, places of segments and Python frames are tables; a free names the
allocation that dies by its age, the number of allocations made since, and needs neither address nor
size. Within a block each kind of number has a column of its own, which is what gzip likes best.

Letters stand for actions, as the tables say; ``f`` stands for two, a free that is requested and
completed at once. A column has one number for each letter that needs one:

===========  =======================================================================
column       for each
===========  =======================================================================
``ages``     free: 1 for the youngest allocation; 0 for one that is written out
``sizes``    event written out: index of its size
``bases``    the same: index of the place that its address counts from
``offsets``  the same: from there, in units
``streams``  the same: index of its stream; left out where all are the first
``frames``   allocation and OOM: index of its frame + 1, 0 for none
===========  =======================================================================
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memest.calibration.recording.recorded import History, HistoryMark, RecordedDevice
from memest.errors import ConfigError
from memest.files.whole import write_whole
from memest.replay.conf import AllocatorConf
from memest.replay.snapshot import RecordedBlock, RecordedSegment, TraceEvent

__all__ = ["MAX_DEVICES", "read_history", "write_history"]

FORMAT, SCHEMA_VERSION = "memest allocator history", 1
MAX_FILE_BYTES, MAX_TEXT_BYTES = 64 << 20, 512 << 20
MAX_EVENTS, MAX_DEVICES, MAX_NUMBER = 8_000_000, 64, 1 << 63
_BLOCK = 4096  # letters of a block
_UNIT = 512  # every address the allocator hands out is a multiple
_FREE_ACTIONS = ("free_requested", "free_completed")
_LETTERS: dict[str, tuple[str, ...]] = {
    "a": ("alloc",),
    "f": _FREE_ACTIONS,
    "r": _FREE_ACTIONS[:1],
    "c": _FREE_ACTIONS[1:],
    "s": ("segment_alloc",),
    "x": ("segment_free",),
    "m": ("segment_map",),
    "u": ("segment_unmap",),
    "o": ("oom",),
    "n": ("snapshot",),
}
_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # for actions of releases to come
_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")


# -- writing --------------------------------------------------------------------------------------


class _Table:
    """Values in the order in which they first appear."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))


def write_history(path: str | Path, history: History) -> None:
    """Write a history; equal histories give equal files.

    Args:
        path: ends with ``.jsonl.gz`` by convention.
        history: what to write.
    """
    lines = (json.dumps(line, separators=(",", ":"), sort_keys=True) for line in _lines(history))
    content = "".join(line + "\n" for line in lines).encode()
    write_whole(Path(path), gzip.compress(content, compresslevel=9, mtime=0))


def _lines(history: History) -> Iterator[dict[str, Any]]:
    writer = _Writer(history)
    blocks = list(writer.blocks())
    yield {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "run": history.run,
        "case": dict(history.case),
        "device": {k: v for k, v in asdict(history.device).items() if v is not None},
        "settings": dict(history.settings),
        "conf": asdict(history.conf),
        "complete": history.complete,
        "lost": history.lost,
        "events": len(history.events),
        "marks": [[m.position, m.phase, m.step, m.micro_step] for m in history.marks],
        "tables": "next line",
    }
    segments = [_segment_row(segment, writer) for segment in history.segments]
    yield {
        "actions": {letter: list(actions) for letter, actions in writer.letters.items()},
        "bases": writer.bases,
        "frames": list(history.frames),
        "sizes": list(writer.sizes.index),
        "streams": list(writer.streams.index),
        "unit": writer.unit,
    }
    yield from blocks
    yield {"segments": segments}


class _Writer:
    def __init__(self, history: History) -> None:
        self.history = history
        self.bases = sorted(
            {event.address for event in history.events if event.action.startswith("segment_")}
            | {segment.address for segment in history.segments}
            | {0}  # what lies in no known segment
        )
        self.sizes, self.streams = _Table(), _Table()
        self.letters = dict(_LETTERS)
        self.letter_of = {actions: letter for letter, actions in _LETTERS.items()}
        self.unit = _UNIT

    def blocks(self) -> Iterator[dict[str, Any]]:
        """The events in blocks."""
        history = self.history
        if any(self._offset(event.address)[1] % _UNIT for event in history.events):
            self.unit = 1  # not an address of this allocator: keep it as it is
        block = _empty_block()
        alive: dict[int, tuple[int, int, int]] = {}
        births = index = 0
        events = history.events
        while index < len(events):
            event = events[index]
            letter, length = self._letter(events, index)
            block["actions"].append(letter)
            if event.action in _FREE_ACTIONS:
                birth = alive.get(event.address)
                birth_known = birth is not None and birth[1:] == (event.size, event.stream)
                block["ages"].append(births - birth[0] if birth_known and birth else 0)
                if letter != "r":
                    alive.pop(event.address, None)
            else:
                birth_known = False
            if not birth_known:
                self._write_out(block, event)
            if event.action == "alloc":
                alive[event.address] = (births, event.size, event.stream)
                births += 1
            if event.action in ("alloc", "oom"):
                block["frames"].append(history.sites[index] + 1)
            index += length
            if len(block["actions"]) == _BLOCK:
                yield _block_line(block)
                block = _empty_block()
        if block["actions"]:
            yield _block_line(block)

    def place(self, address: int) -> tuple[int, int]:
        """Base and offset of an address in units."""
        base, offset = self._offset(address)
        return base, offset // self.unit

    def _offset(self, address: int) -> tuple[int, int]:
        base = bisect_right(self.bases, address) - 1
        return base, address - self.bases[base]

    def _letter(self, events: Sequence[TraceEvent], index: int) -> tuple[str, int]:
        event = events[index]
        if event.action == _FREE_ACTIONS[0] and index + 1 < len(events):
            following = events[index + 1]
            if following.action == _FREE_ACTIONS[1] and following[1:] == event[1:]:
                return "f", 2
        letter = self.letter_of.get((event.action,))
        if letter is None:
            if len(self.letter_of) == len(_LETTERS) + len(_SPARE):
                raise ConfigError(f"more kinds of events than a history can hold: {event.action!r}")
            letter = _SPARE[len(self.letter_of) - len(_LETTERS)]
            self.letters[letter] = (event.action,)
            self.letter_of[event.action,] = letter
        return letter, 1

    def _write_out(self, block: dict[str, list[Any]], event: TraceEvent) -> None:
        base, offset = self.place(event.address)
        block["bases"].append(base)
        block["offsets"].append(offset)
        block["sizes"].append(self.sizes(event.size))
        block["streams"].append(self.streams(event.stream))


def _empty_block() -> dict[str, list[Any]]:
    names = ("actions", "ages", "sizes", "bases", "offsets", "streams", "frames")
    return {name: [] for name in names}


def _block_line(block: dict[str, list[Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {name: column for name, column in block.items() if any(column)}
    out["actions"] = "".join(block["actions"])
    return out


def _segment_row(segment: RecordedSegment, writer: _Writer) -> list[Any]:
    blocks, at = [], segment.address
    for block in segment.blocks:
        state = _STATES.index(block.state) if block.state in _STATES else block.state
        row = [writer.sizes(block.size), writer.sizes(block.requested), state]
        # blocks follow each other, as a rule without exception
        blocks.append(row if block.address == at else [*row, block.address])
        at = block.address + block.size
    return [
        segment.device,
        segment.address,
        segment.size,
        segment.stream,
        int(segment.small),
        int(segment.expandable),
        list(segment.pool),
        blocks,
    ]


# -- reading --------------------------------------------------------------------------------------


def read_history(path: str | Path) -> History:
    """Read what :func:`write_history` wrote; nothing in the file is run.

    Raises:
        ConfigError: it cannot be read, is too large, or is no history; the message says which.
    """
    path = Path(path)
    text = _text(path)
    try:
        lines = text.split(b"\n")
        header = _object(lines[0], "the header")
        if header.get("format") != FORMAT:
            raise ValueError("its first line is not the header of one")  # noqa: TRY301
        if header.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(  # noqa: TRY301
                f"it has schema version {header.get('schema_version')!r}, and this release reads "
                f"{SCHEMA_VERSION}"
            )
        rest = [_object(line, f"line {i}") for i, line in enumerate(lines[1:], 2) if line]
        return _history(header, rest, path.name.partition(".")[0])
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is not a history of allocations: {reason}.") from None


def _text(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: not read.")
        with gzip.open(path, "rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read as a history of allocations: {reason}.") from None
    if len(text) > MAX_TEXT_BYTES:
        raise ConfigError(f"{path} unpacks to more than {MAX_TEXT_BYTES >> 20} MiB: not read.")
    return text


def _object(line: bytes, what: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError(f"{what} is a {type(value).__name__}, not an object")
    return value


def _history(header: Mapping[str, Any], lines: list[dict[str, Any]], name: str) -> History:
    if len(lines) < 2:
        raise ValueError("it ends after its header")
    count = _number(header["events"], MAX_EVENTS + 1)
    tables = _Tables(lines[0])
    events: list[TraceEvent] = []
    sites = array("l")
    reader = _Reader(tables, events, sites, count)
    for block in lines[1:-1]:
        reader.read(block)
    if len(events) != count:
        raise ValueError(f"it has {len(events)} events, and its header says {count}")
    conf = dict(header["conf"])
    conf["roundup_power2_divisions"] = tuple(conf["roundup_power2_divisions"])
    return History(
        events=tuple(events),
        sites=sites,
        frames=tables.frames,
        marks=tuple(_mark(row, count) for row in header["marks"]),
        segments=tuple(_segment(row, tables) for row in lines[-1]["segments"]),
        conf=AllocatorConf(**conf),
        settings=_mapping(header["settings"]),
        device=_device(_mapping(header["device"])),
        lost=_number(header["lost"]),
        complete=header["complete"] is True,
        run=_string(header["run"]) or name,
        case=_mapping(header["case"]),
    )


class _Tables:
    def __init__(self, line: Mapping[str, Any]) -> None:
        self.sizes = [_number(value) for value in line["sizes"]]
        self.bases = [_number(value) for value in line["bases"]]
        self.streams = [_number(value) for value in line["streams"]]
        self.frames = tuple(_string(value) for value in line["frames"])
        self.unit = _number(line["unit"])
        self.actions = {
            _string(letter): tuple(_string(action) for action in actions)
            for letter, actions in line["actions"].items()
        }
        if any(not 1 <= len(actions) <= len(_FREE_ACTIONS) for actions in self.actions.values()):
            raise ValueError("a letter stands for one action, or for two")


class _Reader:
    """Takes blocks apart; ``births`` are the allocations made so far."""

    def __init__(
        self, tables: _Tables, events: list[TraceEvent], sites: array[int], limit: int
    ) -> None:
        self.tables = tables
        self.events = events
        self.sites = sites
        self.limit = limit
        self.births: list[TraceEvent] = []

    def read(self, block: Mapping[str, Any]) -> None:
        """Append the events of one block."""
        tables, births = self.tables, self.births
        next_age, next_size = _column(block, "ages"), _column(block, "sizes")
        next_base, next_offset = _column(block, "bases"), _column(block, "offsets")
        next_stream, next_frame = _column(block, "streams"), _column(block, "frames")
        for letter in _string(block["actions"]):
            actions = tables.actions[letter]
            action, site = actions[0], -1
            age = next_age() if action in _FREE_ACTIONS else 0
            if age:
                if age > len(births):
                    raise ValueError("a free names an allocation before the first one")
                _, address, size, stream = births[-age]
            else:
                address = tables.bases[next_base()] + next_offset() * tables.unit
                size, stream = tables.sizes[next_size()], tables.streams[next_stream()]
            if action in ("alloc", "oom"):
                site = next_frame() - 1
                if site >= len(tables.frames):
                    raise ValueError(f"frame {site} is not in its table")
            for each in actions:
                self.events.append(TraceEvent(each, address, size, stream))
                self.sites.append(site)
            if action == "alloc":
                births.append(self.events[-1])
            if len(self.events) > self.limit:
                raise ValueError(f"it has more events than its header says ({self.limit})")


def _column(block: Mapping[str, Any], name: str) -> Callable[[], int]:
    """Number after number of a column; one that is left out is all zeros."""
    if name not in block:
        return lambda: 0
    values = iter([_number(value) for value in block[name]])

    def following() -> int:
        value = next(values, None)
        if value is None:
            raise ValueError(f"a block has too few {name}")
        return value

    return following


def _device(values: dict[str, Any]) -> RecordedDevice:
    for name, value in values.items():
        if name == "capability":
            major, minor = value
            values[name] = (_number(major), _number(minor))
        elif name in ("name", "torch", "transformers", "cuda"):
            _string(value)
        else:
            _number(value, MAX_DEVICES if name == "index" else MAX_NUMBER)
    return RecordedDevice(**values)


def _mark(row: Sequence[Any], count: int) -> HistoryMark:
    position, phase, step, micro_step = row
    return HistoryMark(
        _number(position, count + 1), _string(phase), _number(step), _number(micro_step)
    )


def _segment(row: Sequence[Any], tables: _Tables) -> RecordedSegment:
    device, address, size, stream, small, expandable, pool, rows = row
    blocks, at = [], _number(address)
    for block in rows:
        at = _number(block[3]) if len(block) > 3 else at
        state = _STATES[_number(block[2])] if isinstance(block[2], int) else _string(block[2])
        requested = tables.sizes[_number(block[1])]
        blocks.append(RecordedBlock(at, tables.sizes[_number(block[0])], requested, state))
        at += blocks[-1].size
    first, second = pool
    return RecordedSegment(
        _number(device, MAX_DEVICES),
        _number(address),
        _number(size),
        _number(stream),
        bool(small),
        bool(expandable),
        (_number(first), _number(second)),
        tuple(blocks),
    )


def _number(value: Any, below: int = MAX_NUMBER) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(f"{value!r} stands where a whole number from 0 to {below - 1} is due")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} stands where a text is due")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} stands where an object is due")
    return value
