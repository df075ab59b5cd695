"""What peft did otherwise in earlier releases, where it prepares a quantised base."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["prepare_int8"]


def prepare_int8(model: Any) -> None:
    """Freeze a base, make its layer norms float32, and its logits too.

    Only vectors whose name has ``layer_norm`` in it are cast, so that ``input_layernorm`` of Llama
    stays as it was loaded. Source: ``prepare_model_for_int8_training`` of peft 0.2.0; all of what
    was not quantised became float32 in 0.3.0, and nothing was left of the head's cast.

    Args:
        model: quantised; it is changed.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(requires_grad=False)
        if parameter.ndim == 1 and "layer_norm" in name:
            parameter.data = parameter.data.to(torch.float32)
    head = getattr(model, "lm_head", None)
    if head is None:
        return
    dtype = head.weight.dtype
    head.register_forward_pre_hook(lambda _head, inputs: (inputs[0].to(dtype),))
    head.register_forward_hook(lambda _head, _inputs, logits: logits.to(torch.float32))
