"""The fused kernels of mamba-ssm and causal-conv1d, by what they keep and make.

Without these packages transformers loops over the sequence in Python, which nobody trains with.
Sources: ``mamba_ssm/ops/selective_scan_interface.py`` and ``csrc/selective_scan`` of mamba-ssm 2,
``csrc/causal_conv1d.cpp`` of causal-conv1d 1.5.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from memest.trace.cuda.patching import patch_attributes
from memest.trace.recorder import Recorder

__all__ = ["provide_fused_scans"]

# states at the chunk borders are kept, one chunk of this many positions at a time
_CHUNK = 2048
_FAMILIES = ("mamba", "falcon_mamba", "jamba", "zamba")
_NOTE = (
    "The state-space layers run the fused kernels of mamba-ssm and causal-conv1d. Without these "
    "packages transformers loops over the sequence and needs several times the memory."
)
_fwd = torch.amp.custom_fwd(device_type="cuda")
_bwd = torch.amp.custom_bwd(device_type="cuda")


@contextmanager
def provide_fused_scans(recorder: Recorder) -> Iterator[None]:
    """Let the Mamba families of transformers call the functions below."""

    def with_note(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.note(_NOTE)
            return function(*args, **kwargs)

        return call

    functions = {
        "causal_conv1d_fn": with_note(_causal_conv1d_fn),
        "mamba_selective_scan": with_note(_selective_scan_fn),
        "mamba_inner_fn": with_note(_mamba_inner_fn),
    }
    names = (f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES)
    modules = [sys.modules[name] for name in names if name in sys.modules]
    changes = ((m, name, f) for m in modules for name, f in functions.items() if name in vars(m))
    with patch_attributes(*changes):
        yield


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels want positions next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# -- causal convolution ----------------------------------------------------------------------------


def _causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    return _CausalConv.apply(x, weight, bias)


def _conv_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of weight and bias are summed in fp32."""
    grad_x = torch.empty_like(x) if into is None else into
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)  # type: ignore[union-attr]
    return grad_x, grad_weight.to(weight.dtype), grad_bias


class _CausalConv(torch.autograd.Function):
    """Keeps its input, weight and bias; the activation is part of the kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        return _conv_backward(x, weight, bias, None)


# -- selective scan --------------------------------------------------------------------------------


def _selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    return_last_state: bool = False,
    **rest: Any,
) -> Any:
    gate, bias = rest.get("z"), rest.get("delta_bias")
    out, states = _SelectiveScan.apply(u, delta, a, b, c, rest.get("D"), gate, bias)
    return (out, states[:, :, -1, 1::2]) if return_last_state else out


def _scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    z: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Output, states at the chunk borders (fp32), gated output."""
    out = torch.empty_like(delta)
    chunks = -(-u.shape[-1] // _CHUNK)
    states = torch.empty(
        (*u.shape[:2], chunks, 2 * a.shape[-1]), dtype=torch.float32, device=u.device
    )
    return out, states, None if z is None else torch.empty_like(z)


def _scan_backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Gradients in the kernel's order; those of B and C are summed in fp32."""
    grads: list[Any] = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)]
    sums = [torch.zeros_like(part, dtype=torch.float32) for part in (b, c)]
    rest = [None if part is None else torch.zeros_like(part) for part in (d, delta_bias)]
    return (*grads, sums[0].to(b.dtype), sums[1].to(c.dtype), *rest)


