"""What makes a run fit is what an estimate of the changed run says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import memest
from memest.errors import ConfigError
from memest.report.result import Verdict
from memest.search.suggest import effort_for
from memest.units import format_size
from support.small_llama import LLAMA

BERT: dict[str, Any] = {"batch": 64, "seq_len": 512, "fp16": True, "gpu": "t4"}


FULL: dict[str, Any] = {**BERT, "fp16": False}
"""In single precision there is one thing more to change."""


@pytest.fixture(scope="module")
def found() -> memest.Suggestions:
    return memest.suggest("bert-large-uncased", **FULL)


def test_each_change_makes_it_fit_as_an_estimate_says(found: memest.Suggestions) -> None:
    before = memest.estimate("bert-large-uncased", max_batch=False, **FULL)
    assert found.verdict is before.verdict is Verdict.DOES_NOT_FIT
    assert found.device_bytes == before.peak.device_bytes
    assert len(found.changes) == 3
    for change in found.changes:
        options = {**FULL, **dict(change.options)}
        after = memest.estimate("bert-large-uncased", max_batch=False, **options)
        assert after.verdict is change.verdict is Verdict.FITS
        assert after.peak.device_bytes == change.device_bytes
        assert change.gain_bytes == before.peak.device_bytes - after.peak.device_bytes


def test_what_trains_the_same_comes_first_and_keeps_the_samples(found: memest.Suggestions) -> None:
    split, recomputing, other = found.changes
    assert dict(split.options) == {"batch": 8, "grad_accum": 8}
    assert dict(recomputing.options) == {"checkpointing": "full"}
    assert (split.changes_training, recomputing.changes_training) == ("", "")
    assert dict(other.options) == {"fp16": True, "batch": 16, "grad_accum": 4}
    assert other.changes_training == "fp16 in place of fp32"
    assert split.relative_time < recomputing.relative_time


def test_no_larger_micro_batch_would_have_fit(found: memest.Suggestions) -> None:
    for change in (found.changes[0], found.changes[2]):
        batch, accum = dict(change.options)["batch"], dict(change.options)["grad_accum"]
        larger = {**FULL, **dict(change.options), "batch": 2 * batch, "grad_accum": accum // 2}
        estimate = memest.estimate("bert-large-uncased", max_batch=False, **larger)
        assert estimate.verdict is not Verdict.FITS


def test_nothing_is_added_to_what_makes_it_fit_alone() -> None:
    changes = memest.suggest("bert-large-uncased", **BERT).changes
    assert ("checkpointing", "full") in {item for change in changes for item in change.options}
    for change in changes:
        others = (set(each.options) for each in changes if each is not change)
        assert not any(other <= set(change.options) for other in others)


def test_a_base_of_4_bits_is_told_beside_adapters_in_the_largest_micro_batches_that_fit() -> None:
    run = {"batch": 4, "seq_len": 2048, "bf16": True, "gpu": "rtx-4090"}
    alone, beside = memest.suggest("Qwen/Qwen3-8B", quick=True, **run).changes
    assert (dict(alone.options)["batch"], dict(alone.options)["lora_r"]) == (1, 16)
    assert (dict(beside.options)["batch"], dict(beside.options)["qlora"]) == (2, True)


@pytest.mark.slow
def test_adapters_go_on_all_linear_layers_where_peft_knows_none_by_name() -> None:
    run = {"dtype": "float32", "batch": 2, "target_len": 32, "checkpointing": "full"}
    found = memest.suggest("openai/whisper-tiny", brief=True, count=1, gpu_memory="700MiB", **run)
    assert dict(found.changes[0].options)["lora_target_modules"] == "all-linear"


def test_how_thoroughly_to_look_follows_from_what_a_change_would_take() -> None:
    answer = memest.estimate("bert-large-uncased", **BERT)
    assert effort_for(answer) == {"quick": True}
    traced_anew = replace(answer, max_batch=None)
    assert effort_for(traced_anew) == {"quick": True, "brief": True, "count": 1}
    compiled = replace(traced_anew, setup=replace(answer.setup, torch_compile=True))
    assert effort_for(compiled) is None


def test_what_needs_a_trace_is_looked_at_where_nothing_else_makes_it_fit() -> None:
    run = {"batch": 1, "grad_accum": 16, "seq_len": 2048, "checkpointing": "full", "optim": "sgd"}
    model = "mistralai/Mistral-7B-v0.1?num_hidden_layers=31"
    changes = memest.suggest(model, quick=True, gpu="rtx-4090", **run).changes
    assert dict(changes[0].options)["lora_r"] == 16
    assert changes[0].verdict is Verdict.FITS


@pytest.mark.slow
def test_adapters_are_looked_at_where_what_is_known_takes_more_gpus(tmp_path: Any) -> None:
    """Shards follow from what is traced, adapters need a trace: one is worth it."""
    wide = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096}
    config = {**LLAMA, **wide, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run: dict[str, Any] = {
        "batch": 1, "seq_len": 32, "dtype": "float32", "bf16": True, "checkpointing": "full",
        "optim": "adafactor", "gpu": "a100-80gb", "device_context": "100MiB",
    }  # fmt: skip
    whole = memest.estimate(str(tmp_path), max_batch=False, **run)
    memory = whole.interval.low_bytes - (16 << 20)
    alone, shards = memest.suggest(str(tmp_path), quick=True, gpu_memory=memory, **run).changes
    assert alone.changes_training == "trains adapters only"
    assert "num_gpus" in dict(shards.options)
    assert {alone.verdict, shards.verdict} == {Verdict.FITS}


def test_a_run_with_room_is_told_its_largest_batch() -> None:
    options = {**BERT, "batch": 4}
    (change,) = memest.suggest("bert-large-uncased", **options).changes
    estimate = memest.estimate("bert-large-uncased", **options)
    assert dict(change.options) == {"batch": estimate.safe_batch}
    assert change.verdict is Verdict.FITS
    assert change.gain_bytes < 0


@pytest.mark.slow
def test_where_nothing_helps_the_closest_is_named() -> None:
    options = {**BERT, "gpu": None, "gpu_memory": "600MiB", "batch": 2}
    found = memest.suggest("bert-large-uncased", **options)
    assert not found.changes
    assert found.closest is not None
    assert found.closest.device_bytes < found.device_bytes
    assert found.closest.verdict is Verdict.DOES_NOT_FIT
    assert found.miss_bytes == found.closest.device_bytes - found.usable_bytes > 0
    assert format_size(found.miss_bytes) in str(found)


def test_nothing_surely_fits_that_does_more_than_is_priced() -> None:
    named = {**BERT, "unpriced": ["teacher"]}
    found = memest.suggest("bert-large-uncased", **named)
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert {change.verdict for change in found.changes} == {Verdict.CANNOT_SAY}
    assert "What makes it fit" not in str(found)

    open_question = memest.suggest("bert-large-uncased", **{**named, "batch": 2})
    assert open_question.verdict is Verdict.CANNOT_SAY
    assert not open_question.changes
    assert open_question.closest is None


@pytest.mark.slow
def test_software_without_the_fused_optimizer_is_not_told_to_take_it() -> None:
    old = {**BERT, "optim": "adamw_torch", "software": "torch=1.13", "gpu": "t4"}
    words = " ".join(change.words for change in memest.suggest("bert-large-uncased", **old).changes)
    assert "fused" not in words


LOGITS: dict[str, Any] = {"batch": 8, "seq_len": 256, "bf16": True, "gpu": "a100-80gb",
                          "gpu_memory": "1GiB", "device_context": "100MiB"}  # fmt: skip


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose logits are most of what it takes."""
    folder = tmp_path_factory.mktemp("wordy")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 32000}))
    return str(folder)


