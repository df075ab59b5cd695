"""What memest says about a run that was measured, before any correction."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memest.calibration.device import LATEST_TORCH, Device, software_of
from memest.calibration.measurement import CPU, Environment, Measurement, release_of
from memest.catalog.cuda_context import context_estimate
from memest.catalog.resolve import ModelSource, resolve_model
from memest.config.setup import Loop, Setup
from memest.errors import ConfigError, MemestError, TraceError
from memest.estimation.breakdown import alive_at_peak, breakdown
from memest.estimation.profiler import Profiler
from memest.estimation.run_facts import RunFacts, run_facts
from memest.estimation.whole_run import resolve_run
from memest.events import ALLOC, CATEGORY_ORDER, FREE, Category, Trace
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.workspaces.operator_call import GpuTraits

__all__ = ["Pair", "Prediction", "pair", "predict"]

Progress = Callable[[str], None]

_TRACERS = 4
"""Models whose traces are kept in memory: campaigns ask for one after the other."""
_ONE_BY_ONE = ("adamw_torch", "sgd", "adagrad", "rmsprop")
"""Optimizers that the Trainer makes without saying how they go over parameters."""
_MICRO_STEPS = 16
"""Most micro-steps of a CPU trace; batches that are fetched ahead make them differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The uncalibrated estimate of a measured run.

    Attributes:
        allocated_bytes: peak; on a CPU without any rounding, for nothing is rounded there.
        reserved_bytes: peak; None on a CPU.
        parts: rows of the breakdown, bytes by category; they sum to ``allocated_bytes``.
        kernels: distinct operators, see :func:`memest.estimation.run_facts.count_kernels`.
        context_low_bytes: the least that the table expects for context and kernels; 0 on a CPU.
        context_expected_bytes: what it expects.
        context_high_bytes: the most.
        slack_bytes: how much larger a library-chosen workspace may be.
        family: ``model_type``, else the class of the model.
        sm_count: of the GPU, None on a CPU.
        facts: what kind of run it is.
        oom: out of memory in a replay under the cap of the case; None without a cap.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    parts: Mapping[str, int]
    kernels: int
    context_low_bytes: int = 0
    context_expected_bytes: int = 0
    context_high_bytes: int = 0
    slack_bytes: int = 0
    family: str = ""
    sm_count: int | None = None
    facts: RunFacts
    oom: bool | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A measurement and what was predicted for it.

    Attributes:
        measurement: what was measured.
        prediction: None where there is none.
        failure: why there is none, a sentence.
    """

    measurement: Measurement
    prediction: Prediction | None
    failure: str = ""


def pair(measurement: Measurement, progress: Progress | None = None) -> Pair:
    """Lay the prediction beside a measurement; where it fails, the reason.

    Args:
        measurement: of a case.
        progress: called with one line for each longer thing done.
    """
    try:
        return Pair(measurement, predict(measurement, progress))
    except MemestError as error:
        return Pair(measurement, None, str(error))


def predict(measurement: Measurement, progress: Progress | None = None) -> Prediction:
    """Predict a measured run, for its GPU and with its software.

    Args:
        measurement: names case and environment.
        progress: called with one line for each longer thing done.

    Raises:
        MemestError: there is no prediction; the message says why.
    """
    case, environment = measurement.case, measurement.environment
    if environment is None:
        raise ConfigError("the run was gone before it could say where it ran")
    if case.processes > 1:
        raise ConfigError(f"{case.processes} processes with {case.parallel}: not modelled yet")
    software = software_of(environment.torch, environment.transformers, environment.cuda)
    setup = replace(measurement.setup, software=software)
    gpu = _traits(environment)
    # what changes the table of context and kernels is part of the question too
    key = case.model, setup, gpu, environment.gpu, environment.total_bytes, case.cap_bytes
    prediction = _predictions.get(key)
    if prediction is None:
        try:
            if environment.gpu == CPU:
                prediction = _on_cpu(case.model, setup, gpu, progress)
            else:
                prediction = _on_gpu(case.model, setup, gpu, environment, case.cap_bytes, progress)
        except MemestError:
            raise
        except (Exception, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise TraceError(
                f"{case.model} cannot be predicted ({type(error).__name__}: {reason})"
            ) from error
        _predictions[key] = prediction
    return prediction


_predictions: dict[Any, Prediction] = {}


@functools.lru_cache(_TRACERS)
def _profiler(model: str) -> Profiler:
    return Profiler.of(model)


def _traits(environment: Environment) -> GpuTraits:
    torch = release_of(environment.torch) or LATEST_TORCH
    if environment.gpu == CPU:
        # no operator of a CPU asks for these
        return GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048, torch=torch)
    return _device(environment).traits(torch)


def _device(environment: Environment) -> Device:
    return Device(
        name=environment.gpu,
        total_bytes=environment.total_bytes,
        capability=environment.capability,
        sm_count=environment.sm_count,
        max_threads_per_sm=environment.max_threads_per_sm,
    )


def _family(source: ModelSource, class_name: str) -> str:
    return str((source.config or {}).get("model_type") or class_name)


# -- GPUs -----------------------------------------------------------------------------------------


def _on_gpu(
    model: str,
    setup: Setup,
    gpu: GpuTraits,
    environment: Environment,
    cap: int | None,
    progress: Progress | None,
) -> Prediction:
    profiler = _profiler(model)
    profiler.progress = progress
    run = resolve_run(profiler, setup, gpu)
    conf = parse_alloc_conf(run.setup.alloc_conf)
    stream = run.stream
    result = profiler.replays(conf).of(stream)
    rows = breakdown(stream, result, alive_at_peak(stream, result))
    facts = run_facts(run.setup, run.program.trace, run.weights, run.card)
    context = context_estimate(_device(environment).spec, gpu.torch, setup.software.cuda)
    oom = None
    if cap is not None:
        capped_replay = replay(stream.events, stream.sizes, conf, limit_bytes=cap)
        oom = bool(capped_replay.num_ooms)
    return Prediction(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=result.peak_reserved_bytes,
        parts={row.category.value: row.bytes for row in rows},
        kernels=facts.kernels,
        context_low_bytes=context.low_bytes,
        context_expected_bytes=context.expected_bytes,
        context_high_bytes=context.high_bytes,
        slack_bytes=stream.workspace_slack_bytes,
        family=run.family,
        sm_count=gpu.sm_count,
        facts=facts,
        oom=oom,
    )


# -- CPUs -----------------------------------------------------------------------------------------


def _on_cpu(model: str, setup: Setup, gpu: GpuTraits, progress: Progress | None) -> Prediction:
    """A trace with the operators that a CPU runs; what is alive is summed up as it is.

    Nothing rounds or caches allocations there, and what libraries like oneDNN take on their own
    they take from the system, so neither replay nor workspaces come in.
    """
    source = resolve_model(model)
    if setup.loop is Loop.TRAINER and setup.optimizer in _ONE_BY_ONE:
        # foreach is what torch takes on CUDA; on a CPU it goes one parameter after the other
        setup = replace(setup, optim=f"{setup.optimizer}_loop")
    if progress is not None:
        progress(f"tracing training steps of {model} as a CPU runs them")
    setup, trace, card = _cpu_trace(source, setup, gpu)
    peak, parts = live_bytes(trace)
    facts = run_facts(setup, trace, trace.weights, card)
    return Prediction(
        allocated_bytes=peak,
        reserved_bytes=None,
        parts={category.value: parts[category] for category in CATEGORY_ORDER if parts[category]},
        kernels=facts.kernels,
        family=_family(source, card.class_name),
        facts=facts,
    )


def _cpu_trace(source: ModelSource, setup: Setup, gpu: GpuTraits) -> tuple[Setup, Trace, Any]:
    from memest.trace.meta_model import build
    from memest.trace.session import trace_built
    from memest.trace.training import TracePlan

    meta_model = build(setup, source, None, None, None)
    setup = replace(
        setup,
        **meta_model.answer(setup).batch_sizes,
        task=meta_model.card.task,
        attn_implementation=meta_model.card.attention,
    )
    plan = TracePlan(steps=min(setup.num_steps, 2), micro_steps=min(setup.grad_accum, _MICRO_STEPS))
    trace = trace_built(meta_model, setup, gpu, plan, operators="cpu")
    return setup, trace, meta_model.card


def live_bytes(trace: Trace) -> tuple[int, Counter[Category]]:
    """The highest sum of what is alive, and what it consists of when first reached."""
    alive, peak = 0, 0
    now: Counter[Category] = Counter()
    then: Counter[Category] = Counter()
    for kind, index in trace.decode():
        if kind not in (ALLOC, FREE):
            continue
        size = trace.sizes[index] if kind == ALLOC else -trace.sizes[index]
        alive += size
        now[trace.category(index)] += size
        if alive > peak:
            peak = alive
            then = Counter(now)
    return peak, then
