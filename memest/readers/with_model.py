"""What a model's configuration says of a run that was read: whether it takes tokens, how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.resolve import resolve_model
from memest.config.kinds import Task
from memest.config.positions import RawConfig, length_limit
from memest.errors import MemestError
from memest.readers.values import LENGTH, Level

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource
    from memest.config.setup import Setup
    from memest.readers.run_config import RunConfig

__all__ = ["fit_to_model", "takes_tokens"]

_WITHOUT_TOKENS = {
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.IMAGE_SEGMENTATION: "AutoModelForSemanticSegmentation",
    Task.MASKED_IMAGE_MODELING: "AutoModelForMaskedImageModeling",
    Task.AUDIO_CLASSIFICATION: "AutoModelForAudioClassification",
    Task.CTC: "AutoModelForCTC",
}
"""Heads of models whose samples are images or sound alone."""


def fit_to_model(run: RunConfig) -> RunConfig:
    """The same, guesses of memest and of frameworks within what the model takes."""
    guess = next((each for each in run.values if each.option == "seq_len"), None)
    is_guess = guess is not None and guess.level is Level.DEFAULT
    is_open = any(remark.key.endswith(LENGTH) for remark in run.not_modelled)
    if not (is_guess or is_open):
        return run
    try:
        source: ModelSource | None = resolve_model(str(run.model))
    except MemestError:  # who builds the model says what is wrong with it
        source = None
    if is_open and not takes_tokens(source, run.setup.task):
        return _without_length(run)
    limit = _longest_sample(source, run.setup) if is_guess else None
    if guess is None or limit is None or int(guess.value) <= limit:
        return run
    origin = f"the model's positions ({guess.origin}: {guess.value})"
    values = tuple(
        replace(each, value=limit, origin=origin) if each is guess else each for each in run.values
    )
    return replace(run, values=values, setup=replace(run.setup, seq_len=limit))


def _without_length(run: RunConfig) -> RunConfig:
    """The same without what is said of tokens."""
    kept = tuple(each for each in run.not_modelled if not each.key.endswith(LENGTH))
    dropped = {str(each) for each in run.not_modelled} - {str(each) for each in kept}
    words = {
        name: tuple(each for each in getattr(run.setup, name) if each not in dropped)
        for name in ("unpriced", "overpriced")
    }
    values = tuple(
        replace(each, value=words.get(each.option, each.value))
        for each in run.values
        if words.get(each.option, ("",))
    )
    setup = replace(run.setup, unpriced=words["unpriced"], overpriced=words["overpriced"])
    return replace(run, not_modelled=kept, values=values, setup=setup)


def takes_tokens(source: ModelSource | None, task: Task) -> bool:
    """Whether samples of a model may be tokens: False where it is known that they are not."""
    if task in _WITHOUT_TOKENS:
        return False
    if source is None or task not in (Task.AUTO, Task.BASE):
        return True
    if source.library is not None or source.auto_class in _WITHOUT_TOKENS.values():
        return False
    return source.config is None or _has_words(source.config)


def _longest_sample(source: ModelSource | None, setup: Setup) -> int | None:
    """How many tokens a model of text takes at most; None where nothing bounds it, or is known."""
    if source is None or source.config is None or "model_type" not in source.config:
        return None
    config = RawConfig(source.config)
    return length_limit(config, setup)[0] if config.reads_text(source.auto_class) else None


def _has_words(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, or a part of it, has a vocabulary."""
    parts = [value for value in config.values() if isinstance(value, Mapping)]
    # a configuration of few entries leaves its vocabulary to transformers
    return "vocab_size" in config or any(map(_has_words, parts)) or not _VISION & config.keys()


_VISION = frozenset(("image_size", "patch_size", "num_channels", "hidden_sizes", "embed_dims"))
