"""``memest compare``."""

from __future__ import annotations

from typing import Annotated, Any

from memest.cli.answering import check_sizes
from memest.cli.console import Output
from memest.cli.flags import argument, shows, value_flag
from memest.cli.parameters import with_options
from memest.readers.run_config import RunConfig

__all__ = ["compare"]


@with_options
@shows(quiet="One sentence a column.")
def compare(
    models: Annotated[
        list[str],
        argument(
            "MODEL...",
            "One model to compare with itself under other options (--vs), or several models "
            "to compare under the same ones, or several configurations; references as for "
            "`memest estimate`.",
        ),
    ],
    *,
    options: dict[str, Any],
    output: Output,
    runs: tuple[RunConfig, ...] = (),
    vs: Annotated[
        list[str] | None,
        value_flag(
            "--vs",
            "CHANGES",
            "What differs: fp16, checkpointing=full, 'grad-accum=4 batch=2'. Repeatable; each one "
            "is a column.",
            panel="Comparison",
        ),
    ] = None,
) -> int:
    """Runs side by side: peaks, rows, what each change buys, and why.

    For example: memest compare bert-large-uncased --batch 4 --vs fp16 --vs 'batch=1 grad-accum=4'
    """
    check_sizes(options)
    from memest.report.tables import change_sentence
    from memest.search.compare import compare as set_side_by_side

    with output.working() as progress:
        answer = set_side_by_side(
            list(runs or models), list(vs or ()), progress=progress, **options
        )
    first, *others = answer.scenarios
    output.put(answer, lambda: (change_sentence(scenario, first) for scenario in others))
    return 0
