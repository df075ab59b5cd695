"""Losses that read the head's weight and leave the head uncalled, under FSDP2 and FSDP1."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.config.software import Software
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.sharding.fsdp_units import check_head_is_gathered, units_of

FULL, ONE = {"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_version": 1}
LIGER = {"use_liger_kernel": True}
FUSED = {"fused_loss": "trl-fused"}

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
    check(
        loss=loss,
        names=NAMES[:3],
        marks=replace(MARKS, shared_paths={"head.weight": "embed.weight"}),
    )


@pytest.mark.parametrize("spread", [{"fsdp_version": 1}, {"fsdp_version": 2, "loop": "plain"}])
def test_a_head_that_is_a_unit_is_refused(spread):
    with pytest.raises(ConfigError, match="head is an FSDP unit, which is gathered where it is"):
        check(fsdp_wrap=("Layer", "Linear"), **spread)
    check(fsdp_wrap=("Layer", "Linear"), loss={}, **spread)


def test_a_head_tied_to_a_unit_is_refused():
    marks = replace(MARKS, shared_paths={"head.weight": "embed.weight"})
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
