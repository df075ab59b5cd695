"""Traces on demand: one model, one setup, asked for GPUs and batch sizes.

Torch is loaded when the first trace is made, not before. A trace serves every GPU on which
PyTorch picks the same attention kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memest.errors import MissingDependencyError
from memest.events import Trace
from memest.hidden.call import GpuTraits
from memest.steps.batch_line import BatchLine, NotLinearError
from memest.result import ModelFacts
from memest.setup import Setup

if TYPE_CHECKING:
    from memest.models.resolve import ModelSource

__all__ = ["Tracer", "installed_version"]

Progress = Callable[[str], None]


def installed_version(package: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package without importing it, None if it is not there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@dataclass(slots=True)
class Tracer:
    """Makes and keeps the traces of one model and setup.

    Attributes:
        setup: as asked for; ``resolved`` has the sizes that were taken.
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        inputs: example inputs of a live module or factory, None otherwise.
        loss: takes the loss out of a live module's outputs, None for the usual ways.
        progress: told what is being done.
    """

    setup: Setup
    source: ModelSource | None = None
    module: Any = None
    inputs: Any = None
    loss: Any = None
    progress: Progress | None = None
    facts: ModelFacts | None = None
    assumptions: tuple[str, ...] = ()
    _built: Any = None
    _traces: dict[tuple[int, tuple[tuple[Any, str], ...]], Trace] = field(default_factory=dict)
    _lines: dict[tuple[tuple[Any, str], ...], BatchLine | None] = field(default_factory=dict)

    def trace(self, gpu: GpuTraits, batch: int | None = None) -> Trace:
        """The trace for a GPU (and another batch size than the setup's)."""
        built = self._build()  # example inputs decide the batch of the setup
        batch = batch or self.setup.batch
        for (known_batch, choices), trace in self._traces.items():
            if known_batch == batch and self._same_choices(choices, gpu):
                return trace
        from memest.trace.session import trace_built

        self._say(f"tracing training steps at batch {batch}")
        trace = trace_built(built, replace(self.setup, batch=batch), gpu)
        self._traces[(batch, tuple(trace.attention_choices.items()))] = trace
        return trace

    def at_batch(self, gpu: GpuTraits, batch: int) -> Trace:
        """The trace at any batch size, by the line through two traces where it is one.

        Two traces cannot tell a line from a curve (a contrastive loss compares all pairs of a
        batch): where it matters, compare with :meth:`trace`.
        """
        if batch == 1 or batch == self.setup.batch:
            return self.trace(gpu, batch)
        key = tuple(self.trace(gpu).attention_choices.items())
        if key not in self._lines:
            low = max(self.setup.batch, 2)
            high = low + 1
            try:
                self._lines[key] = BatchLine(self.trace(gpu, low), low, self.trace(gpu, high), high)
            except NotLinearError:
                self._lines[key] = None
        line = self._lines[key]
        if line is not None:
            try:
                return line.at(batch)
            except NotLinearError:
                pass
        return self.trace(gpu, batch)

    def give_up_line(self, gpu: GpuTraits) -> None:
        """From now on :meth:`at_batch` traces every batch size."""
        self._lines[tuple(self.trace(gpu).attention_choices.items())] = None

    def _same_choices(self, choices: tuple[tuple[Any, str], ...], gpu: GpuTraits) -> bool:
        if not choices:
            return True
        from memest.trace.sdpa import choose_backend

        return all(
            choose_backend(call, gpu, self.setup.sdpa_backend).value == backend
            for call, backend in choices
        )

    def _build(self) -> Any:
        if self._built is not None:
            return self._built
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Tracing a model needs torch and transformers: pip install 'memest[torch]'."
            ) from error
        from memest.trace.session import build

        self._say("building the model on the meta device")
        self._built = build(self.setup, self.source, self.module, self.inputs, self.loss)
        self.facts = self._built.facts
        self.assumptions = self._built.assumptions
        self.setup = self._built.resolved
        return self._built

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text)
