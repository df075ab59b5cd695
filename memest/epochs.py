"""Runs with batches of different lengths: steps of an epoch, played one after the other.

The allocator keeps blocks in the sizes of earlier batches, so what is reserved depends on the order
of lengths. A number of drawn steps is played with the largest batch there can be among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from memest.distributed import Strategy
from memest.hidden.call import GpuTraits
from memest.setup import Setup
from memest.steps.joined import STEPS_NEEDED, joined
from memest.steps.stream import Stream
from memest.tracing import Found, Tracer

__all__ = ["length_notes", "varied"]

_SHARE = 0.05
"""Batches laid flat are told with a bound that an epoch exceeds with this chance at most."""


@dataclass(frozen=True)
class _Varied(Found):
    """A question whose steps have lengths of their own."""

    steps: tuple[Stream, ...] = ()

    @property
    def stream(self) -> Stream:
        """The steps one after the other, and what follows them."""
        return self.with_tails(joined(self.steps))

    short_stream = stream


def varied(tracer: Tracer, asked: Setup, found: Found, gpu: GpuTraits) -> Found:
    """The answer with steps of drawn lengths in place of the largest batch alone.

    Where the setup has no lengths, or nothing to draw, it is the answer itself.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        found: its answer.
        gpu: whose kernels run.

    Raises:
        TraceError: steps of different lengths cannot be put together.
    """
    batching = asked.batching
    if batching is None or batching.steps < 2 or _alone(asked):
        return found
    drawn = batching.drawn(asked.batch, batching.steps)
    if len(set(drawn)) == 1:
        return found
    streams = {}
    for length in sorted(set(drawn)):
        own = replace(asked, batching=None, seq_len=length, num_steps=STEPS_NEEDED)
        streams[length] = tracer.find(own, gpu).short_stream
    runs = (drawn[0], *drawn)  # the first two steps of a run are its own
    values = {field.name: getattr(found, field.name) for field in fields(Found)}
    return _Varied(**values, steps=tuple(streams[length] for length in runs))


def _alone(asked: Setup) -> bool:
    """Where the largest batch is answered alone."""
    return asked.distributed.strategy is not Strategy.NONE or asked.eval_batch is not None


def length_notes(asked: Setup) -> Iterator[str]:
    """What there is to know of the lengths: the worst batch, the usual one, their chances."""
    batching, batch = asked.batching, asked.batch
    if batching is None:
        return
    cut = batching.cut
    spread = f"{cut.counts[0][0]:,} to {cut.longest:,} tokens, {cut.mean:,.0f} on average"
    yield f"lengths: {cut.samples:,} samples of {spread}."
    epoch = batching.batches(batch)
    if batching.flat:
        total = cut.sum_of_longest(batch)
        bound = batching.flat_at_most(batch, _SHARE)
        yield (
            f"the largest batch there can be has {total:,} tokens, the {batch} longest samples; "
            f"one of an epoch's {epoch:,} batches exceeds {bound:,} with a chance of "
            f"{_SHARE:.0%} at most; the usual batch has {batch * cut.mean:,.0f}."
        )
    else:
        usual = batching.mean_padded(batch)
        worst = batching.worst(batch)
        yield (
            f"the largest batch is padded to {worst:,} tokens, and every epoch has one, because "
            f"every sample is seen ({epoch:,} batches; dropping the last may leave it out); the "
            f"usual one is padded to {usual:,.0f}."
        )
        if usual < 0.95 * worst:
            chance = batching.chance_above(batch, int(0.95 * worst), 100)
            yield (
                f"the chance that the first 100 batches have one above {int(0.95 * worst):,} "
                f"tokens is {chance:.1%}: a short trial may look safe and the epoch run out."
            )
    if _alone(asked) or batching.steps < 2:
        yield "lengths: the largest batch alone is played, not a mixture of lengths."
    else:
        yield (
            f"lengths: {batching.steps} steps drawn with seed {batching.seed} are played, the "
            f"largest batch {'first' if batching.group_by_length else 'last'}; a longer epoch can "
            "leave the allocator with more blocks that no later batch fits (--length-steps), and "
            "micro-batches of one step have one length."
        )
