"""GRPO and RLOO asked as a user asks: who writes completions, and what that takes."""

from __future__ import annotations

import json

import pytest

import memest
from memest.config.options import setup_from_options
from memest.config.rollouts import Rollouts
from memest.estimation.tracer import Tracer
from memest.events import Category, Phase
from memest.report.result import Verdict
from memest.trace import generation
from support.small_llama import LLAMA

QUESTION = {
    "method": "grpo", "batch": 4, "num_generations": 4, "seq_len": 64, "bf16": True,
    "gpu": "rtx-4090", "max_batch": False,
}  # fmt: skip
trace = Tracer.evaluation
VLLM = {**QUESTION, "engine": "vllm"}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    return str(tmp_path)


def _parts(result):
    return {row.category: row.bytes for row in result.breakdown}


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({}, False),
        ({"kl_beta": 0.04}, True),
        ({"kl_beta": 0.04, "lora_r": 8}, False),
        ({"method": "rloo"}, True),
        ({"method": "rloo", "kl_beta": 0}, False),
        ({"method": "online-dpo"}, True),
        ({"method": "online-dpo", "lora_r": 8}, False),
    ],
)
def test_a_reference_is_there_where_the_divergence_counts(model, options, has):
    result = memest.estimate(model, **{**QUESTION, **options, "engine": "server"})

    assert (Category.REFERENCE in _parts(result)) is has


def test_the_model_s_own_generation_follows_the_steps(model):
    phases = {
        engine: {
            point.phase for point in memest.estimate(model, **QUESTION, engine=engine).timeline
        }
        for engine in ("model", "server")
    }

    assert Phase.GENERATION in phases["model"]
    assert Phase.GENERATION not in phases["server"]


ZERO_3 = {
    "stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000,
    "stage3_max_reuse_distance": 0,
}  # fmt: skip


def _gathered(result, phase):
    """Bytes of whole weights beside the shards, and of the bucket, at most."""
    points = [point for point in result.timeline if point.phase is phase]
    rows = [row for point in points for row in point.breakdown]
    return max(row.bytes for row in rows if row.category is Category.COMMUNICATION)


def test_all_weights_are_whole_under_zero_3_while_the_model_writes(model):
    result = memest.estimate(
        model, **QUESTION, num_gpus=4, zero_settings={"zero_optimization": ZERO_3}
    )

    whole, bucket = 2 * result.model.parameters, 2 * ZERO_3["reduce_bucket_size"]
    for phase in (Phase.BATCH, Phase.GENERATION):
        assert _gathered(result, phase) == whole + bucket, phase


def test_fsdp2_gathers_unit_by_unit_while_the_model_writes(model):
    """And never all of it, as ZeRO-3 does."""
    result = memest.estimate(model, **QUESTION, num_gpus=4, fsdp="full_shard")

    gathered = [
        row.bytes
        for point in result.timeline
        if point.phase is Phase.GENERATION
        for row in point.breakdown
        if row.category is Category.COMMUNICATION
    ]
    assert 0 < max(gathered) < result.model.parameters * 2


def test_zero_3_gives_an_engine_weight_by_weight_and_merges_adapters_into_all_at_once(model):
    def gathered(**more):
        result = memest.estimate(
            model, **{**QUESTION, "batch": 1, "seq_len": 8}, engine="server", num_gpus=4,
            zero_settings={"zero_optimization": ZERO_3}, **more,
        )  # fmt: skip
        return _gathered(result, Phase.BATCH) / result.model.parameters

    # all weights are two bytes a parameter
    assert gathered() < 2 <= gathered(lora_r=8, dtype="bfloat16")


@pytest.mark.slow
def test_more_steps_a_generation_write_more_at_once(model):
    def highest(**options):
        result = memest.estimate(model, **QUESTION, lora_r=8, **options)
        return max(p.allocated_bytes for p in result.timeline if p.phase is Phase.GENERATION)

    at_once = highest(steps_per_generation=4)
    assert at_once > highest()
    assert highest(grad_accum=4) == pytest.approx(at_once, rel=1e-2)


def test_an_engine_that_is_awake_has_its_share_beside_all_else(model):
    alone = memest.estimate(model, **QUESTION, engine="server")
    beside = memest.estimate(model, **VLLM, engine_share=0.5)
    share = beside.peak.engine_bytes

    assert share == pytest.approx(beside.gpu.usable_bytes / 2, rel=0.02)
    assert beside.peak.device_bytes == alone.peak.device_bytes + share
    assert beside.peak.reserved_bytes == alone.peak.reserved_bytes
    assert beside.gpu.headroom_bytes == alone.gpu.headroom_bytes - share
    assert beside.to_dict()["peak"]["engine_bytes"] == share
    assert "engine_bytes" not in alone.to_dict()["peak"]


def test_an_engine_that_sleeps_meets_what_the_trainer_keeps_between_steps(model):
    awake = memest.estimate(model, **VLLM)
    sleeps = memest.estimate(model, **VLLM, engine_sleeps=True)

    assert sleeps.peak.device_bytes < awake.peak.device_bytes
    assert any("peak is that of generation" in note for note in sleeps.notes)


