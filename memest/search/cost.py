"""How long a training step takes, relative to another one: an estimate without a measurement.

    t = sum over phases of  operations / rate  +  3 x bytes made / bandwidth  +  launches x 10 us

One sum for every configuration, whatever distinguishes them: recomputation is in the operations of
the backward pass, accumulation in its launches, half precision in rates and bytes. The terms add
up and do not overlap: what a kernel costs beyond its arithmetic (its launch, filling the GPU,
its tail) is paid however full the queue is. With overlap, four micro-batches of 1 would cost what
one of 4 costs; published is 14 % more (below).

Only ratios of these seconds are ever shown. The terms are uncertain by tens of percent, their
ratios for one model on one GPU much less. Against the seven
runs of bert-large on a V100 in transformers' guide (docs/source/en/performance.mdx, 4.18: 57.8,
66.0, 85.5, 27.5, 50.8, 64.3 and 56.5 s for the same 512 samples) the ratios to the first are off
by 8 % at most; ``tests/unit/search/test_cost.py`` keeps that.

Not considered: loading of data, communication, synchronisation, ``torch.compile``, and what
operators read and write in place (an optimizer's arithmetic). Nor is a generation that the steps
wait for (``grpo``, ``rloo``): there no ratio is shown, and plans are ordered by their training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memest.catalog.gpus import REFERENCE_GPU, find_gpu
from memest.catalog.nvml import resolve_gpu
from memest.catalog.spec import GpuSpec, list_gpus
from memest.config.setup import Precision, Setup
from memest.estimation.gpu_target import Place
from memest.profiles.work import StepWork, Work
from memest.report.result import Estimate
from memest.search.profile import Profile
from memest.workspaces.flops import Arithmetic

__all__ = [
    "LAUNCH_SECONDS",
    "NOT_TIMED",
    "ROLLOUTS_NOT_TIMED",
    "Probe",
    "Speed",
    "seconds",
    "spec_of",
    "speed_of",
    "step_seconds",
]

TIME_BASIS = (
    "an estimate without a measurement, from operations, memory written and launches; {rates}"
)
"""What is said wherever a relative time is shown."""
NOT_TIMED = "not estimated for pipelines, whose stages wait for each other"
ROLLOUTS_NOT_TIMED = (
    "not estimated for runs that write what they learn from: the writing, which may take most of "
    "a step, is not counted"
)
LAUNCH_SECONDS = 10e-6
"""What one operator costs beyond its arithmetic and memory: Python, dispatcher and launch take 5
to 25 microseconds of the host in eager PyTorch (public profiles; judged, not measured here)."""
PASSES = 3
"""Memory moved for each byte made: an elementwise operator reads two tensors and writes one."""
TENSOR_CORE_SHARE = 0.7
"""Share of the peak that large half-precision products reach on tensor cores (judged; of round
figures the one that agrees best with the runs above). Whole trainings run at 0.46 (PaLM,
arXiv:2204.02311) to 0.57 (Megatron-LM, arXiv:2205.05198) of the peak, with what is bound by memory,
which is a term of its own here."""
PLAIN_SHARE = 0.9
"""Share of the peak of fp32 units that large products reach without tensor cores (judged)."""
DOUBLE_SHARE = 0.5
"""fp64 against fp32, at best (datacenter cards)."""

_HALF_TO_FULL: dict[tuple[str, int | None], float] = {
    ("Volta", None): 8,
    ("Turing", None): 8,
    ("Ampere", 0): 16,
    ("Ampere", None): 4,
    ("Ada", None): 4,
    ("Hopper", None): 15,
    ("Blackwell", 0): 28,
    ("Blackwell", 3): 28,
    ("Blackwell", None): 4,
    ("CDNA2", None): 4,
    ("CDNA3", None): 8,
    ("CDNA4", None): 16,
    ("RDNA3", None): 2,
}
"""Dense half rate over fp32 rate by architecture and minor compute capability, where the
catalogue's source does not say it: vendors' datasheets, recalled (A100 312 : 19.5 TFLOPS, H100
989 : 67, L4 121 : 30.3, T4 65 : 8.1, V100 125 : 15.7, B200 2250 : 80, MI300X 1307 : 163)."""
_HALF_TO_FULL_OF = {"a10g": 2.0, "l20": 2.0, "l40": 2.0, "h20": 3.4}
"""The cards whose tensor cores are slower than their family's."""
_TF32 = frozenset({"Ampere", "Ada", "Hopper", "Blackwell", "CDNA3"})
"""Architectures that multiply fp32 as TF32, at half the half rate."""
_FACTOR = re.compile(r"fp16: (\d+)x FP32 rate")
_TERA = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What is taken for the speed of a GPU.

    Attributes:
        half: operations a second on fp16 operands.
        bf16: the same for bf16: fp32's where the GPU has no bf16 arithmetic and PyTorch computes
            through fp32, which is the most that it then reaches.
        tf32: the same for fp32 where TF32 is allowed.
        full: the same for fp32 where it is not.
        bandwidth: bytes a second of its memory.
        allow_tf32: whether matrix products may use TF32 (``--tf32``); PyTorch's default is no,
            for convolutions it is yes (``torch.backends.cudnn.allow_tf32``).
        basis: where the figures are from.
    """

    half: float
    bf16: float
    tf32: float
    full: float
    bandwidth: float
    allow_tf32: bool
    basis: str

    def rate(self, kind: Arithmetic) -> float:
        """Operations a second of one kind of arithmetic."""
        if kind is Arithmetic.HALF:
            return self.half
        if kind is Arithmetic.BF16:
            return self.bf16
        if kind is Arithmetic.DOUBLE:
            return DOUBLE_SHARE * self.full
        uses_tf32 = self.allow_tf32 or kind is Arithmetic.FULL_CONVOLUTION
        return self.tf32 if uses_tf32 else self.full


def seconds(work: Work, speed: Speed) -> float:
    """Time of some work; meaningful only against the time of other work."""
    arithmetic = sum(count / speed.rate(kind) for kind, count in work.flops_by.items())
    transfer = PASSES * work.bytes_made / speed.bandwidth
    return arithmetic + transfer + work.launches * LAUNCH_SECONDS


def step_seconds(work: StepWork, speed: Speed) -> float:
    """Time of one optimizer step; meaningful only against the time of other steps."""
    return sum(seconds(part, speed) for part in work.phases.values())


def speed_of(spec: GpuSpec, *, tf32: bool = False) -> Speed:
    """The speed of a GPU, from its row in the catalogue and the ratios stated here.

    Args:
        spec: the GPU.
        tf32: whether matrix products of fp32 may use TF32.
    """
    source, half = _half_rate(spec)
    native = half
    full = half / _half_to_full(source)
    if source.architecture == "Pascal":
        # native fp16 is 2x (GP100) or 1/64 of fp32; PyTorch multiplies fp16 with fp32 sums
        full = half = native / 2 if source.compute_capability == (6, 0) else native * 64
    cores = half > full
    basis = "the catalogue's figures"
    if source is not spec:
        basis = f"figures of {source.name} scaled to its processors: its own are not known"
    bandwidth = spec.memory_bandwidth_gbs or source.memory_bandwidth_gbs or 1000.0
    has_tf32 = source.architecture in _TF32
    half_rate = half * (TENSOR_CORE_SHARE if cores else PLAIN_SHARE)
    return Speed(
        half=half_rate,
        bf16=half_rate if spec.has_bf16 else min(half_rate, PLAIN_SHARE * full),
        tf32=max(TENSOR_CORE_SHARE * half / 2, PLAIN_SHARE * full)
        if has_tf32
        else PLAIN_SHARE * full,
        full=PLAIN_SHARE * full,
        bandwidth=bandwidth * 10**9,
        allow_tf32=tf32,
        basis=f"rates of {spec.name} by {basis}",
    )


def _half_rate(spec: GpuSpec) -> tuple[GpuSpec, float]:
    """Half-precision operations a second, and the GPU they were taken from."""
    if spec.fp16_dense_tflops:
        return spec, spec.fp16_dense_tflops * _TERA
    references = [s for s in list_gpus() if s.fp16_dense_tflops and s.sm_count]
    similar = [s for s in references if s.architecture == spec.architecture]
    similar = [s for s in similar if s.kind == spec.kind] or similar
    processors = spec.sm_count or 0
    if not similar or not processors:
        nearest = find_gpu(REFERENCE_GPU)
        return nearest, (nearest.fp16_dense_tflops or 1.0) * _TERA
    nearest = min(similar, key=lambda s: abs((s.sm_count or 0) - processors))
    return nearest, (nearest.fp16_dense_tflops or 1.0) * _TERA * processors / (
        nearest.sm_count or 1
    )


def _half_to_full(spec: GpuSpec) -> float:
    """How many times faster half-precision products are than fp32's."""
    if spec.slug in _HALF_TO_FULL_OF:
        return _HALF_TO_FULL_OF[spec.slug]
    for source in spec.sources:
        if match := _FACTOR.search(source):
            return float(match.group(1))
        if source.startswith("fp16") and "no tensor cores" in source:
            return 2.0
    capability = spec.compute_capability
    minor = capability[1] if isinstance(capability, tuple) else None
    ratio = _HALF_TO_FULL.get((spec.architecture, minor))
    if ratio is None:
        ratio = _HALF_TO_FULL.get((spec.architecture, None), 1.0)
    return ratio


