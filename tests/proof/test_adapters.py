"""Real steps with adapters of peft against traced ones, as test_steps does it for whole models.

The real model is wrapped by ``peft.get_peft_model`` as a training script does it, the traced one on
meta; dtypes, gradients, states and every peak follow from peft's own code on both sides. Quantised
bases are what ``from_pretrained`` makes with bitsandbytes, and layers of GPTQ that hold numbers.
"""

from __future__ import annotations

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import torch

from memest.config.adapter import methods
from memest.trace.model.packed import GptqLinear
from memest.trace.model.quantization import companions
from support.cases import twin
from support.packed_reference import reference_of
from support.real_steps import check_order, check_step, run_both

PLAIN, ACCELERATE, TRAINER = "plain", "accelerate", "trainer"
LINEAR = {"target_modules": "all-linear"}
LORA = {"peft_type": "LORA", "r": 8}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
NESTED = {**NF4, "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
ALL = {**LORA, "target_modules": r".*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)"}
HALF = {"dtype": "bfloat16"}
AUTOCAST = {"precision": "bf16"}
CHECKPOINTED = {"checkpointing": "full"}


def _case(model, peft_type="LORA", loop=PLAIN, cast=True, setup=None, slow=False, **settings):
    adapter = {"peft_type": peft_type, "autocast_adapter_dtype": cast, **settings}
    if peft_type == "LORA":
        adapter.setdefault("r", 8)
    words = [f"{k}={v}" for k, v in {**settings, **(setup or {})}.items()]
    words += [] if cast else ["base-dtype"]
    name = "-".join([model, peft_type, loop, *words]).replace(" ", "").replace("'", "")
    marks = [pytest.mark.slow] if slow else []
    values = {"loop": loop, "adapter": adapter, **(setup or {})}
    return pytest.param(model, values, id=name, marks=marks)


def _quantized(model, quantization=NF4, adapter=LORA, loop=PLAIN, slow=True, **setup):
    values = {"loop": loop, "quantization": quantization, "adapter": adapter, **HALF, **setup}
    words = ["nested"] if "bnb_4bit_use_double_quant" in quantization else []
    words += [f"{k}={v}" for k, v in quantization.items() if k not in NESTED or v is False]
    words += [f"{k}={v}" for k, v in {**adapter, **setup}.items()]
    name = "-".join([model, loop, *words])
    for character in " '{}[]":
        name = name.replace(character, "")
    return pytest.param(model, values, id=name, marks=[pytest.mark.slow] if slow else [])


def _packed(name, model, quantization, adapter=LORA, loop=PLAIN, **setup):
    base = {"loop": loop, "dtype": "float16", "batch": 12}
    values = {**base, "quantization": quantization, "adapter": adapter, **setup}
    return pytest.param(model, values, id=name, marks=pytest.mark.slow)


CASES = [
    # families, targets as peft chooses them
    _case("llama-gqa"),
    _case("llama-tied", loop=TRAINER),
    _case("qwen3", loop=ACCELERATE, setup={"grad_accum": 2}, slow=True),
    _case("gemma2", loop=TRAINER),
    _case("gpt2"),
    _case("gpt2", setup=HALF, **LINEAR, slow=True),
    _case("gpt_neox"),
    _case("bloom"),
    _case("phi", loop=TRAINER, slow=True),
    _case("opt"),
    _case("bert", loop=TRAINER),
    _case("deberta"),
    _case("t5", loop=TRAINER, setup={"grad_accum": 2}, slow=True),
    _case("bart", slow=True),
    _case("vit", target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]),
    _case("whisper", loop=TRAINER, target_modules=["q_proj", "v_proj"], slow=True),
    _case("qwen3_moe", target_modules=["q_proj", "v_proj"], setup=HALF, slow=True),
    # dtypes, autocast, dropout, checkpointing
    _case("llama-gqa", setup=HALF, slow=True),
    _case("llama-gqa", cast=False, setup=HALF, slow=True),
    _case("llama-gqa", setup=HALF, **LINEAR, slow=True),
    _case("llama-gqa", setup=HALF | AUTOCAST, loop=TRAINER, **LINEAR, slow=True),
    _case("llama-gqa", setup=AUTOCAST, loop=TRAINER, slow=True),
    _case("llama-gqa", setup=CHECKPOINTED, loop=TRAINER, slow=True),
    _case("llama-gqa", setup=HALF | CHECKPOINTED | {"use_reentrant": True}, **LINEAR, slow=True),
    _case("llama-gqa", lora_dropout=0.1, setup=HALF, **LINEAR, slow=True),
    # what trains
    _case(
        "llama-gqa",
        modules_to_save=["lm_head"],
        setup=HALF | AUTOCAST | {"cast_weights": ("trainable=float32",)},
    ),
    _case("llama-gqa", use_dora=True, setup=HALF, slow=True),
    _case("llama-gqa", use_dora=True, lora_dropout=0.1, slow=True),
    _case("gpt2", use_dora=True, slow=True),
    _case("llama-gqa", use_rslora=True, r=4),
    _case("llama-gqa", modules_to_save=["lm_head"], setup=HALF, slow=True),
    _case("llama-tied", modules_to_save=["embed_tokens"], loop=TRAINER),
    _case("llama-gqa", "IA3", setup=HALF, slow=True),
    _case("gpt2", "IA3"),
    _case("llama-gqa", "VERA", r=16),
    _case("llama-gqa", "LOHA", target_modules=["q_proj"], r=4),
    _case("llama-gqa", "LOKR", target_modules=["q_proj"], r=4),
    _case("llama-gqa", "ADALORA", init_r=12, target_r=8, total_step=100),
    _case("llama-gqa", "ADALORA", ACCELERATE, init_r=12, target_r=8, total_step=100, slow=True),
    _case("llama-gqa", "OFT", oft_block_size=32, target_modules=["q_proj"]),
    _case("llama-gqa", "BOFT", boft_block_size=32, target_modules=["q_proj"], slow=True),
    _case("llama-gqa", "LN_TUNING", slow=True),
    _case("llama-gqa", "PROMPT_TUNING", num_virtual_tokens=8, setup=HALF, slow=True),
    _case("llama-gqa", "P_TUNING", num_virtual_tokens=8, encoder_hidden_size=64),
    _case("llama-gqa", "PREFIX_TUNING", num_virtual_tokens=8),
    _case("gpt2", "PREFIX_TUNING", num_virtual_tokens=8),
]

