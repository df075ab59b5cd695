"""Case records: one measured figure of one run in a line of JSON, complete or not.

A record is scored only where it says everything that decides memory and whose value nobody could
know otherwise. What is missing is named, never filled in: who knows it declares it
(``--assume software.torch=2.1``), and the report says so.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from memest.errors import ConfigError, closest
from memest.files.texts import lfs_problem
from memest.units import MIB, format_size

__all__ = ["METRICS", "CaseRecord", "Incomplete", "Records", "parse_record", "read_records"]

METRICS = ("allocated", "reserved", "device", "forward")
"""Counters: bytes in tensors, bytes in segments, bytes of the process on the device; and bytes in
tensors when the first forward is done, which scripts print before the backward."""

_MOST_FILE = 2048 * MIB
_MOST_LINE = 16 * MIB
_MOST_BYTES = 1 << 50
_NEEDED_SETUP = (
    ("batch",),
    ("precision", "dtype", "fp16", "bf16"),
    ("optim",),
    ("checkpointing",),
)
"""What decides memory and has no value that could be taken for granted; one name of each."""
_SPELLINGS = {
    "batch": ("per_device_train_batch_size", "micro_batch"),
    "checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
    "optim": ("optimizer",),
    "seq_len": ("sequence_length", "max_seq_length"),
}
_LENGTH = re.compile(r"\[.*\bS\b")
"""An input whose shape has the length in it."""
_SIZES = ("seq_len", "image_size", "audio_seconds")
_NEEDED_SOFTWARE = ("torch", "transformers")
_DEFAULTS = ("grad_accum", "dtype", "attn_implementation", "zero_grad", "loop")
"""Options whose defaults are those of the software; where a record is silent they are taken, and
the report counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """A measured figure and the run that it is of.

    Attributes:
        id: its name; unique in what is read together.
        group: the file that it is from, or what the record names as its ``set``.
        model: anything ``memest estimate`` takes.
        setup: options by the names of the command line, without software; sizes that are a range
            are left out.
        software: versions by package.
        gpu: name of the GPU.
        metric: ``allocated``, ``reserved``, ``device`` or ``forward``.
        measured_bytes: the figure less what is not this run's; None for a run that failed before
            anything was read.
        source: where it is from.
        notes: what else was said.
        context_bytes: context that was read on that very GPU, None where it was not.
        limit_bytes: what the allocator could have, None for what the GPU has.
        oom: whether the run went out of memory; the figure is then how far it came.
        lengths: (shortest, longest) where sequences differ from batch to batch and only their
            bounds are known; then the prediction is a range too.
        taken: options that the record does not name and whose defaults are taken.
        declared: what was declared for it from outside, as written.
        inputs: what the script feeds the model, where it is not what its head is fed by itself:
            specifications as ``--input`` takes them.
        loss: of the script, where it is not the model's own: a name as ``--loss`` takes it.
        step: of the script, as ``--step`` takes it, where loss and forward are its own.
        model_args: arguments of a factory.
        code: folder whose modules the factory, loss and step are found in besides; empty for none.
        rounding_bytes: what one unit of the last printed digit is: the true figure lies within
            half of it, and no prediction in there is wrong. 0 for a figure to the byte.
    """

    id: str
    group: str
    model: str
    setup: Mapping[str, Any]
    software: Mapping[str, str]
    gpu: str
    metric: str
    measured_bytes: int | None
    source: str = ""
    notes: str = ""
    context_bytes: int | None = None
    limit_bytes: int | None = None
    oom: bool = False
    lengths: tuple[int, int] | None = None
    taken: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    loss: str | None = None
    step: str | None = None
    model_args: tuple[tuple[str, Any], ...] = ()
    code: str = ""
    rounding_bytes: int = 0

    @property
    def named_code(self) -> tuple[str, ...]:
        """Functions that the record names by their modules: model, step and loss."""
        references = (self.model, self.step, self.loss)
        return tuple(name for name in references if name and ":" in name)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A record that cannot be scored, and what it lacks.

    Attributes:
        id: its name, or the line it stands in.
        missing: names of fields, as a record would have them.
        group: the file that it is from, or what it names as its ``set``.
        why: what else the record says of it.
    """

    id: str
    missing: tuple[str, ...]
    group: str = ""
    why: str = ""


@dataclass(slots=True)
class Records:
    """What was read.

    Attributes:
        complete: records to score.
        incomplete: those that lack something.
        problems: lines that are no records: where, and what is wrong.
        without_figure: ids of runs that failed before anything was read, with their status.
    """

    complete: list[CaseRecord] = field(default_factory=list)
    incomplete: list[Incomplete] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_figure: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Lines that were looked at."""
        return (
            len(self.complete)
            + len(self.incomplete)
            + len(self.without_figure)
            + len(self.problems)
        )


class _NoRecordError(Exception):
    """A line that is no record."""


