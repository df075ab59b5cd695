"""GRPO by verl: its reference, its engine's process and hand-over, its FSDP's units."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memest
from memest.events import Category
from memest.sharding.fsdp_units import _verl_units
from memest.trace.cues import landmarks_of
from support.small_llama import LLAMA

VERL = {
    "method": "grpo", "log_probs": "verl", "loop": "plain", "fsdp": "full_shard",
    "fsdp_mixed_precision": True, "bf16": True, "dtype": "float32", "optim": "adamw_torch",
    "max_grad_norm": 1.0, "num_gpus": 2, "batch": 4, "seq_len": 64, "gpu": "rtx-4090",
    "max_batch": False, "engine": "server",
}  # fmt: skip
VLLM = {"engine": "vllm", "engine_share": 0.3}
SLEEPS = {**VLLM, "engine_sleeps": True}


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = {**LLAMA, "num_hidden_layers": 8}

    def estimate(*, changes=(), **options):
        (folder / "config.json").write_text(json.dumps(config | dict(changes)))
        return memest.estimate(str(folder), **{**VERL, **options})

    return estimate


def _parts(result):
    return {row.category: row.bytes for row in result.breakdown}


@pytest.mark.parametrize("version", [1, 2])
def test_a_reference_lies_on_the_host(ask, version):
    with_one = ask(fsdp_version=version, kl_beta=0.001)
    without = ask(fsdp_version=version, kl_beta=0.0)

    assert Category.REFERENCE not in _parts(with_one)
    assert "reference on the host" in str(with_one)
    # the loss alone is larger
    assert 0 <= with_one.peak.allocated_bytes - without.peak.allocated_bytes < 1 << 16


def test_logits_of_all_tokens_are_there_once_and_become_their_gradients(ask):
    """Two bytes of each word of each token: in bfloat16, and the gradients where they lie."""
    tokens, words = 4 * 256, 40_000
    of_words = {"seq_len": 256, "checkpointing": "full", "changes": {"vocab_size": words}}
    four, eight = (ask(**of_words, batch=batch).peak.allocated_bytes for batch in (4, 8))

    assert (eight - four) / (tokens * words) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("version", [1, 2])
def test_scoring_more_at_once_than_trains_may_be_the_peak(ask, version):
    """All their logits are there, in bfloat16, and no gradients."""
    words = 40_000
    options = {
        "seq_len": 64, "batch": 2, "fsdp_version": version, "changes": {"vocab_size": words},
    }  # fmt: skip
    few, many = (ask(**options, scored_at_once=scored) for scored in (None, 32))

    assert "Fullest while completions are scored" in str(many)
    assert "Fullest while completions are scored" not in str(few)
    assert ask(**options, scored_at_once=2).peak == few.peak
    assert many.peak.allocated_bytes > max(32 * 64 * words * 2, few.peak.allocated_bytes)


def test_an_engine_is_a_process_of_its_own(ask):
    alone, beside = ask(), ask(**VLLM)
    process = alone.peak.device_bytes - alone.peak.reserved_bytes
    share = beside.peak.engine_bytes - process

    assert share == pytest.approx(0.3 * beside.gpu.usable_bytes, rel=0.02)
    assert beside.peak.device_bytes == alone.peak.device_bytes + share + process
    assert any("a CUDA context of its own" in note for note in beside.notes)


@pytest.mark.parametrize(
    ("moves", "gone"),
    [
        ("model", (Category.PARAMETERS,)),
        ("optimizer", (Category.OPTIMIZER_STATES,)),
        ("both", (Category.PARAMETERS, Category.OPTIMIZER_STATES)),
    ],
)
def test_what_moves_to_the_host_is_not_beside_an_engine_that_writes(ask, moves, gone):
    stays, result = ask(**SLEEPS), ask(**SLEEPS, engine_moves=moves)
    parts = _parts(stays)

    assert any("peak is that of generation" in note for note in result.notes)
    moved = stays.peak.device_bytes - result.peak.device_bytes
    assert moved == sum(parts[category] for category in gone)
    assert result.peak.allocated_bytes == stays.peak.allocated_bytes


def test_weights_are_handed_over_through_a_bucket(ask):
    """2 GiB, which a share of one does not cover."""
    small = ask(**{**SLEEPS, "engine_share": 0.04})
    large = ask(**SLEEPS)

    assert any("that of the hand-over of weights" in note for note in small.notes)
    assert not any("hand-over" in note for note in large.notes)
    moved = ask(**{**SLEEPS, "engine_share": 0.04}, engine_moves="both")
    # what moves is on the GPU still, but for the optimizer's states
    states = _parts(small)[Category.OPTIMIZER_STATES]
    assert small.peak.device_bytes - moved.peak.device_bytes == states


def test_gpus_of_an_engine_share_its_weights(ask):
    def weights(**options):
        large = {**VLLM, "changes": {"vocab_size": 1_000_000}}
        (note,) = (n for n in ask(**large, **options).notes if "its weights take" in n)
        return float(note.partition("its weights take ")[2].split()[0])

    assert weights(engine_gpus=2) == pytest.approx(weights() / 2, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_those_that_verl_wraps(tied):
    """``_select_fsdp2_wrap_targets``: embeddings and head by name, unless they are one weight."""
    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if tied:
        model.tie_weights()

    assert _verl_units(landmarks_of(model)) == (
        set() if tied else {"model.embed_tokens", "lm_head"}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"loop": "trainer", "fsdp_mixed_precision": False},
            "Write --loop plain --fsdp full_shard",
        ),
        ({"fsdp": "none", "fsdp_mixed_precision": False}, "Write --fsdp full_shard"),
        ({"engine": "model"}, "Write --engine vllm --engine-sleeps"),
        ({"method": "dpo", "engine": None}, "no trainer that was read has it so"),
        (
            {
                "log_probs": "fused",
                "loop": "trainer",
                "fsdp_mixed_precision": False,
                "scored_at_once": 4,
                "optim": "auto",
                "max_grad_norm": None,
            },
            "Drop --scored-at-once",
        ),
        ({"engine_gpus": 2}, "add --engine vllm"),
        ({"engine_moves": "both"}, "add --engine vllm"),
        ({**VLLM, "engine_moves": "al"}, "--engine-moves"),
        ({"lora_r": 8, "fsdp_version": 1}, "an adapter is not priced together"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(ask, options, words):
    with pytest.raises(memest.ConfigError, match=words):
        ask(**options)
