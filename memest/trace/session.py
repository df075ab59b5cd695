"""One model, built once, traced for any batch: what the torch-free floors call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.errors import ConfigError, ModelLoadError
from memest.events import Trace
from memest.hidden.call import GpuTraits
from memest.models.resolve import ModelSource
from memest.setup import Attention, Dtype, Setup, Task
from memest.steps.card import Card
from memest.steps.sizing import SIZES, Answer
from memest.trace.adapters import add_adapter, base_of
from memest.trace.build import BuiltModel, build_model, count, freeze
from memest.trace.evaluation import trace_evaluation
from memest.trace.inputs import Sizes, TensorPlan, plan_batch, realise
from memest.trace.legacy import attention_of, masks_as_before, model_as_before
from memest.trace.liger import liger_applied
from memest.trace.losses import loss_for
from memest.trace.pristine import as_built
from memest.trace.quantized import Loading, own_quantization, quantise, twins_on_meta
from memest.trace.stages import trace_stage
from memest.trace.switches import set_checkpointing, set_use_cache
from memest.trace.tasks import task_of_class
from memest.trace.tensor_parallel import on_ranks, quiet_shapes, shard_model
from memest.trace.ties import separate_head
from memest.trace.training import TracePlan, plan_to_compose, trace_training
from memest.trace.turns import in_turn

__all__ = ["BuiltRun", "build", "evaluate_built", "rank_model", "trace_built"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """A model on meta, what it is fed, and what was decided."""

    model: torch.nn.Module
    plan: Callable[[Setup], tuple[TensorPlan, ...]]
    answer: Callable[[Setup], Answer]
    """The sizes that the batch of a setup has, and what there is to say of them."""
    loss_of: Callable[[Any, Any], torch.Tensor]
    card: Card
    counts: tuple[int, int, int, int]
    """Numbers of parameters, of those that train, of elements of buffers; bytes of parameters."""
    keeps_checkpointing: bool = False
    """A live module whose checkpointing is on already: left as its owner set it up."""
    loading: Loading | None = None
    """How the weights come to the device; None = they are copied there as they are."""


@in_turn
def build(
    setup: Setup, source: ModelSource | None, module: Any, inputs: Any, loss: Any
) -> BuiltRun:
    """Build the model (or copy a live one to meta) and plan its batch."""
    loss = None if loss is None else _checked(loss)
    if source is None:
        return _from_module(setup, module, inputs, loss)
    model_type = str((source.config or {}).get("model_type", ""))
    asked = setup
    setup = replace(setup, attn_implementation=attention_of(model_type, setup))
    setup, found = own_quantization(source.config or {}, setup)
    ready = bool(found) and setup.quantization is not None
    built = build_model(source, setup)
    if source.kind == "factory":
        _same_attention(built.model, asked)
    model_as_before(built.model, model_type, setup)
    untied = separate_head(built.model, source.config or {})
    built = replace(built, notes=(*built.notes, *untied, *found))
    built = _finetuned(built, setup, ready=ready)
    if loss is None and built.loss is not None:
        loss = _checked(built.loss)
    if inputs is None and built.inputs is not None:
        plan = _given(built.inputs)
        return _run(setup, built, plan, _takes_no_sizes, loss or loss_for(built))
    if inputs is not None:
        return _from_inputs(setup, built, inputs, loss)
    return _planned(setup, built, loss)


def _finetuned(built: BuiltModel, setup: Setup, *, ready: bool = False) -> BuiltModel:
    """The model quantised, with adapters and frozen parameters, as the setup has them."""
    if setup.quantization is not None:
        loading, told = quantise(built.model, built.dtype, setup, ready=ready)
        built = replace(built, loading=loading, notes=(*built.notes, *told))
    if setup.adapter is not None:
        wrapper, said = add_adapter(built.model, built.task, setup)
        built = replace(built, wrapper=wrapper, notes=(*built.notes, *said))
    freeze(built.trained, setup)
    return built


def _from_inputs(setup: Setup, built: BuiltModel, inputs: Any, loss: Any) -> BuiltRun:
    """A run whose batch is that of example inputs.

    Raises:
        ConfigError: the inputs are no tensors, or of another batch than the setup's.
    """
    plan, batch = _given(inputs), _batch_of(inputs)
    if setup.batch not in (Setup().batch, batch):
        raise ConfigError(
            f"The example inputs have batch {batch}, the setup says {setup.batch}. Give inputs of "
            "the batch you ask about."
        )
    setup = replace(setup, batch=batch)
    return _run(setup, built, plan, _takes_no_sizes, loss or loss_for(built), batch=batch)


def _takes_no_sizes(setup: Setup) -> Answer:
    return Answer({}, _without_effect(setup, Sizes()))


def _planned(setup: Setup, built: BuiltModel, loss: Any) -> BuiltRun:
    """A run whose batch follows from the model's config."""

    def answer(for_setup: Setup) -> Answer:
        _, sizes, notes = plan_batch(built, for_setup)
        taken = {name: value for name in SIZES if (value := getattr(sizes, name)) is not None}
        return Answer(taken, (*notes, *_without_effect(for_setup, sizes)))

    def plan(for_setup: Setup) -> tuple[TensorPlan, ...]:
        return plan_batch(built, for_setup)[0]

    answer(setup)  # what cannot be taken is said before anything else is done
    return _run(setup, built, plan, answer, loss or loss_for(built))


