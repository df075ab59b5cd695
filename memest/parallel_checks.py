"""What of a setup does not go together with a model that is spread over GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.optimizer_names import facts_of
from memest.parallel import Schedule
from memest.refusals import refuse_beside

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_model_parallel"]


def check_model_parallel(setup: Setup) -> None:
    """What is not priced together with a model that is spread is refused.

    Raises:
        ConfigError: such a pair of options.
    """
    spread = setup.distributed
    if spread.pp == 1 and not spread.shares_model:
        return
    if spread.pp > 1:
        _check_stages(setup)
    if spread.tp > 1 and spread.pp == 1 and spread.strategy is Strategy.DDP:
        # ParallelismConfig.__post_init__ of accelerate 1.15, and its prepare_model
        raise ConfigError(
            f"{spread.data_ranks} copies of a model that --tp {spread.tp} shards are refused by "
            "accelerate and the Trainer (dp_replicate_size beside tp_size, without dp_shard_size), "
            f"and DDP takes no sharded weights: write --num-gpus {spread.tp}, or add --fsdp "
            "full_shard --loop plain, which shards them over the copies."
        )
    facts = facts_of(setup.optim)
    shards = spread.fsdp != "none"
    flag = "--pp" if spread.pp > 1 else "--tp" if spread.tp > 1 else "--ep"
    pairs = (
        # what was gathered for a backward is given back before weights have their gradients
        (
            spread.pp > 1
            and spread.fsdp == "full_shard"
            and spread.pipeline_schedule.splits_backward,
            f"--fsdp full_shard with --pp-schedule {spread.pipeline_schedule}",
        ),
        # graphs of stages outlive the gradients of their weights there
        (
            spread.pp > 1 and spread.tp > 1 and spread.pipeline_schedule.splits_backward,
            f"--pp-schedule {spread.pipeline_schedule} with --tp {spread.tp}",
        ),
        (spread.zero, "--zero"),
        (
            spread.data_ranks > 1 and spread.tp > 1 and not shards,
            f"data parallelism ({spread.data_ranks} copies of the model, without --fsdp)",
        ),
        (shards and spread.pp > 1 and spread.fsdp_offload, "--fsdp-offload"),
        (
            shards and spread.shares_model and spread.pp == 1 and setup.loop != "plain",
            f"--fsdp under --loop {setup.loop}",
        ),
        (spread.fsdp_shard_size is not None, "--fsdp-shard-size"),
        (
            spread.pp > 1 and bool(spread.ddp_find_unused_parameters),
            "--ddp-find-unused-parameters",
        ),
        (shards and spread.ep > 1 and spread.fsdp != "full_shard", f"--fsdp {spread.fsdp}"),
        (spread.shares_model and spread.fsdp_version == 1, "--fsdp-version 1"),
        (spread.ep > 1 and bool(spread.fsdp_wrap), "--fsdp-wrap"),
        (spread.ep > 1 and spread.fsdp_offload, "--fsdp-offload"),
        (spread.ep > 1 and spread.pp > 1, f"--ep {spread.ep}"),
        (facts.by_module, f"--optim {setup.optim}, which asks which module owns a weight"),
        (
            facts.block_states and spread.shares_model,
            f"--optim {setup.optim}, whose states are bitsandbytes'",
        ),
        (
            setup.precision == "fp16" and spread.pp > 1,
            "--fp16, whose gradient scaler torch's schedules do not know",
        ),
        # torch's _foreach_zero_ refuses sharded gradients beside whole ones
        (setup.zero_grad == "zero" and spread.shares_model, "--zero-grad zero"),
        (
            setup.adapter is not None and setup.adapter.method != "lora",
            "an adapter other than LoRA",
        ),
        (setup.adapter is not None and spread.ep > 1, "an adapter"),
        (setup.quantization is not None, "a quantised base"),
        (setup.eval_batch is not None and spread.ep > 1, f"--eval-batch with --ep {spread.ep}"),
        (setup.steps_in_backward, f"an optimizer that steps in backward (--optim {setup.optim})"),
        (setup.use_liger_kernel, "--use-liger-kernel"),
        (setup.padded and spread.pp > 1, "--padded"),
        # the micro-batch that casts the weights is not the one that has the first gradients
        (
            spread.pp > 1
            and setup.precision == "bf16"
            and spread.pipeline_schedule is Schedule.LOOPED_BFS,
            "--bf16 with --pp-schedule looped-bfs",
        ),
    )
    refuse_beside(flag, pairs)


def _check_stages(setup: Setup) -> None:
    """What torch's pipeline stages do not do.

    Raises:
        ConfigError: such a wrapper, with the reason.
    """
    spread = setup.distributed
    schedule = spread.pipeline_schedule
    if spread.strategy is Strategy.FSDP and spread.fsdp_version == 1:
        raise ConfigError(
            f"--fsdp-version 1 and --pp {spread.pp} exclude each other: torch's PipelineStage "
            "reduces the gradients of fully_shard's modules and of DDP, and knows no other. Use "
            "--fsdp-version 2."
        )
    if spread.strategy is Strategy.DDP and schedule.splits_backward:
        raise ConfigError(
            f"--pp-schedule {schedule} with {spread.data_ranks} copies of the pipeline under DDP "
            "does not train: gradients of weights that are computed apart (stage_backward_weight) "
            "come without the hooks by which DDP reduces them. Use --pp-schedule 1f1b or "
            "interleaved, or add --fsdp shard_grad_op."
        )
