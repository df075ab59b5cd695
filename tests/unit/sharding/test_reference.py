"""A reference beside the model that is trained: what it has of its own."""

from __future__ import annotations

import pytest

from memest.config.deepspeed import with_hidden_size
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.errors import TraceError
from memest.events import CATEGORY_ORDER, REFERENCE, Category, CueKind, Landmarks, Weight
from memest.profiles.stream import Stream
from memest.sharding import rank
from memest.sharding.engine import DEFAULT_STREAM, Rewriter
from memest.sharding.reference import WithReference, reference_weights

WEIGHT = Weight("w", (8, 4), (4, 1), "bfloat16", trains=True, decays=True, has_grad=True)
AUTO = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}


def both(**settings):
    """Rank 0 of a model and of its reference under ZeRO-3."""
    sharded = Distributed(num_gpus=2, zero=3, zero_settings=settings)
    filled_in = with_hidden_size(sharded, {"hidden_size": 64})
    setup = Setup(method="dpo", precision="bf16", distributed=filled_in)
    common = {"to": Rewriter(loaded()), "last_micro_step": 1}
    trained = rank._zero({**common, "weights": (WEIGHT,)}, setup, Landmarks())
    asked = {**common, "weights": reference_weights((WEIGHT,))}
    return trained, rank._zero(asked, setup, Landmarks(), root=REFERENCE)


def loaded(times=1):
    """A stream that has loaded a parameter, and a reference's so many times."""
    kinds = [Category.PARAMETERS, *[Category.REFERENCE] * times]
    return Stream(
        events=range(len(kinds)),
        categories=bytes(map(CATEGORY_ORDER.index, kinds)),
        modules=[0] * len(kinds),
        labels=[0] * len(kinds),
        label_names=["load"],
        module_names=[""],
        sizes=[64] * len(kinds),
    )


def test_what_a_file_leaves_open_is_deepspeeds_default_for_the_reference():
    """TRL makes its engine before the Trainer has filled in what follows the hidden size."""
    trained, reference = (each.fetcher.limits for each in both(**AUTO))
    assert trained.prefetch_bucket_size == int(0.9 * 64 * 64)
    assert reference.prefetch_bucket_size == 50_000_000
    assert reference.param_persistence_threshold == 100_000

    trained, reference = (each.fetcher.limits for each in both(stage3_prefetch_bucket_size=7))
    assert trained.prefetch_bucket_size == reference.prefetch_bucket_size == 7


def test_each_is_gathered_on_a_stream_of_its_own():
    streams = {each.fetcher.stream for each in both()}
    assert len(streams | {DEFAULT_STREAM}) == 3


def test_a_reference_that_is_loaded_otherwise_is_refused():
    trained, reference = both()
    wrapper = WithReference(to=trained.to, trained=trained, reference=reference)
    for number in (0, 1, 1):
        wrapper.allocates(number)
    with pytest.raises(TraceError, match="in 2 pieces and the model in 1"):
        wrapper.cue(CueKind.PLACED, 0, 0)
