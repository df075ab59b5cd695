"""The switches of a model that a training script sets before it trains."""

from __future__ import annotations

from typing import Any

from memest.errors import ConfigError
from memest.setup import Loop, Setup

__all__ = ["set_checkpointing", "set_use_cache"]


def set_use_cache(model: Any, setup: Setup) -> None:
    """The Trainer of transformers 5 switches the cache off; scripts keep the config's value."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "use_cache"):
        return
    version = setup.software.transformers or (5, 0)
    if setup.use_cache is not None:
        config.use_cache = setup.use_cache
    elif setup.loop is Loop.TRAINER and version >= (5, 0):
        config.use_cache = False


def set_checkpointing(model: Any, setup: Setup) -> None:
    """The model's own activation checkpointing, as its training script switches it on.

    transformers renamed ``gradient_checkpointing_enable`` in 5.x; the old name is used where the
    new one is missing.

    Raises:
        ConfigError: the model has no checkpointing of its own.
    """
    every = setup.checkpoint_every
    enabled = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    enable = _method(model, "enable")
    if not every:
        if enabled and (disable := _method(model, "disable")) is not None:
            disable()
        return
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"--checkpointing: {type(model).__name__} has no activation checkpointing of its own. "
            "Leave it out."
        )
    more = {"every_n_layers": every} if every > 1 else {}
    try:
        enable({"use_reentrant": setup.recomputes_reentrantly}, **more)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--checkpointing {setup.checkpointing}: {type(model).__name__} refuses it: {error}"
        ) from error


def _method(model: Any, verb: str) -> Any:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        found = getattr(model, f"{name}_{verb}", None)
        if found is not None:
            return found
    return None
