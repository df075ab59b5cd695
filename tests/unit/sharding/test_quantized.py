"""Adapters and quantized bases on several GPUs: what is refused, what is whole, what is divided.

Real ranks are in ``test_fsdp_ranks.py`` (accelerate's own preparation) and ``test_zero.py``
(DeepSpeed).
"""

from __future__ import annotations

import pytest

import memest
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.events import Weight
from memest.profiles.axes import key_of, structure_of, traced_setup
from memest.profiles.document import _read_weight, _weight
from memest.sharding.fsdp_units import UnitPlan, sharded_plans, stored_dtype

LLAMA = "meta-llama/Llama-3.2-1B?num_hidden_layers=2"
TINY = {"batch": 2, "seq_len": 64, "gpu": "a100-80gb", "max_batch": False, "bf16": True}
FOUR = {
    "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "lora_r": 8, "prepare_kbit": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SHARDED = {"fsdp": "full_shard", "bf16": True, "lora_r": 8}


def rows(**options):
    answer = memest.estimate(LLAMA, **{**TINY, **options})
    return {str(row.category): row.bytes for row in answer.breakdown}


def setup(**options):
    return setup_from_options(**{"num_gpus": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_what_cannot_be_sharded_is_refused_with_the_reason(options, message):
    with pytest.raises(ConfigError) as error:
        setup(**options)
    assert message in str(error.value)


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
        key_of(structure_of(run))
        for run in (alone, setup(zero=2, bf16=True, lora_r=8), setup(**SHARDED))
    ]
    assert "in_half" not in keys[0]
    assert keys[1]["in_half"] is True
    assert keys[1] == keys[2]
    # stage 3 casts nothing of a model that zero.Init built
    assert not traced_setup(setup(zero=3, bf16=True, lora_r=8)).distributed.in_half
    assert not traced_setup(setup(zero=2, bf16=True)).distributed.in_half


def test_what_an_adapter_is_scaled_by_changes_no_trace():
    one, other, larger, with_dora = (
        structure_of(setup(num_gpus=1, **{"lora_r": 8, **options}))
        for options in ({}, {"lora_alpha": 32}, {"lora_r": 16}, {"use_dora": True})
    )
    assert key_of(one) == key_of(other) == key_of(larger) != key_of(with_dora)


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
    run = setup(**SHARDED, load_in_4bit=True)
    (plan,), (note,) = sharded_plans(plans, weights, run)
    assert plan.weights == (1, 2)
    assert "whole on every GPU" in note
    assert "--bnb-4bit-quant-storage bfloat16" in note


def test_fsdp1_flattens_one_dtype():
    """What prepare_model_for_kbit_training made float32 does not fit beside packed halves."""
    run = setup(
        **SHARDED, fsdp_version=1, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"
    )  # fmt: skip
    packed, norm = weight("layer.q", kept="bfloat16"), weight("layer.norm", kept="float32")
    plans = (UnitPlan(modules=("layer",), weights=(0, 1), reshards=True),)
    with pytest.raises(ConfigError, match=r"Must flatten tensors with uniform dtype.*no-prepare"):
        sharded_plans(plans, [packed, norm], run)
    norm = weight("layer.norm", kept="bfloat16")
    assert sharded_plans(plans, [packed, norm], run) == (plans, [])


def test_fsdp1_brings_a_quantized_model_whole_or_layer_by_layer():
    parts = {**FOUR, "fsdp": "full_shard", "fsdp_version": 1, "num_gpus": 8}
    parts["bnb_4bit_quant_storage"] = "bfloat16"
    whole = rows(**parts, seq_len=16, batch=1)
    waits = rows(**parts, seq_len=16, batch=1, fsdp_cpu_ram_efficient_loading=True)
    # the peak is that of cutting the embeddings, beside whole layers or beside shards of all
    assert 0 < waits["parameters"] < whole["parameters"] / 7
    with pytest.raises(ConfigError, match=r"torch: .Must flatten tensors with uniform dtype"):
        rows(**{**parts, "prepare_kbit": True})


def test_two_dtypes_that_train_in_a_unit_are_refused():
    weights = [
        weight("lora", trains=True, kept="float32"), weight("head", trains=True, kept="bfloat16"),
    ]  # fmt: skip
    plans = (UnitPlan(modules=("layer",), weights=(0, 1), reshards=True),)
    run = setup(**SHARDED, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    with pytest.raises(ConfigError, match="uniform original parameter dtype"):
        sharded_plans(plans, weights, run)
    # without 4-bit weights accelerate has made float32 of both
    assert sharded_plans(plans, weights, setup(**SHARDED)) == (plans, [])


def test_adapters_and_a_head_train_together_under_zero_2():
    estimate = memest.estimate(
        "roberta-base?num_hidden_layers=2", task="sequence-classification", num_gpus=4, zero=2,
        **{**TINY, "lora_r": 8},
    )  # fmt: skip
    trained = estimate.model.trainable_parameters
    master = {str(row.category): row.bytes for row in estimate.breakdown}["master weights"]
    assert master == pytest.approx(4 * trained / 4, rel=0.001)


def test_under_stage_3_the_run_stops_and_memest_says_why():
    with pytest.raises(ConfigError, match="--no-autocast-adapter-dtype"):
        memest.estimate(
            "roberta-base?num_hidden_layers=2", task="sequence-classification", num_gpus=4,
            zero=3, **{**TINY, "lora_r": 8},
        )  # fmt: skip
