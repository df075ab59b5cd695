"""One model asked at many points: estimates and work, each made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memest.cards import REFERENCE_GPU
from memest.hardware.catalogue import find_gpu
from memest.hardware.nvml import resolve_gpu
from memest.hardware.spec import GpuSpec
from memest.result import Estimate
from memest.search.cost import Speed, speed_of, step_seconds
from memest.setup import Setup
from memest.steps.work import StepWork
from memest.what_if import Profile

__all__ = ["Probe", "spec_of"]


class Probe:
    """Asks a profile and remembers the answers.

    Args:
        profile: the model under its setup.
        where: what of ``gpu``, ``gpu_memory``, ``device_context`` and ``profile`` was given.
        vary: sizes that many questions will change.
    """

    def __init__(
        self, profile: Profile, where: dict[str, Any], *, vary: Sequence[str] = ()
    ) -> None:
        self.profile = profile
        self._vary = tuple(vary)
        self.where = {name: value for name, value in where.items() if value is not None}
        self.spec = spec_of(self.where)
        self._estimates: dict[tuple[Any, ...], Estimate] = {}
        self._works: dict[Setup, StepWork] = {}

    def estimate(self, *, max_batch: bool = False, **changes: Any) -> Estimate:
        """The estimate with some options changed."""
        setup = self.profile.setup_for(**changes)
        key = (setup, max_batch)
        found = self._estimates.get(key)
        if found is None:
            found = self.profile.estimate(
                setup, max_batch=max_batch, vary=self._vary, common=False, **self.where
            )
            self._estimates[key] = found
        return found

    def work(self, **changes: Any) -> StepWork:
        """The work of one optimizer step with some options changed."""
        setup = self.profile.setup_for(**changes)
        found = self._works.get(setup)
        if found is None:
            gpu = self.where.get("gpu")
            found = self._works[setup] = self.profile.work(setup, gpu=gpu)
        return found

    def seconds_per_sample(self, **changes: Any) -> float:
        """Estimated time of a sample; only ratios of it mean anything."""
        setup = self.profile.setup_for(**changes)
        return step_seconds(self.work(**changes), self.speed(setup)) / (
            setup.batch * setup.grad_accum
        )

    def speed(self, setup: Setup) -> Speed:
        """The speed that is taken for the GPU."""
        return speed_of(self.spec, tf32=setup.tf32)


def spec_of(where: dict[str, Any]) -> GpuSpec:
    """The card whose kernels run: the first one named, else the reference."""
    named = where.get("gpu")
    if named is None or named == () or named == []:
        return find_gpu(REFERENCE_GPU)
    return resolve_gpu(named if isinstance(named, str) else named[0])
