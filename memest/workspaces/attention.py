"""Scaled-dot-product attention: what its three fused kernels allocate besides their outputs.

Two operators exist for each kernel: ``_scaled_dot_product_*`` takes [B, H, S, D], the inner
``_*_attention_*`` takes [B, S, H, D]. The rules work on the second form.
"""

from __future__ import annotations

from dataclasses import dataclass

from memest.workspaces.layout import (
    acc_bytes,
    argument,
    ceil_div,
    contiguous_copy,
    kernel_copy,
    numel,
    round_up,
    tensor,
    transpose,
    until,
)
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Workspace
from memest.workspaces.reduce import ReduceKernel, reduction_scratch
from memest.workspaces.registry import rule

__all__ = ["efficient_backward_tile"]

_CUDNN_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one attention: batch, heads, key heads, queries, keys, head dimensions."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int


def _operands(call: OpCall, first: int) -> tuple[TensorSpec, ...]:
    """Query, key and value from a position on, as [B, S, H, D]; empty if the call has none."""
    operands = tuple(
        tensor(call, first + i, name) for i, name in enumerate(("query", "key", "value"))
    )
    operands = tuple(_by_position(call, t) for t in operands)
    specs = tuple(t for t in operands if t is not None and len(t.shape) == 4)
    return specs if len(specs) == 3 and all(t.numel for t in specs) else ()


def _by_position(call: OpCall, spec: TensorSpec | None) -> TensorSpec | None:
    """A tensor as [B, S, H, D], whichever way the operator takes it."""
    by_head = call.op.startswith("aten._scaled_dot_product")
    return transpose(spec, 1, 2) if by_head and spec and len(spec.shape) == 4 else spec


def _packed_operands(call: OpCall) -> tuple[TensorSpec, ...]:
    """Packed [T, H, D] operands of a flash backward as one batch, and their offsets."""
    specs = tuple(tensor(call, i, name) for i, name in ((1, "query"), (2, "key"), (3, "value")))
    offsets = tensor(call, 6, "cum_seq_q")
    packed_specs = tuple(
        TensorSpec((1, *t.shape), (t.numel, *t.stride), t.dtype)
        for t in specs
        if t is not None and len(t.shape) == 3 and t.numel
    )
    return (*packed_specs, offsets) if len(packed_specs) == 3 and offsets is not None else ()


def _shape(q: TensorSpec, k: TensorSpec, v: TensorSpec, *_: TensorSpec) -> _Shape:
    batch, queries, heads, dim = q.shape
    return _Shape(batch, heads, k.shape[2], queries, k.shape[1], dim, v.shape[3])


def _contiguous(call: OpCall, position: int, name: str, label: str) -> tuple[Workspace, ...]:
    spec = _by_position(call, tensor(call, position, name))
    return contiguous_copy(spec, label)


