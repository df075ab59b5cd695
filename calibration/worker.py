"""Running one case in this process: what happens is told as it happens.

A worker lives for one case, so allocator, context and libraries are fresh. It sends messages (plain
dictionaries) as soon as there is something to say: whatever ends it, what was measured until then
is with the runner already.

    {"kind": "environment", "environment": {...}}
    {"kind": "phase", "phase": "forward 1 1"}
    {"kind": "built", "parameters": 1, "trainable": 1}
    {"kind": "reading", "reading": {...}}         a moment: start, context, matmul, model, end, oom
    {"kind": "step", "step": {...}}               an optimizer step is over
    {"kind": "end", "status": "ok", "failure": {...}, "events": "..."}

Of a case with several processes (:mod:`memest.calibration.distributed`), messages of ranks above 0
name their ``rank``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import Failure, Reading, Status, StepReading
from memest.errors import ConfigError, DeviceError
from memest.setup import Precision

__all__ = ["CpuWorker", "GpuWorker", "Send", "describe", "failure_of", "perform", "work"]

Send = Callable[[dict[str, Any]], None]
_MESSAGE = 2000
_HISTORY_ENTRIES = 4_000_000
_SAID_OF_MEMORY = (
    "CUDA out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)  # fmt: skip


def work(case: Case, device: str, send: Send, *, events: str = "", command: str = "") -> None:
    """Run a case and report; every way it can end is a message.

    Args:
        case: what to run.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        send: takes messages.
        events: where to write the allocator's history, if the case wants it.
        command: the command line of the campaign, for the record.
    """
    if case.processes > 1:
        from memest.calibration.distributed import launch

        launch(case, device, send, events=events, command=command)
        return
    kind = CpuWorker if device == "cpu" else GpuWorker
    perform(kind(case, device, send, events, command), send)


def perform(worker: CpuWorker | GpuWorker, send: Send) -> None:
    """Have a worker run its case; every way it can end is a message."""
    written = ""
    try:
        written = worker.run()
    except Exception as error:  # noqa: BLE001 - whatever a training script raises is a result
        status = Status.OOM if _out_of_memory(error) else Status.FAILED
        if status is Status.OOM:
            with contextlib.suppress(Exception):
                worker.out_of_memory()
        send({"kind": "end", "status": status, "failure": failure_of(error, worker.phase)})
        return
    send({"kind": "end", "status": Status.OK, "events": written})


def _out_of_memory(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":
        return True
    # libraries that allocate on their own say it in their way
    return any(said in str(error) for said in _SAID_OF_MEMORY)


def failure_of(error: BaseException, phase: str) -> dict[str, Any]:
    """An error as the message that ends a case."""
    text = (str(error).strip() or "no message")[:_MESSAGE]
    return dataclasses.asdict(Failure(kind=type(error).__name__, message=text, phase=phase))


def describe(device: str, send: Send, command: str = "") -> None:
    """Report the environment of a device, and nothing else."""
    case_free = CpuWorker if device == "cpu" else GpuWorker
    try:
        case_free(None, device, send, "", command).open()
    except Exception as error:  # noqa: BLE001 - the runner says it to the user
        send({"kind": "end", "status": Status.FAILED, "failure": failure_of(error, "environment")})
        return
    send({"kind": "end", "status": Status.OK})


class _Watching:
    """What both kinds of run do: phases, and messages."""

    def __init__(self, case: Any, device: str, send: Send, events: str, command: str) -> None:
        self._case = case
        self._device = device
        self._send = send
        self._events = events
        self._command = command
        self.phase = "start"

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._send({"kind": "phase", "phase": phase})

    def _reading(self, reading: Reading) -> None:
        self._send({"kind": "reading", "reading": _slim(reading)})

    def _step(self, reading: StepReading) -> None:
        self._send({"kind": "step", "step": _slim(reading)})

    def _build(self) -> Any:
        from memest.calibration.material import make_material

        self._enter("build")
        material = make_material(self._case.model, self._case.setup)
        self._send(
            {"kind": "built", "parameters": material.parameters, "trainable": material.trainable}
        )
        return material


def _slim(reading: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(reading).items() if v is not None}


class CpuWorker(_Watching):
    """A run on the CPU: PyTorch's profiler sees every allocation.

    There is no caching allocator, so nothing is reserved; weights are counted, not watched.
    """

    def open(self) -> None:
        """Say where this is."""
        from memest.calibration.environment import cpu_environment

        environment = cpu_environment(self._command)
        self._send({"kind": "environment", "environment": dataclasses.asdict(environment)})

    def run(self) -> str:
        """Train; returns nothing to fetch."""
        import torch

        from memest.calibration.cpu_memory import measure
        from memest.calibration.loops import train

        self.open()
        case = self._case
        _check_cpu(case)
        self._reading(_resident("start"))
        material = self._build()
        self._times: list[float] = []

        def training() -> None:
            model = self._placed(material.model)
            self._reading(_resident("model", _bytes_of(model)))
            self._began = time.perf_counter()
            train(
                model, case.setup, material.batches, material.optimizer_for,
                material.loss_of, torch.device("cpu"), self,
            )  # fmt: skip

        run = measure(training)
        self._reading(_resident("end"))
        self._report(run, _bytes_of(material.model))
        return ""

    def _placed(self, model: Any) -> Any:
        """The model as it is trained."""
        return model

    def mark(self, phase: str, step: int, micro_step: int) -> None:
        """A phase begins: it is marked in the profiler's stream too."""
        from memest.calibration.cpu_memory import mark

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
        peak = 0
        for step, seconds in enumerate(self._times, start=1):
            peak = max(peak, highest.get(step, 0))
            self._step(
                StepReading(
                    seconds=round(seconds, 6), requested_bytes=weights + peak,
                    allocated_bytes=weights + peak,
                )
            )  # fmt: skip

    def out_of_memory(self) -> None:
        """Nothing more to read."""


