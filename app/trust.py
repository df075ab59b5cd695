"""How right memest was for questions of a kind: the figures, and what they are worth."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from memest.app.published import described, outcomes
from memest.app.question import ExplorerQuestion
from memest.errors import ConfigError
from memest.estimation.peak_ranges import RunKind, kind_of

__all__ = ["trust_words"]

_PUBLISHED = {
    RunKind.ONE_GPU: "one GPU",
    RunKind.ADAPTERS: "one GPU, of adapters",
    RunKind.SEVERAL_GPUS: "several GPUs",
}
"""Kinds of which runs were published, in words."""


def trust_words(question: ExplorerQuestion) -> str:
    """What published runs like the one asked about say of memest's accuracy."""
    try:
        return _words(kind_of(question.setup, 0, 0))
    except ConfigError:  # said by the answer
        return _words(RunKind.ONE_GPU)


def _kind_of_run(run: dict[str, Any]) -> RunKind:
    if run["num_gpus"] > 1:
        return RunKind.SEVERAL_GPUS
    return RunKind.ADAPTERS if run["adapters"] else RunKind.ONE_GPU


@functools.cache
def _words(kind: RunKind) -> str:
    runs = [run for run in outcomes() if run["scored"] and _kind_of_run(run) is kind]
    if not runs:
        return f"No published run of this kind ({kind.value}) is in this package."
    # a page asks as a description does: what a script and its releases do besides is assumed
    by_page = described()
    asked_so = [by_page[run["id"]] for run in runs if run["id"] in by_page]
    known = f"{_median([run['error'] for run in runs])} of {len(runs)} whose code is known"
    less = f"{_median(asked_so)} of {len(asked_so)}" if asked_so else "none"
    # every record of the package was looked into where it was missed: see docs/accuracy.md
    return (
        f"Published runs on {_PUBLISHED[kind]}: median error {known}, {less} asked by a "
        "description, as here; all looked at while memest was made."
    )


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}"
