"""A model on the meta device with what it is fed: built once, traced for any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.catalog.resolve import ModelSource
from memest.config.inputs import ModuleInputs, check_own_parts
from memest.config.quantization import own_quantization
from memest.config.setup import Attention, Precision, Setup
from memest.errors import ConfigError
from memest.profiles.model_card import ModelCard
from memest.profiles.sizing import SizeAnswer
from memest.trace.inputs.batch import PlannedBatch, TensorPlan
from memest.trace.inputs.example import ExampleBatch
from memest.trace.isolation import (
    in_turn,
    keep_random_states,
    own_code,
)
from memest.trace.legacy.models import model_as_before
from memest.trace.legacy.transformers import (
    attention_of,
    classes_as_before,
)
from memest.trace.losses.loss import OwnLoss, loss_for, resolve_loss
from memest.trace.model.adapters import (
    add_adapter,
    base_of,
    cast_parameters,
)
from memest.trace.model.adjust import separate_head
from memest.trace.model.build import (
    BuiltModel,
    build_model,
    cast_weights,
    count,
    freeze,
    from_factory,
    of_module,
    put_into_training,
)
from memest.trace.model.factories import container
from memest.trace.model.libraries import IMAGE_SIDE, build_library_model
from memest.trace.model.noise import add_noise
from memest.trace.model.packed import pack
from memest.trace.model.put_off import put_off
from memest.trace.model.quantization import Loading, quantize
from memest.trace.model.twins import twin_of
from memest.trace.model.value_head import add_value_head
from memest.trace.own_steps import OWN_SETUP, OwnStep, check_own_step, resolve_step

__all__ = ["MetaModel", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model on meta, what it is fed, and what was decided."""

    model: torch.nn.Module
    plan: Callable[[Setup], tuple[TensorPlan, ...]]
    answer: Callable[[Setup], SizeAnswer]
    """The sizes that the batch of a setup has, and what there is to say of them."""
    loss_of: Callable[[Any, Any], torch.Tensor]
    card: ModelCard
    counts: tuple[int, int, int, int]
    """Numbers of parameters, of those that train, of elements of buffers; bytes of parameters."""
    keeps_checkpointing: bool = False
    """A live module whose checkpointing is on already: left as its owner set it up."""
    loading: Loading | None = None
    """How the weights come to the device; None = they are copied there as they are."""
    call: Callable[[Any, Any], Any] | None = None
    """How the model is called with a batch; None = ``model(**batch)``."""
    own_step: OwnStep | None = None
    """A step of the user's; one that makes its optimizers does everything itself."""
    own_code: bool = False
    """Whether code runs that no library of the trace's knows: it may name devices itself."""


@in_turn
@keep_random_states
def build(
    setup: Setup,
    source: ModelSource | None,
    module: Any,
    inputs: Any,
    loss: Any,
    *,
    step_fn: Any = None,
    dims: tuple[tuple[str, int], ...] = (),
    model_args: tuple[tuple[str, Any], ...] = (),
) -> MetaModel:
    """Build the model (or copy a live one to meta) and plan its batch.

    Args:
        setup: the run.
        source: where the model comes from; None for a live module.
        module: a live module, or several by name; None otherwise.
        inputs: as for :func:`memest.estimate`, and what follows.
        loss: takes the loss out of outputs.
        step_fn: in place of forward and loss.
        dims: what letters of specifications are.
        model_args: arguments of a factory.

    Raises:
        MemestError: a model that cannot be built, or not trained like this.
    """
    module_inputs = ModuleInputs(
        inputs=inputs, loss=loss, step_fn=step_fn, dims=dims, model_args=model_args
    )
    if source is None:
        return _from_module(setup, module, module_inputs)
    if source.kind == "factory":
        return _from_factory(setup, source, module_inputs)
    if source.kind == "library":
        return _from_library(setup, source, module_inputs)
    model_type = str((source.config or {}).get("model_type", ""))
    setup = replace(setup, attn_implementation=attention_of(model_type, setup))
    quantization, own_notes = own_quantization(source.config or {}, setup.quantization)
    setup = replace(setup, quantization=quantization)
    ready = bool(own_notes) and quantization is not None
    with put_off(), classes_as_before(model_type, setup):
        built_model = build_model(source, setup)
    model_as_before(built_model.model, model_type, setup)
    head_notes = separate_head(built_model.model, source.config or {})
    built_model = replace(built_model, notes=(*built_model.notes, *head_notes, *own_notes))
    return _run_with_batch(setup, _adapt_model(built_model, setup, ready=ready), module_inputs)


