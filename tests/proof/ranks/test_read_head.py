"""Losses that read the head's weight and leave the head uncalled, under FSDP2 and FSDP1.

Real ranks run the losses of TRL as they are written for traces, and Liger's own Python, whose
kernels launch nothing: everything that they allocate on a CPU they allocate on CUDA.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.config.software import Software
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.replay.replay import check_events
from memest.sharding.fsdp_units import check_head_is_gathered, units_of
from support.phases import check_phases
from support.ranks import as_run, of_steps, predicted_rank, real_rank
from support.real_memory import differences

HOST = 6144
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""
RNG_STATES = 8 * 5056
FULL, ONE = {"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_version": 1}
LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
HALF = {"loop": "accelerate", "precision": "bf16", "batch": 2}
"""Few samples: a CPU's products in bfloat16 take twenty times as long."""
LIGER = {"use_liger_kernel": True}
CHUNKED, FUSED = {"fused_loss": "trl-chunked"}, {"fused_loss": "trl-fused"}
AGAIN = {"checkpointing": "full"}

CASES = [
    ("llama", {**HALF, **CHUNKED, "grad_accum": 2}, FULL, 4),
    ("llama-tied", {"loop": "accelerate", **FUSED, **AGAIN}, {"fsdp": "shard_grad_op"}, 2),
    ("llama", {"loop": "plain", **CHUNKED}, FULL, 3),
    ("llama", {"loop": "plain", **FUSED, "adapter": LORA}, FULL, 2),
    ("llama", {**HALF, **LIGER, "grad_accum": 2}, FULL, 2),
    ("llama", {"loop": "accelerate", **LIGER}, {**FULL, "fsdp_shard_size": 2}, 4),
    ("llama", {"loop": "plain", **LIGER}, FULL, 3),
    ("llama", {**HALF, **CHUNKED, "grad_accum": 2}, ONE, 2),
    ("llama", {**HALF, **LIGER, "dtype": "bfloat16", "adapter": {**LORA, "r": 16}}, ONE, 2),
    ("llama-tied", {**HALF, **LIGER}, ONE, 3),
    ("llama-gqa", {"loop": "plain", **LIGER, **AGAIN, "grad_accum": 2},
     {"fsdp": "shard_grad_op", "fsdp_version": 1}, 2),
]  # fmt: skip


@pytest.mark.slow("loss0", "loss1", "loss2", "loss4", "loss3")
@pytest.mark.parametrize(
    ("model", "setup", "spread", "ranks"),
    CASES,
    ids=["liger" if "use_liger_kernel" in setup else "loss" for _, setup, *_ in CASES],
)
def test_a_rank_allocates_what_a_real_one_does(model, setup, spread, ranks):
    """Every allocation and free of the steps from 8 KiB on, in order; every phase."""
    if setup.get("use_liger_kernel"):
        pytest.importorskip("liger_kernel.utils")
    case = {"model": model, "ranks": ranks, "setup": setup, "spread": spread}
    real, stream = real_rank(case), predicted_rank(case)
    predicted = as_run(stream)
    check_events(stream.events, stream.sizes)

    recomputes = "checkpointing" in setup or setup.get("fused_loss") == "trl-chunked"
    check_phases(real, predicted, HOST + (RNG_STATES if recomputes else 0), 0)
    assert len(predicted.allocations(at_least=8192)) > 200
    assert differences(of_steps(real), of_steps(predicted), at_least=8192) == []


KINDS = {
    "": "Model", "embed": "Embedding", "layers": "ModuleList", "layers.0": "Layer",
    "layers.0.proj": "Linear", "norm": "RMSNorm", "head": "Linear",
}  # fmt: skip
MARKS = Landmarks(kinds=KINDS, blocks=("Layer",), embeddings="embed", head="head", norm="norm")
NAMES = ("embed.weight", "layers.0.proj.weight", "norm.weight", "head.weight")


def check(marks=MARKS, names=NAMES, loop="trainer", software=None, loss=LIGER, **spread):
    sharded = Distributed(num_gpus=2, fsdp="full_shard", **spread)
    setup = Setup(distributed=sharded, loop=loop, **loss)
    if software is not None:
        setup = replace(setup, software=Software(torch=software))
    weights = [
        Weight(n, (4, 4), (4, 1), "float32", trains=True, decays=True, has_grad=True) for n in names
    ]
    check_head_is_gathered(setup, units_of(setup, weights, marks), weights, marks)


@pytest.mark.parametrize("loss", [LIGER, FUSED, {"fused_loss": "cce"}])
def test_a_head_in_the_root_or_beside_the_norm_is_gathered(loss):
    check(loss=loss)
    check(loss=loss, loop="plain")
    check(loss=loss, fsdp_version=1)
    check(loss=loss, names=NAMES[:3], marks=replace(MARKS, shared={"head.weight": "embed.weight"}))


@pytest.mark.parametrize("spread", [{"fsdp_version": 1}, {"fsdp_version": 2, "loop": "plain"}])
def test_a_head_that_is_a_unit_is_refused(spread):
    with pytest.raises(ConfigError, match="head is an FSDP unit, which is gathered where it is"):
        check(fsdp_wrap=("Layer", "Linear"), **spread)
    check(fsdp_wrap=("Layer", "Linear"), loss={}, **spread)


def test_a_head_tied_to_a_unit_is_refused():
    marks = replace(MARKS, shared={"head.weight": "embed.weight"})
    with pytest.raises(ConfigError, match="embed is an FSDP unit"):
        check(fsdp_wrap=("Embedding",), names=NAMES[:3], marks=marks, fsdp_version=1)


def test_a_head_without_a_norm_beside_it_is_refused():
    """accelerate looks among the children of the base model: that of a vision model has none."""
    with pytest.raises(ConfigError, match="head is an FSDP unit"):
        check(marks=replace(MARKS, norm=None))


def test_earlier_torch_does_not_end_the_group():
    check(software=(2, 13))
    check(software=(2, 8), loop="plain")
    check(software=(2, 8), fsdp_version=1)
    with pytest.raises(ConfigError, match=r"torch 2\.8 does not end such a unit"):
        check(software=(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [FULL, ONE, {"zero": 3}], ids=["fsdp2", "fsdp1", "zero3"])
def test_no_logits_are_there_at_once(tmp_path, spread):
    """What a chunked loss saves on one GPU it saves on several."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,'
        ' "vocab_size": 32000}'
    )

    def peak(loss, **spread):
        found = memest.estimate(
            str(tmp_path), batch=4, seq_len=256, gpu="a100-80gb", max_batch=False, bf16=True,
            fused_loss=loss, **spread,
        )  # fmt: skip
        return found.peak.allocated_bytes

    sharded = {"num_gpus": 2, **spread}
    saved = [peak("none", **spread) - peak("trl-chunked", **spread) for spread in ({}, sharded)]
    assert saved[1] > 0.8 * saved[0] > 4 * 256 * 32000 * 4
