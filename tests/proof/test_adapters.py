"""Real steps with adapters of peft against traced ones, as test_steps does it for whole models.

The real model is wrapped by ``peft.get_peft_model`` as a training script does it, the traced one on
meta; dtypes, gradients, states and every peak follow from peft's own code on both sides.
"""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

from support.cases import twin
from support.real_steps import check_order, check_step

PLAIN, ACCELERATE, TRAINER = "plain", "accelerate", "trainer"
LINEAR = {"target_modules": "all-linear"}


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


HALF = {"dtype": "bfloat16"}
AUTOCAST = {"precision": "bf16"}
CHECKPOINTED = {"checkpointing": "full"}

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
    _case("llama-gqa", "OFT", oft_block_size=32, target_modules=["q_proj"]),
    _case("llama-gqa", "BOFT", boft_block_size=32, target_modules=["q_proj"], slow=True),
    _case("llama-gqa", "LN_TUNING", slow=True),
    _case("llama-gqa", "PROMPT_TUNING", num_virtual_tokens=8, setup=HALF, slow=True),
    _case("llama-gqa", "P_TUNING", num_virtual_tokens=8, encoder_hidden_size=64),
    _case("llama-gqa", "PREFIX_TUNING", num_virtual_tokens=8),
    _case("gpt2", "PREFIX_TUNING", num_virtual_tokens=8),
]


@pytest.mark.parametrize(("model", "setup"), CASES)
def test_step_allocates_what_a_real_one_does(model, setup):
    # these models are small, and what stays on the host when layers are recomputed is not
    check_step(model, setup, small=True)


@pytest.mark.parametrize(
    ("model", "setup"), [pytest.param(*case.values, id=case.id) for case in CASES]
)
def test_parameters_have_the_shapes_and_dtypes_of_a_real_build(model, setup):
    twins = twin(model, **setup)

    def facts(module):
        parameters = dict(module.named_parameters()).items()
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in parameters}

    assert facts(twins.built.trained) == facts(twins.real)
    assert any(p.requires_grad for p in twins.real.parameters())
    assert all(b.is_meta for b in twins.built.trained.buffers())


@pytest.mark.slow(but=("bert-IA3-plain",))
@pytest.mark.parametrize(
    ("model", "setup"),
    [
        _case("llama-gqa", setup=HALF),
        _case("llama-gqa", use_dora=True),
        _case("llama-gqa", lora_dropout=0.1, setup=HALF, **LINEAR),
        _case("bert", "IA3"),
    ],
)
def test_every_allocation_is_the_same_and_in_the_same_order(model, setup):
    check_order(model, setup)