def _from_module(setup: Setup, module: Any, module_inputs: ModuleInputs) -> MetaModel:
    module = container(module)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"The model is a {type(module).__name__}: give a name, a path, package.module:factory, "
            "a torch.nn.Module, or a dict of several for a step of your own."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "The model is a TorchScript module, which cannot be traced: give the torch.nn.Module "
            "that it was made from."
        )
    if module_inputs.model_args:
        raise ConfigError(
            f"--model-arg {module_inputs.model_args[0][0]}: the {type(module).__name__} is built "
            "already: "
            "arguments are for package.module:factory."
        )
    _check_attention(module, setup)
    twin, loading = twin_of(module)
    base = base_of(twin)
    base_model = of_module(base, setup, loading=loading)
    built_model = replace(base_model, wrapper=None if base is twin else twin)
    put_into_training(twin)
    if setup.adapter is not None and base is not twin:
        raise ConfigError(
            "The model has adapters already: leave --peft and its options out, or give the model "
            "without them."
        )
    if module_inputs.inputs is None and built_model.config is None:
        raise ConfigError(
            f"A torch.nn.Module needs example inputs, and {type(module).__name__} has no "
            "transformers config to make them from: memest.estimate(model, "
            "inputs={'x': torch.empty(8, 3)}) or inputs='x:float32[B,3]', with loss='mse' or "
            "loss=lambda outputs, batch: ..."
        )
    return _keep_checkpointing(
        _run_with_batch(setup, _adapt_model(built_model, setup), module_inputs)
    )


def _keep_checkpointing(meta_model: MetaModel) -> MetaModel:
    """Leave activation checkpointing that is on already as it is, and say so."""
    on = any(
        getattr(m, "gradient_checkpointing", False) is True for m in meta_model.model.modules()
    )
    if not on or meta_model.card.checkpointing != "none":
        return meta_model
    note = "activation checkpointing as the model has it on already"
    card = replace(meta_model.card, checkpointing="full", remarks=(*meta_model.card.remarks, note))
    return replace(meta_model, card=card, keeps_checkpointing=True)


def _from_factory(setup: Setup, source: ModelSource, module_inputs: ModuleInputs) -> MetaModel:
    """The run of a model that the user's own code builds."""
    built_model = from_factory(source, setup, dict(module_inputs.model_args))
    _check_attention(built_model.model, setup)
    built_model = _adapt_model(built_model, setup)
    if module_inputs.loss is None and module_inputs.step_fn is None:
        module_inputs = replace(module_inputs, loss=built_model.loss)
        check_own_parts(setup, module_inputs)
    if module_inputs.inputs is None and built_model.inputs is not None:
        module_inputs = replace(module_inputs, inputs=built_model.inputs)
    return _run_with_batch(setup, built_model, module_inputs)


def _from_library(setup: Setup, source: ModelSource, module_inputs: ModuleInputs) -> MetaModel:
    """The run of a model that timm or torchvision builds by its name."""
    arguments = {**dict(source.arguments), **dict(module_inputs.model_args)}
    library_model = build_library_model(source, setup, arguments)
    built_model = library_model.built
    _check_attention(built_model.model, setup)
    built_model = _adapt_model(built_model, setup)
    own_loss = module_inputs.loss is not None or module_inputs.step_fn is not None
    image_side = None
    if module_inputs.inputs is None:
        module_inputs = replace(module_inputs, inputs=built_model.inputs)
        image_side = IMAGE_SIDE, library_model.image_size
    if own_loss:
        return _run_with_batch(setup, built_model, module_inputs, image_side)
    module_inputs = replace(module_inputs, loss=built_model.loss)
    meta_model = _run_with_batch(setup, built_model, module_inputs, image_side)
    return replace(meta_model, own_code=own_code(built_model.model))


def _check_attention(model: torch.nn.Module, setup: Setup) -> None:
    """A model that is there has its attention already.

    Raises:
        ConfigError: another one is asked for.
    """
    requested_attention = setup.attn_implementation
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if requested_attention is Attention.AUTO or requested_attention == own:
        return
    has = f"this one has {own}" if own else "this one chooses none by that name"
    raise ConfigError(
        f"--attn-implementation {requested_attention} is for models that memest builds, and {has}: "
        f"build it with attn_implementation={requested_attention.value!r} and ask again."
    )


