"""``memest advise``."""

from __future__ import annotations

from typing import Annotated, Any

from memest.cli.answering import check_sizes, exit_code
from memest.cli.console import Output
from memest.cli.flags import VERDICT_ALONE, ModelArgument, shows, switch, value_flag
from memest.cli.parameters import with_options
from memest.errors import ConfigError

__all__ = ["advise"]


@with_options
@shows(quiet=VERDICT_ALONE)
def advise(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    output: Output,
    effective_batch: Annotated[
        str | None,
        value_flag(
            "--effective-batch -n",
            "N",
            "Samples of one optimizer step. That is micro-batch times accumulation, on all GPUs.",
            panel="Plan",
        ),
    ] = None,
    any_precision: Annotated[
        bool,
        switch(
            "--any-precision",
            "Use bf16 or fp16 wherever it is faster. Autocast, if the GPU has it; otherwise a "
            "precision that is named is kept unless nothing surely fits with it, and where none "
            "is, fp32 and bf16 are tried (fp16 on a GPU without bf16).",
            panel="Plan",
        ),
    ] = False,
) -> int:
    """Ways to train with an effective batch on a GPU, the fastest first.

    Exit code 0: a plan fits, 3: the best one is tight, 4: nothing fits, 7: cannot say.
    For example: memest advise bert-large-uncased --gpu rtx-3090 --effective-batch 64
    """
    if effective_batch is None:
        raise ConfigError(
            "memest advise needs the samples of one optimizer step: add for example "
            "--effective-batch 64."
        )
    check_sizes(options)
    from memest.report.tables import advice_sentence
    from memest.search.advise import advise as plan

    with output.working() as progress:
        answer = plan(
            model,
            effective_batch=effective_batch,
            any_precision=any_precision,
            progress=progress,
            **options,
        )
    output.put(answer, lambda: [advice_sentence(answer)])
    return exit_code(answer.verdict)
