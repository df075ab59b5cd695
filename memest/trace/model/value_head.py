"""A causal language model with a value for each token beside its head: LLaMA-Factory's rewards.

Source: TRL 0.24 ``models/modeling_value_head.py`` (``AutoModelForCausalLMWithValueHead``), which
LLaMA-Factory puts around a model that has its adapters already (``load_model``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["add_value_head", "with_values"]


class ValueHead(torch.nn.Module):
    """One number for each token, of the last hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        share = getattr(config, "summary_dropout_prob", 0.1)
        self.dropout = torch.nn.Dropout(share) if share else torch.nn.Identity()
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)
        self.summary = torch.nn.Linear(width, 1, device="meta", dtype=torch.float32)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See the class."""
        output: torch.Tensor = self.dropout(hidden_states)
        if output.dtype != self.summary.weight.dtype:
            output = output.to(self.summary.weight.dtype)
        return self.summary(output)  # type: ignore[no-any-return]


def add_value_head(model: torch.nn.Module) -> None:
    """Give a model on meta a ``v_head``, which trains in float32 whatever else does.

    Args:
        model: inside its adapters, if it has any.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    model.v_head = ValueHead(text)


def with_values(model: Any) -> Callable[..., tuple[Any, ...]]:
    """The forward of a model with its ``v_head``: logits in float32, its own loss, and values."""
    of_model = model.forward

    def forward(**inputs: Any) -> tuple[Any, ...]:
        output = of_model(**{**inputs, "output_hidden_states": True})
        last_hidden_state = output.hidden_states[-1]
        logits = output.logits
        loss = output.loss
        value = model.v_head(last_hidden_state).squeeze(-1)
        if logits.dtype != torch.float32:
            logits = logits.float()
        return (logits, loss, value)

    return forward
