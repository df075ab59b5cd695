"""What was measured of a case, as data.

A measurement is written by the worker that made it and never changed afterwards. Figures that a
machine does not give are None, never a guess.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memest.calibration.case import Case, case_from_dict
from memest.config.setup import Setup
from memest.errors import ConfigError

__all__ = [
    "CPU",
    "MOST_TEXT",
    "Environment",
    "Failure",
    "Measurement",
    "MemoryReading",
    "Status",
    "StepReading",
    "environment_from_dict",
    "failure_of",
    "is_out_of_memory",
    "measurement_from_dict",
    "measurement_of",
    "release_of",
]

CPU = "cpu"
"""The ``gpu`` of an environment without one: allocations are counted, no allocator caches them."""
MOST_TEXT = 2000
"""Characters that are kept of a message."""
_ALLOC_FAILED = ("CUDA out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")


def release_of(text: str) -> tuple[int, int] | None:
    """(major, minor) of a release such as ``2.13.0+cu126``, None where the text is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


class Status(enum.StrEnum):
    """How a case ended."""

    OK = "ok"
    OOM = "oom"
    """Out of memory: a result, with the place where it happened."""
    FAILED = "failed"
    """The worker reported an error of the training script or of the model."""
    CRASHED = "crashed"
    """The worker is gone without a word (killed, segmentation fault)."""
    TIMEOUT = "timeout"
    """The worker hung and was ended."""
    INTERRUPTED = "interrupted"
    """The campaign itself was ended while the case ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and with what a case ran.

    Attributes:
        gpu: name as the driver prints it, or ``cpu``.
        total_bytes: of the device as torch sees it.
        capability: compute capability, None on a CPU.
        sm_count: streaming multiprocessors, None on a CPU.
        max_threads_per_sm: resident threads of one of them, None where not known.
        driver: version of the driver, empty where there is none.
        cuda: CUDA that torch was built for, empty for a CPU build.
        torch: release.
        transformers: release.
        python: release.
        platform: operating system and machine.
        alloc_conf: value of the allocator's environment variable.
        memest: release.
        commit: of memest's checkout, empty where it is none; ``+`` at its end: with changes.
        meter: how device memory was read: ``process`` (NVML names this process), ``device delta``
            (the whole card, less what was there before) or ``none``.
        notes: what is special about the machine (MIG, WSL, a container), in words.
        command: the command line that ran the campaign.
    """

    gpu: str
    total_bytes: int | None = None
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    max_threads_per_sm: int | None = None
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    transformers: str = ""
    python: str = ""
    platform: str = ""
    alloc_conf: str = ""
    memest: str = ""
    commit: str = ""
    meter: str = "none"
    notes: tuple[str, ...] = ()
    command: str = ""

    @property
    def key(self) -> str:
        """What has to be the same for a measurement to stand for another run of its case."""
        return "|".join(
            (self.gpu, self.driver, self.cuda, self.torch, self.transformers, self.alloc_conf)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory at one moment, bytes; None where it cannot be read.

    Attributes:
        name: ``start`` (before the context), ``context`` (after one small tensor), ``matmul``
            (after the first matrix product), ``communicator`` (of several processes, after the
            first collective), ``model`` (weights on the device), ``oom`` (peaks of the step that
            was not completed), ``end``.
        device_used_bytes: of the whole device, all processes.
        process_bytes: of this process on the device.
        other_processes: how many others are on the device.
        other_bytes: what they use.
        allocated_bytes: in tensors.
        reserved_bytes: in segments.
    """

    name: str
    device_used_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: int | None = None
    other_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """One optimizer step: peaks since the start of the run up to its end, bytes.

    Attributes:
        seconds: wall clock; of the first step with what a loop sets up before it.
        requested_bytes: peak of what tensors asked for.
        allocated_bytes: peak of blocks handed out.
        active_bytes: peak of blocks in use or waiting for a stream.
        reserved_bytes: peak of segments.
        process_bytes: of this process on the device at the end of the step.
        device_used_bytes: of the whole device at the end of the step.
        reserved_now_bytes: segments at the end of the step.
        retries: how often the allocator released its cache and tried again.
        ooms: how often it was out of memory.
    """

    seconds: float
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    device_used_bytes: int | None = None
    reserved_now_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a case early: the kind of error, its message, and the phase it was in."""

    kind: str
    message: str
    phase: str = ""


def failure_of(error: BaseException, phase: str) -> Failure:
    """An error as it is kept, with the phase in which it was raised."""
    text = (str(error).strip() or "no message")[:MOST_TEXT]
    return Failure(kind=type(error).__name__, message=text, phase=phase)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is the allocator's, or that of a library that allocates on its own."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    own = any(message in text for message in _ALLOC_FAILED)
    return own or "out of memory" in text[:500].lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of a case.

    Attributes:
        run: identifies this run; never used twice. Of rank 1 it is that of rank 0 and ``-r1``.
        case: what ran.
        status: how it ended.
        environment: where; None if the worker was gone before it could say.
        started: UTC, ISO 8601.
        seconds: from start to end, the build of the model included.
        parameters: elements of the model, None if it was not built.
        trainable: of them, those that train.
        readings: moments of the run, in order.
        steps: optimizer steps that were completed.
        failure: what ended it early.
        events: file of the allocator's history, relative to the store; empty if there is none.
        rank: of a case with several processes, whose result is that of rank 0; else 0.
        remarks: what went wrong beside the run and did not end it.
    """

    run: str
    case: Case
    status: Status
    environment: Environment | None
    started: str
    seconds: float
    parameters: int | None = None
    trainable: int | None = None
    readings: tuple[MemoryReading, ...] = ()
    steps: tuple[StepReading, ...] = ()
    failure: Failure | None = None
    events: str = ""
    rank: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def setup(self) -> Setup:
        """The run, with the allocator's options of its environment where it names none itself."""
        setup, environment = self.case.setup, self.environment
        if setup.alloc_conf or environment is None:
            return setup
        return dataclasses.replace(setup, alloc_conf=environment.alloc_conf)

    @property
    def requested_bytes(self) -> int | None:
        """Peak of what tensors asked for."""
        return _largest(step.requested_bytes for step in self.steps)

    @property
    def allocated_bytes(self) -> int | None:
        """``torch.cuda.max_memory_allocated()``; on a CPU the highest sum of allocations."""
        return _largest(step.allocated_bytes for step in self.steps)

    @property
    def reserved_bytes(self) -> int | None:
        """``torch.cuda.max_memory_reserved()``; None on a CPU."""
        return _largest(step.reserved_bytes for step in self.steps)

    @property
    def device_bytes(self) -> int | None:
        """The highest reading of this process on the device at the end of a step or of the run.

        Where the driver does not name the process, the device's own figure less what was there
        before the context was made. None on a CPU, whose process holds more than a run.
        """
        if self.environment is not None and self.environment.gpu == CPU:
            return None
        after: list[MemoryReading | StepReading] = [r for r in self.readings if r.name != "start"]
        after += self.steps
        own = [r.process_bytes for r in after]
        if any(value is not None for value in own):
            return _largest(own)
        before = next((r.device_used_bytes for r in self.readings if r.name == "start"), None)
        used = _largest(r.device_used_bytes for r in after)
        return None if before is None or used is None else used - before

    @property
    def process_bytes(self) -> int | None:
        """What the process holds beside its segments at the end: context, kernels, libraries."""
        device, reserved = self.device_bytes, None
        for step in self.steps:
            reserved = step.reserved_now_bytes or reserved
        last = self._last_device_bytes()
        if device is None or reserved is None or last is None:
            return None
        return last - reserved

    def _last_device_bytes(self) -> int | None:
        if not self.steps:
            return None
        last = self.steps[-1]
        if last.process_bytes is not None:
            return last.process_bytes
        before = next((r.device_used_bytes for r in self.readings if r.name == "start"), None)
        if before is None or last.device_used_bytes is None:
            return None
        return last.device_used_bytes - before

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is None or empty is left out."""
        out: dict[str, Any] = _plain(self)
        out["case"] = self.case.to_dict() | {"id": self.case.id}
        return out


def _largest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _plain(value: Any) -> Any:
    if isinstance(value, Case):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(v) for name, v in pairs if v is not None and v not in ("", ())}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, enum.Enum) else value


def measurement_from_dict(document: Any, *, where: str = "measurement") -> Measurement:
    """Read what :meth:`Measurement.to_dict` wrote.

    Raises:
        ConfigError: it is no measurement.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} is a {type(document).__name__}, not a measurement.")
    try:
        values = dict(document)
        values["case"] = case_from_dict(values["case"], where=f"{where}, case")
        values["status"] = Status(values["status"])
        if values.get("environment") is not None:
            values["environment"] = environment_from_dict(values["environment"])
        else:
            values["environment"] = None
        values["readings"] = tuple(_instance(MemoryReading, r) for r in values.get("readings", ()))
        values["remarks"] = tuple(map(str, values.get("remarks", ())))
        values["steps"] = tuple(_instance(StepReading, s) for s in values.get("steps", ()))
        if values.get("failure") is not None:
            values["failure"] = _instance(Failure, values["failure"])
        measurement: Measurement = _instance(Measurement, values)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where} is not a measurement: {reason}") from None
    return measurement


