"""What people type for a GPU beside its name: how many of it, its memory alone, who rents it out.

    8xh100, 8 x H100, h100:8, t4x2    a card and how many
    24GB                              a memory size in the place of a card
    colab, kaggle 2xT4                a service, alone or before the card

Only words are read here; which card is meant is the business of :mod:`memest.catalog.gpus`.
"""

from __future__ import annotations

import re

from memest.catalog.spec import GpuSpec, list_gpus, policy
from memest.errors import UnknownGpuError
from memest.units import GIB, MIB, format_size, parse_size

__all__ = ["cards_of_service", "given_memory", "named_memory", "split_count"]

_TIMES = r"\s*(?<![a-z])[x×*]\s*"  # "rtx" has one of its own
_COUNT_FIRST = re.compile(rf"^(\d{{1,5}}){_TIMES}(?=\S)(.+)$", re.IGNORECASE)
# a card's own name has a digit before the number of them: "RTX 6000" is not 6000 times an "RT"
_COUNT_LAST = re.compile(rf"^(.*\d.*?)(?:{_TIMES}|\s*:\s*)(\d{{1,5}})$", re.IGNORECASE)
_MEMORY = re.compile(
    r"^(\d+(?:\.\d+)?)\s*(g|gb|gib|mib)(?:\s+(?:gpu|card|vram|of vram))?$", re.IGNORECASE
)
_FILLERS = frozenset({"free", "google", "gpu", "notebook", "notebooks"})
_MOST = 1 << 16


def split_count(name: str) -> tuple[int, str] | None:
    """A number of GPUs and the rest of the name; None where the name says no number.

    Raises:
        UnknownGpuError: for no GPU at all, or more than anybody has.

    Example:
        >>> split_count("8 x H100"), split_count("h100:8"), split_count("h100")
        ((8, 'H100'), (8, 'h100'), None)
    """
    text = name.strip()
    first = _COUNT_FIRST.match(text)
    # "4090x2": what stands first is the card where no card is named by what stands last
    if first and not (first[2].strip().isdigit() and len(first[2]) < len(first[1])):
        count, card = int(first[1]), first[2]
    elif match := _COUNT_LAST.match(text):
        count, card = int(match[2]), match[1]
    else:
        return None
    if not 1 <= count <= _MOST:
        raise UnknownGpuError(
            f"--gpu {text!r} says {count} GPUs: a run has 1 to {_MOST:,}, for example 8x{card}"
        )
    return count, card.strip()


def named_memory(name: str) -> int | None:
    """The bytes of a name that is a memory size; None for all others.

    The number on a box counts as GiB: boards have binary sizes, whatever their boxes call them.

    Raises:
        UnknownGpuError: for a size that no GPU has.

    Example:
        >>> named_memory("24GB") == named_memory("24 GiB") == 24 * GIB
        True
    """
    match = _MEMORY.match(name.strip())
    if match is None:
        return None
    unit = "MiB" if match[2].lower() == "mib" else "GiB"
    size = parse_size(f"{match[1]}{unit}")
    if size < MIB:
        raise UnknownGpuError(
            f"--gpu {name!r} leaves no memory: name a card, or its memory, --gpu-memory 24GiB"
        )
    return size


def _memory_note(name: str, size: int) -> str:
    """What is said of a memory size that was given in the place of a card.

    Cards of that size have less for PyTorch, by what driver and error correction keep.
    """
    from memest.catalog.capacity import usable_bytes

    note = (
        f"{name.strip()!r} is a memory size and no card: all {format_size(size)} were taken as "
        f"PyTorch's, as --gpu-memory {_as_option(size)} does"
    )
    spec_of = {
        usable_bytes(spec)[0]: spec
        for spec in list_gpus()
        if spec.backend == "cuda" and (spec.memory_marketing_gb or 0) * GIB == size
    }
    if spec_of:
        low, high = min(spec_of), max(spec_of)
        note += f"; cards of that size leave it {format_size(low)} ({spec_of[low].slug})"
        if low < high:
            note += f" to {format_size(high)} ({spec_of[high].slug})"
        note += ": name yours"
    return note


def _as_option(size: int) -> str:
    return f"{size // GIB}GiB" if size % GIB == 0 else f"{size // MIB}MiB"


def cards_of_service(name: str) -> tuple[str, str, tuple[str, ...]] | None:
    """Service, card and what it may be, of a name that begins with who rents it out.

    Returns:
        The name of the service, the card as typed (empty where the service stands alone), and the
        cards that it may be; None where no service is named.

    Example:
        >>> cards_of_service("kaggle 2xT4")
        ('Kaggle', '2xT4', ('2xT4',))
        >>> cards_of_service("colab")
        ('Google Colab', '', ('t4',))
    """
    services = policy()["services"]
    words = re.split(r"[\s_\-/:(),]+", name.strip().lower())
    found = next((word for word in words if word in services), None)
    if found is None:
        return None
    service = services[found]
    rest = re.sub(rf"(?i)\b(?:{found}|{'|'.join(_FILLERS)})\b", " ", name).strip(" _-/:(),")
    rest = " ".join(rest.split())
    if not rest:
        return service["name"], "", tuple(service["alone"])
    cards: dict[str, list[str]] = service["cards"]
    return service["name"], rest, tuple(cards.get(rest.lower(), [rest]))


def given_memory(reference: GpuSpec, name: str, size: int) -> GpuSpec:
    """A card of which nothing but its memory is known: its kernels are another one's."""
    gib = size / GIB
    return GpuSpec(
        name="your GPU",
        aliases=(_as_option(size),),
        backend=reference.backend,
        architecture=reference.architecture,
        compute_capability=reference.compute_capability,
        sm_count=reference.sm_count,
        max_threads_per_sm=reference.max_threads_per_sm,
        memory_marketing_gb=int(gib) if gib.is_integer() else None,
        torch_total_bytes=size,
        sources=("memory as given",),
        confidence="given",
        match_note=_memory_note(name, size),
    )
