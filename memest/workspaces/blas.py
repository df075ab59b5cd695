"""cuBLAS and cuBLASLt: workspaces in the caching allocator, copies of operands; 4-bit products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memest.units import KIB, MIB
from memest.workspaces.layout import is_contiguous, is_dense, kernel_copy, tensor
from memest.workspaces.operator_call import GpuTraits, Lifetime, OpCall, TensorSpec, Workspace
from memest.workspaces.registry import rule

__all__ = ["cublas_workspace", "cublaslt_workspace", "dequantized_product"]

_COPY = "matmul operand, contiguous"
_BLAS_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})
_LT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
_PER_CALL = (2, 15)
"""First torch whose operators allocate workspaces anew, unless caching is asked for."""


def cublas_workspace(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """The workspace of the calling thread's cuBLAS handle, by GPU generation and version.

    Source: ATen/cuda/CublasHandlePool.cpp; PR 83461 (1.13, 4 MiB), 91564 (2.0, 8.125 MiB and
    32 MiB on Hopper), 175344 (2.12, 32 MiB on Blackwell), 194311 (2.15, per call).
    Evidence: recorded (2 x 33554432 on H100, 8519680 elsewhere); per call: CUDAContextLight.h of
    the wheels of 2.14.1 and 2.15.0; other releases inferred from dates.
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
    if gpu.torch >= _PER_CALL:
        return (Workspace(nbytes, "cuBLAS workspace"),)
    key = ("cublas", call.thread)
    return (Workspace(nbytes, "cuBLAS workspace", Lifetime.PERSISTENT, key),)


