"""Why memory grew, by logs of it: what is read, how it goes, which cause its evidence allows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memest
from memest.errors import ConfigError, ReplayError
from memest.readers.memory_log import read_memory_log
from memest.report.growth_result import Cause, ExpectedCourse, MemoryPoint, Quantity
from memest.search.explain_growth import explanation_of
from memest.search.growth_trend import Shape, trend_of
from memest.units import GIB, KIB, MIB

EXPECTED = ExpectedCourse(
    model="m", gpu="t4", loaded_bytes=GIB, held_bytes=4 * GIB, peak_allocated_bytes=6 * GIB,
    reserved_bytes=7 * GIB, forward_bytes=300 * MIB, parameter_bytes=GIB, state_bytes=3 * GIB,
)  # fmt: skip


def points(count=40, **columns):
    """Readings of as many steps, each column a function of the step."""
    return tuple(
        MemoryPoint(step=step, **{f"{name}_bytes": int(of(step)) for name, of in columns.items()})
        for step in range(1, count + 1)
    )


def causes(found):
    return [finding.cause for finding in found.findings]


class TestTrend:
    @given(
        each=st.integers(1, 10 * MIB), count=st.integers(5, 300),
        noise=st.lists(st.integers(0, 1000 * MIB), min_size=1, max_size=3),
    )  # fmt: skip
    def test_growth_with_every_step_is_found_whatever_comes_on_top(self, each, count, noise):
        stretch = max(count // 8, 1)
        noise = noise if stretch > 2 * len(noise) else [0]
        values = [(n, GIB + n * each + noise[n % len(noise)]) for n in range(count)]
        found = trend_of(Quantity.ALLOCATED, values)

        assert found.shape is Shape.STEADY
        assert found.step_bytes == pytest.approx(each, rel=0.2, abs=1)

    @given(noise=st.lists(st.integers(0, 1000 * MIB), min_size=1, max_size=4))
    def test_what_comes_and_goes_is_flat(self, noise):
        values = [(n, GIB + noise[n % len(noise)]) for n in range(8 * len(noise) * 2)]

        assert trend_of(Quantity.ALLOCATED, values).shape is Shape.FLAT

    def test_the_beginning_of_a_run_is_not_its_growth(self):
        values = [(n, min(n, 20) * GIB) for n in range(100)]

        assert trend_of(Quantity.DEVICE, values).shape is Shape.FLAT

    def test_of_four_readings_nothing_is_said(self):
        assert trend_of(Quantity.ALLOCATED, [(n, n) for n in range(4)]) is None


class TestCauses:
    def test_nothing_grows(self):
        found = explanation_of(points(allocated=lambda _: GIB, reserved=lambda _: 2 * GIB))

        assert (found.findings, found.leaks, found.full_at) == ((), False, None)
        assert "does not grow" in str(found)

    @pytest.mark.parametrize(
        ("each", "expected", "cause"),
        [
            (512, None, Cause.KEPT_TENSORS),
            (300 * MIB, EXPECTED, Cause.KEPT_GRAPH),
            (GIB, EXPECTED, Cause.KEPT_WEIGHTS),
            (300 * MIB, None, Cause.UNEXPLAINED),
            (77 * MIB, EXPECTED, Cause.UNEXPLAINED),
        ],
    )
    def test_a_size_is_told_by_what_is_expected(self, each, expected, cause):
        found = explanation_of(points(allocated=lambda n: GIB + n * each), expected=expected)

        assert causes(found) == [cause]
        assert found.leaks
        assert found.findings[0].step_bytes == each

    def test_when_the_card_is_full(self):
        found = explanation_of(
            points(40, allocated=lambda n: n * MIB, reserved=lambda n: (1000 + n) * MIB),
            capacity_bytes=2040 * MIB,
        )

        assert found.full_at == 40 + 1000

    def test_segments_that_grow_while_nothing_is_kept(self):
        jumps = {20: 100, 30: 300}
        found = explanation_of(
            points(
                allocated=lambda _: GIB,
                reserved=lambda n: GIB + sum(v for at, v in jumps.items() if n >= at) * MIB,
            )
        )

        assert causes(found) == [Cause.VARYING_SIZES]
        assert not found.leaks
        assert found.findings[0].bytes == 400 * MIB

    def test_without_readings_between_steps_nothing_is_blamed(self):
        found = explanation_of(points(reserved=lambda n: GIB + n * MIB))

        assert causes(found) == [Cause.UNEXPLAINED]
        assert not found.leaks
        assert "memory_allocated()" in found.findings[0].remedy[0]

    def test_the_driver_sees_more_than_segments(self):
        found = explanation_of(
            points(
                allocated=lambda _: GIB, reserved=lambda _: 2 * GIB,
                device=lambda n: 3 * GIB + n * 10 * MIB,
            )
        )  # fmt: skip

        assert causes(found) == [Cause.OUTSIDE]

    def test_host_memory(self):
        found = explanation_of(points(allocated=lambda _: GIB, host=lambda n: GIB + n * 5 * MIB))

        assert causes(found) == [Cause.HOST]
        assert found.findings[0].step_bytes == 5 * MIB

    def test_predictions_of_an_evaluation_gather(self):
        training = points(20, allocated=lambda _: GIB)
        evaluation = [
            MemoryPoint(step=20, allocated_bytes=GIB + n * 50 * MIB, evaluation=True)
            for n in range(10)
        ]
        found = explanation_of((*training, *evaluation))

        assert causes(found) == [Cause.EVALUATION]
        assert found.findings[0].bytes == 450 * MIB
        assert not found.leaks

    def test_the_first_step_brings_states(self):
        before = MemoryPoint(step=0, allocated_bytes=GIB)
        found = explanation_of((before, *points(allocated=lambda _: 4 * GIB)), expected=EXPECTED)

        assert causes(found) == [Cause.FIRST_STEP]
        assert "3.00 GiB of gradients and states" in " ".join(found.findings[0].evidence)

    def test_steps_that_are_counted_from_zero_bring_no_states(self):
        growing = [MemoryPoint(step=n, allocated_bytes=GIB + n * MIB) for n in range(20)]
        varying = [MemoryPoint(step=n, allocated_bytes=GIB + n % 3 * MIB) for n in range(20)]

        assert causes(explanation_of(tuple(growing))) == [Cause.UNEXPLAINED]
        assert causes(explanation_of(tuple(varying))) == []

    def test_growth_that_ended_has_no_rate(self):
        found = explanation_of(points(allocated=lambda n: GIB + min(n, 30) * MIB))

        assert found.findings[0].step_bytes is None

    def test_few_readings_are_said_to_be_few(self):
        found = explanation_of(points(3, allocated=lambda n: n * GIB))

        assert found.findings == ()
        assert "too few" in found.notes[0]


LOGS = {
    "bytes by name.csv": ("step,allocated_bytes\n1,1048576\n2,2097152\n", [MIB, 2 * MIB]),
    "mib by name.csv": ("iteration,allocated_mib,max_allocated_mib\n1,1.5,9\n2,2,9\n",
                        [3 * MIB // 2, 2 * MIB]),
    "gb in brackets.csv": ("step, allocated [GB]\n1, 2\n2, 3\n", [2 * 10**9, 3 * 10**9]),
    "units behind values.csv": ("allocated\n1 KiB\n2 KiB\n", [KIB, 2 * KIB]),
    "plain bytes.csv": ("step,allocated\n1,50000000\n2,\n3,60000000\n", [50_000_000, 60_000_000]),
    "semicolons.csv": ("step;allocated_mib\n1;1\n2;2\n", [MIB, 2 * MIB]),
    "tabs.tsv": ("step\tallocated_mib\n1\t1\n2\t2\n", [MIB, 2 * MIB]),
    "memory_stats.csv": (("step,allocated_bytes.all.allocated,allocated_bytes.all.current\n"
                         "1,9e12,50000000\n"), [50_000_000]),
    "shares and differences.csv": (("step,memory_used_pct,allocated_delta_mib,allocated_mib\n"
                                   "1,5,3,1\n2,6,3,2\n"), [MIB, 2 * MIB]),
    "of W&B.csv": (("Step,max-cpu - memest/allocated_bytes,max-cpu - memest/allocated_bytes__MAX\n"
                   "1,5,9\n2,6,9\n"), [5, 6]),
    "ranks.csv": ("step,rank,allocated_mib\n1,0,1\n1,1,7\n2,0,2\n2,1,7\n", [MIB, 2 * MIB]),
    "a run resumed.csv": ("step,allocated_mib\n1,5\n2,5\n3,5\n2,1\n3,2\n", [MIB, 2 * MIB]),
    "lines.jsonl": ('{"step": 1, "allocated_mib": 1}\n\n{"step": 2, "allocated_mib": 2}\n',
                    [MIB, 2 * MIB]),
    "a list.json": ('[{"allocated_mib": 1}, {"allocated_mib": 2}]', [MIB, 2 * MIB]),
    "trainer_state.json": (json.dumps({"log_history": [
        {"step": 5, "loss": 1.0}, {"step": 5, "memest/allocated_bytes": MIB},
        {"step": 10, "memest/allocated_bytes": 2 * MIB}, {"step": 10, "eval_loss": 2.0}]}),
        [MIB, 2 * MIB]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs_are_read(name, tmp_path):
    text, sizes = LOGS[name]
    path = tmp_path / name
    path.write_text(text)

    assert [point.allocated_bytes for point in read_memory_log(path).points] == sizes


OF_OTHERS = (
    "memory.total [MiB]", "memory.reserved [MiB]", "memest/predicted_device_bytes", "system.cpu",
    "system.cpu.powerWatts", "system.gpu.0.correctedMemoryErrors", "system.gpu.0.gpu",
    "system.gpu.0.memory", "system.gpu.0.memoryAllocated", "system.gpu.0.temp", "system.memory",
    "system.proc.cpu.threads", "system.proc.memory.availableMB", "system.proc.memory.percent",
)  # fmt: skip
"""Columns that nvidia-smi and W&B write besides."""


@pytest.mark.parametrize(
    ("column", "quantity"),
    [
        ("memory.used [MiB]", Quantity.DEVICE),
        ("used_gpu_memory [MiB]", Quantity.DEVICE),
        ("system/gpu.0.memoryAllocatedBytes", Quantity.DEVICE),
        ("system.proc.memory.rssMB", Quantity.HOST),
        ("cpu_memory_mib", Quantity.HOST),
        ("memest/measured_allocated_bytes", Quantity.PEAK_ALLOCATED),
        ("max_memory_allocated_mib", Quantity.PEAK_ALLOCATED),
        ("memory_reserved_gib", Quantity.RESERVED),
        ("rss_mb", Quantity.HOST),
        ("memest/host_bytes", Quantity.HOST),
    ],
)
def test_a_column_is_known_by_its_name(column, quantity, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"step,{','.join(OF_OTHERS)},{column}\n1{',9' * len(OF_OTHERS)},7\n")

    assert set(read_memory_log(path).columns) == {quantity}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,loss\n1,2\n", r"no column of memory \(it has step, loss\)"),
        ("step,allocated\n1,5\n2,6\n", r"call it allocated_mib"),
        ("step,allocated_mib\n1,much\n", r"allocated_mib is 'much'"),
        ("step,allocated_mib\nfirst,5\n", r"step is 'first'"),
        ('{"step": 1}\n{"step": 2\n', r"line 2 is no JSON"),
        ("", r"has no rows with names: name them as in step"),
        ("2026/11/28 10:00:00.000, 5 MiB\n", r"nvidia-smi --query-gpu=timestamp,index"),
        ("step,rss\n1,12000000\n2,13000000\n", r"call it rss_mib, _kib or _bytes"),
        ("step,allocated_mib\n1,-5\n", r"allocated_mib is '-5'"),
        ("step,allocated\n1,5 MiB\n2,6\n", r"call it allocated_mib"),
        ('{"log_history": null}', r"has no rows with names"),
        ("[" * 100_000, r"nested too deep"),
        ('[{"allocated_bytes": ' + "9" * 5000 + "}]", r"no JSON"),
    ],
)
def test_what_cannot_be_read_is_said(text, words, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(text)

    with pytest.raises(ConfigError, match=words):
        memest.explain_growth(path)


def test_columns_that_are_not_read_are_named(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,gpu0_allocated_mib,gpu1_allocated_mib\n1,7,9\n")

    assert "gpu1_allocated_mib was not read" in memest.explain_growth(path).notes[0]


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_cards_that_nvidia_smi_writes_by_turns_are_not_one(cards, tmp_path):
    path = tmp_path / "smi.csv"
    rows = [
        f"2026/11/28 10:{n // 60:02}:{n % 60:02}.1{card:02}, {card}, {1000 + n * card} MiB\n"
        for n in range(70)
        for card in range(cards)
    ]
    path.write_text("timestamp, index, memory.used [MiB]\n" + "".join(rows))
    assert len(read_memory_log(path).points) == 70

    path.write_text(path.read_text().replace("index", "which"))
    if cards == 1:
        assert len(read_memory_log(path).points) == 70
    else:
        with pytest.raises(ConfigError, match=f"rows come {cards} at a time"):
            read_memory_log(path)


def test_a_pause_of_nvidia_smi_is_no_reading_of_several_cards(tmp_path):
    path = tmp_path / "smi.csv"
    seconds = [n + 20 * (n > 4) for n in range(12)]
    rows = [f"2026/11/28 10:00:{second:02}.100, {second} MiB\n" for second in seconds]
    path.write_text("timestamp, memory.used [MiB]\n" + "".join(rows))

    assert len(read_memory_log(path).points) == 12


def test_a_log_that_powershell_wrote_is_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,allocated_mib\n1,5\n", encoding="utf-16")

    assert read_memory_log(path).points[0].allocated_bytes == 5 * MIB


def test_steps_with_several_rows_are_said_to_have_them(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,allocated_mib\n" + "".join(f"{n},9\n{n},{n}\n" for n in range(1, 20)))

    assert "every step has several rows" in memest.explain_growth(path).notes[0]


def test_no_file_no_snapshot_and_options_alone(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        memest.explain_growth(tmp_path / "nowhere.pickle")
    (tmp_path / "bad.pickle").write_bytes(b"\x80\x04nothing")
    with pytest.raises(ReplayError, match="not a memory snapshot"):
        memest.explain_growth(tmp_path / "bad.pickle")
    with pytest.raises(ConfigError, match="batch without a model"):
        memest.explain_growth([], batch=4)


def test_a_history_that_was_not_recorded_is_asked_for(tmp_path):
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({"segments": [], "device_traces": [[]]}))

    with pytest.raises(ConfigError, match="_record_memory_history"):
        memest.explain_growth(path)


def test_a_prediction_stands_beside_the_readings():
    options = {"batch": 4, "seq_len": 64, "precision": "fp32"}
    expected = memest.explain_growth([], "prajjwal1/bert-tiny", gpu="t4", **options).expected
    estimate = memest.estimate("prajjwal1/bert-tiny", gpu="t4", **options)
    growing = points(allocated=lambda n: expected.held_bytes + n * expected.forward_bytes)
    found = memest.explain_growth(growing, "prajjwal1/bert-tiny", gpu="t4", **options)

    assert expected.peak_allocated_bytes == estimate.peak.allocated_bytes
    assert expected.loaded_bytes < expected.held_bytes < expected.peak_allocated_bytes
    assert causes(found) == [Cause.KEPT_GRAPH]
