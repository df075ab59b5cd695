"""What of a setup does not go together with a model that is spread over GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memest.errors import ConfigError
from memest.optimizer_names import facts_of
from memest.parallel import Schedule

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_model_parallel"]


def check_model_parallel(setup: Setup) -> None:
    """What is not priced together with a model that is spread is refused.

    Raises:
        ConfigError: such a pair of options.
    """
    spread = setup.distributed
    if spread.pp == 1 and spread.tp == 1:
        return
    facts = facts_of(setup.optim)
    shards = spread.fsdp != "none"
    flag = "--pp" if spread.pp > 1 else "--tp"
    for there, what in (
        (spread.pp > 1 and spread.tp > 1, f"--tp {spread.tp}"),
        (spread.zero, "--zero"),
        # DistributedDataParallel takes no DTensors
        (
            spread.data_ranks > 1 and (spread.pp > 1 or not shards),
            f"data parallelism ({spread.data_ranks} copies of the model, without --fsdp)",
        ),
        (shards and spread.pp > 1, "--fsdp"),
        (
            shards and spread.tp > 1 and setup.loop != "plain",
            f"--fsdp under --loop {setup.loop}",
        ),
        (spread.fsdp_shard_size is not None, "--fsdp-shard-size"),
        (facts.by_module, f"--optim {setup.optim}, which asks which module owns a weight,"),
        (
            facts.block_states and spread.tp > 1,
            f"--optim {setup.optim}, whose states are bitsandbytes',",
        ),
        (
            setup.precision == "fp16" and spread.pp > 1,
            "--fp16, whose gradient scaler torch's schedules do not know,",
        ),
        # torch's _foreach_zero_ refuses sharded gradients beside whole ones
        (setup.zero_grad == "zero" and spread.tp > 1, "--zero-grad zero"),
        (setup.adapter is not None, "an adapter"),
        (setup.quantization is not None, "a quantised base"),
        (setup.eval_batch is not None, "--eval-batch"),
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
    ):
        if there:
            raise ConfigError(
                f"{what.rstrip(',')} is not priced together with {flag} yet, and memest does not "
                "guess: leave one of them out."
            )
