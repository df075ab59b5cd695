"""What Python code does on a GPU and would not do on meta tensors, for the time of a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memest.config.setup import Attention
from memest.trace.cuda.flash import provide_flash_attention
from memest.trace.cuda.known_values import attach, recipe_of
from memest.trace.cuda.mamba import provide_fused_scans
from memest.trace.cuda.patching import Change, patch_attributes
from memest.trace.isolation import seed_numpy
from memest.trace.recorder import Recorder
from memest.workspaces.gpu_limits import check_flash_gpu
from memest.workspaces.operator_call import GpuTraits

__all__ = ["transformers_on_meta"]

_tensor = torch.tensor
_composite_weight_norm = torch._weight_norm
_FALLS_BACK = "is falling back to its reference PyTorch implementation"


@contextmanager
def transformers_on_meta(
    recorder: Recorder, model: torch.nn.Module, gpu: GpuTraits, *, compiled: bool = False
) -> Iterator[None]:
    """Autocast regions, FlashAttention and random masks as on a GPU; absent kernels are noted.

    Raises:
        ConfigError: the model's attention does not run on this GPU.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention == Attention.FLASH_ATTENTION_2:
        check_flash_gpu(gpu.capability)
    changes = [*_autocast_questions(), (torch, "_weight_norm", _weight_norm)]
    if not compiled:  # Dynamo keeps them itself, where it knows the function that makes them
        changes += _constants()
    with ExitStack() as stack:
        stack.enter_context(patch_attributes(*changes))
        if "transformers" not in sys.modules:
            # a plain module needs no more
            yield
            return
        stack.enter_context(provide_flash_attention())
        stack.enter_context(provide_fused_scans(recorder))
        if "numpy" in sys.modules:
            seed_numpy()
        stack.enter_context(_missing_kernels(recorder))
        yield


def _autocast_questions() -> Iterator[Change]:
    """Models ask about autocast on "the device of my input", which stands for cuda here.

    ``maybe_autocast`` of transformers 5 even skips its region on meta: rotary embeddings and
    routers would be cast where CUDA computes them in fp32.
    """
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, _for_cuda(getattr(torch, name))
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(("transformers.", "transformers_modules.")):
            continue
        region = vars(module).get("maybe_autocast") if module is not None else None
        if region is not None:
            yield module, "maybe_autocast", _for_cuda(region)


def _for_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == "meta":
            args = ("cuda", *args[1:])
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cuda"
        return function(*args, **kwargs)

    return ask


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """``ATen/native/WeightNorm.cpp``: one fused kernel on CUDA, for the first or last dimension."""
    half = torch.float16 in (v.dtype, g.dtype)
    if v.device.type == "meta" and not half and dim in (0, v.dim() - 1):
        return torch.ops.aten._weight_norm_interface(v, g, dim)[0]
    return _composite_weight_norm(v, g, dim)


def _constants() -> Iterator[Change]:
    """``torch.tensor([2, 3], device=meta)`` drops its values out of sight: keep them."""
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
        yield owner, name, _remember_values(getattr(owner, name))


def _remember_values(function: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        data = args[-1] if args else kwargs.get("data")
        if isinstance(data, (list, tuple)):
            # numbers that live on the device are fetched one by one, as on a GPU
            data = _plain(data)
            if args:
                args = (*args[:-1], data)
            else:
                kwargs["data"] = data
        out = function(*args, **kwargs)
        has_value = isinstance(data, torch.Tensor) or recipe_of(out) is not None
        if out.device.type == "meta" and not has_value:
            attach(out, _tensor(data, dtype=out.dtype))
        return out

    return make


def _plain(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return type(data)(_plain(item) for item in data)
    if isinstance(data, torch.Tensor) and data.device.type == "meta" and data.dim() == 0:
        return data.item()
    return data


@contextmanager
def _missing_kernels(recorder: Recorder) -> Iterator[None]:
    """Say what transformers says once: when a fused kernel's package is absent."""
    hub = sys.modules.get("transformers.integrations.hub_kernels")
    if hub is None:
        yield
        return

    def warn(message: str, *_args: Any, **_kwargs: Any) -> None:
        if _FALLS_BACK in message:
            function, _, rest = message.partition("` ")
            package = rest.partition("`")[2].partition("`")[0]
            recorder.note(
                f"{function.strip('`')} runs in plain PyTorch, as without {package}: with that "
                "package installed the run needs less memory"
            )

    with patch_attributes((hub.logger, "warning_once", warn)):
        yield
