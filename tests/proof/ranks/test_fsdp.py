"""FSDP2: real ``fully_shard`` under the fake process group against predicted ranks, in order."""

from __future__ import annotations

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.replay.replay import check_events
from memest.sharding.fsdp_units import padded_elements, plan_units
from support.ranks import as_run, freed_from_before, of_steps, predicted_rank, real_rank
from support.real_memory import differences

HOST = 6144
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""
RNG_STATES = 8 * 5056
FULL, GRAD = {"fsdp": "full_shard"}, {"fsdp": "shard_grad_op"}

LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
FOUR = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "prepare": False,
}  # fmt: skip
FEW = {"batch": 2}
"""Half the samples, where products in bfloat16 take a CPU twenty times as long."""
HALVES = {
    "loop": "accelerate", "precision": "bf16", "dtype": "bfloat16", "adapter": {**LORA, "r": 16},
    **FEW,
}  # fmt: skip


FOUR_IN_FULL = {
    "loop": "plain", "precision": "fp32", "dtype": "float32", "adapter": LORA, "batch": 4,
}  # fmt: skip


def four_bits(storage, compute="bfloat16", **more):
    dtypes = {"bnb_4bit_quant_storage": storage, "bnb_4bit_compute_dtype": compute}
    return {**HALVES, "quantization": {**FOUR, **dtypes}, **more}


CASES = [
    ("llama", {"loop": "plain"}, FULL, 2),
    ("llama", {"loop": "plain"}, GRAD, 3),
    ("llama", {"loop": "plain"}, FULL, 1),
    ("llama", {"loop": "plain", "grad_accum": 2}, FULL, 4),
    ("llama", {"loop": "plain", "grad_accum": 2, "zero_grad": "zero"}, FULL, 2),
    ("llama", {"loop": "plain", "checkpointing": "full"}, FULL, 8),
    ("llama", {"loop": "plain", "checkpointing": "full", "use_reentrant": True}, FULL, 2),
    ("llama", {"loop": "plain", "freeze": ["embed", "layers.0"]}, FULL, 2),
    ("bert", {"loop": "plain"}, FULL, 8),
    ("gpt2", {"loop": "plain"}, FULL, 4),
    ("t5", {"loop": "plain"}, FULL, 2),
    ("vit", {"loop": "plain"}, FULL, 2),
    ("mixtral", {"loop": "plain", "dtype": "bfloat16", **FEW}, FULL, 2),
    ("llama", {"loop": "plain"}, {**FULL, "fsdp_shard_size": 2}, 4),
    ("llama", {"loop": "plain", "grad_accum": 2}, {**FULL, "fsdp_shard_size": 4}, 8),
    (
        "llama",
        {"loop": "accelerate", "precision": "bf16", **FEW, "grad_accum": 2},
        {**FULL, "fsdp_shard_size": 2},
        6,
    ),
    ("llama", {"loop": "accelerate"}, FULL, 2),
    ("llama", {"loop": "accelerate", "precision": "bf16", **FEW}, FULL, 2),
    ("llama", {"loop": "accelerate", "precision": "bf16", **FEW, "grad_accum": 2}, FULL, 4),
    (
        "llama-tied",
        {"loop": "accelerate", "precision": "bf16", **FEW, "checkpointing": "full"},
        GRAD,
        2,
    ),
    ("llama", {"loop": "plain", "adapter": LORA}, FULL, 2),
    ("llama", HALVES, FULL, 2),
    ("llama", {**HALVES, "checkpointing": "full", "grad_accum": 2}, FULL, 3),
    ("llama", four_bits("bfloat16"), FULL, 2),
    ("llama", four_bits("bfloat16", checkpointing="full"), GRAD, 4),
    ("llama", four_bits("uint8", grad_accum=2), FULL, 2),
    (
        "llama",
        four_bits("float32", "float32", **FOUR_IN_FULL),
        FULL,
        2,
    ),
]
SAME_KERNELS = ("llama", "llama-tied")
"""Models whose operators the CPU takes as a trace with its choices does, one by one."""


@pytest.mark.slow(
    but=(
        "llama-setup2-spread2-1",
        "llama-setup7-spread7-2",
    )
)
@pytest.mark.parametrize(("model", "setup", "spread", "ranks"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, setup, spread, ranks):
    """Shards, gathers, copies, reductions: every allocation and free of the steps, in order."""
    case = {"model": model, "ranks": ranks, "setup": setup, "spread": spread}
    real, stream = real_rank(case), predicted_rank(case)
    predicted = as_run(stream)
    check_events(stream.events, stream.sizes)

    measured = {phase.name: phase for phase in real.phases}
    scratch = 0.005 * real.peak
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    assert len(steps) > 10
    # the file that a quantized base was read from on a CPU goes with the last whole weight
    gone = freed_from_before(real) if "quantization" in setup else 0
    for phase in steps:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive - gone) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak - gone) <= host + scratch, f"peak in {phase.name}"
    if model in SAME_KERNELS:
        assert len(predicted.allocations(at_least=8192)) > 300
        assert differences(of_steps(real), of_steps(predicted), at_least=8192) == []


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


def units_of(*names, **options):
    options = {"classes": (), "reshards": True, "as_accelerate": True, **options}
    plans = plan_units(MARKS, make_weights(*names), **options)
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
    assert units_of(*names)[2:] == [
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
