"""Samples laid end to end: one row, positions that start anew, no mask."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.meta_model import build
from memest.trace.session import trace_built

GPU = traits(find_gpu("a100"))
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512,
}  # fmt: skip


def traced(tmp_path, **options):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    values = {"batch": 3, "seq_len": 40, "dtype": "bfloat16", "optim": "none", **options}
    setup = Setup(**values)
    run = build(setup, resolve_model(str(tmp_path)), None, None, None)
    return run.plan(setup), trace_built(run, setup, GPU)


def test_a_batch_is_one_row(tmp_path):
    plans, _ = traced(tmp_path, padding_free=True, attn_implementation="flash_attention_2")
    assert {plan.name: plan.shape for plan in plans} == {
        "input_ids": (1, 120), "labels": (1, 120), "position_ids": (1, 120),
    }  # fmt: skip
    positions = next(p for p in plans if p.name == "position_ids").value()
    assert positions[0].tolist() == [*range(40)] * 3


def test_flash_attention_needs_no_mask_and_other_attention_one_of_the_row(tmp_path):
    _, flash = traced(tmp_path, padding_free=True, attn_implementation="flash_attention_2")
    _, blocks = traced(tmp_path, padding_free=True, attn_implementation="sdpa")
    square = 120 * 120
    assert max(flash.sizes) < 300 * 120 * 4 + 1  # the logits
    assert any(size in (square, 2 * square) for size in blocks.sizes)
    assert not any(size in (square, 2 * square) for size in flash.sizes)


@pytest.mark.parametrize(
    "model",
    [
        "bert-base-uncased?num_hidden_layers=1",
        "google/vit-base-patch16-224?num_hidden_layers=1",
        "openai/whisper-tiny?encoder_layers=1&decoder_layers=1",
    ],
)
def test_what_is_no_causal_model_is_refused(model):
    setup = Setup(batch=2, seq_len=16, padding_free=True)
    with pytest.raises(ConfigError, match="--padding-free and --packing lay samples end to end"):
        build(setup, resolve_model(model), None, None, None)
