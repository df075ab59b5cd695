"""The sizes of a batch: between a setup's fields and the axes of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from memest.distributed import ALONE, Distributed
from memest.errors import ConfigError
from memest.setup import Dtype, Loop, Precision, Setup
from memest.steps.sizing import milliseconds

__all__ = [
    "UNLIMITED",
    "Sizes",
    "as_traced",
    "fields_of",
    "highest",
    "last",
    "samples",
    "sizes_of",
    "structure_key",
    "structure_of",
    "windows",
    "words",
]

Sizes = Mapping[str, int]

UNLIMITED = 1 << 17
"""A model that takes so many tokens is taken to have no limit."""


_CLONES = Distributed(num_gpus=2, ddp_find_unused_parameters=True)
"""Stands for every DDP that looks for unused parameters: it copies the outputs of the model."""


def as_traced(asked: Setup) -> Setup:
    """The setup whose steps are traced: what a rank computes, on whole parameters.

    Sharding is a matter of what comes after the trace, with two exceptions. Where accelerate or
    DeepSpeed train in half precision, the parameters that the model computes with are half ones,
    without autocast (``MixedPrecisionPolicy`` in ``set_mixed_precision`` of accelerate;
    ``DeepSpeedEngine._configure_distributed_model``). And DDP that looks for unused parameters
    copies the model's outputs (``_DDPSink``).
    """
    kept = _CLONES if asked.finds_unused_parameters else ALONE
    out = replace(asked, distributed=kept)
    if asked.computes_in_half:
        half = Dtype.BFLOAT16 if asked.precision is Precision.BF16 else Dtype.FLOAT16
        out = replace(out, precision=Precision.FP32, dtype=half)
    return out


def structure_key(structure: Setup) -> dict[str, Any]:
    """What of a structure names its documents in the stores."""
    out = structure.to_dict()
    for field in fields(Distributed):
        out.pop(field.name)
    if structure.distributed != ALONE:
        out["clones_outputs"] = True
    return out


def structure_of(asked: Setup) -> Setup:
    """The part of a setup that changes the traces of micro-steps."""
    return replace(
        as_traced(asked), batch=1, seq_len=None, target_len=None, image_size=None,
        audio_seconds=None,
        grad_accum=1 if asked.loop is Loop.PLAIN and asked.grad_accum == 1 else 2,
        optim="none" if asked.optim == "none" else "adamw_torch_fused",
        max_grad_norm=None, master_weights=False, alloc_conf="", num_steps=2, tf32=False,
    )  # fmt: skip


def sizes_of(setup: Setup) -> dict[str, int]:
    """The sizes of a batch; audio in milliseconds where they are whole."""
    sizes = {"batch": setup.batch}
    for name in ("seq_len", "target_len", "image_size"):
        value = getattr(setup, name)
        if value is not None:
            sizes[name] = value
    if setup.audio_seconds is not None:
        whole = milliseconds(setup.audio_seconds)
        if whole is not None:
            sizes["audio_ms"] = whole
        else:
            # a fraction of a millisecond is a size of its own
            numerator, denominator = setup.audio_seconds.as_integer_ratio()
            sizes["audio_numerator"], sizes["audio_denominator"] = numerator, denominator
    return sizes


def fields_of(sizes: Sizes) -> dict[str, Any]:
    """The same as fields of a setup."""
    fields: dict[str, Any] = {
        name: size for name, size in sizes.items() if not name.startswith("audio")
    }
    if "audio_ms" in sizes:
        fields["audio_seconds"] = sizes["audio_ms"] / 1000
    return fields


def words(sizes: Sizes) -> str:
    """The sizes for people to read."""
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def highest(run: Any, base: Setup, name: str) -> int:
    """The greatest length the model takes, by bisection; 0 where it takes none of this kind."""

    def takes(length: int) -> bool:
        try:
            asked: Any = {name: length}
            answer = run.answer(replace(base, **asked))
        except (ConfigError, ValueError):
            return False
        return bool(answer.taken.get(name) == length)

    if not takes(16):
        return 0
    return UNLIMITED if takes(UNLIMITED) else last(takes, UNLIMITED - 1, 16)


def last(holds: Callable[[int], bool], highest: int, low: int = 0) -> int:
    """The largest number up to ``highest`` for which something holds, by halves; ``low`` if none.

    Args:
        holds: true up to some number, then false.
        highest: where to end.
        low: a number for which it holds, or 0.
    """
    high = highest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def samples(highest: Mapping[str, int]) -> list[dict[str, Any]]:
    """Lengths to ask a model about: both ends, and primes between."""
    out: list[dict[str, Any]] = []
    for a, b in ((1, 1), (7, 13), (11, 5), (0, 0), (3, 17), (13, 2)):
        row: dict[str, Any] = {}
        for number, (name, high) in enumerate(highest.items()):
            share = (a, b)[number % 2]
            row[name] = high if share == 0 else min(1 + high * share // 19, high)
        if row not in out:
            out.append(row)
    low: dict[str, Any] = dict.fromkeys(highest, 1)
    return [low, *[row for row in out if row != low]]


_WINDOW = re.compile(r"window|chunk_size|local_attention|original_max_position|max_distance")


def windows(config: Any) -> Iterator[int]:
    """The lengths in a config that bound what attention looks at."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            yield from windows(value)
        elif _WINDOW.search(str(name)):
            values = value if isinstance(value, list) else [value]
            yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))
