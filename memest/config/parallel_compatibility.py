"""What does not go together where several GPUs share a model, its layers, experts or sequences."""

from __future__ import annotations

from memest.config.installed import installed_version
from memest.config.kinds import SDPA, Fsdp, Loop, Precision, Strategy, Task
from memest.config.pairs import refuse_pairs
from memest.config.parallelism import check_stages_task
from memest.config.training_options import SHARDS_AT_LOAD
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = ["check_parallel"]


def check_parallel(setup: TrainingRun) -> None:
    """Refuse what does not go together, is not priced together, or does not run.

    Raises:
        ConfigError: such options.
    """
    for rule in (
        _check_shared_model,
        _check_policy,
        _check_ulysses,
        _check_context_parallel,
        _check_sequence_parallel,
    ):
        rule(setup)


def _check_shared_model(setup: TrainingRun) -> None:
    """A model that is spread over GPUs: its layers, its experts, or stages of it."""
    distributed = setup.distributed
    if distributed.pp == 1 and not distributed.shares_model:
        return
    if distributed.pp > 1 and setup.task is not Task.AUTO:
        check_stages_task(setup.task)
    if distributed.tp > 1 and distributed.pp == 1 and distributed.strategy is Strategy.DDP:
        # ParallelismConfig.__post_init__ of accelerate 1.15, and its prepare_model
        raise ConfigError(
            f"{distributed.data_ranks} copies of a model that --tp {distributed.tp} shards are "
            "refused by "
            "accelerate and the Trainer (dp_replicate_size beside tp_size, without dp_shard_size), "
            f"and DDP takes no sharded weights: write --num-gpus {distributed.tp}, or add --fsdp "
            "full_shard, which shards them over the copies."
        )
    if setup.distributed.fsdp_version == 2:
        _check_shards_layers(setup)
    degrees = {"pp": distributed.pp, "tp": distributed.tp, "ep": distributed.ep}
    ways = [way for way, degree in degrees.items() if degree > 1]
    sharing = ["shared-model"] if distributed.shares_model else []
    sharing += ["at-load"] if setup.is_sharded_at_load else []
    refuse_pairs(setup, f"--{ways[0]}", "model", *ways, *sharing)


def _check_shards_layers(setup: TrainingRun) -> None:
    """Which releases shard by FSDP2 what ``--tp`` shares, under accelerate and the Trainer.

    Sources: ``Accelerator._prepare_tp`` of accelerate 1.12 to 1.15, which leaves layers of local
    tensors alone, and where they are DTensors imports a class that transformers 5.1 took out; its
    layers, local ones from 5.1 to 5.14 and DTensors from 5.16 on; ``from_pretrained`` of 5.15,
    which takes no ``tp_plan``; ``Trainer._build_accelerator_args`` of 5.23, the first to tell
    accelerate how many ranks shard what was sharded at load.
    """
    distributed = setup.distributed
    spread = distributed.tp > 1 and distributed.pp == 1 and distributed.ep == 1
    if setup.loop is Loop.PLAIN or not spread or distributed.strategy is not Strategy.FSDP:
        return
    version = setup.software.transformers or installed_version("transformers")
    if version is None or version >= SHARDS_AT_LOAD or (5, 1) <= version <= (5, 14):
        return
    raise ConfigError(
        f"--tp {distributed.tp} and --fsdp {distributed.fsdp} do not go together under --loop "
        f"{setup.loop} with transformers {version[0]}.{version[1]}: accelerate's FSDP2 takes "
        "the shared layers of 5.1 to 5.14, and stops at later ones (ImportError: "
        "ReplicateParallel); from 5.23 on from_pretrained shards both (DistributedConfig). Write "
        "--software transformers=5.23 or transformers=5.14, or add --loop plain."
    )


def _check_policy(setup: TrainingRun) -> None:
    """Mixed precision that FSDP2 is told to have (``MixedPrecisionPolicy``)."""
    distributed = setup.distributed
    if not distributed.fsdp_mixed_precision:
        return
    flag = "--fsdp-mixed-precision"
    if setup.precision is not Precision.BF16:
        raise ConfigError(f"{flag} computes in bfloat16: add --bf16, or leave it out.")
    if setup.loop is not Loop.PLAIN and not setup.is_sharded_at_load:
        raise ConfigError(
            f"{flag} is for a script's own FSDP2 and for models that transformers shards as it "
            f"loads them, and under --loop {setup.loop} accelerate's has a policy of its own, "
            "which reduces gradients in bfloat16: leave it out, or add --loop plain."
        )
    refuse_pairs(setup, flag, "policy")