# methods of the registry by what they need to be told, proved allocation by allocation
OTHERS = {
    # no rank is given up in these steps: what that computes is not in a trace
    "ADALORA": {"init_r": 12, "target_r": 8, "total_step": 100, "deltaT": 10},
    "ADAPTION_PROMPT": {"adapter_len": 10, "adapter_layers": 2},
    "BEFT": {},
    "CARTRIDGE": {"num_virtual_tokens": 8},
    "DEFT": {},
    "DELORA": {},
    "FOURIERFT": {"n_frequency": 100},
    "GLORA": {},
    "GRALORA": {},
    "HIRA": {},
    "HRA": {},
    "LILY": {"r": 8, "stride_A": 2},
    "MISS": {},
    "OSF": {"target_modules": ["q_proj", "v_proj"]},
    "PEANUT": {},
    "PSOFT": {"r": 16},
    "PVERA": {},
    "RANDLORA": {},
    "ROAD": {},
    "SHADOW": {},
    "TINYLORA": {},
    "TRAINABLE_TOKENS": {"token_indices": [0, 1]},
    "UNILORA": {},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 64},
}
PROVED = [
    _case("llama-gqa", method, setup=HALF, slow=method not in ("MISS", "ROAD"), **settings)
    for method, settings in OTHERS.items()
]
CPT = _case(
    "llama-gqa",
    "CPT",
    setup=HALF,
    cpt_token_ids=[0, 1, 2, 3],
    cpt_mask=[1, 1, 1, 1],
    cpt_tokens_type_mask=[1, 2, 3, 4],
)
HIDDEN = 128
# kernels of the CPU, which copy for themselves what those of CUDA do not
APART = [
    _case("llama-gqa", "C3A", block_size=32, target_modules=["q_proj"], slow=True),
    _case("llama-gqa", "SUPERTUNING", setup=HALF, slow=True),
]  # fmt: skip


BITSANDBYTES = [
    _quantized("llama-gqa"),
    _quantized("llama-gqa", NESTED, loop=TRAINER),
    _quantized(
        "llama-gqa",
        {**NESTED, "prepare": False},
        ALL,
        TRAINER,
        slow=False,
        precision="bf16",
        cast_weights=("trainable=bfloat16",),
    ),
    _quantized("llama-tied", NESTED),
    _quantized("llama-gqa", {"load_in_4bit": True}),
    _quantized("llama-gqa", {**NF4, "bnb_4bit_quant_storage": "bfloat16"}),
    _quantized("llama-gqa", {**NF4, "prepare": False}, loop=TRAINER),
    _quantized(
        "llama-gqa", {**NF4, "prepare": False, "llm_int8_skip_modules": ["o_proj", "lm_head"]}
    ),
    _quantized("llama-gqa", NESTED, precision="bf16", loop=TRAINER),
    _quantized("llama-gqa", NESTED, checkpointing="full", loop=TRAINER),
    _quantized("llama-gqa", NESTED, {**LORA, "target_modules": "all-linear", "lora_dropout": 0.1}),
    _quantized("llama-gqa", NESTED, {**LORA, "use_dora": True}),
    _quantized("llama-gqa", NESTED, {"peft_type": "IA3"}),
    _quantized("llama-gqa", NESTED, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8}),
    _quantized("qwen3", NESTED, loop=ACCELERATE, grad_accum=2),
    _quantized("gpt2", NESTED),
    _quantized("opt", NESTED),
    _quantized("gpt_neox", NESTED),
    _quantized("bert", {**NESTED, "llm_int8_skip_modules": ["classifier"]}, loop=TRAINER),
    _quantized("t5", NESTED, loop=TRAINER),
    _quantized("llama-gqa", INT8),
    _quantized("llama-gqa", INT8, dtype="float16", slow=False),
    _quantized("llama-gqa", {**INT8, "llm_int8_threshold": 0.0}, loop=TRAINER),
    _quantized("llama-gqa", {**INT8, "prepare": False}, checkpointing="full", loop=TRAINER),
    _quantized("gpt2", INT8, {**LORA, "target_modules": "all-linear"}),
    _quantized("bert", {**INT8, "llm_int8_skip_modules": ["classifier"]}, {"peft_type": "IA3"}),
    _quantized("qwen3_moe", NESTED, {**LORA, "target_modules": ["q_proj", "v_proj"]}),
]


