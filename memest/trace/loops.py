"""The training loops: who holds what, and when it lets go.

Lifetimes are the product here. Each loop keeps exactly the references that the real one keeps:
transformers' ``Trainer`` (``_inner_training_loop``, ``training_step``, ``compute_loss``),
Lightning's (``_AutomaticOptimization``), accelerate's documented loop, and a tutorial's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memest.config.setup import Loop, ZeroGradAt
from memest.events import Category, CueKind, Phase, SeamKind
from memest.trace.loop_model import Batch, TrainingLoop, forward, loss_region, prepare_model
from memest.trace.losses.objective import Objective
from memest.trace.losses.online_dpo import TrainingStep
from memest.trace.model.adapters import weigh_ranks
from memest.trace.optimizers.torch import weights_of
from memest.trace.parallel.context_parallel import collate
from memest.trace.parallel.ulysses_batches import UlyssesBatches

__all__ = ["count_items", "run_steps", "run_updates", "state_tensors", "tag_gradients", "to_items"]


def run_steps(run: TrainingLoop) -> None:
    """Train as many optimizer steps as ``run.micro_steps`` has."""
    {Loop.TRAINER: _trainer, Loop.LIGHTNING: _lightning}.get(run.setup.loop, _script)(run)


def run_updates(run: TrainingLoop) -> None:
    """Only what follows the micro-steps: the gradients are there already."""
    norm: list[torch.Tensor | None] = [None]
    for step in range(1, len(run.micro_steps) + 1):
        run.recorder.seam(SeamKind.UPDATE, step)
        _update(run, step, norm)
        run.recorder.seam(SeamKind.UPDATED, step)
    run.recorder.forget()


# -- transformers' Trainer ------------------------------------------------------------------------


def _trainer(run: TrainingLoop) -> None:
    """``Trainer._run_epoch``: all micro-batches of a step are on the device before it begins."""
    seam = run.recorder.seam
    samples: list[Batch] = []
    total = torch.zeros((), device=run.device)  # _tr_loss
    items = inputs = loss = None
    norm: list[torch.Tensor | None] = [None]
    for step, micro_steps in enumerate(run.micro_steps, start=1):
        seam(SeamKind.STEP, step)
        run.recorder.mark(Phase.BATCH, step)
        # the old list, and the last inputs, stay bound while the new list is filled
        batch_samples = _batch_samples(run, step, micro_steps)
        seam(SeamKind.FETCHED, step)
        samples = batch_samples[0]
        seam(SeamKind.RELEASED, step)
        items = batch_samples[1]
        del batch_samples
        if run.objective is not None and run.setup.distributed.scores_completions:
            _score_completions(run, run.objective, samples[0])
        for micro_step in range(1, micro_steps + 1):
            seam(SeamKind.MICRO_STEP, step, micro_step)
            fetches = run.prefetches and run.ulysses_batches is None
            if micro_step > 1 and (not fetches or run.split is not None):
                run.recorder.mark(Phase.BATCH, step, micro_step)
            if run.ulysses_batches is not None:
                loss = _shared_step(run, run.ulysses_batches, step, micro_step)
            elif run.objective is not None and run.objective.step is not None:
                loss = _own_step(run, run.objective, run.objective.step, step, micro_step)
            else:
                inputs = samples[micro_step - 1] if fetches else run.make_batch()
                loss = _training_step(run, inputs, items, step, micro_step)
            torch.isnan(loss)
            torch.isinf(loss)
            total += loss
        seam(SeamKind.UPDATE, step)
        _update(run, step, norm)
        seam(SeamKind.UPDATED, step)
        run.recorder.mark(Phase.ZERO_GRAD, step)
        run.model.zero_grad(set_to_none=run.set_to_none)
        seam(SeamKind.END, step)
    run.recorder.forget()  # what the function lets go of on return is not part of the run
    del samples, items, inputs, loss, norm


def _batch_samples(run: TrainingLoop, step: int, micro_steps: int) -> tuple[list[Batch], Any]:
    """``get_batch_samples``, since transformers 4.46."""
    if run.ulysses_batches is not None:
        # parts of batches wait in host memory
        run.ulysses_batches.refill(run.make_batch)
    if run.ulysses_batches is not None or not run.prefetches:
        return [], None
    samples = []
    for number in range(1, micro_steps + 1):
        run.recorder.seam(SeamKind.SAMPLE, step, number)
        samples.append(run.make_batch())
    return samples, count_items(run, samples, step)


def count_items(run: TrainingLoop, samples: list[Batch], step: int) -> torch.Tensor | None:
    """``_get_num_items_in_batch``: one bool mask at a time, then a 0-dim number."""
    if not run.counts_items or run.objective is not None or "labels" not in samples[0]:
        return None
    labels = _counted_labels(run, samples)

    def counts() -> Iterator[torch.Tensor]:
        for number, label in enumerate(labels, start=1):
            run.recorder.seam(SeamKind.COUNT, step, number)
            yield label.ne(-100).sum()

    items: Any = sum(counts())
    run.recorder.seam(SeamKind.COUNTED, step)
    return items / 1


def to_items(run: TrainingLoop, samples: list[Batch]) -> torch.Tensor:
    """The same number, where nobody records how it is made."""
    items: Any = sum(label.ne(-100).sum() for label in _counted_labels(run, samples))
    return items / 1


def _counted_labels(run: TrainingLoop, samples: list[Batch]) -> list[torch.Tensor]:
    return [b["labels"][..., 1:] if run.shifts_labels else b["labels"] for b in samples]


def _training_step(
    run: TrainingLoop, inputs: Batch, items: Any, step: int, micro_step: int
) -> torch.Tensor:
    with _split(run, inputs):
        run.recorder.mark(Phase.FORWARD, step, micro_step)
        loss = _compute_loss(run, dict(inputs), items)
        run.recorder.mark(Phase.BACKWARD, step, micro_step)
        if items is None:
            loss = loss / 1  # by the number of micro-steps; no size depends on it
        _accelerator_backward(run, loss)
        return loss.detach()


def _shared_step(
    run: TrainingLoop, ulysses_batches: UlyssesBatches, step: int, micro_step: int
) -> torch.Tensor:
    """``training_step`` where sequences are shared by Ulysses.

    The part of the batch comes from the host and is let go of before backward begins.
    """
    inputs = ulysses_batches.part()
    run.recorder.mark(Phase.FORWARD, step, micro_step)
    loss = _shared_loss(run, ulysses_batches, inputs)
    del inputs
    run.recorder.mark(Phase.BACKWARD, step, micro_step)
    loss = loss / 1  # by the number of micro-steps; no size depends on it
    _accelerator_backward(run, loss)
    return loss.detach()


def _shared_loss(run: TrainingLoop, ulysses_batches: UlyssesBatches, inputs: Batch) -> torch.Tensor:
    """``deepspeed_sp_compute_loss``: ``outputs`` is a local here."""
    inputs["labels"] = inputs["shift_labels"]
    outputs = forward(run, inputs)
    return ulysses_batches.joined_loss(run.loss_of(outputs, inputs), inputs["shift_labels"])


def _split(run: TrainingLoop, inputs: Batch) -> AbstractContextManager[Any]:
    """The Trainer's ``cp_context``, a script's ``maybe_context_parallel``."""
    return nullcontext() if run.split is None else run.split(inputs)


def _compute_loss(run: TrainingLoop, inputs: Batch, items: Any) -> torch.Tensor:
    """``outputs`` is a local here: logits and caches are dead before backward begins."""
    if items is not None:
        inputs = {**inputs, "num_items_in_batch": items}
    with loss_region(run):
        if run.objective is not None:
            assert run.objective.loss is not None
            return run.objective.loss(*_both_models(run, run.objective), inputs)
        outputs = forward(run, inputs)
        loss = run.loss_of(outputs, inputs)
    if items is not None:
        loss *= 1  # average_tokens_across_devices: times the number of processes, in place
    return loss


def _own_step(
    run: TrainingLoop, objective: Objective, own: TrainingStep, step: int, micro_step: int
) -> torch.Tensor:
    """``training_step`` of a trainer that makes its batch and runs the backward itself."""

    def backward(loss: torch.Tensor) -> None:
        run.recorder.mark(Phase.BACKWARD, step, micro_step)
        _accelerator_backward(run, loss)

    inputs = run.make_batch()
    run.recorder.mark(Phase.FORWARD, step, micro_step)
    return own(*_both_models(run, objective), inputs, backward)


def _both_models(
    run: TrainingLoop, objective: Objective
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The model and its reference, as a trainer calls them."""

    def model(**model_inputs: Any) -> Any:
        return forward(run, model_inputs)

    def reference(**model_inputs: Any) -> Any:
        with objective.as_reference():
            return prepare_model(run, objective.reference)(**model_inputs)

    return model, reference


