"""``generate`` of transformers on meta: its own loop and caches, its first steps.

The library's own code runs; the end alone is decided here, because whether a sequence is finished
is a matter of values. Every step is a span of the trace: the prompt, its first token, and the first
decoding steps, of which later ones are copies with a longer cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from memest.config.generation import Generation
from memest.config.setup import Precision, Setup
from memest.errors import ConfigError
from memest.events import Phase, SeamKind, Trace
from memest.trace.loop_model import TrainingLoop, in_autocast, loss_region
from memest.trace.loops import tag_gradients
from memest.trace.losses.objective import recomputing_nothing, without_dropout
from memest.trace.model.adapters import base_of
from memest.trace.model.loading import load
from memest.trace.model.quantization import Loading
from memest.trace.recorder import Recorder
from memest.trace.training import make_run, start_recorder
from memest.workspaces.operator_call import GpuTraits

__all__ = ["TRACED_STEPS", "options_of", "trace_generation"]

TRACED_STEPS = 6
"""The prompt, the token after it, and decoding steps, of which three must be alike."""
_LABELS = ("labels", "decoder_input_ids", "decoder_attention_mask")


class _Enough(Exception):  # noqa: N818 - no error
    """The steps that are wanted have been traced."""


def trace_generation(
    model: torch.nn.Module,
    setup: Setup,
    generation: Generation,
    *,
    make_batch: Callable[[], dict[str, torch.Tensor]],
    gpu: GpuTraits,
    operators: str = "cuda",
    loading: Loading | None = None,
) -> Trace:
    """Trace the first steps of a ``generate``.

    Args:
        model: on meta; in evaluation mode while it is traced, unless a training step has it write.
        setup: its batch is that of the generation, its ``seq_len`` the length of the prompt.
        generation: how much and how.
        make_batch: makes one batch on meta; labels are left out of it.
        gpu: decides operators and versions.
        operators: ``cuda``, or ``cpu`` for what this machine's CPU would run.
        loading: how the weights come to the device.

    Returns:
        The model's load, then the steps, each behind a seam.

    Raises:
        ConfigError: the model cannot generate.
        TraceError: it does something a trace cannot follow.
    """
    if not _can_generate(model):
        raise ConfigError(
            f"{type(model).__name__} does not generate text: drop --generate and "
            "--predict-with-generate, or choose --task causal-lm or seq2seq-lm."
        )
    with ExitStack() as stack:
        recorder = start_recorder(stack, model, setup, gpu, operators)
        recorder.mark(Phase.LOAD, 0)
        load(model, recorder, loading)
        run = make_run(model, setup, recorder, make_batch, _no_loss, gpu)
        if generation.in_step:
            stack.enter_context(recomputing_nothing(model))
            stack.enter_context(without_dropout(model))
        else:
            model.eval()
            stack.callback(model.train)
        stack.enter_context(torch.no_grad())
        if setup.precision is not Precision.FP32:
            stack.enter_context(loss_region(run))
            # accelerate puts its forward into the model itself; adapters generate by the one inside
            if run.outputs_to_fp32 and base_of(model) is model:
                forward = in_autocast(run, model.forward)
                stack.enter_context(mock.patch.object(model, "forward", forward))
        stack.callback(model.zero_grad)
        _generate(run, generation, recorder)
    trace = recorder.trace
    trace.notes.extend(recorder.notes)
    return trace


def options_of(generation: Generation) -> dict[str, Any]:
    """What ``generate`` is given; the end is decided by who calls it."""
    # buffers of a search have the full length
    options: dict[str, Any] = {
        "max_new_tokens": max(generation.new_tokens, TRACED_STEPS - 1),
        "do_sample": False,
        "num_beams": generation.num_beams,
        "use_cache": generation.caches,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if generation.draws:
        temperature = 0.9 if generation.in_step else 1.0  # no size depends on which other than 1
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if generation.cache == "static":
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    return options


def _no_loss(_outputs: Any, _batch: Any) -> torch.Tensor:
    raise AssertionError("a generation has no loss")


def _can_generate(model: Any) -> bool:
    can_generate = getattr(model, "can_generate", None) or getattr(
        getattr(model, "base_model", None), "can_generate", None
    )
    return bool(can_generate is not None and can_generate())


def _generate(run: TrainingLoop, generation: Generation, recorder: Recorder) -> None:
    from transformers.generation.utils import GenerationMixin

    model, step = run.model, 0

    def begin() -> None:
        nonlocal step
        step += 1
        recorder.seam(SeamKind.EVALUATED, 0, step)
        recorder.mark(Phase.GENERATION, 0, step)

    def has_unfinished_sequences(_self: Any, *_: Any, **__: Any) -> bool:
        if step >= TRACED_STEPS:
            recorder.seam(SeamKind.END, 0)
            recorder.forget()
            raise _Enough
        begin()
        return True

    begin()
    if generation.beside_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        tag_gradients(run)
    inputs = {name: t for name, t in run.make_batch().items() if name not in _LABELS}
    options = options_of(generation)
    owner_class = (
        type(model) if hasattr(type(model), "_has_unfinished_sequences") else GenerationMixin
    )
    with mock.patch.object(owner_class, "_has_unfinished_sequences", has_unfinished_sequences):
        try:
            model.generate(**inputs, **options)
        except _Enough:
            return
    raise AssertionError("generate ended by itself")
