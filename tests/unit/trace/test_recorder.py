"""Births and deaths of storages, whoever makes them."""

from __future__ import annotations

import pytest
import torch

from memest.events import ALLOC, FREE
from memest.trace.recorder import Recorder


def _stream(function):
    recorder = Recorder()
    with recorder:
        kept = function()
        trace = recorder.trace
        events = [
            trace.sizes[index] * (1 if kind == ALLOC else -1)
            for kind, index in trace.decode()
            if kind in (ALLOC, FREE)
        ]
    recorder.forget()
    return events, kept


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(10, device="meta"),
        lambda: torch.ones(10).to("meta"),
        lambda: torch.nn.Parameter(torch.empty(10, device="meta")),
        lambda: torch.empty(10, device="meta")[2:5],
        lambda: torch.empty(2, 5, device="meta").t(),
        lambda: torch.empty(0, device="meta").resize_(10),
        lambda: torch.empty(10, device="meta").add_(1),
        lambda: torch.linspace(0, 1, 10, device="meta"),
    ],
)
def test_one_storage_is_one_birth(make):
    events, _ = _stream(make)
    assert events == [40]


def test_a_storage_lives_as_long_as_its_last_view():
    def views():
        base = torch.empty(10, device="meta")
        view = base[2:4]
        del base
        torch.empty(1, device="meta")
        del view

    assert _stream(views)[0] == [40, 4, -4, -40]


def test_growing_takes_new_memory_before_it_gives_back_the_old():
    events, _ = _stream(lambda: torch.empty(10, device="meta").resize_(20))
    assert events == [40, 80, -40]


def test_shrinking_gives_nothing_back():
    assert _stream(lambda: torch.empty(10, device="meta").resize_(5))[0] == [40]


def test_tensors_of_other_devices_do_not_count():
    assert _stream(lambda: (torch.empty(10), torch.empty(3, device="meta")))[0] == [12]


def test_what_autograd_saves_lives_until_backward_passes():
    def step():
        x = torch.empty(10, device="meta", requires_grad=True)
        y = x.exp()
        loss = y.sum()
        del y
        torch.empty(1, device="meta")
        loss.backward()
        return x

    events, _ = _stream(step)
    # exp's result outlives its name; its gradient becomes x.grad
    assert events[:3] == [40, 40, 4]
    assert events.index(-40) > events.index(-4)
    assert sum(events) == 80


def test_every_operator_is_noted_or_named():
    """A trace that a rule is missing for can be told from one that needs none."""
    with Recorder() as recorder:
        x = torch.empty(4, 4, device="meta")
        (x.t() + 1).tanh_().mm(x).sum()
        (x.t() + 2).tanh_()

    assert [call.op for call in recorder.trace.calls] == ["aten.mm.default", "aten.sum.default"]
    assert recorder.trace.unnoted_ops == [
        "aten.empty.memory_format", "aten.t.default", "aten.add.Tensor", "aten.tanh_.default"
    ]  # fmt: skip


def test_forgotten_storages_die_unseen():
    recorder = Recorder()
    with recorder:
        kept = torch.empty(10, device="meta")
    recorder.forget()
    del kept
    assert len(recorder.trace.events) == 1
