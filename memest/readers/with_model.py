"""What a model's configuration says of a run that was read: whether it takes tokens, how many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.resolve import resolve_model
from memest.config.kinds import Task
from memest.config.positions import RawConfig, length_limit
from memest.errors import MemestError
from memest.readers.values import LENGTH, Level, Remark

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource
    from memest.config.setup import Setup
    from memest.readers.run_config import RunConfig

__all__ = ["fit_to_model", "length_remarks"]

_WITHOUT_TOKENS = {
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.IMAGE_SEGMENTATION: "AutoModelForSemanticSegmentation",
    Task.MASKED_IMAGE_MODELING: "AutoModelForMaskedImageModeling",
    Task.AUDIO_CLASSIFICATION: "AutoModelForAudioClassification",
    Task.CTC: "AutoModelForCTC",
    Task.SPEECH_SEQ2SEQ: "AutoModelForSpeechSeq2Seq",
}
_LABELS = "nothing names it: memest's own is taken; --target-len says it"
"""Heads of models whose samples are images or sound."""


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
    if is_open and not _takes_tokens(source, run.setup.task):
        return _with_length(run, source)
    if run.setup.rollouts is not None:  # prompts and completions share it
        return run
    limit = _longest_sample(source, run.setup) if is_guess else None
    if guess is None or limit is None or int(guess.value) <= limit:
        return run
    origin = f"the model's positions ({guess.origin}: {guess.value})"
    values = tuple(
        replace(each, value=limit, origin=origin) if each is guess else each for each in run.values
    )
    return replace(run, values=values, setup=replace(run.setup, seq_len=limit))


def length_remarks(
    remarks: Iterable[Remark], source: ModelSource | None, setup: Setup
) -> Iterator[Remark]:
    """Remarks with what is open of a sample's length as it stands for the model.

    Args:
        remarks: of a run.
        source: of its model; None where only the task is known.
        setup: of the run.
    """
    speaks = setup.task is Task.SPEECH_SEQ2SEQ or (
        source is not None and source.auto_class == "AutoModelForSpeechSeq2Seq"
    )
    for remark in remarks:
        if not remark.key.endswith(LENGTH) or _takes_tokens(source, setup.task):
            yield remark
        elif speaks and setup.target_len is None:
            yield Remark(remark.key.replace("samples", "labels"), _LABELS)


def _with_length(run: RunConfig, source: ModelSource | None) -> RunConfig:
    """The same, what is open of its length said of this model."""
    kept = tuple(length_remarks(run.not_modelled, source, run.setup))
    before, after = ([str(each) for each in remarks] for remarks in (run.not_modelled, kept))
    new = [each for each in after if each not in before]
    words = {
        "unpriced": (
            *(each for each in run.setup.unpriced if each in after or each not in before),
            *new,
        ),
    }
    values = tuple(
        replace(each, value=words.get(each.option, each.value))
        for each in run.values
        if words.get(each.option, ("",))
    )
    setup = replace(run.setup, unpriced=words["unpriced"])
    return replace(run, not_modelled=kept, values=values, setup=setup)


def _takes_tokens(source: ModelSource | None, task: Task) -> bool:
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
