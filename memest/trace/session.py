"""Traces of a model that was built once: what the torch-free floors call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memest.config.setup import Setup
from memest.events import Phase, Trace
from memest.profiles.transcript import Stack
from memest.trace.cuda.devices import cuda_is_meta
from memest.trace.evaluation import trace_evaluation
from memest.trace.generation import trace_generation
from memest.trace.inputs.batch import blaming_inputs, realise
from memest.trace.inputs.completions import completions_note
from memest.trace.inputs.pairs import PAIRS_NOTE
from memest.trace.inputs.run_batch import plan_run_batch
from memest.trace.isolation import (
    in_turn,
    keep_random_states,
    restore_model,
    seed_generators,
)
from memest.trace.losses.fused_loss import apply_fused_loss, apply_liger
from memest.trace.losses.objective import objective_of
from memest.trace.meta_model import MetaModel
from memest.trace.model.adapters import (
    add_adapter,
    base_of,
    copy_kept_dtypes,
)
from memest.trace.model.adjust import set_checkpointing, set_use_cache
from memest.trace.model.stacks import find_stacks, shallow
from memest.trace.parallel.context_parallel import sequence_split
from memest.trace.parallel.pipeline_stage import cut, trace_stage
from memest.trace.parallel.sequence_parallel import (
    loss_parallelism,
    uncounted_notes,
)
from memest.trace.parallel.tensor_parallel import (
    check_adapters,
    on_ranks,
    quiet_shapes,
    shard_model,
)
from memest.trace.parallel.ulysses import check_evaluates, shared_sequence
from memest.trace.parallel.ulysses_batches import collated_for
from memest.trace.training import TracePlan, plan_to_compose, trace_training
from memest.workspaces.operator_call import GpuTraits

__all__ = ["evaluate_built", "rank_model", "stacks_of", "trace_beginning", "trace_built"]


@in_turn
@keep_random_states
def trace_built(
    meta_model: MetaModel,
    setup: Setup,
    gpu: GpuTraits,
    plan: TracePlan | None = None,
    *,
    operators: str = "cuda",
    stacks: Sequence[Stack] = (),
    periods: Sequence[int] = (),
) -> Trace:
    """Trace the micro-steps of ``setup``, its sizes as they are taken.

    Args:
        meta_model: the model, built.
        setup: the run.
        gpu: whose kernels run.
        plan: how long; None for what any run is composed from, its updates apart.
        operators: whose operators, ``cuda`` or ``cpu``.
        stacks: of :func:`stacks_of`, those that have fewer periods of layers.
        periods: that they have.
    """
    _switch(meta_model, setup)
    plans = plan_run_batch(meta_model.plan, meta_model.model, setup)
    scored = setup.rollouts and setup.rollouts.scored_at_once
    if setup.distributed.stage is not None:
        with (
            rank_model(meta_model.model, setup) as sharded_model,
            restore_model(model := base_of(sharded_model)),
        ):
            trace = trace_stage(
                model,
                setup,
                part=setup.distributed.stage,
                make_batch=lambda: realise(plans),
                gpu=gpu,
                operators=operators,
                fewer_layers=shallow(model, stacks, periods),
            )
        trace.counts = meta_model.counts
        return trace
    with (
        blaming_inputs(meta_model.plan, plans, meta_model.model),
        shallow(meta_model.model, stacks, periods),
        rank_model(meta_model.model, setup) as model,
        restore_model(model),
        sequence_split(model, setup) as split,
        shared_sequence(base_of(model), setup) as ulysses_batches,
        _library_kernels(model, setup, gpu),
        objective_of(model, setup) as objective,
        _own_code_context(meta_model, _driver_of(gpu, setup, operators)),
    ):
        if objective is not None and scored:
            of_scored = plan_run_batch(
                meta_model.plan, meta_model.model, replace(setup, batch=scored)
            )
            objective = replace(objective, make_scored=lambda: realise(of_scored))
        trace = trace_training(
            model,
            setup,
            make_batch=lambda: realise(plans),
            loss_of=meta_model.loss_of,
            gpu=gpu,
            operators=operators,
            plan=plan or plan_to_compose(setup),
            loading=meta_model.loading,
            call=meta_model.call,
            own_step=meta_model.own_step,
            split=split,
            ulysses_batches=ulysses_batches,
            objective=objective,
        )
        if objective is not None:
            note = completions_note(setup) if setup.method.generates else PAIRS_NOTE
            trace.notes.append(note)
        if setup.distributed.tp_sequence_parallel:
            trace.notes.extend(uncounted_notes(model))
    trace.counts = meta_model.counts
    trace.notes.extend(n for n in getattr(meta_model.loss_of, "notes", ()) if n not in trace.notes)
    return trace


def _switch(meta_model: MetaModel, setup: Setup) -> None:
    """Switch caches and checkpointing of a model as a setup has them."""
    set_use_cache(meta_model.model, setup)
    if not meta_model.keeps_checkpointing:
        set_checkpointing(meta_model.model, setup)


@in_turn
def stacks_of(meta_model: MetaModel, setup: Setup) -> dict[Stack, int]:
    """The layers that repeat in what is traced for a setup; as :func:`find_stacks`."""
    _switch(meta_model, setup)
    if meta_model.own_step is not None and meta_model.own_step.optimizers is not None:
        return {}  # its optimizers update lists of all weights
    part = setup.distributed.stage
    if part is None:
        return find_stacks(meta_model.model)
    with cut(base_of(meta_model.model), part):
        return find_stacks(meta_model.model)


def trace_beginning(meta_model: MetaModel, setup: Setup, gpu: GpuTraits, **layers: Any) -> Trace:
    """Trace loading and the first forward alone; layers as :func:`trace_built` has them."""
    plan = replace(plan_to_compose(setup), ends_after=Phase.FORWARD)
    return trace_built(meta_model, setup, gpu, plan, **layers)


def _driver_of(gpu: GpuTraits, setup: Setup, operators: str) -> GpuTraits | None:
    """The GPU whose driver answers; None on the CPU, and where Dynamo would use what it finds."""
    return gpu if operators == "cuda" and not setup.torch_compile else None


@contextmanager
def _own_code_context(meta_model: MetaModel, gpu: GpuTraits | None) -> Iterator[None]:
    """What code may do by itself: name ``cuda``, ask its driver, draw random numbers."""
    seed_generators()
    with cuda_is_meta(gpu, enabled=meta_model.own_code):
        yield


@contextmanager
def rank_model(model: Any, setup: Setup) -> Iterator[Any]:
    """The model as a rank has it: a copy that is sharded where layers are shared."""
    distributed = setup.distributed
    if not distributed.shares_model:
        yield model
        return
    with on_ranks(distributed) as meshes, quiet_shapes(), loss_parallelism(distributed):
        twin = copy.deepcopy(model)
        if setup.adapter is None:
            shard_model(twin, meshes, distributed)
            copy_kept_dtypes(model, twin)
        else:
            # peft shards what it puts into a model that is sharded already
            twin = twin.unload()
            shard_model(twin, meshes, distributed)
            twin, _ = add_adapter(twin, setup.task, setup)
            check_adapters(twin, distributed.tp)
        yield twin


def _library_kernels(
    model: torch.nn.Module, setup: Setup, gpu: GpuTraits
) -> AbstractContextManager[None]:
    """Other people's kernels in place of the model's own operators."""
    if setup.fused_loss:
        return apply_fused_loss(model, gpu, setup.fused_loss)
    return apply_liger(model, gpu) if setup.use_liger_kernel else nullcontext()


@in_turn
@keep_random_states
def evaluate_built(
    meta_model: MetaModel,
    setup: Setup,
    gpu: GpuTraits,
    operators: str = "cuda",
    *,
    generates: bool = False,
    ranks: int | None = None,
) -> Trace:
    """Trace the first batches of an evaluation of ``setup``, whose batch is the evaluation's.

    Or, where it ``generates``, the first steps of its generation. Of several processes, ``ranks``
    gather what they predict.
    """
    set_use_cache(meta_model.model, setup)
    plans = plan_run_batch(meta_model.plan, meta_model.model, setup)
    with (
        rank_model(meta_model.model, setup) as model,
        restore_model(model),
        sequence_split(model, setup) as split,
        _library_kernels(model, setup, gpu),
        _own_code_context(meta_model, _driver_of(gpu, setup, operators)),
    ):
        if generates and setup.generation is not None:
            return trace_generation(
                model,
                setup,
                setup.generation,
                make_batch=lambda: realise(plans),
                gpu=gpu,
                operators=operators,
                loading=meta_model.loading,
            )
        check_evaluates(base_of(model), setup)
        return trace_evaluation(
            model,
            setup,
            make_batch=lambda: collated_for(realise(plans), setup),
            loss_of=meta_model.loss_of,
            gpu=gpu,
            operators=operators,
            loading=meta_model.loading,
            call=meta_model.call,
            ranks=ranks,
            split=split,
        )
