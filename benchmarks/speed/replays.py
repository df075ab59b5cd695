"""Cases: the caching allocator's replay."""

from __future__ import annotations

import random

from speed.case import Bench, Case, Work

KIB, MIB = 1 << 10, 1 << 20
EVENTS = 100_000


def training_like_stream(num_events: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Steps of a forward pass that keeps tensors and a backward pass that frees them.

    Sizes repeat from step to step, most tensors are temporaries, and a part of the blocks lives
    on (parameters and states), as in a recorded training run.
    """
    rng = random.Random(seed)
    layer = [rng.choice((512, 2 * KIB, 48 * KIB, 3 * MIB, 8 * MIB, 12 * MIB)) for _ in range(24)]
    layer = [size + rng.randrange(0, size, 4) for size in layer]
    events: list[int] = []
    sizes: list[int] = []

    def allocate(size: int) -> int:
        sizes.append(size)
        events.append(len(sizes) - 1)
        return events[-1]

    for size in layer * 24:
        allocate(size)
    while len(events) < num_events:
        tensors: list[int] = []
        for _ in range(24):
            for size in layer:
                tensor = allocate(size)
                tensors.append(tensor)
                if rng.random() < 0.6:
                    # A temporary, dead as soon as a later operation has read it.
                    events.append(
                        ~tensors.pop(rng.randrange(max(0, len(tensors) - 4), len(tensors)))
                    )
        for tensor in reversed(tensors):
            gradient = allocate(sizes[tensor])
            scratch = allocate(rng.choice(layer))
            events.extend((~tensor, ~scratch, ~gradient))
    return events[:num_events], sizes


def fast(*, curve: bool = False, expandable: bool = False):
    def prepare(bench: Bench) -> Work:
        from memest.replay import AllocatorConf, replay

        events, sizes = training_like_stream(EVENTS)
        conf = AllocatorConf(expandable_segments=expandable)

        def work() -> None:
            assert replay(events, sizes, conf, curve=curve).peak_allocated_bytes

        return work

    return prepare


def exact(bench: Bench) -> Work:
    from memest.replay.replay import replay_reference

    events, sizes = training_like_stream(EVENTS)

    def work() -> None:
        assert replay_reference(events, sizes).peak_allocated_bytes

    return work


def bert(bench: Bench) -> Work:
    """Formulas at a point become a stream, which is replayed with nothing remembered."""
    from memest.replay import replay

    run = bench.profile("bert-large-uncased", batch=8, fp16=True).run(gpu="a100")

    def work() -> None:
        stream = run.stream
        stream.chains.memo.clear()
        assert replay(stream.events, stream.sizes, chains=stream.chains)

    return work


CASES = (
    Case("replay", "the replay, for one event of 100,000", "python-1", fast(), units=EVENTS),
    Case("replay-curve", "the same with its curves", "python-1", fast(curve=True), units=EVENTS),
    Case("replay-expandable", "the same with expandable segments",
         "python-1", fast(expandable=True), units=EVENTS),
    Case("replay-exact", "the reference allocator (limits, retries), for one event",
         "python-1", exact, units=EVENTS),
    Case("replay-bert", "three steps of bert-large from formulas, and their replay",
         "python-1", bert),
)  # fmt: skip
