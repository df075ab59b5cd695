"""The device and the software of a run that was measured, as predictions take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memest.calibration.measurement import release_of
from memest.catalog.gpus import find_gpu, traits
from memest.catalog.spec import GpuSpec
from memest.config.software import Software
from memest.errors import UnknownGpuError
from memest.workspaces.operator_call import GpuTraits

__all__ = ["LATEST_TORCH", "Device", "software_of"]

LATEST_TORCH = (2, 13)
"""Taken where a record does not say which torch it was."""


def software_of(torch: str, transformers: str, cuda: str) -> Software:
    """The software of a run, from the releases as they were written down."""
    return Software(
        torch=release_of(torch), transformers=release_of(transformers), cuda=release_of(cuda)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as it was read; what was not read comes from the catalogue.

    Attributes:
        name: as the driver prints it.
        total_bytes: of the device as torch sees it.
        capability: compute capability.
        sm_count: streaming multiprocessors.
        max_threads_per_sm: resident threads of one of them.
    """

    name: str = ""
    total_bytes: int | None = None
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    max_threads_per_sm: int | None = None

    @property
    def spec(self) -> GpuSpec:
        """The card of the catalogue, or what was read where the catalogue does not have it."""
        try:
            return find_gpu(self.name, total_bytes=self.total_bytes)
        except UnknownGpuError:
            return GpuSpec(name=self.name, compute_capability=self.capability)

    def traits(self, torch: tuple[int, int]) -> GpuTraits:
        """What decides kernels and workspaces; readings win over the catalogue.

        Args:
            torch: (major, minor).
        """
        if self.capability is None or self.sm_count is None:
            return traits(self.spec, torch)
        threads = self.max_threads_per_sm
        if threads is None:
            alike = replace(self.spec, compute_capability=self.capability)
            threads = traits(alike, torch).max_threads_per_sm
        return GpuTraits(self.capability, self.sm_count, threads, torch)