def _score_completions(run: TrainingLoop, objective: Objective, inputs: Batch) -> None:
    """What is asked of completions before the step that learns, of the model and a reference."""
    model = prepare_model(run) if run.setup.scores_own_completions else None
    reference = _both_models(run, objective)[1] if run.setup.has_reference else None
    with objective.recomputing_nothing(), loss_region(run):
        objective.score(model, reference, inputs)


# -- Lightning's Trainer --------------------------------------------------------------------------


def _lightning(run: TrainingLoop) -> None:
    """``_TrainingEpochLoop.advance`` of Lightning 2.6, with automatic optimization.

    Forward, zero_grad and backward are one closure, which the last micro-step of a step hands to
    the optimizer. What ``training_step`` names is gone before backward; gradients of the step
    before are alive until then.
    """
    seam = run.recorder.seam
    batch = closure_loss = result = None
    norm: list[torch.Tensor | None] = [None]
    for step, micro_steps in enumerate(run.micro_steps, start=1):
        seam(SeamKind.STEP, step)
        for micro_step in range(1, micro_steps + 1):
            seam(SeamKind.MICRO_STEP, step, micro_step)
            batch = closure_loss = result = None  # advance has returned
            run.recorder.mark(Phase.BATCH, step, micro_step)
            batch = run.make_batch()
            run.recorder.mark(Phase.FORWARD, step, micro_step)
            # by accumulate_grad_batches, even by 1
            closure_loss = _loss_of_step(run, batch) / 1
            result = closure_loss.detach().clone()
            if micro_step == 1:
                _zero_grad(run)
            run.recorder.mark(Phase.BACKWARD, step, micro_step)
            _backward(run, closure_loss)
        seam(SeamKind.UPDATE, step)
        _update(run, step, norm)
        seam(SeamKind.UPDATED, step)
        seam(SeamKind.END, step)
    run.recorder.forget()  # what the function lets go of on return is not part of the run
    del batch, closure_loss, result


