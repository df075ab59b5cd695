"""Runs with a ``generate`` behind them: a phase of its own, in the same allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.events import Trace
from memest.hidden.call import GpuTraits
from memest.setup import Setup
from memest.steps.evaluation import with_evaluation
from memest.steps.stream import Stream
from memest.tracing import Found, Tracer

__all__ = ["generated", "generation_notes"]

_STEPS_BESIDE = 1
"""The prompt is a step that makes no token of its own: its token comes with the next."""


@dataclass(frozen=True)
class _Generated(Found):
    """A question whose run ends with a generation."""

    before: Found | None = None
    generation: Trace | None = None

    @property
    def stream(self) -> Stream:
        """The run, then the generation."""
        assert self.before is not None
        return self._behind(self.before.stream)

    @property
    def short_stream(self) -> Stream:
        """The same with no more micro-steps than it must have."""
        assert self.before is not None
        return self._behind(self.before.short_stream)

    def _behind(self, stream: Stream) -> Stream:
        assert self.generation is not None
        assert self.setup.generation is not None
        _, known = self.program.numbers_at(self.point, self.gpu)
        return with_evaluation(
            stream, self.generation, self.gpu, tuple(known),
            batches=self.setup.generation.new_tokens + _STEPS_BESIDE, step=self.setup.num_steps,
        )  # fmt: skip


def generated(tracer: Tracer, found: Found, gpu: GpuTraits) -> Found:
    """The answer with the generation that its setup names; the answer itself where there is none.

    Raises:
        ConfigError: the model cannot generate, or not spread over several GPUs.
        TraceError: something that a trace cannot follow.
    """
    setup = found.setup
    if setup.generation is None:
        return found
    if setup.distributed.strategy is not Strategy.NONE:
        raise ConfigError(
            "--generate is not priced together with several GPUs yet, and memest does not guess: "
            "leave one of them out."
        )
    batch = setup.eval_batch or setup.batch
    own = replace(setup, batch=batch, padded=False, batching=None, padding_free=False)
    trace = tracer.generation(own, gpu)
    values = {field.name: getattr(found, field.name) for field in fields(Found)}
    return _Generated(**values, before=found, generation=trace)


def generation_notes(setup: Setup) -> Iterator[str]:
    """What there is to know of the generation."""
    asked = setup.generation
    if asked is None:
        return
    batch = setup.eval_batch or setup.batch
    yield (
        f"generation: {batch} prompts of {setup.seq_len} tokens (dense: padding changes the mask "
        f"alone), {asked.words}, until the end: sequences that finish early are carried along."
    )
    if asked.cache == "dynamic":
        yield (
            "generation: a dynamic cache is concatenated anew at every step, layer by layer, into "
            "blocks that grow, so the allocator keeps smaller ones that nothing fits; "
            "--cache-implementation static allocates once."
        )
