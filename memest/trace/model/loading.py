"""The load phase: how the weights come to the device, in the order of their allocations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memest.events import CAST, REFERENCE, WARM_UP, Category
from memest.trace.model.adapters import base_of, kept_dtype
from memest.trace.model.packed import GptqLinear, packed_layers
from memest.trace.model.quantization import (
    Loading,
    code_tables,
    companions,
    is_quantized,
    quantize_weight,
)
from memest.trace.recorder import Recorder

__all__ = ["load", "load_reference"]


def load(model: torch.nn.Module, recorder: Recorder, loading: Loading | None = None) -> None:
    """Record the weights of a model as a training script brings them to the device.

    Args:
        model: parameters and buffers on meta.
        recorder: at work.
        loading: where it is not ``model.to(device)``.
    """
    loaded_ids: set[int] = set()
    if loading is not None and loading.quantized:
        base = base_of(model)
        adapter_ids = (
            {id(p) for p in model.parameters() if p.requires_grad} if base is not model else ()
        )
        with code_tables():
            _cast(recorder, _load_quantized(base, recorder, loading, loaded_ids, adapter_ids))
    to_cast: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []
    for path, tensor, category in _tensors(model):
        if id(tensor) not in loaded_ids:
            loaded_ids.add(id(tensor))
            first_dtype = loading is not None and loading.quantized and _dtype_before_cast(tensor)
            first = torch.empty_like(tensor, dtype=first_dtype) if first_dtype else tensor
            if first_dtype:
                to_cast.append((path, tensor, first))
            recorder.adopt(first, category, path, "load")
            del first
    _cast(recorder, to_cast)


def load_reference(reference: torch.nn.Module, recorder: Recorder) -> None:
    """Record the weights of a reference model, which come to the device behind the model's."""
    loaded_ids: set[int] = set()
    for path, tensor, _ in _tensors(reference):
        if id(tensor) not in loaded_ids:
            loaded_ids.add(id(tensor))
            recorder.adopt(tensor, Category.REFERENCE, f"{REFERENCE}.{path}", "load")


def _dtype_before_cast(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype that a parameter has before a library casts it; None where none does."""
    name = kept_dtype(parameter)
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return None if dtype == parameter.dtype else dtype


def _cast(recorder: Recorder, to_cast: list[tuple[str, torch.nn.Parameter, torch.Tensor]]) -> None:
    """What lies on the device is cast there, one parameter after the other (:data:`CAST`)."""
    while to_cast:
        path, parameter = to_cast[0][:2]
        recorder.adopt(parameter, Category.PARAMETERS, path, CAST)
        del to_cast[0]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Category]]:
    """``model.to(device)``: children first, parameters before buffers (``Module._apply``)."""

    def visit(module: torch.nn.Module, prefix: str) -> Any:
        for name, child in module.named_children():
            yield from visit(child, f"{prefix}.{name}" if prefix else name)
        for tensors, category in (
            (module._parameters, Category.PARAMETERS),
            (module._buffers, Category.BUFFERS),
        ):
            for tensor in tensors.values():
                if tensor is not None:
                    yield prefix, tensor, category

    yield from visit(model, "")


def _load_quantized(
    base: torch.nn.Module,
    recorder: Recorder,
    loading: Loading,
    loaded_ids: set[int],
    adapter_ids: Collection[int],
) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """``from_pretrained`` with a quantiser, then ``prepare_model_for_kbit_training``.

    Every weight arrives in its dtype and is quantised there and then; the copy is let go of. What
    is cast afterwards is cast one parameter after the other. Adapters (``adapter_ids``) come later.

    Returns:
        Parameters that a library casts behind that, with what stands for them until then.
    """
    _warm_up(base, recorder, loading, adapter_ids)
    loaded_copies: dict[int, torch.Tensor] = {}
    to_cast: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []
    for path, module in base.named_modules():
        has_quantized_weight = is_quantized(module)
        if has_quantized_weight:
            layer: Any = module
            shape = (layer.out_features, layer.in_features)
            if not loading.ready:
                quantize_weight(layer, torch.empty(shape, dtype=loading.dtype, device="meta"))
            for tensor in (layer.weight, *companions(layer)):
                # the table of codes is made without an operator
                recorder.adopt(tensor, Category.PARAMETERS, path, "load")
                recorder.tag(tensor, Category.PARAMETERS, path)
            loaded_ids.add(id(layer.weight))
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in loaded_ids or id(parameter) in adapter_ids:
                continue
            loaded_ids.add(id(parameter))
            load_dtype = loading.cast_from.get(id(parameter))
            first_dtype = _dtype_before_cast(parameter)
            if load_dtype is None and first_dtype is None:
                recorder.adopt(parameter, Category.PARAMETERS, path, "load")
            elif load_dtype is None:
                to_cast.append((path, parameter, torch.empty_like(parameter, dtype=first_dtype)))
                recorder.adopt(to_cast[-1][2], Category.PARAMETERS, path, "load")
            else:
                loaded_copies[id(parameter)] = torch.empty_like(parameter, dtype=load_dtype)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in loaded_ids:
                loaded_ids.add(id(buffer))
                is_packed = isinstance(module, GptqLinear)
                kind = Category.PARAMETERS if is_packed else Category.BUFFERS
                recorder.adopt(buffer, kind, path, "load")
    for path, module in base.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in loaded_copies:
                first_dtype = _dtype_before_cast(parameter)
                loaded_tensor = (
                    parameter
                    if first_dtype is None
                    else torch.empty_like(parameter, dtype=first_dtype)
                )
                if first_dtype is not None:
                    to_cast.append((path, parameter, loaded_tensor))
                recorder.adopt(loaded_tensor, Category.PARAMETERS, path, "load")
                del loaded_copies[id(parameter)], loaded_tensor
    return to_cast


def _warm_up(
    base: torch.nn.Module, recorder: Recorder, loading: Loading, adapter_ids: Collection[int]
) -> None:
    """One large block that transformers takes and gives back, for the weights to be cut from.

    Source: ``caching_allocator_warmup`` and ``get_total_byte_count`` (transformers 5): a quantised
    weight counts by its elements times the bytes of one, half a byte in 4 bits.
    """
    total = 0
    for parameter in base.parameters():
        if id(parameter) in adapter_ids:
            continue
        state = getattr(parameter, "quant_state", None)
        load_dtype = loading.cast_from.get(id(parameter), parameter.dtype)
        total += (
            parameter.numel() * load_dtype.itemsize if state is None else state.shape.numel() // 2
        )
    # of other buffers the loader counts too what a checkpoint holds, which is next to nothing
    for layer in packed_layers(base):
        total += sum(tensor.nbytes for tensor in layer.state_dict().values())
    recorder.note("loading begins with one block of the size of the weights, as transformers does")
    with _disable_current_modes():  # it has a name of its own
        warm = torch.empty(total // 2, dtype=torch.float16, device="meta")
    recorder.adopt(warm, Category.TEMPORARIES, "", WARM_UP)
    del warm
