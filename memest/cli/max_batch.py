"""``memest max-batch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.console import Output
from memest.cli.flags import OUTPUT, ModelArgument, shows, switch, value_flag
from memest.cli.parameters import with_options

if TYPE_CHECKING:
    from memest.report.suggestions import Suggestions

__all__ = ["max_batch"]


@with_options
@shows(quiet="The largest that is safe alone, a line for each GPU; 0 where none is.")
def max_batch(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    output: Output,
    of: Annotated[
        str,
        value_flag(
            "--of",
            "SIZE",
            "What to look for: batch, seq-len or image-size. A length or a size is looked for at "
            "the batch given. Default: batch.",
            panel="Search",
        ),
    ] = "batch",
    effective_batch: Annotated[
        str | None,
        value_flag(
            "--effective-batch -n",
            "N",
            "Samples of one optimizer step. Say how many micro-steps of which micro-batch, on all "
            "GPUs, reach them.",
            panel="Search",
        ),
    ] = None,
    no_tips: Annotated[
        bool,
        switch(
            "--no-tips",
            "Leave out what would make a batch of 1 fit, which is looked for where it does not.",
            panel=OUTPUT,
        ),
    ] = False,
) -> int:
    """The largest batch (or sequence length) that fits a GPU. Memory over sizes besides.

    Exit code 0: one is safe, 3: the smallest is tight, or fits by releasing cache, 4: not even that
    fits, 7: cannot say, as by memest fits. Several GPUs: the worst of them.
    For example: memest max-batch bert-large-uncased --fp16 --gpu rtx-3090
    """
    from memest.cli.answering import exit_code, find_tips
    from memest.report.max_batch_result import SizeAxis
    from memest.search.max_batch import max_batch as search

    with output.working() as progress:
        answer = search(model, of=of, effective_batch=effective_batch, progress=progress, **options)

    def tips_of_smallest() -> Suggestions | None:
        smallest = {**options, answer.of.field: answer.smallest}
        effort = None if answer.setup.torch_compile else {"quick": True}
        return find_tips(str(model), smallest, output, answer.answers, effort)

    # nobody trains on a length of 1, so what would make that fit is no help
    lacks = not all(largest.safe for largest in answer.answers)
    has_tips = answer.of is SizeAxis.BATCH and lacks and not no_tips
    output.put(
        answer,
        lambda: (f"{largest.safe}" for largest in answer.answers),
        tips=tips_of_smallest if has_tips else None,
    )
    return exit_code(*(largest.verdict for largest in answer.answers))
