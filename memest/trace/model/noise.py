"""NEFTune: noise that transformers' own hook adds to embeddings while a model trains."""

from __future__ import annotations

from typing import Any

from memest.config.setup import Setup
from memest.errors import ConfigError

__all__ = ["add_noise"]


def add_noise(model: Any, setup: Setup) -> None:
    """Hook NEFTune to a model's input embeddings, as the Trainer does, where a setup has it.

    Source: ``activate_neftune`` of transformers 5.23, which is what runs.

    Raises:
        ConfigError: the model has no input embeddings.
    """
    if setup.neftune_noise_alpha is None:
        return
    from transformers.integrations.neftune import activate_neftune

    try:
        activate_neftune(model, setup.neftune_noise_alpha)
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"--neftune-noise-alpha {setup.neftune_noise_alpha:g}: {type(model).__name__} has no "
            "input embeddings to add noise to."
        ) from error