class Probe:
    """Asks a profile and remembers the answers.

    Args:
        profile: the model under its setup.
        place: where the runs are to fit.
        vary: sizes that many questions will change.
    """

    def __init__(self, profile: Profile, place: Place, *, vary: Sequence[str] = ()) -> None:
        self.profile = profile
        self._vary = tuple(vary)
        self._place = place
        self.spec = spec_of(place.get("gpu"))
        self._estimates: dict[tuple[Any, ...], Estimate] = {}
        self._works: dict[Setup, StepWork] = {}

    def estimate(self, *, max_batch: bool = False, **changes: Any) -> Estimate:
        """The estimate with some options changed."""
        setup = self.profile.setup_for(**changes)
        key = (setup, max_batch)
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self.profile.estimate(
                setup, max_batch=max_batch, vary=self._vary, common=False, **self._place
            )
            self._estimates[key] = estimate
        return estimate

    def work(self, **changes: Any) -> StepWork:
        """The work of one optimizer step with some options changed."""
        setup = self.profile.setup_for(**changes)
        step_work = self._works.get(setup)
        if step_work is None:
            gpu = self._place.get("gpu")
            step_work = self._works[setup] = self.profile.work(setup, gpu=gpu)
        return step_work

    def untimed(self, **changes: Any) -> str:
        """Why no time is shown; empty where it is."""
        return _untimed(self.profile.setup_for(**changes))

    def time_basis(self, setup: Setup) -> str:
        """What relative times of a setup are made of, or why there are none."""
        return _untimed(setup) or TIME_BASIS.format(rates=self.speed(setup).basis)

    def seconds_per_sample(self, **changes: Any) -> float:
        """Estimated time of a sample's training; only its ratios mean anything.

        They are shown unless it is :meth:`untimed`.
        """
        setup = self.profile.setup_for(**changes)
        return step_seconds(self.work(**changes), self.speed(setup)) / (
            setup.batch * setup.grad_accum
        )

    def speed(self, setup: Setup) -> Speed:
        """The speed that is taken for the GPU."""
        speed = speed_of(self.spec, tf32=setup.tf32)
        if setup.precision is not Precision.BF16 or self.spec.has_bf16:
            return speed
        emulated = "bf16 at fp32's rate, through which it is emulated there"
        return replace(speed, basis=f"{speed.basis}, {emulated}")


def _untimed(setup: Setup) -> str:
    if setup.distributed.pp > 1:
        return NOT_TIMED
    return ROLLOUTS_NOT_TIMED if setup.method.generates else ""


def spec_of(gpu: str | Sequence[str] | None) -> GpuSpec:
    """The GPU whose kernels run: the first one named, else the reference."""
    if not gpu:
        return find_gpu(REFERENCE_GPU)
    spec = resolve_gpu(gpu if isinstance(gpu, str) else gpu[0])
    return find_gpu(REFERENCE_GPU) if spec.is_memory_alone else spec
