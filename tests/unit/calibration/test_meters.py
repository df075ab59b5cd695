"""Readings of a GPU through stand-ins for its driver: who is who, and what if it does not say."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.measurement import (
    CPU,
    Environment,
    Measurement,
    MemoryReading,
    Status,
    StepReading,
)
from memest.calibration.running.environment import commit_of, gpu_environment
from memest.calibration.running.meters import GpuMeter, own_process, peaks_of, visible_device
from memest.catalog.nvml import GpuProcess
from memest.units import GIB, MIB
from support.nvml import FakeNvml, make_board

ME = os.getpid()


@pytest.fixture
def cuda(monkeypatch):
    """The parts of torch.cuda that are read."""
    import torch

    now = SimpleNamespace(allocated=100, reserved=2 * MIB)
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB, major=9, minor=0,
        multi_processor_count=132, max_threads_per_multi_processor=2048, uuid="aa",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: now.reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {
        "allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_ooms": 0,
    })  # fmt: skip
    return now


def test_the_process_is_found_among_others(cuda):
    other = make_board("GPU-bb", processes=[(1, 5 * GIB)])
    board = make_board("GPU-aa", processes=[(77, 300 * MIB)])
    meter = GpuMeter(FakeNvml(other, board))
    board["processes"].append((ME, 500 * MIB))
    board["used"] = 1100 * MIB
    meter.note_context("aa")

    start, now = meter.start(), meter.read("context")

    assert (start.device_used_bytes, start.process_bytes) == (600 * MIB, 0)
    assert (start.other_processes, start.other_bytes) == (1, 300 * MIB)
    assert (now.process_bytes, now.device_used_bytes) == (500 * MIB, 1100 * MIB)
    assert (now.other_processes, now.other_bytes) == (1, 300 * MIB)
    assert gpu_environment(meter).meter == "process"


def test_in_a_container_it_is_the_one_that_came(cuda):
    board = make_board(processes=[(77, 300 * MIB)])
    meter = GpuMeter(FakeNvml(board))
    board["processes"].append((123_456, 500 * MIB))  # as the host numbers it
    meter.note_context("aa")
    assert meter.read("x").process_bytes == 500 * MIB

    board["processes"].append((123_457, 900 * MIB))
    assert meter.read("x").process_bytes is None, "two came: nobody knows which"


@pytest.mark.parametrize("hidden", ["no processes", "no sizes"])
def test_where_the_driver_names_no_process_the_device_is_read(cuda, hidden):
    board = make_board()
    meter = GpuMeter(FakeNvml(board))
    board["used"] = 1200 * MIB
    if hidden == "no sizes":
        board["processes"].append((ME, None))
    meter.note_context("aa")

    reading = meter.step(1.0)
    environment = gpu_environment(meter)

    assert reading.process_bytes is None
    assert environment.meter == "device delta"
    assert any("does not name this process" in note for note in environment.notes)
    measured = _measurement(environment, [meter.start()], [reading])
    assert measured.device_bytes == 600 * MIB
    assert measured.process_bytes == 600 * MIB - 2 * MIB


def test_without_a_driver_the_runtime_is_asked_and_it_is_said(cuda):
    nvml = FakeNvml(make_board())
    nvml.works = False
    meter = GpuMeter(nvml)
    meter.note_context("aa")

    assert meter.start() == MemoryReading(name="start")
    assert meter.read("context").device_used_bytes == 10 * GIB
    environment = gpu_environment(meter)
    assert environment.meter == "none"
    assert any("no NVIDIA driver answers" in note for note in environment.notes)
    measured = _measurement(environment, [meter.start()], [meter.step(1.0)])
    assert measured.device_bytes is None, "what was there before is not known"


def test_a_slice_of_a_board_is_said(cuda):
    board = make_board("GPU-whole", mig=1)
    meter = GpuMeter(FakeNvml(board))
    meter.note_context("MIG-other")
    assert any("MIG" in note for note in gpu_environment(meter).notes)


def test_the_allocators_own_peaks(cuda):
    step = GpuMeter(FakeNvml(make_board())).step(0.5)
    assert (step.allocated_bytes, step.reserved_bytes, step.active_bytes) == (5, 7, None)
    assert (step.ooms, step.retries, step.reserved_now_bytes) == (0, None, 2 * MIB)
    assert peaks_of({})["requested_bytes"] is None


def _measurement(environment, readings, steps):
    return Measurement(
        run="r", case=case_from_dict({"model": "gpt2"}), status=Status.OK, environment=environment,
        started="", seconds=1.0, readings=tuple(readings), steps=tuple(steps),
    )  # fmt: skip


def test_what_the_process_holds_is_read_where_both_figures_are_of_one_moment():
    steps = [
        StepReading(seconds=1, process_bytes=9_000, reserved_bytes=8_000, reserved_now_bytes=8_000),
        StepReading(seconds=1, process_bytes=7_500, reserved_bytes=8_000, reserved_now_bytes=6_000),
    ]
    measured = _measurement(Environment(gpu="g"), [], steps)
    assert measured.device_bytes == 9_000
    assert measured.process_bytes == 1_500, "segments were released in the last step"
    assert _measurement(Environment(gpu=CPU), [], steps).device_bytes is None


@pytest.mark.parametrize(
    ("device", "visible", "named"),
    [("cuda", None, "0"), ("cuda:1", None, "1"), ("cuda:1", "3,5", "5"),
     ("cuda", "GPU-aa,GPU-bb", "GPU-aa"), ("cuda:0", " 7 ", "7")],
)  # fmt: skip
def test_one_device_is_left_visible(device, visible, named):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_device(device, environment) == named


def test_a_device_that_is_not_visible():
    with pytest.raises(ValueError, match="leaves no device 2"):
        visible_device("cuda:2", {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ValueError, match="leaves no device 0"):
        visible_device("cuda", {"CUDA_VISIBLE_DEVICES": ""})


def test_own_process_by_number_wins():
    mine, new = GpuProcess(pid=ME, used_bytes=1), GpuProcess(pid=9, used_bytes=2)
    assert own_process((new, mine), frozenset()) is mine
    assert own_process((), frozenset()) is None


def test_the_commit_is_that_of_the_checkout_or_unknown(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMEST_COMMIT", raising=False)
    assert commit_of(tmp_path) == ""
    (tmp_path / "pyproject.toml").touch()
    assert commit_of(tmp_path) == ""
    monkeypatch.setenv("MEMEST_COMMIT", "abc123")
    assert commit_of(tmp_path) == "abc123"
