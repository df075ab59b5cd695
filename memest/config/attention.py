"""What kernels of attention take, as options and a ``config.json`` tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.config.kinds import Attention, Dtype, Precision
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = ["check_flash_dtype", "check_flash_precision", "stored_dtype", "text_dtype"]

_HALF = ("float16", "bfloat16")


def check_flash_dtype(dtype: str, setup: TrainingRun) -> None:
    """Refuse fp32 weights without autocast, which flash-attn refuses too.

    Args:
        dtype: of the weights, as torch spells it.
        setup: says whether autocast runs.

    Raises:
        ConfigError: neither the weights nor autocast are in half precision.
    """
    if dtype not in _HALF and setup.precision is Precision.FP32:
        raise ConfigError(
            "--attn-implementation flash_attention_2 needs queries in fp16 or bf16, and these "
            f"weights are {dtype} without autocast. Add --bf16 or --fp16 (autocast), or --dtype "
            "bfloat16."
        )


def check_flash_precision(values: Mapping[str, Any], setup: TrainingRun) -> None:
    """:func:`check_flash_dtype` for the weights of a model that reads text alone.

    Args:
        values: of its ``config.json``; where it names no dtype, transformers makes float32.
        setup: of the run.

    Raises:
        ConfigError: as there.
    """
    if setup.attn_implementation is Attention.FLASH_ATTENTION_2:
        check_flash_dtype(text_dtype(values, setup), setup)


def text_dtype(values: Mapping[str, Any], setup: TrainingRun) -> str:
    """The dtype of the weights of a model that reads text alone.

    Args:
        values: of its ``config.json``; where it names no dtype, transformers makes float32.
        setup: of the run.
    """
    if setup.loaded_dtype is not Dtype.AUTO:
        return setup.loaded_dtype.value
    return stored_dtype(values) or Dtype.FLOAT32.value


def stored_dtype(values: Mapping[str, Any]) -> str:
    """The dtype that a ``config.json`` names; empty where it names none.

    A model of several parts is loaded in the dtype of a part where its top is silent: transformers
    takes that of the weights then, which are of one dtype.
    """
    parts = (values, values.get("text_config"), values.get("vision_config"))
    for part in (each for each in parts if isinstance(each, Mapping)):
        if written := part.get("dtype") or part.get("torch_dtype"):
            return str(written).removeprefix("torch.")
    return ""
