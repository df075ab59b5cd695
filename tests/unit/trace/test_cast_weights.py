"""Weights that scripts make float32 after loading: which, what they count, what is refused."""

from __future__ import annotations

import pytest
import torch

import memest
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.trace.model.build import cast_weights

NAMES = r"norm|emb"


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(16, 8, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(8, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
        self.out.weight.requires_grad_(requires_grad=False)


def dtypes(*patterns):
    model = Tiny().to("meta")
    cast_weights(model, setup_from_options(dtype="bfloat16", cast_weights=patterns))
    return {n for n, p in model.named_parameters() if p.dtype is torch.float32}


def test_those_that_a_pattern_matches():
    assert dtypes(f"{NAMES}=float32") == {"emb.weight", "norm.weight", "norm.bias"}
    assert dtypes() == set()


def test_those_that_train():
    assert dtypes("trainable=float32") == {"emb.weight", "norm.weight", "norm.bias", "out.bias"}


def test_a_tied_weight_has_each_of_its_names():
    model = Tiny().to("meta")
    model.head = torch.nn.Linear(8, 16, bias=False, device="meta")
    model.head.weight = model.emb.weight
    cast_weights(model, setup_from_options(dtype="bfloat16", cast_weights=("head=float32",)))
    assert model.head.weight is model.emb.weight
    assert model.emb.weight.dtype is torch.float32


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"head=float32 matches no weight.*emb\.weight"):
        dtypes("head=float32")
    with pytest.raises(ConfigError, match="not a regular expression"):
        setup_from_options(cast_weights=("(=float32",))


def test_a_pattern_may_be_said_to_match_nothing():
    assert dtypes("?head=float32") == set()
    assert dtypes(f"?{NAMES}=float32") == dtypes(f"{NAMES}=float32") != set()


@pytest.mark.parametrize("options", [{"zero": 2}, {"fsdp": "full_shard"}, {"pp": 2}])
def test_who_shards_settles_dtypes(options):
    with pytest.raises(ConfigError, match="--cast-weights is not priced beside"):
        setup_from_options(
            num_gpus=2, dtype="bfloat16", cast_weights=(f"{NAMES}=float32",), **options
        )


def test_weights_gradients_and_states_follow():
    """Llama-like models have tied embeddings once; Adam keeps two states of a weight's dtype."""
    question = {"batch": 1, "seq_len": 32, "bf16": True, "dtype": "bfloat16"}
    model = "HuggingFaceTB/SmolLM2-135M?num_hidden_layers=2"
    plain, full, part = (
        memest.estimate(model, **question, cast_weights=weights)
        for weights in ((), ("trainable=float32",), ("norm|embed_tokens|lm_head=float32",))
    )
    float32 = memest.estimate(model, **{**question, "dtype": "float32"})

    def weights_of(answer):
        rows = {row.category: row.bytes for row in answer.breakdown}
        return rows["parameters"], rows["optimizer states"]

    assert weights_of(full) == weights_of(float32)
    assert full.peak.allocated_bytes == float32.peak.allocated_bytes
    assert plain.model.parameter_bytes < part.model.parameter_bytes < full.model.parameter_bytes


def test_packed_weights_stay_packed():
    pytest.importorskip("bitsandbytes")
    question = {"batch": 1, "seq_len": 32, "lora_r": 4, "load_in_4bit": True, "bf16": True}
    storage = {"bnb_4bit_quant_storage": "bfloat16", "prepare_kbit": False, "dtype": "bfloat16"}
    model = "HuggingFaceTB/SmolLM2-135M?num_hidden_layers=2"
    plain, full = (
        memest.estimate(model, **question, **storage, cast_weights=weights, max_batch=False)
        for weights in ((), (".=float32",))
    )
    others = full.model.parameter_bytes - plain.model.parameter_bytes
    assert 0 < others < plain.model.parameter_bytes * 2
    assert full.model.parameter_bytes < 4 * plain.model.parameters
