"""A copy of a live module on meta: its structure, no weights; the original stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from memest.errors import ModelLoadError
from memest.trace.cuda.known_values import attach
from memest.trace.model.quantization import Loading, twins_on_meta

__all__ = ["twin_of"]

_KNOWN_ELEMENTS = 1 << 20
"""Buffers up to this size may be asked for their values: masks, indices, tables."""
_MAX_DEPTH = 4


def twin_of(module: torch.nn.Module) -> tuple[torch.nn.Module, Loading | None]:
    """Copy a module without its weights.

    Parameters, buffers and whatever is on a GPU are made anew on meta; values of small buffers of
    integers and bools go along, because masks and indices may be asked for them.

    Returns:
        The copy, and how weights that are quantised come to the device (None without any).

    Raises:
        ModelLoadError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            # a step begins without gradients, and theirs are not to be copied
            memo[id(parameter.grad)] = None
    for buffer in module.buffers():
        memo[id(buffer)] = _meta_buffer(buffer)
    for part in module.modules():
        for value in _nested_tensors(vars(part), _MAX_DEPTH):
            # computed from parameters (the old weight_norm), or beside them on a GPU
            if not value.is_leaf or value.device.type not in ("cpu", "meta"):
                memo.setdefault(
                    id(value), torch.empty_like(value, device="meta", requires_grad=False)
                )
    loading = twins_on_meta(module, memo)
    try:
        return _unwrap(copy.deepcopy(module, memo)), loading
    except Exception as error:
        text = (str(error).strip().splitlines() or ["no message"])[0]
        raise ModelLoadError(
            f"The {type(module).__name__} cannot be copied (copy.deepcopy), and memest traces a "
            f"copy: {type(error).__name__}: {text} Give a function that builds it in its place: "
            "package.module:factory."
        ) from error


def _unwrap(twin: torch.nn.Module) -> torch.nn.Module:
    """The copy without what ``Accelerator.prepare`` put around its forward.

    That is a region of autocast and outputs in fp32 (``prepare_model`` keeps the original beside
    it), which the loop that is traced has itself.
    """
    for part in twin.modules():
        if "_original_forward" in vars(part):
            vars(part).pop("forward", None)
            original = vars(part).pop("_original_forward")
            if getattr(original, "__func__", None) is not type(part).forward:
                vars(part)["forward"] = original
    return twin


def _meta_buffer(buffer: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(buffer, device="meta")
    small = buffer.numel() <= _KNOWN_ELEMENTS and buffer.device.type != "meta"
    if not small or buffer.is_floating_point() or buffer.is_complex():
        return empty
    return attach(empty, buffer.detach().to("cpu", copy=True))


def _nested_tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in attributes, and in collections in them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _nested_tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _nested_tensors(item, depth - 1)