def _check_cpu(case: Case) -> None:
    if case.setup.precision is Precision.FP16:
        raise ConfigError(
            "fp16 autocast is not measured on a CPU: its cast lists are others. Use bf16."
        )
    if case.cap_bytes is not None:
        raise ConfigError("a CPU's memory cannot be capped: run this case on a GPU.")


def _bytes_of(model: Any) -> int:
    """Storages of parameters and buffers, each once; of what is sharded, this process's part."""
    held = [getattr(t, "_local_tensor", t) for t in (*model.parameters(), *model.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def _resident(name: str, allocated: int | None = None) -> Reading:
    """The process's own resident memory, where the system tells."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        return Reading(name=name, process_bytes=resident, allocated_bytes=allocated)
    return Reading(name=name, allocated_bytes=allocated)


class GpuWorker(_Watching):
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
        from memest.calibration.meters import GpuMeter, visible_device

        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(self._device, dict(os.environ))
        meter = GpuMeter()  # reads all devices before there is a context
        import torch

        from memest.calibration.environment import gpu_environment

        if not torch.cuda.is_available():
            raise ConfigError(_why_no_cuda(torch))
        if self._case is not None and self._case.setup.alloc_conf:
            torch.cuda.memory._set_allocator_settings(self._case.setup.alloc_conf)
        self._enter("context")
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        meter.made_context(str(getattr(torch.cuda.get_device_properties(0), "uuid", "")))
        environment = gpu_environment(meter, self._command)
        self._send({"kind": "environment", "environment": dataclasses.asdict(environment)})
        self._meter = meter
        return meter

    def run(self) -> str:
        """Train; returns the name of the history that was written, empty if there is none."""
        import torch

        from memest.calibration.loops import train

        case = self._case
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
            model = self._placed(model)
        self._began = time.perf_counter()
        train(
            model, case.setup, material.batches, material.optimizer_for,
            material.loss_of, torch.device("cuda"), self,
        )  # fmt: skip
        self._enter("end")
        self._note_mark("end", 0, 0)
        torch.cuda.synchronize()
        self._reading(meter.read("end"))
        return self._write_history()

    def _placed(self, model: Any) -> Any:
        """The model on the device, as it is trained."""
        return model.to("cuda")

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

    def out_of_memory(self) -> None:
        """How far it came: peaks of the step that was not completed."""
        import torch

        from memest.calibration.meters import peaks_of

        peaks = peaks_of(torch.cuda.memory_stats())
        reading = self._meter.read("oom")
        self._reading(
            dataclasses.replace(
                reading,
                allocated_bytes=peaks["allocated_bytes"],
                reserved_bytes=peaks["reserved_bytes"],
            )
        )
        self._write_history()

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

        cap = self._case.cap_bytes
        if cap is None:
            return
        total = torch.cuda.mem_get_info()[1]
        if cap > total:
            raise ConfigError(f"the cap of {cap} bytes is above the device's {total} bytes")
        # the allocator takes fraction * total in double precision, and truncates
        torch.cuda.set_per_process_memory_fraction(min((cap + 0.5) / total, 1.0))

    def _start_history(self) -> None:
        from memest.calibration import history

        if not (self._case.record_events and self._events):
            return
        with contextlib.suppress(DeviceError):
            # an allocator that keeps none: the run is measured all the same
            history.start_history(_HISTORY_ENTRIES)
            self._records = True

    def _note_mark(self, phase: str, step: int, micro_step: int) -> None:
        if self._records:
            from memest.calibration import history

            self._marks.append((phase, step, micro_step, history.mark_counters()))

    def _write_history(self) -> str:
        if not self._records:
            return ""
        from memest.calibration import history

        self._enter("history")
        path = Path(self._events)
        taken = history.take_history(
            0,
            self._marks,
            run=path.name.partition(".")[0],
            case=self._case.to_dict() | {"id": self._case.id},
        )
        history.write_history(path, taken)
        return path.name


def _why_no_cuda(torch: Any) -> str:
    if torch.version.cuda is None:
        return (
            "this torch is a build for the CPU: install one for CUDA (pytorch.org), or measure the "
            "CPU with --device cpu."
        )
    return "torch finds no CUDA device: see nvidia-smi, or measure the CPU with --device cpu."
