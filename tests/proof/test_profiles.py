"""What formulas answer is what a trace of its own answers, at any point, on any GPU.

Every model is asked at many points through one tracer, which grows families as it goes, and at the
same points by a trace made for that point alone. Equal means equal: every event, size, label,
module and category of the run, its peaks, and all that is told about it.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.profile_cases import (
    FAR,
    GPUS,
    NOWHERE,
    ROUNDS,
    Case,
    compare,
    contents_of,
    questions,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


from memest.config.setup import Setup
from memest.estimation.profiler import Profiler

WINDOW = (("sliding_window", 300),)
AROUND = (299, 300, 301, 44, 45, 428)
CASES = (
    Case("prajjwal1/bert-tiny", whole=True),
    Case("distilroberta-base"),
    Case("distilbert-base-cased"),
    Case("albert-base-v2"),
    Case("google/electra-small-discriminator"),
    Case("microsoft/deberta-v3-xsmall", points=3),
    Case("answerdotai/ModernBERT-base", (("local_attention", 200),), AROUND, FAR),
    Case("distilgpt2", whole=True, longest=1024),
    Case("facebook/opt-125m", longest=1024),
    Case("bigscience/bloom-560m"),
    Case("EleutherAI/pythia-14m", whole=True, longest=1024),
    Case("HuggingFaceTB/SmolLM-135M", longest=2048),
    Case("intfloat/e5-mistral-7b-instruct", WINDOW, AROUND, FAR),
    Case("Qwen/Qwen1.5-0.5B", longest=1500),
    Case("google/gemma-2-2b", WINDOW, AROUND, FAR),
    Case("google/gemma-3-270m", WINDOW, AROUND, FAR, points=3),
    Case("microsoft/phi-1", longest=1500),
    Case("mistralai/Mixtral-8x7B-Instruct-v0.1", longest=1024),
    Case("ibm-granite/granite-3.0-1b-a400m-base"),
    Case("openai/gpt-oss-20b", (("sliding_window", 300),), AROUND, FAR),
    Case("facebook/xglm-564M", lengths=(7, 33, 100, 126, 127), longest=2048),
    Case("google/bigbird-roberta-base", lengths=(64, 100, 127), longest=1100),
    Case("state-spaces/mamba-130m-hf", longest=1024),
    Case("AntonV/mamba2-130m-hf", lengths=(33, 128), longest=512, points=3),
    Case("Salesforce/codet5-small", sizes=("batch", "seq_len", "target_len")),
    Case("facebook/bart-base", sizes=("batch", "seq_len", "target_len")),
    Case("facebook/deit-tiny-patch16-224", sizes=("batch", "image_size")),
    Case("facebook/dinov3-vits16-pretrain-lvd1689m", sizes=("batch", "image_size")),
    Case("microsoft/swin-tiny-patch4-window7-224", sizes=("batch", "image_size")),
    Case("facebook/convnext-tiny-224", sizes=("batch", "image_size")),
    Case("microsoft/resnet-18", sizes=("batch", "image_size")),
    Case("nvidia/segformer-b0-finetuned-ade-512-512", sizes=("batch", "image_size")),
    Case("openai/clip-vit-base-patch16", lengths=(7, 33, 77), longest=77),
    Case("openai/whisper-tiny.en", lengths=(7, 33, 100), longest=440),
    Case("facebook/wav2vec2-base-960h", sizes=("batch", "audio_seconds"), grows=False),
)


@functools.cache
def tracer_of(case):
    """One tracer for all questions about a model, so that families are grown and used."""
    return Profiler(source=case.source(), stores=NOWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id.rpartition("/")[2])
@settings(
    max_examples=ROUNDS, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(number=st.integers(0, 1 << 32))
def test_a_profile_answers_as_a_trace_does(case, number):
    tracer = tracer_of(case)

    compare(case, tracer, *questions(case, number))

    # and some that nothing but a family can answer without a trace
    sizes = {"seq_len": case.lengths[0]} if "seq_len" in case.sizes else {}
    points = [({"batch": batch, **sizes}, "a100") for batch in (8, 6)]
    assert bool(compare(case, tracer, {}, points)) is case.grows


@pytest.mark.slow("trainer")
@pytest.mark.parametrize("loop", ["trainer", "plain"])
def test_one_tracer_is_not_confused_by_the_order_of_questions(loop):
    """Growing at a long length must not change what was or will be told of a short one."""
    source = Case("facebook/xglm-564M").source()
    setup = Setup(batch=4, loop=loop)
    fresh = Profiler(source=source, stores=NOWHERE)
    short = dataclasses.replace(setup, seq_len=161)
    long = dataclasses.replace(setup, seq_len=2049 - 8)

    before = contents_of(fresh, fresh.trace(short, GPUS["a100"]))
    fresh.trace(long, GPUS["a100"])

    assert contents_of(fresh, fresh.trace(short, GPUS["a100"])) == before


def test_what_the_library_caches_is_made_in_every_trace():
    source = Case("facebook/dinov3-vits16-pretrain-lvd1689m").source()
    tracer = Profiler(source=source, stores=NOWHERE)

    first = contents_of(tracer, tracer.trace(Setup(batch=2), GPUS["a100"]))

    assert contents_of(tracer, tracer.trace(Setup(batch=2), GPUS["a100"])) == first


# -- adapters -------------------------------------------------------------------------------------

LORA = {"peft_type": "LORA", "r": 8}
ADAPTED = {
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
@pytest.mark.parametrize("name", ADAPTED)
def test_a_profile_with_adapters_answers_as_a_trace_does(name):
    pytest.importorskip("peft")
    case, adapter, options = ADAPTED[name]
    options = {"adapter": adapter, **options}
    tracer = Profiler(source=case.source(), stores=NOWHERE)
    _, points = questions(case, random.Random(name).randint(0, 99))

    compare(case, tracer, options, points)

    sizes = {"seq_len": case.lengths[0]} if "seq_len" in case.sizes else {}
    known = [({"batch": batch, **sizes}, "a100") for batch in (8, 6)]
    assert compare(case, tracer, options, known), "no answer came from formulas"


def test_what_is_known_of_one_adapter_is_not_told_of_another():
    pytest.importorskip("peft")
    source = Case("HuggingFaceTB/SmolLM-135M").source()
    tracer = Profiler(source=source, stores=NOWHERE)
    keys = [
        tracer.profile_of(Setup(adapter=adapter)).key
        for adapter in (None, LORA, {**LORA, "r": 16}, {**LORA, "autocast_adapter_dtype": False})
    ]

    assert len({str(key) for key in keys}) == 3
    assert keys[1] == keys[2], "the rank is a size"
    assert "adapter" not in keys[0]["setup"]
