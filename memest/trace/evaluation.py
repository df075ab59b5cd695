"""The Trainer's evaluation: batches without gradients, and predictions that pile up on the GPU.

``Trainer.evaluation_loop`` and ``prediction_step`` of transformers, reference by reference: the
last batch, its logits and labels stay bound until the next ones are there, and every container is
the library's own, which concatenates what it has with what is new.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from memest.config.setup import Setup
from memest.events import Phase, SeamKind, Trace
from memest.trace.cuda.compiled import compile_model
from memest.trace.loop_model import TrainingLoop, forward, loss_region
from memest.trace.loops import count_items
from memest.trace.model.adapters import base_of
from memest.trace.model.loading import load
from memest.trace.model.quantization import Loading
from memest.trace.optimizers.torch import weights_of
from memest.trace.parallel.collectives import Gather
from memest.trace.parallel.context_parallel import Split
from memest.trace.training import make_run, start_recorder
from memest.workspaces.operator_call import GpuTraits

__all__ = ["TRACED_BATCHES", "trace_evaluation"]

TRACED_BATCHES = 4
"""Two more after the second, which is the first to concatenate: between them shows what grows."""


def trace_evaluation(
    model: torch.nn.Module,
    setup: Setup,
    *,
    make_batch: Callable[[], dict[str, torch.Tensor]],
    loss_of: Callable[[Any, Any], torch.Tensor],
    gpu: GpuTraits,
    operators: str = "cuda",
    loading: Loading | None = None,
    call: Any = None,
    ranks: int | None = None,
    split: Split | None = None,
) -> Trace:
    """Trace the first batches of an evaluation.

    Args:
        model: on meta; in evaluation mode while it is traced, and in training mode afterwards.
        setup: its batch is that of the evaluation.
        make_batch: makes one batch on meta.
        loss_of: takes the loss out of the outputs.
        gpu: decides operators and versions.
        operators: ``cuda``, or ``cpu`` for what this machine's CPU would run.
        loading: how the weights come to the device; None = ``model.to(device)``.
        call: how the model is called with a batch; None = ``model(**batch)``.
        ranks: processes that gather what they predict; None = there are no others.
        split: entered around the forward where a sequence is shared by ring attention.

    Returns:
        The model's load, then :data:`TRACED_BATCHES` batches, each behind a seam.

    Raises:
        TraceError: the model does something a trace cannot follow.
    """
    with ExitStack() as stack:
        recorder = start_recorder(stack, model, setup, gpu, operators)
        recorder.mark(Phase.LOAD, 0)
        load(model, recorder, loading)
        run = make_run(model, setup, recorder, make_batch, loss_of, gpu)
        model.eval()
        stack.callback(model.train)
        run.call, run.split = call, split
        # the Trainer evaluates the model itself, not the DDP around it
        run.clones_outputs = False
        stack.enter_context(compile_model(run, setup, gpu, training=False))
        _evaluate(run, setup, Gather(ranks))
    trace = recorder.trace
    if setup.partitions_parameters:
        trace.weights = weights_of(model)  # what cues of ZeRO-3 name
    trace.notes.extend(recorder.notes)
    return trace


def _evaluate(run: TrainingLoop, setup: Setup, gather: Gather) -> None:
    from transformers.trainer_pt_utils import EvalLoopContainer

    keeps_predictions = setup.eval_samples is not None
    all_losses, all_preds, all_labels = (EvalLoopContainer(True, -100) for _ in range(3))
    inputs = losses = logits = labels = None
    for number in range(1, TRACED_BATCHES + 1):
        run.recorder.seam(SeamKind.EVALUATED, 0, number)
        run.recorder.mark(Phase.EVALUATION, 0, number)
        # accelerate's loader moves the next batch while the name still holds the last
        inputs = run.make_batch()
        # with Liger, and where the loss alone is kept, the logits are not even made
        model_inputs = (
            {**inputs, "skip_logits": True}
            if setup.use_liger_kernel and not keeps_predictions
            else inputs
        )
        losses, logits, labels = _prediction_step(run, model_inputs, keeps_predictions)
        del model_inputs
        if losses is not None:
            losses = gather(losses.repeat(setup.batch))
            all_losses.add(losses)
        gather.pad(labels)
        gather.pad(logits)
        if logits is not None:
            logits = gather(logits)
            all_preds.add(logits)
        if labels is not None:
            labels = gather(labels)
            all_labels.add(labels)
    run.recorder.seam(SeamKind.END, 0)
    run.recorder.forget()
    del inputs, losses, logits, labels


def _prediction_step(
    run: TrainingLoop, inputs: Any, keeps_predictions: bool
) -> tuple[Any, Any, Any]:
    from transformers.trainer_pt_utils import nested_detach
    from transformers.utils.generic import can_return_loss, find_labels

    # inside peft's wrapper, whose own forward may take anything
    kind = type(base_of(run.model))
    names = find_labels(kind)
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    config = getattr(run.model, "config", None)
    # where a configuration names none, the cache alone, which transformers 5.24 calls anew
    cache = ["past_key_values", "cache"]
    ignored_keys = list(getattr(config, "keys_to_ignore_at_inference", cache))
    labels = None
    if has_labels:
        labels = nested_detach(tuple(inputs.get(name) for name in names))
        labels = labels[0] if len(labels) == 1 else labels
    loss = None
    with torch.no_grad():
        if has_labels or (not names and can_return_loss(kind)):
            # what is put into it for ranks that share a sequence goes on return
            inputs = dict(inputs)
            loss, outputs = _loss(run, inputs)
            ignored_keys.append("loss")
        else:
            with loss_region(run):
                outputs = forward(run, inputs)
        if isinstance(outputs, dict):
            logits: Any = tuple(v for k, v in outputs.items() if k not in ignored_keys)
        else:
            logits = outputs[1:] if loss is not None else outputs
    if not keeps_predictions:
        return loss, None, None
    logits = nested_detach(logits)
    return loss, logits[0] if len(logits) == 1 else logits, labels


def _loss(run: TrainingLoop, inputs: Any) -> tuple[torch.Tensor, Any]:
    # counted before ``context_parallel`` cuts the batch in place
    items = count_items(run, [inputs], 0)
    with loss_region(run), nullcontext() if run.split is None else run.split(inputs):
        if items is not None:
            inputs = {**inputs, "num_items_in_batch": items}
        outputs = forward(run, inputs)
        loss = run.loss_of(outputs, inputs)
    if items is not None:
        loss *= 1  # average_tokens_across_devices, as in training
    return loss.detach().mean(), outputs
