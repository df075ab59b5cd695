"""What does not go together with activations that the GPUs of ``--tp`` share along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.errors import ConfigError
from memest.kinds import Attention, Precision
from memest.refusals import refuse_beside, refuse_uneven

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_sequence_parallel"]

_SHELF = (2, 8)
"""The torch from which on collectives keep what they send until it is waited for."""
_AS_TORCH = (Attention.AUTO, Attention.SDPA)


def check_sequence_parallel(setup: Setup) -> None:
    """What is not priced together with ``--tp-sequence-parallel``, or does not run, is refused.

    Sources: ``DistributedConfig`` of transformers 5.23, whose ``enable_sequence_parallel`` is not
    wired up; the styles of ``torch.distributed.tensor.parallel``, which cut a sequence into equal
    parts; ``parallelize_hf_transformers`` of torchtitan, which asserts that they are.

    Raises:
        ConfigError: such a pair of options, or a length that cannot be shared.
    """
    spread = setup.distributed
    if not spread.tp_sequence_parallel:
        return
    if setup.loop != "plain":
        raise ConfigError(
            f"--tp-sequence-parallel is a script's: nothing under --loop {setup.loop} does it "
            "(enable_sequence_parallel of transformers' DistributedConfig is reserved and not "
            "wired up, accelerate has no such switch). Add --loop plain."
        )
    if setup.attn_implementation not in _AS_TORCH:
        raise ConfigError(
            "--tp-sequence-parallel is priced with --attn-implementation sdpa, and not with "
            f"{setup.attn_implementation}: eager attention would get a mask for a part of the "
            "tokens, and flash attention's own function was not compared. Write "
            "--attn-implementation sdpa."
        )
    pairs = (
        (spread.ep > 1, f"--ep {spread.ep}"),
        (spread.pp > 1, f"--pp {spread.pp}"),
        (setup.precision is Precision.FP16, "--fp16"),
        (setup.adapter is not None, "an adapter"),
        (setup.padded, "--padded, whose mask the model would make for a part of the tokens,"),
        (setup.padding_free, "--padding-free"),
        (setup.batching is not None, "lengths that differ from batch to batch"),
        (setup.generation is not None, "--generate"),
        (bool(setup.fused_loss), f"a fused loss ({setup.fused_loss})"),
        (setup.torch_compile, "--torch-compile"),
        (bool(setup.freeze), "--freeze, which SequenceParallel undoes for norms,"),
        ((setup.software.transformers or (5, 0)) < (5, 0), "a release of transformers before 5"),
        ((setup.software.torch or _SHELF) < _SHELF, "a torch before 2.8"),
    )
    refuse_beside("--tp-sequence-parallel", pairs)
    why = f"--tp {spread.tp} along the sequence: torch's styles take equal parts"
    refuse_uneven("--seq-len", setup.seq_len, spread.tp, why)