def read_records(
    paths: Iterable[str | Path], assume: Mapping[str, Any] | None = None, only: str = ""
) -> Records:
    """Read case records; ids that come again are taken once, from the first file.

    Args:
        paths: JSON lines, gzip where the name ends in ``.gz``.
        assume: fields that are declared for every record that lacks them, by their path
            (``software.torch``, ``setup.seq_len``, ``gpu``).
        only: take those alone whose id, model, GPU, group or optimizer contains this.

    Raises:
        ConfigError: a file cannot be read, or what is declared is no field.
    """
    records, ids = Records(), set()
    declarations = _declarations(assume or {})
    for path in map(Path, paths):
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                document = _beside(_document(line), path.parent)
                one = parse_record(document, where, path.name.partition(".")[0], declarations)
            except _NoRecordError as error:
                records.problems.append(f"{where}: {error}")
                continue
            if one is None or one.id in ids:
                continue
            if only and only.lower() not in _words_of(one):
                continue
            ids.add(one.id)
            if isinstance(one, Incomplete):
                records.incomplete.append(one)
            elif one.measured_bytes is None:
                records.without_figure[one.id] = one.notes
            else:
                records.complete.append(one)
    return records


def parse_record(
    document: Mapping[str, Any],
    where: str,
    group: str,
    declarations: Mapping[str, Any] | None = None,
) -> CaseRecord | Incomplete:
    """One record.

    Args:
        document: as JSON has it.
        where: names it where it has no id.
        group: it is part of, where it names none itself.
        declarations: see :func:`read_records`.

    Raises:
        _NoRecordError: a value cannot be what it says it is.
    """
    document, used = _with(document, declarations or {})
    name = str(document.get("id") or where)
    setup = _mapping(document, "setup")
    software = {k: str(v) for k, v in _mapping(document, "software").items() if v}
    lengths = _lengths(document.get("seq_len_range"))
    missing = list(_missing(document, setup, software, lengths))
    if missing:
        notes = str(document.get("notes", ""))
        return Incomplete(name, tuple(missing), str(document.get("set") or group), notes)
    metric = document["metric"]
    if metric not in METRICS:
        near = closest(str(metric), METRICS, limit=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise _NoRecordError(f"metric is {metric!r}{hint}: it must be one of {', '.join(METRICS)}")
    oom = bool(document.get("oom")) or document.get("status") == "oom"
    measured = _bytes(document, "measured_bytes")
    if measured is not None:
        measured -= _bytes(document, "device_offset_bytes") or 0
        if measured <= 0:
            raise _NoRecordError("nothing is left of measured_bytes without device_offset_bytes")
    options = {k: v for k, v in setup.items() if not (v is None and k in _SIZES)}
    options.setdefault("task", document.get("task") or "auto")
    return CaseRecord(
        id=name,
        group=str(document.get("set") or group),
        model=str(document["model"]),
        setup=options,
        software=software,
        gpu=str(document["gpu"]),
        metric=metric,
        measured_bytes=measured,
        source=str(document.get("source", "")),
        notes=str(document.get("notes", "") if measured else document.get("status", "failed")),
        context_bytes=_bytes(document, "device_context_bytes"),
        limit_bytes=_bytes(document, "limit_bytes"),
        oom=oom,
        lengths=lengths,
        taken=tuple(name for name in _DEFAULTS if name not in setup),
        declared=used,
        inputs=_texts(document, "inputs"),
        loss=None if document.get("loss") is None else str(document["loss"]),
        step=None if document.get("step") is None else str(document["step"]),
        model_args=tuple(_mapping(document, "model_args").items()),
        code=str(document.get("code", "")),
        rounding_bytes=_bytes(document, "rounding_bytes") or 0,
    )


# -- what a record must say -----------------------------------------------------------------------


def _missing(
    document: Mapping[str, Any],
    setup: Mapping[str, Any],
    software: Mapping[str, str],
    lengths: tuple[int, int] | None,
) -> Iterator[str]:
    for name in ("model", "gpu", "metric"):
        if not document.get(name):
            yield name
    failed = document.get("oom") or document.get("status", "ok") != "ok"
    if document.get("measured_bytes") is None and not failed:
        yield "measured_bytes"
    for names in _NEEDED_SETUP:
        if not any(_has_option(setup, name) for name in names):
            yield f"setup.{names[0]}"
    # a model of images or sound has its size in its config; a record that names neither is of text
    if (
        lengths is None
        and not any(_has_option(setup, name) for name in _SIZES)
        and not _has_size(document)
    ):
        yield "setup.seq_len"
    own = _own_code(document)
    for name in _NEEDED_SOFTWARE:
        if name not in software and not (own and name == "transformers"):
            yield f"software.{name}"


def _has_option(setup: Mapping[str, Any], name: str) -> bool:
    return any(setup.get(one) is not None for one in (name, *_SPELLINGS.get(name, ())))


def _has_size(document: Mapping[str, Any]) -> bool:
    """Whether the model's own config, or what its script feeds, says how large a sample is."""
    if _own_code(document):
        inputs = _texts(document, "inputs")
        return bool(inputs) and not any(_LENGTH.search(text) for text in inputs)
    task = str(document.get("task", ""))
    return task.startswith(("image", "audio", "object", "semantic", "depth", "zero-shot-image"))


def _own_code(document: Mapping[str, Any]) -> bool:
    """Whether the model is a factory: its code is no library's."""
    return ":" in str(document.get("model") or "")


def _lengths(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(v) is int for v in value)
        and 1 <= value[0] <= value[1]
    ):
        return value[0], value[1]
    raise _NoRecordError(f"seq_len_range is {value!r}: write [shortest, longest]")