@pytest.mark.parametrize("options", [{}, {"engine_sleeps": True}])
def test_nothing_is_sure_to_fit_where_an_engine_s_graphs_may_not(model, options):
    """vLLM says of its CUDA graphs that they take 1 to 3 GiB beside its share."""
    question = {**VLLM, **options}
    roomy = memest.estimate(model, **question)
    near = memest.estimate(model, **question, engine_share=0.9)

    assert roomy.verdict == "fits"
    assert near.gpu.headroom_bytes > 0
    assert near.verdict == "tight"
    assert "CUDA graphs may take up to 3.00 GiB" in near.gpu.reason
    assert near.peak.device_bytes < near.gpu.usable_bytes < near.interval.high_bytes


@pytest.mark.parametrize("options", [{}, {"engine_sleeps": True}])
def test_a_share_that_leaves_no_room_does_not_fit(model, options):
    result = memest.estimate(model, **VLLM, engine_share=0.99, **options)

    assert result.gpu.verdict == "does not fit"


def test_a_share_that_does_not_hold_the_engine_s_weights_is_told(model):
    with pytest.raises(memest.ConfigError, match=r"its own weights take .* Write --engine-share"):
        memest.estimate(model, **VLLM, engine_share=1e-4)


def test_where_no_share_holds_the_engine_s_weights_none_is_proposed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 8_000_000}))
    question = {**VLLM, "gpu": None, "gpu_memory": "700MiB", "engine_share": 0.5}

    with pytest.raises(memest.ConfigError, match="No share of this GPU holds both") as refused:
        memest.estimate(str(tmp_path), **question)

    assert "--engine-share" not in str(refused.value).partition("take")[2]


