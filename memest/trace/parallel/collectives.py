"""Collectives as a trace sees them, and batches of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memest.config.parallelism import Distributed
from memest.trace.cuda.known_values import assume, attach, evaluate, recipe_of
from memest.trace.recorder import Handler, Recorder

__all__ = ["IGNORED", "Gather", "collective_handlers", "with_positions"]

aten = torch.ops.aten

IGNORED = -100
"""The label of tokens that do not count."""
_EXCHANGE_NOTE = (
    "Experts are shared between GPUs, and each is taken to receive as many routed tokens as it "
    "sends; routing decides in a real run, and a GPU whose experts are sought needs more."
)
_BELOW_RING = (
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.reshape.default,
    aten.chunk.default,
    aten.to.dtype,
    aten.log_sigmoid.default,
)
"""Composites that ``_templated_ring_attention`` and its backward call, below autograd."""
_BELOW_LOSS = (aten.to.dtype, aten.to.device, aten.flatten.using_ints, aten.where.ScalarOther)
"""Composites that ``loss_parallel`` calls below autograd."""


def collective_handlers(distributed: Distributed) -> dict[Any, Handler]:
    """Handlers of collectives, and of composites that stand below autograd beside them.

    Waiting for a collective makes no tensor, and what is waited for is wrapped meanwhile. The meta
    kernels of these operators return new ones. Looking at what is waited for (a slice without
    padding) is the wrapper's doing, below autograd: no view keeps what it looks at.

    Ring attention, and torch's styles of sequence parallelism (``async_op=True``), wait for a
    collective when its result is used first.

    Args:
        distributed: says what ranks share.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    functional = torch.ops._c10d_functional

    def pass_on(_recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
        return args[0]

    def wrap(_recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
        return AsyncCollectiveTensor(args[0])

    handlers: dict[Any, Handler] = {
        functional._wrap_tensor_autograd.default: wrap,
        functional.wait_tensor.default: pass_on,
        torch.ops.c10d.alltoall_base_.default: _exchange,
    }
    gathers = functional.all_gather_into_tensor.default
    if distributed.cp > 1:
        sending = gathers, functional.all_to_all_single.default
        handlers.update(_asynchronous_handlers(sending, _BELOW_RING))
    if distributed.tp_sequence_parallel:
        sending = gathers, functional.reduce_scatter_tensor.default
        handlers.update(_asynchronous_handlers(sending, _BELOW_LOSS))
    return handlers


def _exchange(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """What the others send is taken to be what is sent to them, where that is known.

    Numbers of tokens are exchanged so (``AllToAllEP._dispatch_tokens``), before the tokens are.
    """
    out = func(*args, **kwargs)
    target, source = args[:2]
    if target.device.type == "meta" and recipe_of(source) is not None:
        value = evaluate(source)
        if value is not None:
            shape = tuple(target.shape)
            assume(target, lambda: value.reshape(shape), _EXCHANGE_NOTE)
    return out


def _asynchronous_handlers(
    collectives: tuple[Any, ...], composites: tuple[Any, ...]
) -> dict[Any, Handler]:
    """Collectives that keep what they send until it is waited for, and composites taken apart.

    Source: ``TensorShelf`` of ``ProcessGroupNCCL.hpp`` (torch 2.8 and later): asynchronous
    collectives keep their tensors until ``Work.wait``. The operators of torch's functional
    collectives are asynchronous, and ``AsyncCollectiveTensor`` waits when it is used.

    Args:
        collectives: of torch's functional collectives, whose first argument is sent.
        composites: which arrive whole because they are called below autograd.
    """
    sent_tensors: dict[int, torch.Tensor] = {}

    def send(_recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        sent_tensors[out.untyped_storage()._cdata] = args[0]
        return out

    def wait(_recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
        sent_tensors.pop(args[0].untyped_storage()._cdata, None)
        return args[0]

    return {
        **dict.fromkeys(composites, _decompose),
        **dict.fromkeys(collectives, send),
        torch.ops._c10d_functional.wait_tensor.default: wait,
    }


def _decompose(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Here are the parts of a composite that arrived whole."""
    with recorder:
        return func.decompose(*args, **kwargs)


# -- batches ---------------------------------------------------------------------------------------


def with_positions(batch: dict[str, Any]) -> dict[str, Any]:
    """A collator counts the positions of a batch before anything is cut.

    Args:
        batch: to which ``position_ids`` are added where it has tokens and no positions.
    """
    ids = batch.get("input_ids")
    if "position_ids" not in batch and isinstance(ids, torch.Tensor) and ids.dim() == 2:
        positions = torch.empty_like(ids)
        batch["position_ids"] = attach(positions, torch.arange(ids.shape[1]).expand(ids.shape))
    return batch


# -- an evaluation's -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gather:
    """Gathers tensors of all processes, which have the same shapes here: those of the largest.

    Attributes:
        ranks: processes; None where none was launched beside this one, and nothing is copied. One
            that was launched as one of several gathers from itself.
    """

    ranks: int | None

    def __call__(self, value: Any) -> Any:
        """A tensor, or several in tuples, lists and mappings, gathered one after the other."""
        return value if self.ranks is None else _map_tensors(self._gather, value)

    def pad(self, value: Any) -> None:
        """``pad_across_processes`` along the second dimension, where nothing is to be padded.

        The sizes of all processes are gathered, and compared on the host.
        """
        if self.ranks is not None and value is not None:
            _map_tensors(self._gather_sizes, value)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        ranks = self.ranks or 1
        if tensor.ndim == 0:
            tensor = tensor.clone()[None]
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        flat = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return flat.view(-1, *tensor.shape[1:])

    def _gather_sizes(self, tensor: torch.Tensor) -> None:
        if tensor.ndim > 1:
            size = torch.empty(tensor.ndim, dtype=torch.int64, device=tensor.device)
            self._gather(size[None])


def _map_tensors(function: Any, value: Any) -> Any:
    """As ``recursively_apply``, which knows named tuples by their fields."""
    if isinstance(value, (tuple, list)):
        items = [_map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        kind: Any = type(value)
        return kind({name: _map_tensors(function, item) for name, item in value.items()})
    return function(value)
