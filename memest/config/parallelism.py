"""How a training run is spread over GPUs: the part of a setup that several processes add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memest.config.kinds import (
    Fsdp,
    Prefetch,
    Rotate,
    Schedule,
    Strategy,
    Task,
    choose,
    read_fsdp,
    read_rotate,
    read_schedule,
    read_split,
)
from memest.config.option import changed_flags, plain_values, settle
from memest.config.parallel_options import ParallelOptions, StagePart
from memest.errors import ConfigError

__all__ = [
    "ONE_GPU",
    "Distributed",
    "Fsdp",
    "Prefetch",
    "Rotate",
    "Schedule",
    "StagePart",
    "Strategy",
    "check_heads",
    "check_stages_task",
    "no_plan",
]

_TRACE_FIELDS = (
    "stage",
    "in_half",
    "adapters_in_full",
    "gathers_head",
    "scores_completions",
    "zero_auto",
)
"""What nobody asks for: it says which part of a run is traced, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed(ParallelOptions):
    """Several GPUs, one process each, in a way that a run can have."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "pp_schedule", read_schedule(self.pp_schedule))
        set_field(self, "cp_rotate", read_rotate(self.cp_rotate))
        set_field(self, "pp_split", read_split(self.pp_split))
        set_field(self, "fsdp", read_fsdp(self.fsdp))
        set_field(self, "fsdp_wrap", tuple(self.fsdp_wrap))
        if isinstance(self.zero_settings, Mapping):
            set_field(self, "zero_settings", tuple(sorted(self.zero_settings.items())))
        set_field(self, "zero_settings", tuple((str(k), v) for k, v in self.zero_settings))
        settle(self)
        if self.fsdp_backward_prefetch is not None:
            mode = choose("--fsdp-backward-prefetch", self.fsdp_backward_prefetch, Prefetch)
            set_field(self, "fsdp_backward_prefetch", mode)
        cap = self.ddp_bucket_cap_mb
        if cap is not None and not 0 < cap < math.inf:
            raise ConfigError(f"--ddp-bucket-cap-mb {cap:g} is out of range: it must be above 0.")
        if self.nccl_memory is not None and self.nccl_memory < 0:
            raise ConfigError(f"--nccl-memory {self.nccl_memory} must not be negative.")
        _check_shape(self)
        if self.ep > 1:
            _check_experts(self)
        _check_meaning(self)
        if self.pp > 1:
            _check_pipeline(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in the order of the fields."""
        values = plain_values(self) | {"zero_settings": dict(self.zero_settings)}
        return {name: value for name, value in values.items() if name not in _TRACE_FIELDS}


