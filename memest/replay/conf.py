"""Options of the caching allocator, and the reader of ``PYTORCH_CUDA_ALLOC_CONF``.

Source: ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDAAllocatorConfig.h`` of torch 2.13; the
limits were tried on the parser inside the shipped ``libc10``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError, closest
from memest.replay.sizes import DEFAULT_LARGE_SEGMENT_SIZE, NO_DIVISIONS, NUM_DIVISIONS
from memest.units import MIB

__all__ = ["AllocatorConf", "parse_alloc_conf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConf:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` can change about where a block goes.

    Attributes:
        expandable_segments: one growing segment per pool and stream instead of many fixed ones
            (off by default in torch 2.1 to 2.13).
        max_split_size: blocks of at least this many bytes are never split; None for no bound.
        roundup_power2_divisions: 16 numbers, see :func:`memest.replay.sizes.round_size`.
        garbage_collection_threshold: share of the limit above which unused blocks are given back
            (0 is off; it has no effect without a limit).
        per_process_memory_fraction: share of the device's memory the allocator may take; 1 for
            no limit of its own.
        large_segment_size: segment of the large pool, and page of an expandable one.
        max_non_split_rounding: how much larger than the request an unsplittable block may be;
            None for ``large_segment_size``.

    Raises:
        ConfigError: for a value that torch refuses.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    roundup_power2_divisions: tuple[int, ...] = NO_DIVISIONS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_size: int = DEFAULT_LARGE_SEGMENT_SIZE
    max_non_split_rounding: int | None = None

    def __post_init__(self) -> None:
        if self.large_segment_size <= 10 * MIB:
            raise _refusal("large_segment_size_mb", self.large_segment_size, "more than 10 MiB")
        if self.large_segment_size % (2 * MIB):
            # A page of the driver is 2 MiB: an expandable segment cannot map half of one.
            raise _refusal("large_segment_size_mb", self.large_segment_size, "a multiple of 2 MiB")
        for name, value in (
            ("max_split_size_mb", self.max_split_size),
            ("max_non_split_rounding_mb", self.max_non_split_rounding),
        ):
            if value is not None and value < self.large_segment_size:
                raise _refusal(
                    name, value, f"{self.large_segment_size // MIB} MiB (a large segment) or more"
                )
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise _refusal(
                "garbage_collection_threshold",
                self.garbage_collection_threshold,
                "between 0 and 1, both excluded (0 here means off)",
            )
        if not 0.0 < self.per_process_memory_fraction <= 1.0:
            raise _refusal(
                "per_process_memory_fraction",
                self.per_process_memory_fraction,
                "above 0 and at most 1 (1 means no limit)",
            )
        divisions = self.roundup_power2_divisions
        if len(divisions) != NUM_DIVISIONS or any(d < 0 or d & (d - 1) for d in divisions):
            raise _refusal(
                "roundup_power2_divisions",
                list(divisions),
                f"{NUM_DIVISIONS} powers of two (0 means off)",
            )

    @property
    def non_split_rounding(self) -> int:
        """The slack an unsplittable block may have, in bytes."""
        if self.max_non_split_rounding is None:
            return self.large_segment_size
        return self.max_non_split_rounding


_NO_EFFECT = frozenset(
    {
        # They change host memory, locking or the moment of an error, never where a block goes.
        "graph_capture_record_stream_reuse",
        "pinned_max_cached_size_mb",
        "pinned_max_power2_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_TOKEN = re.compile(r"[\[\],:]|[^\[\],:]+")


def parse_alloc_conf(text: str) -> AllocatorConf:
    """Read the value of ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``).

    Args:
        text: comma-separated ``key:value`` pairs; empty means the defaults.

    Returns:
        The options that decide where blocks go; those that do not are read and left out.

    Raises:
        ConfigError: for what torch refuses, and for ``backend:cudaMallocAsync``, whose memory is
            kept by the driver.

    Example:
        >>> parse_alloc_conf("expandable_segments:True").expandable_segments
        True
        >>> parse_alloc_conf("roundup_power2_divisions:[1:2,>:4]").roundup_power2_divisions[:3]
        (2, 4, 4)
    """
    options: dict[str, Any] = {}
    tokens = _TOKEN.findall(re.sub(r"\s+", "", text))
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if key not in _READERS and key not in _NO_EFFECT:
            raise _unknown_key(key)
        if at + 1 >= len(tokens) or tokens[at + 1] != ":":
            raise ConfigError(
                f"allocator option {key!r} has no value in {text!r}: write {key}:VALUE, with a "
                "comma between options"
            )
        value, at = _take_value(tokens, at + 2)
        if at < len(tokens):
            if tokens[at] != ",":
                raise ConfigError(
                    f"allocator options {text!r}: found {tokens[at]!r} after the value of {key!r}, "
                    "expected a comma"
                )
            at += 1
        if key in _READERS:
            name, read = _READERS[key]
            setting = read(key, value)
            if name:
                options[name] = setting
    return AllocatorConf(**options)


def _take_value(tokens: list[str], at: int) -> tuple[list[str], int]:
    """The tokens of one value (a word, or everything in brackets) and where it ends."""
    if at >= len(tokens) or tokens[at] != "[":
        return tokens[at : at + 1], at + 1
    end = at
    while end < len(tokens) and tokens[end] != "]":
        end += 1
    if end == len(tokens):
        raise ConfigError(f"allocator options: no ']' after {''.join(tokens[at:])!r}; add one")
    return tokens[at : end + 1], end + 1


def _refusal(key: str, value: object, legal: str) -> ConfigError:
    return ConfigError(f"allocator option {key}: {value!r} is not allowed; it must be {legal}")


def _unknown_key(key: str) -> ConfigError:
    legal = sorted({*_READERS, *_NO_EFFECT})
    near = closest(key, legal)
    others = [name for name in legal if name not in near and name in _READERS]
    return ConfigError(
        f"{key!r} is not an option of the CUDA caching allocator; legal options: "
        f"{', '.join([*near, *others])}"
    )


def _word(key: str, value: list[str], legal: str) -> str:
    if len(value) != 1 or value[0] in "[],:":
        raise _refusal(key, "".join(value), legal)
    return value[0]


def _read_bool(key: str, value: list[str]) -> bool:
    word = _word(key, value, "True or False")
    if word not in ("True", "False"):
        near = closest(word, ("True", "False")) or ["True"]
        other = "False" if near[0] == "True" else "True"
        raise _refusal(key, word, f"{near[0]} or {other}, spelt exactly so")
    return word == "True"


def _read_mib(key: str, value: list[str]) -> int:
    word = _word(key, value, "a whole number of MiB")
    if not word.isdecimal():
        raise _refusal(key, word, "a whole number of MiB")
    return int(word) * MIB


def _read_ratio(key: str, value: list[str]) -> float:
    word = _word(key, value, "a number between 0 and 1")
    try:
        ratio = float(word)
    except ValueError:
        raise _refusal(key, word, "a number between 0 and 1") from None
    if key == "garbage_collection_threshold" and not 0.0 < ratio < 1.0:
        raise _refusal(key, word, "between 0 and 1, both excluded")
    if math.isnan(ratio):
        raise _refusal(key, word, "a number between 0 and 1")
    return ratio


def _read_backend(key: str, value: list[str]) -> None:
    word = _word(key, value, "native or cudaMallocAsync")
    if word == "cudaMallocAsync":
        raise ConfigError(
            "allocator option backend: 'cudaMallocAsync' leaves the memory to the driver's own "
            "pool, which memest does not model; leave it out to predict for 'native'"
        )
    if word != "native":
        near = closest(word, ("native", "cudaMallocAsync")) or ["native"]
        raise _refusal(key, word, f"native or cudaMallocAsync; closest: {near[0]}")


def _read_divisions(key: str, value: list[str]) -> tuple[int, ...]:
    """A plain number fills all 16 places; ``[1:2,4:8,>:4]`` names sizes in MiB.

    Source: ``AcceleratorAllocatorConfig::parseRoundUpPower2Divisions``, torch 2.13: the first
    entry also fills the places below it, ``>`` those after the last one named, the rest stay 0.
    """
    legal = "a power of two, or a list such as [256:1,512:2,>:4]"
    if len(value) == 1:
        return (_power_of_two(key, value[0], legal),) * NUM_DIVISIONS
    places = [0] * NUM_DIVISIONS
    last = -1
    entries = "".join(value[1:-1]).split(",")
    for number, entry in enumerate(entries):
        size, colon, parts = entry.partition(":")
        if not colon:
            raise _refusal(key, "".join(value), legal)
        divisions = _power_of_two(key, parts, legal)
        if size == ">":
            if number == 0 or number != len(entries) - 1:
                raise _refusal(key, "".join(value), f"{legal}, with '>' as its last entry")
            places[last + 1 :] = [divisions] * (NUM_DIVISIONS - last - 1)
            break
        exponent = _power_of_two(key, size, legal).bit_length() - 1
        if exponent < 0:
            raise _refusal(key, "".join(value), legal)
        last = min(exponent, NUM_DIVISIONS - 1)
        if number == 0:
            places[:last] = [divisions] * last
        places[last] = divisions
    return tuple(places)


def _power_of_two(key: str, word: str, legal: str) -> int:
    if not word.isdecimal() or int(word) & (int(word) - 1):
        raise _refusal(key, word, legal)
    return int(word)


_Reader = Callable[[str, list[str]], Any]
_READERS: dict[str, tuple[str | None, _Reader]] = {
    "backend": (None, _read_backend),
    "expandable_segments": ("expandable_segments", _read_bool),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_ratio),
    "large_segment_size_mb": ("large_segment_size", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _read_mib),
    "max_split_size_mb": ("max_split_size", _read_mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_ratio),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
