"""Liger kernels in a trace: the library's own Python, its kernels launched into nothing.

Liger's operators are autograd functions that allocate with torch and launch Triton kernels on what
they allocated. Their Python is run as it is, so what they save, reuse and allocate is the library's
own doing; launches are left out. Three things are told to it that meta tensors cannot say: that
their device counts as CUDA, what the GPU's properties are, and that there is a Triton.

Source: liger-kernel 0.8, ``ops/`` and ``transformers/monkey_patch.py``; ``apply_liger_kernel`` of
transformers ``integrations/liger.py``, which the Trainer calls for ``use_liger_kernel``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from memest.errors import ConfigError, MissingDependencyError
from memest.hidden.call import GpuTraits
from memest.trace.adapters import base_of
from memest.trace.no_triton import Library, without_triton

__all__ = ["liger_applied"]

_LIGER = Library(
    "liger_kernel",
    "liger_kernel.ops.",
    (('device.type == "cuda"', 'device.type == "meta"'),
     ('device.type != "cuda"', 'device.type != "meta"')),
)  # fmt: skip


def _prepare() -> None:
    utils: Any = importlib.import_module("liger_kernel.utils")
    utils.infer_device = lambda: "cuda"
    # it warns of backends that are not installed; the Triton kernels are its default
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    importlib.import_module("liger_kernel.transformers")


@contextmanager
def liger_applied(model: torch.nn.Module, gpu: GpuTraits) -> Iterator[None]:
    """Apply Liger's kernels to a model as the Trainer does, for the time of a trace.

    Args:
        model: of transformers, on meta. Its own modules stay patched; what Liger replaces in
            transformers is put back.
        gpu: whose properties Liger asks for.

    Raises:
        MissingDependencyError: liger-kernel is not installed.
        ConfigError: Liger has no kernels for this kind of model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingDependencyError(
            "--use-liger-kernel is priced by tracing liger-kernel, which is not installed: pip "
            "install --no-deps liger-kernel"
        )
    properties = types.SimpleNamespace(
        multi_processor_count=gpu.sm_count, major=gpu.capability[0], minor=gpu.capability[1]
    )
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", properties), ("get_device_capability", gpu.capability),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(without_triton(_LIGER, _prepare))
        stack.enter_context(_put_back(model))
        apply = importlib.import_module("liger_kernel.transformers.monkey_patch")
        # apply_liger_kernel of transformers takes what adapters are put around
        model = base_of(model)
        kind = str(getattr(getattr(model, "config", None), "model_type", ""))
        if kind not in apply.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(
                f"--use-liger-kernel: Liger has no kernels for models of type {kind!r}, and the "
                "Trainer would train without them. Leave it out."
            )
        apply._apply_liger_kernel_to_instance(model=model)
        yield


@contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """What Liger replaces in transformers' modules and in torch is as before afterwards."""
    owners = {
        type(part).__module__ for part in model.modules()
        if type(part).__module__.startswith("transformers.")
    }  # fmt: skip
    spaces = [sys.modules[name].__dict__ for name in sorted(owners)]
    classes = {type(part) for part in model.modules() if type(part).__module__ in owners}
    kept = [(space, dict(space)) for space in spaces]
    forwards = [(kind, kind.__dict__.get("forward")) for kind in classes]
    cross_entropy = torch.nn.functional.cross_entropy
    try:
        yield
    finally:
        torch.nn.functional.cross_entropy = cross_entropy
        for space, values in kept:
            space.update(values)
        for kind, forward in forwards:
            if forward is not None and kind.__dict__.get("forward") is not forward:
                kind.forward = forward
