"""The backward graph scheduled by a second process, while this one schedules the forward graph.

Inductor compiles a model's two graphs one after the other; each takes a quarter of a compilation.
The backward graph needs to know how the forward graph was lowered (the strides of what it saves),
not how it is scheduled. So once the forward graph is lowered, a fork of this process leaves its
schedule out and goes on to the backward graph. This process writes the forward graph's code, lowers
the backward graph itself, and takes the code that the other one wrote for it, where both lowered it
alike, buffer for buffer. Wherever anything is amiss, it writes that code itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from memest.processes import die_with_parent
from memest.trace.cuda.patching import patch_attributes
from memest.trace.cuda.quick_compile import is_known

__all__ = ["Beside"]

_WORTH_IT = 200
"""Operations of a graph, below which scheduling it takes no longer than a fork (a layer has 40)."""
_SHORTEST_WAIT = 10.0
"""Seconds."""
_WRITTEN = (
    "partition_maps",
    "mutated_inputs",
    "mutated_input_idxs",
    "device_types",
    "device_idxs",
    "disable_cudagraphs_reason",
    "_defers_input_alignment",
)
"""What PyTorch reads off a graph after its code was written (``CompiledFxGraph.__init__``)."""
_NO_SCHEDULE = types.SimpleNamespace(nodes=())


class Beside:
    """The second process of a compilation, seen from both sides.

    Args:
        cores: that this process may run on; None asks. With one there is no second process.

    Attributes:
        taken: how many graphs' codes were written by it.
    """

    def __init__(self, cores: int | None = None) -> None:
        self._cores = _cores() if cores is None else cores
        self._pid = 0
        self._graph_id: int | None = None
        self._to_first: Connection | None = None
        self._from_second: Connection | None = None
        self._began = 0.0
        self.taken = 0

    @contextmanager
    def may_work(self) -> Iterator[None]:
        """For the time of a run's compilations; what is left of the second process ends with it."""
        change: AbstractContextManager[None] = nullcontext()
        if self._cores > 1:
            from torch._functorch._aot_autograd import graph_compile

            stage = graph_compile._aot_stage2b_bw_compile

            def compile_backward(*args: Any) -> Any:
                """At once in the second process, which gets no further; else when it begins."""
                if self._to_first is not None:
                    *before, options, compiler = args
                    options = replace(options, force_non_lazy_backward_lowering=True)
                    args = (*before, options, compiler)
                return stage(*args)

            change = patch_attributes((graph_compile, stage.__name__, compile_backward))
        try:
            with change:
                yield
        finally:
            self._end()

    @contextmanager
    def kept_in(self) -> Iterator[None]:
        """Around what compiles a forward graph: no second process leaves it."""
        try:
            yield
        finally:
            if self._to_first is not None:  # whatever led here, it must not go on as this program
                os._exit(1)

    def begin(self, graph: Any) -> bool:
        """Fork, once a forward graph is lowered.

        Returns:
            True in the second process, False in the first one, whether there is a second or not.
        """
        if self._cores < 2 or graph.is_inference or len(graph.operations) < _WORTH_IT:
            return False
        self._end()  # of an earlier graph, whose backward comes later
        self._graph_id = graph.graph_id
        self._from_second, to_first = Pipe(duplex=False)
        self._began, first = time.monotonic(), os.getpid()
        try:
            self._pid = os.fork()
        except OSError:  # no memory, or no processes left
            self._end()
            return False
        if self._pid:
            to_first.close()
            return False
        die_with_parent(first)
        self._to_first, self._cores = to_first, 1
        self._from_second.close()
        with suppress(OSError):  # where memory runs out, this process goes and the first one stays
            Path("/proc/self/oom_score_adj").write_text("1000")
        graph.scheduler = _NO_SCHEDULE
        return True

    def backward_code(self, graph: Any) -> str | None:
        """The code of a backward graph, once it is lowered, as the second process writes it.

        The second process does not come back from here. What writing code changes in the graph is
        changed in the first one too.

        Returns:
            None where there is no second process, or it lowered the graph otherwise.
        """
        if self._to_first is not None:
            lowered = _lowered(graph)  # before code is written: that changes layouts
            source = graph.codegen()[0].value
            written = {name: getattr(graph, name) for name in _WRITTEN}
            self._to_first.send((lowered, _constants(graph), source, written))
            os._exit(0)
        if self._from_second is None or self._graph_id != graph.graph_id:
            return None
        patience = max(_SHORTEST_WAIT, 2 * (time.monotonic() - self._began))
        message = None
        with suppress(EOFError, OSError):
            if self._from_second.poll(patience):
                message = self._from_second.recv()
        if message is None or message[:2] != (_lowered(graph), _constants(graph)):
            return None
        _, _, source, written = message
        for name, value in written.items():
            setattr(graph, name, value)
        graph.scheduler = _NO_SCHEDULE
        self.taken += 1
        return source

    def _end(self) -> None:
        """End the second process, if there is one."""
        if self._from_second is not None:
            self._from_second.close()
            self._from_second = None
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _cores() -> int:
    """Cores to work on: 1 on macOS and Windows, where no fork goes on, and with other releases."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and is_known() else 1


def _constants(graph: Any) -> list[str]:
    return [*graph.constants, *graph.torchbind_constants]


def _lowered(graph: Any) -> list[str]:
    """How a graph was lowered: its buffers with their layouts, its results, what is checked."""
    buffers = [f"{each.get_name()} {each.maybe_get_layout()}" for each in graph.buffers]
    operations = [f"{each.get_operation_name()} {type(each).__name__}" for each in graph.operations]
    return [*buffers, *operations, *graph.get_output_names(), str(graph.inputs_to_check)]
