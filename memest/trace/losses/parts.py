"""A causal language model taken apart, for losses that apply its head themselves.

Source: transformers ``get_decoder``, ``get_output_embeddings``, ``base_model``; ``get_text_config``
for what the logits go through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from memest.errors import ConfigError
from memest.trace.model.adapters import base_of, kept_dtype

__all__ = ["SCALES", "Parts", "gathered_head", "parts_of"]

SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class Parts:
    """A causal language model, taken apart.

    Attributes:
        config: of its text part.
        backbone: everything but the head; gives the last hidden states.
        head: the module that makes logits of them.
        softcap: by which ``tanh`` caps the logits; None for none.
        scale: name of the setting that scales the logits; "" where none does.
    """

    config: Any
    backbone: Any
    head: Any
    softcap: float | None
    scale: str

    @staticmethod
    def whole(tensor: Any) -> Any:
        """What a head has; where FSDP2 has left it in shards, gathered by the loss itself."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def gathered_head(model: Any, gathers: str) -> Iterator[None]:
    """A head that the loss gathers (``DTensor.full_tensor``), for the time of a trace.

    Where it is tied to the input embeddings it lies in one unit with them, which is gathered.

    Args:
        model: perhaps wrapped by adapters.
        gathers: ``Distributed.gathers_head``.
    """
    base = base_of(model)
    tied = gathers and base.get_input_embeddings().weight is base.get_output_embeddings().weight
    if not gathers or tied:
        yield
        return

    def gather(tensor: Any) -> Any:
        if tensor is None:
            return None
        name = (kept_dtype(tensor) or gathers) if gathers == "own" else gathers
        return torch.empty_like(tensor, dtype=getattr(torch, name, tensor.dtype))

    with mock.patch.object(Parts, "whole", staticmethod(gather)):
        yield


def parts_of(
    model: Any,
    flag: str,
    *,
    kinds: Sequence[str] = ("ForCausalLM",),
    scales: Sequence[str] = (),
    is_base: bool = False,
) -> Parts:
    """Take a model apart for a loss.

    Args:
        model: of transformers, without wrappers.
        flag: what asks for the loss, for errors.
        kinds: how the names of classes end that it goes with.
        scales: settings of scaled logits that it knows.
        is_base: the backbone is the model's ``base_model``, not its decoder alone.

    Raises:
        ConfigError: the model is none that generates text from left to right, or its logits are
            scaled in a way that the loss does not know.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    reason = ""
    if not name.endswith(tuple(kinds)) or getattr(config, "is_encoder_decoder", False):
        reason = "it is for causal language models"
    backbone = None if reason else model.base_model if is_base else model.get_decoder()
    head: Any = None if reason else model.get_output_embeddings()
    scale = next((s for s in SCALES if getattr(text, s, None) not in (None, 1, 1.0)), "")
    if not reason and (backbone is None or backbone is model):
        reason = "its decoder cannot be told from the rest"
    if not reason and getattr(head, "weight", None) is None:
        reason = f"its head is a {type(head).__name__}, which has no weight of its own"
    if not reason and scale and scale not in scales:
        reason = f"its logits are scaled ({scale}), which this loss does not do"
    if reason:
        raise ConfigError(f"{flag} does not go with {name}: {reason}. Leave it out.")
    return Parts(text, backbone, head, getattr(text, "final_logit_softcapping", None), scale)
