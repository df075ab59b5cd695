"""``memest explain-growth``: how the memory of a run went, and what keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from memest.cli.console import Output
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import VERDICT_ALONE, argument, shows
from memest.cli.parameters import with_options
from memest.errors import ConfigError

__all__ = ["explain_growth"]


@with_options
@shows(quiet=VERDICT_ALONE)
def explain_growth(
    record: Annotated[
        Path,
        argument(
            "RECORD",
            "A file of torch.cuda.memory._dump_snapshot with some steps of history, or a log "
            "of memory: CSV, JSON lines, trainer_state.json, nvidia-smi, or what a training tool "
            "printed.",
        ),
    ],
    model: Annotated[
        str | None,
        argument(
            "MODEL",
            "What was trained, as for memest estimate, with the options of the run: what is "
            "expected stands beside what was read.",
        ),
    ] = None,
    *,
    options: dict[str, Any],
    output: Output,
) -> int:
    """Explain memory that grows over a run: what is kept, by which code, and what is no leak.

    Exit code 0: explained, 7: there is too little to tell by.
    For example: memest explain-growth run.pickle gpt2 --batch 8 --seq-len 1024 --fp16
    """
    from memest.report.growth import growth_headline
    from memest.search.explain_growth import explain_growth as explain
    from memest.search.growth_trend import FEWEST_POINTS

    for name in ("device_context", "calibration"):
        if options.pop(name, None) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no place here: what was read is laid beside tensors.")
    gpus = options.pop("gpu", None) or ()
    names = [gpus] if isinstance(gpus, str) else list(gpus)
    if len(names) > 1:
        raise ConfigError(f"--gpu names {len(names)} cards: the run was on one, name that.")
    with output.working() as progress:
        answer = explain(
            record, model, gpu=names[0] if names else None, progress=progress, **options
        )
    output.put(answer, lambda: [growth_headline(answer)])
    enough = sum(not point.evaluation for point in answer.points) >= FEWEST_POINTS
    return ExitCode.DONE if enough else ExitCode.CANNOT_SAY
