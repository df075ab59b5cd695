"""A calibration as one small file of JSON, and which file to take for a GPU.

A calibration comes from other people's machines, so nothing in it is believed before it was
checked: the size of the file, finite numbers within limits, printable text.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.estimation.calibration import (
    FACTS,
    KIND,
    LEVEL,
    METRICS,
    SCALES,
    SCHEMA_VERSION,
    Band,
    Calibration,
    CrossValidation,
    MeasuredOn,
    ProcessPart,
    Provenance,
    same_gpu,
)
from memest.files.texts import write_text

__all__ = [
    "MAX_TEXT",
    "ChosenCalibration",
    "calibrations_for",
    "read_calibration",
    "write_calibration",
]

MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 1 << 50
MAX_FACTOR = 100.0
MAX_ITEMS = 1000
MAX_TEXT = 300


def write_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration; whoever reads the file sees all of it or the old one.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    # what cannot be read back is not written
    text = json.dumps(calibration.to_dict(), indent=2, allow_nan=False) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    except OSError as error:
        raise ConfigError(
            f"The calibration {target} cannot be written ({error.strerror or error}): give "
            "a folder that you may write to."
        ) from None


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration.

    Raises:
        ConfigError: there is none, or it is not what it should be; the message says what to do.
    """
    label = str(path) if str(path).isprintable() else repr(str(path))
    try:
        return _calibration(_Node(_document(Path(path), label), ""))
    except _Wrong as wrong:
        raise ConfigError(
            f"The calibration {label} cannot be used: {wrong}. Fit it anew with `memest "
            "calibrate fit`, or leave it out to get the uncalibrated estimate."
        ) from None


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    """What is wrong with a document, in words."""


