"""Quantised bases under FSDP: which weights are sharded, and what the libraries refuse.

Packed 4-bit weights are sharded as the tensor that holds them (``bnb_4bit_quant_storage``); scales,
tables and offsets hang on the layer, whole on every rank. FSDP1 flattens them with the other
weights of a layer, which must have that dtype too. Source: ``fsdp2_prepare_model`` of accelerate
1.15, ``_validate_tensors_to_flatten`` of torch, ``Params4bit`` and
``fix_4bit_weight_quant_state_from_module`` of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memest.errors import ConfigError
from memest.events import Weight
from memest.hidden.call import DTYPE_BYTES
from memest.setup import Precision, Setup
from memest.sharding.shards import loaded_dtype, num_elements, stored_dtype
from memest.sharding.units import UnitPlan
from memest.units import format_size

__all__ = ["sharded_plans"]


def sharded_plans(
    plans: Sequence[UnitPlan], weights: Sequence[Weight], setup: Setup
) -> tuple[tuple[UnitPlan, ...], list[str]]:
    """The units of a run without what is left whole on every rank, and what there is to say of it.

    Args:
        plans: units with all weights.
        weights: of the model.
        setup: the run.

    Raises:
        ConfigError: weights of several dtypes train in a unit, which ``fully_shard`` refuses, or
            lie in one of FSDP1's.
    """
    notes: list[str] = []
    if setup.quantization is not None:
        whole = {n for n, weight in enumerate(weights) if "int" in weight.dtype}
        if whole:
            plans = [
                replace(plan, weights=tuple(w for w in plan.weights if w not in whole))
                for plan in plans
            ]
            nbytes = sum(
                num_elements(weights[n].shape) * DTYPE_BYTES[weights[n].dtype] for n in whole
            )
            half = "float16" if setup.precision is Precision.FP16 else "bfloat16"
            notes.append(
                f"{format_size(nbytes)} of packed weights are whole on every GPU: accelerate does "
                "not shard 4-bit weights that are stored as uint8. --bnb-4bit-quant-storage "
                f"{half} shards them."
            )
    if setup.distributed.fsdp_version == 1:
        for plan in plans:
            _check_flat(plan, weights, setup)
        return tuple(plans), notes
    for plan in plans:
        dtypes = sorted(
            {stored_dtype(weights[w], setup) for w in plan.weights if weights[w].trains}
        )
        if len(dtypes) > 1:
            raise ConfigError(
                f"--fsdp: weights of {' and '.join(dtypes)} train in one unit "
                f"({plan.modules[0] or 'the model itself'}), where fully_shard stops: FSDP expects "
                "uniform original parameter dtype. Add --no-autocast-adapter-dtype, which leaves "
                "adapters in the dtype of the model."
            )
    return tuple(plans), notes


def _check_flat(plan: UnitPlan, weights: Sequence[Weight], setup: Setup) -> None:
    """One flat parameter has one dtype.

    Raises:
        ConfigError: weights of a unit came with several, which FSDP1 refuses.
    """
    first: dict[str, str] = {}
    for number in plan.weights:
        first.setdefault(loaded_dtype(weights[number], setup), weights[number].name)
    if len(first) < 2:
        return
    found = " and ".join(f"{dtype} ({name})" for dtype, name in sorted(first.items()))
    hint = "Use --fsdp-version 2, which takes each weight by itself."
    if setup.quantization is not None:
        hint = (
            "Give --bnb-4bit-quant-storage and --dtype the same dtype, and --no-prepare-kbit, "
            "which leaves the rest in it; or use --fsdp-version 2."
        )
    raise ConfigError(
        f"--fsdp-version 1 flattens the weights of a unit into one, and those of "
        f"{plan.modules[0] or 'the model itself'} come as {found}: the run stops there (torch: "
        f'"Must flatten tensors with uniform dtype"). {hint}'
    )
