"""Flat parameters of FSDP1: which weights of a unit lie where, and what an optimizer has of them.

Source: ``FlatParamHandle`` of ``torch/distributed/fsdp/_flat_param.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memest.distributed import Fsdp
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.hidden.call import DTYPE_BYTES
from memest.setup import Setup
from memest.sharding.shards import num_elements, stored_dtype
from memest.sharding.units import units_of

__all__ = ["Flat", "flat_of", "flat_weights", "keeps_whole"]

_ALIGNED_BYTES = 16
"""``_get_aligned_numel``: with ``use_orig_params`` every parameter begins at such an address."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat parameter.

    Attributes:
        weights: numbers of its parameters, in order.
        offsets: first element of each.
        elements: of all of them with the padding between.
        shard_elements: of a rank.
    """

    weights: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    shard_elements: int


def flat_of(
    members: Sequence[int], weights: Sequence[Weight], *, ranks: int, aligned: bool
) -> Flat:
    """How the parameters of a unit lie in its flat parameter.

    Source: ``FlatParamHandle._init_flat_param_and_metadata``.

    Args:
        members: numbers of the parameters.
        weights: of the model, in the dtype that they compute in.
        ranks: that share it.
        aligned: ``use_orig_params``: with padding between parameters.

    Raises:
        ConfigError: parameters of several dtypes, or frozen ones beside others.
    """
    dtypes = sorted({weights[index].dtype for index in members})
    if len(dtypes) > 1:
        raise ConfigError(
            "--fsdp-version 1 flattens the parameters of a unit into one, and these have "
            f"{' and '.join(dtypes)}: the run stops there. Use --fsdp-version 2."
        )
    if len({weights[index].trains for index in members}) > 1:
        frozen = next(weights[index].name for index in members if not weights[index].trains)
        trained = next(weights[index].name for index in members if weights[index].trains)
        raise ConfigError(
            f"--fsdp-version 1 is not modelled where a unit has frozen parameters ({frozen}) "
            f"beside those that train ({trained}): without use_orig_params the run stops there, "
            "with it gradients of both are computed. Use --fsdp-version 2, which takes each by "
            "itself."
        )
    offsets, at = [], 0
    unit = _ALIGNED_BYTES // DTYPE_BYTES[dtypes[0]] if aligned and members else 1
    for index in sorted(members):
        at = -(-at // unit) * unit
        offsets.append(at)
        at += num_elements(weights[index].shape)
    if aligned:
        at = -(-at // ranks) * ranks
    return Flat(tuple(sorted(members)), tuple(offsets), at, -(-at // ranks))


def keeps_whole(setup: Setup) -> bool:
    """``NO_SHARD``: asked for, or what FSDP1 makes of any strategy where there is one GPU."""
    spread = setup.distributed
    return spread.fsdp is Fsdp.NO_SHARD or spread.shard_ranks == 1


def flat_weights(
    weights: Sequence[Weight], setup: Setup, landmarks: Landmarks
) -> tuple[Weight, ...]:
    """What the optimizer of rank 0 has: its part of every flat parameter, whole or in pieces.

    Args:
        weights: as they were traced.
        setup: of the run.
        landmarks: of the model.
    """
    ranks, original = setup.distributed.shard_ranks, setup.keeps_parameters
    out: list[tuple[int, Weight]] = []
    place = {name: number for number, name in enumerate(landmarks.kinds)}
    for plan in units_of(setup, weights, landmarks):
        if not plan.weights:
            continue
        flat = flat_of(plan.weights, weights, ranks=ranks, aligned=original)
        first = weights[flat.weights[0]]
        dtype = stored_dtype(first, setup)
        if not original:
            trains = any(weights[index].trains for index in flat.weights)
            # modules before those inside them, as ``parameters`` has them
            order = place.get(plan.modules[0], 0)
            held = flat.elements if keeps_whole(setup) else flat.shard_elements
            # nobody finds a parameter of the model in it, by name or by identity
            joined = replace(first, name=f"{plan.modules[0]}._flat_param".lstrip("."))
            out.append((order, _piece(joined, held, dtype, trains=trains)))
            continue
        for index, offset in zip(flat.weights, flat.offsets, strict=True):
            weight = weights[index]
            held = flat.elements if keeps_whole(setup) else flat.shard_elements
            size = min(num_elements(weight.shape), max(held - offset, 0))
            if size:
                out.append((index, _piece(weight, size, dtype, trains=weight.trains)))
    return tuple(weight for _, weight in sorted(out, key=lambda pair: pair[0]))


def _piece(weight: Weight, elements: int, dtype: str, *, trains: bool) -> Weight:
    return replace(
        weight, shape=(elements,), stride=(1,), dtype=dtype, trains=trains,
        has_grad=trains,
    )  # fmt: skip
