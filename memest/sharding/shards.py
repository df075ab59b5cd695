"""Shards: how much of a parameter a rank holds, and what its optimizer sees.

Source: ``FSDPParam._init_sharded_param`` of torch 2.13: ``torch.chunk`` along the first dimension;
every rank's storage has the size of the first chunk, whatever part of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from memest.errors import ConfigError
from memest.events import Weight
from memest.quantization import Format
from memest.setup import Dtype, Setup

__all__ = [
    "loaded_dtype",
    "num_elements",
    "padded_elements",
    "stored_dtype",
]


def num_elements(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def padded_elements(weight: Weight, ranks: int) -> int:
    """Elements of a rank's storage for its part of a weight.

    Raises:
        ConfigError: a number without dimensions, which FSDP refuses.
    """
    if not weight.shape:
        raise ConfigError(
            f"FSDP2 cannot shard {weight.name}, a parameter without dimensions: make it a tensor "
            "of one element in the model, or use --zero 3 or plain DDP."
        )
    first, *rest = weight.shape
    return -(-first // ranks) * num_elements(rest)


def stored_dtype(weight: Weight, setup: Setup) -> str:
    """The dtype in which FSDP stores a weight that computes in ``weight.dtype``.

    With mixed precision, accelerate stores what trains in float32 (``fsdp2_prepare_model``; not
    beside 4-bit weights, where it leaves adapters as peft made them) and the rest as it was loaded.
    """
    if not setup.computes_in_half:
        return weight.dtype
    spread, quantization = setup.distributed, setup.quantization
    four = quantization is not None and quantization.format is Format.BNB_4BIT
    if weight.trains and not (four and spread.fsdp_version == 2):
        return Dtype.FLOAT32.value
    return loaded_dtype(weight, setup)


def loaded_dtype(weight: Weight, setup: Setup) -> str:
    """The dtype in which a weight came to FSDP."""
    if not setup.computes_in_half:
        return weight.dtype
    if weight.kept_dtype:
        return weight.kept_dtype
    return Dtype.FLOAT32.value if setup.dtype is Dtype.FLOAT32 else weight.dtype
