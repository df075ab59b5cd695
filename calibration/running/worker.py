"""Running one case in this process: what happens is told as it happens.

A worker lives for one case, so allocator, context and libraries are fresh. It sends messages (plain
dictionaries) as soon as there is something to say: whatever ends it, what was measured until then
is with the runner already.

    {"kind": "environment", "environment": {...}}
    {"kind": "phase", "phase": "forward 1 1"}
    {"kind": "built", "parameters": 1, "trainable": 1}
    {"kind": "reading", "reading": {...}}         a moment: start, context, matmul, model, end, oom
    {"kind": "step", "step": {...}}               an optimizer step is over
    {"kind": "remark", "remark": "..."}           what went wrong and did not end the run
    {"kind": "end", "status": "ok", "failure": {...}, "events": "..."}

Of a case with several processes (``distributed.py``), ranks above 0 name themselves (``rank``).
"""

from __future__ import annotations

import contextlib
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import Status
from memest.calibration.running.cpu_worker import CpuWorker
from memest.calibration.running.gpu_worker import GpuWorker
from memest.calibration.running.watching import Send, failure_of

__all__ = ["describe", "perform", "work"]

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
        from memest.calibration.running.distributed import launch

        launch(case, device, send, events=events, command=command)
        return
    kind = CpuWorker if device == "cpu" else GpuWorker
    perform(kind(case, device, send, events, command), send)


def perform(worker: CpuWorker | GpuWorker, send: Send) -> None:
    """Have a worker run its case; every way it can end is a message."""
    end: dict[str, Any] = {"kind": "end", "status": Status.OK, "events": ""}
    try:
        end["events"] = worker.run()
    except Exception as error:  # noqa: BLE001 - whatever a training script raises is a result
        out = _out_of_memory(error)
        end |= {"status": Status.OOM if out else Status.FAILED}
        end["failure"] = failure_of(error, worker.phase)
        if out:
            with contextlib.suppress(Exception):
                end["events"] = worker.out_of_memory()
    send(end)


def _out_of_memory(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":
        return True
    # libraries that allocate on their own say it in their way
    return any(said in str(error) for said in _SAID_OF_MEMORY)


def describe(device: str, send: Send, command: str = "") -> None:
    """Report the environment of a device, and nothing else."""
    case_free = CpuWorker if device == "cpu" else GpuWorker
    try:
        case_free(None, device, send, "", command).open()
    except Exception as error:  # noqa: BLE001 - the runner says it to the user
        send({"kind": "end", "status": Status.FAILED, "failure": failure_of(error, "environment")})
        return
    send({"kind": "end", "status": Status.OK})
