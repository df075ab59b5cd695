"""Bases of GPTQ: real LoRA steps on the CPU with layers that hold numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

import torch

from memest.trace.model.packed import GptqLinear
from support.cases import twin
from support.packed_reference import reference_of
from support.real_steps import check_order, check_step

LORA = {"peft_type": "LORA", "r": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
ALL = {**LORA, "target_modules": r".*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)"}


def _case(name, model, quantization, adapter=LORA, loop="plain", **setup):
    base = {"loop": loop, "dtype": "float16", "batch": 12}
    values = {**base, "quantization": quantization, "adapter": adapter, **setup}
    return pytest.param(model, values, id=name)


CASES = [
    _case("gptq", "llama-gqa", GPTQ),
    _case("gptq-all", "llama-gqa", GPTQ, ALL, loop="trainer"),
    _case("gptq-8-bits", "llama-gqa", {**GPTQ, "bits": 8, "group_size": -1}, loop="accelerate"),
    _case("gptq-bfloat16", "llama-gqa", GPTQ, dtype="bfloat16"),
    _case("gptq-checkpointing", "llama-gqa", GPTQ, checkpointing="full", loop="trainer"),
    _case("gptq-bf16-autocast", "llama-gqa", GPTQ, precision="bf16", loop="trainer"),
    _case("gptq-conv1d", "gpt2", GPTQ),
    _case("gptq-biases", "opt", GPTQ, grad_accum=2, loop="trainer"),
    _case("gptq-prompts", "llama-gqa", GPTQ, {"peft_type": "PROMPT_TUNING",
                                              "num_virtual_tokens": 8}),
    _case("gptq-as-it-is", "llama-gqa", {**GPTQ, "prepare": False}, ALL),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup"), CASES)
def test_a_step_allocates_what_a_real_one_does(model, setup):
    check_step(model, setup, small=True)


@pytest.mark.slow
def test_every_allocation_is_the_same_and_in_the_same_order():
    # the CPU copies a mask of 9,216 bytes to add it up
    check_order(*_case("gptq", "llama-gqa", GPTQ, ALL).values, at_least=10_000)


def test_adapters_around_packed_layers_are_those_of_peft():
    twins = twin("llama-gqa", quantization=GPTQ, adapter=LORA, dtype="float16", batch=2)
    kinds = {type(m).__name__ for m in twins.built.trained.modules()}
    trained = {p.dtype for p in twins.built.trained.parameters() if p.requires_grad}

    assert "GPTQLoraLinear" in kinds
    assert trained == {torch.float32}


def test_a_reference_layer_multiplies_by_its_unpacked_weight():
    # the reference is no reference if its gradient is not that of x W
    layer = reference_of(GptqLinear(64, 32, bits=4, group_size=32, bias=True))
    x = torch.randn(5, 64, dtype=torch.float16, requires_grad=True)
    weight = torch.from_numpy(layer.numbers()).half()

    layer(x).sum().backward()

    assert torch.equal(layer(x), x @ weight + layer.bias)
    assert torch.allclose(x.grad, (torch.ones(5, 32).half() @ weight.t()), atol=1e-3)
