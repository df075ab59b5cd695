"""LLM.int8() as CUDA runs it, where the library's meta kernels stop or hide what is allocated.

The search for outliers asks for values, which a meta tensor has not: the answer is that there are
none. Products go through an int32 and a float16 result on the way to the dtype of the input.

Source: bitsandbytes 0.50.2, backends/cuda/ops.py (int8_vectorwise_quant, int8_linear_matmul,
int8_mm_dequant) and backends/default/ops.py (int8_mixed_scaled_mm, int8_scaled_mm).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from memest.trace.recorder import Handler, Recorder

__all__ = ["bitsandbytes_handlers"]


def _vectorwise_quant(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of int8 and their scales; above the threshold a mask of what stands out."""
    x = args[0]
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    scales = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    recorder.record_storage(scales, func)
    rows = recorder.record(torch.empty(x.shape, dtype=torch.int8, device=x.device), func)
    if threshold == 0.0:
        return rows, scales, None
    sizes = recorder.record(torch.empty_like(x), func)
    _outliers = recorder.record(torch.empty_like(x, dtype=torch.bool), func)
    del sizes
    _tensor = recorder.record(torch.empty((), dtype=torch.bool, device=x.device), func)
    return rows, scales, torch.empty(0, dtype=torch.int64, device=x.device)


def _scaled_mm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The product of int8 matrices in int32, then float16, then the dtype that is asked for."""
    rows, weight = args[0], args[1]
    dtype = args[5] if len(args) > 5 else kwargs.get("dtype")
    return _product(recorder, func, rows, weight, dtype or torch.float16)


def _mixed_scaled_mm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The same, where no column stands out."""
    x, rows, weight = args[0], args[1], args[2]
    return _product(recorder, func, rows, weight, x.dtype), torch.empty(
        0, dtype=x.dtype, device=x.device
    )


def _product(
    recorder: Recorder, func: Any, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    def result(result_dtype: torch.dtype) -> torch.Tensor:
        shape = (*rows.shape[:-1], weight.shape[0])
        return recorder.record(torch.empty(shape, dtype=result_dtype, device=rows.device), func)

    _whole = result(torch.int32)
    if weight.shape[-1] % 4:
        # cuBLASLt takes no such matrices: both are made fp32, and their product int32
        copies = [torch.empty_like(t, dtype=torch.float32) for t in (rows, weight)]
        for copy in copies:
            recorder.record_storage(copy, func)
        product = result(torch.float32)
        del copies, copy
        cast = result(torch.int32)
        del product, cast
    out = result(torch.float16)
    if dtype is not torch.float16:
        out = torch.empty_like(out, dtype=dtype)  # the float16 one goes as this one comes
        recorder.record_storage(out, func)
    return out


def bitsandbytes_handlers() -> dict[Any, Handler]:
    """Handlers for the library's operators; none where it is not loaded."""
    if "bitsandbytes" not in sys.modules:
        return {}
    ops = torch.ops.bitsandbytes
    return {
        ops.int8_vectorwise_quant.default: _vectorwise_quant,
        ops.int8_scaled_mm.default: _scaled_mm,
        ops.int8_mixed_scaled_mm.default: _mixed_scaled_mm,
    }