def _without_effect(setup: Setup, sizes: Sizes) -> tuple[str, ...]:
    """What to say of sizes that were asked for and that this model's batch does not have."""
    said = []
    for name in SIZES:
        asked, taken = getattr(setup, name), getattr(sizes, name)
        flag = f"--{name.replace('_', '-')} {asked:g}" if asked is not None else ""
        if asked is not None and taken is None:
            said.append(f"{flag} has no effect on this model's inputs")
        elif asked is not None and taken != asked:
            said.append(f"{flag} has no effect: this model always takes {taken:g}")
    return tuple(said)


def _run(
    setup: Setup, built: BuiltModel, plan: Any, answer: Callable[[Setup], Answer], loss_of: Any,
    *, batch: int | None = None,
) -> BuiltRun:  # fmt: skip
    counts = count(built.trained)
    kind = type(built.model).__name__
    card = Card(
        class_name=kind,
        task=built.task,
        attention=setup.attn_implementation,
        checkpointing=setup.checkpointing,
        batch=batch,
        about=(
            f"{kind} with {str(built.dtype).removeprefix('torch.')} weights",
            f"attention: {built.attention}",
        ),
        remarks=built.notes,
    )
    return BuiltRun(
        model=built.trained,
        plan=plan,
        answer=answer,
        loss_of=loss_of,
        card=card,
        counts=(counts.parameters, counts.trainable, counts.buffers, counts.parameter_bytes),
        loading=built.loading,
    )


@in_turn
def trace_built(
    run: BuiltRun, setup: Setup, gpu: GpuTraits, plan: TracePlan | None = None, *,
    operators: str = "cuda",
) -> Trace:  # fmt: skip
    """Trace the micro-steps of ``setup``, its sizes as they are taken.

    Args:
        run: the model, built.
        setup: the run.
        gpu: whose kernels run.
        plan: how long; None for what any run is composed from, its updates apart.
        operators: whose operators, ``cuda`` or ``cpu``.
    """
    set_use_cache(run.model, setup)
    if not run.keeps_checkpointing:
        set_checkpointing(run.model, setup)
    model_type, plans = _fed(run, setup)
    if setup.distributed.stage is not None:
        with as_built(run.model):
            trace = trace_stage(
                run.model, setup, part=setup.distributed.stage,
                make_batch=lambda: realise(plans), gpu=gpu, operators=operators,
                model_type=model_type,
            )  # fmt: skip
        trace.counts = run.counts
        return trace
    with rank_model(run.model, setup) as model, as_built(model), _kernels(model, setup, gpu):
        trace = trace_training(
            model, setup, make_batch=lambda: realise(plans), loss_of=run.loss_of, gpu=gpu,
            operators=operators, model_type=model_type, plan=plan or plan_to_compose(setup),
            loading=run.loading,
        )  # fmt: skip
    trace.counts = run.counts
    return trace


