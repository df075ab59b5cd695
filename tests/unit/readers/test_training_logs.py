"""What training tools print of memory, as they print it: which line, which step, which unit."""

from __future__ import annotations

import json

import pytest

from memest.errors import ConfigError
from memest.readers.memory_log import read_memory_log
from memest.report.growth_result import Quantity
from memest.units import GIB, MIB

SWIFT = (
    "[INFO:swift] Global seed set to 42\n"
    "{'loss': 1.0, 'grad_norm': nan, 'memory(GiB)': 34.25, 'epoch': 0.1, "
    "'global_step/max_steps': '5/270', 'elapsed_time': '54m 1s'}\n"
    "Train:   4%|▎  | 10/270 [00:40<01:30]{'loss': 1.0, 'epoch': 0.2, 'global_step/max_steps': "
    "'10/270', 'memory(GiB)': 34.5}\n"
    "{'eval_loss': 1.2, 'epoch': 0.2, 'global_step/max_steps': '10/270'}\n"
)
SWIFT_FILE = "".join(
    json.dumps({"loss": 1.0, "memory(GiB)": size, "global_step/max_steps": f"{step}/270"}) + "\n"
    for step, size in ((5, 34.25), (10, 34.5))
)
MEGATRON = "".join(
    f" [2025-06-01 10:00:00] iteration {step:8d}/     270 | consumed samples: 80 | "
    f"memory(GiB): {size} | elapsed time: 1m | loss scale: 1.0 |\n"
    for step, size in ((5, 34.25), (10, 34.5))
)
YOLO = (
    "Ultralytics 8.3.181 🚀 Python-3.11.13 torch-2.6.0+cu124 CUDA:0 (Tesla T4, 15095MiB)\n"
    "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    "\r    1/100      2.9G      1.081     0.4706      1.084         10        640:  50%|██| 1/2"
    "\r    1/100      3.25G      1.081     0.4706      1.084         12        640: 100%|██| 2/2\n"
    "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95)\n"
    "                   all        722       1444      0.989       0.99      0.993      0.681\n"
    "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    "    2/100      10.5G      1.038     0.4883      1.083          8        640: 100%|██| 2/2\n"
)
MMENGINE = (
    "04/21 21:03:53 - mmengine - INFO - Epoch(train)   [1][ 50/270]  lr: 1.0e-02  eta: 0:00:25  "
    "time: 0.0100  data_time: 0.0000  memory: 5432  loss: 11.4723\n"
    "04/21 21:03:59 - mmengine - INFO - Epoch(val) [1][50/60]  eta: 0:00:01  memory: 900  \n"
    "04/21 21:04:53 - mmengine - INFO - Epoch(train)   [2][ 50/270]  lr: 1.0e-02  memory: 5500  "
    "loss: 11.4723\n"
)
MMCV = (
    "2019-12-31 00:21:04,166 - INFO - Epoch [1][50/270]\tlr: 0.00050, eta: 1 day, 19:58:30, time: "
    "0.429, data_time: 0.006, memory: 5432, loss: 5.5632\n"
    "2019-12-31 00:22:04,166 - INFO - Epoch [2][50/270]\tlr: 0.00050, memory: 5500, loss: 5.5632\n"
)
MM_ITERATIONS = (
    "05/01 12:00:00 - mmengine - INFO - Iter(train) [   50/80000]  lr: 1e-2  memory: 5432  \n"
    "05/01 12:01:00 - mmengine - INFO - Iter(train) [  320/80000]  lr: 1e-2  memory: 5500  \n"
)
MM_FILE = "".join(
    json.dumps({"lr": 0.1, "data_time": 0.0, "epoch": 1, "iter": 7, "memory": size, "step": step})
    + "\n"
    for step, size in ((50, 5432), (320, 5500))
)
TITAN = "".join(
    f"[rank0]:[titan] 2025-01-01 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.1  "
    f"\x1b[38;2;9;9;9mmemory: {size:5.2f}GiB(45.93%)  \x1b[34mtps: 7,000\x1b[0m\n"
    for step, size in ((5, 34.25), (10, 34.5))
)
DETECTRON = "".join(
    f"[01/01 10:00:00 d2.utils.events]:  eta: 1:00:00  iter: {step}  total_loss: 1.2  time: 0.1  "
    f"lr: 0.001  max_mem: {size}M\n"
    for step, size in ((50, 5432), (320, 5500))
)
TORCHVISION = "".join(
    f"Epoch: [{epoch}]  [ 50/270]  eta: 0:01:00  lr: 0.01  loss: 5.5 (5.6)  max mem: {size}\n"
    for epoch, size in ((0, 5432), (1, 5500))
)
RESERVED = (Quantity.RESERVED, [(5, 34.25 * GIB), (10, 34.5 * GIB)])
PEAKS = (Quantity.PEAK_ALLOCATED, [(50, 5432 * MIB), (320, 5500 * MIB)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(SWIFT, RESERVED, id="ms-swift"),
        pytest.param(SWIFT_FILE, RESERVED, id="logging.jsonl of ms-swift"),
        pytest.param(MEGATRON, RESERVED, id="ms-swift by Megatron"),
        pytest.param(YOLO, (Quantity.RESERVED, [(1, 3.25 * GIB), (2, 10.5 * GIB)]), id="YOLO"),
        pytest.param(MMENGINE, PEAKS, id="mmengine"),
        pytest.param(MMCV, PEAKS, id="mmcv"),
        pytest.param(MM_ITERATIONS, PEAKS, id="mmengine by iterations"),
        pytest.param(MM_FILE, PEAKS, id="scalars.json of mmengine"),
        pytest.param(TITAN, RESERVED, id="torchtitan"),
        pytest.param(DETECTRON, PEAKS, id="detectron2"),
        pytest.param(TORCHVISION, PEAKS, id="torchvision"),
    ],
)
def test_readings_of_a_tool(text, found, tmp_path):
    quantity, readings = found
    (tmp_path / "run.log").write_text(text, encoding="utf-8")
    log = read_memory_log(tmp_path / "run.log")
    assert [*log.columns] == [quantity]
    assert log.unit == "step"
    assert [(point.step, point.value(quantity)) for point in log.points] == readings


