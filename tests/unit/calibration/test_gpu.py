"""On a real GPU: the whole way from training steps to a verdict. Skipped where there is none."""

from __future__ import annotations

import re

import pytest

from memest.calibration.campaign import read_campaign
from memest.calibration.case import case_from_dict, with_events
from memest.calibration.fitting.fit import fit_calibration
from memest.calibration.fitting.prediction import pair
from memest.calibration.measurement import Status
from memest.calibration.recording.conformance import compare
from memest.calibration.recording.history import read_history
from memest.calibration.running.runner import Bench, events_folder, run_cases
from memest.calibration.running.verify import verify_store
from memest.calibration.store import MeasurementStore
from memest.units import MIB
from support.tools import load_tool

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _case(**setup):
    options = {"batch": 4, "seq_len": 128, "loop": "plain", "dtype": "float32", **setup}
    return case_from_dict({"model": "gpt2?n_layer=4", "setup": options})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with MeasurementStore(tmp_path_factory.mktemp("gpu") / "runs.db") as opened:
        yield opened


def test_peaks_are_measured_and_predicted(store):
    summary = run_cases(read_campaign("smoke").cases, "cuda", store)

    for measured in summary.measurements:
        assert measured.status is Status.OK, measured.failure
        names = [r.name for r in measured.readings]
        assert names == ["start", "context", "matmul", "model", "end"]
        assert measured.allocated_bytes <= measured.reserved_bytes
        predicted = pair(measured)
        assert predicted.prediction is not None, predicted.failure
        for name in ("allocated", "reserved"):
            said = getattr(predicted.prediction, f"{name}_bytes")
            real = getattr(measured, f"{name}_bytes")
            assert abs(said - real) <= max(0.03 * real, 4 * MIB), (measured.case.id, name)
        if measured.device_bytes is not None:
            assert measured.process_bytes > 100 * MIB
    assert fit_calibration([pair(m) for m in summary.measurements]).provenance.gpus


def test_out_of_memory_is_a_result(store):
    with Bench("cuda", store) as bench:
        huge = bench.measure(_case(batch=1 << 16, seq_len=1024))
    assert huge.status is Status.OOM
    assert huge.failure.phase.split()[0] in ("forward", "batch")
    assert any(r.name == "oom" and r.reserved_bytes for r in huge.readings)


def test_a_history_is_recorded_and_compared(store):
    with Bench("cuda", store) as bench:
        measured = bench.measure(with_events(_case()))
    assert measured.status is Status.OK, measured.failure
    history = read_history(events_folder(store.path) / measured.events)
    assert history.complete
    tool = load_tool("conformance_fixtures")
    comparison = compare(history, tool.predict_stream(history))
    assert comparison.exact_replay, tool.to_markdown(comparison)


def test_runs_survive_at_their_upper_bound(store):
    outcome = verify_store(store, "cuda", pattern=re.compile("."), boundaries=1)
    assert outcome.kept_its_word, outcome.text()
