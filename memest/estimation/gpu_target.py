"""The GPUs of a question: how much of them a run can have, and what is known of them.

What is known may be a calibration profile that was measured on the GPU, or, where none was, on
the GPU nearest to it. Profiles that are found by themselves lie in the user's folder and in the
package; a file can be named too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memest.catalog.capacity import usable_bytes
from memest.catalog.cuda_context import ContextEstimate, context_estimate, loaded_kernels_later
from memest.catalog.gpus import common_gpus, find_gpu, traits
from memest.catalog.nvml import resolve_gpu
from memest.catalog.spec import GpuSpec
from memest.config.installed import installed_version
from memest.config.options import read_size
from memest.config.setup import Attention, Setup
from memest.errors import ConfigError, UnknownGpuError
from memest.files.folders import data_folder, user_folder
from memest.units import format_size
from memest.workspaces.attention_choice import flash_library_runs
from memest.workspaces.operator_call import GpuTraits

if TYPE_CHECKING:
    from memest.estimation.calibration import Calibration

__all__ = [
    "NO_CALIBRATION",
    "REFERENCE_GPU",
    "ChosenCalibration",
    "TargetGpu",
    "TargetGpus",
    "calibration_folders",
    "calibration_of",
    "common_target_gpus",
    "reference_target_gpu",
    "target_gpu",
    "target_gpus",
]

REFERENCE_GPU = "a100-80gb"
NO_CALIBRATION = "none"
"""What ``--calibration`` says to take no profile, also where one would be found."""


@dataclass(frozen=True, slots=True)
class ChosenCalibration:
    """A calibration, where it is from, and what to say of its choice."""

    calibration: Calibration
    path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpu:
    """A GPU with the software that runs on it, under the name it goes by in the answer."""

    name: str
    spec: GpuSpec
    traits: GpuTraits
    context: ContextEstimate
    usable_bytes: int
    basis: str
    calibration: ChosenCalibration | None = None


def calibration_folders() -> tuple[Path, ...]:
    """Where calibrations are looked for: the user's own, then those of the package."""
    return user_folder() / "profiles", data_folder() / "profiles"


def calibration_of(spec: GpuSpec, asked: str | None) -> ChosenCalibration | None:
    """The calibration that applies to a GPU.

    Args:
        spec: the GPU.
        asked: a calibration's file, ``none`` for none at all, None for what is found.

    Raises:
        ConfigError: the file is no calibration.
    """
    if asked == NO_CALIBRATION:
        return None
    if asked is not None:
        from memest.estimation.calibration_files import read_calibration

        path = Path(asked).expanduser()
        return ChosenCalibration(read_calibration(path), path)
    folders = calibration_folders()
    if not any(map(_has_calibrations, folders)):
        return None
    from memest.estimation.calibration_files import calibrations_for, nearest_calibration

    choice = calibrations_for(spec.name, folders)
    if choice.calibration is None:
        # what is borrowed of it is said where it is applied
        choice = nearest_calibration(
            folders,
            capability=spec.compute_capability,
            sm_count=spec.sm_count,
            total_bytes=spec.torch_total_bytes,
        )
    if choice.calibration is None or choice.path is None:
        return None
    return ChosenCalibration(choice.calibration, choice.path, choice.notes)


def _has_calibrations(folder: Path) -> bool:
    """Asked first: most people have none, and then nothing of calibrations is loaded."""
    try:
        return any(path.suffix == ".json" for path in folder.iterdir())
    except OSError:
        return False


def target_gpu(
    name: str,
    setup: Setup,
    torch: tuple[int, int],
    context: int | None,
    memory: int | None,
    profile: str | None = None,
) -> TargetGpu:
    """The GPU of a name (or ``local``), its context, and what PyTorch can have of it.

    Args:
        name: as ``--gpu`` takes it.
        setup: the run.
        torch: (major, minor).
        context: that was read, in bytes; None for the table. It wins over calibrations found by
            themselves.
        memory: in place of what the GPU has, bytes.
        profile: a calibration's file, ``none``, or None for what is found.
    """
    return _target_of(resolve_gpu(name), setup, torch, context, memory, profile)


