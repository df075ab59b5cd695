"""Find a GPU by the name people give it.

    find_gpu("a100-40gb")            a slug
    find_gpu("NVIDIA GeForce RTX 3060", total_bytes=12622168064)   what a driver prints
    find_gpu("3060")                 the common variant; ``match_note`` says which was taken
    find_gpu("8xh100"), find_gpu("24GB"), find_gpu("colab")   see :mod:`memest.catalog.gpu_words`

Whole names are compared, never parts of them: a substring search takes an A10 for an A100 and an
L4 for an L40. A name that is not in the catalogue is an error with suggestions; a similar card is
never taken instead.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterable
from typing import Any

from memest.catalog.capacity import usable_bytes
from memest.catalog.gpu_words import cards_of_service, given_memory, named_memory, split_count
from memest.catalog.spec import GpuSpec, list_gpus, policy
from memest.errors import ConfigError, UnknownGpuError, closest
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "COMMON_GPUS",
    "REFERENCE_GPU",
    "GpuSpec",
    "cards_of_word",
    "common_gpus",
    "find_gpu",
    "gpu_names",
    "list_gpus",
    "normalise",
    "plain_name",
    "traits",
    "usable_bytes",
]

COMMON_GPUS: tuple[str, ...] = tuple(policy()["common"])
"""Cards that people rent or own, as slugs, from small to large; for tables of "does it fit"."""

REFERENCE_GPU = "a100-80gb"
"""The card whose kernels are taken where none is named."""

_VENDOR_WORDS = ("nvidia", "geforce", "(r)", "(tm)")
# dropped only when the first comparison found nothing: older drivers and shops print them
_BRAND_WORDS = ("tesla", "instinct", "amd", "gpu")
_MEMORY_SUFFIX = re.compile(
    r"^(?P<base>.*?\S)(?:[\s_\-(]*?(?P<size>\d+)\s*(?:g|gb|gib)\)?|[\s_\-]+(?P<bare>\d+))$",
    re.IGNORECASE,
)

_LONGEST_NAME = 128
"""Longer texts are no names of cards, and are not searched for sizes and counts."""


def normalise(name: str, *, drop: tuple[str, ...] = ()) -> str:
    """Reduce a name to what identifies the card.

    Example:
        >>> normalise("NVIDIA GeForce RTX(TM) 3060 Ti")
        'rtx3060ti'
    """
    text = name.lower()
    for word in (*_VENDOR_WORDS, *drop):
        text = text.replace(word, "")
    return re.sub(r"[^a-z0-9]", "", text)


@functools.cache
def _keys(drop: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Normalised name or alias to rows; an alias beats the names that several rows share."""
    by_alias: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for row, spec in enumerate(list_gpus()):
        by_name.setdefault(normalise(spec.name, drop=drop), []).append(row)
        for alias in spec.aliases:
            alias_rows = by_alias.setdefault(normalise(alias, drop=drop), [])
            if row not in alias_rows:
                alias_rows.append(row)
    return {key: tuple(rows) for key, rows in {**by_name, **by_alias}.items()}


def _variants(key: str, spec: GpuSpec | None, drop: tuple[str, ...]) -> tuple[GpuSpec, ...]:
    """Cards that share the name ``key`` and differ in memory."""
    gpus = list_gpus()
    keys = _keys(drop)
    rows: set[int] = set()
    for size in {other.memory_marketing_gb for other in gpus}:
        for spelling in (f"{key}{size}g", f"{key}{size}gb"):
            # the card's own size: "a10" + "040gb" would otherwise make an A10 of an A100
            rows |= {row for row in keys.get(spelling, ()) if gpus[row].memory_marketing_gb == size}
    if spec is not None:
        rows |= {row for row, other in enumerate(gpus) if other.name == spec.name}
        rows.add(gpus.index(spec))
    return tuple(gpus[row] for row in sorted(rows))


def _closest_by_total(specs: tuple[GpuSpec, ...], total_bytes: int) -> GpuSpec:
    def distance(spec: GpuSpec) -> int:
        totals = [size for size in (spec.torch_total_bytes, spec.nvml_total_bytes) if size]
        totals = totals or [(spec.memory_marketing_gb or 0) * 10**9]
        return min(abs(size - total_bytes) for size in totals)

    return min(specs, key=distance)


def _sizes(specs: tuple[GpuSpec, ...]) -> str:
    return ", ".join(f"{spec.slug} ({spec.memory_marketing_gb} GB)" for spec in specs)


