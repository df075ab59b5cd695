"""Packed bases: bytes of published checkpoints, forms over shapes, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from memest.catalog.resolve import ModelSource, resolve_model
from memest.config.quantization import own_quantization
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.meta_model import build
from memest.trace.model.build import count
from memest.trace.model.packed import GptqLinear, packed_layers

LORA = {"peft_type": "LORA", "r": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
LLAMA_2_7B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip
SMALL = {
    **LLAMA_2_7B, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip


def model_of(config, **setup):
    values = {"batch": 1, "seq_len": 32, "loop": "plain", "adapter": LORA, **setup}
    source = ModelSource(kind="file", id="it", config=config, provenance="test")
    return build(Setup(**values), source, None, None, None).model


def test_a_7b_llama_is_as_large_as_its_published_checkpoint():
    # that of 4 bits in groups of 128 is 3.90 GB
    model = model_of({**LLAMA_2_7B, "quantization_config": GPTQ}, adapter=None)
    linear = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
    packed = sum(k * n // 2 + (k // 128) * (n // 2) + (k // 128) * n * 2 + 4 * k for k, n in linear)
    others = 2 * (2 * 32000 * 4096 + 65 * 4096)
    stored = sum(t.nbytes for t in model.state_dict().values())

    assert stored == 32 * packed + others
    assert round(stored / 1e9, 1) == 3.9
    assert count(model).parameters == 6_738_415_616
    assert count(model).parameter_bytes - stored == 32 * 7 * 32


@given(
    bits=st.sampled_from([2, 3, 4, 8]), group=st.sampled_from([-1, 16, 32, 64, 128]),
    num_in=st.integers(1, 700), num_out=st.integers(1, 300), bias=st.booleans(),
)  # fmt: skip
def test_gptq_holds_what_its_formula_says(bits, group, num_in, num_out, bias):
    layer = GptqLinear(num_in, num_out, bits=bits, group_size=group, bias=bias)
    groups = 1 if group == -1 else math.ceil(num_in / group)
    words = 4 * math.ceil(num_in * bits / 32) * num_out
    zeros = 4 * groups * math.ceil(num_out * bits / 32)

    held = sum(tensor.nbytes for tensor in layer.state_dict().values())

    assert held == words + zeros + 2 * groups * num_out + 4 * num_in + 2 * num_out * bias
    assert not list(layer.parameters())
    x = torch.empty(2, 3, num_in, dtype=torch.float16, device="meta", requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 3, num_out)
    assert y.dtype == torch.float16
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_the_weight_is_kept_for_backward():
    layer = GptqLinear(256, 128, bits=4, group_size=64, bias=False)
    x = torch.empty(2048, 256, dtype=torch.float16, device="meta", requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        layer(x)
    assert kept == [(256, 128)]


def _packed_names(model):
    return {name for name, module in model.named_modules() if module in set(packed_layers(model))}


def test_which_layers_are_packed_is_what_the_loaders_say():
    names = _packed_names(model_of({**SMALL, "quantization_config": GPTQ}, adapter=None))
    assert len(names) == 14
    assert "lm_head" not in names
    only = {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    names = _packed_names(model_of({**SMALL, "quantization_config": only}, adapter=None))
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "up_proj"}


def test_what_is_not_packed_stays_in_its_dtype():
    half = {**SMALL, "torch_dtype": "bfloat16"}
    model = model_of({**half, "quantization_config": GPTQ})
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "lm_head": True}, "lm_head"),
        ({**GPTQ, "bits": 5}, "bits 5"),
        ({"quant_method": "hqq"}, "hqq"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_checkpoint_in_another_way_is_named_as_not_modelled(config, said):
    setup = Setup(batch=1, seq_len=32, loop="plain", adapter=LORA)
    given = {**SMALL, "quantization_config": config}
    source = ModelSource(kind="file", id="it", config=given, provenance="test")
    _, told = own_quantization(given, setup.quantization)
    notes = [note for note in told if "priced as if they were not quantised" in note]

    assert len(notes) == 1
    assert said in notes[0]
    assert not list(packed_layers(build(setup, source, None, None, None).model))


def test_a_checkpoint_of_awq_is_refused_with_what_to_ask_instead():
    config = {**SMALL, "quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}}
    with pytest.raises(ConfigError, match=r"by awq.*the model it was made of.*--load-in-4bit"):
        model_of(config)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"quantization": {"load_in_4bit": True}}, "quantised by gptq already"),
        ({"adapter": None, "loop": "trainer"}, "refuses to train it alone"),
        ({"adapter": {**LORA, "use_dora": True}}, "DoRA"),
        ({"adapter": {"peft_type": "ADALORA", "total_step": 10}}, "adalora"),
    ],
    ids=["two", "alone", "dora", "adalora"],
)
def test_what_the_libraries_refuse_is_refused(setup, said):
    with pytest.raises(ConfigError, match=said):
        model_of({**SMALL, "quantization_config": GPTQ}, **setup)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq"}, "bits None"),
        ({**GPTQ, "bits": "4"}, "2, 3, 4, 8"),
        ({**GPTQ, "group_size": 100}, "-1, 16, 32"),
        ({**GPTQ, "group_size": 0}, "group_size 0"),
        ({"format": "gptq"}, "needs bits"),
        ({"quant_method": "awq"}, "awq are not modelled. Legal: bitsandbytes, gptq"),
        ({**GPTQ, "modules_in_block_to_quantize": 3}, "must be lists"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_is_legal(quantization, said):
    with pytest.raises(ConfigError, match=said):
        Setup(quantization=quantization, adapter=LORA)


def test_a_configuration_survives_being_written_down():
    only = {**GPTQ, "modules_in_block_to_quantize": ["q_proj"], "group_size": 64}
    quantization = Setup(quantization=only, adapter=LORA).quantization

    again = Setup(quantization=quantization.to_dict(), adapter=LORA).quantization

    assert again == quantization
    assert again.words == "4-bit base (GPTQ, groups of 64)"


def test_a_model_that_is_not_quantized_can_be_asked_as_a_checkpoint():
    setup = Setup(batch=1, seq_len=16, loop="plain", adapter=LORA, quantization={**GPTQ, "bits": 3})
    model = build(setup, resolve_model("gpt2"), None, None, None).model

    assert len(list(packed_layers(model))) == 48