@rule("aten._scaled_dot_product_flash_attention", "aten._flash_attention_forward")
def flash_forward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Nothing besides the outputs, unless few blocks make it split the keys.

    Split: partial outputs fp32 splits x B x H x S x D and their logsumexp, for at most 128
    splits of a grid that fills less than 80 % of the GPU; without dropout only.

    Source: ATen/native/transformers/cuda/flash_attn/flash_api.cpp, set_params_splitkv (2.2 on).
    Evidence: memory.
    """
    specs = _operands(call, 0)
    flash = "flash_attention_forward" in call.op
    dropout = argument(call, 7 if flash else 3, "dropout_p")
    if not specs or (isinstance(dropout, float) and dropout > 0):
        return ()
    s = _shape(*specs)
    block = 256 if s.dim <= 64 else 128 if s.dim <= 128 else 64
    blocks = s.batch * s.heads * ceil_div(s.queries, 64)
    splits = _flash_splits(blocks, 2 * gpu.sm_count, ceil_div(s.keys, block))
    if splits == 1:
        return ()
    rows = splits * s.batch * s.heads * s.queries * 4
    dim = round_up(s.dim, 32 if s.dim <= 128 else 64)
    return (Workspace(rows, "flash split logsumexp"), Workspace(rows * dim, "flash split outputs"))


def _flash_splits(blocks: int, target: int, key_blocks: int) -> int:
    """The fewest splits with at least 85 % of the best occupancy (num_splits_heuristic)."""
    if blocks >= 0.8 * target:
        return 1
    most = min(128, target, key_blocks)
    options: dict[int, float] = {}
    for splits in range(1, most + 1):
        if splits > 1 and ceil_div(key_blocks, splits) == ceil_div(key_blocks, splits - 1):
            continue
        waves = blocks * splits / target
        options[splits] = waves / -(-waves // 1)
    best = max(options.values())
    return next(splits for splits, value in options.items() if value >= 0.85 * best)


@rule("aten._scaled_dot_product_flash_attention_backward", "aten._flash_attention_backward")
def flash_backward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """softmax_d B x H x S' x 4 and dq_accum B x S' x H x D' x 4; fewer key heads: full dk, dv.

    S' is the query length rounded to 128, D' the head dimension to 32 (to 64 above 128).
    Deterministic mode has one dq_accum for each of ceil(SMs / (B x H)) splits. A gradient or
    output that does not lie as [B, S, H, D] is copied first. Packed sequences have
    T + 128 x B rows instead of B x S'.

    Source: flash_attn/flash_api.cpp, mha_bwd (2.2 to 2.13).
    Evidence: source.
    """
    specs = _operands(call, 1) or _packed_operands(call)
    if not specs:
        return ()
    s = _shape(*specs)
    rows = s.batch * s.heads * round_up(s.queries, 128)
    if len(specs) == 4:
        rows = s.heads * (s.queries + 128 * numel(specs[3]) - 128)
    dim = round_up(s.dim, 32 if s.dim <= 128 else 64)
    splits = ceil_div(gpu.sm_count, s.batch * s.heads) if gpu.deterministic else 1
    workspaces = [
        *_contiguous(call, 0, "grad_out", "attention gradient, contiguous"),
        *_contiguous(call, 4, "out", "attention output, contiguous"),
        Workspace(rows * 4, "flash softmax_d"),
        Workspace(rows * dim * 4 * splits, "flash dq_accum"),
    ]
    return (*workspaces, *_of_all_heads(s, specs[1], "flash"))


def _of_all_heads(s: _Shape, key: TensorSpec, kernel: str) -> tuple[Workspace, ...]:
    """Gradients of keys and values for each head of the queries, where groups of them share one."""
    if s.key_heads == s.heads:
        return ()
    full = s.batch * s.keys * s.heads * key.itemsize
    return (
        Workspace(full * s.dim, f"{kernel} dk of all heads"),
        Workspace(full * s.value_dim, f"{kernel} dv of all heads"),
    )


@rule("aten._scaled_dot_product_efficient_attention", "aten._efficient_attention_forward")
def efficient_forward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """An fp32 output accumulator B x S x H x D x 4 for half types with D over 128, else nothing.

    Source: mem_eff_attention/kernel_forward.h, kernels/cutlassF.h (2.13).
    Evidence: source.
    """
    del gpu
    specs = _operands(call, 0)
    if not specs or specs[0].itemsize != 2:
        return ()
    s = _shape(*specs)
    if s.value_dim <= 128:
        return ()
    nbytes = s.batch * s.queries * s.heads * s.value_dim * 4
    return (Workspace(nbytes, "attention output accumulator"),)


def efficient_backward_tile(
    half: bool, dim: int, capability: tuple[int, int], *, dropout: bool
) -> tuple[int, int, int]:
    """Query block, key block and largest head dimension of the kernel that takes the call.

    The first kernel of cutlassB.h that fits; 128x128 tiles need the shared memory of sm80 or
    sm90, and sm86, sm89 and sm12x fall back to 64x64.
    """
    limit = next((k for k in (32, 64) if dim <= k), 128 if dim <= 128 else 65536)
    if limit <= 64:
        return 64, 64, limit
    roomy = capability[0] >= 8 and capability not in ((8, 6), (8, 9)) and capability[0] < 12
    if half and capability in ((8, 6), (8, 9)) and dim <= 96 and not dropout:
        return 128, 64, 96
    if half and limit == 128:
        wide = (128, 128) if capability[0] >= 8 else (128, 64)
        return (*wide, 128) if roomy or capability[0] < 8 else (64, 64, 128)
    return (128, 64, limit) if roomy else (64, 64, limit)


@rule("aten._scaled_dot_product_efficient_attention_backward", "aten._efficient_attention_backward")
def efficient_backward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Delta B x H x S x 4, then a workspace of fp32 tiles of dq (and of dk, dv where D is large).

    Tiles: ceil(S / I) x ceil(D / J) x (4 + I x J) x 4 bytes for each batch and head, with
    blocks I x J. fp32 inputs have delta computed outside: a full product and its row sums. Fewer
    key heads: dk, dv of all heads, which are added up behind the kernel.

    Source: mem_eff_attention/kernel_backward.h (2.13, 2.14), kernels/cutlassB.h (2.13),
    transformers/cuda/attention_backward.cu (2.2 on), pull request 191085 (2.14).
    Evidence: source; which kernel fits a GPU's shared memory: memory; when dk, dv of all heads are
    made and freed: taken to be as flash has it.
    """
    specs = _operands(call, 1)
    out = tensor(call, 5, "out")
    if not specs:
        return ()
    s = _shape(*specs)
    half = specs[0].itemsize == 2
    dropout = argument(call, 9 if "scaled_dot" in call.op else 11, "dropout_p")
    wide = max(s.dim, s.value_dim)
    tile_i, tile_j, limit = efficient_backward_tile(
        half, wide, gpu.capability, dropout=isinstance(dropout, float) and dropout > 0
    )
    in_registers = half and limit <= tile_i
    workspaces = list(_contiguous(call, 0, "grad_out_", "attention gradient, contiguous"))
    workspaces += _of_all_heads(s, specs[1], "attention")
    if half and (in_registers or gpu.capability[0] != 7 or gpu.capability[1] != 0):
        workspaces.append(Workspace(s.batch * s.heads * s.queries * 4, "attention delta"))
    else:
        workspaces.extend(_outer_delta(s, specs[0], out, gpu, len(workspaces)))
    floats = ceil_div(s.queries, tile_i) * ceil_div(s.dim, tile_j) * (4 + tile_i * tile_j)
    if half and not in_registers:
        splits = _key_splits(s, tile_j, gpu)
        floats += splits * tile_j * (round_up(s.dim, tile_i) + round_up(s.value_dim, tile_i))
    nbytes = s.batch * s.heads * round_up(floats, 4) * 4
    workspaces.append(Workspace(nbytes, "attention workspace"))
    # what is computed outside dies before the workspace
    delta = next(i for i, w in enumerate(workspaces) if w.label == "attention delta")
    workspaces[delta] = until(workspaces[delta], len(workspaces))
    return tuple(workspaces)