@pytest.mark.slow
def test_a_generation_in_autocast_computes_in_it(model):
    """accelerate puts autocast into the model's forward, which ``generate`` calls."""
    question = {"batch": 4, "seq_len": 32, "generate": 8, "dtype": "float32", "gpu": "rtx-4090"}

    def highest(**options):
        result = memest.estimate(model, **question, max_batch=False, **options)
        return max(p.allocated_bytes for p in result.timeline if p.phase is Phase.GENERATION)

    assert highest(bf16=True) != highest()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "vlm"}, "Did you mean 'vllm'"),
        ({"engine_share": 0.5}, "add --engine vllm"),
        ({"engine": "server", "engine_sleeps": True}, "add --engine vllm"),
        ({"engine": "vllm", "engine_share": 1.5}, "0 to 1"),
        ({"engine": "vllm", "engine_share": 0}, "no memory"),
        ({"kl_beta": -1}, "0 to"),
        ({"completion_len": 64}, "--seq-len 128"),
        ({"method": "dpo", "engine": "vllm"}, "add --method grpo, rloo or online-dpo"),
        ({"method": "ppo"}, "--method rloo or grpo learns .* --unpriced ppo"),
        ({"engine": "vllm", "load_in_8bit": True, "lora_r": 8}, "8 bits"),
        ({"num_gpus": 2, "fsdp": "full_shard", "lora_r": 8}, "and torch stops"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(model, options, words):
    with pytest.raises(memest.ConfigError, match=words):
        memest.estimate(model, **{**QUESTION, **options})


def test_the_largest_batch_comes_with_what_an_engine_takes(model):
    question = {key: value for key, value in VLLM.items() if key not in ("max_batch", "batch")}
    answer = memest.max_batch(model, **{**question, "gpu_memory": "2GiB"}, engine_share=0.9)

    assert any(note.startswith("vLLM holds") for note in answer.notes)
    assert any("completions of 32 tokens, half" in text for text in answer.assumptions)


@pytest.mark.parametrize(("options", "said"), [({}, True), ({"completion_len": 32}, False)])
def test_half_of_a_sequence_is_said_to_be_assumed(model, options, said):
    result = memest.estimate(model, **QUESTION, engine="server", **options)
    text = "completions of 32 tokens, half of the length (--completion-len sets it)"

    assert (text in result.assumptions) is said
    assert text not in result.usual


def test_half_of_a_sequence_is_the_completion_unless_it_is_said():
    assert Rollouts().completion_of(65) == 32
    assert Rollouts(completion_len=10).completion_of(65) == 10


@pytest.mark.slow
def test_cards_with_the_same_kernels_share_the_trace_of_a_generation(tmp_path, monkeypatch):
    """What is said of each is what is said of it alone, where no other's trace lies."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    question = {**QUESTION, "seq_len": 32, "gpu": None, "alternatives": False}
    cards = ("l4", "rtx-4090", "rtx-3090", "t4")
    made = []
    monkeypatch.setattr(
        Tracer, "evaluation", lambda *args, **o: made.append(args[1].gpu) or trace(*args, **o)
    )

    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / "together"))
    together = memest.estimate(str(tmp_path), **{**question, "gpu": cards}).common_gpus
    shared = len(made)
    for name, fit in zip(cards[1:], together, strict=True):
        monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / name))
        alone = memest.estimate(str(tmp_path), **{**question, "gpu": name})
        assert alone.gpu == fit
    assert shared == 2  # flash, and what a T4 takes in its place
    assert len(made) == shared + len(cards) - 1


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_largest_share_is_the_last_hundredth_that_surely_fits(model, sleeps):
    def at(share):
        options = {**VLLM, "gpu": "t4", "bf16": False, "fp16": True, "engine_sleeps": sleeps}
        return memest.estimate(model, **options, engine_share=share)

    largest = at(0.2).gpu.largest_engine_share

    assert largest == at(0.9).gpu.largest_engine_share
    assert at(largest).verdict is Verdict.FITS
    assert at(round(largest + 0.01, 2)).verdict is not Verdict.FITS


def test_a_card_that_is_its_memory_alone_is_shared_as_such(model):
    where = {**VLLM, "gpu": None, "gpu_memory": "8GiB"}
    beside = memest.estimate(model, **where, engine_share=0.5)

    assert beside.peak.engine_bytes == 4 * 2**30


# -- online DPO ------------------------------------------------------------------------------------

ONLINE = {**QUESTION, "method": "online-dpo", "batch": 2, "completion_len": 12, "seq_len": 28}


def _phase(result, phase):
    return [point for point in result.timeline if point.phase is phase]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_beta": 0.1}, "Leave them out"),
        ({"steps_per_generation": 2}, "Leave them out"),
        ({"precompute_ref_log_probs": True}, "Leave them out"),
        ({"num_gpus": 2, "fsdp": "full_shard", "engine": "server"}, "create_reference_model"),
        ({"num_gpus": 2, "zero": 3}, "create_reference_model"),
        ({"num_gpus": 2, "zero": 2, "grad_accum": 2}, "earlier micro-steps"),
        ({"qlora": True}, "a quantised base"),
        ({"torch_compile": True}, "--torch-compile"),
        ({"use_liger_kernel": True}, "--use-liger-kernel"),
        ({"method": "ppo"}, "no trainer of it any more"),
        ({"method": "xpo"}, "no trainer of it any more"),
    ],
)
def test_what_was_not_checked_of_online_dpo_is_refused(model, options, words):
    with pytest.raises(memest.ConfigError, match=words) as refused:
        memest.estimate(model, **{**ONLINE, **options})

    assert "\n" not in str(refused.value)


def test_online_dpo_alone_loads_its_model_as_it_was_saved():
    loaded = {each: setup_from_options(method=each).dtype for each in ("online-dpo", "grpo")}

    assert loaded == {"online-dpo": "auto", "grpo": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "share"), [(0, 1), (1, 2), (2, 2)])
def test_online_dpo_has_all_of_its_reference_on_every_gpu(model, stage, share):
    """As DPO: DeepSpeed's engine makes it bfloat16."""
    alone = memest.estimate(model, **ONLINE)
    shared = memest.estimate(model, **ONLINE, num_gpus=2, zero=stage)

    ratio = _parts(alone)[Category.REFERENCE] / _parts(shared)[Category.REFERENCE]
    assert ratio == pytest.approx(share, rel=1e-4)


@pytest.mark.slow
def test_sizes_of_online_dpo_follow_from_each_other(model, monkeypatch, tmp_path):
    """A completion of a named length scores as many tokens whatever the prompt."""
    sizes = [{"batch": batch, "seq_len": length} for batch in (1, 3) for length in (37, 64)]
    usual = {**ONLINE, "engine": "server", "checkpointing": "full"}
    followed = [memest.estimate(model, **{**usual, **size}).peak for size in sizes]
    monkeypatch.setattr("memest.profiles.known_profiles._works_in_pieces", lambda _: True)
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / "alone"))

    assert followed == [memest.estimate(model, **{**usual, **size}).peak for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_completions_of_pairs_are_written_as_if_all_of_them_were_traced(
    model, attention, checkpointing, monkeypatch, tmp_path
):
    """With checkpointing there is no cache: what a forward takes grows with the length, or its
    square."""
    asked = {**ONLINE, "attn_implementation": attention, "checkpointing": checkpointing}
    few = memest.estimate(model, **asked)
    monkeypatch.setattr(generation, "TRACED_STEPS", 13)
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / "every"))
    every = memest.estimate(model, **asked)

    assert len(_phase(few, Phase.GENERATION)) == 13
    assert few.timeline == every.timeline
    assert few.peak == every.peak


def test_later_completions_of_a_step_are_written_beside_its_gradients(model):
    once, twice = (
        max(p.allocated_bytes for p in _phase(result, Phase.GENERATION))
        for result in (memest.estimate(model, **ONLINE, grad_accum=n) for n in (1, 2))
    )
    parts = _parts(memest.estimate(model, **ONLINE))

    assert twice - once == pytest.approx(parts[Category.PARAMETERS], rel=0.05)
