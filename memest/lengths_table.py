"""The options of batches whose samples have different lengths."""

from __future__ import annotations

from typing import Any

from memest.option import Kind, Option, Panel

__all__ = ["LENGTHS"]


def _part(name: str, flags: str, help_text: str, kind: Kind = Kind.TEXT, **more: Any) -> Option:
    values = {"field": "batching", "aliases": "", **more}
    values["aliases"] = tuple(values["aliases"].split())
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=Panel.LENGTHS, kind=kind,
        **values,
    )  # fmt: skip


LENGTHS: tuple[Option, ...] = (
    _part(
        "lengths",
        "--lengths",
        "A file with the lengths of the samples in tokens: one a line, length,count as CSV, or "
        "JSON. The largest batch there can be decides; --max-length cuts.",
        metavar="FILE",
        names_file=True,
    ),
    _part(
        "dataset",
        "--dataset",
        "A dataset whose tokens are counted: jsonl, json, csv, parquet or txt; text needs "
        "--tokenizer.",
        metavar="FILE",
        names_file=True,
    ),
    _part(
        "tokenizer",
        "--tokenizer",
        "A tokenizer.json, or the folder of a model that holds one, for --dataset.",
        metavar="PATH",
        names_file=True,
    ),
    _part(
        "dataset_column",
        "--dataset-column",
        "The column of --dataset with the text or the token ids; left out, one of the usual names.",
        metavar="NAME",
    ),
    _part(
        "padding",
        "--padding",
        "To what rows are filled up: longest (of the batch) or max_length. Default: longest.",
        metavar="KIND",
    ),
    _part(
        "pad_to_multiple_of",
        "--pad-to-multiple-of",
        "The padded length is rounded up to a multiple of it.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "group_by_length",
        "--group-by-length",
        "The Trainer's sampler that puts samples of like length together, the longest first.",
        Kind.SWITCH,
    ),
    _part(
        "length_steps",
        "--length-steps",
        "Optimizer steps that are played with lengths drawn from the file, the largest batch among "
        "them; 0 plays the largest batch alone. Default: 12.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "data_seed",
        "--data-seed",
        "Seed of the order in which lengths are drawn. Default: 42.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "padding_free",
        "--padding-free",
        "Samples of a batch are laid end to end in one row without padding "
        "(DataCollatorWithFlattening, TRL's padding_free).",
        Kind.SWITCH,
        field="padding_free",
    ),
    _part(
        "packing",
        "--packing",
        "TRL's packing: every row is full. bfd (rows laid end to end, as padding-free), wrapped "
        "(plain rows) or none. Needs --seq-len.",
        metavar="STRATEGY",
        field="padding_free",
        aliases="packing_strategy",
    ),
)