def test_what_a_reading_is_said_to_be(tmp_path):
    for text, words in ((SWIFT, "the most that segments took so far"), (YOLO, "YOLOv5 print 10^9")):
        (tmp_path / "run.log").write_text(text, encoding="utf-8")
        assert any(words in note for note in read_memory_log(tmp_path / "run.log").notes)


def test_dicts_that_the_trainer_prints_are_rows(tmp_path):
    """Those of axolotl: what is called device there is the allocator's, and no step stands."""
    (tmp_path / "run.log").write_text(
        "[2025-05-17 18:16:23,053] [INFO] [axolotl.train:63] [PID:99566] [RANK:0] starting\n"
        "{'loss': '4.75', 'memory/max_mem_active(gib)': '25.45', 'memory/max_mem_allocated(gib)': "
        "'25.5', 'memory/device_mem_reserved(gib)': '30.25', 'epoch': '1.0'}\n"
        "{'loss': 2.0, 'memory/max_mem_active(gib)': 34.8, 'memory/max_mem_allocated(gib)': 34.5, "
        "'memory/device_mem_reserved(gib)': 41.25, 'epoch': 2.0}\n"
    )
    log = read_memory_log(tmp_path / "run.log")
    assert {*log.columns} == {Quantity.PEAK_ALLOCATED, Quantity.RESERVED}
    assert [point.reserved_bytes for point in log.points] == [30.25 * GIB, 41.25 * GIB]
    assert [point.peak_allocated_bytes for point in log.points] == [25.5 * GIB, 34.5 * GIB]
    assert log.unit == "row"


def test_steps_that_begin_anew_in_each_epoch_are_rows(tmp_path):
    """``.log.json`` of mmcv counts iterations of the epoch: all of them are read."""
    rows = [{"env_info": "x"}] + [
        {"mode": "train", "epoch": epoch, "iter": at, "memory": 3000, "data_time": 0.1}
        for epoch in (1, 2)
        for at in (50, 100)
    ]
    (tmp_path / "x.log.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_memory_log(tmp_path / "x.log.json")
    assert len(log.points) == 4
    assert log.unit == "row"


@pytest.mark.parametrize(
    "text",
    [
        "1/100 3.2G 1.081\n2/100 3.3G 1.082\n",  # nothing says that it is memory
        "Epoch(val) [1][50/60]  memory: 900\n",
        "{'loss': 1.0, 'epoch': 0.1}\n",
    ],
    ids=["no heading", "an evaluation", "no memory"],
)
def test_other_lines_are_no_readings(text, tmp_path):
    (tmp_path / "run.log").write_text(text)
    with pytest.raises(ConfigError, match=r"has no (column of memory|rows with names)"):
        read_memory_log(tmp_path / "run.log")
