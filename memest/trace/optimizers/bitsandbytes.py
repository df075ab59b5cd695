"""bitsandbytes' optimizers: fp32 or 8-bit states, in blocks, and in managed memory where paged.

The library updates one parameter after the other in one kernel each, without any temporary, so
what it takes is its states. They are made here as its ``init_state`` makes them, in its order; so
no bitsandbytes needs to be installed, and the block size of another release can be had.

Source: ``bitsandbytes/optim/optimizer.py`` and ``optim/ademamix.py`` of 0.50.2, ``functional.py``
(``get_paged``, ``create_dynamic_map``), and ``CHANGELOG.md``, 0.44.0 (blocks of 256 elements
instead of 2048). The exception of embeddings: ``Trainer.create_optimizer`` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memest.config.optimizers import MIN_8BIT_SIZE, PAGED_SIZE
from memest.trace.optimizers.stepping import StatesAlone
from memest.trace.recorder import Recorder

__all__ = ["Blocks", "block_states", "blocks_of", "library_optimizer"]

_MAP = 256
_SMALL_BLOCKS = (0, 44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One of bitsandbytes' optimizers.

    Attributes:
        algorithm: class of the library.
        first: copies of the parameter in the first state; 2 for AdEMAMix.
        second: whether there is a second state.
        bits: 8 or 32.
        paged: states in managed memory.
    """

    algorithm: str
    first: int = 1
    second: bool = True
    bits: int = 32
    paged: bool = False


def blocks_of(name: str) -> Blocks:
    """The optimizer behind a name of ``OptimizerNames``; sorted out as the Trainer does."""
    bits, paged = (8 if "8bit" in name else 32), "paged" in name
    if "ademamix" in name:
        return Blocks(algorithm="AdEMAMix", first=2, bits=bits, paged=paged)
    if "lion" in name:
        return Blocks(algorithm="Lion", second=False, bits=bits, paged=paged)
    if "rmsprop" in name:
        return Blocks(algorithm="RMSprop", second=False, bits=bits)
    return Blocks(algorithm="AdamW", bits=bits, paged=paged)


def block_states(
    groups: Iterable[Any],
    blocks: Blocks,
    fp32_ids: frozenset[int],
    recorder: Recorder,
    version: tuple[int, int],
) -> StatesAlone:
    """The states and the launches of a bitsandbytes optimizer, on meta tensors.

    Args:
        groups: parameters.
        blocks: which optimizer.
        fp32_ids: parameters whose states are fp32 whatever the others' are (embeddings under the
            Trainer), by identity.
        recorder: told of managed memory.
        version: of bitsandbytes.
    """
    block_size = 256 if version >= _SMALL_BLOCKS else 2048
    maps: list[torch.Tensor] = []

    def buffer(parameter: torch.Tensor, copies: int, dtype: torch.dtype) -> Any:
        """``get_state_buffer``: zeros, or as many bytes of managed memory."""
        if blocks.paged and parameter.numel() >= PAGED_SIZE:
            recorder.trace.managed_bytes += copies * parameter.numel() * dtype.itemsize
            return "managed"
        shape = parameter.shape if copies == 1 else (copies, *parameter.shape)
        return parameter.new_zeros(shape, dtype=dtype)

    def moments(parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        state = {"state1": buffer(parameter, blocks.first, dtype)}
        if blocks.second:
            state["state2"] = buffer(parameter, 1, dtype)
        return state

    def states(parameter: torch.Tensor) -> dict[str, Any]:
        """As ``init_state`` of the library."""
        is_8bit = blocks.bits == 8 and id(parameter) not in fp32_ids
        if not is_8bit or parameter.numel() < MIN_8BIT_SIZE:
            return moments(parameter, torch.float32)
        if not maps:
            # the quantisation maps move to the device with the first 8-bit state, once for all
            count = 2 if blocks.second else 1
            maps.extend(parameter.new_zeros(_MAP, dtype=torch.float32) for _ in range(count))
        moments_last = blocks.first > 1  # AdEMAMix makes its states behind their scales
        state: dict[str, Any] = {
            "qmaps": maps,
            **({} if moments_last else moments(parameter, torch.uint8)),
        }
        count = -(-parameter.numel() // block_size)
        state["absmax1"] = parameter.new_zeros(blocks.first * count, dtype=torch.float32)
        if blocks.second:
            state["absmax2"] = parameter.new_zeros(count, dtype=torch.float32)
        return {**state, **moments(parameter, torch.uint8)} if moments_last else state

    return StatesAlone(groups, states, packs=True)


def library_optimizer(
    groups: list[dict[str, Any]], blocks: Blocks, fp32_ids: frozenset[int]
) -> Any:
    """The library's own optimizer, for parameters that are really there.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it goes by id, and parameters of an earlier run may have had the same
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in fp32_ids:
                manager.override_config(parameter, "optim_bits", 32)
    more = {} if blocks.algorithm == "RMSprop" else {"is_paged": blocks.paged}
    kind = getattr(bitsandbytes.optim, blocks.algorithm)
    return kind(groups, lr=1e-4, optim_bits=blocks.bits, **more)
