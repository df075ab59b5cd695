"""FSDP2: shards, units, what an estimate says of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.sharding.fsdp_units import padded_elements, plan_units


@pytest.mark.parametrize(
    ("shape", "ranks", "elements"),
    [((50, 62), 4, 13 * 62), ((8,), 3, 3), ((2, 5), 8, 5), ((7, 3, 2), 1, 42)],
)
def test_shards_are_padded_to_the_first_chunk(shape, ranks, elements):
    weight = Weight("w", shape, (), "float32", trains=True, decays=True, has_grad=True)
    assert padded_elements(weight, ranks) == elements


def test_a_number_cannot_be_sharded():
    weight = Weight("scale", (), (), "float32", trains=True, decays=True, has_grad=True)
    with pytest.raises(ConfigError, match="a parameter without dimensions"):
        padded_elements(weight, 2)


def make_weights(*names):
    return [
        Weight(n, (4, 4), (4, 1), "float32", trains=True, decays=True, has_grad=True) for n in names
    ]


KINDS = {
    "": "Model", "embed": "Embedding", "layers": "ModuleList", "layers.0": "Layer",
    "layers.0.proj": "Linear", "layers.1": "Layer", "layers.1.proj": "Linear", "norm": "RMSNorm",
    "head": "Linear",
}  # fmt: skip
MARKS = Landmarks(kinds=KINDS, blocks=("Layer",), embeddings="embed", head="head", norm="norm")


def units_of(*names, marks=MARKS, **options):
    options = {"classes": (), "reshards": True, "as_accelerate": True, **options}
    plans = plan_units(marks, make_weights(*names), **options)
    return [(plan.modules, plan.weights, plan.reshards) for plan in plans]


def test_units_of_accelerate():
    names = ("embed.weight", "layers.0.proj.weight", "layers.1.proj.weight", "norm.weight")
    assert units_of(*names, "head.weight") == [
        (("layers.0",), (1,), True),
        (("layers.1",), (2,), True),
        (("embed",), (0,), True),
        (("norm", "head"), (3, 4), False),
        (("",), (), False),
    ]
    # tied: the head has no weight of its own
    tied = replace(MARKS, shared_paths={"head.weight": "embed.weight"})
    assert units_of(*names, marks=tied)[2:] == [
        (("norm", "embed", "head"), (3, 0), False),
        (("",), (), False),
    ]


def test_units_of_the_tutorial():
    names = ("embed.weight", "layers.0.proj.weight", "layers.1.proj.weight", "norm.weight")
    assert units_of(*names, as_accelerate=False) == [
        (("layers.0",), (1,), True),
        (("layers.1",), (2,), True),
        (("",), (0, 3), False),
    ]


def test_an_unknown_class_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'Layer'"):
        units_of("embed.weight", classes=("Layr",))


TINY = {"batch": 2, "seq_len": 64, "gpu": "a100-80gb", "max_batch": False}


def tiny(model="prajjwal1/bert-tiny", **options):
    return memest.estimate(model, **{**TINY, **options})


def test_sharding_divides_states_and_keeps_activations():
    run = {"loop": "plain", "fsdp": "full_shard"}
    two, eight = tiny(num_gpus=2, **run), tiny(num_gpus=8, **run)

    def row(estimate, name):
        return next((r.bytes for r in estimate.breakdown if r.category == name), 0)

    assert two.peak.allocated_bytes > eight.peak.allocated_bytes
    assert row(two, "parameters") == pytest.approx(4 * row(eight, "parameters"), rel=0.02)
    assert row(two, "optimizer states") == pytest.approx(
        4 * row(eight, "optimizer states"), rel=0.02
    )
    assert "FSDP2 full_shard" in str(two)


def test_accumulation_keeps_whole_gradients_under_accelerate():
    """``no_sync``: gradients are not sharded until the last micro-batch."""
    run = {"loop": "accelerate", "fsdp": "full_shard", "num_gpus": 8, "fsdp_wrap": ["BertLayer"]}
    one, four = tiny(**run), tiny(**run, grad_accum=4)
    more = four.peak.allocated_bytes - one.peak.allocated_bytes
    assert more > 0.7 * one.model.parameter_bytes


def test_offloading_leaves_no_states_on_the_gpu():
    run = {"loop": "plain", "fsdp": "full_shard", "num_gpus": 2}
    there, away = tiny(**run), tiny(**run, fsdp_offload=True)
    assert away.peak.allocated_bytes < there.peak.allocated_bytes
    assert not any(r.category in ("optimizer states", "parameters") for r in away.breakdown)
    assert any("host memory" in note for note in away.notes)


def test_what_accelerate_would_stop_at_is_refused():
    with pytest.raises(ConfigError, match="--fsdp-wrap BertLayer"):
        tiny(loop="trainer", fsdp="full_shard", num_gpus=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp": "full"}, "Did you mean 'full_shard'"),
        ({"fsdp": "hybrid_shard"}, "--fsdp-shard-size"),
        ({"fsdp": "full_shard", "num_gpus": 8, "fsdp_shard_size": 3}, "does not divide the 8 GPUs"),
        ({"num_gpus": 8, "fsdp_shard_size": 2}, "no meaning without --fsdp"),
        ({"fsdp": "full_shard", "num_gpus": 2, "ddp_bucket_cap_mb": 10}, "takes the place of DDP"),
        ({"fsdp_offload": True}, "no meaning without --fsdp"),
        ({"fsdp": "full_shard", "zero": 2}, "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        tiny(**options)
