"""``memest stages``."""

from __future__ import annotations

from typing import Annotated, Any

from memest.cli.answering import check_sizes
from memest.cli.console import Output
from memest.cli.flags import argument, shows, switch, value_flag
from memest.cli.parameters import with_options

__all__ = ["stages"]


@with_options
@shows(quiet="A line a row: its GPU, its verdict, its node.")
def stages(
    model: Annotated[
        str,
        argument("MODEL", "A model; references as for `memest estimate`."),
    ],
    *,
    options: dict[str, Any],
    output: Output,
    gpus_per_node: Annotated[
        int | None,
        value_flag(
            "--gpus-per-node",
            "N",
            "GPUs of one machine; left out, all. For hybrid sharding and DeepSpeed's host figures.",
            panel="Stages",
        ),
    ] = None,
    deepspeed_estimator: Annotated[
        bool,
        switch(
            "--deepspeed-estimator",
            "Add what DeepSpeed's own estimator says of ZeRO-2 and 3, and why it differs.",
            panel="Stages",
        ),
    ] = False,
) -> int:
    """What DDP, ZeRO-1 to 3 and FSDP2 buy, side by side. Offloads are rows of their own.

    For example: memest stages meta-llama/Llama-3.1-8B --num-gpus 8 --bf16 --checkpointing
    """
    check_sizes(options)
    from memest.report.tables import stage_lines
    from memest.search.stages import stages as set_side_by_side

    with output.working() as progress:
        table = set_side_by_side(model, gpus_per_node=gpus_per_node, progress=progress, **options)
    output.put(table, lambda: stage_lines(table), deepspeed=deepspeed_estimator)
    return 0
