"""From measurements to rows: what is compared with what, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.fitting import prediction as predicting
from memest.calibration.fitting.prediction import Pair, live_bytes, pair, predict
from memest.calibration.fitting.residuals import residuals, uncorrected_of
from memest.calibration.measurement import CPU, Status, StepReading, release_of
from memest.errors import ConfigError, TraceError
from memest.units import GIB, MIB
from support.simulated_runs import ended_run, environment, measurement, simulate


def one(**changes):
    (found,) = simulate(models=1, each=1, **changes)
    return found


def with_steps(found, **changes):
    steps = tuple(replace(step, **changes) for step in found.measurement.steps)
    return replace(found, measurement=replace(found.measurement, steps=steps))


# -- rows -----------------------------------------------------------------------------------------


def test_residuals_are_measured_minus_predicted():
    (row,) = residuals([one(factor=1.25, gap=10 * MIB, constant=600 * MIB)]).rows

    assert row.tensors == row.allocated - row.prediction.allocated_bytes
    assert row.tensors == pytest.approx(0.25 * row.prediction.allocated_bytes, abs=1)
    assert row.gap == 10 * MIB
    assert row.process == 600 * MIB
    assert row.device == row.reserved + 600 * MIB


def test_runs_that_did_not_complete_are_counted_not_fitted():
    pairs = [
        one(),
        ended_run(),
        ended_run(Status.FAILED, case=51),
        ended_run(Status.TIMEOUT, case=52),
    ]

    found = residuals(pairs)

    assert len(found.rows) == 1
    assert found.statuses == {"failed": 1, "ok": 1, "oom": 1, "timeout": 1}
    assert len(found.incomplete_runs) == 3


def test_a_completed_run_without_a_prediction_is_kept_apart():
    found = residuals([Pair(one().measurement, None, "no such model")])

    assert found.rows == ()
    assert [p.failure for p in found.unpredicted_runs] == ["no such model"]


def test_a_run_without_readings_is_told():
    (found,) = residuals([with_steps(one(), allocated_bytes=None)]).unpredicted_runs

    assert found.failure == "the run has no reading of allocated memory"


def test_other_processes_on_the_card_are_flagged():
    found = residuals(simulate(models=2, each=1, shared=1))

    alone, beside = sorted(found.rows, key=lambda row: row.shared)
    assert found.shared_cases == (beside.case,)
    assert (alone.fits_process, beside.fits_process, beside.fits_device) == (True, False, False)
    named = replace(beside, environment=replace(beside.environment, meter="process"))
    assert (named.fits_process, named.fits_device) == (True, True), "the driver tells them apart"
    assert beside.gap is not None


def test_a_run_short_of_memory_has_no_gap():
    (row,) = residuals([with_steps(one(), retries=2)]).rows

    assert row.limited
    assert (row.gap, row.fits_device) == (None, False)
    assert row.tensors == 0


def test_a_verdict_test_is_no_measurement_to_fit():
    found = one()
    capped = replace(found.measurement.case, cap_bytes=20 * GIB)

    answer = residuals([replace(found, measurement=replace(found.measurement, case=capped))])

    assert answer.rows == ()


def test_repeats_of_a_case_count_once_and_the_last_one_counts():
    found = one()
    later = replace(
        found.measurement, run="later", started="2026-11-21T00:00:00Z",
        steps=(StepReading(seconds=1, allocated_bytes=5 * GIB),),
    )  # fmt: skip

    sorted_out = residuals([Pair(later, found.prediction), found])

    assert [row.run for row in sorted_out.rows] == ["later"]
    assert sorted_out.repeats == 1


def test_the_same_case_with_another_driver_is_another_row():
    found = one()
    other = replace(found.measurement.environment, driver="600.1")
    again = replace(found.measurement, run="again", environment=other)

    assert len(residuals([found, Pair(again, found.prediction)]).rows) == 2


def test_a_cpu_has_neither_gap_nor_process():
    (row,) = residuals([one(gpus=(CPU,))]).rows

    assert (row.gap, row.process, row.device, row.reserved) == (None, None, None, None)


def test_a_reading_below_the_segments_is_none():
    (row,) = residuals([with_steps(one(), process_bytes=MIB)]).rows

    assert row.process is None


def test_a_row_asks_the_same_question_as_an_estimate():
    (row,) = residuals([one()]).rows

    asked = uncorrected_of(row)

    assert asked.parts == row.prediction.parts
    assert (asked.torch, asked.cuda) == ((2, 13), (12, 8))
    assert (asked.gpu, asked.sm_count, asked.capability) == (row.gpu, 100, (8, 0))
    assert (asked.family, asked.precision, asked.kernels) == (
        row.prediction.family,
        "fp32",
        row.prediction.kernels,
    )


# -- predictions ----------------------------------------------------------------------------------

CONFIG = (
    '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, '
    '"n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}'
)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(CONFIG)
    return str(path)


def measured(model, where, **setup):
    case = case_from_dict({"model": model, "setup": {"batch": 2, "seq_len": 32, **setup}})
    return replace(measurement(environment=where), case=case)


def test_a_prediction_for_a_gpu_is_the_estimate(tiny):
    import memest

    where = environment("NVIDIA A100-SXM4-40GB", sm_count=108, total=40 * GIB)
    where = replace(where, max_threads_per_sm=2048)

    found = predict(measured(tiny, where, batch=3))

    estimate = memest.estimate(
        tiny, batch=3, seq_len=32, num_steps=4, gpu="a100-40gb", max_batch=False,
        software="torch=2.13,transformers=5.23,cuda=12.8",
    )  # fmt: skip
    assert found.allocated_bytes == estimate.peak.allocated_bytes
    assert found.reserved_bytes == estimate.peak.reserved_bytes
    assert found.context_expected_bytes == estimate.context_bytes
    assert found.parts == {row.category.value: row.bytes for row in estimate.breakdown}
    assert found.family == "gpt2"
    assert found.facts.attention == "sdpa"
    assert found.facts.dtype == "float32"
    assert found.kernels > 10


def test_a_prediction_for_a_cpu_sums_what_is_alive(tiny):
    found = predict(measured(tiny, environment(CPU), loop="plain"))

    assert found.reserved_bytes is None
    assert sum(found.parts.values()) == found.allocated_bytes
    assert "rounding" not in found.parts
    assert "workspaces" not in found.parts
    assert found.parts["optimizer states"] >= 2 * found.parts["parameters"] > 0
    assert (found.context_low_bytes, found.context_high_bytes, found.sm_count) == (0, 0, None)
    assert (found.facts.attention, found.facts.dtype) == ("sdpa", "float32")


@pytest.mark.slow(but=("setup0",))
@pytest.mark.parametrize(
    "setup", [{"loop": "plain"}, {"loop": "trainer", "grad_accum": 2}, {"checkpointing": "full"}]
)
def test_a_real_step_on_the_cpu_takes_what_is_predicted(tiny, setup):
    pytest.importorskip("accelerate")
    from memest.calibration.running.nursery import work

    messages = []
    run = measured(tiny, environment(CPU), **setup)
    work(run.case, CPU, messages.append)
    assert messages[-1]["status"] == Status.OK, messages[-1]

    steps = tuple(StepReading(**m["step"]) for m in messages if m["kind"] == "step")
    (row,) = residuals([pair(replace(run, steps=steps))]).rows
    # step counters and random states are host memory, which a CPU's meter cannot tell apart
    assert row.tensors == pytest.approx(0, abs=0.0025 * row.allocated)


def test_a_question_is_predicted_once(tiny, monkeypatch):
    run = measured(tiny, environment(CPU), loop="plain")
    first = predict(run)
    monkeypatch.setattr(predicting, "_on_cpu", None)

    assert predict(run) is first


def test_a_gpu_of_no_catalogue_is_taken_as_it_was_read(tiny):
    where = replace(environment("Prototype X"), max_threads_per_sm=2048)

    assert predict(measured(tiny, where)).reserved_bytes > 0


@pytest.mark.slow
def test_kernels_are_counted_alike_at_every_size(tiny):
    where = replace(environment(), max_threads_per_sm=2048)
    sizes = ({"batch": 2}, {"batch": 5, "seq_len": 48}, {"batch": 7, "grad_accum": 3})

    found = {predict(measured(tiny, where, **size)).kernels for size in sizes}

    assert len(found) == 1


def test_a_cap_is_replayed(tiny):
    where = replace(environment(), max_threads_per_sm=2048)
    run = measured(tiny, where)
    low, high = (replace(run, case=replace(run.case, cap_bytes=cap)) for cap in (4 * MIB, 8 * GIB))

    assert (predict(run).oom, predict(low).oom, predict(high).oom) == (None, True, False)
    assert predict(low).reserved_bytes == predict(run).reserved_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: replace(run, environment=None), "gone before it could say"),
        (lambda run: replace(run, case=replace(run.case, processes=2)), "2 processes"),
        (lambda run: replace(run, case=replace(run.case, model="./no/such")), "does not exist"),
    ],
)
def test_a_failure_is_a_sentence(tiny, change, said):
    found = pair(change(measured(tiny, environment(CPU))))

    assert found.prediction is None
    assert said in found.failure


def test_an_error_of_anybody_is_a_sentence_too(tiny, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("somewhere\nelse")

    monkeypatch.setattr(predicting, "_on_cpu", broken)
    run = measured(tiny, environment(CPU), batch=7)

    assert pair(run).failure.endswith("cannot be predicted (ZeroDivisionError: somewhere)")
    with pytest.raises(TraceError):
        predict(run)
    with pytest.raises(ConfigError):
        predict(replace(run, environment=None))


def test_releases_are_read_from_their_names():
    assert release_of("2.13.0+cu128") == (2, 13)
    assert release_of("12.8") == (12, 8)
    assert release_of("") is None


def test_live_bytes_of_a_trace():
    from memest.events import ALLOC, CATEGORY_ORDER, FREE, Category, Trace

    trace = Trace()
    weights, other = (CATEGORY_ORDER.index(c) for c in (Category.PARAMETERS, Category.TEMPORARIES))
    trace.sizes, trace.categories = [100, 40, 60], bytearray((weights, other, other))
    trace.events.extend(i << 2 | k for k, i in ((ALLOC, 0), (ALLOC, 1), (FREE, 1), (ALLOC, 2)))

    peak, parts = live_bytes(trace)

    assert peak == 160
    assert {c: n for c, n in parts.items() if n} == {
        Category.PARAMETERS: 100,
        Category.TEMPORARIES: 60,
    }