def _run_with_batch(
    setup: Setup,
    built_model: BuiltModel,
    module_inputs: ModuleInputs,
    image_side: tuple[str, int] | None = None,
) -> MetaModel:
    """A run of a model with the batch that the user gave, else with what its config says.

    Args:
        setup: the run.
        built_model: the model.
        module_inputs: what it is fed.
        image_side: as of :class:`ExampleBatch`.
    """
    has_inputs = module_inputs.inputs is not None
    if module_inputs.dims and not has_inputs:
        raise ConfigError(
            f"--dim {module_inputs.dims[0][0]}: no --input has it: name the inputs too."
        )
    batch: ExampleBatch | PlannedBatch = PlannedBatch(built_model)
    if has_inputs:
        batch = ExampleBatch(module_inputs, image_side=image_side)
    # what cannot be taken or read is said before anything else is done
    sizes = batch.answer(setup).batch_sizes
    if has_inputs:
        batch.plan(replace(setup, **sizes))
    if module_inputs.step_fn is not None:
        step = resolve_step(module_inputs.step_fn, batch.unflatten)
        meta_model = _run_by_step(setup, built_model, batch, step)
    else:
        call, unused_inputs = batch.caller(built_model.trained_model)
        loss = None if module_inputs.loss is None else resolve_loss(module_inputs.loss)
        default_loss = loss_for(built_model)
        of_batch = has_inputs or loss is not None
        loss_of = (
            OwnLoss(loss, batch.unflatten, unused_inputs, default_loss)
            if of_batch
            else default_loss
        )
        meta_model = replace(_run(setup, built_model, batch, loss_of), call=call)
    has_own_code = (
        own_code(built_model.model)
        or module_inputs.step_fn is not None
        or module_inputs.loss is not None
    )
    return replace(meta_model, own_code=has_own_code)


def _run_by_step(
    setup: Setup, built_model: BuiltModel, batch: ExampleBatch | PlannedBatch, step: OwnStep
) -> MetaModel:
    """A run by a step of the user's own."""
    check_own_step(setup, step)
    note = f"a step is {step.name}(model, batch), which returns the loss"
    if setup.precision is not Precision.FP32:
        note += "; autocast covers all of it"
    if step.optimizers is not None:
        note = f"a step is {step.name}(models, batch, optimizers), which does everything itself"

    def answer(for_setup: Setup) -> SizeAnswer:
        size_answer = batch.answer(for_setup)
        if step.optimizers is None:
            return size_answer
        check_own_step(for_setup, step)
        return SizeAnswer({**size_answer.batch_sizes, **OWN_SETUP}, size_answer.notes)

    built_model = replace(built_model, notes=(*built_model.notes, note))
    meta_model = _run(setup, built_model, batch, step.loss_of)
    return replace(meta_model, answer=answer, call=step.call, own_step=step)


def _run(
    setup: Setup,
    built_model: BuiltModel,
    batch: ExampleBatch | PlannedBatch,
    loss_of: Callable[[Any, Any], torch.Tensor],
) -> MetaModel:
    counts = count(built_model.trained_model)
    kind = type(built_model.model).__name__
    card = ModelCard(
        class_name=kind,
        task=built_model.task,
        attention=setup.attn_implementation,
        checkpointing=setup.checkpointing,
        batch=batch.batch,
        about=(
            f"{kind} with {str(built_model.dtype).removeprefix('torch.')} weights",
            f"attention: {built_model.attention}",
        ),
        remarks=built_model.notes,
    )
    return MetaModel(
        model=built_model.trained_model,
        plan=batch.plan,
        answer=batch.answer,
        loss_of=loss_of,
        card=card,
        counts=(counts.parameters, counts.trainable, counts.buffers, counts.parameter_bytes),
        loading=built_model.loading,
    )


def _adapt_model(built_model: BuiltModel, setup: Setup, *, ready: bool = False) -> BuiltModel:
    """The model quantised, with adapters and frozen parameters, as the setup has them."""
    if setup.quantization is not None:
        if setup.quantization.format.packed:
            loading, quantization_notes = pack(built_model.model, built_model.dtype, setup)
        else:
            loading, quantization_notes = quantize(
                built_model.model, built_model.dtype, setup, ready=ready
            )
        built_model = replace(
            built_model, loading=loading, notes=(*built_model.notes, *quantization_notes)
        )
    if setup.adapter is not None:
        wrapper, adapter_notes = add_adapter(built_model.model, built_model.task, setup)
        built_model = replace(
            built_model, wrapper=wrapper, notes=(*built_model.notes, *adapter_notes)
        )
    if setup.values_tokens:
        add_value_head(built_model.model)
    freeze(built_model.trained_model, setup)
    cast_weights(built_model.trained_model, setup)
    if setup.channels_last:
        built_model.trained_model.to(memory_format=torch.channels_last)
    add_noise(built_model.trained_model, setup)
    if setup.distributed.in_half:
        half = built_model.dtype if built_model.dtype.itemsize == 2 else torch.bfloat16
        cast_parameters(built_model.trained_model, half)
    return built_model
