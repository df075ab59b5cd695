"""Records on their way: lossless, one line for each counter, and nothing believed unchecked."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memest.calibration.case import case_from_dict
from memest.calibration.exchange import (
    export_records,
    read_measurements,
    records_of,
    write_lines,
)
from memest.calibration.measurement import (
    Environment,
    Failure,
    Measurement,
    MemoryReading,
    Status,
    StepReading,
)
from memest.errors import ConfigError, MemestError

GPU = Environment(
    gpu="NVIDIA Simulated", total_bytes=1 << 34, capability=(9, 0), sm_count=132, driver="580.1",
    cuda="13.0", torch="2.13.0", transformers="5.23.0", notes=("MIG",),
)  # fmt: skip
CASE = case_from_dict({"model": "gpt2", "setup": {"batch": 2, "seq_len": 64}})


def _run(**changes):
    steps = tuple(
        StepReading(
            seconds=0.1, requested_bytes=90, allocated_bytes=100 * n, reserved_bytes=200,
            process_bytes=1000, reserved_now_bytes=200,
        )
        for n in (1, 2)
    )  # fmt: skip
    values = {
        "run": "0123456789abcdef", "case": CASE, "status": Status.OK, "environment": GPU,
        "started": "2026-11-21T10:00:00+00:00", "seconds": 3.0, "steps": steps,
        "readings": (MemoryReading(name="start", device_used_bytes=10),),
    }  # fmt: skip
    return Measurement(**{**values, **changes})


def test_a_line_for_each_counter_in_the_form_of_a_case_record():
    records = records_of(_run())

    assert [(r["metric"], r["measured_bytes"]) for r in records] == [
        ("allocated", 200), ("reserved", 200), ("device", 1000),
    ]  # fmt: skip
    for record in records:
        assert record["model"] == "gpt2"
        assert record["gpu"] == "NVIDIA Simulated"
        assert record["setup"]["batch"] == 2
        assert record["software"]["torch"] == "2.13.0"
        assert "memest calibrate" in record["source"]
    assert "measurement" in records[0]
    assert "measurement" not in records[1]
    assert len({r["id"] for r in records}) == 3


def test_runs_without_a_figure_have_a_line_too():
    failure = Failure(kind="RuntimeError", message="boom\nmore", phase="forward 1 1")
    (record,) = records_of(_run(status=Status.FAILED, steps=(), failure=failure))
    assert record["measured_bytes"] is None
    assert record["notes"] == "failed in phase forward 1 1: boom; MIG"
    (gone,) = records_of(_run(status=Status.CRASHED, steps=(), environment=None))
    assert gone["gpu"] == ""


@pytest.mark.parametrize(
    ("steps", "reached", "figures"),
    [(False, 800, [("allocated", 700), ("reserved", 800)]),
     (True, 150, [("allocated", 700), ("reserved", 200), ("device", 1000)])],
    ids=["in the first step", "in a later step"],
)  # fmt: skip
def test_out_of_memory_says_how_far_it_came(steps, reached, figures):
    reading = MemoryReading(name="oom", allocated_bytes=700, reserved_bytes=reached)
    changes = {} if steps else {"steps": ()}
    records = records_of(_run(status=Status.OOM, readings=(reading,), **changes))
    assert [(r["metric"], r["measured_bytes"]) for r in records] == figures
    assert all(r["oom"] for r in records)


def test_a_cap_is_the_limit_of_its_records_and_remarks_travel():
    capped = case_from_dict({"model": "gpt2", "setup": {}, "cap_bytes": 12345})
    (record, *_) = records_of(_run(case=capped, remarks=("no history was kept: OSError: full",)))
    assert record["limit_bytes"] == 12345
    assert "no history was kept" in record["notes"]


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_everything_comes_back(tmp_path, name):
    runs = [
        _run(),
        _run(run="b", status=Status.OOM, steps=()),
        _run(run="c", status=Status.CRASHED, environment=None, steps=(),
             failure=Failure(kind="Crashed", message="signal 9")),
    ]  # fmt: skip
    path = tmp_path / "deep" / name

    assert write_lines(path, export_records(runs)) == 5
    assert read_measurements(path) == (runs, [])
    assert [p.name for p in path.parent.iterdir()] == [name], "no half-written file is left"


def test_bad_lines_are_said_and_the_others_taken(tmp_path):
    path = tmp_path / "runs.jsonl"
    lines = [*export_records([_run()]), "{", "[]", json.dumps({"measurement": {"run": 3}})]
    path.write_text("\n".join(lines))

    found, problems = read_measurements(path)

    assert found == [_run()]
    assert [p[:6] for p in problems] == ["line 4", "line 5", "line 6"]


def test_files_without_a_measurement_are_refused(tmp_path):
    path = tmp_path / "published.jsonl"
    path.write_text(json.dumps({"id": "x", "model": "gpt2", "metric": "device"}))
    with pytest.raises(ConfigError, match="carry no measurement"):
        read_measurements(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measurements(tmp_path / "none.jsonl")
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x" * 10_000)[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measurements(packed)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("old")

    def lines():
        yield "new"
        raise OSError(28, "No space left on device")

    with pytest.raises(MemestError, match="No space left"):
        write_lines(path, lines())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(
    name=st.sampled_from(["case", "status", "environment", "readings", "steps", "failure", "run"]),
    value=JSON,
)
def test_no_content_of_a_record_is_a_crash(tmp_path, name, value):
    document = _run().to_dict() | {name: value}
    path = tmp_path / "hostile.jsonl"
    path.write_text(json.dumps({"measurement": document}))
    try:
        (found,), _ = read_measurements(path)
    except ConfigError:
        return
    assert found.to_dict() == json.loads(json.dumps(found.to_dict()))
