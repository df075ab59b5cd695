"""Quantised bases of bitsandbytes: what from_pretrained really makes, and real QLoRA steps."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from memest.trace.model.quantization import companions
from support.cases import twin
from support.real_steps import check_order, check_step

LORA = {"peft_type": "LORA", "r": 8}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
NESTED = {**NF4, "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
HALF = {"dtype": "bfloat16"}


def _case(model, quantization=NF4, adapter=LORA, loop="plain", **setup):
    values = {"loop": loop, "quantization": quantization, "adapter": adapter, **HALF, **setup}
    words = ["nested"] if "bnb_4bit_use_double_quant" in quantization else []
    words += [f"{k}={v}" for k, v in quantization.items() if k not in NESTED or v is False]
    words += [f"{k}={v}" for k, v in {**adapter, **setup}.items()]
    name = "-".join([model, loop, *words])
    for character in " '{}[]":
        name = name.replace(character, "")
    return pytest.param(model, values, id=name)


CASES = [
    _case("llama-gqa"),
    _case("llama-gqa", NESTED, loop="trainer"),
    _case("llama-tied", NESTED),
    _case("llama-gqa", {"load_in_4bit": True}),
    _case("llama-gqa", {**NF4, "bnb_4bit_quant_storage": "bfloat16"}),
    _case("llama-gqa", {**NF4, "prepare": False}, loop="trainer"),
    _case("llama-gqa", {**NF4, "prepare": False, "llm_int8_skip_modules": ["o_proj", "lm_head"]}),
    _case("llama-gqa", NESTED, precision="bf16", loop="trainer"),
    _case("llama-gqa", NESTED, checkpointing="full", loop="trainer"),
    _case("llama-gqa", NESTED, {**LORA, "target_modules": "all-linear", "lora_dropout": 0.1}),
    _case("llama-gqa", NESTED, {**LORA, "use_dora": True}),
    _case("llama-gqa", NESTED, {"peft_type": "IA3"}),
    _case("llama-gqa", NESTED, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8}),
    _case("qwen3", NESTED, loop="accelerate", grad_accum=2),
    _case("gpt2", NESTED),
    _case("opt", NESTED),
    _case("gpt_neox", NESTED),
    _case("bert", {**NESTED, "llm_int8_skip_modules": ["classifier"]}, loop="trainer"),
    _case("t5", NESTED, loop="trainer"),
    _case("llama-gqa", INT8),
    _case("llama-gqa", INT8, dtype="float16"),
    _case("llama-gqa", {**INT8, "llm_int8_threshold": 0.0}, loop="trainer"),
    _case("llama-gqa", {**INT8, "prepare": False}, checkpointing="full", loop="trainer"),
    _case("gpt2", INT8, {**LORA, "target_modules": "all-linear"}),
    _case("bert", {**INT8, "llm_int8_skip_modules": ["classifier"]}, {"peft_type": "IA3"}),
    _case("qwen3_moe", NESTED, {**LORA, "target_modules": ["q_proj", "v_proj"]}),
]


@pytest.mark.slow("llama-gqa-plain-peft_type=LORA-r=8_0")
@pytest.mark.parametrize(("model", "setup"), CASES)
def test_the_base_consists_of_the_tensors_that_from_pretrained_makes(model, setup):
    twins = twin(model, **setup)

    def facts(module):
        found = {
            n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
        }
        for name, part in module.named_modules():
            for number, tensor in enumerate(companions(part)):
                found[f"{name}#{number}"] = (tuple(tensor.shape), tensor.dtype)
        return found

    made, real = facts(twins.built.trained), facts(twins.real)
    assert made == real
    assert any("#" in name for name in real)


@pytest.mark.slow(but=("llama-gqa-plain-load_in_8bit=True-peft_type=LORA-r=8-dtype=float16",))
@pytest.mark.parametrize(("model", "setup"), CASES)
def test_a_step_allocates_what_a_real_one_does(model, setup):
    check_step(model, setup, small=True)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup"), [_case("llama-gqa", NESTED), _case("llama-tied")])
def test_every_allocation_is_the_same_and_in_the_same_order(model, setup):
    check_order(model, setup)