PACKED = [
    _packed("gptq", "llama-gqa", GPTQ),
    _packed("gptq-all", "llama-gqa", GPTQ, ALL, loop=TRAINER),
    _packed("gptq-8-bits", "llama-gqa", {**GPTQ, "bits": 8, "group_size": -1}, loop=ACCELERATE),
    _packed("gptq-bfloat16", "llama-gqa", GPTQ, dtype="bfloat16"),
    _packed("gptq-checkpointing", "llama-gqa", GPTQ, checkpointing="full", loop=TRAINER),
    _packed("gptq-bf16-autocast", "llama-gqa", GPTQ, precision="bf16", loop=TRAINER),
    _packed("gptq-conv1d", "gpt2", GPTQ),
    _packed("gptq-biases", "opt", GPTQ, grad_accum=2, loop=TRAINER),
    _packed("gptq-prompts", "llama-gqa", GPTQ, {"peft_type": "PROMPT_TUNING",
                                              "num_virtual_tokens": 8}),
    _packed("gptq-as-it-is", "llama-gqa", {**GPTQ, "prepare": False}, ALL),
]  # fmt: skip


@pytest.mark.parametrize(("model", "setup"), [*CASES, *APART, *BITSANDBYTES, *PACKED])
def test_step_allocates_what_a_real_one_does(model, setup):
    # these models are small, and what stays on the host when layers are recomputed is not
    check_step(model, setup, small=True)


@pytest.mark.parametrize(
    ("model", "setup"),
    [
        pytest.param(*case.values, id=case.id)
        for case in [*CASES, *PROVED, *APART, CPT, *BITSANDBYTES]
    ],
)
def test_parameters_have_the_shapes_and_dtypes_of_a_real_build(model, setup):
    twins = twin(model, **setup)

    def facts(module):
        parameters = dict(module.named_parameters()).items()
        tensors = {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in parameters}
        for name, part in module.named_modules():
            for number, tensor in enumerate(companions(part)):
                tensors[f"{name}#{number}"] = (tuple(tensor.shape), tensor.dtype)
        return tensors

    real = facts(twins.real)
    assert facts(twins.built_model.trained_model) == real
    assert any(p.requires_grad for p in twins.real.parameters())
    assert all(b.is_meta for b in twins.built_model.trained_model.buffers())
    assert any("#" in name for name in real) == ("quantization" in setup)


@pytest.mark.slow(but=("bert-IA3-plain",))
@pytest.mark.parametrize(
    ("model", "setup"),
    [
        _case("llama-gqa", setup=HALF),
        _case("llama-gqa", use_dora=True),
        _case("llama-gqa", lora_dropout=0.1, setup=HALF, **LINEAR),
        _case("bert", "IA3"),
        _quantized("llama-gqa", NESTED),
        _quantized("llama-tied"),
    ],
)
def test_every_allocation_is_the_same_and_in_the_same_order(model, setup):
    check_order(model, setup)


@pytest.mark.parametrize(("model", "setup"), PROVED)
def test_every_allocation_of_another_method_is_the_same_and_in_the_same_order(model, setup):
    check_order(model, setup)


@pytest.mark.slow
def test_prompts_whose_loss_picks_positions_take_what_real_ones_do():
    # the first values of its prompts are given back, which the profiler of the CPU never saw made
    real, trace, host = run_both(*CPT.values)

    assert abs(trace.peak - real.peak) <= host + 4 * HIDDEN * 4


def test_every_method_of_peft_is_proved_or_refused():
    proved = {case.values[1]["adapter"]["peft_type"] for case in [*CASES, *PROVED, *APART, CPT]}

    assert {name.upper() for name in methods()} == proved


@pytest.mark.slow
def test_every_allocation_around_packed_layers_is_the_same_and_in_the_same_order():
    # the CPU copies a mask of 9,216 bytes to add it up
    check_order(*_packed("gptq", "llama-gqa", GPTQ, ALL).values, at_least=10_000)


def test_adapters_around_packed_layers_are_those_of_peft():
    twins = twin("llama-gqa", quantization=GPTQ, adapter=LORA, dtype="float16", batch=2)
    kinds = {type(m).__name__ for m in twins.built_model.trained_model.modules()}
    trained = {p.dtype for p in twins.built_model.trained_model.parameters() if p.requires_grad}

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
