"""Cut cross-entropy on meta: what its own Python saves and allocates, and nothing left behind."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.errors import ConfigError
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

if importlib.util.find_spec("cut_cross_entropy") is None:
    pytest.skip("cut-cross-entropy is not installed", allow_module_level=True)


def _trace(config=LLAMA, **options):
    return trace_small(config, **{"fused_loss": "cce", **options})


def test_no_logits_of_any_size_are_made():
    """Saved are one fp32 number a token and one a word; logits would be one for both together."""
    trace = _trace()
    kept = kept_between(trace, Phase.FORWARD, Phase.BACKWARD)
    tokens = BATCH * (LENGTH - 1)

    assert 4 * tokens in kept  # log-sum-exp
    assert 4 * VOCABULARY in kept  # average logits, by which the backward sorts its blocks
    assert max(trace.sizes) == 2 * VOCABULARY * HIDDEN
    usual = _trace(fused_loss="")
    assert 4 * BATCH * LENGTH * VOCABULARY in usual.sizes


def test_a_frozen_head_has_no_gradient():
    # the embedding is as large as the head, and has one either way
    def large(trace):
        return trace.sizes.count(2 * VOCABULARY * HIDDEN)

    assert large(_trace(freeze=("lm_head",))) < large(_trace())


def test_a_tied_head_gets_one_gradient():
    tied = {**LLAMA, "tie_word_embeddings": True}
    gradients = kept_between(_trace(tied), Phase.BACKWARD, Phase.ZERO_GRAD)

    assert gradients.count(2 * VOCABULARY * HIDDEN) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"adapter": {"peft_type": "LORA", "r": 8}}, {"checkpointing": "full"},
        {"loop": "plain"}, {"grad_accum": 2},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_it_goes_with(options):
    assert peak_of(_trace(**options)) < peak_of(_trace(**options, fused_loss=""))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "num_hidden_layers": 1}, "causal language models"),
        ({**LLAMA, "model_type": "cohere", "architectures": ["CohereForCausalLM"]}, "logit_scale"),
        ({"model_type": "t5", "num_layers": 1, "decoder_start_token_id": 0}, "causal language"),
    ],
)
def test_models_with_another_loss_are_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        _trace(config)


def test_float32_is_refused_as_the_library_does():
    with pytest.raises(ConfigError, match="requires them to be bf16 or fp16"):
        _trace(dtype="float32")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fused_loss": "cse"}, "Did you mean 'cce'"),
        ({"fused_loss": "cce", "use_liger_kernel": True}, "Liger replaces the loss"),
        ({"fused_loss": "cce", "eval_batch": 2, "eval_samples": 4}, "no logits to keep"),
        ({"fused_loss": "cce", "torch_compile": True}, "compiled with the graph"),
        ({"fused_loss": "cce", "distributed": Distributed(num_gpus=2)}, "--num-gpus"),
    ],
)
def test_what_excludes_it_is_told(options, said):
    with pytest.raises(ConfigError, match=said):
        Setup(**options)


def test_nothing_of_it_stays_behind():
    before = {name for name in sys.modules if name.partition(".")[0] == "triton"}
    _trace()

    assert {name for name in sys.modules if name.partition(".")[0] == "triton"} == before
    assert "cut_cross_entropy.cce" not in sys.modules


@pytest.mark.parametrize("options", [{"fused_loss": "cce"}, {"eval_batch": 4}])
def test_it_is_asked_for_once(options, tmp_path, monkeypatch):
    """A trace for one GPU, and an evaluation, are found on disk by another tracer."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    model = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=64&intermediate_size=128"
    asked = {"seq_len": 32, "batch": 2, "gpu": "A100", "max_batch": False, **options}
    said: list[str] = []
    first = memest.estimate(model, **asked, progress=said.append)
    assert any("tracing" in line for line in said)
    said.clear()
    second = memest.estimate(model, **asked, progress=said.append)

    assert said == []
    assert second.peak == first.peak
    assert second.breakdown == first.breakdown
