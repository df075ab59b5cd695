"""Losses of other libraries in place of a model's head and cross-entropy.

The losses of TRL and torchtune are written anew in ``trl_losses`` and ``torchtune_losses``. Of cut
cross-entropy the library's own Python runs on meta, with its kernel launches left out
(``no_triton``); what its autograd function allocates and saves is its own doing.

Source: cut-cross-entropy 25.1.1, ``linear_cross_entropy.py``, ``cce.py``, ``cce_backward.py``,
``cce_lse_forward.py``, ``indexed_dot.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from memest.compilation import loss_and_chunks
from memest.errors import ConfigError, MissingDependencyError
from memest.hidden.call import GpuTraits
from memest.trace.adapters import base_of
from memest.trace.head_and_loss import parts_of
from memest.trace.no_triton import Library, without_triton
from memest.trace.torchtune_losses import torchtune_chunked, torchtune_linear
from memest.trace.trl_losses import trl_chunked, trl_fused

__all__ = ["fused_loss_applied"]

_CUT = Library(
    "cut_cross_entropy",
    "cut_cross_entropy.",
    # compiled alone, these helpers (an argsort, a softcap) allocate what they do eagerly
    (("@torch.compile(fullgraph=True, dynamic=True)", ""),),
)


def _prepare() -> None:
    importlib.import_module("cut_cross_entropy")


@contextmanager
def fused_loss_applied(model: torch.nn.Module, gpu: GpuTraits, fused_loss: str) -> Iterator[None]:
    """Compute the loss of a causal language model by another library, for the time of a trace.

    Args:
        model: of transformers, on meta, perhaps wrapped by adapters.
        gpu: whose properties a library asks for.
        fused_loss: as a setup names it.

    Raises:
        MissingDependencyError: cut-cross-entropy is not installed.
        ConfigError: the model's head and loss are others than the library computes.
    """
    base: Any = base_of(model)
    name, chunks = loss_and_chunks(fused_loss)
    if name == "cce":
        with _cut_cross_entropy(base, gpu):
            yield
        return
    forward = {
        "trl-fused": lambda: trl_fused(base),
        "trl-chunked": lambda: trl_chunked(base),
        "torchtune-chunked": lambda: torchtune_chunked(base, chunks),
        "torchtune-linear": lambda: torchtune_linear(base, chunks),
    }[name]()
    with mock.patch.object(base, "forward", forward):
        yield


@contextmanager
def _cut_cross_entropy(base: Any, gpu: GpuTraits) -> Iterator[None]:
    """Cut cross-entropy.

    The decoder runs as it is; its last hidden states, the head's weight and the labels go to
    ``linear_cross_entropy(..., shift=True)``, with the sum of the losses divided by the number of
    items where the Trainer gives one, as patches of this loss do.
    """
    if importlib.util.find_spec("cut_cross_entropy") is None:
        raise MissingDependencyError(
            "--fused-loss cce is priced by tracing cut-cross-entropy, which is not installed: pip "
            "install --no-deps cut-cross-entropy"
        )
    decoder, head, softcap = _parts(base)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu.capability),
        without_triton(_CUT, _prepare),
    ):
        loss: Any = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        with mock.patch.object(base, "forward", _forward(decoder, head, softcap, loss)):
            yield


def _forward(
    decoder: Any, head: Any, softcap: float | None, cross_entropy: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def forward(
        input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        outputs = decoder(input_ids=input_ids, **kwargs)
        dtype = outputs.last_hidden_state.dtype
        if dtype not in (torch.float16, torch.bfloat16) and torch.is_grad_enabled():
            raise ConfigError(
                f"--fused-loss cce: the last hidden states are {dtype}, and cut-cross-entropy's "
                "backward requires them to be bf16 or fp16. Use half-precision weights: --dtype "
                "bfloat16."
            )
        loss = cross_entropy(
            outputs.last_hidden_state, head.weight, labels, softcap=softcap, shift=True,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return CausalLMOutputWithPast(
            loss=loss, past_key_values=getattr(outputs, "past_key_values", None)
        )

    return forward


def _parts(model: Any) -> tuple[Any, Any, float | None]:
    """The decoder, the head and the soft cap of the logits.

    Raises:
        ConfigError: the model is no causal language model with a plain linear head.
    """
    parts = parts_of(model, "cce")
    why = ""
    if type(parts.head) is not torch.nn.Linear:
        why = f"its head is a {type(parts.head).__name__}, not a plain linear layer"
    elif parts.head.bias is not None:
        why = "its head has a bias, which the kernel does not add"
    elif getattr(parts.config, "output_router_logits", False):
        why = "its loss has a second part, that of the routers"
    if why:
        raise ConfigError(
            f"--fused-loss cce does not go with {type(model).__name__}: {why}. Leave it out."
        )
    return parts.backbone, parts.head, parts.softcap
