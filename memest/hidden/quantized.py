"""bitsandbytes: what the kernels of quantised layers take behind their operators."""

from __future__ import annotations

from memest.hidden.blas import linear
from memest.hidden.call import GpuTraits, Hidden, OpCall, TensorSpec
from memest.hidden.layout import tensor
from memest.hidden.registry import rule

__all__ = ["dequantised_product"]

_ALWAYS_FUSED_ROWS = 4


@rule("bitsandbytes.gemm_4bit")
def dequantised_product(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
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
    rows, shape = tensor(call, 0, "A"), call.args[2] if len(call.args) > 2 else None
    out = call.outputs[0] if call.outputs else None
    if rows is None or out is None or not isinstance(shape, tuple) or not rows.numel:
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
    nested: tuple[Hidden, ...] = ()
    if isinstance(scales, TensorSpec):
        # dequantised, then a copy with the offset added
        nested = (Hidden(4 * scales.numel, "scales of blocks, dequantised"),) * 2
    weight = TensorSpec((num_out, num_in), (num_in, 1), rows.dtype)
    dense = Hidden(weight.numel * weight.itemsize, "dequantised weight")
    product = OpCall(
        "aten.linear.default", (rows, weight, kwargs.get("bias")), (), (out,), call.thread
    )
    before = tuple(
        Hidden(hidden.nbytes, hidden.label, before_outputs=True) for hidden in (*nested, dense)
    )
    return (*before, *linear(product, gpu))
