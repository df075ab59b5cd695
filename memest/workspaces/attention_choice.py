"""Which attention kernel CUDA runs: a choice made by shapes, GPU and version. Torch-free.

Source: ``ATen/native/transformers/cuda/sdp_utils.cpp`` (order and constraints), torch 2.6 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from memest.config.setup import SdpaBackend
from memest.errors import ConfigError
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "RingKernelError",
    "SdpaCall",
    "check_flash_gpu",
    "check_ring_kernel",
    "choose_backend",
    "flash_library_runs",
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


class RingKernelError(ConfigError):
    """A GPU whose attention kernel ring attention does not have."""


_ROWS = 32
"""Rows to which the efficient kernel pads what it keeps for each (``kAlignLSE``)."""


def check_ring_kernel(backend: SdpaBackend, call: SdpaCall, ways: int) -> None:
    """Whether ring attention can join the results of a kernel (``_templated_ring_attention``).

    Args:
        backend: the kernel.
        call: the attention of the whole sequence.
        ways: GPUs that share it.

    Raises:
        RingKernelError: it has no such kernel, or the rows of its parts are padded.
    """
    if backend is SdpaBackend.MATH:
        raise RingKernelError(
            "--cp: scaled_dot_product_attention takes its math kernel for this attention "
            f"({call.dtype}, head size {call.head_dim}{', grouped heads' * call.grouped}), and "
            "ring attention has flash, efficient and cuDNN alone. Half precision (--bf16) may "
            "take another."
        )
    pieces = 2 * ways * _ROWS
    if backend is SdpaBackend.EFFICIENT and call.query_len % pieces:
        below = call.query_len // pieces * pieces
        near = " or ".join(str(n) for n in (below, below + pieces) if n)
        raise RingKernelError(
            f"--cp {ways} with {call.dtype} takes the efficient kernel, which pads its sums to "
            f"{_ROWS} rows, so that ring attention cannot join parts of {call.query_len} tokens: "
            f"take multiples of {pieces}, such as {near}, or half precision (--bf16)."
        )


def choose_backend(call: SdpaCall, gpu: GpuTraits, setting: SdpaBackend) -> SdpaBackend:
    """The kernel that PyTorch picks on this GPU, the first of its list that can run the call.

    cuDNN comes first on compute capability 9.x and 10.x from torch 2.11 on: the default wheels
    then bring cuDNN 9.19, and it is preferred above 9.15. Before that the list is flash,
    efficient, math.
    """
    if setting is not SdpaBackend.AUTO:
        order = [setting]
    elif gpu.torch < (2, 0):
        order = []
    else:
        order = [SdpaBackend.FLASH, SdpaBackend.EFFICIENT]
        if gpu.torch >= (2, 11) and gpu.capability[0] in (9, 10):
            order.insert(0, SdpaBackend.CUDNN)
    checks = {
        SdpaBackend.FLASH: _flash_runs,
        SdpaBackend.EFFICIENT: _efficient_runs,
        SdpaBackend.CUDNN: _cudnn_runs,
    }
    for backend in order:
        if backend in checks and checks[backend](call, gpu):
            return backend
    return SdpaBackend.MATH


def _flash_runs(call: SdpaCall, gpu: GpuTraits) -> bool:
    if gpu.capability < (8, 0) or call.dtype not in _HALF or call.has_mask:
        return False
    if call.head_dim != call.value_dim or call.head_dim > 256:
        return False
    # 12.x has the small shared memory of 8.6 and 8.9, where large heads cannot train
    small = gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12
    if (
        call.needs_grad
        and small
        and call.head_dim > 192
        and not (call.head_dim > 224 and call.dropout == 0)
    ):
        return False
    return not call.is_causal or call.query_len == call.key_len


def _efficient_runs(call: SdpaCall, gpu: GpuTraits) -> bool:
    # grouped heads: no derivative up to 2.13
    if gpu.capability < (5, 0) or call.grouped:
        return False
    if call.has_mask and gpu.torch < (2, 1):
        return False
    ampere = gpu.capability >= (8, 0)
    if call.dtype == "bfloat16" and not ampere:
        return False
    if call.dtype not in (*_HALF, "float32"):
        return False
    alignment = 8 if call.dtype in _HALF and gpu.capability >= (7, 5) else 4
    if call.dtype == "float32":
        alignment = 4 if ampere else 1
    return call.head_dim % alignment == 0 and call.value_dim % alignment == 0


def _cudnn_runs(call: SdpaCall, gpu: GpuTraits) -> bool:
    if gpu.capability < (8, 0) or call.dtype not in _HALF:
        return False
    # this cuDNN takes dropout only in steps of 1/16
    if call.dropout and (call.dropout * 16) % 1:
        return False
    if call.query_len == 1 or call.key_len == 1:
        return False
    large = gpu.capability[0] in (9, 10)
    dims = (call.head_dim, call.value_dim)
    if dims in ((192, 128), (256, 256)):
        return large
    return all(d % 8 == 0 and d <= 128 for d in dims)


def flash_library_runs(capability: tuple[int, int]) -> bool:
    """Whether FlashAttention 2, the library, has kernels for a GPU: from Ampere on."""
    return capability >= (8, 0)


def check_flash_gpu(capability: tuple[int, int]) -> None:
    """Refuse GPUs before Ampere.

    Raises:
        ConfigError: the GPU is too old for FlashAttention 2.
    """
    if not flash_library_runs(capability):
        major, minor = capability
        raise ConfigError(
            "--attn-implementation flash_attention_2 needs a GPU of compute capability 8.0 or "
            f"newer, this one has {major}.{minor}. Use --attn-implementation sdpa."
        )
