"""Adapters and quantised bases on several GPUs: what is refused, what is whole, what is divided.

Real ranks are in ``test_fsdp.py`` (accelerate's own preparation) and ``test_zero.py`` (DeepSpeed).
"""

from __future__ import annotations

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.options import setup_from_options
from memest.sharding.quantised import sharded_plans
from memest.sharding.shards import stored_dtype
from memest.sharding.units import UnitPlan
from memest.sizes import as_traced, key_of, structure_of
from memest.steps.document import _read_weight, _weight

LLAMA = "meta-llama/Llama-3.2-1B?num_hidden_layers=2"
TINY = {"batch": 2, "seq_len": 64, "gpu": "a100-80gb", "max_batch": False, "bf16": True}
FOUR = {
    "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "lora_r": 8, "prepare_kbit": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SHARDED = {"fsdp": "full_shard", "bf16": True, "lora_r": 8}


def rows(**options):
    found = memest.estimate(LLAMA, **{**TINY, **options})
    return {str(row.category): row.bytes for row in found.breakdown}, found


def setup(**options):
    return setup_from_options(**{"num_gpus": 4, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**SHARDED, "load_in_8bit": True}, "scales of LLM.int8 hang on the weight object"),
        (
            {"zero": 3, "bf16": True, "lora_r": 8, "load_in_8bit": True},
            "keep the int8 numbers beside the parameter",
        ),
        (
            {"zero": 3, "lora_r": 8, "quantization_config": GPTQ},
            "buffers of their layers, which DeepSpeed and FSDP leave whole",
        ),
        (
            {"zero": 3, "fp16": True, "lora_r": 8, "load_in_4bit": True,
             "bnb_4bit_quant_storage": "bfloat16"},
            "DeepSpeed would cast every floating parameter to float16",
        ),
        (
            {"zero": 2, "bf16": True, "lora_r": 8, "load_in_4bit": True,
             "bnb_4bit_quant_storage": "float32"},
            "Use --bnb-4bit-quant-storage bfloat16",
        ),
        (
            {**SHARDED, "load_in_4bit": True, "fsdp_version": 1},
            "Cannot flatten integer dtype tensors",
        ),
        (
            {**SHARDED, "load_in_4bit": True, "bnb_4bit_quant_storage": "float32"},
            "Use --bnb-4bit-quant-storage bfloat16",
        ),
        (
            {**SHARDED, "load_in_4bit": True, "loop": "plain"},
            "Add --bnb-4bit-quant-storage bfloat16",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_refused_with_the_reason(options, said):
    with pytest.raises(ConfigError) as error:
        setup(**options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "lora_r": 8, "load_in_4bit": True},
        {"bf16": True, "lora_r": 8, "load_in_8bit": True},
        {"zero": 1, "bf16": True, "lora_r": 8, "load_in_8bit": True},
        {"zero": 2, "bf16": True, "lora_r": 8, "load_in_4bit": True},
        {"zero": 3, "bf16": True, "lora_r": 8, "load_in_4bit": True},
        {**SHARDED, "load_in_4bit": True},
        {**SHARDED, "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        {**SHARDED, "load_in_4bit": True, "bnb_4bit_quant_storage": "float16", "fp16": True,
         "bf16": False},
    ],
)  # fmt: skip
def test_what_libraries_take_is_taken(options):
    assert setup(**options).quantization is not None


def test_adapters_under_the_engine_have_a_trace_of_their_own():
    """Alone adapters are float32 beside half weights; DeepSpeed and FSDP compute with half ones."""
    alone = setup(num_gpus=1, lora_r=8, dtype="bfloat16")
    keys = [
        key_of(structure_of(asked))
        for asked in (alone, setup(zero=2, bf16=True, lora_r=8), setup(**SHARDED))
    ]
    assert "in_half" not in keys[0]
    assert keys[1]["in_half"] is True
    assert keys[1] == keys[2]
    # stage 3 casts nothing of a model that zero.Init built
    assert not as_traced(setup(zero=3, bf16=True, lora_r=8)).distributed.in_half
    assert not as_traced(setup(zero=2, bf16=True)).distributed.in_half


def weight(name, dtype="bfloat16", *, trains=False, kept=""):
    return Weight(
        name, (8, 1), (1, 1), dtype, trains=trains, decays=True, has_grad=trains, kept_dtype=kept
    )


