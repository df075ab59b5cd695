"""Which attention kernel CUDA runs: a choice made by shapes, GPU and version. Torch-free.

Source: ``ATen/native/transformers/cuda/sdp_utils.cpp`` (order and constraints), torch 2.6 to
2.13; grouped heads of the efficient kernel: pull request 191085, and ``kernel_backward.h`` of the
wheel of 2.14.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from memest.config.setup import SdpaBackend
from memest.errors import UnfitGpuError
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "EFFICIENT_GROUPS",
    "SdpaCall",
    "check_ring_kernel",
    "choose_backend",
    "refusals",
    "why_not",
]

_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """What the choice of the kernel depends on."""

    dtype: str
    head_dim: int
    value_dim: int
    query_len: int
    key_len: int
    has_mask: bool
    dropout: float
    is_causal: bool
    grouped: bool
    needs_grad: bool
    strided: bool = False
    """The last dimension of an operand or of the mask does not lie dense."""


_NO_RING = "ring attention has no kernel for them"
EFFICIENT_GROUPS = (2, 14)
"""First torch whose efficient kernel takes fewer heads of keys than of queries."""
_ROWS = 32
"""Rows to which the efficient kernel pads what it keeps for each (``kAlignLSE``)."""


def check_ring_kernel(backend: SdpaBackend, call: SdpaCall, ways: int) -> None:
    """Whether ring attention can join the results of a kernel (``_templated_ring_attention``).

    Args:
        backend: the kernel.
        call: the attention of the whole sequence.
        ways: GPUs that share it.

    Raises:
        UnfitGpuError: it has no such kernel, or the rows of its parts are padded.
    """
    if backend is SdpaBackend.MATH:
        raise UnfitGpuError(
            "--cp: scaled_dot_product_attention takes its math kernel for this attention "
            f"({call.dtype}, head size {call.head_dim}{', grouped heads' * call.grouped}), and "
            "ring attention has flash, efficient and cuDNN alone. Half precision (--bf16) may "
            "take another.",
            _NO_RING,
        )
    pieces = 2 * ways * _ROWS
    if backend is SdpaBackend.EFFICIENT and call.query_len % pieces:
        below = call.query_len // pieces * pieces
        near = " or ".join(str(n) for n in (below, below + pieces) if n)
        raise UnfitGpuError(
            f"--cp {ways} with {call.dtype} takes the efficient kernel, which pads its sums to "
            f"{_ROWS} rows, so that ring attention cannot join parts of {call.query_len} tokens: "
            f"take multiples of {pieces}, such as {near}, or half precision (--bf16).",
            _NO_RING,
        )


def choose_backend(call: SdpaCall, gpu: GpuTraits, setting: SdpaBackend) -> SdpaBackend:
    """The kernel that PyTorch picks on this GPU, the first of its list that can run the call."""
    for backend in _preferred(gpu, setting):
        if not why_not(backend, call, gpu):
            return backend
    return SdpaBackend.MATH


def refusals(call: SdpaCall, gpu: GpuTraits, setting: SdpaBackend) -> tuple[str, ...]:
    """Why not a kernel that PyTorch would sooner take than the one it picks, in its order.

    Example:
        >>> call = SdpaCall(
        ...     dtype="float32", head_dim=64, value_dim=64, query_len=512, key_len=512,
        ...     has_mask=False, dropout=0.0, is_causal=True, grouped=False, needs_grad=True,
        ... )
        >>> a100 = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
        >>> refusals(call, a100, SdpaBackend.AUTO)
        ('flash takes no float32',)
    """
    out = []
    for backend in _preferred(gpu, setting):
        why = why_not(backend, call, gpu)
        if not why:
            break
        out.append(f"{backend} {why}")
    return tuple(out)


def _preferred(gpu: GpuTraits, setting: SdpaBackend) -> list[SdpaBackend]:
    """The kernels that are tried before math, in their order.

    cuDNN comes first on compute capability 9.x and 10.x from torch 2.11 on: the default wheels
    then bring cuDNN 9.19, and it is preferred above 9.15. Before that the list is flash,
    efficient, math.
    """
    if setting is not SdpaBackend.AUTO:
        return [setting]
    if gpu.torch < (2, 0):
        return []
    order = [SdpaBackend.FLASH, SdpaBackend.EFFICIENT]
    if gpu.torch >= (2, 11) and gpu.capability[0] in (9, 10):
        order.insert(0, SdpaBackend.CUDNN)
    return order


def why_not(backend: SdpaBackend, call: SdpaCall, gpu: GpuTraits) -> str:
    """Why a kernel cannot run a call, as the end of a sentence about it; empty where it can."""
    if call.strided and backend is not SdpaBackend.MATH:
        return "takes no operand or mask whose last dimension is strided"
    rules = {
        SdpaBackend.FLASH: _why_not_flash,
        SdpaBackend.EFFICIENT: _why_not_efficient,
        SdpaBackend.CUDNN: _why_not_cudnn,
    }
    return rules[backend](call, gpu) if backend in rules else ""


def _why_not_flash(call: SdpaCall, gpu: GpuTraits) -> str:
    if gpu.capability < (8, 0):
        return _AMPERE
    if call.dtype not in _HALF:
        return f"takes no {call.dtype}"
    if call.has_mask:
        return "takes no mask"
    if call.head_dim != call.value_dim:
        return f"takes no heads of {call.head_dim} with values of {call.value_dim}"
    if call.head_dim > 256:
        return f"takes heads of up to 256, not {call.head_dim}"
    # 12.x has the small shared memory of 8.6 and 8.9, where large heads cannot train
    small = gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12
    if (
        call.needs_grad
        and small
        and call.head_dim > 192
        and not (call.head_dim > 224 and call.dropout == 0)
    ):
        return f"does not train heads of {call.head_dim} on this GPU"
    if call.is_causal and call.query_len != call.key_len:
        return "is causal for as many keys as queries alone"
    return ""


def _why_not_efficient(call: SdpaCall, gpu: GpuTraits) -> str:
    if gpu.capability < (5, 0):
        return "needs compute capability 5.0"
    if call.grouped and gpu.torch < EFFICIENT_GROUPS:
        return "takes no grouped heads before torch 2.14"
    if call.has_mask and gpu.torch < (2, 1):
        return "takes no mask before torch 2.1"
    ampere = gpu.capability >= (8, 0)
    if call.dtype == "bfloat16" and not ampere:
        return f"{_AMPERE} for bfloat16"
    if call.dtype not in (*_HALF, "float32"):
        return f"takes no {call.dtype}"
    alignment = 8 if call.dtype in _HALF and gpu.capability >= (7, 5) else 4
    if call.dtype == "float32":
        alignment = 4 if ampere else 1
    if call.head_dim % alignment or call.value_dim % alignment:
        return f"takes heads of multiples of {alignment}, not {_sizes(call)}"
    return ""


def _why_not_cudnn(call: SdpaCall, gpu: GpuTraits) -> str:
    if gpu.capability < (8, 0):
        return _AMPERE
    if call.dtype not in _HALF:
        return f"takes no {call.dtype}"
    if gpu.torch >= (2, 12) and (call.dropout * 16) % 1:
        # cuDNN has only steps of 1/16, and rounded silently before (PR 174245)
        return f"takes dropout in steps of 1/16, not {call.dropout:g}"
    if call.query_len == 1 or call.key_len == 1:
        return "takes no sequence of one token"
    large = gpu.capability[0] in (9, 10)
    dims = (call.head_dim, call.value_dim)
    if dims in ((192, 128), (256, 256)) and large:
        return ""
    if dims in ((192, 128), (256, 256)) or not all(d % 8 == 0 and d <= 128 for d in dims):
        return f"takes heads of multiples of 8 up to 128, not {_sizes(call)}"
    return ""


_AMPERE = "needs compute capability 8.0"


def _sizes(call: SdpaCall) -> str:
    same = call.head_dim == call.value_dim
    return str(call.head_dim) if same else f"{call.head_dim} and {call.value_dim}"