def _fed(run: BuiltRun, setup: Setup) -> tuple[str, tuple[TensorPlan, ...]]:
    """The family of a model, and what it is fed."""
    config = getattr(run.model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    attention = str(getattr(config, "_attn_implementation", ""))
    return model_type, masks_as_before(run.plan(setup), model_type, attention, setup)


@contextmanager
def rank_model(model: Any, setup: Setup) -> Iterator[Any]:
    """The model as a rank has it: a copy that is sharded where layers are shared."""
    ranks = setup.distributed.tp
    if ranks == 1:
        yield model
        return
    with on_ranks(ranks) as mesh, quiet_shapes():
        twin = copy.deepcopy(model)
        shard_model(twin, mesh, ranks)
        yield twin


def _kernels(model: torch.nn.Module, setup: Setup, gpu: GpuTraits) -> AbstractContextManager[None]:
    """Other people's kernels in place of the model's own operators."""
    return liger_applied(model, gpu) if setup.use_liger_kernel else nullcontext()


@in_turn
def evaluate_built(run: BuiltRun, setup: Setup, gpu: GpuTraits, operators: str = "cuda") -> Trace:
    """Trace the first batches of an evaluation of ``setup``, whose batch is the evaluation's."""
    set_use_cache(run.model, setup)
    model_type, plans = _fed(run, setup)
    with as_built(run.model), _kernels(run.model, setup, gpu):
        return trace_evaluation(
            run.model, setup, make_batch=lambda: realise(plans), loss_of=run.loss_of, gpu=gpu,
            model_type=model_type, operators=operators, loading=run.loading,
        )  # fmt: skip


# -- live modules ---------------------------------------------------------------------------------


def _from_module(setup: Setup, module: Any, inputs: Any, loss: Any) -> BuiltRun:
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"The model is a {type(module).__name__}: give a name, a path, package.module:factory, "
            "or a torch.nn.Module."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "The model is a TorchScript module, which cannot be traced: give the torch.nn.Module "
            "that it was made from."
        )
    _same_attention(module, setup)
    twin, loading = _twin(module)
    if setup.dtype is not Dtype.AUTO:
        twin.to(getattr(torch, setup.dtype.value))
    twin.train()
    base = base_of(twin)
    config = getattr(base, "config", None)
    dtype = next((p.dtype for p in base.parameters()), torch.float32)
    built = BuiltModel(
        model=base, config=config, task=setup.task, dtype=dtype,
        attention=str(getattr(config, "_attn_implementation", "as the model's code does")),
        notes=(), wrapper=None if base is twin else twin, loading=loading,
    )  # fmt: skip
    if setup.adapter is not None and base is not twin:
        raise ConfigError(
            "The model has adapters already: leave --peft and its options out, or give the model "
            "without them."
        )
    if inputs is not None:
        return _kept(_from_inputs(setup, _finetuned(built, setup), inputs, loss))
    if config is None:
        raise ConfigError(
            "A torch.nn.Module needs example inputs: memest.estimate(model, inputs={...}, "
            "loss=lambda outputs, batch: ...)."
        )
    if setup.task is Task.AUTO:
        both = bool(getattr(config, "is_encoder_decoder", False))
        built = replace(built, task=task_of_class(type(base), encoder_decoder=both))
    return _kept(_planned(setup, _finetuned(built, setup), loss))


def _kept(run: BuiltRun) -> BuiltRun:
    """Leave activation checkpointing that is on already as it is, and say so."""
    on = any(getattr(m, "gradient_checkpointing", False) is True for m in run.model.modules())
    if not on or run.card.checkpointing != "none":
        return run
    said = "activation checkpointing as the model has it on already"
    card = replace(run.card, checkpointing="full", remarks=(*run.card.remarks, said))
    return replace(run, card=card, keeps_checkpointing=True)


def _same_attention(model: torch.nn.Module, setup: Setup) -> None:
    """A model that is there has its attention already.

    Raises:
        ConfigError: another one is asked for.
    """
    wanted = setup.attn_implementation
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if wanted is Attention.AUTO or wanted == found:
        return
    has = f"this one has {found}" if found else "this one chooses none by that name"
    raise ConfigError(
        f"--attn-implementation {wanted} is for models that memest builds, and {has}: build it "
        f"with attn_implementation={wanted.value!r} and ask again."
    )


def _checked(loss: Any) -> Callable[[Any, Any], torch.Tensor]:
    """The user's loss, which must be something to train on."""
    if not callable(loss):
        raise ConfigError(
            f"loss is a {type(loss).__name__}: give a function, loss=lambda outputs, batch: ..."
        )

    def checked(outputs: Any, batch: Any) -> torch.Tensor:
        value = loss(outputs, batch)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
            return value
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            what = f"tensor of shape {tuple(value.shape)}"
            what += "" if value.requires_grad else " that leads back to no parameter"
        raise ConfigError(
            f"loss(outputs, batch) returned a {what}: it must return one number, a tensor that "
            "leads back to the parameters."
        )

    return checked


def _twin(module: torch.nn.Module) -> tuple[torch.nn.Module, Loading | None]:
    """A structural copy on meta: no weight is copied, the original stays untouched."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for part in module.modules():
        for value in vars(part).values():
            # computed from parameters (the old weight_norm), or beside them on a GPU
            if isinstance(value, torch.Tensor) and (not value.is_leaf or value.is_cuda):
                memo[id(value)] = torch.empty_like(value, device="meta", requires_grad=False)
    loading = twins_on_meta(module, memo)
    try:
        return copy.deepcopy(module, memo), loading
    except Exception as error:
        text = (str(error).strip().splitlines() or ["no message"])[0]
        raise ModelLoadError(
            f"The {type(module).__name__} cannot be copied (copy.deepcopy), and memest traces a "
            f"copy: {type(error).__name__}: {text}"
        ) from error


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
