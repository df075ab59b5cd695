"""What does not go together with sequences that several GPUs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.errors import ConfigError
from memest.kinds import Attention
from memest.refusals import refuse_beside, refuse_uneven

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_context_parallel"]

_AS_TORCH = (Attention.AUTO, Attention.SDPA)


def check_context_parallel(setup: Setup) -> None:
    """What is not priced together with ``--cp``, or not by accelerate, is refused.

    Sources: ``ParallelismConfig`` and ``_attach_context_parallel_hooks`` of accelerate 1.15,
    ``Trainer._prepare_context_parallel_inputs`` of transformers 5.23.

    Raises:
        ConfigError: such a pair of options, or a length that cannot be shared.
    """
    spread = setup.distributed
    ways = spread.cp
    if ways == 1:
        return
    if spread.zero:
        raise ConfigError(
            f"--cp {ways} and --zero {spread.zero} exclude each other: under DeepSpeed accelerate "
            f"shares sequences by Ulysses (sp_size). Write --sp {ways} in place of --cp, or --fsdp "
            "full_shard in place of --zero."
        )
    if spread.fsdp == "none":
        raise ConfigError(
            f"--cp {ways} is priced under FSDP2, over whose mesh its GPUs share the parameters "
            "(dp_shard_cp): add --fsdp full_shard."
        )
    if spread.fsdp_version == 1:
        raise ConfigError(
            f"--cp {ways} and --fsdp-version 1 exclude each other: accelerate's ParallelismConfig "
            "takes version 2 alone. Drop --fsdp-version."
        )
    _check_copies(setup)
    if setup.attn_implementation not in _AS_TORCH:
        raise ConfigError(
            f"--cp {ways} and --attn-implementation {setup.attn_implementation} exclude each "
            "other: ring attention stands behind scaled_dot_product_attention. Write "
            "--attn-implementation sdpa."
        )
    pairs = (
        (spread.tp > 1, f"--tp {spread.tp}"),
        (spread.pp > 1, f"--pp {spread.pp}"),
        (setup.generation is not None, "--generate"),
        (setup.use_liger_kernel, "--use-liger-kernel"),
        (setup.fused_loss, f"a fused loss ({setup.fused_loss})"),
        (setup.torch_compile, "--torch-compile"),
        (setup.padding_free, "--padding-free"),
        (setup.batching is not None, "lengths that differ from batch to batch"),
    )
    refuse_beside("--cp", pairs)
    check_length("--seq-len", setup.seq_len, ways)


def _check_copies(setup: Setup) -> None:
    """``ParallelismConfig``: replicas are of what ``dp_shard`` and ``cp`` share.

    Raises:
        ConfigError: a copy that is not made of whole sequences, or of one alone.
    """
    spread = setup.distributed
    size, ways = spread.fsdp_shard_size, spread.cp
    if size is None:
        return
    if size % ways or (size == ways and spread.num_copies > 1):
        wanted = max(2, -(-size // ways)) * ways
        why = "is no multiple of it" if size % ways else "leaves nothing to dp_shard"
        raise ConfigError(
            f"--cp {ways} and --fsdp-shard-size {size}: that {why}, and accelerate refuses copies "
            f"that are not sharded over --cp and more GPUs: write --fsdp-shard-size {wanted}, or "
            "leave it out."
        )


def check_length(flag: str, length: int | None, ways: int) -> None:
    """Head and tail of a sequence are dealt out in ``2 * cp`` equal pieces.

    torch 2.13 shares other lengths without that balance (``_create_default_load_balancer``), and
    lengths that ``cp`` does not divide not at all.

    Raises:
        ConfigError: another length.
    """
    pieces = 2 * ways
    why = f"--cp {ways}: head and tail are dealt out in {pieces} equal pieces"
    refuse_uneven(flag, length, pieces, why)
