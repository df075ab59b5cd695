"""Skipping copies of parts that were played before changes nothing but the time."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.events import Chain, Chains, Part
from memest.replay.conf import AllocatorConf
from memest.replay.replay import replay, replay_reference
from memest.units import KIB, MIB

SIZE_LIST = [0, 100, 512, 3 * KIB, 700 * KIB, MIB, 3 * MIB, 7 * MIB, 12 * MIB, 30 * MIB]
SIZES = st.sampled_from(SIZE_LIST)


@st.composite
def runs(draw):
    """A prelude, then copies of one part that each take over what the one before left."""
    events, sizes = array("q"), []

    def born(size):
        sizes.append(size)
        events.append(len(sizes) - 1)
        return len(sizes) - 1

    left = [born(draw(SIZES)) for _ in range(draw(st.integers(0, 4)))]
    kept = [born(size) for size in draw(st.lists(SIZES, max_size=4))]
    for number in kept[::2]:
        events.append(~number)
    script = draw(
        st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 7)), min_size=2, max_size=30)
    )
    handed = draw(st.permutations(range(len(left))))
    parts = []
    length = count = 0
    for _ in range(draw(st.integers(2, 7))):
        start, number, alive, carried = len(events), len(sizes), [], []
        replaced = []
        for place in handed:
            replaced.append(born(sizes[left[place]]))
            carried.append(left[place])
            events.append(~left[place])
        for birth, size, which in script:
            if birth or not alive:
                alive.append(born(size))
            else:
                events.append(~alive.pop(which % len(alive)))
        for one in alive:
            events.append(~one)
        left = [replaced[handed.index(place)] for place in range(len(left))]
        parts.append(Part(start, number, tuple(carried)))
        length, count = len(events) - start, len(sizes) - number
    tail = born(draw(SIZES))
    events.append(~tail)
    kinds = sizes if draw(st.booleans()) else ()
    return events, sizes, Chains([Chain(length, count, parts)], kinds)


@pytest.mark.slow
@given(runs(), st.permutations(SIZE_LIST), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_answer_is_the_same_with_and_without_them(run, other_sizes, expandable):
    events, sizes, chains = run
    conf = AllocatorConf(expandable_segments=expandable)
    # streams that differ in nothing but sizes share what is remembered of their structure
    changed = dict(zip(SIZE_LIST, other_sizes, strict=True))
    for these_sizes in (sizes, [changed[size] for size in sizes]):
        peaks = replay(events, these_sizes, conf, chains=chains)
        quick = replay(events, these_sizes, conf, curve=True, chains=chains)
        assert quick == replay(events, these_sizes, conf, curve=True, chains=chains)  # from memory

        assert quick == replay(events, these_sizes, conf, curve=True)
        assert quick == replay_reference(events, these_sizes, conf, curve=True)
        assert peaks == replace(quick, allocated_curve=None, reserved_curve=None)