def cublaslt_workspace(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """What a cuBLASLt matmul needs: 1 MiB, per call, per thread, or inside the cuBLAS workspace.

    Source: PR 73439 (1 MiB per call), 156495 (2.9, kept), 168175 and 175879 (2.12, the cuBLAS
    workspace), 194311 (2.15, per call again).
    Evidence: recorded (1048576 beside the cuBLAS workspace, torch 2.11 on an H200); 2.14 and 2.15:
    getCUDABlasLtWorkspaceSize of their wheels; other releases inferred from the dates of the pull
    requests.
    """
    own = cublas_workspace(call, gpu)
    if gpu.torch >= _PER_CALL:
        return (Workspace(MIB, "cuBLASLt workspace"),)
    if gpu.torch >= (2, 12):
        return own
    if gpu.torch >= (2, 9):
        key = ("cublaslt", call.thread)
        return (*own, Workspace(MIB, "cuBLASLt workspace", Lifetime.PERSISTENT, key))
    # the Lt handle is the cuBLAS handle, so asking for it makes that workspace as well
    return (Workspace(MIB, "cuBLASLt workspace"), *own)


def _product(
    call: OpCall, first: int, usable: Callable[[TensorSpec], bool]
) -> tuple[tuple[TensorSpec, TensorSpec, TensorSpec], tuple[Workspace, ...]] | None:
    """Operands and result of a product that reaches cuBLAS, and copies of operands.

    Args:
        call: the product.
        first: position of its first operand.
        usable: whether cuBLAS takes an operand as it lies.
    """
    left, right = tensor(call, first, "mat1"), tensor(call, first + 1, "mat2")
    out = call.output
    if left is None or right is None or out is None or out.dtype not in _BLAS_DTYPES:
        return None
    if not out.numel or not left.numel:
        return None
    # a row-major result makes cuBLAS compute the transposed product: second operand first
    pair = (right, left) if is_contiguous(out) else (left, right)
    copies = tuple(kernel_copy(spec, _COPY) for spec in pair if not usable(spec))
    return (left, right, out), copies


@rule("aten.mm", "aten.addmm", "aten.addmm_", "aten._addmm_activation")
def matrix_product(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Copies of operands without a unit stride, then the cuBLAS or (fused bias) Lt workspace.

    An expanded gradient is the usual operand that is copied.

    Source: ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl, cublasCommonArgs (1.13 to 2.13).
    Evidence: source; workspaces: recorded.
    """
    shift = 0 if call.op.startswith("aten.mm.") else 1
    product = _product(call, shift, _matrix_usable)
    if product is None:
        return ()
    operands, copies = product
    bias = tensor(call, 0, "self") if shift else None
    fused = bias is not None and _lt_fuses(call, bias, *operands, gpu)
    return copies + (cublaslt_workspace if fused else cublas_workspace)(call, gpu)


@rule("aten.bmm", "aten.baddbmm", "aten.baddbmm_")
def batched_product(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Copies of operands whose matrices have no unit stride, then the cuBLAS workspace.

    Source: ATen/native/cuda/Blas.cpp, baddbmm_out_cuda_impl (1.13 to 2.13).
    Evidence: source; workspaces: recorded.
    """
    shift = 0 if call.op.startswith("aten.bmm") else 1
    product = _product(call, shift, _batch_usable)
    if product is None:
        return ()
    _, copies = product
    return copies + cublas_workspace(call, gpu)


@rule("aten.mv", "aten.addmv", "aten.addmv_", "aten.dot", "aten.vdot")
def vector_product(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Copies of a matrix without a unit stride and of an expanded vector, then the workspace.

    Source: ATen/native/cuda/Blas.cpp, addmv_out_cuda, dot_cuda (1.13 to 2.13).
    Evidence: source for dot; copies of addmv: memory.
    """
    shift = 1 if call.op.startswith("aten.addmv") else 0
    first, second = tensor(call, shift, "self"), tensor(call, shift + 1, "vec")
    if first is None or second is None or first.dtype not in _BLAS_DTYPES or not first.numel:
        return ()
    copies: tuple[Workspace, ...] = ()
    if len(first.shape) == 2:
        if second.stride and second.stride[0] == 0 and second.numel > 1:
            copies = (kernel_copy(second, _COPY),)
        if not _matrix_usable(first):
            copies = (*copies, kernel_copy(first, _COPY))
    return copies + cublas_workspace(call, gpu)


@rule("aten.linear", needs="input weight")
def linear(
    call: OpCall, gpu: GpuTraits, spec: TensorSpec, weight: TensorSpec
) -> tuple[Workspace, ...]:
    """As mm or addmm on the flattened input, where a trace keeps ``linear`` whole.

    Source: ATen/native/Linear.cpp (2.x).
    Evidence: memory.
    """
    if spec.dtype not in _BLAS_DTYPES or len(weight.shape) != 2:
        return ()
    bias = tensor(call, 2, "bias")
    narrow = min(spec.numel // weight.shape[1], *weight.shape) <= 1
    fused = bias is not None and not narrow and spec.dtype in _LT_DTYPES and gpu.torch >= (1, 12)
    return (cublaslt_workspace if fused else cublas_workspace)(call, gpu)


@rule("aten._int_mm", "aten._scaled_mm", needs="self")
def lt_product(call: OpCall, gpu: GpuTraits, _spec: TensorSpec) -> tuple[Workspace, ...]:
    """The cuBLASLt workspace.

    Source: ATen/cuda/CUDABlas.cpp, scaled_gemm, int8_gemm (2.x).
    Evidence: memory.
    """
    return cublaslt_workspace(call, gpu)


@rule("aten._grouped_mm")
def grouped_product(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Descriptors, 60 bytes a group, and tensor maps, 512 a SM; cuBLAS where groups are looped.

    A group has three pointers, three strides and a shape. A SM has four maps of 128 bytes.

    Source: ATen/native/cuda/GroupMM.cu (CUTLASS on sm90 and sm100, 2.8 to 2.13).
    Evidence: recorded (8 groups, torch 2.11 on an H200); sm100: by analogy.
    """
    if gpu.capability[0] not in (9, 10):
        return cublas_workspace(call, gpu)
    offsets = tensor(call, 2, "offs")
    groups = offsets.numel if offsets is not None else _num_matrices(call)
    return (
        Workspace(60 * groups, "grouped matmul descriptors"),
        Workspace(512 * gpu.sm_count, "grouped matmul tensor maps", high_nbytes=4 * MIB),
    )


def _num_matrices(call: OpCall) -> int:
    """Of a product whose groups no offsets name: both operands have one matrix for each."""
    operand = tensor(call, 0, "self")
    return operand.shape[0] if operand is not None and len(operand.shape) == 3 else 1


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


# -- bitsandbytes: what the kernels of quantized layers take behind their operators ----------------


_ALWAYS_FUSED_ROWS = 4


@rule("bitsandbytes.gemm_4bit", needs="A")
def dequantized_product(call: OpCall, gpu: GpuTraits, rows: TensorSpec) -> tuple[Workspace, ...]:
    """The weight in the dtype of the input (N K elements), and its scales where nested.

    Up to 4 rows go to a kernel that dequantises as it multiplies, up to 7 in float32 and on GPUs
    without its tensor core path (before Turing; Turing but for float16). From there to 1536 rows
    (256 for weights of 4 Mi elements and more) the library chooses by measured tables of each
    generation; the larger answer is given. Above that, and where blocks do not divide the rows of
    the weight, the weight is always dequantised.

    Source: bitsandbytes 0.50.2 backends/cuda/ops.py, gemm_4bit, _dequant_linear_fallback and
    _gemm_4bit_use_custom_cuda; 0.43 to 0.49 dequantise in autograd/_functions.py.
    Evidence: source.
    """
    shape, out = call.args[2] if len(call.args) > 2 else None, call.output
    if out is None or not isinstance(shape, tuple):
        return ()
    extents = [extent for extent in shape if isinstance(extent, int) and extent > 0]
    if len(extents) != 2 or rows.dtype not in ("float16", "bfloat16", "float32"):
        return ()
    num_out, num_in = extents
    num_rows = rows.numel // num_in
    blocksize = call.args[4] if len(call.args) > 4 else 64
    aligned = isinstance(blocksize, int) and blocksize > 0 and num_in % blocksize == 0
    old = gpu.capability < (7, 5) or (gpu.capability == (7, 5) and rows.dtype != "float16")
    simple = rows.dtype == "float32" or old
    if aligned and num_rows <= (_ALWAYS_FUSED_ROWS + 3 if simple else _ALWAYS_FUSED_ROWS):
        return ()
    kwargs = dict(call.kwargs)
    scales = kwargs.get("absmax_8bit")
    scale_workspaces: tuple[Workspace, ...] = ()
    if isinstance(scales, TensorSpec):
        # dequantised, then a copy with the offset added
        scale_workspaces = (Workspace(4 * scales.numel, "scales of blocks, dequantised"),) * 2
    weight = TensorSpec((num_out, num_in), (num_in, 1), rows.dtype)
    dense = kernel_copy(weight, "dequantised weight")
    product = OpCall(
        "aten.linear.default", (rows, weight, kwargs.get("bias")), (), (out,), call.thread
    )
    before = (replace(workspace, results_before=0) for workspace in (*scale_workspaces, dense))
    return (*before, *linear(product, gpu))
