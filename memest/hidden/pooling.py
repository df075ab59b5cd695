"""Pooling of images: copies of what does not lie as the kernels want it."""

from __future__ import annotations

from memest.hidden.call import GpuTraits, Hidden, OpCall, TensorSpec
from memest.hidden.layout import contiguous_copy, is_channels_last, kernel_copy, tensor
from memest.hidden.registry import rule

__all__: list[str] = []


def _alike(spec: TensorSpec | None, image: TensorSpec, label: str) -> tuple[Hidden, ...]:
    """The copy of ``contiguous(memory_format)`` in the format that an image suggests."""
    if spec is None:
        return ()
    if not is_channels_last(image):
        return contiguous_copy(spec, label)
    return () if is_channels_last(spec) else (kernel_copy(spec, label),)


@rule("aten.avg_pool2d", "aten.max_pool2d_with_indices")
def pooling(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Nothing, unless the image is neither contiguous nor channels last: a copy of it.

    Source: ATen/native/cuda/AveragePool2d.cu, DilatedMaxPool2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    del gpu
    image = tensor(call, 0, "self")
    return () if image is None else _alike(image, image, "pooled image, contiguous")


@rule("aten.avg_pool2d_backward", "aten.max_pool2d_with_indices_backward")
def pooling_backward(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Copies of image, gradient and indices that do not lie in the image's format.

    Source: ATen/native/cuda/AveragePool2d.cu, DilatedMaxPool2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    del gpu
    grad, image = tensor(call, 0, "grad_output"), tensor(call, 1, "self")
    if image is None:
        return ()
    found = _alike(image, image, "pooled image, contiguous")
    found += _alike(grad, image, "pooling gradient, contiguous")
    if "max_pool2d" in call.op:
        found += _alike(tensor(call, 7, "indices"), image, "pooling indices, contiguous")
    return found
