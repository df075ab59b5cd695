"""One model, built once, traced for any batch: what the torch-free floors call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.errors import ConfigError
from memest.events import Trace
from memest.hidden.call import GpuTraits
from memest.models.resolve import ModelSource
from memest.result import ModelFacts
from memest.setup import Setup, Task
from memest.trace.build import BuiltModel, build_model, count
from memest.trace.inputs import TensorPlan, plan_batch, realise
from memest.trace.legacy import attention_of, masks_as_before, model_as_before
from memest.trace.losses import loss_for
from memest.trace.switches import set_checkpointing, set_use_cache
from memest.trace.tasks import task_of_class
from memest.trace.ties import separate_head
from memest.trace.training import trace_training

__all__ = ["BuiltRun", "build", "trace_built"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """A model on meta, what it is fed, and what was decided."""

    model: torch.nn.Module
    plan: Callable[[Setup], tuple[TensorPlan, ...]]
    loss_of: Callable[[Any, Any], torch.Tensor]
    facts: ModelFacts
    resolved: Setup
    assumptions: tuple[str, ...]


def build(
    setup: Setup, source: ModelSource | None, module: Any, inputs: Any, loss: Any
) -> BuiltRun:
    """Build the model (or copy a live one to meta) and plan its batch."""
    if module is not None:
        return _from_module(setup, module, inputs, loss)
    assert source is not None
    model_type = str((source.config or {}).get("model_type", ""))
    setup = replace(setup, attn_implementation=attention_of(model_type, setup))
    built = build_model(source, setup)
    model_as_before(built.model, model_type, setup)
    untied = separate_head(built.model, source.config or {})
    built = replace(built, notes=(*built.notes, *untied))
    if inputs is not None:
        return _run(setup, built, source, _given(inputs), loss or loss_for(built), ())
    _, sizes, notes = plan_batch(built, setup)
    resolved = replace(
        setup,
        seq_len=sizes.seq_len if sizes.seq_len is not None else setup.seq_len,
        target_len=sizes.target_len if sizes.target_len is not None else setup.target_len,
        image_size=sizes.image_size if sizes.image_size is not None else setup.image_size,
        audio_seconds=(
            sizes.audio_seconds if sizes.audio_seconds is not None else setup.audio_seconds
        ),
    )

    def plan(for_setup: Setup) -> tuple[TensorPlan, ...]:
        return plan_batch(built, for_setup)[0]

    return _run(resolved, built, source, plan, loss or loss_for(built), tuple(notes))


def _run(
    setup: Setup, built: BuiltModel, source: ModelSource | None, plan: Any, loss_of: Any,
    notes: tuple[str, ...],
) -> BuiltRun:  # fmt: skip
    counts = count(built.model)
    kind = type(built.model).__name__
    facts = ModelFacts(
        id=source.id if source is not None else kind,
        class_name=kind,
        parameters=counts.parameters,
        trainable_parameters=counts.trainable,
        buffers=counts.buffers,
        parameter_bytes=counts.parameter_bytes,
        source=source.provenance if source is not None else "live module",
        task=built.task.value,
    )
    said = [
        f"{kind} with {str(built.dtype).removeprefix('torch.')} weights",
        f"attention: {built.attention}",
        *notes,
        *built.notes,
    ]
    if source is not None:
        said += source.notes
    return BuiltRun(
        model=built.model,
        plan=plan,
        loss_of=loss_of,
        facts=facts,
        resolved=replace(setup, task=built.task),
        assumptions=tuple(said),
    )


def trace_built(run: BuiltRun, setup: Setup, gpu: GpuTraits) -> Trace:
    """Trace the steps of ``setup``."""
    set_use_cache(run.model, setup)
    set_checkpointing(run.model, setup)
    config = getattr(run.model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    attention = str(getattr(config, "_attn_implementation", ""))
    plans = masks_as_before(run.plan(setup), model_type, attention, setup)
    return trace_training(
        run.model, setup, make_batch=lambda: realise(plans), loss_of=run.loss_of, gpu=gpu,
        model_type=model_type,
    )  # fmt: skip


# -- live modules ---------------------------------------------------------------------------------


def _from_module(setup: Setup, module: Any, inputs: Any, loss: Any) -> BuiltRun:
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"The model is a {type(module).__name__}: give a name, a path, package.module:factory, "
            "or a torch.nn.Module."
        )
    twin = _twin(module)
    twin.train()
    config = getattr(twin, "config", None)
    dtype = next((p.dtype for p in twin.parameters()), torch.float32)
    built = BuiltModel(
        model=twin, config=config, task=setup.task, dtype=dtype,
        attention=str(getattr(config, "_attn_implementation", "as the model's code does")),
        notes=(),
    )  # fmt: skip
    if inputs is not None:
        plan, batch = _given(inputs), _batch_of(inputs)
        if setup.batch != Setup().batch and setup.batch != batch:
            raise ConfigError(
                f"The example inputs have batch {batch}, the setup says {setup.batch}. Give inputs "
                "of the batch you ask about."
            )
        resolved = replace(setup, batch=batch or setup.batch)
        return _run(resolved, built, None, plan, loss or loss_for(built), ())
    if config is None:
        raise ConfigError(
            "A torch.nn.Module needs example inputs: memest.estimate(model, inputs={...}, "
            "loss=lambda outputs, batch: ...)."
        )
    if setup.task is Task.AUTO:
        both = bool(getattr(config, "is_encoder_decoder", False))
        built = replace(built, task=task_of_class(type(twin), encoder_decoder=both))
    _, sizes, notes = plan_batch(built, setup)
    resolved = replace(
        setup,
        seq_len=sizes.seq_len or setup.seq_len,
        image_size=sizes.image_size or setup.image_size,
        task=built.task,
    )
    return _run(
        resolved, built, None, lambda s: plan_batch(built, s)[0], loss or loss_for(built),
        tuple(notes),
    )  # fmt: skip


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """A structural copy on meta: no weight is copied, the original stays untouched."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _given(inputs: Any) -> Callable[[Setup], tuple[TensorPlan, ...]]:
    """Plans from example tensors: integer and bool values on the CPU are known to the trace."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs must be a mapping of argument names to tensors, not {type(inputs).__name__}."
        )
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"inputs[{name!r}] is a {type(value).__name__}, not a tensor.")
    own = _batch_of(inputs)

    def plan(setup: Setup) -> tuple[TensorPlan, ...]:
        return tuple(_like(name, value, own, setup.batch) for name, value in inputs.items())

    return plan


def _like(name: str, value: torch.Tensor, own: int, batch: int) -> TensorPlan:
    """The plan of one example tensor with another batch: a leading extent of it is the batch."""
    shape = tuple(value.shape)
    if shape and shape[0] == own:
        shape = (batch, *shape[1:])
    known = None
    if not value.is_floating_point() and value.device.type == "cpu":
        rows = torch.arange(shape[0]) % value.shape[0] if shape else None
        known = value.clone if rows is None else (lambda: value[rows])
    return TensorPlan(name=name, shape=shape, dtype=value.dtype, value=known)


def _batch_of(inputs: Mapping[str, torch.Tensor]) -> int:
    return next((int(v.shape[0]) for v in inputs.values() if v.dim()), 1)
