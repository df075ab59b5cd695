"""The parent of the workers: everything imported, no device touched.

Importing torch and transformers takes longer than most cases. This process does it once and forks
a worker for each case, which starts with all of it loaded and its own context, allocator and
libraries still to be made. It reads requests, one JSON object a line, from its standard input;
messages go to the file descriptor that it is given:

    {"kind": "ready"}
    {"kind": "started", "pid": 1234}        then what the worker has to say, see worker.py
    {"kind": "gone", "signal": 9, "code": null, "log": "last lines"}

Whoever started it may vanish: then it goes too, and its worker with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
from typing import Any, TextIO

from memest.calibration.case import Case, case_from_dict
from memest.calibration.running.worker import Send, perform
from memest.processes import die_with_parent

__all__ = ["main", "work"]

_LOG_BYTES = 4000


def main(descriptor: int, source: TextIO | None = None) -> int:
    """Serve requests until there are no more.

    Args:
        descriptor: where messages go.
        source: of the requests; standard input if None.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides what Ctrl-C means
    send = _sender(descriptor)
    _prepare()
    send({"kind": "ready"})
    for line in source or sys.stdin:
        if line.strip():
            _serve(json.loads(line), send)
    return 0


def _sender(descriptor: int) -> Send:
    def send(message: dict[str, Any]) -> None:
        # a worker that was killed may have left half a line: begin a new one
        data = f"\n{json.dumps(message, separators=(',', ':'))}\n".encode()
        while data:
            data = data[os.write(descriptor, data) :]

    return send


def _prepare() -> None:
    """Import what workers need. No device may be touched: a fork would inherit its context."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers

    with contextlib.suppress(ImportError):
        # accelerate warns about old kernels and asks for hardware on import: before the fork
        import accelerate  # noqa: F401
    if importlib.util.find_spec("bitsandbytes") is None:
        # the Trainer's modules are loaded when they are named
        _ = transformers.Trainer, transformers.TrainingArguments
    # else workers load them: the Trainer imports peft, peft imports bitsandbytes, and bitsandbytes
    # asks every card for its capability (its cuda_specs.py), for which torch makes a context

    if torch.cuda.is_initialized():
        raise RuntimeError("something has made a CUDA context before the first case")


def _serve(request: dict[str, Any], send: Send) -> None:
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(request, send, log.fileno())
        _, status = os.waitpid(pid, 0)
        size = log.seek(0, os.SEEK_END)
        log.seek(max(size - _LOG_BYTES, 0))
        text = log.read().decode(errors="replace")
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    send({"kind": "gone", "signal": signal_number, "code": code, "log": text})


def _child(request: dict[str, Any], send: Send, log: int) -> None:
    """The worker's life; it ends here, whatever happens."""
    code = 1
    try:
        die_with_parent()
        send({"kind": "started", "pid": os.getpid()})
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # requests are the parent's
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request.get("environment", {}))
        case = request.get("case")
        work(
            None if case is None else case_from_dict(case),
            request["device"],
            send,
            events=request.get("events", ""),
            command=request["command"],
        )
        code = 0
    except BaseException:  # noqa: BLE001 - written to the log, which the runner reads
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # no interpreter shutdown: what the parent registered is not this process's to undo
        os._exit(code)


def work(
    case: Case | None,
    device: str,
    send: Send,
    *,
    events: str = "",
    command: str = "",
) -> None:
    """Run a case and report; every way it can end is a message.

    Args:
        case: what to run; None to report the environment of the device, and nothing else.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        send: takes messages.
        events: where to write the allocator's history, if the case wants it.
        command: the command line of the campaign, for the record.
    """
    from memest.calibration.running.cpu_worker import CpuWorker
    from memest.calibration.running.gpu_worker import GpuWorker

    kind = CpuWorker if device == "cpu" else GpuWorker
    perform(kind(case, device, send, events, command))