def _key_splits(s: _Shape, tile: int, gpu: GpuTraits) -> int:
    splits = ceil_div(s.keys, tile)
    if s.batch * s.heads >= 256 and s.keys <= 2 * tile:
        splits = 1
    splits = min(splits, 200 // (s.batch * s.heads))
    return 1 if gpu.deterministic or splits < 1 else splits


def _outer_delta(
    s: _Shape, q: TensorSpec, out: TensorSpec | None, gpu: GpuTraits, at: int
) -> list[Workspace]:
    """(grad_out * out).sum(-1).transpose().contiguous(), everything alive until its end."""
    elements = s.batch * s.queries * s.heads * s.value_dim
    rows = elements // max(s.value_dim, 1)
    parts = []
    if q.itemsize == 2:
        parts += [Workspace(elements * 4, "attention gradient, fp32")]
        parts += [Workspace(elements * 4, "attention output, fp32")] if out is not None else []
    parts.append(Workspace(elements * 4, "attention gradient x output"))
    parts.append(Workspace(rows * 4, "attention delta, by rows"))
    shape = (rows, s.value_dim)
    product = TensorSpec(shape, (s.value_dim, 1), "float32")
    parts += reduction_scratch(product, (1,), ReduceKernel(4), gpu, out_bytes=4)
    end = at + len(parts) + 1
    temporaries = [until(w, end) for w in parts]
    return [*temporaries, Workspace(rows * 4, "attention delta")]


@rule("aten._scaled_dot_product_cudnn_attention", "aten._cudnn_attention_forward")
def cudnn_forward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """What cuDNN's graph asks for: 256 bytes expected, one fp32 output at most.

    Source: ATen/native/cudnn/MHA.cpp (the size is a property of cuDNN, 2.5 to 2.13).
    Evidence: recorded (cuDNN 9.19 on an H200: heads of 64 and 128, with dropout, grouped).
    """
    del gpu
    specs = _operands(call, 0)
    if not specs:
        return ()
    s = _shape(*specs)
    high = s.batch * s.queries * s.heads * s.value_dim * 4
    return (Workspace(_CUDNN_ALIGNMENT, "cuDNN attention workspace", high_nbytes=high),)


@rule("aten._scaled_dot_product_cudnn_attention_backward", "aten._cudnn_attention_backward")
def cudnn_backward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """fp32 dq B x H x S x D x 4, row sums B x H x S x 4, 256 bytes; at most dk, dv of all heads.

    Fewer key heads: dk, dv of all heads are expected too.

    Source: ATen/native/cudnn/MHA.cpp (the size is a property of cuDNN, 2.5 to 2.13).
    Evidence: recorded (cuDNN 9.19 on an H200: heads of 64 and 128, 197 to 4096 queries, grouped).
    """
    del gpu
    specs = _operands(call, 1)
    if not specs:
        return ()
    s = _shape(*specs)
    rows = s.batch * s.heads * s.queries
    keys = s.batch * s.heads * s.keys * acc_bytes(specs[1].dtype)
    expected = rows * 4 + rows * s.dim * 4 + _CUDNN_ALIGNMENT
    if s.key_heads != s.heads:
        expected += keys // 2 * (s.dim + s.value_dim)
    high = expected + keys * (s.dim + s.value_dim)
    return (
        *(kernel_copy(t, "attention gradient, copied") for t in _awkward_gradient(call)),
        Workspace(expected, "cuDNN attention workspace", high_nbytes=high),
    )


def _awkward_gradient(call: OpCall) -> tuple[TensorSpec, ...]:
    """A gradient that MHA.cpp copies, because its last dimension is not contiguous."""
    grad = tensor(call, 0, "grad_out")
    if grad is None or not numel(grad) or grad.stride[-1:] == (1,):
        return ()
    return (grad,)
