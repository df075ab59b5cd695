"""cuBLAS and cuBLASLt: workspaces in the caching allocator, and copies of awkward operands."""

from __future__ import annotations

from memest.hidden.call import GpuTraits, Hidden, Lifetime, OpCall, TensorSpec
from memest.hidden.layout import is_contiguous, is_dense, kernel_copy, numel, tensor
from memest.hidden.registry import rule
from memest.units import KIB, MIB

__all__ = ["cublas_workspace", "cublaslt_workspace"]

_COPY = "matmul operand, contiguous"
_BLAS_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})
_LT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


def cublas_workspace(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """The workspace of the calling thread's cuBLAS handle, by GPU generation and version.

    Source: ATen/cuda/CublasHandlePool.cpp; PR 83461 (1.13, 4 MiB), 91564 (2.0, 8.125 MiB and
    32 MiB on Hopper), 175344 (2.12, 32 MiB on Blackwell), 194311 (after 2.13, per call).
    Evidence: recorded (2 x 33554432 on H100, 8519680 elsewhere); releases inferred from dates.
    """
    if gpu.torch < (1, 13):
        return ()  # cuBLAS allocated for itself, outside the caching allocator
    major = gpu.capability[0]
    if gpu.torch < (2, 0):
        nbytes = 4 * MIB
    elif major == 9 or (major >= 10 and gpu.torch >= (2, 12)):
        nbytes = 32 * MIB
    else:
        nbytes = 2 * 4096 * KIB + 8 * 16 * KIB
    if gpu.torch >= (2, 14):
        return (Hidden(nbytes, "cuBLAS workspace"),)
    key = ("cublas", call.thread)
    return (Hidden(nbytes, "cuBLAS workspace", Lifetime.PERSISTENT, key),)


def cublaslt_workspace(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """What a cuBLASLt matmul needs: 1 MiB, per call, per thread, or inside the cuBLAS workspace.

    Source: PR 73439 (1 MiB per call), 156495 (2.9, kept), 168175 (2.11, the cuBLAS workspace),
    194311 (after 2.13, per call again).
    Evidence: source; releases inferred from the dates of the pull requests.
    """
    own = cublas_workspace(call, gpu)
    if gpu.torch >= (2, 14):
        return (Hidden(MIB, "cuBLASLt workspace"),)
    if gpu.torch >= (2, 11):
        return own
    if gpu.torch >= (2, 9):
        key = ("cublaslt", call.thread)
        return (*own, Hidden(MIB, "cuBLASLt workspace", Lifetime.PERSISTENT, key))
    # the Lt handle is the cuBLAS handle, so asking for it makes that workspace as well
    return (Hidden(MIB, "cuBLASLt workspace"), *own)


@rule("aten.mm", "aten.addmm", "aten.addmm_", "aten._addmm_activation")
def matrix_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Copies of operands without a unit stride, then the cuBLAS or (fused bias) Lt workspace.

    An expanded gradient is the usual operand that is copied.

    Source: ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl, cublasCommonArgs (1.13 to 2.13).
    Evidence: source; workspaces: recorded.
    """
    shift = 0 if call.op.startswith("aten.mm.") else 1
    first, second = tensor(call, shift, "mat1"), tensor(call, shift + 1, "mat2")
    out = call.outputs[0] if call.outputs else None
    if first is None or second is None or out is None or out.dtype not in _BLAS_DTYPES:
        return ()
    if not out.numel or not first.numel:
        return ()
    # a row-major result makes cuBLAS compute the transposed product: second operand first
    pair = (second, first) if is_contiguous(out) else (first, second)
    copies = tuple(kernel_copy(spec, _COPY) for spec in pair if not _matrix_usable(spec))
    bias = tensor(call, 0, "self") if shift else None
    fused = bias is not None and _lt_fuses(call, bias, first, second, out, gpu)
    return copies + (cublaslt_workspace if fused else cublas_workspace)(call, gpu)


@rule("aten.bmm", "aten.baddbmm", "aten.baddbmm_")
def batched_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Copies of operands whose matrices have no unit stride, then the cuBLAS workspace.

    Source: ATen/native/cuda/Blas.cpp, baddbmm_out_cuda_impl (1.13 to 2.13).
    Evidence: source; workspaces: recorded.
    """
    shift = 0 if call.op.startswith("aten.bmm") else 1
    first, second = tensor(call, shift, "batch1"), tensor(call, shift + 1, "batch2")
    out = call.outputs[0] if call.outputs else None
    if first is None or second is None or out is None or out.dtype not in _BLAS_DTYPES:
        return ()
    if not out.numel or not first.numel:
        return ()
    pair = (second, first) if is_contiguous(out) else (first, second)
    copies = tuple(kernel_copy(spec, _COPY) for spec in pair if not _batch_usable(spec))
    return copies + cublas_workspace(call, gpu)


@rule("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot")
def vector_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Copies of a matrix without a unit stride and of an expanded vector, then the workspace.

    Source: ATen/native/cuda/Blas.cpp, addmv_out_cuda, dot_cuda (1.13 to 2.13).
    Evidence: source for dot; copies of addmv: memory.
    """
    shift = 1 if call.op.startswith("aten.addmv") else 0
    first, second = tensor(call, shift, "self"), tensor(call, shift + 1, "vec")
    if first is None or second is None or first.dtype not in _BLAS_DTYPES or not first.numel:
        return ()
    copies: tuple[Hidden, ...] = ()
    if len(first.shape) == 2:
        if second.stride and second.stride[0] == 0 and second.numel > 1:
            copies = (kernel_copy(second, _COPY),)
        if not _matrix_usable(first):
            copies = (*copies, kernel_copy(first, _COPY))
    return copies + cublas_workspace(call, gpu)


@rule("aten.linear")
def linear(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """As mm or addmm on the flattened input, where a trace keeps ``linear`` whole.

    Source: ATen/native/Linear.cpp (2.x).
    Evidence: memory.
    """
    spec, weight = tensor(call, 0, "input"), tensor(call, 1, "weight")
    if spec is None or weight is None or spec.dtype not in _BLAS_DTYPES:
        return ()
    if not spec.numel or not weight.numel or len(weight.shape) != 2:
        return ()
    bias = tensor(call, 2, "bias")
    narrow = min(spec.numel // weight.shape[1], *weight.shape) <= 1
    fused = bias is not None and not narrow and spec.dtype in _LT_DTYPES and gpu.torch >= (1, 12)
    return (cublaslt_workspace if fused else cublas_workspace)(call, gpu)


@rule("aten._int_mm", "aten._scaled_mm")
def lt_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """The cuBLASLt workspace.

    Source: ATen/cuda/CUDABlas.cpp, scaled_gemm, int8_gemm (2.x).
    Evidence: memory.
    """
    return cublaslt_workspace(call, gpu) if numel(tensor(call, 0, "self")) else ()


@rule("aten._grouped_mm")
def grouped_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Problem descriptors, 16 KiB expected and 4 MiB at most; cuBLAS where groups are looped.

    Source: ATen/native/cuda/GroupMM.cu (CUTLASS on sm90 and sm100, 2.8 to 2.13).
    Evidence: memory.
    """
    if gpu.capability[0] not in (9, 10):
        return cublas_workspace(call, gpu)
    return (Hidden(16 * KIB, "grouped matmul descriptors", high_nbytes=4 * MIB),)


def _matrix_usable(spec: TensorSpec) -> bool:
    """Whether cuBLAS takes a matrix as it lies (prepare_matrix_for_cublas)."""
    if len(spec.shape) != 2 or is_dense(spec):
        return True
    (rows, columns), (down, across) = spec.shape, spec.stride
    return (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))


def _batch_usable(spec: TensorSpec) -> bool:
    """The same for the matrices of a batch (prepare_batch_matrix_for_cublas)."""
    if len(spec.shape) != 3:
        return True
    (_, rows, columns), (_, down, across) = spec.shape, spec.stride
    if (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)):
        return True
    return is_contiguous(spec) and down != 0 and across != 0


def _lt_fuses(
    call: OpCall,
    bias: TensorSpec,
    first: TensorSpec,
    second: TensorSpec,
    out: TensorSpec,
    gpu: GpuTraits,
) -> bool:
    """Whether addmm goes through cuBLASLt with the bias in its epilogue (CUDA 12.1 or later).

    Single rows or columns are refused; of the first operand only since about 2.10.
    """
    beta = dict(call.kwargs).get("beta")
    extents = second.shape if gpu.torch < (2, 10) else (*first.shape, *second.shape)
    return (
        gpu.torch >= (1, 12)
        and (beta is None or beta == 1)
        and len(bias.shape) == 1
        and len(first.shape) == len(second.shape) == 2
        and bias.shape[0] == second.shape[1]
        and is_contiguous(bias)
        and is_contiguous(out)
        and first.dtype in _LT_DTYPES
        and min(extents) > 1
    )
