"""Kinds of training runs: what an option of a closed list can be."""

from __future__ import annotations

import enum
from typing import Any

from memest.errors import ConfigError, closest

__all__ = [
    "Attention",
    "Dtype",
    "Loop",
    "Precision",
    "SdpaBackend",
    "Task",
    "ZeroGrad",
    "ZeroGradAt",
    "choose",
    "whole",
]


class Precision(enum.StrEnum):
    """What autocast does; the dtype of the weights is a matter of its own."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Dtype(enum.StrEnum):
    """The dtype of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def is_half(self) -> bool:
        """Whether a number takes two bytes."""
        return self in (Dtype.FLOAT16, Dtype.BFLOAT16)


class Attention(enum.StrEnum):
    """The attention implementation that transformers is asked for."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"


class SdpaBackend(enum.StrEnum):
    """The kernel behind scaled_dot_product_attention; ``auto`` follows PyTorch's own choice."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


class Loop(enum.StrEnum):
    """Whose training loop runs: it decides what is still referenced when."""

    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    PLAIN = "plain"


class ZeroGrad(enum.StrEnum):
    """What zero_grad does: ``none`` drops the gradients, ``zero`` keeps them allocated."""

    AUTO = "auto"
    NONE = "none"
    ZERO = "zero"


class ZeroGradAt(enum.StrEnum):
    """Where a script calls zero_grad: old gradients are alive until then."""

    AFTER_STEP = "after-step"
    BEFORE_FORWARD = "before-forward"
    BEFORE_BACKWARD = "before-backward"


class Task(enum.StrEnum):
    """Which head the model gets."""

    AUTO = "auto"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    IMAGE_CLASSIFICATION = "image-classification"
    IMAGE_SEGMENTATION = "image-segmentation"
    MASKED_IMAGE_MODELING = "masked-image-modeling"
    AUDIO_CLASSIFICATION = "audio-classification"
    CTC = "ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    CONTRASTIVE = "contrastive"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    BASE = "base"


def choose(option: str, value: Any, kind: type[enum.StrEnum]) -> Any:
    """Turn text into a member of ``kind``; the error lists what is legal, closest first."""
    if isinstance(value, kind):
        return value
    text = str(value).strip().lower().replace("_", "-")
    for member in kind:
        if member.value.replace("_", "-") == text:
            return member
    names = [member.value for member in kind]
    near = closest(str(value), names)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{option} {value!r} is not known.{hint} Legal: {', '.join(names)}.")


def whole(option: str, value: Any, low: int, high: int) -> int:
    """A whole number in a range.

    Raises:
        ConfigError: it is none, or outside.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option} {value!r} is not a whole number.")
    if not low <= value <= high:
        raise ConfigError(f"{option} {value} is out of range: it must be {low} to {high:,}.")
    return value