def reference_target_gpu(
    setup: Setup,
    torch: tuple[int, int],
    context: int | None,
    memory: int | None,
    profile: str | None = None,
) -> TargetGpu:
    """The GPU whose kernels are taken where none is named: the calibration's own where one is."""
    spec = find_gpu(REFERENCE_GPU)
    if profile is None:
        # nobody named a GPU, so none is known better than others
        profile = NO_CALIBRATION
    elif profile != NO_CALIBRATION:
        spec = _measured_on(profile) or spec
    target = _target_of(spec, setup, torch, context, memory, profile)
    return target if memory is None else replace(target, name="your GPU")


def _measured_on(profile: str) -> GpuSpec | None:
    """The GPU that a calibration was measured on, if the catalogue has it."""
    from memest.estimation.calibration_files import read_calibration

    for part in read_calibration(Path(profile).expanduser()).process:
        with contextlib.suppress(UnknownGpuError):
            return find_gpu(part.gpu, total_bytes=part.total_bytes)
    return None


def common_target_gpus(
    setup: Setup, torch: tuple[int, int], context: int | None
) -> list[TargetGpu]:
    """The GPUs that people have, without those that cannot run what the setup names."""
    targets = [_target_of(spec, setup, torch, context, None, None) for spec in common_gpus()]
    if setup.attn_implementation is not Attention.FLASH_ATTENTION_2:
        return targets
    return [target for target in targets if flash_library_runs(target.traits.capability)]


def _target_of(
    spec: GpuSpec,
    setup: Setup,
    torch: tuple[int, int],
    context: int | None,
    memory: int | None,
    profile: str | None,
) -> TargetGpu:
    usable, basis = usable_bytes(spec)
    name = spec.name
    if memory is not None:
        usable, basis = memory, "memory as given"
        name = f"{spec.name} with {format_size(memory)}"
    if context is not None and profile is None:
        profile = NO_CALIBRATION
    return TargetGpu(
        name=name,
        spec=spec,
        traits=traits(spec, torch),
        context=_context(spec, setup, torch, context),
        usable_bytes=usable,
        basis=basis,
        calibration=calibration_of(spec, profile),
    )


def _context(
    spec: GpuSpec, setup: Setup, torch: tuple[int, int], given: int | None
) -> ContextEstimate:
    if given is None:
        return context_estimate(spec, torch, setup.software.cuda)
    later = loaded_kernels_later(torch, setup.software.cuda)
    return ContextEstimate(
        expected_bytes=given + later.expected_bytes,
        low_bytes=given + later.low_bytes,
        high_bytes=given + later.high_bytes,
        basis=f"context as given, {later.basis}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpus:
    """The GPUs of a question.

    Attributes:
        main: decides kernels and, where one is named, the verdict.
        named: those that were named; empty where none was.
        torch: (major, minor) of PyTorch.
        context: that was given, in bytes; None for the table.
    """

    main: TargetGpu
    named: list[TargetGpu]
    torch: tuple[int, int]
    context: int | None


def target_gpus(
    setup: Setup,
    gpu: str | Sequence[str] | None,
    gpu_memory: int | str | None,
    device_context: int | str | None,
    profile: str | None = None,
) -> TargetGpus:
    """The GPUs that a question names, by the options of :func:`memest.estimate`.

    Raises:
        MemestError: an unknown GPU, a size that is none, or a profile that is none.
    """
    if device_context is not None and profile not in (None, NO_CALIBRATION):
        raise ConfigError(
            f"--device-context {device_context} and --calibration {profile} both say what context "
            "and kernels take: drop one."
        )
    torch_version = setup.software.torch or installed_version("torch") or (2, 13)
    context = None if device_context is None else read_size("device_context", device_context)
    names = [gpu] if isinstance(gpu, str) else list(gpu or ())
    memory = None if gpu_memory is None else read_size("gpu_memory", gpu_memory)
    named = [target_gpu(name, setup, torch_version, context, memory, profile) for name in names]
    if not named and memory is not None:
        named = [reference_target_gpu(setup, torch_version, context, memory, profile)]
    main = named[0] if named else reference_target_gpu(setup, torch_version, context, None, profile)
    return TargetGpus(main=main, named=named, torch=torch_version, context=context)
