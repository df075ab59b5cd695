"""The batch of a model that hears (or speaks): waveforms or mel frames, and their transcripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memest.config.positions import check_length
from memest.config.setup import Setup, Task
from memest.trace.inputs.tensors import (
    BatchPlan,
    BatchSizes,
    TensorPlan,
    attention_mask,
    class_labels,
    floats,
    labels,
    target_length,
    tokens,
)
from memest.trace.model.build import BuiltModel

__all__ = ["FRAME_RATE", "SAMPLE_RATE", "WINDOW_SECONDS", "audio", "seconds_of"]

DEFAULT_AUDIO_SECONDS = 5.0
SAMPLE_RATE = 16_000
# mel frames a second: a hop of 10 ms
FRAME_RATE = 100
# the window that Whisper's feature extractor pads every clip to
WINDOW_SECONDS = 30.0
# English speech, read aloud: characters (CTC) and subword tokens (seq2seq) a second
CHARACTERS_PER_SECOND = 14
_SEQ2SEQ_TARGET = 128
# SpeechT5's vocoder features: a hop of 256 samples
_SPEECH_HOP = 256


def seconds_of(setup: Setup, *, window: float | None = None) -> tuple[float, list[str]]:
    """Length of a clip: as asked, else the fixed window, else 5 s.

    Raises:
        ConfigError: longer than the model's fixed window.
    """
    if window is not None:
        check_length("audio-seconds", setup.audio_seconds or 0, window, "s window of this model")
        return window, [f"clips are padded to the {window:g} s window of the model"]
    if setup.audio_seconds is not None:
        return setup.audio_seconds, []
    seconds = DEFAULT_AUDIO_SECONDS
    return seconds, [f"clips of {seconds:g} s (not given; --audio-seconds sets it)"]


def audio(built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> BatchPlan:
    """Sound and the labels of the task."""
    main = getattr(built_model.model, "main_input_name", "input_values")
    if main == "input_ids":
        return _text_to_speech(built_model, setup)
    if built_model.config.model_type == "audio-spectrogram-transformer":
        sound, seconds, notes = _spectrogram(built_model, setup)
    elif main == "input_features":
        sound, seconds, notes = _frames(built_model, setup)
    else:
        sound, seconds, notes = _waveform(built_model, setup)
    target = None
    if built_model.task is Task.CTC:
        target, more_notes = _transcript(setup, seconds)
        notes += more_notes
        sound.append(labels((setup.batch, target)))
    elif built_model.task is Task.AUDIO_CLASSIFICATION:
        if "labels" in parameters:
            sound.append(class_labels(built_model, setup.batch))
    elif "labels" in parameters:
        default = setup.seq_len or _SEQ2SEQ_TARGET
        reason = "like --seq-len" if setup.seq_len else "a sentence or two"
        target, more_notes = target_length(built_model.config, setup, default, reason=reason)
        notes += more_notes
        sound.append(labels((setup.batch, target)))
    return tuple(sound), BatchSizes(target_len=target, audio_seconds=seconds), notes


def _transcript(setup: Setup, seconds: float) -> tuple[int, list[str]]:
    if setup.target_len is not None:
        return setup.target_len, []
    length = max(1, round(CHARACTERS_PER_SECOND * seconds))
    return length, [f"transcripts of {length} characters (--target-len sets it)"]


def _waveform(built_model: BuiltModel, setup: Setup) -> tuple[list[TensorPlan], float, list[str]]:
    """Raw samples; the mask only where the feature extractor returns one."""
    seconds, notes = seconds_of(setup)
    shape = (setup.batch, max(400, round(seconds * SAMPLE_RATE)))
    plans = [floats("input_values", *shape)]
    if getattr(built_model.config, "feat_extract_norm", "") == "layer" or setup.padded:
        plans.append(attention_mask(shape, padded=setup.padded))
    return plans, seconds, notes


def _frames(built_model: BuiltModel, setup: Setup) -> tuple[list[TensorPlan], float, list[str]]:
    """Mel frames: Whisper's fixed window, or as long as the clip."""
    config = built_model.config
    positions = getattr(config, "max_source_positions", None)
    if positions is not None and hasattr(config, "num_mel_bins"):
        # two frames make one position: the second convolution has stride 2
        seconds, notes = seconds_of(setup, window=2 * positions / FRAME_RATE)
        shape: tuple[int, ...] = (setup.batch, config.num_mel_bins, 2 * positions)
        return [floats("input_features", *shape)], seconds, notes
    seconds, notes = seconds_of(setup)
    frames = round(seconds * FRAME_RATE)
    if hasattr(config, "feature_projection_input_dim"):
        # w2v-BERT stacks two frames of 80 bins
        shape = (setup.batch, frames // 2, config.feature_projection_input_dim)
    else:
        encoder = getattr(config, "encoder_config", config)
        shape = (setup.batch, frames + 1, getattr(encoder, "num_mel_bins", 80))
    mask = attention_mask(shape[:2], padded=setup.padded)
    return [floats("input_features", *shape), mask], seconds, notes


def _spectrogram(
    built_model: BuiltModel, setup: Setup
) -> tuple[list[TensorPlan], float, list[str]]:
    config = built_model.config
    seconds, notes = seconds_of(setup, window=config.max_length / FRAME_RATE)
    shape = (setup.batch, config.max_length, config.num_mel_bins)
    return [floats("input_values", *shape)], seconds, notes


def _text_to_speech(built_model: BuiltModel, setup: Setup) -> BatchPlan:
    """Text to speech: text in, a spectrogram as the target."""
    config, batch = built_model.config, setup.batch
    limit = getattr(config, "max_text_positions", None)
    check_length("seq-len", setup.seq_len or 0, limit, "text positions of this model")
    seconds, notes = seconds_of(setup)
    length = setup.seq_len or max(1, round(CHARACTERS_PER_SECOND * seconds))
    if setup.seq_len is None:
        notes.append(f"texts of {length} characters (--seq-len sets it)")
    reduction = getattr(config, "reduction_factor", 1)
    frames = round(seconds * SAMPLE_RATE / _SPEECH_HOP) // reduction * reduction
    bins = getattr(config, "num_mel_bins", 80)
    plans = (
        TensorPlan(name="input_ids", shape=(batch, length), value=tokens((batch, length), config)),
        attention_mask((batch, length), padded=setup.padded),
        floats("speaker_embeddings", batch, getattr(config, "speaker_embedding_dim", 512)),
        TensorPlan(name="labels", shape=(batch, frames, bins), dtype=torch.float32, fill=0),
    )
    return plans, BatchSizes(seq_len=length, audio_seconds=seconds), notes
