"""The GPUs of a question: how much of them a run can have, and what is known of them.

What is known may be a calibration that was measured on the GPU, or, where none was, on
the GPU nearest to it. Profiles that are found by themselves lie in the user's folder and in the
package; a file can be named too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from memest.catalog.capacity import usable_bytes
from memest.catalog.cuda_context import ContextEstimate, context_estimate, loaded_kernels_later
from memest.catalog.gpu_counts import split_gpu_counts
from memest.catalog.gpus import (
    REFERENCE_GPU,
    common_gpus,
    find_gpu,
    gpu_names,
    plain_name,
    traits,
)
from memest.catalog.nvml import resolve_gpu
from memest.catalog.spec import GpuSpec
from memest.config.installed import installed_version
from memest.config.option_table import PLACE
from memest.config.options import argument, find_option, read_size
from memest.config.setup import Setup
from memest.errors import ConfigError, UnfitGpuError, UnknownGpuError
from memest.files.folders import data_folder, user_folder
from memest.units import format_size
from memest.workspaces.operator_call import GpuTraits

if TYPE_CHECKING:
    from memest.estimation.calibration_files import ChosenCalibration

__all__ = [
    "NO_CALIBRATION",
    "Place",
    "TargetGpu",
    "TargetGpus",
    "calibration_folders",
    "calibration_of",
    "common_target_gpus",
    "split_place",
    "target_gpu",
    "target_gpus",
]

NO_CALIBRATION = "none"
"""What ``--calibration`` says to take no profile, also where one would be found."""


class Place(TypedDict, total=False):
    """Where a run is to fit, as :func:`memest.estimate` takes it; what is left out is not given.

    Attributes:
        gpu: name of a GPU, or several; the first one decides the verdict.
        gpu_memory: bytes it has.
        device_context: CUDA context that was read on it.
        calibration: file of a calibration, or ``none``.
    """

    gpu: str | Sequence[str] | None
    gpu_memory: int | str | None
    device_context: int | str | None
    calibration: str | None


def split_place(options: Mapping[str, Any]) -> tuple[Place, dict[str, Any]]:
    """Options of an estimate as where the run is to fit, and those of its setup.

    Raises:
        ConfigError: one of the place is given by two names, with different values.
    """
    rest = split_gpu_counts(options)
    values: Any = {
        name: argument(name, None, rest)
        for name in PLACE
        if any(keyword in rest for keyword in find_option(name).keywords)
    }
    place: Place = values
    return place, rest


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

    @contextlib.contextmanager
    def naming_itself(self) -> Iterator[None]:
        """Within it, what this GPU cannot run is refused under its name.

        Raises:
            UnfitGpuError: as it was raised, the name in front.
        """
        try:
            yield
        except UnfitGpuError as error:
            if self.name in str(error):
                raise
            raise UnfitGpuError(f"{self.name}: {error}", error.why) from error


def calibration_folders() -> tuple[Path, ...]:
    """Where calibrations are looked for: the user's own, then those of the package."""
    return user_folder() / "profiles", data_folder() / "profiles"


def calibration_of(spec: GpuSpec, profile: str | None) -> ChosenCalibration | None:
    """The calibration that applies to a GPU.

    Args:
        spec: the GPU.
        profile: a calibration's file, ``none`` for none at all, None for what is found.

    Raises:
        ConfigError: the file is no calibration.
    """
    if profile == NO_CALIBRATION or (profile is None and spec.is_memory_alone):
        return None
    if profile is not None:
        from memest.estimation.calibration_files import ChosenCalibration, read_calibration

        path = Path(profile).expanduser()
        return ChosenCalibration(read_calibration(path), path)
    folders = calibration_folders()
    if not any(map(_has_calibrations, folders)):
        return None
    from memest.estimation.calibration_files import calibrations_for

    # what is borrowed of another GPU is said where it is applied
    like = spec.compute_capability, spec.sm_count, spec.torch_total_bytes
    return calibrations_for(spec.name, folders, like)


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
    return _target_of(resolve_gpu(name), setup.software.cuda, torch, context, memory, profile)


