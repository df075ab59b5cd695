"""One stage of a pipeline: its layers alone, forward and backward of a few micro-batches.

The module of a stage is the model with what other stages have taken out: embeddings before the
first, layers, norm and head behind the last. What the base model computes for all layers (masks,
rotary tables) is computed on every stage again, as it is where a model is cut by hand. Which parts
these are is transformers' own plan of the model (``base_model_pp_plan``).

Backward is torch's own (``torch.distributed.pipelining._backward``); what is held in between, and
for how long, is what ``PipelineStage.forward_one_chunk`` and its companions hold. What the schedule
holds beyond that is put in where a run is composed (:mod:`memest.sharding.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from memest.config.parallelism import StagePart
from memest.config.setup import Precision, Setup
from memest.errors import ConfigError, TraceError
from memest.events import CueKind, Phase, SeamKind, Trace
from memest.profiles.pipeline_pieces import PIECE_END, REGION_END, STAGE_END, piece_seam
from memest.trace.cues import follow_weights, landmarks_of
from memest.trace.loop_model import TrainingLoop, loss_region
from memest.trace.loops import tag_gradients
from memest.trace.model.loading import load
from memest.trace.optimizers.torch import weights_of
from memest.trace.recorder import Recorder
from memest.trace.training import make_run, start_recorder
from memest.workspaces.operator_call import GpuTraits

__all__ = ["causal_loss", "cut", "layers_of", "stage_module", "trace_stage"]


class _Passing(torch.nn.Module):
    """Stands for what another stage has."""

    def forward(self, value: Any, *_args: Any, **_more: Any) -> Any:
        return value


def layers_of(model: Any) -> int:
    """How many layers there are to split.

    Raises:
        ConfigError: transformers has no plan that says how to cut this model.
    """
    return len(_parts(model)[1])


def _parts(model: Any) -> tuple[list[tuple[Any, str]], Any, list[tuple[Any, str]]]:
    """What comes before the layers, the layers, and what comes after them in the base model.

    The first and the last as (owner, attribute).
    """
    base = getattr(model, "base_model", model)
    config = getattr(base, "config", None)
    plan = dict(
        getattr(config, "base_model_pp_plan", None) or getattr(base, "_pp_plan", None) or {}
    )
    names = list(plan)
    lists = [n for n in names if isinstance(getattr(base, n, None), torch.nn.ModuleList)]
    if len(lists) != 1 or any(not hasattr(base, name) for name in names):
        raise ConfigError(
            f"--pp cannot cut {type(model).__name__}: transformers has no plan for it "
            "(base_model_pp_plan of its configuration), as it has for decoders such as llama, "
            "mistral, qwen3, gemma3, mixtral or gpt_neox. Leave --pp out; --fsdp full_shard splits "
            "any model."
        )
    position = names.index(lists[0])
    before = [(base, name) for name in names[:position]]
    after = [(base, name) for name in names[position + 1 :]]
    return before, getattr(base, lists[0]), after


@contextmanager
def cut(model: Any, part: StagePart) -> Iterator[Callable[..., torch.Tensor]]:
    """The model without what other stages have, for as long as the context is open.

    Args:
        model: on whatever device; changed back in the end.
        part: what the stage has.

    Yields:
        What the stage computes: of token ids on the first stage, else of what came before.
    """
    before, layers, after = _parts(model)
    base = getattr(model, "base_model", model)
    with ExitStack() as stack:
        if not part.first:
            for owner, name in before:
                _replace(stack, owner, name)
        for number in range(len(layers)):
            if not part.start <= number < part.stop:
                _replace(stack, layers, str(number))
        if not part.last:
            for owner, name in after:
                _replace(stack, owner, name)
            for name, child in model.named_children():
                if child is not base:
                    _replace(stack, model, name)
        yield stage_module(model, part)


def _replace(stack: ExitStack, owner: torch.nn.Module, name: str) -> None:
    old = owner._modules[name]
    owner._modules[name] = _Passing()
    stack.callback(owner._modules.__setitem__, name, old)


def stage_module(model: Any, part: StagePart) -> Callable[..., torch.Tensor]:
    """What a stage computes, given a model that is cut already."""
    base = getattr(model, "base_model", model)

    def run(inputs: torch.Tensor) -> torch.Tensor:
        arguments = {"input_ids" if part.first else "inputs_embeds": inputs, "use_cache": False}
        out = model(**arguments).logits if part.last else base(**arguments).last_hidden_state
        tensor: torch.Tensor = out
        return tensor

    return run


def causal_loss(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss of a language model, as its own forward has it."""
    config = model.config.get_text_config()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = model.loss_function(
            logits=logits, labels=labels, vocab_size=config.vocab_size
        )
        return tensor

    return loss