def _document(path: Path, label: str) -> Any:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        raw = b""
        if is_file:  # a pipe would be waited for
            with path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The calibration {label} cannot be read ({why}): name a file that `memest "
            "calibrate fit` wrote."
        ) from None
    if not is_file:
        raise ConfigError(f"The calibration {label} is not a file: name its .json.")
    if len(raw) > MAX_FILE_BYTES:
        raise _Wrong(f"it is larger than {MAX_FILE_BYTES:,} bytes, which no profile is")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise _Wrong("it is nested too deep to be a profile") from None
    except UnicodeDecodeError as error:
        raise _Wrong(f"it is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"it is not JSON ({error.msg}, line {error.lineno})") from None
    except ValueError as error:  # a number of thousands of digits
        raise _Wrong(f"it has a number that is none of a profile ({error})") from None


def _no_constant(name: str) -> Any:
    raise _Wrong(f"it contains {name}, and every number must be finite")


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the document and the way to it, for messages."""

    value: Any
    path: str

    def at(self, name: str) -> _Node:
        document = self.object()
        path = f"{self.path}.{name}" if self.path else name
        if name not in document:
            raise _Wrong(f"{path} is missing")
        return _Node(document[name], path)

    def maybe(self, name: str) -> _Node | None:
        """A member that may be missing or null."""
        return None if self.object().get(name) is None else self.at(name)

    def wrong(self, legal: str) -> _Wrong:
        value = self.value
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
            text = f"a number of {value.bit_length()} bits"
        else:
            text = ascii(value)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        return _Wrong(f"{self.path or 'the document'} is {text}, and must be {legal}")

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict) or len(self.value) > MAX_ITEMS:
            raise self.wrong(f"an object of at most {MAX_ITEMS} members")
        return self.value

    def items(self) -> list[_Node]:
        if not isinstance(self.value, list) or len(self.value) > MAX_ITEMS:
            raise self.wrong(f"a list of at most {MAX_ITEMS} items")
        return [_Node(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)]

    def whole(self, low: int = 0, high: int = MAX_BYTES) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(f"a whole number from {low:,} to {high:,}")
        return value

    def number(self, low: float, high: float) -> float:
        value = self.value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or not math.isfinite(value):
            raise self.wrong(f"a finite number from {low:g} to {high:g}")
        return float(value)

    def text(self, empty: bool = True) -> str:
        value = self.value
        if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
            raise self.wrong(f"printable text of at most {MAX_TEXT} characters")
        if not value.strip() and not empty:
            raise self.wrong("text that is not empty")
        return value

    def one_of(self, legal: Sequence[str]) -> str:
        if self.value not in legal or not isinstance(self.value, str):
            raise self.wrong(f"one of {', '.join(legal)}")
        return self.value

    def version(self) -> tuple[int, int]:
        numbers = [item.whole(0, 100_000) for item in self.items()]
        if len(numbers) != 2:
            raise self.wrong("a pair of whole numbers, as [2, 13]")
        return numbers[0], numbers[1]

    def mapping(self, read: Callable[[_Node], Any]) -> dict[str, Any]:
        out = {}
        for name in self.object():
            key = _Node(name, f"a name in {self.path}").text(empty=False)
            out[key] = read(self.at(name))
        return out


def _texts(node: _Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items())


def _versions(node: _Node) -> tuple[tuple[int, int], ...]:
    return tuple(item.version() for item in node.items())


def _share(node: _Node) -> float:
    return node.number(0, 1)


def _error(node: _Node) -> float:
    return node.number(0, 1e6)


def _bound(node: _Node) -> float:
    return node.number(-float(MAX_BYTES), float(MAX_BYTES))


def _factor(node: _Node) -> float:
    return node.number(0, MAX_FACTOR)


def _name(node: _Node) -> str:
    return node.text(empty=False)


def _band(node: _Node) -> Band:
    band: Band = _read(Band, node)
    if band.low > band.high:
        raise node.at("low").wrong(f"at most band.high, {band.high:g}")
    if band.scale == "proportional" and not -MAX_FACTOR <= band.low <= band.high <= MAX_FACTOR:
        raise node.at("high").wrong(f"parts of the peak, at most {MAX_FACTOR:g} times it")
    return band


_BY_TYPE: dict[str, Callable[[_Node], Any]] = {
    "str": _Node.text,
    "int": _Node.whole,
    "float": _error,
    "tuple[int, int]": _Node.version,
    "tuple[str, ...]": _texts,
    "tuple[tuple[int, int], ...]": _versions,
    "tuple[ProcessPart, ...]": lambda node: tuple(_read(ProcessPart, i) for i in node.items()),
    "Mapping[str, int]": lambda node: node.mapping(_Node.whole),
    "Mapping[str, str]": lambda node: node.mapping(_Node.text),
    "Mapping[str, tuple[str, ...]]": lambda node: node.mapping(_texts),
    "Band": _band,
    "MeasuredOn": lambda node: _read(MeasuredOn, node),
    "CrossValidation": lambda node: _read(CrossValidation, node),
    "Provenance": lambda node: _read(Provenance, node),
}
"""What a value must be, by the type of its field; where it may be None it may also be missing."""
_BY_NAME: dict[tuple[type, str], Callable[[_Node], Any]] = {
    (Calibration, "tensors"): _name,
    (Calibration, "factors"): lambda node: node.mapping(_factor),
    (Calibration, "other_factor"): _factor,
    (Calibration, "gap_bytes"): lambda node: node.whole(-MAX_BYTES),
    (Calibration, "per_kernel_bytes"): lambda node: node.number(0, float(1 << 40)),
    (ProcessPart, "gpu"): _name,
    (ProcessPart, "low_bytes"): lambda node: node.whole(-MAX_BYTES, 0),
    (ProcessPart, "sm_count"): lambda node: node.whole(1, 1 << 20),
    (ProcessPart, "total_bytes"): lambda node: node.whole(1),
    (Band, "metric"): lambda node: node.one_of(METRICS),
    (Band, "scale"): lambda node: node.one_of(SCALES),
    (Band, "low"): _bound,
    (Band, "high"): _bound,
    (Band, "level"): lambda node: node.number(0, LEVEL),
    (Band, "draws"): lambda node: node.number(0, float(MAX_BYTES)),
    (CrossValidation, "coverage"): _share,
    (CrossValidation, "above"): _share,
}
"""The fields of which more is asked than their type says."""


def _read(kind: type[Any], node: _Node) -> Any:
    """An object of the document as what it is of, every field of it checked."""
    values = {}
    for each in fields(kind):
        type_name, optional, _ = str(each.type).partition(" | None")
        member = node.maybe(each.name) if optional else node.at(each.name)
        read = _BY_NAME.get((kind, each.name)) or _BY_TYPE[type_name]
        values[each.name] = None if member is None else read(member)
    return kind(**values)


def _calibration(top: _Node) -> Calibration:
    top.object()
    if top.at("kind").value != KIND:
        raise top.at("kind").wrong(repr(KIND))
    if top.at("schema_version").value != SCHEMA_VERSION or top.at("schema_version").value is True:
        raise top.at("schema_version").wrong(f"{SCHEMA_VERSION}, the version this memest reads")
    calibration: Calibration = _read(Calibration, top)
    measured = calibration.measured
    seen = {fact: measured.seen[fact] for fact in FACTS if fact in measured.seen}
    return replace(calibration, measured=replace(measured, seen=seen))


# -- which one ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChosenCalibration:
    """A calibration, where it is from, and what to say of its choice.

    Attributes:
        calibration: its content.
        path: its file.
        notes: files that were passed over, and why.
    """

    calibration: Calibration
    path: Path
    notes: tuple[str, ...] = ()


def calibrations_for(
    gpu: str,
    folders: Sequence[str | os.PathLike[str]],
    like: tuple[tuple[int, int] | str | None, int | None, int | None] | None = None,
) -> ChosenCalibration | None:
    """Which calibration of some folders to take for a GPU.

    Of those that were measured on it, one of the first folder; there, the one with most runs on
    it, then the one measured last. Where there is none, the one measured on the GPU most like it,
    of the same compute capability: contexts and kernels of others differ by more than their range.

    Args:
        gpu: name as the driver prints it, or ``cpu``.
        folders: their files ``*.json`` are looked at; folders that are not there are passed over.
        like: the GPU's compute capability, streaming multiprocessors and bytes of memory; None
            where no other GPU's calibration will do.
    """
    calibrations, notes = _calibrations_in(folders)
    candidates: list[tuple[tuple[int, int, str], Path, Calibration]] = []
    for place, file, calibration in calibrations:
        part, origin = calibration.part_of(gpu), calibration.provenance
        if part is None and not any(same_gpu(gpu, other) for other in origin.gpus):
            continue
        cases = part.cases if part is not None else calibration.validation.cases
        candidates.append(((-place, cases, origin.last), file, calibration))
    if candidates:
        _, path, match = max(candidates, key=lambda item: item[0])  # the first one of equals
        return ChosenCalibration(match, path, notes)
    if like is None:
        return None
    neighbours = [
        (part.distance(*like), file, calibration)
        for _, file, calibration in calibrations
        for part in calibration.process
        if part.capability == like[0]
    ]
    if not neighbours:
        return None
    _, path, match = min(neighbours, key=lambda item: item[0])  # the first one of equals
    return ChosenCalibration(match, path, notes)


def _calibrations_in(
    folders: Sequence[str | os.PathLike[str]],
) -> tuple[list[tuple[int, Path, Calibration]], tuple[str, ...]]:
    """Calibrations with the place of their folder, and what to say of files that are none."""
    candidates: list[tuple[int, Path, Calibration]] = []
    notes = []
    for place, folder in enumerate(folders):
        try:
            files = sorted(f for f in Path(folder).iterdir() if f.suffix == ".json")
        except (OSError, ValueError):
            continue
        for file in files:
            try:
                candidates.append((place, file, _read_once(file)))
            except ConfigError as error:
                notes.append(f"passed over: {error}")
    return candidates, tuple(notes)


def _read_once(file: Path) -> Calibration:
    """One that is looked at for every card of a question is read again when it changes."""
    try:
        state = file.stat()
    except OSError:
        return read_calibration(file)  # which says what is wrong
    return _read_as_it_is(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _read_as_it_is(file: Path, _changed: int, _size: int) -> Calibration:
    return read_calibration(file)