def _bytes(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _NoRecordError(f"{name} is {value!r}: write a number of bytes")
    if not 0 <= value <= _MOST_BYTES or value != int(value):
        raise _NoRecordError(f"{name} is {value!r}: write whole bytes, up to {_MOST_BYTES:,}")
    return int(value)


def _texts(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = document.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _NoRecordError(f"{name} is {value!r:.60}: write a list of texts")
    return tuple(value)


def _mapping(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _NoRecordError(f"{name} is {value!r:.60}: write an object")
    return value


# -- what is declared from outside ----------------------------------------------------------------


def _declarations(assume: Mapping[str, Any]) -> dict[str, Any]:
    """Declared fields, if they are fields."""
    for path in assume:
        head, dot, rest = path.partition(".")
        legal = ("setup", "software", "gpu", "task", "metric")
        if head not in legal or (head in ("setup", "software")) != bool(dot and rest):
            near = closest(
                path, ("software.torch", "software.transformers", "setup.seq_len", "gpu")
            )
            raise ConfigError(
                f"--assume {path}: no field of a record can be declared by that name. Write "
                f"{' or '.join(near[:1]) or 'software.torch'}=VALUE, setup.OPTION=VALUE, gpu=NAME "
                "or task=NAME."
            )
    return dict(assume)


def _with(
    document: Mapping[str, Any], declarations: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A record with what was declared where it is silent, and what of it was used."""
    whole, used = dict(document), []
    for path, value in declarations.items():
        head, _, rest = path.partition(".")
        if not rest:
            if not whole.get(head):
                whole[head] = value
                used.append(f"{path}={value}")
            continue
        inner = _mapping(whole, head)
        if not _has_option(inner, rest):
            whole[head] = {**inner, rest: value}
            used.append(f"{path}={value}")
    return whole, tuple(used)


# -- files ----------------------------------------------------------------------------------------


def _words_of(one: CaseRecord | Incomplete) -> str:
    if isinstance(one, Incomplete):
        return one.id.lower()
    return f"{one.id} {one.model} {one.gpu} {one.group} {one.setup.get('optim', '')}".lower()


def _beside(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record with its model as a path, where it names what lies beside the file.

    That is a folder, a config, or ``models/file.py:factory``, whose folder is then looked in.
    """
    document.pop("code", None)  # a folder of this machine is for no record to name
    model = document.get("model")
    if isinstance(model, str) and model.startswith("models/") and ".." not in model:
        path, colon, name = model.partition(":")
        place = folder / path
        if colon and place.suffix == ".py" and place.is_file():
            code = str(place.parent.resolve())
            return {**document, "model": f"{place.stem}:{name}", "code": code}
        if place.exists():
            return {**document, "model": str(place)}
    return document


def _document(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON ({error})"
        raise _NoRecordError(reason) from None
    if not isinstance(document, dict):
        raise _NoRecordError("no JSON object")
    return document


def _check_text(path: Path, line: bytes) -> None:
    """Refuse in one sentence what has no line that could be a record."""
    if problem := lfs_problem(path, line):
        raise ConfigError(problem)
    try:
        is_text = "\0" not in line.decode()
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ConfigError(
            f"{path} is not text: case records are JSON, one object a line (memest calibrate run "
            "and MemestCallback write them)."
        )


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, in limits also when unpacked."""
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise ConfigError(
                f"{path} {what}: name a file of case records, one JSON object a line."
            )
        with cast("BinaryIO", (gzip.open if path.suffix == ".gz" else open)(path, "rb")) as file:
            read = 0
            while line := file.readline(_MOST_LINE + 1):
                if not read:
                    _check_text(path, line)
                read += len(line)
                if len(line) > _MOST_LINE or read > _MOST_FILE:
                    most, what = (
                        (_MOST_LINE, "a line") if len(line) > _MOST_LINE else (_MOST_FILE, "it")
                    )
                    raise ConfigError(f"{path}: {what} is larger than {format_size(most)}.")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read: {why}.") from None