def _match(name: str, total_bytes: int | None, drop: tuple[str, ...]) -> GpuSpec | None:
    key = normalise(name, drop=drop)
    rows = _keys(drop).get(key, ())
    if len(rows) > 1 and total_bytes is None:
        specs = tuple(list_gpus()[row] for row in rows)
        raise UnknownGpuError(
            f"{name!r} is the name of several cards: say which, {_sizes(specs)}, or give "
            "--gpu-memory, for example --gpu-memory 32GiB"
        )
    spec = list_gpus()[rows[0]] if rows else None
    variants = _variants(key, spec, drop)
    if not variants:
        return None
    if total_bytes is not None:
        return _closest_by_total(variants, total_bytes)
    families = set(policy()["family_names"].values())
    if spec is None:
        default = [other for other in variants if other.name in families] or list(variants)
        if len(default) > 1:
            raise UnknownGpuError(
                f"{name!r} comes with several memory sizes: say which, {_sizes(variants)}"
            )
        spec = default[0]
    others = tuple(other for other in variants if other != spec)
    names_size = key.endswith((f"{spec.memory_marketing_gb}g", f"{spec.memory_marketing_gb}gb"))
    if (others and not names_size) or key in policy()["family_names"]:
        note = f"{name!r} was taken as {spec.name} with {spec.memory_marketing_gb} GB"
        if others:
            note += f"; other sizes: {_sizes(others)}"
        spec = dataclasses.replace(spec, match_note=note)
    return spec


def _match_with_size(name: str, drop: tuple[str, ...]) -> GpuSpec | None:
    """A name with a memory size that no alias spells out: ``rtx 4090 24gb``, ``a100 80``."""
    match = _MEMORY_SUFFIX.match(name.strip())
    if match is None:
        return None
    size = int(match["size"] or match["bare"])
    key = normalise(match["base"], drop=drop)
    rows = _keys(drop).get(key, ())
    variants = _variants(key, list_gpus()[rows[0]] if rows else None, drop)
    if not variants:
        return None
    fitting = [spec for spec in variants if spec.memory_marketing_gb == size]
    if fitting:
        return fitting[0]
    raise UnknownGpuError(
        f"no {match['base'].strip()} with {size} GB in the catalogue, only {_sizes(variants)}: "
        f"for another board give its size, --gpu-memory {size}GiB"
    )


def find_gpu(name: str, *, total_bytes: int | None = None) -> GpuSpec:
    """Look a card up by name, alias or family name, or by what else people type for one.

    Args:
        name: what a driver prints, a slug or a usual short form; case, blanks, dashes and the
            words NVIDIA and GeForce do not matter. A number of cards (``8xh100``) may stand with
            it, see :func:`plain_name`; a memory size alone (``24GB``) is a card of which nothing
            else is known; services (``colab``) are known by the cards they rent out.
        total_bytes: memory read or given in bytes; picks between cards of one name.

    Returns:
        The card. ``match_note`` is set where the name left a choice.

    Raises:
        UnknownGpuError: if no card has that name, several do and none is the common one, or it is
            the names of several.

    Example:
        >>> find_gpu("RTX 3060 12GB").name
        'NVIDIA GeForce RTX 3060'
        >>> find_gpu("a100").memory_marketing_gb
        80
    """
    if len(cards := cards_of_word(name)) > 1:
        flags = " ".join(f"--gpu {shlex.quote(card)}" for card in cards)
        raise UnknownGpuError(
            f"{name!r} names {len(cards)} cards, and one is asked for here; what takes several has "
            f"a --gpu for each, {flags}"
        )
    return _read(name, total_bytes)[0]


def gpu_names(gpu: Any) -> list[str]:
    """The names of one GPU or of several, as a question has them; none for None.

    Raises:
        ConfigError: something else than names.

    Example:
        >>> gpu_names("h100"), gpu_names(["h100", "l4"]), gpu_names(None)
        (['h100'], ['h100', 'l4'], [])
    """
    names = [gpu] if isinstance(gpu, str) or not isinstance(gpu, Iterable) else list(gpu)
    names = [] if gpu in (None, "") else names
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"gpu {name!r} is no name of a card: write for example gpu='h100', and how many as "
                "num_gpus=8."
            )
    return names


def cards_of_word(name: str) -> tuple[str, ...]:
    """The names of several cards that stand in one word; the word itself where it is none such.

    Names may be parted by anything, or by a blank: the fewest that use all words up, of which
    each is known. A size or a service beside them is a card's, not a card of its own.

    Example:
        >>> cards_of_word("rtx 4090 a100 80gb"), cards_of_word("t4,l4"), cards_of_word("l4 80gb")
        (('rtx 4090', 'a100 80gb'), ('t4', 'l4'), ('l4 80gb',))
    """
    if len(name) > _LONGEST_NAME or _is_known(name):
        return (name,)
    cards: list[str] = []
    for text in filter(None, map(str.strip, _BETWEEN.split(name))):
        words = text.split()
        fewest: list[tuple[str, ...] | None] = [()]
        for end in range(1, len(words) + 1):
            ways = [
                (*before, part)
                for start, before in enumerate(fewest)
                if before is not None
                and _is_known(part := " ".join(words[start:end]))
                and (len(words) == end - start or not _says_more(part))
            ]
            fewest.append(min(ways, key=len, default=None))
        found = fewest[-1]
        if found is None:
            return (name,)
        cards += found
    return tuple(cards) or (name,)


_BETWEEN = re.compile(r"[,;|/+&]|\b(?:and|or|vs|versus)\b\.?", re.IGNORECASE)


