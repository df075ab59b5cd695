"""A case on a CUDA device: the allocator's counters, the driver's readings, its own history."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from memest.calibration.running.worker import Send, Worker
from memest.errors import ConfigError

__all__ = ["GpuWorker"]

_HISTORY_ENTRIES = 4_000_000


class GpuWorker(Worker):
    """A run on a CUDA device."""

    def __init__(self, case: Any, device: str, send: Send, events: str, command: str) -> None:
        super().__init__(case, device, send, events, command)
        self._meter: Any = None
        self._marks: list[Any] = []
        self._records = False
        self._loaded = False
        self._began = 0.0

    def open(self) -> Any:
        """Make the context, read the driver before and after it, say where this is."""
        from memest.calibration.running.meters import GpuMeter, visible_device

        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(self._device, dict(os.environ))
        meter = GpuMeter()  # reads all devices before there is a context
        import torch

        from memest.calibration.running.environment import gpu_environment

        if not torch.cuda.is_available():
            raise ConfigError(_why_no_cuda(torch))
        if self.case is not None and self.case.setup.alloc_conf:
            torch.cuda.memory._set_allocator_settings(self.case.setup.alloc_conf)
        self._enter("context")
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        meter.note_context(str(getattr(torch.cuda.get_device_properties(0), "uuid", "")))
        environment = gpu_environment(meter, self._command)
        self.send({"kind": "environment", "environment": dataclasses.asdict(environment)})
        self._meter = meter
        return meter

    def run(self) -> str:
        """Train; returns the name of the history that was written, empty if there is none."""
        import torch

        from memest.calibration.running.loops import train

        case = self.case
        meter = self.open()
        self._reading(meter.start())
        self._reading(meter.read("context"))
        self._matmul()
        self._cap()
        material = self._build()
        self._start_history()
        model = material.model
        if case.setup.loop.value == "plain":  # the others move it themselves
            self._enter("load 0 0")
            self._note_mark("load", 0, 0)
            model = model.to("cuda")
        self._began = time.perf_counter()
        train(
            model,
            case.setup,
            material.batches,
            material.optimizer_for,
            material.loss_of,
            torch.device("cuda"),
            self,
        )
        self._enter("end")
        self._note_mark("end", 0, 0)
        torch.cuda.synchronize()
        self._reading(meter.read("end"))
        return self._write_history()

    def mark(self, phase: str, step: int, micro_step: int) -> None:
        """A phase begins."""
        self._enter(f"{phase} {step} {micro_step}")
        self._note_mark(phase, step, micro_step)
        if not self._loaded:
            self._loaded = True
            self._reading(self._meter.read("model"))

    def step_done(self, step: int) -> None:  # noqa: ARG002 - the watch's signature
        """A step is over: read everything."""
        import torch

        torch.cuda.synchronize()
        self._step(self._meter.step(time.perf_counter() - self._began))
        self._began = time.perf_counter()

    def out_of_memory(self) -> str:
        """How far it came: peaks of the step that was not completed; the history up to there."""
        import torch

        from memest.calibration.running.meters import peaks_of

        peaks = peaks_of(torch.cuda.memory_stats())
        reading = self._meter.read("oom")
        self._reading(
            dataclasses.replace(
                reading,
                allocated_bytes=peaks["allocated_bytes"],
                reserved_bytes=peaks["reserved_bytes"],
            )
        )
        return self._write_history()

    def _matmul(self) -> None:
        """The first matrix product loads libraries; what it leaves in the allocator is cleared."""
        import torch

        self._enter("matmul")
        square = torch.ones(64, 64, device="cuda")
        product = square @ square
        torch.cuda.synchronize()
        self._reading(self._meter.read("matmul"))
        del square, product
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()

    def _cap(self) -> None:
        """Let the allocator reserve no more than the case says."""
        import torch

        cap = self.case.cap_bytes
        if cap is None:
            return
        total = torch.cuda.mem_get_info()[1]
        if cap > total:
            raise ConfigError(f"the cap of {cap} bytes is above the device's {total} bytes")
        # the allocator takes fraction * total in double precision, and truncates
        torch.cuda.set_per_process_memory_fraction(min((cap + 0.5) / total, 1.0))

    def _start_history(self) -> None:
        from memest.calibration.recording import history

        if not (self.case.record_events and self._events):
            return
        try:
            history.start_history(_HISTORY_ENTRIES)
        except Exception as error:  # noqa: BLE001 - the run is measured all the same
            self._remark(f"no history was kept: {type(error).__name__}: {error}")
            return
        self._records = True

    def _note_mark(self, phase: str, step: int, micro_step: int) -> None:
        if self._records:
            from memest.calibration.recording import history

            self._marks.append((phase, step, micro_step, history.mark_counters()))

    def _write_history(self) -> str:
        if not self._records:
            return ""
        from memest.calibration.recording import history

        self._enter("history")
        path = Path(self._events)
        case = self.case.to_dict() | {"id": self.case.id}
        try:
            allocator_history = history.take_history(
                0, self._marks, run=path.name.partition(".")[0], case=case
            )
            history.write_history(path, allocator_history)
        except Exception as error:  # noqa: BLE001 - the measurement is worth more than its history
            self._remark(f"no history was kept: {type(error).__name__}: {error}")
            return ""
        return path.name


def _why_no_cuda(torch: Any) -> str:
    if torch.version.cuda is None:
        return (
            "this torch is a build for the CPU: install one for CUDA (pytorch.org), or measure the "
            "CPU with --device cpu."
        )
    return "torch finds no CUDA device: see nvidia-smi, or measure the CPU with --device cpu."
