"""From a built model and a setup to a trace: the one place where tracing is put together."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from memest.config.optimizers import facts_of
from memest.config.parallelism import Strategy
from memest.config.release_defaults import release_default
from memest.config.setup import FP16_REFUSAL, Loop, Precision, SdpaBackend, Setup, ZeroGrad
from memest.config.software import Software
from memest.errors import ConfigError, MemestError, TraceError
from memest.events import REFERENCE, Category, Phase, SeamKind, Trace, Weight
from memest.trace.cuda.autocast import CUDA, autocast_on_meta
from memest.trace.cuda.bitsandbytes import bitsandbytes_handlers
from memest.trace.cuda.compiled import compile_model
from memest.trace.cuda.cpu_ops import CPU_LISTS, cpu_handlers, cpu_operators
from memest.trace.cuda.cuda_ops import cuda_handlers, cuda_operators, kernel_handlers
from memest.trace.cuda.in_place import in_place_handlers
from memest.trace.cuda.streams import current_streams
from memest.trace.cuda.transformers_patches import transformers_on_meta
from memest.trace.cuda.value_answers import answer_handlers
from memest.trace.cues import follow_weights, landmarks_of
from memest.trace.isolation import TURN, line_of
from memest.trace.legacy.bitsandbytes import bitsandbytes_as_before
from memest.trace.legacy.transformers import family_of, transformers_as_before
from memest.trace.loop_model import TrainingLoop
from memest.trace.loops import run_steps, run_updates
from memest.trace.losses.objective import Objective
from memest.trace.losses.parts import gathered_head
from memest.trace.model.adapters import adapter_inputs_in_fp32, base_of, prefix_of
from memest.trace.model.loading import load, load_reference
from memest.trace.model.quantization import Loading, restore_biases
from memest.trace.model.roles import Roles
from memest.trace.optimizers.torch import (
    NamedParameter,
    check_trainable,
    in_backward,
    make_optimizer,
    optimizer_of,
)
from memest.trace.own_steps import OwnStep, run_own_steps
from memest.trace.parallel.collectives import collective_handlers
from memest.trace.parallel.context_parallel import Split
from memest.trace.parallel.ulysses_batches import UlyssesBatches
from memest.trace.parallel.zero3 import hooks_of_stage_3, linear_of_stage_3
from memest.trace.recorder import PhaseDone, Recorder
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "TracePlan",
    "load",
    "make_run",
    "plan_to_compose",
    "start_recorder",
    "trace_training",
    "trace_updates",
]


# kernels and patches are registered for the whole process while a trace runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """How long the traced run is.

    Attributes:
        steps: optimizer steps.
        micro_steps: micro-steps of each, or of each one its own number.
        updates: False leaves clipping and the optimizer out, to be traced apart.
        ends_after: the phase that the trace ends with, when it first comes to its end.
    """

    steps: int = 2
    micro_steps: int | tuple[int, ...] = 1
    updates: bool = True
    ends_after: Phase | None = None

    @property
    def micro_steps_by_step(self) -> tuple[int, ...]:
        """Micro-steps of every step."""
        if isinstance(self.micro_steps, tuple):
            return self.micro_steps
        return (self.micro_steps,) * self.steps


def plan_of(setup: Setup) -> TracePlan:
    """Two steps, and of many micro-steps the first, one from the middle, and the last."""
    return TracePlan(steps=min(setup.num_steps, 2), micro_steps=min(setup.grad_accum, 3))


def plan_to_compose(setup: Setup) -> TracePlan:
    """What every run can be put together from: see :mod:`memest.profiles.pieces`.

    A plain loop divides its loss only where it accumulates, so one that does not is a run of its
    own. Optimizers that step in backward, one for each parameter, cannot accumulate at all.
    """
    if setup.grad_accum == 1 and (setup.loop is Loop.PLAIN or not setup.may_accumulate):
        return TracePlan(micro_steps=(1, 1), updates=False)
    return TracePlan(micro_steps=(2, 1), updates=False)


def trace_training(
    model: torch.nn.Module,
    setup: Setup,
    *,
    make_batch: Callable[[], dict[str, torch.Tensor]],
    loss_of: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    gpu: GpuTraits,
    operators: str = "cuda",
    plan: TracePlan | None = None,
    loading: Loading | None = None,
    call: Any = None,
    own_step: OwnStep | None = None,
    split: Split | None = None,
    ulysses_batches: UlyssesBatches | None = None,
    objective: Objective | None = None,
) -> Trace:
    """Trace the training steps of ``setup`` on a model whose parameters are on meta.

    Args:
        model: in training mode; not modified beyond its gradients, which are dropped again.
        setup: batch sizes are in ``make_batch``; the rest is read from here.
        make_batch: makes one micro-batch on meta.
        loss_of: takes the loss out of the outputs.
        gpu: decides operators (attention kernels) and versions.
        operators: ``cuda``, or ``cpu`` for what this machine's CPU would run (for proofs).
        plan: how many steps and micro-steps are traced.
        loading: how the weights come to the device; None = ``model.to(device)``.
        call: how the model is called with a batch; None = ``model(**batch)``.
        own_step: a step that does everything itself, in place of a loop.
        split: entered around forward and backward where a sequence is shared by ring attention.
        ulysses_batches: batches and loss where a sequence is shared by Ulysses.
        objective: what is computed in place of the loss of one forward.

    Raises:
        TraceError: the model does something a trace cannot follow; names module and operator.
    """
    plan = plan or plan_of(setup)
    with ExitStack() as stack:
        reference = None if objective is None else objective.reference
        recorder = start_recorder(stack, model, setup, gpu, operators, reference)
        recorder.mark(Phase.LOAD, 0)
        load(model, recorder, loading)
        if reference is not None:
            load_reference(reference, recorder)
        stack.enter_context(follow_weights(model, recorder))
        run = make_run(model, setup, recorder, make_batch, loss_of, gpu, plan)
        run.call, run.split, run.ulysses_batches = call, split, ulysses_batches
        run.objective = objective
        # a trainer with a step of its own has its batch written there: prompts wait as text
        run.prefetches &= objective is None or objective.step is None
        if run.stepper is not None:
            stack.callback(run.stepper.remove)
        stack.enter_context(compile_model(run, setup, gpu))
        recorder.ends_after = plan.ends_after
        if own_step is not None and own_step.optimizers is not None:
            run_own_steps(run, own_step)
        else:
            with suppress(PhaseDone):
                run_steps(run)
        if not plan.updates:
            recorder.trace.weights = run.weights
    trace = recorder.trace
    trace.micro_steps = plan.micro_steps_by_step
    trace.landmarks = landmarks_of(model)
    trace.notes.extend(recorder.notes)
    trace.notes.extend(_idle_backend_notes(setup, trace.attention_choices))
    trace.notes.extend(_recurrent_notes(model))
    if (streams := current_streams()) is not None:
        trace.unpriced.extend(streams.unpriced)
    return trace


def _recurrent_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """What to say of recurrent layers, which a GPU runs as one kernel of cuDNN (``RNN.cpp``)."""
    if not any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        return ()
    note = (
        "LSTM, GRU and RNN layers run as one kernel of cuDNN, and what that keeps for backward "
        "(its reserve, packed weights, a workspace) is not modelled: what is counted is these "
        "layers taken step by step, which may be more or less"
    )
    return (note,)


def start_recorder(
    stack: ExitStack,
    model: torch.nn.Module,
    setup: Setup,
    gpu: GpuTraits,
    operators: str,
    reference: torch.nn.Module | None = None,
) -> Recorder:
    """A recorder that watches a model for as long as a stack is open.

    Args:
        stack: what is entered, and undone when it closes; errors inside become trace errors.
        model: whose modules are followed, and whose gradients are dropped in the end.
        setup: the run.
        gpu: decides operators and versions.
        operators: ``cuda`` or ``cpu``.
        reference: a second model, whose modules are followed too.
    """
    handlers = {
        **answer_handlers(),
        **in_place_handlers(),
        **kernel_handlers(),
        **bitsandbytes_handlers(),
        **collective_handlers(setup.distributed),
    }
    on_cuda = operators == "cuda"
    handlers.update(cuda_handlers() if on_cuda else cpu_handlers(handlers))
    recorder = Recorder(handlers, prefix=prefix_of(model))
    choices = recorder.trace.attention_choices
    kernels = cuda_operators(gpu, setup.sdpa_backend, choices) if on_cuda else cpu_operators()
    stack.enter_context(TURN)
    stack.enter_context(_no_garbage_collection())
    stack.enter_context(kernels)
    lists = CUDA if on_cuda else CPU_LISTS
    stack.enter_context(autocast_on_meta(recorder, gpu.torch, lists))
    stack.enter_context(transformers_on_meta(recorder, model, gpu, compiled=setup.torch_compile))
    stack.enter_context(transformers_as_before(recorder, family_of(model), setup))
    stack.enter_context(bitsandbytes_as_before(setup))
    stack.enter_context(restore_biases(model))
    stack.enter_context(linear_of_stage_3(setup))
    stack.enter_context(gathered_head(model, setup.distributed.gathers_head))
    others = {} if reference is None else {REFERENCE: reference}
    if setup.partitions_parameters:
        stack.enter_context(hooks_of_stage_3({"": model, **others}, recorder))
    stack.enter_context(adapter_inputs_in_fp32(model, setup.distributed.adapters_in_full))
    if not setup.torch_compile:  # compiled code knows no modules
        stack.enter_context(recorder.modules(model, others))
    stack.enter_context(recorder)
    stack.enter_context(_explain_errors(model, recorder, setup))
    return recorder


@contextmanager
def _explain_errors(model: Any, recorder: Recorder, setup: Setup) -> Iterator[None]:
    """Errors are told as the user can use them, and nothing of the trace is left on the model."""
    try:
        yield
    except MemestError:
        raise
    except (Exception, RecursionError) as error:
        own = _update_error(setup, error) if recorder.failed_update else None
        raise own or _trace_error(recorder, error) from error
    finally:
        recorder.forget()
        for parameter in model.parameters():
            parameter.grad = None


def trace_updates(
    weights: Sequence[Weight], setup: Setup, gpu: GpuTraits, roles: Roles | None = None
) -> Trace:
    """Trace clipping and the optimizer's first two steps alone, on weights with gradients.

    Args:
        weights: as a trace of micro-steps left them.
        setup: names optimizer, clipping and loop.
        gpu: decides versions.
        roles: of the weights; None where the optimizer treats all modules alike.

    Returns:
        A trace whose first seam ends the allocations that were there already: weights, gradients
        and the gradient scaler. The optimizer's own load follows, then two updates between seams.

    Raises:
        ConfigError: an optimizer that cannot train these weights.
    """
    recorder = Recorder(
        {**answer_handlers(), **in_place_handlers(), **kernel_handlers(), **cuda_handlers()}
    )
    with ExitStack() as stack:
        stack.enter_context(TURN)
        stack.enter_context(_no_garbage_collection())
        stack.enter_context(
            cuda_operators(gpu, setup.sdpa_backend, recorder.trace.attention_choices)
        )
        stack.enter_context(autocast_on_meta(recorder, gpu.torch, CUDA))
        stack.enter_context(recorder)
        stack.enter_context(_explain_errors(_Parameters([]), recorder, setup))
        stack.enter_context(recorder.updating())
        recorder.mark(Phase.LOAD, 0)
        parameters = [_on_device(weight, recorder) for weight in weights]
        scaler = None
        if uses_grad_scaler(setup):
            scaler = torch.amp.GradScaler("cuda")
            scaler._lazy_init_scale_growth_tracker(torch.device("meta"))
        recorder.seam(SeamKind.OPTIMIZER_MADE, 0)
        optimizer = optimizer_of(
            parameters, setup, recorder, gpu.torch, lambda: _require_roles(roles)
        )
        run = TrainingLoop(
            model=_Parameters([entry.parameter for entry in parameters]),
            optimizer=optimizer,
            make_batch=dict,
            loss_of=lambda *_: None,
            recorder=recorder,
            setup=setup,
            micro_steps=(1, 1),
            set_to_none=True,
            scaler=scaler,
            apart=setup.distributed.strategy is Strategy.ZERO,
        )
        run_updates(run)
    trace = recorder.trace
    trace.micro_steps = run.micro_steps
    trace.notes.extend(recorder.notes)
    return trace


def _require_roles(roles: Roles | None) -> Roles:
    assert roles is not None, "an optimizer that looks at modules is traced without them"
    return roles


class _Parameters:
    """What an update asks of a model."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._parameters)


