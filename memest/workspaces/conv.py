"""Convolution: workspaces that cuDNN asks for. Its heuristics decide, so every size is a range.

No formula exists outside cuDNN. What is expected here are the transposed copies that tensor-core
kernels need of tensors that lie channels first, and the partial sums of a weight's gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memest.units import MIB
from memest.workspaces.layout import (
    acc_bytes,
    argument,
    ceil_div,
    contiguous_copy,
    integer,
    is_channels_last,
    is_contiguous,
    kernel_copy,
    tensor,
    until,
)
from memest.workspaces.operator_call import (
    CONVOLUTION_WORKSPACE,
    GpuTraits,
    OpCall,
    TensorSpec,
    Value,
    Workspace,
)
from memest.workspaces.reduce import ReduceKernel, reduction_scratch
from memest.workspaces.registry import rule

__all__: list[str] = []

_MOST = 4096 * MIB
_TILE = 128
_PIXELS_OF_A_PART = 2048
_VECTOR = 8
_LARGE_IMAGE = 300
_FEW_CHANNELS, _SMALL_KERNEL = 4, 16


@rule("aten.convolution", "aten.cudnn_convolution", "aten._convolution", needs="input weight out")
def convolution(
    call: OpCall, gpu: GpuTraits, spec: TensorSpec, weight: TensorSpec, out: TensorSpec
) -> tuple[Workspace, ...]:
    """Expected: transposed copies of input, weight and output if channels first; at most 4 x.

    A product over single pixels (1 x 1, stride 1) needs none, but for small images of an odd
    size those of input and output; few channels under a small kernel need none. Nothing is
    expected for channels last, for fp32 without TF32 and for depthwise convolutions. Of bf16
    before compute capability 8.0, which cuDNN does not take, one sample laid out as columns.

    Source: ATen/native/cudnn/Conv_v8.cpp, Convolution.cpp; the size is cuDNN's (2.x). Columns:
    use_cudnn in Convolution.cpp, ATen/native/cuda/ConvolutionMM2d.cu.
    Evidence: recorded (2,360 convolutions of 16 networks, cuDNN 9.19 on an H100); elsewhere memory.
    """
    layer = _Layer(spec, weight, out, integer(call, 5 if "cudnn" in call.op else 8, "groups", 1))
    return (*_layout_copies(spec, weight), _workspace(layer, gpu))


@rule("aten.convolution_backward", needs="grad_output input weight")
def convolution_backward(
    call: OpCall, gpu: GpuTraits, grad: TensorSpec, spec: TensorSpec, weight: TensorSpec
) -> list[Workspace]:
    """A workspace for the input's gradient, one for the weight's, scratch of the bias's sum.

    Both as in the forward pass; the weight's holds fp32 partial sums in addition: one for each of
    so many parts of the pixels as fill the GPU with tiles of 128 x 128, or over single pixels one
    for each image where that is less. The first is freed before the second gradient is made.

    Source: ATen/native/Convolution.cpp, cudnn/Conv_v8.cpp; the sizes are cuDNN's (2.x).
    Evidence: recorded (2,360 convolutions of 16 networks, cuDNN 9.19 on an H100); sum of the bias:
    as the rule of sum.
    """
    mask = argument(call, 10, "output_mask")
    layer = _Layer(spec, weight, grad, integer(call, 9, "groups", 1))
    workspaces = list(_layout_copies(spec, weight))
    if is_channels_last(spec) and not is_channels_last(grad) and not is_contiguous(grad):
        workspaces.append(kernel_copy(grad, "convolution gradient, other layout"))
    workspaces = [replace(copy, results_before=0) for copy in workspaces]
    num_results = 0
    for which in (0, 1):
        if _asks_for(mask, which):
            num_results += 1
            workspace = until(_workspace(layer, gpu, sums_pixels=which == 1), len(workspaces) + 1)
            workspaces.append(replace(workspace, results_before=num_results))
    if _asks_for(mask, 2):
        dims = (0, *range(2, len(grad.shape)))
        kernel = ReduceKernel(acc_bytes(grad.dtype), in_place=grad.itemsize != 2)
        workspaces += reduction_scratch(grad, dims, kernel, gpu, out_bytes=grad.itemsize)
    return workspaces


def _asks_for(mask: Value, which: int) -> bool:
    return not isinstance(mask, tuple) or len(mask) <= which or bool(mask[which])


def _layout_copies(spec: TensorSpec, weight: TensorSpec) -> tuple[Workspace, ...]:
    """Copies that bring operands into one memory format: channels last if either of them is."""
    last = is_channels_last(spec) or is_channels_last(weight)
    return tuple(
        kernel_copy(operand, "convolution operand, other layout")
        for operand in (spec, weight)
        if operand.numel
        and not (is_channels_last(operand) if last else is_contiguous(operand))
        and not (last and _one_way(operand))
    )


def _one_way(spec: TensorSpec) -> bool:
    """Whether a contiguous tensor lies channels last as well (one channel, or one pixel)."""
    pixels = math.prod(spec.shape[2:])
    return is_contiguous(spec) and (spec.shape[1] == 1 or pixels == 1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Operands of a convolution; ``out`` is its result or the gradient of it."""

    spec: TensorSpec
    weight: TensorSpec
    out: TensorSpec
    groups: int

    @property
    def image_bytes(self) -> int:
        """Of the input and of the result."""
        return (self.spec.numel + self.out.numel) * self.spec.itemsize

    @property
    def pixels(self) -> int:
        """Of the result."""
        return math.prod(self.out.shape[2:])

    @property
    def kernel(self) -> int:
        """Pixels that one of the result sees."""
        return math.prod(self.weight.shape[2:])

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups > 1 and self.weight.shape[1] == 1

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a product over single pixels."""
        same = self.pixels == math.prod(self.spec.shape[2:])
        return self.kernel == 1 and same and self.groups == 1


def _workspace(layer: _Layer, gpu: GpuTraits, *, sums_pixels: bool = False) -> Workspace:
    """What one pass asks for; the gradient of the weight sums over pixels."""
    spec = layer.spec
    total = sum(t.numel * t.itemsize for t in (spec, layer.weight, layer.out))
    if spec.dtype == "bfloat16" and gpu.capability < (8, 0):
        columns = 0 if layer.is_depthwise else _columns_bytes(layer)
        return Workspace(columns, "columns of one sample", high_nbytes=total + columns)
    tensor_cores = (spec.itemsize == 2 and gpu.capability >= (7, 0)) or gpu.capability >= (8, 0)
    expected = 0
    if tensor_cores and not layer.is_depthwise:
        expected = _sums_bytes(layer, gpu) if sums_pixels else _transposed_bytes(layer)
    high = min(max(4 * total, expected), max(_MOST, expected))
    return Workspace(expected, CONVOLUTION_WORKSPACE, high_nbytes=high)


def _transposed_bytes(layer: _Layer) -> int:
    """Copies that lie channels last."""
    spec, weight = layer.spec, layer.weight
    if is_channels_last(spec) or layer.pixels == 1 == layer.kernel:
        return 0
    images = layer.image_bytes
    if layer.is_pointwise:
        aligned = layer.pixels * spec.itemsize % _VECTOR == 0
        return 0 if aligned or layer.pixels >= _LARGE_IMAGE else images
    if spec.shape[1] <= _FEW_CHANNELS and layer.kernel <= _SMALL_KERNEL:
        return 0
    return images + weight.numel * weight.itemsize


def _sums_bytes(layer: _Layer, gpu: GpuTraits) -> int:
    """Of the gradient of the weight: transposed copies and partial sums."""
    spec, weight = layer.spec, layer.weight
    rows = layer.groups * ceil_div(weight.shape[0] // layer.groups, _TILE)
    tiles = rows * ceil_div(weight.shape[1] * layer.kernel, _TILE)
    samples = layer.out.shape[0]
    parts = min(gpu.sm_count // tiles, samples * layer.pixels // _PIXELS_OF_A_PART)
    sums = parts * weight.numel * 4 if parts > 1 else 0
    if is_channels_last(spec):
        return sums
    images = layer.image_bytes
    if layer.is_pointwise:
        return 0 if layer.pixels == 1 else min(samples * weight.numel * 4, images + sums)
    if spec.itemsize == 4 and not _transposed_bytes(layer):
        return 0
    return images + weight.numel * weight.itemsize + sums


def _columns_bytes(layer: _Layer) -> int:
    """What a product needs of one sample: for each pixel all values that its kernel covers."""
    if layer.kernel == 1:
        return 0
    return layer.weight.shape[1] * layer.kernel * layer.pixels * layer.out.itemsize


# -- pooling ---------------------------------------------------------------------------------------


def _alike(spec: TensorSpec | None, image: TensorSpec, label: str) -> tuple[Workspace, ...]:
    """The copy of ``contiguous(memory_format)`` in the format that an image suggests."""
    if spec is None:
        return ()
    if not is_channels_last(image):
        return contiguous_copy(spec, label)
    return () if is_channels_last(spec) else (kernel_copy(spec, label),)


@rule("aten.avg_pool2d", "aten.max_pool2d_with_indices", needs="self")
def pooling(_call: OpCall, _gpu: GpuTraits, image: TensorSpec) -> tuple[Workspace, ...]:
    """Nothing, unless the image is neither contiguous nor channels last: a copy of it.

    Source: ATen/native/cuda/AveragePool2d.cu, DilatedMaxPool2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    return _alike(image, image, "pooled image, contiguous")


