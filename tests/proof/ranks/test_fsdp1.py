"""FSDP1: flat parameters, its units beside adapters, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Weight
from memest.sharding.fsdp1 import flat_of


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

    from memest.sharding.fsdp_units import _peft_units, plan_units
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
        apart=_peft_units(landmarks_of(model).kinds, weights_of(model)),
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
            {"fsdp_cpu_ram_efficient_loading": True},
            "no meaning without --fsdp full_shard",
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
