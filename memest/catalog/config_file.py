"""Read a ``config.json`` that a user named, and say plainly what is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memest.catalog.models import model_types
from memest.errors import ConfigError, ModelLoadError
from memest.files.texts import read_small
from memest.units import MIB, format_size

__all__ = ["MAX_CONFIG_BYTES", "check_config", "guess_auto_class", "read_config"]

MAX_CONFIG_BYTES = 10 * MIB
"""No model configuration comes near this; weights and data sets given by mistake do."""

_HEADS = """ForCausalLM ForMaskedLM ForPreTraining ForSequenceClassification ForTokenClassification
    ForQuestionAnswering ForMultipleChoice ForImageClassification ForSemanticSegmentation
    ForAudioClassification ForCTC""".split()
"""What architectures end with; the auto class has the same ending."""
_LAYERS = re.compile(r"n_layers?|num_\w*layers|(en|de)coder_layers")
"""Names of numbers of layers; a layer whose features are taken may well be the last but one, -2."""
_SPEECH_TYPES = frozenset({"whisper", "speech_to_text", "moonshine", "speecht5"})


def read_config(path: Path, *, label: str) -> dict[str, Any]:
    """Parse one file.

    Args:
        path: the file.
        label: how messages call it.

    Raises:
        ConfigError: unreadable, larger than 10 MiB, not JSON, or not a JSON object.
    """
    try:
        if path.is_file() and path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{label} has {format_size(path.stat().st_size)}, a model's config.json at most "
                f"{format_size(MAX_CONFIG_BYTES)}: give the config.json, not weights or data"
            )
        text = read_small(path, MAX_CONFIG_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{label} is not text ({error.reason} at byte {error.start}): give the model's "
            "config.json, not its weights"
        ) from error
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror or error}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if "out of memory" in text.lower():
            raise ConfigError(
                f"{label} is a log with an out-of-memory message, and no model: memest "
                f"explain-oom {label}"
            ) from error
        raise ConfigError(
            f"{label} is no model's config.json: it is not valid JSON: {error.msg} in line "
            f"{error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # a number that is too long to be one
        raise ConfigError(f"{label} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{label} is nested too deeply for a model's config.json") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label} holds a JSON {_kind(data)}, a model's config.json is an object with a "
            "model_type"
        )
    return data


def _kind(data: object) -> str:
    if isinstance(data, list):
        return "array"
    if isinstance(data, str):
        return "string"
    return "null" if data is None else "number or boolean"


def check_config(
    config: dict[str, Any], *, label: str, trust_remote_code: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make sure that transformers can build the configuration.

    Returns:
        The configuration (without ``auto_map`` where transformers' own class is taken) and
        notes for the user.

    Raises:
        ConfigError: without a ``model_type``, or with fewer than no layers.
        ModelLoadError: with code of its own that is not trusted.
    """
    if "_class_name" in config and "model_type" not in config:
        raise ConfigError(
            f"{label} describes a {config['_class_name']} of diffusers, which memest does not "
            "build: give a factory of your own instead, package.module:function (`memest help "
            "diffusers`)"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f"{label} has no model_type, so transformers cannot know what to build: add one, for "
            'example "model_type": "llama", or give a factory, package.module:function'
        )
    for name, value in config.items():
        # Python counts down to nothing: transformers builds a model without layers
        if _LAYERS.fullmatch(name) and isinstance(value, int) and value < 0:
            raise ConfigError(f"{label}: {name} is {value}: a number of layers is 0 or more")
    if not config.get("auto_map") or trust_remote_code:
        return config, ()
    if model_type in model_types():
        own_config = {key: value for key, value in config.items() if key != "auto_map"}
        note = (
            f"{label} names code of its own (auto_map); transformers' own {model_type} was taken. "
            "--trust-remote-code takes the other"
        )
        return own_config, (note,)
    raise ModelLoadError(
        f"{label} names code of its own (auto_map, model_type {model_type!r}), which runs when the "
        "model is built: read that code, then add --trust-remote-code"
    )


def guess_auto_class(config: dict[str, Any]) -> str | None:
    """The auto class that the ``architectures`` of a configuration point to, None if unclear."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    name = str(architectures[0])
    if name.endswith("LMHeadModel"):
        return "AutoModelForCausalLM"
    for ending in _HEADS:
        if name.endswith(ending):
            return f"AutoModel{ending}"
    if name.endswith("ForConditionalGeneration"):
        if config.get("model_type") in _SPEECH_TYPES:
            return "AutoModelForSpeechSeq2Seq"
        if "vision_config" in config:
            return "AutoModelForImageTextToText"
        return "AutoModelForSeq2SeqLM" if config.get("is_encoder_decoder", True) else None
    return "AutoModel" if name.endswith("Model") else None