@dataclass(slots=True)
class _Stage:
    """What ``PipelineStage`` and its schedule hold of the micro-batches of one stage."""

    part: StagePart
    model: Any
    compute: Callable[..., torch.Tensor]
    run: TrainingLoop
    hidden_spec: tuple[tuple[int, ...], torch.dtype]
    forward_results: dict[int, tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    held_tensors: list[Any] = field(default_factory=list)

    def forward(self, number: int, inputs: torch.Tensor, target: torch.Tensor | None) -> None:
        """``forward_one_chunk`` and ``_maybe_compute_loss``."""
        if not self.part.first:
            inputs = inputs.requires_grad_()
        output = self.compute(inputs)
        if not self.part.last and (tuple(output.shape), output.dtype) != self.hidden_spec:
            shape, dtype = self.hidden_spec
            raise TraceError(
                f"--pp cannot cut {type(self.model).__name__}: a stage returns "
                f"{tuple(output.shape)} in {output.dtype}, not {shape} in {dtype}, so its layers "
                "are not called as transformers' plan says."
            )
        self.forward_results[number] = (output,), [inputs]
        self.run.recorder.cue(CueKind.STAGE_OUTPUT, number, output)
        if output.requires_grad:
            output.register_hook(_output_hook(self.run.recorder, number))
        if target is not None:
            loss = causal_loss(self.model)(output, target)
            self.losses[number] = loss
            self.run.recorder.cue(CueKind.STAGE_LOSS, number, loss)

    def backward(self, number: int, gradient: torch.Tensor | None) -> None:
        """``backward_one_chunk``."""
        # here, because it takes time and every trace loads this file
        from torch.distributed.pipelining._backward import stage_backward

        outputs, inputs = self.forward_results.pop(number)
        root: Any = self.losses[number] if self.part.last else outputs
        gradients = None if gradient is None else (gradient,)
        input_gradients = stage_backward(root, gradients, inputs)
        if self.part.last and not self.part.first:
            for output in outputs:
                if not output._is_view():
                    output.detach_()
        for value in input_gradients:
            if value is not None:
                self.held_tensors.append(value)
                self.run.recorder.cue(CueKind.INPUT_GRADIENT, number, value)


def _output_hook(recorder: Recorder, number: int) -> Callable[[torch.Tensor], None]:
    """Where wrappers have a hook: behind the backward of the loss, in front of the model's."""

    def hook(_gradient: torch.Tensor) -> None:
        recorder.cue(CueKind.OUTPUT_REACHED, number)

    return hook


def trace_stage(
    model: Any,
    setup: Setup,
    *,
    part: StagePart,
    make_batch: Callable[[], dict[str, Any]],
    gpu: GpuTraits,
    operators: str = "cuda",
    fewer_layers: AbstractContextManager[None] | None = None,
) -> Trace:
    """Trace micro-batches of one stage.

    The first leaves gradients behind, the second adds to them. Under autocast there is a third,
    first in a region of its own, where weights are cast anew and gradients are there.

    Args:
        model: whole, on meta, in training mode; with adapters inside, without peft's wrapper.
        setup: the run; its batch is in ``make_batch``.
        part: the stage.
        make_batch: makes the tensors of a micro-batch: ``input_ids`` and ``labels`` count.
        gpu: decides operators and versions.
        operators: ``cuda``, or ``cpu`` for what this machine's CPU would run.
        fewer_layers: entered when the model is cut.

    Raises:
        ConfigError: a model that cannot be cut.
        TraceError: the stage does something that a trace cannot follow.
    """
    hidden_spec = _hidden_spec(model, make_batch()["input_ids"])
    with ExitStack() as stack:
        compute = stack.enter_context(cut(model, part))
        stack.enter_context(fewer_layers or nullcontext())
        recorder = start_recorder(stack, model, setup, gpu, operators)
        recorder.mark(Phase.LOAD, 0)
        load(model, recorder)
        stack.enter_context(follow_weights(model, recorder))
        run = make_run(model, setup, recorder, make_batch, lambda *_: None, gpu)
        stage = _Stage(part, model, compute, run, hidden_spec)
        regions = [(0, 1)] if setup.precision is Precision.FP32 else [(0, 1), (2,)]
        for numbers in regions:
            with loss_region(run):
                for number in numbers:
                    _micro_batch(stage, number)
                if numbers[0] == 0:
                    recorder.seam(SeamKind.PIECE, 1, REGION_END)
            if numbers[0] == 0:
                recorder.seam(SeamKind.PIECE, 1, STAGE_END)
        recorder.trace.weights = run.weights
        recorder.forget()
        del stage
    trace = recorder.trace
    trace.micro_steps = (len([n for numbers in regions for n in numbers]),)
    trace.landmarks = landmarks_of(model)
    trace.notes.extend(recorder.notes)
    return trace


def _hidden_spec(model: Any, ids: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """What stages pass on: the residual stream, which autocast leaves in the embeddings' dtype.

    Of the whole model: beside adapters and shards, a stage's first parameter may have another.
    """
    shape = (*ids.shape, model.config.get_text_config().hidden_size)
    return shape, model.get_input_embeddings().weight.dtype


def _micro_batch(stage: _Stage, number: int) -> None:
    """Forward and backward of one micro-batch, between seams; its inputs are there before."""
    run, part = stage.run, stage.part
    recorder = run.recorder
    recorder.mark(Phase.BATCH, 1, number + 1)
    batch = run.make_batch()
    ids = batch["input_ids"]
    shape, dtype = stage.hidden_spec
    inputs = ids if part.first else torch.empty(shape, dtype=dtype, device=ids.device)
    gradient = None if part.last else torch.empty(shape, dtype=dtype, device=ids.device)
    target = batch["labels"] if part.last else None
    for kind, tensor in (
        (CueKind.STAGE_INPUT, inputs),
        (CueKind.STAGE_TARGET, target),
        (CueKind.OUTPUT_GRADIENT, gradient),
    ):
        if tensor is not None:
            recorder.cue(kind, number, tensor)
    stage.held_tensors.append((inputs, gradient, target))
    del batch, ids
    _seam(recorder, number, 0)
    recorder.mark(Phase.FORWARD, 1, number + 1)
    stage.forward(number, inputs, target)
    _seam(recorder, number, 1)
    recorder.mark(Phase.BACKWARD, 1, number + 1)
    stage.backward(number, gradient)
    recorder.cue(CueKind.DONE, 0)
    tag_gradients(run)
    if number == 0:
        run.weights = weights_of(stage.model)
        for index, (_, parameter) in enumerate(stage.model.named_parameters()):
            if parameter.grad is not None:
                recorder.cue(CueKind.KEPT_GRADIENT, index, parameter.grad)
    _seam(recorder, number, PIECE_END)


def _seam(recorder: Recorder, number: int, place: int) -> None:
    recorder.seam(SeamKind.PIECE, 1, piece_seam(number, place))
