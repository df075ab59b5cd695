"""The GPUs of a question: how much of them a run can have, and what is known of them.

What is known may be a calibration profile that was measured on the card, or, where none was, on
the card nearest to it. Profiles that are found by themselves lie in the user's folder and in the
package; a file can be named too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memest.attention import flash_library_runs
from memest.errors import ConfigError, UnknownGpuError
from memest.hardware.capacity import usable_bytes
from memest.hardware.catalogue import common_gpus, find_gpu, traits
from memest.hardware.context import ContextEstimate, context_estimate, loaded_kernels_later
from memest.hardware.nvml import resolve_gpu
from memest.hardware.spec import GpuSpec
from memest.hidden.call import GpuTraits
from memest.installed import installed_version
from memest.options import read_size
from memest.places import data_folder, user_folder
from memest.setup import Attention, Setup
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration_profile import CalibrationProfile

__all__ = [
    "NO_PROFILE",
    "REFERENCE_GPU",
    "Calibration",
    "Card",
    "Cards",
    "calibration_of",
    "card_for",
    "cards_of",
    "common_cards",
    "profile_folders",
    "reference_card",
]

REFERENCE_GPU = "a100-80gb"
NO_PROFILE = "none"
"""What ``--profile`` says to take no profile, also where one would be found."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration profile, where it is from, and what to say of its choice."""

    profile: CalibrationProfile
    path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU with the software that runs on it, under the name it goes by in the answer."""

    name: str
    spec: GpuSpec
    traits: GpuTraits
    context: ContextEstimate
    usable_bytes: int
    basis: str
    calibration: Calibration | None = None


def profile_folders() -> tuple[Path, ...]:
    """Where calibration profiles are looked for: the user's own, then those of the package."""
    return user_folder() / "profiles", data_folder() / "profiles"


def calibration_of(spec: GpuSpec, asked: str | None) -> Calibration | None:
    """The calibration that applies to a card.

    Args:
        spec: the card.
        asked: a profile's file, ``none`` for none at all, None for what is found.

    Raises:
        ConfigError: the file is no profile.
    """
    if asked == NO_PROFILE:
        return None
    if asked is not None:
        from memest.profile_file import read_profile

        path = Path(asked).expanduser()
        return Calibration(read_profile(path), path)
    folders = profile_folders()
    if not any(map(_has_profiles, folders)):
        return None
    from memest.profile_file import nearest_profile, profiles_for

    choice = profiles_for(spec.name, folders)
    if choice.profile is None:
        # what is borrowed of it is said where it is applied
        choice = nearest_profile(
            folders, capability=spec.compute_capability, sm_count=spec.sm_count,
            total_bytes=spec.torch_total_bytes,
        )  # fmt: skip
    if choice.profile is None or choice.path is None:
        return None
    return Calibration(choice.profile, choice.path, choice.notes)


def _has_profiles(folder: Path) -> bool:
    """Asked first: most people have none, and then nothing of profiles is loaded."""
    try:
        return any(path.suffix == ".json" for path in folder.iterdir())
    except OSError:
        return False


def card_for(
    name: str, setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None,
    profile: str | None = None,
) -> Card:  # fmt: skip
    """The card of a name (or ``local``), its context, and what PyTorch can have of it.

    Args:
        name: as ``--gpu`` takes it.
        setup: the run.
        torch: (major, minor).
        context: that was read, in bytes; None for the table. It wins over profiles found by
            themselves.
        memory: in place of what the card has, bytes.
        profile: a calibration profile's file, ``none``, or None for what is found.
    """
    return _card(resolve_gpu(name), setup, torch, context, memory, profile)


def reference_card(
    setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None,
    profile: str | None = None,
) -> Card:  # fmt: skip
    """The card whose kernels are taken where none is named: the profile's own where one is."""
    spec = find_gpu(REFERENCE_GPU)
    if profile is None:
        # nobody named a card, so none is known better than others
        profile = NO_PROFILE
    elif profile != NO_PROFILE:
        spec = _measured_on(profile) or spec
    card = _card(spec, setup, torch, context, memory, profile)
    return card if memory is None else replace(card, name="your GPU")


def _measured_on(profile: str) -> GpuSpec | None:
    """The card that a profile was measured on, if the catalogue has it."""
    from memest.profile_file import read_profile

    for part in read_profile(Path(profile).expanduser()).process:
        with contextlib.suppress(UnknownGpuError):
            return find_gpu(part.gpu, total_bytes=part.total_bytes)
    return None


def common_cards(setup: Setup, torch: tuple[int, int], context: int | None) -> list[Card]:
    """The cards that people have, without those that cannot run what the setup names."""
    cards = [_card(spec, setup, torch, context, None, None) for spec in common_gpus()]
    if setup.attn_implementation is not Attention.FLASH_ATTENTION_2:
        return cards
    return [card for card in cards if flash_library_runs(card.traits.capability)]


def _card(
    spec: GpuSpec, setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None,
    profile: str | None,
) -> Card:  # fmt: skip
    usable, basis = usable_bytes(spec)
    name = spec.name
    if memory is not None:
        usable, basis = memory, "memory as given"
        name = f"{spec.name} with {format_size(memory)}"
    if context is not None and profile is None:
        profile = NO_PROFILE
    return Card(
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
class Cards:
    """The GPUs of a question.

    Attributes:
        main: decides kernels and, where one is named, the verdict.
        named: those that were named; empty where none was.
        torch: (major, minor) of PyTorch.
        context: that was given, in bytes; None for the table.
    """

    main: Card
    named: list[Card]
    torch: tuple[int, int]
    context: int | None


def cards_of(
    setup: Setup, gpu: str | Sequence[str] | None, gpu_memory: int | str | None,
    device_context: int | str | None, profile: str | None = None,
) -> Cards:  # fmt: skip
    """The GPUs that a question names, by the options of :func:`memest.estimate`.

    Raises:
        MemestError: an unknown GPU, a size that is none, or a profile that is none.
    """
    if device_context is not None and profile not in (None, NO_PROFILE):
        raise ConfigError(
            f"--device-context {device_context} and --profile {profile} both say what context and "
            "kernels take: drop one."
        )
    torch_version = setup.software.torch or installed_version("torch") or (2, 13)
    context = None if device_context is None else read_size("device_context", device_context)
    names = [gpu] if isinstance(gpu, str) else list(gpu or ())
    memory = None if gpu_memory is None else read_size("gpu_memory", gpu_memory)
    named = [card_for(name, setup, torch_version, context, memory, profile) for name in names]
    if not named and memory is not None:
        named = [reference_card(setup, torch_version, context, memory, profile)]
    main = named[0] if named else reference_card(setup, torch_version, context, None, profile)
    return Cards(main=main, named=named, torch=torch_version, context=context)
