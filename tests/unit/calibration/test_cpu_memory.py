"""What a measurement on the CPU counts, and what it leaves out."""

from __future__ import annotations

import torch

from memest.calibration.running.cpu_memory import mark, measure

NUMBERS = 192
NBYTES = NUMBERS * 4
TENSORS = 100


def _step(kept, *, gives_back):
    mark("first")
    kept.extend(torch.empty(NUMBERS) for _ in range(TENSORS))
    mark("second")
    if gives_back:
        kept.clear()
    mark("end")


def test_what_lives_at_a_mark_is_counted_and_what_is_given_back_is_not():
    run = measure(lambda: _step([], gives_back=True))

    alive = [(phase.name, phase.alive) for phase in run.phases]
    assert alive == [("first", 0), ("second", TENSORS * NBYTES)]
    assert sum(event.nbytes for event in run.events) == 0


def test_a_release_of_what_was_there_before_is_not_counted_with_the_size_of_another():
    """PyTorch remembers addresses of a measurement whose tensors were freed after it."""
    kept: list[torch.Tensor] = []
    measure(lambda: _step(kept, gives_back=False))
    remembered = {tensor.data_ptr() for tensor in kept}
    kept.clear()
    before = [torch.empty(NUMBERS) for _ in range(2 * TENSORS)]
    assert remembered & {tensor.data_ptr() for tensor in before}

    run = measure(lambda: _step(before, gives_back=True))

    assert sum(event.nbytes for event in run.events) == 0
