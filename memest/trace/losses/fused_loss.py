"""Other libraries' kernels in place of a model's own head, loss and layers.

Losses of TRL and torchtune are in ``trl`` and ``torchtune``. Of cut cross-entropy and Liger the
library's own Python runs on meta, with its kernel launches left out (``no_triton``); what its
autograd functions allocate, save and reuse is its own doing. Things are told to it that meta
tensors cannot say: that their device counts as CUDA, what the GPU's properties are, and that there
is a Triton.

Source: cut-cross-entropy 25.1.1, ``linear_cross_entropy.py``, ``cce.py``, ``cce_backward.py``,
``cce_lse_forward.py``, ``indexed_dot.py``. liger-kernel 0.8, ``ops/`` and
``transformers/monkey_patch.py``; ``apply_liger_kernel`` of transformers ``integrations/liger.py``,
which the Trainer calls for ``use_liger_kernel``.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from memest.config.compilation import loss_and_chunks
from memest.config.packages import CUT_CROSS_ENTROPY, LIGER
from memest.errors import ConfigError
from memest.trace.cuda.no_triton import Library, without_triton
from memest.trace.losses.parts import parts_of
from memest.trace.losses.torchtune import torchtune_chunked, torchtune_linear
from memest.trace.losses.trl import trl_chunked, trl_fused
from memest.trace.model.adapters import base_of
from memest.workspaces.operator_call import GpuTraits

__all__ = ["apply_fused_loss", "apply_liger"]

_CUT = Library(
    "cut_cross_entropy",
    "cut_cross_entropy.",
    # compiled alone, these helpers (an argsort, a softcap) allocate what they do eagerly
    (("@torch.compile(fullgraph=True, dynamic=True)", ""),),
)


def _prepare() -> None:
    importlib.import_module("cut_cross_entropy")


@contextmanager
def apply_fused_loss(model: torch.nn.Module, gpu: GpuTraits, fused_loss: str) -> Iterator[None]:
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
    CUT_CROSS_ENTROPY.check()
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
            outputs.last_hidden_state,
            head.weight,
            labels,
            softcap=softcap,
            shift=True,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        # as it is called from transformers 5.24 on, and before
        cache = "cache" if hasattr(outputs, "cache") else "past_key_values"
        return CausalLMOutputWithPast(loss=loss, **{cache: getattr(outputs, cache, None)})

    return forward


def _parts(model: Any) -> tuple[Any, Any, float | None]:
    """The decoder, the head and the soft cap of the logits.

    Raises:
        ConfigError: the model is no causal language model with a plain linear head.
    """
    parts = parts_of(model, "--fused-loss cce")
    reason = ""
    if type(parts.head) is not torch.nn.Linear:
        reason = f"its head is a {type(parts.head).__name__}, not a plain linear layer"
    elif parts.head.bias is not None:
        reason = "its head has a bias, which the kernel does not add"
    elif getattr(parts.config, "output_router_logits", False):
        reason = "its loss has a second part, that of the routers"
    if reason:
        raise ConfigError(
            f"--fused-loss cce does not go with {type(model).__name__}: {reason}. Leave it out."
        )
    return parts.backbone, parts.head, parts.softcap


# -- Liger -----------------------------------------------------------------------------------------


_LIGER = Library(
    "liger_kernel",
    "liger_kernel.ops.",
    (
        ('device.type == "cuda"', 'device.type == "meta"'),
        ('device.type != "cuda"', 'device.type != "meta"'),
    ),
)


def _prepare_liger() -> None:
    utils: Any = importlib.import_module("liger_kernel.utils")
    utils.infer_device = lambda: "cuda"
    # it warns of backends that are not installed; the Triton kernels are its default
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    importlib.import_module("liger_kernel.transformers")


@contextmanager
def apply_liger(model: torch.nn.Module, gpu: GpuTraits) -> Iterator[None]:
    """Apply Liger's kernels to a model as the Trainer does, for the time of a trace.

    Args:
        model: of transformers, on meta. Its own modules stay patched; what Liger replaces in
            transformers is put back.
        gpu: whose properties Liger asks for.

    Raises:
        MissingDependencyError: liger-kernel is not installed.
        ConfigError: Liger has no kernels for this kind of model.
    """
    LIGER.check()
    properties = types.SimpleNamespace(
        multi_processor_count=gpu.sm_count, major=gpu.capability[0], minor=gpu.capability[1]
    )
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", properties),
            ("get_device_capability", gpu.capability),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(without_triton(_LIGER, _prepare_liger))
        stack.enter_context(_restore_modules(model))
        apply = importlib.import_module("liger_kernel.transformers.monkey_patch")
        # apply_liger_kernel of transformers takes what adapters are put around
        model = base_of(model)
        kind = str(getattr(getattr(model, "config", None), "model_type", ""))
        if kind not in apply.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(
                f"--use-liger-kernel: Liger has no kernels for models of type {kind!r}, and the "
                "Trainer would train without them. Leave it out."
            )
        apply._apply_liger_kernel_to_instance(model=model)
        yield


@contextmanager
def _restore_modules(model: torch.nn.Module) -> Iterator[None]:
    """What Liger replaces in transformers' modules and in torch is as before afterwards."""
    owners = {
        type(part).__module__
        for part in model.modules()
        if type(part).__module__.startswith("transformers.")
    }
    spaces = [sys.modules[name].__dict__ for name in sorted(owners)]
    classes = {type(part) for part in model.modules() if type(part).__module__ in owners}
    namespaces = [(space, dict(space)) for space in spaces]
    forwards = [(kind, kind.__dict__.get("forward")) for kind in classes]
    cross_entropy = torch.nn.functional.cross_entropy
    try:
        yield
    finally:
        torch.nn.functional.cross_entropy = cross_entropy
        for space, values in namespaces:
            space.update(values)
        for kind, forward in forwards:
            if forward is not None and kind.__dict__.get("forward") is not forward:
                kind.forward = forward