def _check_ulysses(setup: TrainingRun) -> None:
    """Sequences that several GPUs share by DeepSpeed's Ulysses."""
    distributed = setup.distributed
    degree = distributed.sp
    if degree == 1:
        return
    if not distributed.zero and distributed.cp == 1:
        sharded = distributed.fsdp is not Fsdp.NONE
        remedy = f"--cp {degree}" if sharded else f"--zero 3 --sp {degree}"
        strategy = f"--fsdp {distributed.fsdp}" if sharded else "DDP"
        raise ConfigError(
            f"--sp {degree} is DeepSpeed's, and accelerate sets it up in DeepSpeed's engine alone, "
            f"not under {strategy}: write {remedy}, or add --zero 1, 2 or 3 in its place."
        )
    refuse_pairs(setup, "--sp", "sp")
    _check_length(
        setup,
        degree,
        f"--sp {degree}: DeepSpeed's loader cuts every sequence in {degree} equal parts",
    )


def _check_context_parallel(setup: TrainingRun) -> None:
    """Sequences that several GPUs share by ring attention.

    Head and tail of a sequence are dealt out in ``2 * cp`` equal pieces. torch 2.13 shares other
    lengths without that balance (``_create_default_load_balancer``), and lengths that ``cp`` does
    not divide not at all. Replicas are of what ``dp_shard`` and ``cp`` share
    (``ParallelismConfig``).
    """
    distributed = setup.distributed
    size, degree = distributed.fsdp_shard_size, distributed.cp
    if degree == 1:
        return
    if not distributed.zero and distributed.fsdp is Fsdp.NONE:
        raise ConfigError(
            f"--cp {degree} is priced under FSDP2, over whose mesh its GPUs share the parameters "
            "(dp_shard_cp): add --fsdp full_shard."
        )
    if size is not None and (size % degree or (size == degree and distributed.num_copies > 1)):
        shard_size = max(2, -(-size // degree)) * degree
        why = "is no multiple of it" if size % degree else "leaves nothing to dp_shard"
        raise ConfigError(
            f"--cp {degree} and --fsdp-shard-size {size}: that {why}, and accelerate refuses "
            "copies that are not sharded over --cp and more GPUs: write --fsdp-shard-size "
            f"{shard_size}, or leave it out."
        )
    refuse_pairs(setup, "--cp", "cp")
    pieces = 2 * degree
    _check_length(
        setup, pieces, f"--cp {degree}: head and tail are dealt out in {pieces} equal pieces"
    )


def _check_sequence_parallel(setup: TrainingRun) -> None:
    """Activations that the GPUs of ``--tp`` share along the sequence, in equal parts.

    ``parallelize_hf_transformers`` of torchtitan asserts that they are.
    """
    distributed = setup.distributed
    if not distributed.tp_sequence_parallel:
        return
    if setup.loop is not Loop.PLAIN:
        raise ConfigError(
            f"--tp-sequence-parallel is a script's: nothing under --loop {setup.loop} does it "
            "(enable_sequence_parallel of transformers' DistributedConfig is reserved and not "
            "wired up, accelerate has no such switch). Add --loop plain."
        )
    if setup.attn_implementation not in SDPA:
        raise ConfigError(
            "--tp-sequence-parallel is priced with --attn-implementation sdpa, and not with "
            f"{setup.attn_implementation}: eager attention would get a mask for a part of the "
            "tokens, and flash attention's own function was not compared. Write "
            "--attn-implementation sdpa."
        )
    refuse_pairs(setup, "--tp-sequence-parallel", "tp-sequence")
    _check_length(
        setup,
        distributed.tp,
        f"--tp {distributed.tp} along the sequence: torch's styles take equal parts",
    )


def _check_length(setup: TrainingRun, pieces: int, why: str) -> None:
    """A length that equal pieces do not make is refused, and the nearest are named."""
    length = setup.seq_len
    if length is None or length % pieces == 0:
        return
    shorter = length // pieces * pieces
    lengths = " or ".join(str(n) for n in (shorter, shorter + pieces) if n)
    raise ConfigError(
        f"--seq-len {length} cannot be shared by {why}, so lengths are multiples of {pieces}, such "
        f"as {lengths}."
    )
