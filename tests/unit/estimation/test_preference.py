"""Preference methods asked as a user asks: what stands beside the model, and what is refused."""

from __future__ import annotations

import json

import pytest

import memest
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.events import Category
from memest.report.words import trainer_words
from support.small_llama import LLAMA

QUESTION = {"batch": 4, "seq_len": 64, "bf16": True}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    return str(tmp_path)


def _parts(result):
    return {row.category: row.bytes for row in result.breakdown}


def test_a_reference_model_is_a_part_of_its_own(model):
    parts = _parts(memest.estimate(model, method="dpo", **QUESTION))

    assert parts[Category.REFERENCE] == pytest.approx(parts[Category.PARAMETERS], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": 2}, {"zero": 1, "grad_accum": 2}])
def test_each_of_several_gpus_has_the_whole_reference(model, options):
    question = {**QUESTION, "method": "dpo", "num_gpus": 2, **options}
    half = 2 if "zero" in options else 1  # DeepSpeed casts what trains, and TRL's copy of it
    alone = _parts(memest.estimate(model, method="dpo", **QUESTION))[Category.REFERENCE]

    own = _parts(memest.estimate(model, **question))[Category.REFERENCE]
    assert own == pytest.approx(alone / half, rel=1e-3)  # buffers stay as they are


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lora_r": 8}, {"precompute_ref_log_probs": True}])
def test_adapters_and_answers_computed_before_need_no_second_model(model, options):
    result = memest.estimate(model, method="dpo", **options, **QUESTION)

    assert Category.REFERENCE not in _parts(result)


@pytest.mark.slow(but=("orpo",))
@pytest.mark.parametrize("method", ["orpo", "simpo", "reward"])
def test_methods_without_a_reference_have_none(model, method):
    assert Category.REFERENCE not in _parts(memest.estimate(model, method=method, **QUESTION))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"method": "dpo"}, {"method": "kto", "lora_r": 8}, {"method": "orpo"}]
)
def test_few_layers_tell_of_all(model, options):
    few = memest.estimate(model, **options, **QUESTION)
    whole = memest.estimate(model, **options, **QUESTION, trace_whole=True)

    assert few.peak == whole.peak
    assert _parts(few) == _parts(whole)


def test_a_pair_is_two_sequences(model):
    question = {**QUESTION, "checkpointing": "none", "optim": "none"}
    pairs = _parts(memest.estimate(model, method="simpo", **question))
    sequences = _parts(memest.estimate(model, **{**question, "batch": 8}))
    layers = 8 * 4 * 64 * 8 * 128  # a tenth of what they keep, in bytes

    assert abs(pairs[Category.ACTIVATIONS] - sequences[Category.ACTIVATIONS]) < layers * 10


def test_the_range_claims_nothing_that_was_not_measured(model):
    result = memest.estimate(model, method="dpo", **QUESTION)

    assert result.ranges.reserved.level is None
    assert result.ranges.reserved.low_bytes >= result.ranges.allocated.low_bytes


def test_releases_that_make_all_logits_are_named_where_the_method_depends_on_them():
    assert "--log-probs logits" in trainer_words(setup_from_options(method="dpo"))
    for options in ({"method": "dpo", "log_probs": "logits"}, {"method": "orpo"}, {}):
        assert not trainer_words(setup_from_options(**options))


FSDP = {"num_gpus": 8, "fsdp": "full_shard"}
REFUSED = [
    ({"method": "dop"}, "Did you mean 'dpo'"),
    ({"method": "ppo"}, "--unpriced ppo"),
    ({"method": "dpo", "loop": "plain"}, "TRL's trainer"),
    ({"method": "orpo", "sync_ref_model": True}, "Drop --sync-ref-model"),
    ({"method": "dpo", "sync_ref_model": True, "lora_r": 8}, "TRL stops there"),
    ({"method": "grpo", "sync_ref_model": True}, "--kl-beta 0 it keeps none"),
    ({"method": "online-dpo", "sync_ref_model": True}, "no such option"),
    (
        {"method": "dpo", "sync_ref_model": True, "num_gpus": 8, "fsdp": "shard_grad_op"},
        "torch stops at adding",
    ),
    ({"method": "orpo", "precompute_ref_log_probs": True}, "orpo has no reference model"),
    ({"log_probs": "logits"}, "--method dpo"),
    (
        {
            "method": "grpo",
            "num_gpus": 8,
            "zero": 3,
            "engine": "server",
            "qlora": True,
            "bf16": True,
        },
        "merges adapters into what is quantised",
    ),
    ({"method": "grpo", **FSDP, "lora_r": 8}, "and torch stops"),
    ({"method": "grpo", **FSDP, "engine": "server", "qlora": True}, "into what is quantised"),
    ({"method": "cpo", "log_probs": "float32"}, "no trainer that was read"),
    ({"method": "dpo", "lora_r": 8, "ref_dtype": "float32"}, "Drop --ref-dtype"),
    ({"method": "orpo", "ref_dtype": "float32"}, "Drop --ref-dtype"),
    ({"ref_dtype": "float32"}, "without a reference model of its own"),
    ({"method": "reward", "log_probs": "float32", **FSDP}, "no gradient reaches"),
    ({"method": "dpo", "task": "masked-lm"}, "a model for masked-lm"),
    ({"method": "dpo", **FSDP, "fsdp_version": 1}, "--fsdp-version 2 is priced"),
    ({"method": "dpo", **FSDP, "precompute_ref_log_probs": True}, "which is an upper bound"),
    (
        {"method": "dpo", **FSDP, "lora_r": 8, "precompute_ref_log_probs": True},
        "in host memory, with batches on the GPU, and torch stops",
    ),
    (
        {"method": "dpo", **FSDP, "lora_r": 8, "modules_to_save": "lm_head"},
        "head out of what an adapter copies",
    ),
    ({"method": "dpo", **FSDP, "log_probs": "float32"}, "LLaMA-Factory 0.9 not at all"),
    (
        {"method": "dpo", "num_gpus": 8, "zero": 3, "precompute_ref_log_probs": True},
        "a second engine",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_not_priced_is_refused_with_the_reason(model, options, words):
    with pytest.raises(memest.ConfigError, match=words):
        memest.estimate(model, **options)


def test_a_model_that_does_not_write_is_refused():
    with pytest.raises(memest.ConfigError, match="--method dpo and a model for"):
        memest.estimate("bert-base-uncased", method="dpo", batch=1, seq_len=32)


def test_a_reward_model_of_several_labels_is_refused():
    with pytest.raises(memest.ConfigError, match="TRL refuses reward models of more than one"):
        Setup(method="reward", num_labels=3)


def test_a_reward_model_has_one_label():
    setup = Setup(method="reward")

    assert (setup.task, setup.num_labels) == ("sequence-classification", 1)
