"""The run that a question is about: its steps, steps of other lengths, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence

from memest.epochs import varied
from memest.found import Found
from memest.generated import generated
from memest.hidden.call import GpuTraits
from memest.setup import Setup
from memest.tracing import Tracer

__all__ = ["whole_run"]


def whole_run(
    tracer: Tracer, asked: Setup, gpu: GpuTraits, vary: Sequence[str] = (), *, once: bool = False
) -> Found:
    """The answer of a tracer with everything around its steps that the setup names.

    Whatever is asked (an estimate, a sweep, a largest batch) is asked of this run.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        gpu: whose kernels run.
        vary: sizes that further questions will change.
        once: no further question will have these sizes.

    Raises:
        MemestError: as for :func:`memest.estimate`.
    """
    found = tracer.find_once(asked, gpu) if once else tracer.find(asked, gpu, vary)
    return generated(tracer, varied(tracer, asked, found, gpu), gpu)
