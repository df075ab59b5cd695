"""Events per second of the allocator replay, beside a plain counting loop in the same run.

The machine's speed varies; the ratio to the counting loop varies less. Run: python bench_replay.py
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from memest.replay import AllocatorConf, replay
from memest.replay.replay import replay_reference

KIB, MIB = 1 << 10, 1 << 20


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
        saved: list[int] = []
        for _ in range(24):
            for size in layer:
                kept = allocate(size)
                saved.append(kept)
                if rng.random() < 0.6:
                    # A temporary, dead as soon as a later operation has read it.
                    events.append(~saved.pop(rng.randrange(max(0, len(saved) - 4), len(saved))))
        for kept in reversed(saved):
            gradient = allocate(sizes[kept])
            scratch = allocate(rng.choice(layer))
            events.extend((~kept, ~scratch, ~gradient))
    return events[:num_events], sizes


def counting_loop(events: list[int], sizes: list[int]) -> int:
    """The least that any replay must do: add, subtract, remember, compare."""
    alive: dict[int, int] = {}
    allocated = peak = 0
    for event in events:
        if event >= 0:
            alive[event] = size = (sizes[event] + 511) & -512
            allocated += size
            peak = max(peak, allocated)
        else:
            allocated -= alive.pop(~event)
    return peak


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs: what others do on the machine only ever adds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    events, sizes = training_like_stream(args.events)
    expandable = AllocatorConf(expandable_segments=True)
    cases: dict[str, Callable[[], object]] = {
        "counting loop": lambda: counting_loop(events, sizes),
        "fast, default": lambda: replay(events, sizes),
        "fast, default, curves": lambda: replay(events, sizes, curve=True),
        "fast, expandable": lambda: replay(events, sizes, expandable),
        "reference, default": lambda: replay_reference(events, sizes),
        "reference, expandable": lambda: replay_reference(events, sizes, expandable),
    }
    base = best_seconds(cases["counting loop"], args.repeats)
    print(f"{len(events):,} events, best of {args.repeats}")
    for name, call in cases.items():
        seconds = best_seconds(call, args.repeats)
        rate = len(events) / seconds
        print(f"{name:24} {rate / 1e6:6.2f} M events/s   {seconds / base:6.2f} x counting loop")
    result = replay(events, sizes)
    print(
        f"peak allocated {result.peak_allocated_bytes / MIB:,.0f} MiB, "
        f"reserved {result.peak_reserved_bytes / MIB:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
