"""``memest stages``."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import check_sizes, silenced
from memest.cli.console import Output, write_out
from memest.cli.parameters import DebugFlag, JsonFlag, NoColorFlag, with_options

__all__ = ["stages"]


@with_options
def stages(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model; references as for `memest estimate`.",
            show_default=False,
        ),
    ],
    *,
    options: dict[str, Any],
    gpus_per_node: Annotated[
        Optional[int],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option(
            "--gpus-per-node",
            metavar="N",
            help="GPUs of one machine, for hybrid sharding and DeepSpeed's host figures; left out, "
            "all.",
            rich_help_panel="Stages",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", metavar="", help="No progress.", rich_help_panel="Output"),
    ] = False,
    no_color: NoColorFlag = False,
    debug: DebugFlag = False,
) -> int:
    """What each stage buys: one GPU, DDP, ZeRO-1 to 3 and FSDP2 with their offloads, side by side.

    For example: memest stages meta-llama/Llama-3.1-8B --num-gpus 8 --bf16 --checkpointing
    """
    check_sizes(options)
    from memest.report.tables import render_stages
    from memest.search.stages import stages as set_side_by_side

    output = Output(color=not no_color, ascii_only=True, quiet=quiet or json)
    with silenced(debug=debug), output.progress() as progress:
        table = set_side_by_side(model, gpus_per_node=gpus_per_node, progress=progress, **options)
    write_out(f"{table.to_json()}\n" if json else render_stages(table))
    return 0
