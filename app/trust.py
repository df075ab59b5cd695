"""How right memest was for questions of a kind: the figure, and what it is worth."""

from __future__ import annotations

import functools
import statistics

from memest.app.published import outcomes
from memest.app.question import ExplorerQuestion

__all__ = ["trust_words"]


def trust_words(question: ExplorerQuestion) -> str:
    """What published runs like the one asked about say of memest's accuracy."""
    return _words(*_kind_of(question))


def _kind_of(question: ExplorerQuestion) -> tuple[bool, bool]:
    """Whether several GPUs train, and whether adapters alone do."""
    return int(dict(question.options).get("num_gpus", 1)) > 1, question.method != "Full"


@functools.cache
def _words(several: bool, adapters: bool) -> str:
    runs = [
        run
        for run in outcomes()
        if run["scored"]
        and (run["num_gpus"] > 1) == several
        and (several or run["adapters"] == adapters)
    ]
    kind = "several GPUs" if several else ("one GPU, of adapters" if adapters else "one GPU")
    if not runs:
        return f"No published run on {kind} is in this package."
    error = statistics.median(abs(run["error"]) for run in runs)
    # every record of the package was looked into where it was missed: see docs/accuracy.md
    return (
        f"Median error {error:.2%} over {len(runs)} published runs on {kind}, "
        "all looked at while memest was made."
    )
