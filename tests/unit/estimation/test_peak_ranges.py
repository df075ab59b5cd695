"""Ranges of peaks: by kind of run, from measured runs, and honest where there are few or none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.config.options import setup_from_options
from memest.estimation.peak_ranges import ErrorBand, RunKind, band_for, error_bands, kind_of
from memest.files.folders import data_folder
from memest.units import GIB, MIB

PEAKS = ("allocated", "reserved")


@pytest.mark.parametrize(
    ("options", "slack", "kind"),
    [
        ({}, 0, RunKind.ONE_GPU),
        ({"lora_r": 8}, 0, RunKind.ADAPTERS),
        ({"qlora": True}, 0, RunKind.ADAPTERS),
        ({"num_gpus": 2}, 0, RunKind.SEVERAL_GPUS),
        ({"num_gpus": 8, "fsdp": "full_shard", "lora_r": 8}, 0, RunKind.SEVERAL_GPUS),
        ({"num_gpus": 2, "tp": 2}, 0, RunKind.MODEL_PARALLEL),
        ({"torch_compile": True}, 0, RunKind.COMPILED),
        ({}, 200 * MIB, RunKind.CONVOLUTIONS),
        ({}, 20 * MIB, RunKind.ONE_GPU),
    ],
)
def test_the_kind_of_a_run(options, slack, kind):
    assert kind_of(setup_from_options(**options), GIB, slack) is kind


@pytest.mark.parametrize("peak", PEAKS)
@pytest.mark.parametrize("kind", RunKind)
def test_every_kind_has_a_range_and_few_models_claim_little(kind, peak):
    band, plain = band_for(kind, peak), band_for(RunKind.ONE_GPU, peak)

    assert band.low <= 0 <= band.high
    assert (band.low, band.high) != (0, 0)
    if kind in error_bands():
        assert band.low <= plain.low or band.models >= 19
        assert band.high >= plain.high or band.models >= 19
    else:
        assert band.level is None
        assert band.low == min(bands[peak].low for bands in error_bands().values())
        assert "no run that is" in band.around(GIB, kind).basis
    assert band.level is None or (band.level == 0.9) is (band.models >= 19)


@given(st.integers(1, 10**13), st.integers(0, 10**10))
def test_the_prediction_lies_in_its_range_and_slack_is_part_of_it(size, slack):
    band = ErrorBand(low=-0.01, high=0.02, level=0.9, runs=40, models=20)
    found = band.around(size, RunKind.ONE_GPU, slack)

    assert 0 <= found.low_bytes <= size <= found.high_bytes
    assert found.high_bytes >= size + slack
    assert "90% of runs lie there, by 40 measured runs of 20 models" in found.basis


def test_what_was_measured_is_enough_for_plain_runs_and_narrow():
    kinds = json.loads((data_folder() / "peak_ranges.json").read_text())["kinds"]
    reserved = kinds["one GPU"]["reserved"]

    assert reserved["level"] == 0.9
    assert reserved["high"] - reserved["low"] <= 0.04
