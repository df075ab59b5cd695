"""What a training loop has, and how it calls its model.

Autocast, outputs in float32 and DDP's copies lie around a forward: a script puts its own region
around forward and loss, accelerate's ``prepare_model`` around the forward alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memest.config.setup import Loop, Precision, Setup
from memest.events import Weight
from memest.trace.losses.objective import Objective
from memest.trace.optimizers.in_backward import Stepper
from memest.trace.parallel.context_parallel import Split
from memest.trace.parallel.ulysses_batches import UlyssesBatches
from memest.trace.recorder import Recorder

__all__ = [
    "Batch",
    "TrainingLoop",
    "forward",
    "in_autocast",
    "loss_region",
    "prepare_model",
]

Batch = dict[str, torch.Tensor]
_AUTOCAST_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """What a loop needs.

    Attributes:
        model: the model on its device, in training mode.
        optimizer: None for forward and backward only, and where the update is traced apart.
        make_batch: makes the tensors of one micro-batch on the device.
        loss_of: takes the loss out of the model's outputs (and the batch).
        recorder: told of the phases.
        setup: the run.
        micro_steps: how many micro-steps each step has.
        set_to_none: what zero_grad does.
        scaler: gradient scaler, fp16 only.
        outputs_to_fp32: accelerate runs the forward in its region and returns fp32 outputs
            (``convert_outputs_to_fp32``).
        counts_items: the model takes ``num_items_in_batch`` (its forward accepts keyword
            arguments), so the Trainer counts the labels of all micro-batches first.
        shifts_labels: the model's loss is the causal one, which shifts the labels.
        prefetches: the Trainer moves a step's micro-batches first (since transformers 4.46).
        stepper: the optimizer where it steps in backward; ``optimizer`` is None then.
        clones_outputs: DDP copies the model's outputs, to find parameters that were not used.
        call: how the model is called with a batch; None = ``model(**batch)``.
        apart: parameters are updated one after the other, as DeepSpeed updates its groups.
        weights: the parameters, noted when the first backward has given them gradients.
        split: entered around forward and backward where a sequence is shared: cuts a batch.
        objective: what the Trainer's ``compute_loss`` does in place of one forward.
        ulysses_batches: gives parts of batches and joins losses where Ulysses shares a sequence.
        compiled_model: the model as ``torch.compile`` made it; None where it runs eagerly.
    """

    model: Any
    optimizer: Any
    make_batch: Callable[[], Batch]
    loss_of: Callable[[Any, Batch], torch.Tensor]
    recorder: Recorder
    setup: Setup
    micro_steps: tuple[int, ...]
    set_to_none: bool
    scaler: Any = None
    outputs_to_fp32: bool = False
    counts_items: bool = False
    shifts_labels: bool = False
    prefetches: bool = True
    stepper: Stepper | None = None
    clones_outputs: bool = False
    call: Callable[[Any, Batch], Any] | None = None
    apart: bool = False
    weights: tuple[Weight, ...] = ()
    compiled_model: Any = None
    split: Split | None = None
    ulysses_batches: UlyssesBatches | None = None
    objective: Objective | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


def forward(run: TrainingLoop, inputs: Mapping[str, Any]) -> Any:
    """The model's forward, and what DDP makes of the outputs."""
    outputs = (prepare_model(run) if run.compiled_model is None else run.compiled_model)(**inputs)
    return _clone_outputs(outputs) if run.clones_outputs else outputs


def _clone_outputs(outputs: Any) -> Any:
    """``DistributedDataParallel._post_forward``: every output goes through ``_DDPSink``.

    All are copied; of those without a gradient the copy is dropped again.
    """
    flat, spec = tree_flatten(outputs)
    copies = _Sink.apply(*flat)
    new_outputs = [
        value if isinstance(value, torch.Tensor) and value.grad_fn is None else copy
        for value, copy in zip(flat, copies, strict=True)
    ]
    del flat, copies
    return tree_unflatten(new_outputs, spec)


class _Sink(torch.autograd.Function):
    """Copies what goes forward, passes on what comes back."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients


def prepare_model(run: TrainingLoop, another: torch.nn.Module | None = None) -> Any:
    """What ``Accelerator.prepare`` makes of the model, and compiles last of all.

    Args:
        run: the loop.
        another: a model beside it.
    """
    trained = run.model if another is None else another

    def call_model(**inputs: Any) -> Any:
        return trained(**inputs) if run.call is None else run.call(trained, dict(inputs))

    if not run.outputs_to_fp32 or run.setup.precision is Precision.FP32:
        return trained if run.call is None else call_model
    return in_autocast(run, call_model)


def in_autocast(run: TrainingLoop, forward: Callable[..., Any]) -> Callable[..., Any]:
    """What ``prepare_model`` of accelerate makes of a forward: autocast, and outputs in float32.

    Args:
        run: the loop.
        forward: of the model.
    """

    @functools.wraps(forward)
    def call(*args: Any, **inputs: Any) -> Any:
        with _autocast(run):
            outputs = forward(*args, **inputs)
        return to_fp32(outputs)

    return call


def to_fp32(value: Any) -> Any:
    """``convert_to_fp32`` of accelerate: tuples, lists and mappings are walked, caches are not."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_fp32(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_fp32(v) for v in value)
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({k: to_fp32(v) for k, v in value.items()})
    return value


def loss_region(run: TrainingLoop) -> AbstractContextManager[Any]:
    """A script's own autocast region covers forward and loss; accelerate's only the forward."""
    return nullcontext() if run.outputs_to_fp32 else _autocast(run)


def _autocast(run: TrainingLoop) -> AbstractContextManager[Any]:
    dtype = _AUTOCAST_DTYPES.get(run.setup.precision)
    if dtype is None:
        return nullcontext()
    # Lightning's plugin switches the cache off (MixedPrecision.autocast_context_manager)
    caches = not run.setup.distributed.flattens and run.setup.loop is not Loop.LIGHTNING
    return torch.autocast("cuda", dtype=dtype, cache_enabled=caches)
