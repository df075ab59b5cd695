"""Liger's kernels on meta: what its own Python saves and allocates, and nothing left behind."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

import pytest
import torch

import memest
from memest.events import Phase
from support.small_llama import (
    BATCH,
    HIDDEN,
    LENGTH,
    LLAMA,
    VOCABULARY,
    kept_between,
    peak_of,
    trace_small,
)

pytest.importorskip("liger_kernel.utils")


def _trace(config=LLAMA, **options):
    return trace_small(config, **{"use_liger_kernel": True, **options})


def test_the_loss_holds_gradients_in_place_of_logits():
    """FLCE makes the gradients of hidden states and head in forward, logits chunk by chunk."""
    trace = _trace()
    tokens = BATCH * LENGTH
    chunks = -(-VOCABULARY // HIDDEN)
    rows = 1 << (-(-tokens // chunks) - 1).bit_length()
    kept = kept_between(trace, Phase.FORWARD, Phase.BACKWARD)

    assert 2 * tokens * HIDDEN in kept  # grad_input
    assert 2 * VOCABULARY * HIDDEN in kept  # grad_weight
    assert 2 * rows * VOCABULARY in trace.sizes
    assert max(trace.sizes) == 2 * VOCABULARY * HIDDEN
    usual = _trace(use_liger_kernel=False)
    assert 4 * tokens * VOCABULARY in usual.sizes  # fp32 logits


def test_a_frozen_head_has_no_gradient():
    kept = kept_between(_trace(freeze=("lm_head",)), Phase.FORWARD, Phase.BACKWARD)

    assert 2 * VOCABULARY * HIDDEN not in kept


def test_norms_keep_one_number_a_row():
    """RMSNorm saves its input, which is there anyway, and rstd; the usual one an fp32 input."""
    tokens = BATCH * LENGTH
    liger, usual = (
        kept_between(_trace(use_liger_kernel=on), Phase.FORWARD, Phase.BACKWARD)
        for on in (True, False)
    )

    assert liger.count(4 * tokens) >= 5  # two layers of two norms, and the last one
    assert liger.count(4 * tokens * HIDDEN) == 0
    assert usual.count(4 * tokens * HIDDEN) >= 5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mistral", "qwen2"])
def test_a_step_needs_less_with_them(kind):
    config = {**LLAMA, "model_type": kind, "head_dim": 32}
    del config["architectures"]
    with_them, without = (
        peak_of(_trace(config, use_liger_kernel=on, precision="bf16")) for on in (True, False)
    )
    assert with_them < without


def test_nothing_of_it_stays_behind():
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    forward = modeling_llama.LlamaForCausalLM.forward
    loss = torch.nn.functional.cross_entropy
    has_triton = importlib.util.find_spec("triton") is not None
    _trace()

    after = vars(modeling_llama)
    assert {name for name, value in before.items() if after[name] is not value} == set()
    assert modeling_llama.LlamaForCausalLM.forward is forward
    assert torch.nn.functional.cross_entropy is loss
    assert (importlib.util.find_spec("triton") is not None) == has_triton
    if not has_triton:
        assert not any(name.partition(".")[0] == "triton" for name in sys.modules)


def test_batches_are_traced_one_by_one():
    """The number of chunks jumps with the batch: no formula holds, and none is looked for."""
    small = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=256&intermediate_size=512"
    profile = memest.profile(small, seq_len=64, use_liger_kernel=True)
    found = {batch: profile.estimate(batch=batch).peak for batch in (2, 3, 5, 8)}

    assert found == {
        batch: memest.estimate(small, seq_len=64, batch=batch, use_liger_kernel=True).peak
        for batch in found
    }
    assert list(found.values()) == sorted(found.values(), key=lambda p: p.allocated_bytes)


def test_an_evaluation_without_predictions_makes_no_logits():
    small = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=256&intermediate_size=512"
    options = {"seq_len": 64, "batch": 2, "eval_batch": 16, "use_liger_kernel": True}
    loss_alone = memest.estimate(small, **options)
    kept = memest.estimate(small, **options, eval_samples=16)

    assert kept.peak.allocated_bytes - loss_alone.peak.allocated_bytes > 16 * 64 * 128256


def test_models_without_kernels_and_a_missing_library_are_told():
    with pytest.raises(memest.ConfigError, match="no kernels for models of type 'bert'"):
        memest.estimate("bert-base-uncased?num_hidden_layers=1", use_liger_kernel=True)
    missing = mock.patch(
        "memest.config.packages.is_there", side_effect=lambda module: module != "liger_kernel"
    )
    with missing, pytest.raises(memest.MissingDependencyError, match="install --no-deps liger"):
        _trace()


def test_beside_adapters_the_model_inside_has_them():
    """``apply_liger_kernel`` of transformers takes the base model of peft's."""
    lora = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    usual = kept_between(
        _trace(adapter=lora, use_liger_kernel=False), Phase.FORWARD, Phase.BACKWARD
    )
    kept = kept_between(_trace(adapter=lora), Phase.FORWARD, Phase.BACKWARD)

    tokens = BATCH * LENGTH
    assert 4 * tokens * VOCABULARY in usual
    assert max(kept) < 2 * tokens * VOCABULARY