def _reference(profile: str | None) -> GpuSpec:
    """The GPU whose kernels are taken where none is named: the calibration's own where one is."""
    if profile is not None and profile != NO_CALIBRATION:
        from memest.estimation.calibration_files import read_calibration

        for part in read_calibration(Path(profile).expanduser()).process:
            with contextlib.suppress(UnknownGpuError):
                return find_gpu(part.gpu, total_bytes=part.total_bytes)
    return find_gpu(REFERENCE_GPU)


def common_target_gpus(
    cuda: tuple[int, int] | None, torch: tuple[int, int], context: int | None
) -> list[TargetGpu]:
    """The GPUs that people have."""
    return [_target_of(spec, cuda, torch, context, None, None) for spec in common_gpus()]


def _target_of(
    spec: GpuSpec,
    cuda: tuple[int, int] | None,
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
        context=_context(spec, cuda, torch, context),
        traits=traits(spec, torch),
        usable_bytes=usable,
        basis=basis,
        calibration=calibration_of(spec, profile),
    )


def _context(
    spec: GpuSpec, cuda: tuple[int, int] | None, torch: tuple[int, int], context_bytes: int | None
) -> ContextEstimate:
    if context_bytes is None:
        return context_estimate(spec, torch, cuda)
    kernels = loaded_kernels_later(torch, cuda)
    return ContextEstimate(
        expected_bytes=context_bytes + kernels.expected_bytes,
        low_bytes=context_bytes + kernels.low_bytes,
        high_bytes=context_bytes + kernels.high_bytes,
        basis=f"context as given, {kernels.basis}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpus:
    """The GPUs of a question.

    Attributes:
        main: decides kernels and, where one is named, the verdict.
        named_gpus: the GPUs that the user names; empty where none is.
        torch: (major, minor) of PyTorch.
        context: that was given, in bytes; None for the table.
    """

    main: TargetGpu
    named_gpus: list[TargetGpu]
    torch: tuple[int, int]
    context: int | None


def target_gpus(setup: Setup, **place: Unpack[Place]) -> TargetGpus:
    """The GPUs that a question names.

    Raises:
        MemestError: an unknown GPU, a size that is none, or a profile that is none.
    """
    device_context, profile = place.get("device_context"), place.get("calibration")
    if device_context is not None and profile not in (None, NO_CALIBRATION):
        raise ConfigError(
            f"--device-context {device_context} and --calibration {profile} both say what context "
            "and kernels take: drop one."
        )
    torch = setup.software.torch or installed_version("torch") or (2, 13)
    context = None if device_context is None else read_size("device_context", device_context)
    gpu, size = place.get("gpu"), place.get("gpu_memory")
    names = gpu_names(gpu)
    memory = None if size is None else read_size("gpu_memory", size)
    for name in names:
        if not name.strip().lower().startswith("local"):
            _check_count(name, setup)
    specs = [resolve_gpu(name) for name in names] or [_reference(profile)]
    if memory is not None and any(spec.is_memory_alone for spec in specs):
        raise ConfigError(
            f"--gpu {', '.join(names)} and --gpu-memory {size} both say how much memory there is: "
            "drop one."
        )
    if not names and profile is None:
        profile = NO_CALIBRATION  # nobody named a GPU, so none is known better than others
    if not names and memory is not None and profile == NO_CALIBRATION:
        specs = [replace(specs[0], confidence="given")]  # any card may have that memory
    targets = [
        _target_of(spec, setup.software.cuda, torch, context, memory, profile) for spec in specs
    ]
    if not names and memory is not None:
        targets = [replace(targets[0], name="your GPU")]
    if len(targets) > 1:
        targets = [
            replace(target, name=f"{target.spec.name} ({target.spec.slug})")
            if target.spec.is_memory_alone
            else target
            for target in targets
        ]
    named_gpus = targets if names or memory is not None else []
    return TargetGpus(main=targets[0], named_gpus=named_gpus, torch=torch, context=context)


def _check_count(name: str, setup: Setup) -> None:
    """Refuse a name that says another number of GPUs than the run has.

    Raises:
        ConfigError: it does.
    """
    has = setup.distributed.num_gpus
    try:
        plain, count = plain_name(name)
    except UnknownGpuError:
        return  # what is wrong with it is said where it is looked up
    if count not in (None, has):
        raise ConfigError(
            f"--gpu {name} says {count} GPUs and the setup has {has}: name the card alone, "
            f"{plain}, and give the number to the setup."
        )
