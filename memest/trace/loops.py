"""The training loops: who holds what, and when it lets go.

Lifetimes are the product here. Each loop keeps exactly the references that the real one keeps:
transformers' ``Trainer`` (``_inner_training_loop``, ``training_step``, ``compute_loss``),
accelerate's documented loop, and the plain loop of a tutorial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memest.events import Category, Phase
from memest.setup import Loop, Precision
from memest.trace.recorder import Recorder

__all__ = ["Run", "run_steps"]

Batch = dict[str, torch.Tensor]
_AUTOCAST_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class Run:
    """What a loop needs.

    Attributes:
        model: the model on its device, in training mode.
        optimizer: None for forward and backward only.
        make_batch: makes the tensors of one micro-batch on the device.
        loss_of: takes the loss out of the model's outputs (and the batch).
        recorder: told of the phases.
        grad_accum: micro-batches of a step.
        traced_micro_steps: how many of them are run (the rest repeats the second one).
        max_grad_norm: 0 = no clipping.
        set_to_none: what zero_grad does.
        scaler: gradient scaler, fp16 only.
        outputs_to_fp32: accelerate's ``convert_outputs_to_fp32``.
        counts_items: the model takes ``num_items_in_batch`` (its forward accepts keyword
            arguments), so the Trainer counts the labels of all micro-batches first.
        autocast_loss: autocast covers the loss function too (Trainer of transformers <= 4.28).
        empties_cache: Trainer 4.41 emptied the cache between forward and backward.
    """

    model: Any
    optimizer: Any
    make_batch: Callable[[], Batch]
    loss_of: Callable[[Any, Batch], torch.Tensor]
    recorder: Recorder
    loop: Loop
    precision: Precision
    grad_accum: int
    traced_micro_steps: int
    max_grad_norm: float
    set_to_none: bool
    scaler: Any = None
    outputs_to_fp32: bool = False
    counts_items: bool = False
    zero_grad_first: bool = False

    @property
    def device_type(self) -> str:
        """Where autocast looks."""
        return "cuda"


def run_steps(run: Run, num_steps: int) -> None:
    """Train ``num_steps`` optimizer steps."""
    if run.loop is Loop.TRAINER:
        _trainer(run, num_steps)
    else:
        _script(run, num_steps)


# -- transformers' Trainer --------------------------------------------------------------------------


def _trainer(run: Run, num_steps: int) -> None:
    """``Trainer._run_epoch``: all micro-batches of a step are on the device before it begins."""
    samples: list[Batch] = []
    grad_norm = total = None
    for step in range(1, num_steps + 1):
        run.recorder.mark(Phase.BATCH, step)
        # the old list stays bound while the new one is filled
        samples = [run.make_batch() for _ in range(run.grad_accum)]
        items = _count_items(samples) if run.counts_items else None
        for micro_step in range(1, run.traced_micro_steps + 1):
            inputs = samples[micro_step - 1]
            loss = _training_step(run, inputs, items, step, micro_step)
            total = loss if total is None else total.add_(loss)
            del loss
        run.recorder.mark(Phase.CLIP, step, run.traced_micro_steps)
        if run.scaler is not None:
            run.scaler.unscale_(run.optimizer)
        parameters = [p for p in run.model.parameters() if p.requires_grad]
        if run.max_grad_norm:
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, run.max_grad_norm)
        _optimizer_step(run, step)
        run.recorder.mark(Phase.ZERO_GRAD, step)
        run.model.zero_grad(set_to_none=run.set_to_none)
    del grad_norm


def _count_items(samples: list[Batch]) -> torch.Tensor | None:
    """``_get_num_items_in_batch``: one bool mask at a time, then a 0-dim number."""
    if not all("labels" in batch for batch in samples):
        return None
    counts = []
    for batch in samples:
        labels = batch["labels"]
        if not labels.is_floating_point():
            shifted = labels[..., 1:] if labels.dim() > 1 else labels
            counts.append(shifted.ne(-100).sum())
    return torch.stack(counts).sum() if len(counts) > 1 else (counts[0] if counts else None)


def _training_step(
    run: Run, inputs: Batch, items: Any, step: int, micro_step: int
) -> torch.Tensor:
    run.recorder.mark(Phase.FORWARD, step, micro_step)
    loss = _compute_loss(run, dict(inputs), items)
    if items is None and run.grad_accum > 1:
        loss = loss / run.grad_accum
    _backward(run, loss, step, micro_step)
    return loss.detach()


def _compute_loss(run: Run, inputs: Batch, items: Any) -> torch.Tensor:
    """``outputs`` is a local here: logits and caches are dead before backward begins."""
    if items is not None:
        inputs = {**inputs, "num_items_in_batch": items}
    outputs = forward(run, inputs)
    return run.loss_of(outputs, inputs)


# -- plain and Accelerate loops -------------------------------------------------------------------


def _script(run: Run, num_steps: int) -> None:
    """``outputs = model(**batch); outputs.loss.backward()``: outputs live until rebound."""
    outputs = loss = None
    for step in range(1, num_steps + 1):
        for micro_step in range(1, run.traced_micro_steps + 1):
            run.recorder.mark(Phase.BATCH, step, micro_step)
            if run.zero_grad_first and micro_step == 1:
                run.optimizer.zero_grad(set_to_none=run.set_to_none)
            batch = run.make_batch()
            run.recorder.mark(Phase.FORWARD, step, micro_step)
            outputs = forward(run, batch)
            loss = run.loss_of(outputs, batch)
            if run.grad_accum > 1:
                loss = loss / run.grad_accum
            _backward(run, loss, step, micro_step)
        if run.max_grad_norm:
            run.recorder.mark(Phase.CLIP, step, run.traced_micro_steps)
            if run.scaler is not None:
                run.scaler.unscale_(run.optimizer)
            torch.nn.utils.clip_grad_norm_(
                [p for p in run.model.parameters() if p.requires_grad], run.max_grad_norm
            )
        _optimizer_step(run, step)
        if not run.zero_grad_first:
            run.recorder.mark(Phase.ZERO_GRAD, step)
            if run.optimizer is not None:
                run.optimizer.zero_grad(set_to_none=run.set_to_none)
            else:
                run.model.zero_grad(set_to_none=run.set_to_none)
    del outputs, loss


# -- common parts -----------------------------------------------------------------------------------


def forward(run: Run, inputs: Mapping[str, Any]) -> Any:
    """The model's forward in its autocast region, outputs in fp32 if the loop wants them so."""
    dtype = _AUTOCAST_DTYPES.get(run.precision)
    region = torch.autocast(run.device_type, dtype=dtype) if dtype is not None else nullcontext()
    with region:
        outputs = run.model(**inputs)
    return to_fp32(outputs) if run.outputs_to_fp32 and dtype is not None else outputs


def to_fp32(value: Any) -> Any:
    """accelerate's ``convert_to_fp32``: tuples, lists and mappings are walked, caches are not."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_fp32(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_fp32(v) for v in value)
    if isinstance(value, Mapping):
        return type(value)({k: to_fp32(v) for k, v in value.items()})
    return value


def _backward(run: Run, loss: torch.Tensor, step: int, micro_step: int) -> None:
    run.recorder.mark(Phase.BACKWARD, step, micro_step)
    (run.scaler.scale(loss) if run.scaler is not None else loss).backward()
    tag_gradients(run)


def tag_gradients(run: Run) -> None:
    """Say which storages are gradients now."""
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            run.recorder.tag(parameter.grad, Category.GRADIENTS, name.rpartition(".")[0])


def _optimizer_step(run: Run, step: int) -> None:
    if run.optimizer is None:
        return
    run.recorder.mark(Phase.OPTIMIZER, step)
    if run.scaler is not None:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    else:
        run.optimizer.step()
    if step == 1:
        for tensor in _state_tensors(run.optimizer):
            run.recorder.tag(tensor, Category.OPTIMIZER_STATES)


def _state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (v for v in value if isinstance(v, torch.Tensor))