def _loss_of_step(run: TrainingLoop, batch: Batch) -> torch.Tensor:
    """``LightningModule.training_step`` in the region of ``train_step_context``."""
    with loss_region(run):
        outputs = forward(run, batch)
        return run.loss_of(outputs, batch)


# -- plain and Accelerate loops -------------------------------------------------------------------


def _script(run: TrainingLoop) -> None:
    """``outputs = model(**batch); outputs.loss.backward()``: outputs live until rebound."""
    seam = run.recorder.seam
    setup, objective, ulysses = run.setup, run.objective, run.ulysses_batches
    plain = setup.loop is Loop.PLAIN
    outputs = loss = batch = shift_labels = None
    norm: list[torch.Tensor | None] = [None]
    for step, micro_steps in enumerate(run.micro_steps, start=1):
        seam(SeamKind.STEP, step)
        if objective is not None and setup.distributed.scores_completions:
            _score_in_script(run, objective, step)
        for micro_step in range(1, micro_steps + 1):
            seam(SeamKind.MICRO_STEP, step, micro_step)
            if setup.del_outputs:
                outputs = loss = None  # the last line of the iteration before
            run.recorder.mark(Phase.BATCH, step, micro_step)
            if plain and ulysses is None:
                # "for batch in loader" rebinds the name to the next batch on the host;
                # accelerate's loader moves the next batch while the name still holds the last
                batch = None
            if setup.zero_grad_at is ZeroGradAt.BEFORE_FORWARD and micro_step == 1:
                _zero_grad(run)
            if ulysses is not None:
                if micro_step == 1:
                    ulysses.refill(run.make_batch)
                batch = None  # the loader gives the next one in host memory
                batch = ulysses.part()
            else:
                batch = run.make_batch()
            if run.split is not None:
                batch = collate(batch)
            with _split(run, batch):
                run.recorder.mark(Phase.FORWARD, step, micro_step)
                with loss_region(run):
                    if objective is not None:
                        loss, outputs = objective.in_script(*_both_models(run, objective), batch)
                    elif ulysses is None:
                        outputs = forward(run, batch)
                        loss = run.loss_of(outputs, batch)
                    else:
                        outputs = forward(run, batch)
                        shift_labels = batch["shift_labels"]  # a name in the guides' loop
                        loss = ulysses.own_loss(outputs, shift_labels)
                        loss = ulysses.joined_loss(loss, shift_labels)
                if setup.zero_grad_at is ZeroGradAt.BEFORE_BACKWARD and micro_step == 1:
                    _zero_grad(run)
                if plain and setup.grad_accum > 1:
                    loss = loss / 1  # as above
                run.recorder.mark(Phase.BACKWARD, step, micro_step)
                if plain:
                    _backward(run, loss)
                else:
                    _accelerator_backward(run, loss)
        seam(SeamKind.UPDATE, step)
        _update(run, step, norm)
        seam(SeamKind.UPDATED, step)
        weigh_ranks(run.model)
        if setup.zero_grad_at is ZeroGradAt.AFTER_STEP:
            run.recorder.mark(Phase.ZERO_GRAD, step)
            _zero_grad(run)
        seam(SeamKind.END, step)
    run.recorder.forget()  # what the function lets go of on return is not part of the run
    del outputs, loss, batch, shift_labels