def test_where_logits_fill_the_card_a_loss_without_them_is_told(wordy: str) -> None:
    best = memest.suggest(wordy, quick=True, **LOGITS).changes[0]
    assert {*dict(best.options)} <= {"fused_loss", "use_liger_kernel"}
    assert (best.verdict, best.changes_training) == (Verdict.FITS, "")
    after = memest.estimate(wordy, max_batch=False, **LOGITS, **dict(best.options))
    assert after.peak.device_bytes == best.device_bytes
    assert after.logits_bytes == 0


def test_how_much_of_the_fullest_moment_are_logits(wordy: str) -> None:
    estimate = memest.estimate(wordy, max_batch=False, **LOGITS)
    one = LOGITS["batch"] * LOGITS["seq_len"] * 32000 * 4
    # in float32 the log-probabilities, their gradient, and that of the logits
    assert estimate.logits_bytes == 3 * one
    assert f"{format_size(3 * one)} of it all are logits" in " ".join(str(estimate).split())
    assert "logits" not in str(memest.estimate("prajjwal1/bert-tiny", seq_len=32, gpu="t4"))


def test_it_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="memest suggest needs a GPU"):
        memest.suggest("bert-large-uncased", batch=2)


@pytest.mark.slow
def test_what_makes_a_pipeline_fit_is_said_without_its_time() -> None:
    found = memest.suggest("EleutherAI/pythia-14m", batch=64, num_gpus=2, pp=2, gpu_memory="2GiB")
    assert found.verdict is not Verdict.FITS
    assert found.changes
    assert all(change.relative_time is None for change in found.changes)


