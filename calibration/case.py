"""One case: a model, a training setup, and how it is to be measured."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memest.config.options import setup_from_options
from memest.config.parallelism import ONE_GPU
from memest.config.setup import Precision, Setup
from memest.errors import ConfigError, closest

__all__ = ["STEPS", "Case", "Parallel", "case_from_dict", "setup_changes", "with_events"]

STEPS = 4
"""Optimizer steps of a case: states appear in the first, the second is the first of all others."""
MAX_PROCESSES = 64
_KEYS = ("model", "task", "setup", "parallel", "processes", "cap_bytes", "record_events", "id")


class Parallel(enum.StrEnum):
    """What several processes do together."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run to measure.

    Attributes:
        model: anything ``memest estimate`` takes.
        setup: the run; ``num_steps`` optimizer steps are made.
        parallel: what several processes do together.
        processes: how many, each on its own device.
        cap_bytes: what the allocator may reserve at most; None = all of the device.
        record_events: keep the allocator's own history too.
    """

    model: str
    setup: Setup
    parallel: Parallel = Parallel.NONE
    processes: int = 1
    cap_bytes: int | None = None
    record_events: bool = False

    def __post_init__(self) -> None:
        # what is measured has a name, whatever it is by default elsewhere
        named = replace(self.setup, optim=self.setup.optimizer)
        object.__setattr__(self, "setup", named)

    @property
    def id(self) -> str:
        """Readable, and the same for the same run wherever it is made."""
        document = self.to_dict()
        document.pop("record_events", None)
        text = json.dumps(document, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self._words()}-{digest}"

    def _words(self) -> str:
        setup = self.setup
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.model.rpartition("/")[2]).strip("-")
        parts = [name[:48], f"b{setup.batch}"]
        if setup.seq_len:
            parts.append(f"s{setup.seq_len}")
        if setup.grad_accum > 1:
            parts.append(f"a{setup.grad_accum}")
        halved = setup.precision is not Precision.FP32
        parts.append((setup.precision if halved else setup.loaded_dtype).value)
        if setup.checkpointing != "none":
            parts.append("ckpt")
        parts.append(setup.loop.value)
        if self.processes > 1:
            parts.append(f"{self.parallel.value}{self.processes}")
        if self.cap_bytes is not None:
            parts.append(f"cap{self.cap_bytes >> 20}m")
        return "-".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The case as data: only what is not as by default, in the names of the command line."""
        out: dict[str, Any] = {
            "model": self.model,
            "task": self.setup.task.value,
            "setup": setup_changes(self.setup),
        }
        if self.processes > 1:
            out |= {"parallel": self.parallel.value, "processes": self.processes}
        if self.cap_bytes is not None:
            out["cap_bytes"] = self.cap_bytes
        if self.record_events:
            out["record_events"] = True
        return out


def setup_changes(setup: Setup) -> dict[str, Any]:
    """What of a setup is not as by default, and what a case always states."""
    usual = Setup().to_dict()
    always = ("batch", "grad_accum", "checkpointing", "precision", "dtype", "optim", "loop")
    out = {
        name: value
        for name, value in setup.to_dict().items()
        if name != "task" and (name in always or value != usual[name])
    }
    out["num_steps"] = setup.num_steps
    return out


def case_from_dict(document: Any, *, where: str = "case") -> Case:
    """Read a case.

    Args:
        document: as :meth:`Case.to_dict` writes it; ``setup`` may use any spelling of an option.
        where: how messages call it.

    Raises:
        ConfigError: something in it is not a case.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} is a {type(document).__name__}, not an object with a model.")
    for name in document:
        if name not in _KEYS:
            near = closest(str(name), _KEYS)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{where} has the key {name!r}, which cases have not.{hint} Legal: "
                f"{', '.join(_KEYS)}. Options of the run belong into setup."
            )
    model, options = document.get("model"), document.get("setup", {})
    if not isinstance(model, str) or not model.strip():
        raise ConfigError(f'{where} names no model: add for example "model": "gpt2".')
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: setup is a {type(options).__name__}, not an object.")
    try:
        options = {"num_steps": STEPS, **options}
        if document.get("task") is not None:
            options["task"] = document["task"]
        setup = setup_from_options(**options)
        _check_one_process(setup)
        parallel, processes = _together(document)
        return Case(
            model=model,
            setup=setup,
            parallel=parallel,
            processes=processes,
            cap_bytes=_cap(document.get("cap_bytes")),
            record_events=bool(document.get("record_events", False)),
        )
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where} ({model}): {error}") from None


def with_events(case: Case) -> Case:
    """The same case, with the allocator's history."""
    return dataclasses.replace(case, record_events=True)


def _check_one_process(setup: Setup) -> None:
    """The setup says what one process does; how many there are stands beside it."""
    if setup.distributed != ONE_GPU:
        raise ConfigError(
            "the setup of a case is that of one process: several GPUs are measured with "
            '"parallel": "ddp" or "fsdp" and "processes" beside it.'
        )


def _together(document: Mapping[str, Any]) -> tuple[Parallel, int]:
    """What several processes do, and how many they are."""
    parallel, processes = document.get("parallel", "none"), document.get("processes", 1)
    if parallel not in tuple(Parallel):
        raise ConfigError(f"parallel {parallel!r} is not known. Legal: {', '.join(Parallel)}.")
    whole = isinstance(processes, int) and not isinstance(processes, bool)
    if not whole or not 1 <= processes <= MAX_PROCESSES:
        raise ConfigError(f"processes {processes!r} must be a whole number, 1 to {MAX_PROCESSES}.")
    if (parallel == Parallel.NONE) is not (processes == 1):
        raise ConfigError(
            f"parallel {parallel} and processes {processes} contradict each other: give both, for "
            'example "parallel": "ddp", "processes": 2, or neither.'
        )
    return Parallel(parallel), processes


def _cap(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"cap_bytes {value!r} must be a whole number of bytes above 0.")
    return int(value)
