"""Real steps with adapters of peft against traced ones, as test_steps does it for whole models.

The real model is wrapped by ``peft.get_peft_model`` as a training script does it, the traced one on
meta; dtypes, gradients, states and every peak follow from peft's own code on both sides.
"""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

from support.cases import twin
from support.real_memory import differences
from support.real_steps import run_both

PLAIN, ACCELERATE, TRAINER = "plain", "accelerate", "trainer"
LINEAR = {"target_modules": "all-linear"}


def _case(model, peft_type="LORA", loop=PLAIN, cast=True, setup=None, **settings):
    adapter = {"peft_type": peft_type, "autocast_adapter_dtype": cast, **settings}
    if peft_type == "LORA":
        adapter.setdefault("r", 8)
    words = [f"{k}={v}" for k, v in {**settings, **(setup or {})}.items()]
    words += [] if cast else ["base-dtype"]
    name = "-".join([model, peft_type, loop, *words]).replace(" ", "").replace("'", "")
    return pytest.param(model, {"loop": loop, "adapter": adapter, **(setup or {})}, id=name)


HALF = {"dtype": "bfloat16"}
AUTOCAST = {"precision": "bf16"}
CHECKPOINTED = {"checkpointing": "full"}

CASES = [
    # families, targets as peft chooses them
    _case("llama-gqa"),
    _case("llama-tied", loop=TRAINER),
    _case("qwen3", loop=ACCELERATE, setup={"grad_accum": 2}),
    _case("gemma2", loop=TRAINER),
    _case("gpt2"),
    _case("gpt2", setup=HALF, **LINEAR),
    _case("gpt_neox"),
    _case("bloom"),
    _case("phi", loop=TRAINER),
    _case("opt"),
    _case("bert", loop=TRAINER),
    _case("deberta"),
    _case("t5", loop=TRAINER, setup={"grad_accum": 2}),
    _case("bart"),
    _case("vit", target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]),
    _case("whisper", loop=TRAINER, target_modules=["q_proj", "v_proj"]),
    _case("qwen3_moe", target_modules=["q_proj", "v_proj"], setup=HALF),
    # dtypes, autocast, dropout, checkpointing
    _case("llama-gqa", setup=HALF),
    _case("llama-gqa", cast=False, setup=HALF),
    _case("llama-gqa", setup=HALF, **LINEAR),
    _case("llama-gqa", setup=HALF | AUTOCAST, loop=TRAINER, **LINEAR),
    _case("llama-gqa", setup=AUTOCAST, loop=TRAINER),
    _case("llama-gqa", setup=CHECKPOINTED, loop=TRAINER),
    _case("llama-gqa", setup=HALF | CHECKPOINTED | {"use_reentrant": True}, **LINEAR),
    _case("llama-gqa", lora_dropout=0.1, setup=HALF, **LINEAR),
    # what trains
    _case("llama-gqa", use_dora=True, setup=HALF),
    _case("llama-gqa", use_dora=True, lora_dropout=0.1),
    _case("gpt2", use_dora=True),
    _case("llama-gqa", use_rslora=True, r=4),
    _case("llama-gqa", modules_to_save=["lm_head"], setup=HALF),
    _case("llama-tied", modules_to_save=["embed_tokens"], loop=TRAINER),
    _case("llama-gqa", "IA3", setup=HALF),
    _case("gpt2", "IA3"),
    _case("llama-gqa", "VERA", r=16),
    _case("llama-gqa", "LOHA", target_modules=["q_proj"], r=4),
    _case("llama-gqa", "LOKR", target_modules=["q_proj"], r=4),
    _case("llama-gqa", "ADALORA", init_r=12, target_r=8, total_step=100),
    _case("llama-gqa", "OFT", oft_block_size=32, target_modules=["q_proj"]),
    _case("llama-gqa", "BOFT", boft_block_size=32, target_modules=["q_proj"]),
    _case("llama-gqa", "LN_TUNING"),
    _case("llama-gqa", "PROMPT_TUNING", num_virtual_tokens=8, setup=HALF),
    _case("llama-gqa", "P_TUNING", num_virtual_tokens=8, encoder_hidden_size=64),
    _case("llama-gqa", "PREFIX_TUNING", num_virtual_tokens=8),
    _case("gpt2", "PREFIX_TUNING", num_virtual_tokens=8),
]


@pytest.mark.slow(
    but=(
        "llama-gqa-LORA-plain",
        "llama-tied-LORA-trainer",
        "gemma2-LORA-trainer",
        "gpt2-LORA-plain",
        "gpt_neox-LORA-plain",
        "bloom-LORA-plain",
        "opt-LORA-plain",
        "bert-LORA-trainer",
        "deberta-LORA-plain",
        "vit-LORA-plain-target_modules=[q_proj,v_proj]-modules_to_save=[classifier]",
        "llama-gqa-LORA-plain-use_rslora=True-r=4",
        "llama-tied-LORA-trainer-modules_to_save=[embed_tokens]",
        "gpt2-IA3-plain",
        "llama-gqa-VERA-plain-r=16",
        "llama-gqa-LOHA-plain-target_modules=[q_proj]-r=4",
        "llama-gqa-LOKR-plain-target_modules=[q_proj]-r=4",
        "llama-gqa-ADALORA-plain-init_r=12-target_r=8-total_step=100",
        "llama-gqa-OFT-plain-oft_block_size=32-target_modules=[q_proj]",
        "llama-gqa-P_TUNING-plain-num_virtual_tokens=8-encoder_hidden_size=64",
        "llama-gqa-PREFIX_TUNING-plain-num_virtual_tokens=8",
        "gpt2-PREFIX_TUNING-plain-num_virtual_tokens=8",
    )
)
@pytest.mark.parametrize(("model", "setup"), CASES)
def test_step_allocates_what_a_real_one_does(model, setup):
    real, trace, host = run_both(model, setup)

    # these models are small, and what stays on the host when layers are recomputed is not
    assert abs(trace.peak - real.peak) <= max(0.0025 * real.peak, host)
    measured = {phase.name: phase for phase in real.phases}
    traced = {phase.name for phase in trace.phases}
    assert [p.name for p in trace.phases] == [n for n in measured if n in traced]
    for phase in trace.phases:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + 0.005 * real.peak, f"peak in {phase.name}"


@pytest.mark.parametrize(("model", "setup"), CASES)
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
    real, trace, _ = run_both(model, setup)

    assert len(trace.allocations(at_least=4096)) > 100
    assert differences(real, trace, at_least=4096) == []
