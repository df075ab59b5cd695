"""Cues: the places of a step at which DDP, FSDP and ZeRO have their hooks.

A wrapper does its work when a module is entered or left, when autograd gets to a module and leaves
it again, and when a gradient is there. The recorder knows the modules; here are the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memest.events import CueKind, Landmarks
from memest.trace.model.adapters import prefix_of
from memest.trace.recorder import Recorder

__all__ = ["OWN_UNITS", "follow_weights", "landmarks_of"]

OWN_UNITS = "_memest_units"
"""Where a model that the library shards when it loads it says how."""


@contextmanager
def follow_weights(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Note where the parameters are, and when their gradients come.

    Hooks on a leaf neither hold its gradient nor keep autograd from handing it over as it is
    (``AccumulateGrad::accumulateGrad`` counts hooks of the node only, and these are the tensor's).
    """
    handles: list[Any] = []
    for number, (_, parameter) in enumerate(model.named_parameters()):
        recorder.cue(CueKind.PLACED, number, parameter)
        if parameter.requires_grad:
            handles.append(parameter.register_hook(_gradient_hook(recorder, number)))
            handles.append(
                parameter.register_post_accumulate_grad_hook(_ready_hook(recorder, number))
            )
    embeddings = _module_of(model, "get_input_embeddings")
    if embeddings is not None:
        path = next((n for n, m in model.named_modules() if m is embeddings), "")
        handles.append(embeddings.register_forward_hook(_leaf_hook(recorder, path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaf_hook(recorder: Recorder, path: str) -> Any:
    """Frozen embeddings whose output was told to require gradients: autograd comes to them too.

    No operator shows it (``enable_input_require_grads``); a wrapper has a hook on that output.
    """

    def cue_backward(gradient: torch.Tensor) -> None:
        recorder.cue(CueKind.BACKWARD, recorder.module_number(path))

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and output.is_leaf:
            output.register_hook(cue_backward)

    return hook


def _gradient_hook(recorder: Recorder, number: int) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        recorder.cue(CueKind.GRADIENT, number, gradient)

    return hook


def _ready_hook(recorder: Recorder, number: int) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        recorder.cue(CueKind.READY, number, parameter.grad)

    return hook


def landmarks_of(model: torch.nn.Module) -> Landmarks:
    """What wrap policies ask of a model.

    Source: ``fsdp2_prepare_model`` and ``_find_final_norm`` of accelerate 1.15; the latter takes
    the last direct child of the base model whose class has "Norm" in its name. Paths are those of
    the trace, without what adapters put before them.
    """
    outer = prefix_of(model)
    own = {name: name.removeprefix(outer) for name, _ in model.named_modules()}
    names = {id(module): own[name] for name, module in model.named_modules()}
    class_names = {own[name]: type(module).__name__ for name, module in model.named_modules()}
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    norms = [
        child
        for _, child in (base.named_children() if isinstance(base, torch.nn.Module) else ())
        if "Norm" in type(child).__name__
    ]
    head = names.get(id(_module_of(model, "get_output_embeddings")))
    ties = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return Landmarks(
        kinds=class_names,
        blocks=tuple(sorted(getattr(model, "_no_split_modules", None) or ())),
        embeddings=names.get(id(_module_of(model, "get_input_embeddings"))),
        head=head,
        norm=names.get(id(norms[-1])) if norms else None,
        shared_paths=_shared_paths(model),
        units=getattr(model, OWN_UNITS, ()),
        ties=head is None and ties is True,
    )


def _shared_paths(model: torch.nn.Module) -> dict[str, str]:
    """Other paths of parameters that several modules have, each with the first one."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    outer = prefix_of(model)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = path.removeprefix(outer)
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            out[name] = first_name
    return out


def _module_of(model: torch.nn.Module, name: str) -> Any:
    """What a model answers; many have no such thing, and some say so by an error."""
    try:
        module = getattr(model, name, lambda: None)()
    except (AttributeError, NotImplementedError, KeyError, TypeError):
        return None
    return module if isinstance(module, torch.nn.Module) else None
