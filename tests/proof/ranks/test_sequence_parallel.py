"""Sequence parallelism: a real rank, sharded by torch's own styles, against the predicted one."""

from __future__ import annotations

import pytest

import memest
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.replay.replay import check_events
from support.phases import check_phases, check_talking_rank
from support.ranks import as_run, without_updates
from support.real_memory import differences
from support.sequence_ranks import real_rank
from support.tensor_ranks import predicted

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices, and what a CPU casts in sums of them."""
RNG_STATES = 8 * 5056
SHARED = {"num_gpus": 2, "tp": 2, "tp_sequence_parallel": True}
WITH_LOGITS = {**SHARED, "tp_loss_parallel": False}
MISTRAL = {"model_type": "mistral", "sliding_window": None}
ODD = {"config": {"vocab_size": 1001, "num_hidden_layers": 2}}

CASES = [
    ("llama", SHARED, {"max_grad_norm": 1.0, **ODD}),
    ("llama-gqa", WITH_LOGITS, {"checkpointing": "full", "config": MISTRAL}),
    ("llama-tied", {**SHARED, "num_gpus": 4, "tp": 4}, {"grad_accum": 2}),
    ("qwen3", SHARED, {"precision": "bf16"}),
    ("llama", WITH_LOGITS, {"dtype": "bfloat16", "config": {"model_type": "qwen2"}}),
]


def streams(model, spread, setup):
    setup = {"optim": "adamw_torch", "loop": "plain", **setup}
    case = {"model": model, "spread": spread, "setup": setup}
    stream = predicted(case)
    check_events(stream.events, stream.sizes)
    return as_run(stream), real_rank(case)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "spread", "setup"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, spread, setup):
    """Gathered inputs, scattered outputs, shared losses: every allocation and free, in order."""
    run, real = streams(model, spread, setup)
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    check_phases(real, run, host, 0)
    assert len(run.events) > 800
    assert differences(without_updates(real), without_updates(run), at_least=6144) == []


@pytest.mark.slow
def test_shards_that_fsdp_shards_again():
    """Norms, which all ranks of a group have whole, are among the units; tables are cut first."""
    spread = {**SHARED, "num_gpus": 4, "fsdp": "full_shard"}
    # the first rank has 502 rows of the table: a CPU pads odd ones before it chunks them
    config = {**ODD["config"], "vocab_size": 1003}
    run, real = streams("llama", spread, {"grad_accum": 2, "config": config})
    check_phases(real, run, HOST, 0)
    assert differences(without_updates(real), without_updates(run), at_least=6144) == []


@pytest.mark.slow
def test_two_processes_that_talk():
    """Real processes allocate what is predicted, in order."""
    case = {"model": "llama", "spread": SHARED, "gloo": True}
    case["setup"] = {"optim": "adamw_torch", "loop": "plain", **ODD}
    check_talking_rank(real_rank(case), predicted(case), at_least=6144, more_than=300)


def run(model, **options):
    options = {
        "batch": 2, "seq_len": 256, "max_batch": False, "num_gpus": 4, "tp": 4, "loop": "plain",
        **options,
    }  # fmt: skip
    return memest.estimate(model, **options)


@pytest.mark.slow
def test_activations_between_layers_and_logits_are_shared(folder):
    plain, shared = run(folder), run(folder, tp_sequence_parallel=True)
    gathered = run(folder, tp_sequence_parallel=True, tp_loss_parallel=False)
    rows = [{r.category.value: r.bytes for r in e.breakdown} for e in (plain, shared, gathered)]
    assert rows[0]["parameters"] == rows[1]["parameters"]
    assert rows[1]["activations"] < rows[2]["activations"] < rows[0]["activations"]
    assert "tensor and sequence parallel over 4" in str(shared)
    assert "whole logits" in str(gathered)
    # 512 x 64 elements of float32, over four
    assert any("embedding table is whole on each GPU" in n and "32 KiB" in n for n in shared.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 1, "num_gpus": 1}, "no meaning without --tp"),
        ({"tp_sequence_parallel": False, "tp_loss_parallel": False}, "transformers' plan gathers"),
        ({"loop": "trainer"}, "Add --loop plain"),
        ({"seq_len": 255}, "multiples of 2, such as 254 or 256"),
        ({"attn_implementation": "eager"}, "priced with --attn-implementation sdpa"),
        ({"lora_r": 4}, "an adapter is not priced together with --tp-sequence-parallel"),
        ({"padded": True}, "--padded"),
        ({"fp16": True}, "--fp16"),
        ({"freeze": ["model.norm"]}, "--freeze, which SequenceParallel undoes"),
        ({"num_gpus": 4, "pp": 2}, "--pp 2"),
        ({"generate": True}, "--generate"),
        ({"torch_compile": True}, "--torch-compile"),
        ({"software": "torch=2.4"}, "a torch before 2.8"),
        ({"software": "transformers=4.40"}, "transformers before 5"),
        ({"num_gpus": 4}, "2 copies of a model that --tp 2 shards are refused by"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        setup_from_options(**{**SHARED, "loop": "plain", "seq_len": 256, **options})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("EleutherAI/pythia-70m", "knows the layers of causal language models of llama, mistral"),
        ("mistralai/Mistral-7B-v0.1", r"layers with a sliding window \(4096\)"),
    ],
)
def test_models_that_the_plan_does_not_fit_are_refused(model, words):
    with pytest.raises(ConfigError, match=words):
        run(model, num_gpus=2, tp=2, tp_sequence_parallel=True)


def test_an_mlp_that_does_not_divide_is_refused(folder, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(folder, intermediate_size=178)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="178 columns of this model's MLP"):
        run(str(tmp_path), tp_sequence_parallel=True)


def test_a_search_for_lengths_names_lengths_that_can_be(folder):
    options = {"of": "seq-len", "gpu": "t4", "batch": 2, "num_gpus": 2, "loop": "plain", "tp": 2}
    with pytest.raises(ConfigError, match="--tp 2 --tp-sequence-parallel takes multiples of 2"):
        memest.max_batch(folder, tp_sequence_parallel=True, **options)


@pytest.mark.parametrize(
    ("length", "words"), [(63, "does not divide the 63 tokens"), (0, "input_ids")]
)
def test_inputs_of_ones_own_are_looked_at(folder, length, words):
    import torch

    ids = torch.zeros(2, length, dtype=torch.int64)
    inputs = {"input_ids": ids} if length else {"inputs_embeds": torch.zeros(2, 64, 64)}
    options = {"num_gpus": 2, "tp": 2, "loop": "plain", "tp_sequence_parallel": True}
    with pytest.raises(ConfigError, match=words):
        memest.estimate(folder, inputs={**inputs, "labels": ids}, max_batch=False, **options)
