"""What a model's configuration says of a run that was read: whether it takes tokens, how many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.resolve import resolve_model
from memest.config.images import FREE_SIZE, ImageSize, length_around, patches_in_rows, taken_unasked
from memest.config.kinds import Task
from memest.config.positions import RawConfig, length_limit
from memest.errors import MemestError
from memest.readers.values import IMAGES, LENGTH, Bounded, Either, Level, ReadValue, Remark, Saving
from memest.report.result import NOT_MODELLED

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource
    from memest.config.setup import Setup

__all__ = [
    "NO_LABELS",
    "fitted",
    "length_remarks",
    "once_said",
    "open_cap",
    "opened_by",
    "without_varied",
]

_Parts = tuple[tuple[ReadValue, ...], tuple[Remark, ...], "Setup"]
"""Of a run that was read: its values, what is not modelled, and the setup that they make."""
_OF_SOUND = {
    Task.AUDIO_CLASSIFICATION: "AutoModelForAudioClassification",
    Task.CTC: "AutoModelForCTC",
}
_WITHOUT_TOKENS = {
    **_OF_SOUND,
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.IMAGE_SEGMENTATION: "AutoModelForSemanticSegmentation",
    Task.MASKED_IMAGE_MODELING: "AutoModelForMaskedImageModeling",
    Task.SPEECH_SEQ2SEQ: "AutoModelForSpeechSeq2Seq",
}
"""Heads of models whose samples are images or sound."""
NO_LABELS = Either("nothing names it: memest's own is taken; --target-len says it")
"""What is said where nothing names how long the labels of speech are."""
_NO_SECONDS = Either("nothing names it: 5 s are taken; --audio-seconds says it")


def fitted(
    model: str,
    values: tuple[ReadValue, ...],
    not_modelled: tuple[Remark, ...],
    setup: Setup,
    image_cap: ReadValue | None = None,
    *,
    sees: bool = False,
) -> _Parts:
    """The same, guesses of memest and of frameworks within what the model takes.

    Args:
        model: reference of it.
        values: of the run.
        not_modelled: what of the run is not modelled.
        setup: that the values make.
        image_cap: the most pixels of an image; None for no cap.
        sees: something was read, which would say how large images are.
    """
    guess = next((each for each in values if each.option == "seq_len"), None)
    is_guess = guess is not None and guess.level is Level.DEFAULT
    is_open = any(remark.key.endswith(LENGTH) for remark in not_modelled)
    if not (is_guess or is_open or sees):
        return values, not_modelled, setup
    try:
        source: ModelSource | None = resolve_model(model)
    except MemestError:  # who builds the model says what is wrong with it
        source = None
    if sees and source is not None and source.config is not None and setup.task in _SEEING:
        length = None if is_guess else setup.seq_len
        parts = _with_images(source.config, image_cap, length, (values, not_modelled, setup))
        values, not_modelled, setup = parts
    unchanged = values, not_modelled, setup
    is_sized = setup.image_size is not None or setup.audio_seconds is not None
    if is_open and (is_sized or not _takes_tokens(source, setup.task)):
        return _with_length(source, values, not_modelled, setup)
    if setup.rollouts is not None:  # prompts and completions share it
        return unchanged
    limit = _longest_sample(source, setup) if is_guess else None
    if guess is None or limit is None or int(guess.value) <= limit:
        return unchanged
    origin = f"the model's positions ({guess.origin}: {guess.value})"
    fitting = replace(guess, value=limit, origin=origin)
    values = tuple(fitting if each.option == "seq_len" else each for each in values)
    return values, not_modelled, replace(setup, seq_len=limit)


def length_remarks(
    remarks: Iterable[Remark], source: ModelSource | None, setup: Setup
) -> Iterator[Remark]:
    """Remarks with what is open of a sample's length as it stands for the model.

    Args:
        remarks: of a run.
        source: of its model; None where only the task is known.
        setup: of the run.
    """
    kind = "" if source is None else source.auto_class
    speaks = setup.task is Task.SPEECH_SEQ2SEQ or kind == "AutoModelForSpeechSeq2Seq"
    sounds = setup.task in _OF_SOUND or kind in _OF_SOUND.values()
    # what has a size of another kind has no tokens, but for text around an image
    is_sized = setup.image_size is not None or setup.audio_seconds is not None
    has_words = source is None or (source.config is not None and _has_words(source.config))
    for remark in remarks:
        has_tokens = _takes_tokens(source, setup.task) and (has_words or not is_sized)
        if has_tokens or not remark.key.endswith(LENGTH):
            yield remark
        elif speaks and setup.target_len is None:
            yield Remark(remark.key.replace("samples", "labels"), NO_LABELS)
        elif sounds and setup.audio_seconds is None:
            yield Remark(remark.key, _NO_SECONDS)


def open_cap(cap: ReadValue) -> Remark:
    """What is said of the most pixels of an image where no model is known."""
    return Remark(cap.origin, IMAGES)


_SEEING = (Task.AUTO, Task.IMAGE_TEXT_TO_TEXT)
_IMAGES = "size of images"
_VISION_PART = {"vision_config", "thinker_config"}


def _with_images(
    config: Mapping[str, Any], cap: ReadValue | None, length: int | None, parts: _Parts
) -> _Parts:
    """The same with the size of images that a cap comes to, or that nothing names.

    Args:
        config: the model's.
        cap: the most pixels of an image; None where nothing names them.
        length: tokens of a sample; None where they are open.
        parts: of the run.
    """
    values, remarks, setup = parts
    remarks = tuple(each for each in remarks if cap is None or str(each) != str(open_cap(cap)))
    assumed = taken_unasked(config)
    if not (assumed or cap):
        return parts
    in_rows = patches_in_rows(str(config.get("model_type")))
    size, side = ImageSize(config), setup.image_size or FREE_SIZE
    added: tuple[Remark, ...] = ()
    if setup.image_size is not None:
        pass
    elif cap is not None and in_rows:
        side = size.up_to(int(cap.value), length)
        origin = f"{cap.origin} ({int(cap.value):,} pixels)"
        values = (*values, replace(cap, option="image_size", value=side, origin=origin))
        setup = replace(setup, image_size=side)
        why = f"no image has more: all are priced so ({side} x {side}); --image-size says it"
        added = (Remark(cap.origin, Saving(why)),)
    elif cap is not None and not assumed:
        if cap.level is Level.DEFAULT or not _VISION_PART & config.keys():
            return _with_remarks(remarks, values, parts[1], setup)
        why = "the size that the model brings all images to is priced"
        added = (Remark(cap.origin, Bounded(why)),)
    else:
        why = f"nothing names it: {assumed}, one image a sample; --image-size says it"
        added = (Remark(_IMAGES, Either(why)),)
    if in_rows:
        tokens = size.tokens(side)
        why = (
            f"nothing names it: {length_around(tokens)} tokens are taken, {tokens} of them an "
            "image's; --seq-len says it"
        )
        remarks = tuple(
            Remark(each.key, Either(why)) if each.key.endswith(LENGTH) else each for each in remarks
        )
    return _with_remarks((*remarks, *added), values, parts[1], setup)


def _with_length(
    source: ModelSource | None,
    values: tuple[ReadValue, ...],
    not_modelled: tuple[Remark, ...],
    setup: Setup,
) -> _Parts:
    """The same, what is open of its length said of this model."""
    kept = tuple(length_remarks(not_modelled, source, setup))
    return _with_remarks(kept, values, not_modelled, setup)


def once_said(remarks: Iterable[Remark], endings: tuple[str, ...]) -> Iterator[Remark]:
    """Remarks as they stand once options are given.

    Args:
        remarks: of a run.
        endings: how those end that ask for one of the options.
    """
    for remark in remarks:
        if not remark.why.endswith(endings):
            yield remark
        elif remark.once_said:
            yield Remark(remark.key, remark.once_said)


def opened_by(remarks: Iterable[Remark]) -> dict[str, list[Remark]]:
    """The remarks that leave a verdict open, by the option that says so."""
    remarks = list(remarks)
    return {
        "unpriced": [remark for remark in remarks if not remark.is_bounded],
        "overpriced": [remark for remark in remarks if remark.saves],
    }


def without_varied(
    flags: Iterable[str],
    values: tuple[ReadValue, ...],
    not_modelled: tuple[Remark, ...],
    setup: Setup,
) -> _Parts:
    """The same, without what is open only until a command names it.

    Args:
        flags: of the options that the command sets itself, point by point.
        values: of the run.
        not_modelled: what of the run is not modelled.
        setup: that the values make.
    """
    said = tuple(f"{flag} says it" for flag in flags)
    kept = tuple(once_said(not_modelled, said))
    return _with_remarks(kept, values, not_modelled, setup)


def _with_remarks(
    kept: tuple[Remark, ...],
    values: tuple[ReadValue, ...],
    not_modelled: tuple[Remark, ...],
    setup: Setup,
) -> _Parts:
    """The same with other remarks, in the options that leave a verdict open too."""
    before = {str(remark) for remark in not_modelled}
    dropped = before - {str(remark) for remark in kept}
    added = [remark for remark in kept if str(remark) not in before]
    open_words: dict[str, Any] = {
        name: tuple(each for each in getattr(setup, name) if each not in dropped)
        + tuple(map(str, new))
        for name, new in opened_by(added).items()
    }
    there = {each.option for each in values}
    opened = (ReadValue(name, (), NOT_MODELLED, Level.FILE) for name in open_words)
    values = tuple(
        replace(each, value=open_words.get(each.option, each.value))
        for each in (*values, *(each for each in opened if each.option not in there))
        if open_words.get(each.option, True)
    )
    return values, kept, replace(setup, **open_words)


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
