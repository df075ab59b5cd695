"""Losses that reduce inside one operator: the unreduced loss is a temporary of full size."""

from __future__ import annotations

from memest.hidden.call import GpuTraits, Hidden, OpCall, TensorSpec
from memest.hidden.layout import acc_bytes, integer, tensor
from memest.hidden.reduce import ReduceKernel, reduction_scratch
from memest.hidden.registry import rule

__all__ = []

_NO_REDUCTION = 0
_MEAN = 1


def _unreduced(spec: TensorSpec) -> TensorSpec:
    stride: list[int] = []
    step = 1
    for extent in reversed(spec.shape):
        stride.insert(0, step)
        step *= max(extent, 1)
    return TensorSpec(spec.shape, tuple(stride), spec.dtype)


def _reduced_loss(spec: TensorSpec, copies: int, gpu: GpuTraits) -> tuple[Hidden, ...]:
    dense = _unreduced(spec)
    kernel = ReduceKernel(acc_bytes(spec.dtype))
    dims = tuple(range(len(spec.shape)))
    scratch = reduction_scratch(dense, dims, kernel, gpu, out_bytes=spec.itemsize)
    whole = Hidden(spec.numel * spec.itemsize, "loss before reduction")
    return (*[whole] * copies, *scratch)


@rule("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy")
def reduced_loss(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """One loss value for each element, then the scratch of the mean or sum over all of them.

    ``binary_cross_entropy`` shrinks that tensor to the result without giving its memory back: there
    it is the result's own storage, which the trace shows.

    Source: ATen/native/Loss.cpp, cuda/Loss.cu (1.10 to 2.x).
    Evidence: source for mse_loss and smooth_l1_loss; the others: memory.
    """
    spec = tensor(call, 0, "self")
    entropy = call.op.startswith("aten.binary_cross_entropy.")
    position = 3 if entropy else 2
    if spec is None or not spec.numel:
        return ()
    if integer(call, position, "reduction", _MEAN) == _NO_REDUCTION:
        return ()
    return _reduced_loss(spec, 0 if entropy else 1, gpu)


@rule("aten.binary_cross_entropy_with_logits")
def logits_loss(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Two full-sized temporaries (log-sigmoid and loss), four at most, then the mean's scratch.

    Source: ATen/native/Loss.cpp (a composition of operators inside one, 1.10 to 2.x).
    Evidence: memory.
    """
    spec = tensor(call, 0, "self")
    if spec is None or not spec.numel:
        return ()
    size = spec.numel * spec.itemsize
    terms = Hidden(2 * size, "loss terms", high_nbytes=4 * size)
    if integer(call, 4, "reduction", _MEAN) == _NO_REDUCTION:
        return (terms,)
    return (terms, *_reduced_loss(spec, 0, gpu))
