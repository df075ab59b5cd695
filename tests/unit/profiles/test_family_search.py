"""Lengths of any remainder have one family where nothing depends on the remainder, else none."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memest.profiles.family import Family
from memest.profiles.family_search import across
from memest.profiles.formula import NoFormulaError
from support.toy_models import Toy, grow_family, up

SIZES = st.integers(16, 4096)


def told(toy, batch, lengths, thresholds=()) -> Family | None:
    """What is made of a family around the first length, and of one trace at each of the others."""
    first, *others = lengths
    family = grow_family(toy, batch, first, axes=("seq_len",))
    assume(family is not None)
    traces = {point: family.at(point) for point in family.points}
    traces |= {(length,): toy.truth(batch, length) for length in others}
    try:
        return across(traces, (others[-1],), ("seq_len",), {"batch": batch}, thresholds)
    except NoFormulaError:
        return None


def odd_and_even(lengths):
    rests = {length % 128 for length in lengths}
    return len(rests) >= 3 and len({rest % 2 for rest in rests}) == 2


def right(family, toy, batch, length):
    point = family.point_of({"batch": batch, "seq_len": length})
    return point is None or family.at(point).sizes == toy.truth(batch, length).sizes


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 16), lengths=st.lists(SIZES, min_size=3, max_size=6), asked=SIZES,
    whole=st.integers(1, 32),
)  # fmt: skip
def test_where_nothing_is_padded_every_length_between_is_known(batch, lengths, asked, whole):
    assume(odd_and_even(lengths))
    lengths = [*lengths, whole * 128]  # what is done to multiples would show there
    toy = Toy(lambda b, s: [b * s * (s + 1) // 2, (b - 1) * (s - 1) * 7, b * b * 4])

    family = told(toy, batch, lengths)

    assert family is not None
    point = family.point_of({"batch": batch, "seq_len": asked})
    assert (point is None) == (not min(family.points) <= (asked,) <= max(family.points))
    assert right(family, toy, batch, asked)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 16), lengths=st.lists(SIZES, min_size=3, max_size=6),
    multiple=st.sampled_from([2, 4, 8, 16, 32, 48, 64, 100, 128, 192, 256, 1024]),
    down=st.booleans(), asked=st.lists(SIZES, min_size=20, max_size=20),
)  # fmt: skip
def test_what_is_padded_or_cut_to_a_multiple_has_no_such_family(
    batch, lengths, multiple, down, asked
):
    def padded(s):
        return s // multiple * multiple if down else up(s, multiple)

    toy = Toy(lambda b, s: [b * padded(s) * 512, padded(s) // multiple])

    assert told(toy, batch, lengths) is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 16), lengths=st.lists(SIZES, min_size=3, max_size=6), window=SIZES,
    said=st.booleans(), asked=st.lists(SIZES, min_size=20, max_size=20),
)  # fmt: skip
def test_a_window_is_not_missed(batch, lengths, window, said, asked):
    toy = Toy(lambda b, s: [b * min(s, window) * 512, b * s * min(s, window) * 12])

    family = told(toy, batch, lengths, [window] if said else [])

    assert family is None or all(right(family, toy, batch, length) for length in asked)


@pytest.mark.parametrize(
    "lengths",
    [(512, 256, 1024), (512, 514, 1026), (511, 513, 1023), (512, 513, 641), (500, 333, 202)],
    ids=["one remainder", "even ones", "odd ones", "two remainders", "no multiple"],
)
def test_too_few_remainders_tell_nothing(lengths):
    assert told(Toy(lambda b, s: []), 4, lengths) is None


def test_batches_of_one_sample_are_left_out():
    """They go other ways, and a family of a batch as an axis answers for none of them."""
    toy = Toy(lambda b, s: [b * s * 64 if b > 1 else 1])
    points = [(1, 200), (2, 200), (3, 333), (5, 471), (7, 1024), (4, 640), (6, 55), (8, 90)]
    traces = {point: toy.truth(*point) for point in points}

    family = across(traces, (3, 333), ("batch", "seq_len"), {})

    assert family is not None
    assert (1, 200) not in family.points


@pytest.mark.slow
def test_a_model_is_traced_a_few_times_for_lengths_of_any_remainder():
    pytest.importorskip("transformers")
    from memest.catalog.gpus import find_gpu, traits
    from memest.catalog.resolve import resolve_model
    from memest.config.options import setup_from_options
    from memest.estimation.profiler import Profiler
    from memest.estimation.whole_run import steps_run
    from memest.profiles.cache import Store

    source = resolve_model("EleutherAI/pythia-14m?num_hidden_layers=2")
    tracer = Profiler(source=source, stores=(Store(None),))
    gpu = traits(find_gpu("a100-80gb"))
    lengths = (100, 333, 470, 511, 64, 77, 256, 301, 402, 18, 95, 222)
    found = {n: steps_run(tracer, setup_from_options(batch=1, seq_len=n), gpu) for n in lengths}
    made = tracer.traces_made

    assert made <= 8
    for n in (222, 301):
        own = tracer.trace(setup_from_options(batch=1, seq_len=n), gpu)
        assert found[n].stream.events == own.stream.events
        assert list(found[n].stream.sizes) == list(own.stream.sizes)


@pytest.mark.slow
def test_where_attention_pads_each_remainder_keeps_its_own_traces():
    """The memory-efficient kernel keeps a sum for every 32 tokens that were begun."""
    pytest.importorskip("transformers")
    from memest.catalog.gpus import find_gpu, traits
    from memest.catalog.resolve import resolve_model
    from memest.config.options import setup_from_options
    from memest.estimation.profiler import Profiler
    from memest.estimation.whole_run import steps_run
    from memest.profiles.cache import Store

    source = resolve_model("EleutherAI/pythia-14m?num_hidden_layers=2")
    tracer = Profiler(source=source, stores=(Store(None),))
    gpu = traits(find_gpu("t4"))
    lengths = (100, 333, 470, 511, 401)
    half = {"fp16": True, "dtype": "float32"}
    setups = {n: setup_from_options(batch=1, seq_len=n, **half) for n in lengths}
    found = {n: steps_run(tracer, setups[n], gpu) for n in lengths}

    assert tracer.traces_made > 8, "a family across remainders would have needed no more"
    for n in lengths:
        own = tracer.trace(setups[n], gpu)
        assert list(found[n].stream.sizes) == list(own.stream.sizes), n
