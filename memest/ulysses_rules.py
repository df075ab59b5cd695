"""What does not go together with sequences that several GPUs share by Ulysses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.errors import ConfigError
from memest.kinds import Attention
from memest.quantization import Format
from memest.refusals import refuse_beside, refuse_uneven

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_ulysses"]


def check_ulysses(setup: Setup) -> None:
    """What is not priced together with ``--sp``, or not by accelerate, is refused.

    Sources: ``ParallelismConfig``, ``DeepSpeedSequenceParallelConfig`` and ``_prepare_deepspeed``
    of accelerate 1.15.

    Raises:
        ConfigError: such a pair of options, or a length that cannot be shared.
    """
    spread = setup.distributed
    ways = spread.sp
    if ways == 1:
        return
    if spread.cp > 1:
        raise ConfigError(
            f"--sp {ways} and --cp {spread.cp} exclude each other: accelerate's ParallelismConfig "
            "shares sequences in one way, by Ulysses under DeepSpeed (--sp) or by ring attention "
            "under FSDP2 (--cp). Drop one of them."
        )
    if not spread.zero:
        instead = f"--cp {ways}" if spread.fsdp != "none" else f"--zero 3 --sp {ways}"
        where = f"--fsdp {spread.fsdp}" if spread.fsdp != "none" else "DDP"
        raise ConfigError(
            f"--sp {ways} is DeepSpeed's, and accelerate sets it up in DeepSpeed's engine alone, "
            f"not under {where}: write {instead}, or add --zero 1, 2 or 3 in its place."
        )
    if setup.attn_implementation is Attention.EAGER:
        raise ConfigError(
            f"--sp {ways} and --attn-implementation eager exclude each other: accelerate and "
            "DeepSpeed refuse it, because it would need a mask of the whole sequence. Write "
            "--attn-implementation sdpa or flash_attention_2."
        )
    pairs = (
        (spread.tp > 1, f"--tp {spread.tp}"),
        (spread.pp > 1, f"--pp {spread.pp}"),
        (spread.ep > 1, f"--ep {spread.ep}"),
        (
            setup.adapter is not None and setup.adapter.method != "lora",
            "an adapter other than LoRA",
        ),
        (
            setup.quantization is not None and setup.quantization.format is not Format.BNB_4BIT,
            "a quantised base that is not bitsandbytes' 4-bit one (--load-in-4bit)",
        ),
        (setup.generation is not None, "--generate"),
        (setup.use_liger_kernel, "--use-liger-kernel"),
        (setup.fused_loss, f"a fused loss ({setup.fused_loss})"),
        (setup.torch_compile, "--torch-compile"),
        (setup.padding_free, "--padding-free"),
        ((setup.software.transformers or (5, 0)) < (5, 0), "a release of transformers before 5"),
        (setup.batching is not None, "lengths that differ from batch to batch"),
        (setup.padded, "--padded, whose masks DeepSpeed drops,"),
    )
    refuse_beside("--sp", pairs)
    why = f"--sp {ways}: DeepSpeed's loader cuts every sequence in {ways} equal parts"
    refuse_uneven("--seq-len", setup.seq_len, ways, why)
