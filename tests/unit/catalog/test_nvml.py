"""Live readings, through a stand-in for pynvml."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from memest.catalog.gpus import find_gpu, usable_bytes
from memest.catalog.nvml import local_gpus, local_spec, resolve_gpu
from memest.errors import ConfigError, DeviceError, MissingDependencyError, UnknownGpuError
from memest.units import MIB


class NvmlError(Exception):
    pass


@dataclass
class Board:
    name: str | bytes = "NVIDIA GeForce RTX 3090"
    total: int = 24576 * MIB
    used: int = 620 * MIB
    capability: tuple[int, int] | None = (8, 6)
    mig: bool = False
    processes: list = field(default_factory=list)
    readable: bool = True


class FakeNvml:
    """The calls of pynvml that memest makes, on boards of our choosing."""

    NVMLError = NvmlError
    nvmlMemory_v2 = 2

    def __init__(self, *boards, driver="550.54.15", works=True, version_two=True):
        self.boards, self.driver, self.works, self.version_two = boards, driver, works, version_two
        self.open = 0

    def nvmlInit(self):
        if not self.works:
            raise NvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.boards[index]

    def nvmlDeviceGetName(self, board):
        return board.name

    def nvmlDeviceGetUUID(self, board):
        return b"GPU-0"

    def nvmlDeviceGetMemoryInfo(self, board, version=None):
        if not board.readable or (version and not self.version_two):
            raise NvmlError("Not Supported")
        free = board.total - board.used
        if version:
            reserved = 300 * MIB
            return SimpleNamespace(
                total=board.total, used=board.used - reserved, free=free, reserved=reserved
            )
        return SimpleNamespace(total=board.total, used=board.used, free=free)

    def nvmlDeviceGetCudaComputeCapability(self, board):
        if board.capability is None:
            raise NvmlError("Not Supported")
        return board.capability

    def nvmlDeviceGetMigMode(self, board):
        if not board.mig:
            raise NvmlError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetComputeRunningProcesses(self, board):
        return board.processes


class TestLocalGpus:
    def test_reads_what_the_driver_says(self):
        nvml = FakeNvml(Board(processes=[SimpleNamespace(pid=7, usedGpuMemory=None)]))
        (gpu,) = local_gpus(nvml=nvml)

        assert gpu.name == "NVIDIA GeForce RTX 3090"
        assert gpu.uuid == "GPU-0"
        assert gpu.total_bytes == 24576 * MIB
        assert gpu.used_bytes == 320 * MIB
        assert gpu.reserved_bytes == 300 * MIB
        assert gpu.driver == "550.54.15"
        assert [(each.pid, each.used_bytes) for each in gpu.processes] == [(7, None)]
        assert nvml.open == 0

    def test_old_driver_without_version_two(self):
        (gpu,) = local_gpus(nvml=FakeNvml(Board(name=b"Tesla T4"), version_two=False))

        assert (gpu.name, gpu.used_bytes, gpu.reserved_bytes) == ("Tesla T4", 620 * MIB, None)

    @pytest.mark.parametrize(
        ("nvml", "words"),
        [
            (FakeNvml(works=False), "no NVIDIA driver answers"),
            (FakeNvml(Board(name="NVIDIA GB10", readable=False)), "share memory with the CPU"),
        ],
    )
    def test_what_cannot_be_read(self, nvml, words):
        with pytest.raises(DeviceError, match=words):
            local_gpus(nvml=nvml)
        assert nvml.open == 0

    def test_no_package(self, monkeypatch):
        def missing(name):
            raise ImportError(name)

        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(MissingDependencyError, match=r"memest-gpu\[gpu\]") as caught:
            local_gpus()

        assert caught.value.exit_code == 6


class TestLocalSpec:
    def test_same_board_keeps_torchs_total(self):
        spec = resolve_gpu("local", nvml=FakeNvml(Board()))

        assert spec.torch_total_bytes == find_gpu("rtx 3090").torch_total_bytes
        assert spec.sm_count == 82
        assert spec.confidence == "live"

    def test_other_total_wins_over_the_catalogue(self):
        spec = resolve_gpu("local:0", nvml=FakeNvml(Board(name="NVIDIA A40", total=49140 * MIB)))

        assert spec.nvml_total_bytes == 49140 * MIB
        assert spec.torch_total_bytes is None
        assert any("driver is believed" in note for note in spec.notes)
        assert usable_bytes(spec)[0] < 49140 * MIB

    def test_variant_is_picked_by_the_reading(self):
        board = Board(name="NVIDIA GeForce RTX 3060", total=8192 * MIB)

        assert resolve_gpu("local", nvml=FakeNvml(board)).memory_marketing_gb == 8

    def test_drivers_before_510_show_torchs_figure(self):
        spec = resolve_gpu("local", nvml=FakeNvml(Board(total=24268 * MIB), driver="470.1"))

        assert spec.torch_total_bytes == 24268 * MIB
        assert usable_bytes(spec)[0] == 24268 * MIB

    def test_unknown_card_is_described_by_the_reading_alone(self):
        board = Board(name="NVIDIA RTX 9999", total=64 * 1024 * MIB, capability=(12, 0))
        spec = resolve_gpu("local", nvml=FakeNvml(board))

        assert (spec.name, spec.compute_capability) == ("NVIDIA RTX 9999", (12, 0))
        assert usable_bytes(spec)[0] < 64 * 1024 * MIB

    def test_split_board_is_noted(self):
        board = Board(name="NVIDIA A100-SXM4-40GB", total=40960 * MIB, mig=True)
        (gpu,) = local_gpus(nvml=FakeNvml(board))

        assert any("MIG" in note for note in local_spec(gpu).notes)


def test_names_and_indices():
    assert find_gpu("l4") == resolve_gpu("l4")
    with pytest.raises(UnknownGpuError):
        resolve_gpu("localhost")
    with pytest.raises(DeviceError, match=r"it has local:0 \(NVIDIA GeForce RTX 3090\)"):
        resolve_gpu("local:3", nvml=FakeNvml(Board()))
    with pytest.raises(DeviceError, match="none"):
        resolve_gpu("local", nvml=FakeNvml())
    with pytest.raises(ConfigError, match="local:0"):
        resolve_gpu("local:first", nvml=FakeNvml(Board()))
