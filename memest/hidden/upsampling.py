"""Upsampling of images: what does not lie row by row goes through copies that do."""

from __future__ import annotations

from memest.hidden.call import GpuTraits, Hidden, OpCall
from memest.hidden.layout import (
    contiguous_copy,
    is_channels_last,
    is_contiguous,
    kernel_copy,
    tensor,
)
from memest.hidden.registry import rule

__all__: list[str] = []

_FEWEST_CHANNELS = 4
"""With fewer, the kernels for images with the channels last are not taken."""


@rule(
    "aten.upsample_nearest2d",
    "aten.upsample_nearest2d_backward",
    "aten._upsample_nearest_exact2d",
    "aten._upsample_nearest_exact2d_backward",
    "aten.upsample_bilinear2d_backward",
)
def upsampling(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Nothing if all lies row by row, or channels last (4 and more); else copies of what does not.

    Source: ATen/native/cuda/UpSampleNearest2d.cu, UpSampleBilinear2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    del gpu
    given, made = tensor(call, 0, "self"), call.outputs[0] if call.outputs else None
    if given is None or made is None or given.shape == made.shape:
        return ()
    if given.shape[1] >= _FEWEST_CHANNELS and is_channels_last(given) and is_channels_last(made):
        return ()
    beside = () if is_contiguous(made) else (kernel_copy(made, "upsampling result, contiguous"),)
    return beside + contiguous_copy(given, "upsampling input, contiguous")
