"""Evaluations that a loop of a script's own runs between its epochs: none of them goes unsaid.

A step holds logits and their gradients at once, an evaluation without gradients the logits alone:
up to twice as many samples take no more than the step, which is what is priced. Everything beyond
that is named, and leaves the verdict open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.loop_body import is_forward, keeps_tensors
from memest.readers.scripts.things import Call, Unknown
from memest.readers.values import PREDICTIONS

__all__ = ["read_validation"]

_TIMES = 2
"""Samples without gradients that take no more than one with them."""
_EVALUATES = re.compile(r"_*(evaluat|eval_|eval$|valid|run_(eval|valid)|test)")
_GATHERS = ("gather", "gather_for_metrics", "reduce")
_SAME_NUMBERS = (*_GATHERS, "repeat", "detach", "cpu", "float", "mean", "unsqueeze", "view", "item")
_LOSSES = re.compile(r"(?i)(^|[._])loss(es)?(\b|_)[^,]*$")
"""Ends of expressions that are losses: ``outputs.loss``, ``val_loss.detach()``."""
_KEPT = ("append", "extend", "cat", "concat", "stack")


def read_validation(document: CallDocument, found: Found, loaders: Iterable[Call]) -> None:
    """Name what evaluations take beyond a step.

    Args:
        document: holds the batch that trains, where that can be told.
        found: the script.
        loaders: those that make no batches to train with.
    """
    batch = document.get("batch")
    forwards = _forwards(found)
    by_loader = {id(call.loaders[-1]): call for call in reversed(forwards) if call.loaders}
    for loader in loaders:
        value = loader.argument(1, "batch_size")
        size = 1 if value is None and "batch_sampler" not in loader.keywords else None
        size = value.data if value is not None and isinstance(value.data, int) else size
        if size is None and id(loader) in by_loader:
            why = "samples at once besides the training, as many as cannot be told"
            document.miss(loader.line, "batch_size", why)
        elif size is not None and isinstance(batch, int) and size > _TIMES * batch:
            document.miss(loader.line, "batch_size", f"{size} samples at once besides the training")
        elif size is not None and id(loader) in by_loader and isinstance(batch, int):
            why = f"{size} samples without gradients take no more than a step of {batch}"
            document.ignore(by_loader[id(loader)].line, "evaluation", why)
    document.miss_each(_besides(found, forwards))
    for call in found.named("gather_for_metrics"):
        if call.arguments and _is_loss(call.arguments[0].data):
            continue
        document.miss(call.line, call.name, "what an evaluation gathers from all GPUs and keeps")
        return


def _forwards(found: Found) -> list[Call]:
    """Forwards of the model in loops that have no backward."""
    training = [call.loops for call in found.calls if call.name == "backward" and call.loops]
    return [
        call
        for call in found.calls
        if call.loops
        and training
        and is_forward(call, found)
        and not any(loops[: len(call.loops)] == call.loops for loops in training)
        and not any(call.loops[: len(loops)] == loops for loops in training)
    ]


def _besides(found: Found, forwards: Sequence[Call]) -> Iterator[tuple[int, str, str]]:
    loops = {call.loops for call in forwards}
    for call in forwards:
        if not call.loaders:
            why = "an evaluation whose batches cannot be told: priced without"
            yield call.line, "evaluation", why
        if not call.without_grad:
            why = "its graphs are kept, as nothing switches gradients off: priced without"
            yield call.line, "evaluation", why
    for call in found.calls:
        inside = any(call.loops[: len(each)] == each for each in loops)
        kept = [value.data for value in call.arguments]
        if inside and call.name in _KEPT and keeps_tensors(call) and not all(map(_is_loss, kept)):
            yield call.line, PREDICTIONS, "of all batches of an evaluation are kept: priced without"
        elif _is_elsewhere(call, found):
            yield call.line, call.path, "an evaluation that is not read: priced without"


def _is_loss(data: Any) -> bool:
    """Whether it is a loss, a few numbers a batch, gathered or repeated as it may be."""
    while isinstance(data, Call) and data.name in _SAME_NUMBERS:
        gathers = data.name in _GATHERS and bool(data.arguments)
        data = data.arguments[0].data if gathers else data.receiver
    return isinstance(data, Unknown) and bool(_LOSSES.search(data.why))


def _is_elsewhere(call: Call, found: Found) -> bool:
    """Whether a function of another file is given the model or a loader, to evaluate with it."""
    if call.receiver is not None or not _EVALUATES.match(call.name):
        return False
    roots = [root_of(value.data) for value in (*call.arguments, *call.keywords.values())]
    models = (root_of(found.model), found.load)
    return any(
        isinstance(root, Call) and (root in models or root.name == "DataLoader")
        for root in roots
        if not isinstance(root, Unknown)
    )