def _check_shape(run: ParallelOptions) -> None:
    """Whether the GPUs can be laid out so."""
    ranks = run.tp * run.sequence_ranks * run.pp
    if run.num_gpus % ranks:
        num_gpus = max(run.num_gpus // ranks, 1) * ranks
        degrees = {"--tp": run.tp, "--cp": run.cp, "--sp": run.sp, "--pp": run.pp}
        flags = [f"{flag} {degree}" for flag, degree in degrees.items() if degree > 1]
        raise ConfigError(
            f"{' '.join(flags)} needs {ranks} GPUs, or a multiple of them, and --num-gpus is "
            f"{run.num_gpus}: write --num-gpus {num_gpus}."
        )
    size, sharing = run.fsdp_shard_size, run.num_gpus // run.tp
    if size is not None and sharing % size:
        what = f"the {run.num_gpus} GPUs of --num-gpus"
        if run.tp > 1:
            what += f" over --tp {run.tp}, which are {sharing}"
        raise ConfigError(
            f"--fsdp-shard-size {size} does not divide {what}: every copy of the model has as many."
        )


def _check_experts(run: ParallelOptions) -> None:
    """Whether the experts can be shared so.

    Source: ``DistributedConfig._validate_mesh_config`` of transformers 5.23, and its
    ``_resolve_parallel_plans``, which wants a plan of every kind of sharding that is asked for:
    experts are shared beside sharded layers, not alone.
    """
    sharded = run.fsdp is not Fsdp.NONE
    if run.tp == 1 and not sharded:
        raise ConfigError(
            f"--ep {run.ep} shares the experts of layers that are sharded too, as transformers "
            f"has it: add --tp {run.ep} (all GPUs see one batch) or --fsdp full_shard "
            "--loop plain (each has its own)."
        )
    if run.ep % run.tp:
        raise ConfigError(
            f"--ep {run.ep} and --tp {run.tp} do not go together: transformers wants a multiple "
            f"of --tp. Write --ep {max(run.ep // run.tp, 1) * run.tp}."
        )
    if run.ep != run.tp and not sharded:
        raise ConfigError(
            f"--ep {run.ep} and --tp {run.tp} do not go together without FSDP: the other "
            f"{run.ep // run.tp} groups have batches of their own. Write --ep {run.tp}, or add "
            "--fsdp full_shard --loop plain."
        )
    if run.num_gpus % run.ep:
        num_gpus = max(run.num_gpus // run.ep, 1) * run.ep
        raise ConfigError(
            f"--ep {run.ep} needs {run.ep} GPUs, or a multiple of them, and --num-gpus is "
            f"{run.num_gpus}: write --num-gpus {num_gpus}."
        )


def _check_meaning(run: ParallelOptions) -> None:
    """What belongs to one way of spreading a run has no meaning under another."""
    if run.zero and run.fsdp is not Fsdp.NONE:
        raise ConfigError(
            f"--zero {run.zero} and --fsdp {run.fsdp} exclude each other: DeepSpeed and FSDP "
            "both shard the model. Drop one of them."
        )
    if run.fsdp is Fsdp.NO_SHARD and run.fsdp_version == 2:
        raise ConfigError(
            "--fsdp no_shard is FSDP1's: add --fsdp-version 1. fully_shard always shards; "
            "whole copies are DDP, which is what --num-gpus alone means."
        )
    shards, flags = run.fsdp is not Fsdp.NONE, changed_flags(run)
    for applies, requirement, names in (
        (run.tp > 1, "--tp: add --tp 2 or more", "tp_sequence_parallel"),
        (
            run.tp_sequence_parallel,
            "--tp-sequence-parallel: transformers' plan gathers the logits",
            "tp_loss_parallel",
        ),
        (run.cp > 1, "--cp: add --cp 2 or more", "cp_rotate"),
        (
            run.pp > 1,
            "a pipeline: add --pp 2 or more",
            "pp_schedule pp_microbatches pp_stages_per_gpu pp_split pp_return_outputs",
        ),
        (run.zero, "--zero 1, 2 or 3", "offload_optimizer"),
        (run.zero == 3, "--zero 3", "offload_param"),
        (run.zero, "a stage in the file, or --zero", "zero_settings"),
        (shards, "--fsdp full_shard", "fsdp_offload fsdp_wrap fsdp_version fsdp_mixed_precision"),
        (shards, "--fsdp full_shard", "fsdp_cpu_ram_efficient_loading"),
        (
            run.fsdp_version == 1,
            "--fsdp-version 1",
            "fsdp_backward_prefetch fsdp_use_orig_params",
        ),
        (
            shards and run.fsdp_version == 2,
            "--fsdp full_shard of --fsdp-version 2",
            "fsdp_shard_size fsdp_wrap_ends",
        ),
    ):
        for name in names.split():
            if name in flags and not applies:
                raise ConfigError(f"{flags[name]} has no meaning without {requirement}.")
    reason = {
        Strategy.NONE: "one GPU has no DDP: add --num-gpus",
        Strategy.FSDP: f"--fsdp {run.fsdp} takes the place of DDP",
        Strategy.ZERO: f"--zero {run.zero} takes the place of DDP",
    }.get(run.strategy)
    for name, flag in flags.items():
        if name.startswith("ddp_") and reason:
            raise ConfigError(f"{flag} has no effect here: {reason}.")
    if run.nccl_memory is not None and run.num_gpus == 1:
        raise ConfigError("--nccl-memory has no effect on one GPU: add --num-gpus.")


def _check_pipeline(run: ParallelOptions) -> None:
    """Whether torch's schedule takes so many stages and micro-batches."""
    schedule, stages, micro = run.pipeline_schedule, run.stages_per_gpu, run.microbatches
    if not schedule.several_stages and stages != 1:
        raise ConfigError(
            f"--pp-schedule {schedule} has one stage on each GPU, not {stages}: take interleaved "
            "or looped-bfs."
        )
    if schedule is Schedule.ONE_F_ONE_B and micro < run.pp:
        raise ConfigError(
            f"--pp-microbatches {micro} is too few for 1f1b, which takes at least as many as there "
            f"are stages: {run.pp}."
        )
    rounds = max(1, micro // run.pp)
    if schedule is Schedule.INTERLEAVED and micro % rounds:
        raise ConfigError(
            f"--pp-microbatches {micro} is refused by {schedule}: with {run.pp} GPUs it goes in "
            f"{rounds} rounds, and that must divide it, as {micro // rounds * rounds} does."
        )
    if run.pp_split and len(run.pp_split) != run.pp * stages:
        raise ConfigError(
            f"--pp-split names {len(run.pp_split)} stages, and there are {run.pp * stages}: "
            f"{run.pp} GPUs with {stages} each."
        )


ONE_GPU = Distributed()
"""One GPU, one process."""


def check_heads(named: Callable[[str], Any], ranks: int) -> None:
    """The heads of a model must go by the GPUs that share its layers.

    Args:
        named: what its configuration has under a name; None where it has none.
        ranks: ``--tp``.

    Raises:
        ConfigError: they do not.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = named(name)
        if isinstance(count, int) and count % ranks:
            legal = [n for n in range(1, count + 1) if count % n == 0]
            raise ConfigError(
                f"--tp {ranks} does not divide the {count} heads of this model ({name}). Legal: "
                f"{', '.join(map(str, legal))}."
            )


def no_plan(name: str) -> ConfigError:
    """What is raised where ``--tp`` is to shard a model that has no plan.

    Args:
        name: of the model, or of its class.
    """
    return ConfigError(
        f"--tp cannot shard {name}: transformers has no plan for it (base_model_tp_plan of its "
        "configuration), as it has for decoders such as llama, mistral, qwen3, gemma3, mixtral or "
        "gpt_neox. Leave --tp out; --fsdp full_shard shards any model."
    )


def check_stages_task(task: Task) -> None:
    """Stages are those of a causal language model.

    Raises:
        ConfigError: the task is another one.
    """
    if task is not Task.CAUSAL_LM:
        raise ConfigError(
            f"--pp is priced for language models alone, and --task is {task}: stages pass on "
            "hidden states, and the last one has the labels of the next words."
        )
