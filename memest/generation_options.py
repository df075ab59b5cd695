"""From the options of a generation to the value of a setup. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

from memest.errors import ConfigError
from memest.generation import Generation
from memest.setup import Setup

__all__ = ["merge_generation"]

_EVAL_BATCH = 8
"""``per_device_eval_batch_size`` of ``TrainingArguments``."""


def merge_generation(given: dict[str, Any], base: Setup | None) -> None:
    """Replace the options of a generation by the value they stand for, ``given["generation"]``.

    Args:
        given: options by name; those of a generation are taken out.
        base: the setup that they change.

    Raises:
        ConfigError: options without a generation, or wrong values.
    """
    number = given.pop("generate", None)
    predicts = given.pop("predict_with_generate", None)
    longest = given.pop("generation_max_length", None)
    names = {"num_beams": "num_beams", "cache_implementation": "cache"}
    parts = {field: given.pop(name) for name, field in names.items() if name in given}
    old = None if base is None else base.generation
    if number is None and not predicts and old is None:
        if longest is not None or parts:
            raise ConfigError(
                "--generation-max-length, --num-beams and --cache-implementation say nothing where "
                "nothing is generated: add --generate 128, or --predict-with-generate."
            )
        return
    if predicts is False and old is not None and number is None:
        given["generation"] = None
        return
    if number is not None and longest is not None:
        raise ConfigError("--generate and --generation-max-length exclude each other: drop one.")
    if longest is not None and not predicts:
        raise ConfigError("--generation-max-length belongs to --predict-with-generate: add it.")
    if predicts:
        given.setdefault("eval_batch", _EVAL_BATCH)
    values = dict(parts)
    if longest is not None:
        # the first token of a decoder is given, as the prompt of a decoder-only model is
        values["new_tokens"] = max(longest - 1, 1)
    if number is not None:
        values["new_tokens"] = number
    given["generation"] = dataclasses.replace(old, **values) if old else Generation(**values)
