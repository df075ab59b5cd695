"""Losses that multiply by the head's weight and leave the head uncalled, on several GPUs.

Liger's loss, TRL's and cut cross-entropy read ``lm_head.weight`` in the forward of the whole model.
Hooks that gather parameters are the modules' own, so it matters whose hooks gather the head's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.kinds import Loop

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_read_head", "reader_of_head"]


def reader_of_head(setup: Setup) -> str:
    """The option whose loss reads the head's weight; "" for none.

    torchtune's losses call the head, piece by piece.
    """
    if setup.use_liger_kernel:
        return "--use-liger-kernel"
    if setup.fused_loss and not setup.fused_loss.startswith("torchtune"):
        return f"--fused-loss {setup.fused_loss}"
    return ""


def check_read_head(setup: Setup) -> None:
    """What is known to stop, or is not priced, before a model is there.

    Sources: ``_find_final_norm`` of accelerate 1.15, torchtune's
    ``recipes/full_finetune_distributed.py`` at April 2026. ZeRO-3 gathers what is read
    (``ZeROOrderedDict`` of DeepSpeed, ``runtime/zero/parameter_offload.py``).

    Raises:
        ConfigError: such a pair of options.
    """
    spread, fused = setup.distributed, setup.fused_loss
    reads = reader_of_head(setup)
    flag = reads or f"--fused-loss {fused}"
    if not (reads or fused):
        return
    if spread.zero == 3 and not reads:
        raise ConfigError(
            f"{flag} and --zero 3 are not priced together: torchtune's recipes shard by FSDP2 and "
            "have no DeepSpeed. Leave one of them out: without --fused-loss all logits are priced, "
            "and the losses of TRL, --fused-loss trl-fused, go with --zero 3."
        )
    if fused and (spread.pp > 1 or spread.shares_model):
        several = "--pp" if spread.pp > 1 else "--tp" if spread.tp > 1 else "--ep"
        raise ConfigError(
            f"{flag} is not priced together with {several}, whose ranks have parts of the model, "
            "and memest does not guess: leave one of them out."
        )
    if spread.strategy is not Strategy.FSDP:
        return
    if fused and not reads:
        raise ConfigError(
            f"{flag} and --fsdp {spread.fsdp} are not priced together yet: torchtune's recipes "
            "compute the loss behind the model's forward, where FSDP's hooks are past. Leave one "
            "of them out: without --fused-loss all logits are priced."
        )
    if setup.adapter is not None and spread.fsdp_version == 2 and setup.loop is not Loop.PLAIN:
        happens = "the loss has a DTensor of shards, which is not priced"
        if setup.use_liger_kernel:
            happens = "Liger multiplies by shards, and torch stops (mixed Tensor and DTensor)"
        elif fused.startswith("trl"):
            happens = "SFTTrainer gathers it for the loss (full_tensor), which is not priced yet"
        raise ConfigError(
            f"{flag} does not go with an adapter under FSDP2 of accelerate and the Trainer: "
            "accelerate does not find the final norm of a model with adapters and makes the head "
            f"a unit of its own, which is not gathered where nobody calls it; {happens}. Use "
            f"--fsdp-version 1, --zero 2, or leave {flag.partition(' ')[0]} out."
        )