def _score_in_script(run: TrainingLoop, objective: Objective, step: int) -> None:
    """A batch of its own, which goes with what was asked of it."""
    run.recorder.mark(Phase.BATCH, step)
    inputs = (objective.make_scored or run.make_batch)()
    run.recorder.mark(Phase.SCORING, step)
    _score_completions(run, objective, inputs)


# -- common parts ---------------------------------------------------------------------------------


def _backward(run: TrainingLoop, loss: torch.Tensor) -> None:
    if run.stepper is not None:
        run.stepper.backward(loss)
        for tensor in state_tensors(run.stepper):
            run.recorder.tag(tensor, Category.OPTIMIZER_STATES)
    else:
        (run.scaler.scale(loss) if run.scaler is not None else loss).backward()
    run.recorder.cue(CueKind.DONE, 0)
    tag_gradients(run)
    if not run.weights:
        run.weights = weights_of(run.model)


def _accelerator_backward(run: TrainingLoop, loss: torch.Tensor) -> None:
    """``Accelerator.backward`` divides by its own number of accumulation steps, even by 1."""
    loss = loss / 1
    _backward(run, loss)


def tag_gradients(run: TrainingLoop) -> None:
    """Say which storages are gradients now."""
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            run.recorder.tag(parameter.grad, Category.GRADIENTS, name.rpartition(".")[0])


def _zero_grad(run: TrainingLoop) -> None:
    # optimizer.zero_grad of a script goes through the same parameters in the same order
    run.model.zero_grad(set_to_none=run.set_to_none)


def _update(run: TrainingLoop, step: int, norm: list[torch.Tensor | None]) -> None:
    """Clipping and the optimizer's step.

    Args:
        run: the run.
        step: number of the step.
        norm: one place for the gradient norm, which the Trainer keeps until the next one.
    """
    if run.optimizer is None:
        return
    trainer, max_norm = run.setup.loop is Loop.TRAINER, run.setup.clip_norm
    if trainer or max_norm:
        run.recorder.mark(Phase.CLIP, step, run.micro_steps[step - 1])
        norm[0] = None
        if run.scaler is not None:
            run.scaler.unscale_(run.optimizer)
        parameters = [p for p in run.model.parameters() if p.requires_grad]
        # ``_clip_grad_norm``, or with ``max_grad_norm=0`` the norm alone, for the Trainer's log
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
        if trainer:
            norm[0] = total
        del parameters, total
    run.recorder.mark(Phase.OPTIMIZER, step)
    if run.scaler is not None:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    elif run.apart:
        _step_apart(run)
    else:
        run.optimizer.step()
    if step == 1:
        for tensor in state_tensors(run.optimizer):
            run.recorder.tag(tensor, Category.OPTIMIZER_STATES)


def _step_apart(run: TrainingLoop) -> None:
    """One parameter after the other, as DeepSpeed's ``_optimizer_step`` has it for its groups."""
    groups = run.optimizer.param_groups
    at = 0
    for group in groups:
        for parameter in group["params"]:
            run.recorder.cue(CueKind.UPDATE, at)
            run.optimizer.param_groups = [{**group, "params": [parameter]}]
            run.optimizer.step()
            at += 1
    run.optimizer.param_groups = groups


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """What an optimizer keeps."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (v for v in value if isinstance(v, torch.Tensor))
            elif hasattr(value, "__dict__"):  # the projectors of GaLore and APOLLO
                yield from (v for v in vars(value).values() if isinstance(v, torch.Tensor))
