"""Step profiles with adapters: formulas answer what a trace of its own answers, at any point."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("peft")

from memest.config.setup import Setup
from memest.estimation.profiler import Profiler
from support.profile_cases import NOWHERE, Case, compare, questions

LORA = {"peft_type": "LORA", "r": 8}
CASES = {
    "llama": (Case("HuggingFaceTB/SmolLM-135M", longest=1024), LORA, {}),
    "llama half all": (
        Case("HuggingFaceTB/SmolLM-135M", longest=1024),
        {**LORA, "target_modules": "all-linear", "lora_dropout": 0.05},
        {"dtype": "bfloat16", "checkpointing": "full"},
    ),
    "dora": (
        Case("Qwen/Qwen1.5-0.5B", longest=1024), {**LORA, "use_dora": True}, {"precision": "bf16"},
    ),
    "gpt2": (Case("distilgpt2", longest=1024), LORA, {"loop": "plain"}),
    "ia3": (Case("prajjwal1/bert-tiny", whole=True), {"peft_type": "IA3"}, {}),
    "prompts": (
        Case("EleutherAI/pythia-14m", longest=512),
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 20}, {},
    ),
    "prefix": (
        Case("HuggingFaceTB/SmolLM-135M", longest=512),
        {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20}, {},
    ),
    "nf4": (
        Case("HuggingFaceTB/SmolLM-135M", longest=1024), LORA,
        {
            "dtype": "bfloat16", "precision": "bf16", "checkpointing": "full",
            "quantization": {
                "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
            },
        },
    ),
    "int8": (
        Case("EleutherAI/pythia-14m", longest=512), LORA,
        {"dtype": "float16", "loop": "plain", "quantization": {"load_in_8bit": True}},
    ),
    "t5": (
        Case("Salesforce/codet5-small", sizes=("batch", "seq_len", "target_len")), LORA,
        {"precision": "bf16"},
    ),
    "vit": (
        Case("facebook/deit-tiny-patch16-224", whole=True, sizes=("batch",)),
        {**LORA, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}, {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_profile_answers_as_a_trace_does(name):
    case, adapter, options = CASES[name]
    options = {"adapter": adapter, **options}
    tracer = Profiler(source=case.source(), stores=NOWHERE)
    _, points = questions(case, random.Random(name).randint(0, 99))

    compare(case, tracer, options, points)

    sizes = {"seq_len": case.lengths[0]} if "seq_len" in case.sizes else {}
    known = [({"batch": batch, **sizes}, "a100") for batch in (8, 6)]
    assert compare(case, tracer, options, known), "no answer came from formulas"


def test_what_is_known_of_one_adapter_is_not_told_of_another():
    source = Case("HuggingFaceTB/SmolLM-135M").source()
    tracer = Profiler(source=source, stores=NOWHERE)
    keys = [
        tracer.profile_of(Setup(adapter=adapter)).key
        for adapter in (None, LORA, {**LORA, "r": 16}, {**LORA, "autocast_adapter_dtype": False})
    ]

    assert len({str(key) for key in keys}) == 4
    assert "adapter" not in keys[0]["setup"]
