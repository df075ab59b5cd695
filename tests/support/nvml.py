"""A stand-in for NVML, the driver's library: boards that a test describes and changes."""

from __future__ import annotations

from types import SimpleNamespace

from memest.units import GIB, MIB


class NvmlError(Exception):
    pass


class FakeNvml:
    """Boards whose processes and memory a test changes while it looks."""

    NVMLError = NvmlError

    def __init__(self, *boards):
        self.boards = boards
        self.works = True

    def nvmlInit(self):
        if not self.works:
            raise NvmlError("Driver Not Loaded")

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.boards[index]

    def nvmlDeviceGetName(self, board):
        return board["name"]

    def nvmlDeviceGetUUID(self, board):
        return board["uuid"]

    def nvmlDeviceGetMemoryInfo(self, board, version=None):
        used, total = board["used"], board["total"]
        return SimpleNamespace(total=total, used=used, free=total - used, reserved=0)

    def nvmlDeviceGetCudaComputeCapability(self, board):
        return board["capability"]

    def nvmlDeviceGetMigMode(self, board):
        return board["mig"], 0

    def nvmlDeviceGetComputeRunningProcesses(self, board):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in board["processes"]]


def make_board(uuid="GPU-aa", used=600 * MIB, processes=(), **more):
    """A board, an H100 of 80 GiB unless told otherwise; ``processes`` are (pid, bytes)."""
    defaults = {"name": "NVIDIA H100 80GB HBM3", "total": 80 * GIB, "capability": (9, 0), "mig": 0}
    return {**defaults, "uuid": uuid, "used": used, "processes": list(processes), **more}