def _on_device(weight: Weight, recorder: Recorder) -> NamedParameter:
    """A weight on the device, with its gradient."""
    dtype = getattr(torch, weight.dtype)
    with torch.no_grad():
        tensor = torch.empty_strided(weight.shape, weight.stride, dtype=dtype, device="meta")
        parameter = torch.nn.Parameter(tensor, requires_grad=weight.trains)
        recorder.tag(parameter, Category.PARAMETERS)
        if weight.has_grad:
            parameter.grad = torch.empty_strided(
                weight.shape, weight.stride, dtype=dtype, device="meta"
            )
            recorder.tag(parameter.grad, Category.GRADIENTS)
    return NamedParameter(weight.name, parameter, weight.decays)


def _idle_backend_notes(setup: Setup, choices: Sequence[tuple[Any, str]]) -> list[str]:
    """What to say of ``--sdpa-backend`` where nothing asks for a kernel."""
    if setup.sdpa_backend is SdpaBackend.AUTO or choices:
        return []
    flag = f"--sdpa-backend {setup.sdpa_backend}"
    return [f"{flag} has no effect: no attention of this model goes by sdpa."]


def make_run(
    model: torch.nn.Module,
    setup: Setup,
    recorder: Recorder,
    make_batch: Any,
    loss_of: Any,
    gpu: GpuTraits,
    plan: TracePlan | None = None,
) -> TrainingLoop:
    """What a loop needs; without a plan, what needs no optimizer."""
    training = plan is not None
    plan = plan or TracePlan(updates=False)
    trainer = setup.loop is Loop.TRAINER
    recorder.seam(SeamKind.OPTIMIZER_MADE, 0)
    optimizer = stepper = None
    if setup.steps_in_backward and training:
        stepper = in_backward(model, setup, recorder, gpu.torch)
    elif plan.updates:
        optimizer = make_optimizer(model, setup, recorder, gpu.torch)
    elif setup.optimizer != "none":
        check_trainable([p.requires_grad for p in model.parameters()], setup)
    transformers = setup.software.transformers or (5, 23)
    return TrainingLoop(
        model=model,
        optimizer=optimizer,
        stepper=stepper,
        make_batch=make_batch,
        loss_of=loss_of,
        recorder=recorder,
        setup=setup,
        micro_steps=plan.micro_steps_by_step,
        set_to_none=sets_to_none(setup, gpu.torch),
        scaler=torch.amp.GradScaler("cuda") if uses_grad_scaler(setup) else None,
        outputs_to_fp32=setup.loop in (Loop.TRAINER, Loop.ACCELERATE) and transformers >= (4, 31),
        # Trainer.__init__: where ranks share sequences by Ulysses, DeepSpeed's loss counts itself
        counts_items=trainer and setup.distributed.sp == 1 and _takes_loss_kwargs(base_of(model)),
        shifts_labels=_shifts_labels(base_of(model)),
        prefetches=transformers >= (4, 46),
        clones_outputs=setup.finds_unused_parameters,
    )


