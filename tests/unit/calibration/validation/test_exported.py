"""What calibration exports is what validation reads."""

from __future__ import annotations

import pytest

import memest
from memest.calibration.case import case_from_dict
from memest.calibration.exchange import export_records
from memest.calibration.measurement import Environment, Failure, Measurement, Status, StepReading

GPU = Environment(
    gpu="NVIDIA GeForce RTX 3090", total_bytes=1 << 34, capability=(8, 6), sm_count=82,
    driver="580.1", cuda="12.4", torch="2.6.0", transformers="4.51.0",
)  # fmt: skip
TINY = {"model": "prajjwal1/bert-tiny", "task": "sequence-classification"}


def _measured(setup, **changes):
    step = StepReading(
        seconds=0.1, requested_bytes=90 << 20, allocated_bytes=100 << 20,
        reserved_bytes=120 << 20, process_bytes=900 << 20, reserved_now_bytes=120 << 20,
    )  # fmt: skip
    case = case_from_dict({**TINY, "setup": {"batch": 2, "seq_len": 64, **setup}})
    values = {
        "run": "0123456789abcdef", "case": case, "status": Status.OK, "environment": GPU,
        "started": "2026-11-21T10:00:00+00:00", "seconds": 3.0, "steps": (step,),
    }  # fmt: skip
    return Measurement(**{**values, **changes})


def _validated(tmp_path, *runs):
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(export_records(runs)), encoding="utf-8")
    return memest.validate(path)


@pytest.mark.slow(but=("setup5",))
@pytest.mark.parametrize(
    "setup",
    [
        {}, {"bf16": True, "checkpointing": "full"}, {"lora_r": 8}, {"dtype": "bfloat16"},
        {"optim": "adafactor", "grad_accum": 2}, {"alloc_conf": "expandable_segments:True"},
        {"loop": "plain", "zero_grad_at": "before-backward"},
    ],
)  # fmt: skip
def test_every_counter_of_a_run_is_predicted_by_its_own_setup(tmp_path, setup):
    run = _measured(setup)
    found = _validated(tmp_path, run)
    assert not found.incomplete
    assert not found.problems
    assert [o.failure for o in found.outcomes] == ["", "", ""]
    own = memest.estimate(
        TINY["model"], run.case.setup, gpu=GPU.gpu, profile="none",
    )  # fmt: skip
    allocated, reserved, _ = found.outcomes
    # the run's own software decides too, and the estimate above has the installed one
    assert allocated.predicted_bytes == pytest.approx(own.peak.allocated_bytes, rel=0.05)
    assert reserved.predicted_bytes >= allocated.predicted_bytes


def test_failures_are_listed_and_out_of_memory_is_a_verdict(tmp_path):
    crashed = _measured({}, run="a" * 16, status=Status.CRASHED, steps=(),
                        failure=Failure(kind="Crashed", message="signal 9"))  # fmt: skip
    capped = case_from_dict({**TINY, "setup": {"batch": 2, "seq_len": 64}, "cap_bytes": 20 << 20})
    oom = _measured({}, run="b" * 16, status=Status.OOM, case=capped)
    found = _validated(tmp_path, crashed, oom)
    assert list(found.without_figure.values()) == ["crashed"]
    assert all(o.error is None for o in found.outcomes)
    assert {(o.runs_out, o.record.oom) for o in found.outcomes} == {(True, True)}
    assert found.verdicts().right == len(found.outcomes)
