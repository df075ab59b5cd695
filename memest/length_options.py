"""From the options of lengths to the two values of a setup. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

from memest.errors import ConfigError, closest
from memest.length_files import lengths_of_dataset, read_lengths
from memest.lengths import Batching, Lengths
from memest.setup import Setup

__all__ = ["merge_lengths"]

_SETTINGS = {
    "padding": "padding", "pad_to_multiple_of": "multiple_of",
    "group_by_length": "group_by_length", "length_steps": "steps", "data_seed": "seed",
}  # fmt: skip
_STRATEGIES = ("bfd", "bfd_split", "bfd-requeue", "wrapped", "none")


def merge_lengths(given: dict[str, Any], base: Setup | None) -> None:
    """Replace the options of lengths by the values they stand for.

    Args:
        given: options by name; ``batching`` and ``padding_free`` are put in.
        base: the setup that they change.

    Raises:
        ConfigError: contradictions, files that cannot be read, options without lengths.
    """
    parts = {name: given.pop(name) for name in _SETTINGS if name in given}
    file, dataset = given.pop("lengths", None), given.pop("dataset", None)
    tokenizer, column = given.pop("tokenizer", None), given.pop("dataset_column", None)
    _merge_packing(given, base, file is not None or dataset is not None)
    old = None if base is None else base.batching
    if file is not None and dataset is not None:
        raise ConfigError("--lengths and --dataset both say how long samples are: drop one.")
    if dataset is None and (tokenizer is not None or column is not None):
        flag = "--tokenizer" if tokenizer is not None else "--dataset-column"
        raise ConfigError(f"{flag} says nothing without a dataset: add --dataset FILE.")
    found = None
    if isinstance(file, Lengths):
        found = file
    elif file is not None:
        found = read_lengths(file)
    elif dataset is not None:
        found = lengths_of_dataset(dataset, tokenizer, column)
    named = {_SETTINGS[name]: v for name, v in parts.items() if v is not False or old is not None}
    if found is None and old is None:
        if named:
            name = next(name for name in parts if _SETTINGS[name] in named)
            raise ConfigError(
                f"--{name.replace('_', '-')} says nothing where every sample has the same length: "
                "add --lengths FILE (one length a line, or length,count) or --dataset FILE."
            )
        return
    flat = bool(given.get("padding_free", base.padding_free if base is not None else False))
    cap = given.pop("seq_len", None if old is None else old.max_length)
    values: dict[str, Any] = {"max_length": cap, "flat": flat, **named}
    if found is not None:
        values["lengths"] = found
    given["batching"] = dataclasses.replace(old, **values) if old else Batching(**values)


def _merge_packing(given: dict[str, Any], base: Setup | None, lengths: bool) -> None:
    """TRL: ``bfd`` turns padding-free on; ``wrapped`` makes plain rows that are full."""
    value = given.pop("packing", None)
    if value is None or value is False:
        return
    strategy = "bfd" if value is True else str(value).strip().lower().replace("-", "_")
    strategy = {"true": "bfd", "false": "none"}.get(strategy, strategy)
    known = [s.replace("-", "_") for s in _STRATEGIES]
    if strategy not in known:
        near = closest(strategy, known)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"--packing {value!r} is not known.{hint} Legal: bfd, wrapped, none.")
    if strategy == "none":
        return
    if lengths:
        raise ConfigError(
            "--packing fills every row to --seq-len, whatever the samples' lengths: drop --lengths."
        )
    if given.get("seq_len") is None and (base is None or base.seq_len is None):
        raise ConfigError("--packing fills rows to a length: add --seq-len 2048.")
    if strategy != "wrapped":
        given["padding_free"] = True
