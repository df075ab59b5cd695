"""Numbers of GPUs that stand with their names: ``--gpu 8xh100`` is ``--gpu h100 --num-gpus 8``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from memest.catalog.gpus import cards_of_word, gpu_names, plain_name
from memest.config.options import find_option, read_whole
from memest.errors import ConfigError, UnknownGpuError

__all__ = ["split_gpu_count", "split_gpu_counts"]


def split_gpu_counts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an estimate, with the number of GPUs where it belongs.

    Args:
        options: by any keyword; ``gpu`` may be one name or several, also in one word. Names that
            no card has are left to whoever looks them up.

    Returns:
        The same with plain names, and with ``num_gpus`` where they say a number.

    Raises:
        ConfigError: several numbers, of the names or of them and ``num_gpus``.

    Example:
        >>> split_gpu_counts({"gpu": "8xh100", "bf16": True})
        {'gpu': 'h100', 'bf16': True, 'num_gpus': 8}
    """
    gpu = options.get("gpu")
    given = gpu_names(gpu)
    names = [card for name in given for card in cards_of_word(name)]
    if names != given:
        gpu = tuple(names)
        options = {**options, "gpu": gpu}
    plain_names, counts = [], {}
    for name in names:
        plain, count = name, None
        if not name.strip().lower().startswith("local"):
            with contextlib.suppress(UnknownGpuError):
                plain, count = plain_name(name)
        plain_names.append(plain)
        counts[name] = count
    numbers = {count for count in counts.values() if count is not None}
    if not numbers:
        return dict(options)
    if len(set(counts.values())) > 1:
        listing = ", ".join(
            f"--gpu {name} ({'no number' if count is None else count})"
            for name, count in counts.items()
        )
        raise ConfigError(
            f"one run has one number of GPUs, and these say several: {listing}. Write "
            f"--num-gpus {max(numbers)} once, or ask about each: memest sweep --over "
            f"gpu={','.join(counts)}."
        )
    number = numbers.pop()
    result: dict[str, Any] = {"num_gpus": number}
    for keyword in find_option("num_gpus").keywords:
        other = options.get(keyword)
        if other is None:
            continue
        result = {}
        if read_whole("--num-gpus", other) != number:
            raise ConfigError(
                f"--gpu {names[0]} says {number} GPUs and --num-gpus {other}: drop one, for "
                f"example --gpu {plain_names[0]} --num-gpus {other}."
            )
    if isinstance(gpu, str):
        return {**options, "gpu": plain_names[0], **result}
    return {**options, "gpu": tuple(plain_names), **result}


def split_gpu_count(gpu: Any, setup: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """GPU and options of a question that takes the GPU by itself.

    Args:
        gpu: one name, several, or None.
        setup: a whole setup in place of options: it says the number itself, and where it says
            another one the question is refused when the card is looked up.
        options: of the question.

    Raises:
        ConfigError: as for :func:`split_gpu_counts`.
    """
    if setup is not None or not gpu:
        return gpu, options
    split = split_gpu_counts({**options, "gpu": gpu})
    return split.pop("gpu"), split
