"""The options of a generation behind the training run."""

from __future__ import annotations

from typing import Any

from memest.option import Kind, Option, Panel

__all__ = ["GENERATION"]


def _part(name: str, flags: str, help_text: str, kind: Kind = Kind.TEXT, **more: Any) -> Option:
    values = {"aliases": "", **more}
    values["aliases"] = tuple(values["aliases"].split())
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=Panel.GENERATION, kind=kind,
        field="generation", **values,
    )  # fmt: skip


GENERATION: tuple[Option, ...] = (
    _part(
        "generate",
        "--generate --max-new-tokens",
        "Tokens that are generated from prompts of --seq-len after the last step, --eval-batch of "
        "them at once, or --batch.",
        Kind.WHOLE,
        metavar="TOKENS",
        aliases="generation_max_new_tokens",
    ),
    _part(
        "predict_with_generate",
        "--predict-with-generate",
        "The evaluation generates (Seq2SeqTrainer); an evaluation follows the last step.",
        Kind.SWITCH,
    ),
    _part(
        "generation_max_length",
        "--generation-max-length",
        "Greatest length of what is generated, with --predict-with-generate; prompts of "
        "decoder-only models count. Default: 20, transformers' own.",
        Kind.WHOLE,
        metavar="TOKENS",
    ),
    _part(
        "num_beams",
        "--num-beams --generation-num-beams",
        "Beams of the search. Default: 1.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "cache_implementation",
        "--cache-implementation",
        "Key/value cache of the generation: dynamic or static. Default: dynamic.",
        metavar="NAME",
    ),
)
