"""A real training step on the CPU and the traced one, side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from memest.calibration.running.cpu_memory import CpuRun, mark, measure
from memest.calibration.running.loops import train
from memest.calibration.running.material import host_batches
from memest.trace.inputs.batch import realise
from memest.trace.losses.loss import loss_for
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder
from memest.trace.training import trace_training
from support.cases import GPU, Twin, twin
from support.real_memory import differences, run_of_trace

STEPS = 2
RNG_STATE = 5056  # bytes of torch.get_rng_state(), which checkpointing keeps on the host


class Marks:
    """Phases as marks in the profiler's stream."""

    def mark(self, phase, step, micro_step):
        mark(f"{phase} {step} {micro_step}")

    def step_done(self, step):
        pass


def run_both(
    model: str, setup: dict[str, Any], around: Callable[[Twin], Any] = nullcontext
) -> tuple[CpuRun, CpuRun, int]:
    """The measured run, the traced one, and how much host memory may differ.

    Args:
        model: a name of ``CONFIGS``.
        setup: options of :func:`twin`.
        around: gives what is entered around both runs.
    """
    twins = twin(model, **setup)
    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def make(module):
        return make_optimizer(module, setup, Recorder(), (2, 13))

    with around(twins):
        real = measure(
            lambda: train(
                twins.real, setup, batches, make, loss_for(twins.built_model), torch.device("cpu"),
                Marks(),
            )
        )  # fmt: skip
        trace = trace_training(
            twins.built_model.trained_model, setup, make_batch=lambda: realise(twins.plans),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu",
            loading=twins.built_model.loading,
        )  # fmt: skip
    # step counters, Python numbers as tensors; random states where layers are recomputed
    host = 8 * len(list(twins.real.parameters())) + 1024
    if setup.checkpointing != "none":
        host += RNG_STATE * 2 * 4
    return real, run_of_trace(trace), host


def check_step(
    model: str,
    setup: dict[str, Any],
    *,
    small: bool = False,
    around: Callable[[Twin], Any] = nullcontext,
) -> None:
    """A step allocates what a real one does: at every boundary, in every phase, at its peak.

    Args:
        model: a name of ``CONFIGS``.
        setup: options of :func:`twin`.
        small: next to what trains, what stays on the host is not small.
        around: gives what is entered around both runs.
    """
    real, trace, host = run_both(model, setup, around)

    assert abs(trace.peak - real.peak) <= max(0.0025 * real.peak, host * small)
    measured = {phase.name: phase for phase in real.phases}
    names = [phase.name for phase in trace.phases]
    assert names == [name for name in measured if name in names]
    assert len(names) > 5
    for phase in trace.phases:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + 0.005 * real.peak, f"peak in {phase.name}"


def check_order(
    model: str, setup: dict[str, Any], *, count: int = 100, at_least: int = 4096
) -> None:
    """Every allocation of a step is that of a real one, and comes in the same order.

    Args:
        model: a name of ``CONFIGS``.
        setup: options of :func:`twin`.
        count: how many allocations there are more than.
        at_least: bytes of those that are compared.
    """
    real, trace, _ = run_both(model, setup)

    assert len(trace.allocations(at_least=at_least)) > count
    assert differences(real, trace, at_least=at_least) == []
