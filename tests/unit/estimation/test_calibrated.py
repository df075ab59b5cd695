"""Estimates under a calibration: found by itself, named, borrowed, switched off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import memest
from memest.catalog.gpus import find_gpu
from memest.errors import ConfigError
from memest.estimation.calibration import (
    Band,
    Calibration,
    CrossValidation,
    MeasuredOn,
    ProcessPart,
    Provenance,
)
from memest.estimation.calibration_files import write_calibration
from memest.estimation.gpu_target import calibration_of
from memest.report.result import Verdict
from memest.units import GIB, MIB

MODEL = "prajjwal1/bert-tiny"
RUN = {"batch": 64, "seq_len": 128, "loop": "plain", "dtype": "float32"}
CONTEXT = 477 * MIB

PROFILE = Calibration(
    tensors="identity",
    factors={},
    process_model="constant",
    process=(
        ProcessPart(
            gpu="NVIDIA GeForce RTX 3090", constant_bytes=CONTEXT, low_bytes=-2 * MIB,
            high_bytes=3 * MIB, cases=40, capability=(8, 6), sm_count=82,
        ),
    ),
    band=Band(
        metric="device", scale="constant", low=-10 * MIB, high=20 * MIB, level=0.9, cases=40
    ),
    measured=MeasuredOn(
        allocated_bytes=20 * GIB, kernels=500, slack_bytes=GIB,
        seen={
            "precision": ("fp32", "bf16"), "dtype": ("float32",), "attention": ("sdpa",),
            "optimizer": ("adamw_torch_fused",), "loop": ("plain", "trainer"),
            "checkpointing": ("none",), "family": ("bert",),
        },
        torch=((2, 13),),
    ),
    validation=CrossValidation(cases=40, models=8, folds=8, error=0.004, coverage=0.92),
    provenance=Provenance(gpus=("NVIDIA GeForce RTX 3090",), first="2026-01-01", last="2026-01-02"),
)  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def own(home):
    (home / "profiles").mkdir()
    write_calibration(PROFILE, home / "profiles" / "rtx-3090.json")
    return home / "profiles" / "rtx-3090.json"


def _estimate(**more):
    return memest.estimate(MODEL, **RUN, **more)


@pytest.mark.slow
def test_a_profile_of_the_named_gpu_is_found_by_itself(own):
    plain = _estimate(gpu="rtx-3090", profile="none")
    answer = _estimate(gpu="rtx-3090")

    assert plain.calibration is None
    assert answer.peak.allocated_bytes == plain.peak.allocated_bytes
    assert answer.peak.reserved_bytes == plain.peak.reserved_bytes
    assert answer.peak.device_bytes == answer.peak.reserved_bytes + CONTEXT
    assert answer.context_bytes == CONTEXT
    interval = answer.interval
    assert interval.level == 0.9
    assert interval.low_bytes == answer.peak.device_bytes - 10 * MIB
    assert interval.high_bytes == answer.peak.device_bytes + 20 * MIB
    assert "calibrated on 40 runs of 8 models" in interval.basis
    facts = answer.calibration
    assert facts.path == str(own)
    assert facts.process_gpu == "NVIDIA GeForce RTX 3090"
    assert facts.raw_device_bytes == plain.peak.device_bytes
    assert not facts.extrapolates
    document = json.loads(answer.to_json())
    assert document["calibration"]["cases"] == 40
    assert document["interval"]["level"] == 0.9


@pytest.mark.slow
def test_rows_and_peaks_add_up_under_factors(own):
    write_calibration(
        replace(PROFILE, tensors="every part", factors={"activations": 1.25, "parameters": 1.0},
                other_factor=0.9, gap_bytes=MIB),
        own,
    )  # fmt: skip
    plain = _estimate(gpu="rtx-3090", profile="none")
    answer = _estimate(gpu="rtx-3090")

    assert sum(row.bytes for row in answer.breakdown) == answer.peak.allocated_bytes
    assert answer.peak.allocated_bytes != plain.peak.allocated_bytes
    before = {row.category: row.bytes for row in plain.breakdown}
    for row in answer.breakdown:
        factor = answer.calibration.factors[row.category.value]
        assert abs(row.bytes - factor * before[row.category]) <= 1
    grown = answer.peak.allocated_bytes - plain.peak.allocated_bytes
    assert answer.peak.reserved_bytes == plain.peak.reserved_bytes + grown + MIB
    spot = memest.profile(MODEL, **RUN).spot(gpu="rtx-3090")
    assert spot.peak == answer.peak
    assert spot.interval == answer.interval


@pytest.mark.slow
def test_verdict_and_largest_batch_go_by_the_calibrated_bound(own):
    memory = _estimate(gpu="rtx-3090").interval.high_bytes

    fits = _estimate(gpu="rtx-3090", gpu_memory=memory)
    tight = _estimate(gpu="rtx-3090", gpu_memory=memory - 1)

    assert fits.verdict is Verdict.FITS
    assert tight.verdict is Verdict.RELEASES_CACHE
    assert fits.safe_batch == RUN["batch"]
    search = memest.max_batch(MODEL, gpu="rtx-3090", gpu_memory=memory, **RUN)
    assert search.answers[0].safe == fits.safe_batch
    assert search.largest >= fits.max_batch, "max-batch looks further near the edge"
    (point,) = [p for p in search.answers[0].curve if p.size == RUN["batch"]]
    assert point.device_bytes == fits.peak.device_bytes
    plain = memest.max_batch(MODEL, gpu="rtx-3090", gpu_memory=memory, calibration="none", **RUN)
    assert plain.answers[0].safe < search.answers[0].safe, "the table's range is wider"


@pytest.mark.slow
def test_a_card_without_a_profile_borrows_and_says_so(own):
    answer = _estimate(gpu="a10g")

    assert answer.interval.level is None
    assert answer.calibration.process_gpu == "NVIDIA GeForce RTX 3090"
    assert any("borrowed from NVIDIA GeForce RTX 3090" in note for note in answer.notes)
    plain = _estimate(gpu="a10g", calibration="none")
    assert answer.interval.low_bytes <= plain.interval.low_bytes
    assert answer.interval.high_bytes >= plain.interval.high_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [({"zero": 2}, "parallelism zero"), ({"num_gpus": 2}, "parallelism ddp")],
)
def test_a_run_that_is_spread_claims_no_level_even_on_one_gpu(own, options, said):
    answer = _estimate(gpu="rtx-3090", **options)

    assert answer.interval.level is None
    assert any(said in note for note in answer.notes)


def test_beyond_what_was_measured_the_range_is_wider_and_it_is_said(own):
    answer = _estimate(gpu="rtx-3090", optim="sgd")

    assert answer.interval.level is None
    assert answer.calibration.extrapolates
    assert any("optimizer sgd" in note for note in answer.notes)
    inside = _estimate(gpu="rtx-3090").interval
    outside = answer.interval
    assert outside.high_bytes - outside.low_bytes > inside.high_bytes - inside.low_bytes


def test_a_named_file_is_taken_without_a_gpu_too(home, tmp_path):
    path = tmp_path / "mine.json"
    write_calibration(PROFILE, path)

    answer = _estimate(profile=str(path))

    assert answer.gpu is None
    assert answer.interval.level == 0.9
    assert any("kernels and workspaces as on NVIDIA GeForce RTX 3090" in a for a in
               answer.assumptions)  # fmt: skip
    assert _estimate().calibration is None


def test_a_context_that_was_read_wins_over_profiles_that_are_found(own):
    answer = _estimate(gpu="rtx-3090", device_context="600MiB")
    assert answer.calibration is None
    with pytest.raises(ConfigError, match="drop one"):
        _estimate(gpu="rtx-3090", device_context="600MiB", calibration=str(own))


def test_files_that_are_no_profiles(own, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        _estimate(calibration=str(bad))
    with pytest.raises(ConfigError):
        _estimate(calibration=str(tmp_path / "none.json"))
    # one of several found by themselves is passed over
    (own.parent / "broken.json").write_text("{")
    found = calibration_of(find_gpu("rtx-3090"), None)
    assert found.path == own
    assert any("broken.json" in note for note in found.notes)


def test_comparisons_and_sweeps_are_calibrated_too(own):
    comparison = memest.compare(MODEL, ["bf16"], gpu="rtx-3090", max_batch=False, **RUN)
    base = comparison.to_dict()["scenarios"][0]["estimate"]
    assert base["peak"]["device_bytes"] == _estimate(gpu="rtx-3090").peak.device_bytes
    sweep = memest.sweep(MODEL, {"batch": [64]}, gpu="rtx-3090",
                         **{k: v for k, v in RUN.items() if k != "batch"})  # fmt: skip
    assert sweep.points[0].peak == _estimate(gpu="rtx-3090").peak


@pytest.mark.slow
def test_adapters_whose_rank_is_a_size_are_corrected_too(home):
    path = home / "profiles" / "rtx3090.json"
    write_calibration(PROFILE, path)
    model = memest.profile("meta-llama/Llama-3.1-8B", lora_r=16, qlora=True, bf16=True)
    answers = [
        model.estimate(gpu="rtx-3090", batch=1, seq_len=512, lora_r=rank, calibration=str(path))
        for rank in (8, 64)
    ]
    assert all(answer.calibration is not None for answer in answers)
    assert answers[0].peak.device_bytes < answers[1].peak.device_bytes
