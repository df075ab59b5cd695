"""A case on the CPU: PyTorch's profiler sees every allocation."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import MemoryReading, StepReading
from memest.calibration.running.meters import resident_bytes
from memest.calibration.running.worker import Worker
from memest.config.setup import Precision
from memest.errors import ConfigError

__all__ = ["CpuWorker"]


class CpuWorker(Worker):
    """A run on the CPU: PyTorch's profiler sees every allocation.

    There is no caching allocator, so nothing is reserved; weights are counted, not watched.
    """

    def open(self) -> None:
        """Say where this is."""
        from memest.calibration.running.environment import cpu_environment

        environment = cpu_environment(self._command)
        self.send({"kind": "environment", "environment": dataclasses.asdict(environment)})

    def run(self) -> str:
        """Train; returns nothing to fetch."""
        import torch

        from memest.calibration.running.cpu_memory import measure
        from memest.calibration.running.loops import train

        self.open()
        case = self.case
        _check_cpu(case)
        self._reading(_resident("start"))
        material = self._build()
        self._times: list[float] = []

        def training() -> None:
            model = material.model
            self._reading(_resident("model", _bytes_of(model)))
            self._began = time.perf_counter()
            # what the optimizer allocates when it is made counts too
            self.mark("load", 0, 0)
            train(
                model,
                case.setup,
                material.batches,
                material.optimizer_for,
                material.loss_of,
                torch.device("cpu"),
                self,
            )

        run = measure(training)
        self._reading(_resident("end"))
        self._report(run, _bytes_of(material.model))
        return ""

    def mark(self, phase: str, step: int, micro_step: int) -> None:
        """A phase begins: it is marked in the profiler's stream too."""
        from memest.calibration.running.cpu_memory import mark

        self._enter(f"{phase} {step} {micro_step}")
        mark(self.phase)

    def step_done(self, step: int) -> None:  # noqa: ARG002 - the watch's signature
        """A step is over; its memory is known when the profiler has stopped."""
        self._times.append(time.perf_counter() - self._began)
        self._began = time.perf_counter()

    def _report(self, run: Any, weights: int) -> None:
        highest: dict[int, int] = {}
        for phase in run.phases:
            step = int(phase.name.split()[1])
            highest[step] = max(highest.get(step, 0), phase.peak)
        peak = highest.get(0, 0)
        for step, seconds in enumerate(self._times, start=1):
            peak = max(peak, highest.get(step, 0))
            self._step(
                StepReading(
                    seconds=round(seconds, 6),
                    requested_bytes=weights + peak,
                    allocated_bytes=weights + peak,
                )
            )


def _check_cpu(case: Case) -> None:
    if case.setup.precision is Precision.FP16:
        raise ConfigError(
            "fp16 autocast is not measured on a CPU: its cast lists are others. Use bf16."
        )
    if case.cap_bytes is not None:
        raise ConfigError("a CPU's memory cannot be capped: run this case on a GPU.")


def _bytes_of(model: Any) -> int:
    """Storages of parameters and buffers, each once."""
    tensors = (*model.parameters(), *model.buffers())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _resident(name: str, allocated_bytes: int | None = None) -> MemoryReading:
    """The process's own resident memory, where the system tells."""
    return MemoryReading(name=name, process_bytes=resident_bytes(), allocated_bytes=allocated_bytes)