def _says_more(part: str) -> bool:
    """Whether a word goes with the name of a card: its memory, or who rents it out."""
    service = cards_of_service(part)
    return named_memory(part) is not None or (service is not None and not service[1])


def _is_known(name: str) -> bool:
    try:
        _read(name, None)
    except UnknownGpuError:
        return False
    return True


def plain_name(name: str) -> tuple[str, int | None]:
    """A name without the number of cards that stands with it, and that number.

    Raises:
        UnknownGpuError: as for :func:`find_gpu`.

    Example:
        >>> plain_name("8xh100"), plain_name("kaggle 2xT4"), plain_name("rtx 4090")
        (('h100', 8), ('T4', 2), ('rtx 4090', None))
    """
    _, plain, count = _read(name, None)
    return plain, count


@functools.lru_cache(maxsize=256)
def _read(name: str, total_bytes: int | None) -> tuple[GpuSpec, str, int | None]:
    """The card of a name, the name without the number of cards, and that number."""
    if len(name) > _LONGEST_NAME:
        raise _unknown(f"{name[:_LONGEST_NAME]} ...")
    # whole names first: "RTX 3060" is no number of anything
    for drop in ((), _BRAND_WORDS):
        spec = _match(name, total_bytes, drop) or _match_with_size(name, drop)
        if spec is not None:
            return spec, name, None
    size = named_memory(name)
    if size is not None:
        return given_memory(find_gpu(REFERENCE_GPU), name, size), name, None
    service = cards_of_service(name)
    if service is not None:
        return _of_service(name, *service)
    counted = split_count(name)
    if counted is None:
        raise _unknown(name)
    count, card = counted
    spec, plain, again = _read(card, total_bytes)
    if ":" in name and _has_size(card, count):
        raise UnknownGpuError(
            f"--gpu {name!r} may be {count} GPUs or a card of {count} GB: write "
            f"{count}x{spec.slug}, or {card} {count}GB"
        )
    if again is not None:
        raise UnknownGpuError(
            f"--gpu {name!r} says two numbers of GPUs, {count} and {again}: write one, for example "
            f"{count}x{spec.slug}"
        )
    return spec, plain, count


def _has_size(card: str, size: int) -> bool:
    """Whether there is a card of that name with so many GB."""
    try:
        return _match_with_size(f"{card} {size}", ()) is not None
    except UnknownGpuError:
        return False


def _of_service(
    name: str, service: str, card: str, choices: tuple[str, ...]
) -> tuple[GpuSpec, str, int | None]:
    """The card that a service rents out."""
    if len(choices) > 1:
        raise UnknownGpuError(
            f"--gpu {name!r}: {service} rents out several: say which, "
            f"{' or '.join(f'--gpu {choice}' for choice in choices)}, or give its memory, "
            "--gpu-memory"
        )
    spec, plain, count = _read(choices[0], None)
    if card:
        return spec, plain, count
    note = (
        f"{name!r} was taken as the free GPU of {service}, {spec.name} with "
        f"{spec.memory_marketing_gb} GB: name any other card of it"
    )
    return dataclasses.replace(spec, match_note=note), name, count


def _unknown(name: str) -> UnknownGpuError:
    spellings = [text for spec in list_gpus() for text in (*spec.aliases, spec.name)]
    matches = closest(name, spellings)
    hint = f"; nearest names: {', '.join(matches)}" if matches else ""
    return UnknownGpuError(
        f"no GPU is called {name!r}{hint}. `memest gpus` lists all; for a card that is not in the "
        "list give its memory instead, for example --gpu-memory 24GiB"
    )


def common_gpus() -> tuple[GpuSpec, ...]:
    """The cards of :data:`COMMON_GPUS`."""
    return tuple(find_gpu(name) for name in COMMON_GPUS)


def traits(spec: GpuSpec, torch: tuple[int, int] = (2, 13)) -> GpuTraits:
    """What the kernel rules ask about a card.

    A CUDA card whose SM count is not public takes the largest count of its compute capability:
    scratch buffers grow with it, so the estimate stays on the safe side.

    Args:
        spec: the card.
        torch: (major, minor) of PyTorch in the run.

    Raises:
        ConfigError: for a card the rules do not cover (ROCm, or nothing known about it).
    """
    capability = spec.compute_capability
    if not isinstance(capability, tuple):
        raise ConfigError(
            f"{spec.name} ({capability or 'unknown capability'}): the kernel rules cover CUDA "
            "cards of the catalogue only; give the memory alone, for example --gpu-memory 64GiB"
        )
    peers = [other for other in list_gpus() if other.compute_capability == capability]
    sm_count = spec.sm_count or max((other.sm_count or 0 for other in peers), default=0)
    threads = spec.max_threads_per_sm or max(
        (other.max_threads_per_sm or 0 for other in peers), default=0
    )
    if not sm_count or not threads:
        raise ConfigError(
            f"{spec.name}: no card of compute capability {capability[0]}.{capability[1]} is in the "
            "catalogue; name a similar card with --gpu and its memory with --gpu-memory"
        )
    return GpuTraits(
        capability=capability, sm_count=sm_count, max_threads_per_sm=threads, torch=torch
    )
