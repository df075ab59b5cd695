"""``memest`` alone on a terminal: the question in four parts, and the command it stands for."""

from __future__ import annotations

import enum
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from memest.cli.console import emit
from memest.errors import MemestError

__all__ = ["ask_question", "on_terminal"]

_T = TypeVar("_T")
_NO_CARD = "none"


class _Method(enum.StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


_METHOD_OPTIONS: dict[_Method, dict[str, Any]] = {
    _Method.FULL: {},
    _Method.LORA: {"peft": "lora"},
    _Method.QLORA: {"qlora": True},
}


def on_terminal() -> bool:
    """Whether somebody is there to answer: all streams are a terminal's."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def ask_question() -> list[str]:
    """Ask for model, card, method and batch; what is wrong is said, and asked again.

    Returns:
        The words of the command line that the answers stand for, after the program's name.

    Raises:
        typer.Abort: the input ended, or Ctrl-C.
    """
    from memest.app.presets import DEFAULT_MODEL
    from memest.config.setup import choose
    from memest.config.spelling import command_words
    from memest.readers.reading import names_config

    emit("How much GPU memory will a run take? Enter takes what stands in brackets.")
    model = _ask("Model (a name, a Hugging Face id, a folder, run.yaml)", DEFAULT_MODEL, _model)
    card = _ask("GPU (a name, a size such as 24GiB, or none)", _usual_card(), _card)
    options: dict[str, Any] = {}
    if not names_config(model):  # which says the rest
        kinds = ", ".join(_Method)
        method = _ask(f"Method ({kinds})", _Method.FULL, lambda x: choose("method", x, _Method))
        batch = _ask("Batch on one GPU", "8", lambda text: _batch(text, _METHOD_OPTIONS[method]))
        options = {"batch": batch, **_METHOD_OPTIONS[method]}
        if method is not _Method.FULL:
            options[_half(card)] = True  # nobody trains adapters without it
    words = command_words("estimate", model, {**options, **card})
    sys.stderr.write(f"\n{shlex.join(words)}\n\n")
    return words[1:]


def _ask(text: str, default: str, read: Callable[[str], _T]) -> _T:
    """One part of the question, until it can be."""
    import typer

    while True:
        try:
            answer: str = typer.prompt(text, default=str(default), type=str, err=True)
        except typer.Abort:
            sys.stderr.write("\n")  # behind the prompt
            raise
        try:
            return read(answer.strip())
        except MemestError as error:
            emit(f"memest: {error}")


def _model(reference: str) -> str:
    """A model, or a configuration that names one; it is found, and read."""
    from memest.catalog.resolve import resolve_model
    from memest.cli.question import read_question
    from memest.readers.reading import names_config

    if names_config(reference):
        read_question([reference], {})
    else:
        resolve_model(reference)
    return reference


def _card(text: str) -> dict[str, Any]:
    """A card by its name, its memory, or none."""
    from memest.catalog.gpu_counts import split_gpu_counts
    from memest.catalog.nvml import resolve_gpu

    if text.lower() == _NO_CARD:
        return {}
    options: dict[str, Any] = split_gpu_counts({"gpu": text})
    resolve_gpu(options["gpu"])
    return options


def _half(card: Mapping[str, Any]) -> str:
    """The half precision that a card computes in: fp16 of those before Ampere."""
    from memest.catalog.nvml import resolve_gpu

    return "bf16" if "gpu" not in card or resolve_gpu(card["gpu"]).has_bf16 else "fp16"


def _usual_card() -> str:
    """This machine's GPU where it has one."""
    from memest.app.presets import DEFAULT_GPU
    from memest.catalog.nvml import resolve_gpu

    try:
        resolve_gpu("local")
    except MemestError:
        return DEFAULT_GPU
    return "local"


def _batch(text: str, options: dict[str, Any]) -> str:
    """A batch that the method can have."""
    from memest.config.options import setup_from_options

    setup_from_options(batch=text, **options)
    return text
