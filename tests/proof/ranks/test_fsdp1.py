"""FSDP1: ranks of the real ``FullyShardedDataParallel``, against predicted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Weight
from memest.replay.replay import check_events
from memest.sharding.fsdp1 import flat_of
from support.ranks import as_run, freed_from_before, of_steps, predicted_rank, real_rank
from support.real_memory import differences

HOST = 6144
RNG = 5056
"""What a CPU keeps of its generator for each checkpoint."""


def case(model="llama", ranks=2, fsdp="full_shard", setup=(), **spread):
    return {
        "model": model, "ranks": ranks, "setup": {"loop": "plain", **dict(setup)},
        "spread": {"fsdp": fsdp, "fsdp_version": 1, **spread},
    }  # fmt: skip


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


ACCELERATE = {"loop": "accelerate", "precision": "bf16", **FEW}
CASES = {
    "tutorial": case(),
    "accelerate": case(ranks=4, setup=ACCELERATE),
    "accelerate accumulates": case(setup={**ACCELERATE, "grad_accum": 2}),
    "script accumulates": case("llama-tied", setup={"grad_accum": 2}),
    "parameters for the optimizer, odd ranks": case("llama-gqa", 3, fsdp_use_orig_params=True),
    "kept, gathered behind": case(
        "gpt_neox", 3, "shard_grad_op", fsdp_backward_prefetch="backward_post"
    ),
    "kept, accumulates": case(
        ranks=2, fsdp="shard_grad_op", setup={"loop": "accelerate", "grad_accum": 3}
    ),
    "gathered behind": case("gpt_neox", 3, fsdp_backward_prefetch="backward_post"),
    "nothing ahead": case(fsdp_backward_prefetch="no_prefetch"),
    "recomputation": case(setup={"checkpointing": "full"}),
    "whole": case(fsdp="no_shard"),
    "whole, accumulates": case(fsdp="no_shard", setup={"grad_accum": 2}),
    "whole, parameters for the optimizer": case(
        "llama-gqa", 3, "no_shard", setup=ACCELERATE, fsdp_use_orig_params=True
    ),
    "whole, accelerate accumulates": case(fsdp="no_shard", setup={**ACCELERATE, "grad_accum": 2}),
    "one rank": case(ranks=1),
    "adapters": case(setup={"adapter": LORA}),
    "adapters, gathered behind": case(
        setup={"adapter": LORA}, fsdp_backward_prefetch="backward_post"
    ),
    "adapters, accelerate": case(ranks=4, setup=HALVES),
    "adapters, accelerate accumulates": case(ranks=3, setup={**HALVES, "grad_accum": 2}),
    "adapters, parameters for the optimizer": case(
        ranks=3, setup=HALVES, fsdp_use_orig_params=True
    ),
    "adapters, kept": case(fsdp="shard_grad_op", setup={**HALVES, "grad_accum": 2}),
    "adapters, recomputation": case(setup={**HALVES, "checkpointing": "full"}),
    "adapters, reentrant recomputation": case(
        setup={
            **HALVES,
            "loop": "plain",
            "precision": "fp32",
            "checkpointing": "full",
            "use_reentrant": True,
        },
    ),
    "adapters, nothing cut": case(fsdp="no_shard", setup={"adapter": LORA, "dtype": "bfloat16"}),
    "adapters on 4 bits": case(setup=four_bits("bfloat16")),
    "adapters on 4 bits, recomputation": case(
        ranks=4, fsdp="shard_grad_op", setup=four_bits("bfloat16", checkpointing="full")
    ),
    "adapters on 4 bits, a script": case(
        setup=four_bits(
            "bfloat16", loop="plain", precision="fp32", checkpointing="full", use_reentrant=True
        ),
        fsdp_use_orig_params=False,
    ),
    "adapters on 4 bits, float32": case(setup=four_bits("float32", "float32", **FOUR_IN_FULL)),
}


MOVED = ("fsdp: shard in half precision", "_post_forward")
"""Under NO_SHARD the root lets go of its half-precision copy where its forward returns; a stream
has that place at the end of the phase."""


@pytest.mark.slow(
    but=(
        "kept, gathered behind",
        "one rank",
    )
)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_allocates_what_fsdp_does(name):
    """Every phase, and every allocation and free of the steps, in order."""
    run = CASES[name]
    stream = predicted_rank(run)
    check_events(stream.events, stream.sizes)
    predicted, real = as_run(stream), real_rank(run)
    measured = {phase.name: phase for phase in real.phases}
    host = HOST + (3 * RNG if "checkpointing" in run["setup"] else 0)
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    assert len(steps) > 10
    gone = freed_from_before(real) if "quantization" in run["setup"] else 0
    for phase in steps:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive - gone) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak - gone) <= host + 0.005 * real.peak, phase.name
    assert len(predicted.allocations(at_least=8192)) > 150
    found = differences(of_steps(real), of_steps(predicted), at_least=8192)
    if run["spread"]["fsdp"] == "no_shard" and run["setup"]["loop"] == "accelerate":
        found = [line for line in found if line != "--" and not line.endswith(MOVED)]
    assert found == []


@pytest.mark.slow(but=("run0",))
@pytest.mark.parametrize(
    "run",
    [
        case(setup={"optim": "adamw_bnb_8bit"}),
        case(ranks=3, setup={**ACCELERATE, "optim": "lion_8bit"}, fsdp_use_orig_params=True),
        case(fsdp="no_shard", setup={"optim": "adamw_bnb_8bit", "grad_accum": 2}),
    ],
)
def test_states_of_bitsandbytes_lie_beside_flat_shards(run):
    """What is alive between phases; on a CPU its kernels take temporaries that CUDA's do not."""
    stream, real = predicted_rank(run), real_rank(run)
    measured = {phase.name: phase for phase in real.phases}
    states = []
    for phase in as_run(stream).phases:
        if not phase.name.startswith("load"):
            assert abs(phase.alive - measured[phase.name].alive) <= HOST, phase.name
            states.append(phase.alive)
    assert max(states) > min(states) + 100_000


