"""Softmax and the losses' inner operators."""

from __future__ import annotations

from memest.workspaces.layout import acc_bytes, contiguous_copy, dense, integer, kernel_copy, tensor
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Workspace
from memest.workspaces.reduce import ReduceKernel, reduction_scratch
from memest.workspaces.registry import rule

__all__: list[str] = []


@rule("aten._softmax", "aten._log_softmax", needs="self")
def softmax(_call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Nothing, unless the input is not contiguous: a copy of it.

    Source: ATen/native/cuda/SoftMax.cu, host_softmax (1.10 to 2.x).
    Evidence: memory.
    """
    return contiguous_copy(spec, "softmax input, contiguous")


@rule("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Softmax: the product of gradient and output, full size; copies of what is not contiguous.

    ``log_softmax`` makes no product.

    Source: ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out, host_softmax_backward (1.1 on).
    Evidence: source; copies: memory.
    """
    grad, out = tensor(call, 0, "grad_output"), tensor(call, 1, "output")
    label = "softmax gradient, contiguous"
    copies = contiguous_copy(grad, label) + contiguous_copy(out, label)
    if call.op.startswith("aten._log") or grad is None or not grad.numel:
        return copies
    return (kernel_copy(grad, "softmax gradient x output"), *copies)


@rule("aten._safe_softmax", needs="self out")
def safe_softmax(
    _call: OpCall, gpu: GpuTraits, spec: TensorSpec, out: TensorSpec
) -> tuple[Workspace, ...]:
    """Before 2.11 the plain softmax, full size: masked rows become zero in a second tensor.

    Math attention calls it. What it makes besides is part of the trace.

    Source: ATen/native/transformers/attention.cpp, _safe_softmax (2.5 on).
    Evidence: recorded (torch 2.11: in place); before: source.
    """
    copies = contiguous_copy(spec, "softmax input, contiguous")
    if gpu.torch >= (2, 11):
        return copies
    return (*copies, kernel_copy(out, "softmax before masking"))


@rule("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss_backward")
def nll_loss(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Nothing, unless log-probabilities or targets are not contiguous: copies of them.

    Source: ATen/native/cuda/Loss.cu, NLLLoss2d.cu (1.10 to 2.x).
    Evidence: memory.
    """
    shift = 1 if call.op.startswith("aten.nll_loss_backward") else 0
    workspaces = contiguous_copy(tensor(call, shift, "self"), "loss input, contiguous")
    return workspaces + contiguous_copy(tensor(call, shift + 1, "target"), "targets, contiguous")


# -- losses ----------------------------------------------------------------------------------------


_NO_REDUCTION = 0
_MEAN = 1


def _reduced_loss(spec: TensorSpec, copies: int, gpu: GpuTraits) -> tuple[Workspace, ...]:
    kernel = ReduceKernel(acc_bytes(spec.dtype))
    dims = tuple(range(len(spec.shape)))
    scratch = reduction_scratch(dense(spec), dims, kernel, gpu, out_bytes=spec.itemsize)
    return (*[kernel_copy(spec, "loss before reduction")] * copies, *scratch)


@rule(
    "aten.mse_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    needs="self",
)
def reduced_loss(call: OpCall, gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """One loss value for each element, then the scratch of the mean or sum over all of them.

    ``binary_cross_entropy`` shrinks that tensor to the result without giving its memory back: there
    it is the result's own storage, which the trace shows.

    Source: ATen/native/Loss.cpp, cuda/Loss.cu (1.10 to 2.x).
    Evidence: source for mse_loss and smooth_l1_loss; the others: memory.
    """
    entropy = call.op.startswith("aten.binary_cross_entropy.")
    if integer(call, 3 if entropy else 2, "reduction", _MEAN) == _NO_REDUCTION:
        return ()
    return _reduced_loss(spec, 0 if entropy else 1, gpu)


@rule("aten.binary_cross_entropy_with_logits", needs="self")
def logits_loss(call: OpCall, gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Two full-sized temporaries (log-sigmoid and loss), four at most, then the mean's scratch.

    Source: ATen/native/Loss.cpp (a composition of operators inside one, 1.10 to 2.x).
    Evidence: memory.
    """
    size = spec.numel * spec.itemsize
    terms = Workspace(2 * size, "loss terms", high_nbytes=4 * size)
    if integer(call, 4, "reduction", _MEAN) == _NO_REDUCTION:
        return (terms,)
    return (terms, *_reduced_loss(spec, 0, gpu))


@rule("aten.multinomial", needs="self")
def multinomial(call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """For one draw, or without replacement: one number for each probability, freed with the result.

    Source: ATen/native/Distributions.cpp, multinomial_out (exponentials, divided in place; 1.10 to
    2.x).
    Evidence: source; recorded on the CPU, where the code is the same.
    """
    draws = integer(call, 1, "num_samples", 1)
    if draws > 1 and integer(call, 2, "replacement", 0):
        return ()
    return (kernel_copy(spec, "exponentials of a draw"),)