class _SelectiveScan(torch.autograd.Function):
    """Keeps all its inputs, the states at the chunk borders and, with a gate, the output."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        u, delta, a, b, c, d, z, delta_bias = inputs
        u, delta, b, c = (_rows(part) for part in (u, delta, b, c))
        z = None if z is None else _rows(z)
        out, states, gated_out = _scan(u, delta, a, z)
        saved_out = None if z is None else out
        ctx.save_for_backward(u, delta, a, b, c, d, z, delta_bias, states, saved_out)
        ctx.mark_non_differentiable(states)
        return (out if gated_out is None else gated_out), states

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        u, delta, a, b, c, d, z, bias, _, _ = ctx.saved_tensors
        _rows(grads[0])
        du, ddelta, da, db, dc, dd, dbias = _scan_backward(u, delta, a, b, c, d, bias)
        dz = None if z is None else torch.empty_like(z)
        return du, ddelta, da, db, dc, dd, dz, dbias


# -- the whole mixer -------------------------------------------------------------------------------


def _mamba_inner_fn(xz: torch.Tensor, *weights: Any, **rest: Any) -> torch.Tensor:
    """Convolution (weight, bias), projections of x, delta and the output, its bias, A, B, C, D."""
    *projections, a, _, _, d = weights
    return _Mixer.apply(xz, *projections, a, d, rest.get("delta_bias"))


def _delta(delta_proj: torch.Tensor, x_dbl: torch.Tensor, batch: int) -> torch.Tensor:
    """[inner, batch * length] as [batch, inner, length], positions next to each other."""
    product = delta_proj @ x_dbl[:, : delta_proj.shape[1]].t()
    return product.view(product.shape[0], batch, -1).transpose(0, 1)


class _Mixer(torch.autograd.Function):
    """Convolution, projections and scan in one; the convolution and delta are made again."""

    @staticmethod
    @_fwd
    def forward(ctx: Any, xz: torch.Tensor, *weights: Any) -> torch.Tensor:
        conv_weight, conv_bias, x_proj, delta_proj, out_proj, out_bias, a, d, delta_bias = weights
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype("cuda")
            x_proj, delta_proj, out_proj = (w.to(dtype) for w in (x_proj, delta_proj, out_proj))
            out_bias = None if out_bias is None else out_bias.to(dtype)
        xz = _rows(xz)
        conv_weight = conv_weight.squeeze(1)
        x, z = xz.chunk(2, dim=1)
        size, batch = a.shape[-1], xz.shape[0]
        conv_out = torch.empty_like(x)
        flat = conv_out.transpose(1, 2).reshape(-1, x.shape[1])
        x_dbl = functional.linear(flat, x_proj)
        del flat
        delta = _delta(delta_proj, x_dbl, batch)
        rank = delta_proj.shape[1]
        parts = [
            part.view(batch, -1, 1, size).permute(0, 2, 3, 1).contiguous()
            for part in (x_dbl[:, rank : rank + size], x_dbl[:, -size:])
        ]
        out, states, gated_out = _scan(conv_out, delta, a, z)
        convolution = xz, conv_weight, conv_bias
        projections = x_dbl, x_proj, delta_proj, out_proj
        ctx.save_for_backward(*convolution, *projections, a, *parts, d, delta_bias, states, out)
        ctx.has_out_bias = out_bias is not None
        del conv_out, delta
        return functional.linear(gated_out.transpose(1, 2), out_proj, out_bias)  # type: ignore[union-attr]

    @staticmethod
    @_bwd
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        xz, conv_weight, conv_bias, *rest = ctx.saved_tensors
        x_dbl, x_proj, delta_proj, out_proj, *scan_tensors = rest
        a, b, c, d, bias, _, _ = scan_tensors
        batch, rank, size = xz.shape[0], delta_proj.shape[1], a.shape[-1]
        x, _ = xz.chunk(2, dim=1)
        grad = _rows(grads[0])
        conv_out = torch.empty_like(x)
        delta = _delta(delta_proj, x_dbl, batch)
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        flat_grad = grad.permute(2, 0, 1).reshape(grad.shape[2], -1)
        _dy = (out_proj.t() @ flat_grad).view(out_proj.shape[1], batch, -1).transpose(0, 1)
        dconv, ddelta, da, db, dc, dd, dbias = _scan_backward(conv_out, delta, a, b, c, d, bias)
        gated_out = torch.empty_like(dz)
        dout_proj = torch.einsum(
            "eB,dB->ed", flat_grad, gated_out.transpose(0, 1).reshape(x.shape[1], -1)
        )
        dout_bias = grad.sum(dim=(0, 1)) if ctx.has_out_bias else None
        dx_dbl = torch.empty_like(x_dbl)
        for gradient, target in ((db, dx_dbl[:, rank : rank + size]), (dc, dx_dbl[:, -size:])):
            target.copy_(gradient.permute(0, 3, 1, 2).reshape(-1, size))
        flat_delta = ddelta.transpose(0, 1).reshape(ddelta.shape[1], -1)
        ddelta_proj = torch.einsum("dB,Br->dr", flat_delta, x_dbl[:, :rank])
        dx_dbl[:, :rank].copy_(torch.einsum("dB,dr->Br", flat_delta, delta_proj))
        flat_conv = dconv.transpose(0, 1).reshape(dconv.shape[1], -1)
        again = conv_out.transpose(1, 2).reshape(-1, x.shape[1])
        dx_proj = torch.einsum("Br,Bd->rd", dx_dbl, again)
        del again
        torch.addmm(flat_conv, x_proj.t(), dx_dbl.t(), out=flat_conv)
        _, dconv_weight, dconv_bias = _conv_backward(x, conv_weight, conv_bias, dx)
        projections = dx_proj, ddelta_proj, dout_proj, dout_bias
        return (dxz, dconv_weight.unsqueeze(1), dconv_bias, *projections, da, dd, dbias)
