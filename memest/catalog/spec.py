"""One GPU of the catalogue, and the reading of the data files.

Every figure is what the card's row in ``gpus.json`` says, with its sources; an unknown figure is
None, never a guess.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from memest.files.folders import data_folder

__all__ = ["GpuSpec", "list_gpus", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU as one torch device sees it (half a K80, one GCD of an MI250X).

    Attributes:
        name: what the driver prints.
        aliases: other spellings; the first is a stable slug.
        backend: ``cuda`` or ``rocm``.
        architecture: ``Ampere``, ``CDNA3``, ...
        compute_capability: (major, minor) for CUDA, the gfx target for ROCm, None if a live
            reading could not tell.
        sm_count: streaming multiprocessors (compute units on ROCm).
        max_threads_per_sm: resident threads of one of them.
        memory_marketing_gb: the number on the box.
        nvml_total_bytes: total in ``nvidia-smi``, Linux, drivers from 510 on.
        torch_total_bytes: ``torch.cuda.get_device_properties().total_memory`` on Linux, all that
            PyTorch can ever have.
        torch_total_precision: ``exact``, ``+/-5 MiB``, ...: how exactly that figure was printed.
        memory_bandwidth_gbs: GB/s, decimal.
        fp16_dense_tflops: dense tensor-core rate, fp32 accumulation.
        l2_mib: level-2 cache in MiB.
        launch_year: year of announcement.
        sources: where the figures are from; ``recalled`` was not looked up.
        confidence: ``high``, ``medium``, ``low``, ``live`` for a reading of this machine, or
            ``given`` where the user gave its memory and nothing else is known.
        notes: remarks for the user.
        match_note: which variant a short name was taken for; not part of the card's identity.
    """

    name: str
    aliases: tuple[str, ...] = ()
    backend: str = "cuda"
    architecture: str = "unknown"
    compute_capability: tuple[int, int] | str | None = None
    sm_count: int | None = None
    max_threads_per_sm: int | None = None
    memory_marketing_gb: int | None = None
    nvml_total_bytes: int | None = None
    torch_total_bytes: int | None = None
    torch_total_precision: str | None = None
    memory_bandwidth_gbs: float | None = None
    fp16_dense_tflops: float | None = None
    l2_mib: float | None = None
    launch_year: int | None = None
    sources: tuple[str, ...] = ()
    confidence: str = "low"
    notes: tuple[str, ...] = ()
    match_note: str = field(default="", compare=False)

    @property
    def slug(self) -> str:
        """The shortest stable spelling, for example ``a100-40gb``."""
        return self.aliases[0] if self.aliases else self.name

    @property
    def is_memory_alone(self) -> bool:
        """Whether nothing but the memory is this card's own, which the user gave."""
        return self.confidence == "given"

    @property
    def has_bf16(self) -> bool:
        """bf16 arithmetic: from compute capability 8.0 on, and the ROCm cards listed."""
        return self._has((8, 0))

    @property
    def has_fast_fp16(self) -> bool:
        """Faster fp16: from compute capability 7.0 on (before, products run at fp32's rate)."""
        return self._has((7, 0))

    def _has(self, capability: tuple[int, int]) -> bool:
        own = self.compute_capability
        return own >= capability if isinstance(own, tuple) else self.backend == "rocm"

    @property
    def kind(self) -> str:
        """``geforce``, ``workstation``, ``datacenter`` or ``unified`` (shares the CPU's memory)."""
        words = self.name.removeprefix("NVIDIA ")
        if any("memory shared with the CPU" in note for note in self.notes):
            return "unified"
        if words.startswith(("GeForce", "TITAN", "Radeon RX")):
            return "geforce"
        if words.startswith(("RTX", "Quadro", "AMD Radeon PRO")):
            return "workstation"
        return "datacenter"


def _read(entry: dict[str, Any]) -> GpuSpec:
    values = dict(entry)
    for name in ("aliases", "sources", "notes"):
        values[name] = tuple(values[name])
    capability = values["compute_capability"]
    if isinstance(capability, list):
        values["compute_capability"] = (capability[0], capability[1])
    return GpuSpec(**values)


@functools.cache
def list_gpus() -> tuple[GpuSpec, ...]:
    """Every card of the catalogue, in its order."""
    text = (data_folder() / "gpus.json").read_text(encoding="utf-8")
    return tuple(_read(entry) for entry in json.loads(text))


@functools.cache
def policy() -> dict[str, Any]:
    """The hand-written companions of the catalogue: family names, common cards, driver gaps."""
    text = (data_folder() / "gpu_policy.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