def test_what_only_may_take_less_is_made_to_fit_surely() -> None:
    said = ("lengths are shorter",)
    found = memest.suggest("bert-large-uncased", overpriced=said, **BERT)
    assert found.verdict is Verdict.CANNOT_SAY
    assert found.changes
    assert all(change.verdict is Verdict.FITS for change in found.changes)


@pytest.mark.slow
def test_the_closest_takes_less_than_the_run() -> None:
    """A run that is tight has none: it is nearer itself than what would not fit."""
    for memory in ("350MiB", "500MiB"):
        found = memest.suggest(
            "EleutherAI/pythia-14m", batch=1, qlora=True, lora_r=8, bf16=True, gpu_memory=memory
        )
        if found.closest is not None:
            assert found.verdict is Verdict.DOES_NOT_FIT
            assert found.closest.gain_bytes > 0


@pytest.mark.slow
def test_shards_of_4_bits_are_cut_in_host_memory() -> None:
    """Else each GPU has the whole base while it is loaded, and more GPUs do not help."""
    options: dict[str, Any] = {
        "qlora": True, "bf16": True, "checkpointing": "full", "batch": 1, "seq_len": 128,
        "fsdp": "full_shard", "num_gpus": 2, "gpu_memory": "11GiB",
    }  # fmt: skip
    found = memest.suggest("Qwen/Qwen2.5-7B?num_hidden_layers=8", **options)
    (change,) = found.changes
    assert found.verdict is Verdict.RELEASES_CACHE
    assert change.options == (
        ("fsdp_version", 1), ("fsdp_cpu_ram_efficient_loading", True),
        ("bnb_4bit_quant_storage", "bfloat16"), ("dtype", "bfloat16"), ("prepare_kbit", False),
    )  # fmt: skip
    assert change.arguments.startswith("--fsdp-version 1 --fsdp-cpu-ram-efficient-loading")


@pytest.mark.slow
def test_an_engine_sleeps_where_it_is_in_the_way():
    model = "Qwen/Qwen2.5-0.5B?num_hidden_layers=4"
    run = {
        "method": "grpo", "engine": "vllm", "engine_share": 0.5, "batch": 16, "seq_len": 1024,
        "completion_len": 512, "gpu_memory": "7960MiB",
    }  # fmt: skip

    found = memest.suggest(model, quick=True, **run)
    asleep = memest.suggest(model, quick=True, engine_sleeps=True, **run)

    assert dict(found.changes[0].options) == {"engine_sleeps": True}
    assert not any("engine_sleeps" in dict(change.options) for change in asleep.changes)


STEPS: dict[str, Any] = {"seq_len": 64, "batch": 1, "optim": "sgd", "device_context": "100MiB",
                         "gpu_memory": "1500MiB"}  # fmt: skip


@pytest.mark.slow
def test_predictions_that_pile_up_are_told_to_go_to_the_host_or_away(wordy: str) -> None:
    """The steps fit as they are: nothing that changes them would help."""
    asked = {**STEPS, "eval_batch": 1, "eval_samples": 400}
    before = memest.estimate(wordy, max_batch=False, **asked)
    assert (before.peak_at.phase, before.verdict) == ("evaluation", Verdict.DOES_NOT_FIT)
    host, loss = memest.suggest(wordy, count=2, **asked).changes
    assert dict(host.options) == {"eval_accumulation_steps": 16}
    assert dict(loss.options) == {"prediction_loss_only": True}
    assert (host.changes_training, loss.changes_training != "") == ("", True)
    for change in (host, loss):
        after = memest.estimate(wordy, max_batch=False, **{**asked, **dict(change.options)})
        assert after.peak.device_bytes == change.device_bytes
        assert after.verdict is change.verdict is Verdict.FITS


@pytest.mark.slow
def test_large_batches_of_an_evaluation_are_told_to_be_the_largest_that_fit(wordy: str) -> None:
    asked = {**STEPS, "eval_batch": 256}
    assert memest.estimate(wordy, max_batch=False, **asked).peak_at.phase == "evaluation"
    (change,) = memest.suggest(wordy, count=1, **asked).changes
    batch = dict(change.options)["eval_batch"]
    twice = memest.estimate(wordy, max_batch=False, **{**asked, "eval_batch": 2 * batch})
    assert twice.verdict is not Verdict.FITS