@rule("aten.avg_pool2d_backward", "aten.max_pool2d_with_indices_backward")
def pooling_backward(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Copies of image, gradient and indices that do not lie in the image's format.

    Source: ATen/native/cuda/AveragePool2d.cu, DilatedMaxPool2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    grad, image = tensor(call, 0, "grad_output"), tensor(call, 1, "self")
    if image is None:
        return ()
    workspaces = _alike(image, image, "pooled image, contiguous")
    workspaces += _alike(grad, image, "pooling gradient, contiguous")
    if "max_pool2d" in call.op:
        workspaces += _alike(tensor(call, 7, "indices"), image, "pooling indices, contiguous")
    return workspaces


# -- upsampling ------------------------------------------------------------------------------------


_FEWEST_CHANNELS = 4
"""With fewer, the kernels for images with the channels last are not taken."""


@rule(
    "aten.upsample_nearest2d",
    "aten.upsample_nearest2d_backward",
    "aten._upsample_nearest_exact2d",
    "aten._upsample_nearest_exact2d_backward",
    "aten.upsample_bilinear2d_backward",
    needs="self out",
)
def upsampling(
    _call: OpCall, _gpu: GpuTraits, image: TensorSpec, out: TensorSpec
) -> tuple[Workspace, ...]:
    """Nothing if all lies row by row, or channels last (4 and more); else copies of what does not.

    Source: ATen/native/cuda/UpSampleNearest2d.cu, UpSampleBilinear2d.cu (1.10 to 2.x).
    Evidence: source.
    """
    if len(image.shape) < 4 or image.shape == out.shape:
        return ()
    if image.shape[1] >= _FEWEST_CHANNELS and is_channels_last(image) and is_channels_last(out):
        return ()
    copies = () if is_contiguous(out) else (kernel_copy(out, "upsampling result, contiguous"),)
    return copies + contiguous_copy(image, "upsampling input, contiguous")