def weight(shape, **more):
    given = {"trains": True, "decays": True, "has_grad": True, "dtype": "bfloat16", **more}
    return Weight("w", shape, (), **given)


def test_parameters_begin_at_aligned_addresses_if_they_are_the_optimizers():
    weights = [weight((3,)), weight((9,)), weight((8,))]
    loose = flat_of((0, 1, 2), weights, ranks=4, aligned=False)
    assert (loose.offsets, loose.elements, loose.shard_elements) == ((0, 3, 12), 20, 5)
    # 16 bytes are 8 elements; and every rank has as many
    aligned = flat_of((0, 1, 2), weights, ranks=5, aligned=True)
    assert (aligned.offsets, aligned.elements, aligned.shard_elements) == ((0, 8, 24), 35, 7)


@pytest.mark.parametrize(
    ("other", "words"),
    [({"dtype": "float32"}, "bfloat16 and float32"), ({"trains": False}, "frozen parameters [(]w")],
)
def test_what_fsdp1_does_not_flatten_is_refused(other, words):
    weights = [weight((4,)), replace(weight((4,)), **other)]
    with pytest.raises(ConfigError, match=words):
        flat_of((0, 1), weights, ranks=2, aligned=True)


def test_units_beside_adapters_are_those_of_peft():
    """Asked of its own policy, module by module."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from transformers import LlamaConfig, LlamaForCausalLM

    from memest.sharding.fsdp_units import plan_units
    from memest.trace.cues import landmarks_of
    from memest.trace.model.adapters import prefix_of
    from memest.trace.optimizers.torch import weights_of

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(config), lora)
    policy, outer = fsdp_auto_wrap_policy(model), prefix_of(model)
    wrapped = {
        name.removeprefix(outer)
        for name, module in model.named_modules()
        if policy(module=module, recurse=False, nonwrapped_numel=0)
    }
    plans = plan_units(
        landmarks_of(model), weights_of(model), classes=(), reshards=True, as_accelerate=False,
        as_peft=True,
    )  # fmt: skip
    assert {module for plan in plans for module in plan.modules if module} == wrapped
    assert len(wrapped) == 2 + 2 * 2 * 2 + 1


TINY = {"batch": 2, "seq_len": 64, "max_batch": False, "num_gpus": 4}


def test_the_version_is_an_option():
    run = {**TINY, "fsdp": "full_shard", "fsdp_wrap": ["BertLayer"]}
    one, two = (memest.estimate("prajjwal1/bert-tiny", fsdp_version=n, **run) for n in (1, 2))
    assert "FSDP1 full_shard" in str(one)
    assert "FSDP2 full_shard" in str(two)
    assert one.peak != two.peak
    away = memest.estimate("prajjwal1/bert-tiny", fsdp_version=1, fsdp_offload=True, **run)
    assert away.peak.allocated_bytes < one.peak.allocated_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp_version": 1}, "--fsdp-version has no meaning without --fsdp full_shard"),
        ({"fsdp": "full_shard", "fsdp_version": 3}, "must be 1 to 2"),
        (
            {"fsdp": "full_shard", "fsdp_backward_prefetch": "backward_pre"},
            "no meaning without --fsdp-version 1",
        ),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_backward_prefetch": "backward_pro"},
            "Did you mean 'backward_pre'",
        ),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_shard_size": 2},
            "no meaning without --fsdp full_shard of --fsdp-version 2",
        ),
        (
            {"fsdp": "full_shard", "fsdp_use_orig_params": False},
            "no meaning without --fsdp-version 1",
        ),
        (
            {"fsdp": "full_shard", "fsdp_cpu_ram_efficient_loading": True},
            "no meaning without --fsdp-version 1",
        ),
        ({"fsdp": "no_shard"}, "add --fsdp-version 1"),
    ],
)
def test_options_that_say_nothing_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        memest.estimate("prajjwal1/bert-tiny", **TINY, **options)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_half_precision_of_either_kind_is_priced(loop):
    """The gradient scaler has the float32 shards, not the halves that the model computes with."""
    model = "HuggingFaceTB/SmolLM2-135M?num_hidden_layers=3"
    asked = {
        "batch": 2, "seq_len": 64, "num_gpus": 2, "fsdp": "full_shard", "fsdp_version": 1,
        "loop": loop,
    }  # fmt: skip
    peaks = [memest.estimate(model, precision=kind, **asked).peak for kind in ("fp16", "bf16")]
    assert abs(peaks[0].allocated_bytes - peaks[1].allocated_bytes) < 1 << 20