def test_the_dtype_of_a_shard():
    lora = weight("lora", trains=True, kept="float32")
    norm = weight("norm", kept="float32")
    packed = weight("packed", kept="bfloat16")
    plain = setup(**SHARDED)
    four = setup(**SHARDED, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    assert [stored_dtype(w, four) for w in (lora, norm, packed)] == [
        "float32", "float32", "bfloat16",
    ]  # fmt: skip
    half = weight("lora", trains=True, kept="bfloat16")
    # accelerate makes float32 of what trains, but not beside 4-bit weights
    assert stored_dtype(half, plain) == "float32"
    assert stored_dtype(half, four) == "bfloat16"


def test_a_kept_dtype_survives_the_store():
    for one in (weight("a"), weight("a", kept="float32")):
        places: dict[int, int] = {}
        document = _weight(one)
        assert len(document) == (6 if one.kept_dtype else 5)
        assert document[0] == "a"
        assert _read_weight([*document[:1], [8, 1], [1, 1], *document[3:]], len(places) + 16) == one


def test_what_is_stored_as_bytes_is_left_out_of_its_unit():
    weights = [weight("q", "uint8"), weight("lora", trains=True, kept="float32"), weight("norm")]
    plans = (UnitPlan(modules=("layer",), weights=(0, 1, 2), reshards=True),)
    asked = setup(**SHARDED, load_in_4bit=True)
    (plan,), (note,) = sharded_plans(plans, weights, asked)
    assert plan.weights == (1, 2)
    assert "whole on every GPU" in note
    assert "--bnb-4bit-quant-storage bfloat16" in note


def test_fsdp1_flattens_one_dtype():
    """What prepare_model_for_kbit_training made float32 does not fit beside packed halves."""
    asked = setup(
        **SHARDED, fsdp_version=1, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"
    )  # fmt: skip
    packed, norm = weight("layer.q", kept="bfloat16"), weight("layer.norm", kept="float32")
    plans = (UnitPlan(modules=("layer",), weights=(0, 1), reshards=True),)
    with pytest.raises(ConfigError, match=r"Must flatten tensors with uniform dtype.*no-prepare"):
        sharded_plans(plans, [packed, norm], asked)
    norm = weight("layer.norm", kept="bfloat16")
    assert sharded_plans(plans, [packed, norm], asked) == (plans, [])


@pytest.mark.slow
def test_fsdp1_brings_a_quantised_model_whole_or_layer_by_layer():
    parts = {**FOUR, "fsdp": "full_shard", "fsdp_version": 1, "num_gpus": 8}
    parts["bnb_4bit_quant_storage"] = "bfloat16"
    whole, _ = rows(**parts, seq_len=16, batch=1)
    waits, _ = rows(**parts, seq_len=16, batch=1, fsdp_cpu_ram_efficient_loading=True)
    # the peak is that of cutting the embeddings, beside whole layers or beside shards of them
    assert 0 < waits["parameters"] < whole["parameters"] / 10
    with pytest.raises(ConfigError, match=r"torch: .Must flatten tensors with uniform dtype"):
        rows(**{**parts, "prepare_kbit": True})


def test_two_dtypes_that_train_in_a_unit_are_refused():
    weights = [
        weight("lora", trains=True, kept="float32"), weight("head", trains=True, kept="bfloat16"),
    ]  # fmt: skip
    plans = (UnitPlan(modules=("layer",), weights=(0, 1), reshards=True),)
    asked = setup(**SHARDED, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    with pytest.raises(ConfigError, match="uniform original parameter dtype"):
        sharded_plans(plans, weights, asked)
    # without 4-bit weights accelerate has made float32 of both
    assert sharded_plans(plans, weights, setup(**SHARDED)) == (plans, [])


@pytest.mark.slow
def test_storage_decides_what_is_divided():
    """Packed weights are a rank's part with a floating storage, whole with bytes."""
    parts = {**FOUR, "fsdp": "full_shard"}
    two, _ = rows(**parts, num_gpus=2, bnb_4bit_quant_storage="bfloat16")
    eight, _ = rows(**parts, num_gpus=8, bnb_4bit_quant_storage="bfloat16")
    whole, found = rows(**parts, num_gpus=8)
    packed = 2 * 60_817_408 // 2  # two layers of 60.8 M weights, half a byte each
    assert whole["parameters"] - eight["parameters"] == pytest.approx(packed * 7 / 8, rel=0.02)
    assert two["parameters"] > 3 * eight["parameters"]
    assert any("whole on every GPU" in note for note in found.notes)


@pytest.mark.slow
def test_frozen_weights_of_ddp_and_zero_2_stay_whole():
    alone, _ = rows(**FOUR)
    ddp, _ = rows(**FOUR, num_gpus=4)
    small = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000}}
    zero, _ = rows(**FOUR, num_gpus=4, zero_settings=small)
    assert ddp["parameters"] == alone["parameters"]
    # the engine makes half-precision ones of adapters: two bytes less for each
    assert 0 < alone["parameters"] - zero["parameters"] < 2_000_000


@pytest.mark.slow
def test_adapters_and_a_head_train_together_under_zero_2():
    found = memest.estimate(
        "roberta-base?num_hidden_layers=2", task="sequence-classification", num_gpus=4, zero=2,
        **{**TINY, "lora_r": 8},
    )  # fmt: skip
    trained = found.model.trainable_parameters
    master = {str(row.category): row.bytes for row in found.breakdown}["master weights"]
    assert master == pytest.approx(4 * trained / 4, rel=0.001)


@pytest.mark.slow
def test_under_stage_3_the_run_stops_and_memest_says_why():
    with pytest.raises(ConfigError, match="--no-autocast-adapter-dtype"):
        memest.estimate(
            "roberta-base?num_hidden_layers=2", task="sequence-classification", num_gpus=4,
            zero=3, **{**TINY, "lora_r": 8},
        )  # fmt: skip


def test_marks_of_an_adapted_model_are_the_models_own():
    """Units of FSDP are found by the names that the trace has for modules."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from memest.trace.cues import landmarks_of
    from memest.trace.optimizers import weights_of

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        plain = LlamaForCausalLM(config)
    before = landmarks_of(plain)
    names = {w.name for w in weights_of(plain)}
    wrapped = get_peft_model(plain, LoraConfig(target_modules=["q_proj"]), low_cpu_mem_usage=True)
    found: Landmarks = landmarks_of(wrapped)
    assert (found.embeddings, found.head, found.blocks) == (
        before.embeddings, before.head, before.blocks,
    )  # fmt: skip
    assert "model.layers.0" in found.kinds
    own = {w.name.replace(".base_layer", "") for w in weights_of(wrapped) if "lora" not in w.name}
    assert own == names
