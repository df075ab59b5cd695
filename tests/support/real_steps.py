"""A real training step on the CPU and the traced one, side by side."""

from __future__ import annotations

import torch

from memest.calibration.running.cpu_memory import CpuRun, mark, measure
from memest.calibration.running.loops import train
from memest.calibration.running.material import host_batches
from memest.trace.inputs.batch import realise
from memest.trace.losses.loss import loss_for
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder
from memest.trace.training import trace_training
from support.cases import GPU, twin
from support.real_memory import traced

STEPS = 2
RNG_STATE = 5056  # bytes of torch.get_rng_state(), which checkpointing keeps on the host


class Marks:
    """Phases as marks in the profiler's stream."""

    def mark(self, phase, step, micro_step):
        mark(f"{phase} {step} {micro_step}")

    def step_done(self, step):
        pass


def run_both(model, setup) -> tuple[CpuRun, CpuRun, int]:
    """The measured run, the traced one, and how much host memory may differ."""
    twins = twin(model, **setup)
    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def make(module):
        return make_optimizer(module, setup, Recorder(), (2, 13))

    real = measure(
        lambda: train(
            twins.real, setup, batches, make, loss_for(twins.built), torch.device("cpu"), Marks()
        )
    )
    trace = trace_training(
        twins.built.trained,
        setup,
        make_batch=lambda: realise(twins.plans),
        loss_of=loss_for(twins.built),
        gpu=GPU,
        operators="cpu",
        loading=twins.built.loading,
    )
    # step counters, Python numbers as tensors; random states where layers are recomputed
    host = 8 * len(list(twins.real.parameters())) + 1024
    if setup.checkpointing != "none":
        host += RNG_STATE * 2 * 4
    return real, traced(trace), host