def environment_from_dict(document: Mapping[str, Any]) -> Environment:
    """Read what was written of an environment.

    Raises:
        TypeError, ValueError: it is none.
    """
    values = dict(document)
    if values.get("capability") is not None:
        major, minor = values["capability"]
        values["capability"] = (int(major), int(minor))
    values["notes"] = tuple(values.get("notes", ()))
    environment: Environment = _instance(Environment, values)
    return environment


_NUMBERS = {"int | None": int, "float": (int, float), "int": int, "str": str}


def _instance(kind: Any, document: Mapping[str, Any]) -> Any:
    """An instance of a dataclass, its numbers checked; names it does not have are an error."""
    if not isinstance(document, Mapping):
        raise TypeError(f"{kind.__name__} is {document!r:.40}, not an object")
    types: dict[str, str] = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    for name, value in document.items():
        if name not in types:
            raise ValueError(f"{kind.__name__} has no {name!r}")
        py_types = _NUMBERS.get(types[name])
        right = py_types is None or (isinstance(value, py_types) and not isinstance(value, bool))  # type: ignore[arg-type]
        if not right and not (value is None and types[name].endswith("None")):
            raise ValueError(f"{name} is {value!r}, not {types[name]}")
    return kind(**document)


def measurement_of(
    run: str,
    case: Case,
    messages: Iterable[dict[str, Any]],
    status: Status,
    *,
    started: str,
    seconds: float,
    failure: Failure | None = None,
    events: str = "",
) -> Measurement:
    """The measurement that a worker's messages make.

    Args:
        run: identifies it.
        case: what ran.
        messages: what its worker sent; earlier releases had workers of several ranks, and rank 0
            stands for the case.
        status: how the case ended.
        started: UTC, ISO 8601.
        seconds: from start to end.
        failure: what ended the case early.
        events: file of the allocator's history.
    """
    values: dict[str, Any] = {"readings": [], "steps": [], "remarks": []}
    phase = ""
    for message in messages:
        kind = message["kind"]
        if message.get("rank"):
            continue
        if kind == "environment":
            values["environment"] = message["environment"]
        elif kind == "built":
            values |= {name: message[name] for name in ("parameters", "trainable")}
        elif kind in ("reading", "step", "remark"):
            values[f"{kind}s"].append(message[kind])
        elif kind == "phase":
            phase = message["phase"]
    if failure is not None and not failure.phase:
        failure = dataclasses.replace(failure, phase=phase)
    # through the reader: what a worker says is checked as anybody's would be
    return measurement_from_dict(
        {
            "run": run,
            "case": case.to_dict(),
            "status": status,
            "started": started,
            "seconds": seconds,
            "failure": None if failure is None else dataclasses.asdict(failure),
            "events": events,
            **values,
        }
    )