def uses_grad_scaler(setup: Setup) -> bool:
    """Whether a gradient scaler is at work, on the gradients of the weights that are there.

    Where a library makes the weights half-precision ones, the scaler's gradients are its own.
    """
    halves = setup.distributed.in_half
    return setup.precision is Precision.FP16 and setup.optimizer != "none" and not halves


def sets_to_none(setup: Setup, torch_version: tuple[int, int]) -> bool:
    """``zero_grad`` drops gradients by default since torch 2.0."""
    if setup.zero_grad is ZeroGrad.AUTO:
        return release_default("zero_grad", Software(torch=torch_version)).value == "none"
    return setup.zero_grad is ZeroGrad.NONE


def _takes_loss_kwargs(model: torch.nn.Module) -> bool:
    """``Trainer.model_accepts_loss_kwargs``: the forward takes arbitrary keyword arguments."""
    declaration = getattr(model, "accepts_loss_kwargs", None)
    if declaration is not None:
        return bool(declaration)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _shifts_labels(model: torch.nn.Module) -> bool:
    """``Trainer._loss_shifts_labels``: a causal loss of a decoder."""
    return getattr(model, "loss_type", None) == "ForCausalLM" and not getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Deaths must come from references going away, not from when the collector happens to run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _update_error(setup: Setup, error: BaseException) -> MemestError | None:
    """A library's own optimizer that fails on a model's weights would do so in the run as well."""
    package = facts_of(setup.optimizer).package
    if not package:
        return None
    text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    return TraceError(
        f"--optim {setup.optimizer}: the code of {package} fails on the weights of this model: "
        f"{type(error).__name__}: {text}. It is the library's own code that was run, so a training "
        "run would stop there too. Choose another --optim."
    )


def _trace_error(recorder: Recorder, error: BaseException) -> MemestError:
    if "unscale FP16 gradients" in str(error):
        # torch.amp.GradScaler: the config's own dtype is float16, as --dtype auto takes it
        return ConfigError(FP16_REFUSAL)
    module = recorder.failed_module or recorder.current_module
    where = f"in module {module}" if module else "in the model itself"
    where += f", at operator {recorder.last_op}" if recorder.last_op else ", outside any operator"
    line = line_of(error.__traceback__)
    where += f", at {line}" if line else ""
    text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    why = f"The training step cannot be traced, {where}: {type(error).__name__}: {text}."
    return TraceError(
        f"{why} If the same step runs on a real device, try another --attn-implementation or "
        "--task; --debug shows the traceback.",
        why,
    )
