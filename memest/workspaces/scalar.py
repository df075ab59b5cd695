"""Numbers of Python that a kernel needs as a tensor on the GPU."""

from __future__ import annotations

from memest.workspaces.layout import argument
from memest.workspaces.operator_call import GpuTraits, OpCall, Workspace
from memest.workspaces.registry import rule

__all__ = []

_BYTES = 8


@rule("aten.pow.Scalar")
def power_of_a_number(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """The number whose powers are taken, as a tensor of one element: 8 bytes; of 1 nothing.

    Source: ``pow_Scalar_out`` in ATen/native/Pow.cpp (``wrapped_scalar_tensor`` on the exponent's
    device, a double or a long).
    Evidence: source.
    """
    base = argument(call, 0, "self")
    return () if base == 1 else (Workspace(_BYTES, "base of a power"),)
