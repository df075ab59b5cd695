"""Which mode a script's model trains in: ``from_pretrained`` leaves it in eval mode."""

from __future__ import annotations

from collections.abc import Iterator

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.found import Found
from memest.readers.scripts.lightning import Extra
from memest.readers.scripts.things import Call, Unknown
from memest.readers.values import Bounded, Saving

__all__ = ["left_in_eval"]


def left_in_eval(found: Found, module: Call | None, *, recomputes: bool) -> Iterator[Extra]:
    """What stays switched off where nobody calls ``train()``: neither Lightning does nor a loop.

    Args:
        found: the script.
        module: Lightning's, which holds the model; None in a loop of the script's own.
        recomputes: checkpointing is switched on.
    """
    load = found.load
    if load is None or load.name != "from_pretrained" or _trains(found, load, module):
        return
    who = "the loop" if module is None else "Lightning"
    words = f"from_pretrained leaves a model in eval mode, and {who} does not call train()"
    if recomputes:
        why = f"{words}: nothing is recomputed; call train() of the model"
        yield Extra(load.line, "checkpointing", why)
    why = f"{words}: priced are masks of dropout"
    yield Extra(load.line, "dropout", Bounded(why) if module is None else Saving(why))


def _trains(found: Found, load: Call, module: Call | None) -> bool:
    """Whether the model is in training mode when it trains."""
    roots = [each for each in (load, module or found.wrapper) if each is not None]
    calls = [
        call
        for call in found.named("train", "eval")
        if root_of(call.receiver) in roots
        or (module is None and isinstance(root_of(call.receiver), Unknown))
    ]
    modes = found.early(tuple(calls))
    if module is None:
        # a loop that evaluates between its epochs comes back to training
        return any(call.name == "train" for call in modes)
    if not modes or modes[-1].name != "train" or modes[-1].conditional:
        return False
    flag = modes[-1].argument(0, "mode")
    return flag is None or flag.data is True
