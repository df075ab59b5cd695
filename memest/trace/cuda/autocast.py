"""CUDA's autocast on meta tensors: PyTorch's own dispatch keys, with kernels that know meta.

``torch.autocast("cuda")`` works by unmasking the dispatch key AutocastCUDA, which only CUDA
tensors carry. While a step is traced, that key is added to every dispatch, and its kernels are
replaced by the ones below, which apply the same published policies to meta tensors. Regions,
nesting, ``enabled=False`` blocks and the re-entry inside activation checkpointing are then
PyTorch's own code; only the casts are ours.

Sources: ``ATen/autocast_mode.h`` of torch 2.13 (lists and ``cached_cast``); the lists are checked
against ``_dispatch_get_registrations_for_dispatch_key("AutocastCUDA")`` when they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memest.events import Category
from memest.trace.cuda.patching import patch_attributes, register_kernels
from memest.trace.recorder import Recorder

__all__ = ["CUDA", "Lists", "autocast_on_meta"]

_KEY = torch._C.DispatchKey.AutocastCUDA


@dataclass(frozen=True, slots=True)
class Lists:
    """Which operators autocast treats, and how; what no list names is cast to fp32.

    Attributes:
        key: the dispatch key that PyTorch registers these operators under.
        lower: cast to the lower precision.
        optional_dtype: told to compute in fp32 by their ``dtype`` argument.
        append_dtype: the same, through the overload that has such an argument.
        promote: cast to the widest dtype of the arguments.
        banned: refused.
        fp32_since: versions of torch in which operators joined the fp32 list.
        fp32_before: versions of torch from which on operators are no longer on it.
    """

    key: str
    lower: frozenset[str]
    optional_dtype: frozenset[str] = frozenset()
    append_dtype: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()
    fp32_since: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    fp32_before: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def registered_operators(self) -> list[str]:
        """The operators PyTorch itself registers, without their namespace.

        Libraries register theirs under the same key as soon as they are imported: torchvision six.
        """
        names = torch._C._dispatch_get_registrations_for_dispatch_key(self.key)
        return [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


CUDA = Lists(
    "AutocastCUDA",
    lower=frozenset(
        """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
        cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
        addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
        _scaled_dot_product_flash_attention scaled_dot_product_attention""".split()
    ),
    optional_dtype=frozenset(
        """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
    ),
    append_dtype=frozenset(("norm.Scalar", "norm.ScalarOpt_dim")),
    promote=frozenset(
        """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
        scatter_add""".split()
    ),
    banned=frozenset(("binary_cross_entropy",)),
    # rms_norm joined the list between torch 2.11 and 2.13
    fp32_since={"rms_norm": (2, 12)},
    # gelu left it in 1.10 (pytorch PR 59639): until then its input was cast to fp32 and saved so
    fp32_before={"gelu": (1, 10)},
)


@contextmanager
def autocast_on_meta(
    recorder: Recorder, torch_version: tuple[int, int], lists: Lists = CUDA
) -> Iterator[None]:
    """Make ``torch.autocast("cuda", …)`` cast meta tensors as CUDA's autocast casts CUDA tensors.

    Args:
        recorder: told which copies are autocast's.
        torch_version: (major, minor) whose lists apply.
        lists: CUDA's, or the CPU's for proofs.
    """
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    caster = _Caster(recorder, cache, lists)
    original_clear = torch.clear_autocast_cache
    original_init = torch.autocast.__init__

    def clear() -> None:
        cache.clear()
        original_clear()

    @functools.wraps(original_init)  # Dynamo asks for the signature
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # models ask for autocast on "the device of my input"
        original_init(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    changes = (
        (torch, "clear_autocast_cache", clear),
        (torch.autocast, "__init__", init),
        ("torch.cuda.amp.common", "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        # checkpointing enters autocast again for the device of its inputs (no mock, which would
        # keep the arguments of its calls, here the inputs, alive)
        ("torch.utils.checkpoint", "_infer_device_type", lambda *_: "cuda"),
    )
    kernels = _kernels(caster, torch_version)
    try:
        with (
            register_kernels(kernels, "AutocastCUDA"),
            patch_attributes(*changes),
            torch._C._IncludeDispatchKeyGuard(_KEY),
        ):
            yield
    finally:
        cache.clear()


def _kernels(caster: _Caster, torch_version: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    lists = caster.lists
    own = lists.registered_operators()
    kernels = {}
    for name in {*own, *CUDA.registered_operators()}:
        packet, _, overload = name.partition(".")
        if name in own and torch_version >= lists.fp32_since.get(name, (0, 0)):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernels[name] = caster.kernel(name, op)
        else:
            kernels[name] = torch.library.fallthrough_kernel
    for name, until in lists.fp32_before.items():
        if torch_version < until:
            kernels[name] = caster.kernel(name, getattr(torch.ops.aten, name).default)
    return kernels


class _Caster:
    """Makes the kernels; one for the time of a trace."""

    def __init__(
        self,
        recorder: Recorder,
        cache: dict[int, tuple[torch.Tensor, torch.Tensor]],
        lists: Lists,
    ) -> None:
        self.lists = lists
        self._recorder = recorder
        self._cache = cache
        self._keys = torch._C.DispatchKeySet(_KEY)

    def kernel(self, name: str, op: Any) -> Callable[..., Any]:
        """The autocast kernel of one overload."""
        lists, keys = self.lists, self._keys
        run: Callable[..., Any] = functools.partial(self._casting, _float32)
        for names, treatment in (
            (lists.lower, functools.partial(self._casting, _low_precision)),
            (lists.optional_dtype, _with_dtype),
            (lists.append_dtype, _append_dtype),
            (lists.promote, functools.partial(self._casting, _widest)),
            (lists.banned, _refuse),
        ):
            if name in names:
                run = treatment

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return run(op, args, kwargs)

        return kernel

    def _casting(
        self, dtype_of: Callable[[Any], torch.dtype], op: Any, args: Any, kwargs: Any
    ) -> Any:
        dtype = dtype_of((*args, *kwargs.values()))
        # compilers evaluate C++ arguments from the last to the first: weights come first
        kwargs = {k: self._cast(v, dtype) for k, v in reversed(kwargs.items())}
        cast_args = [self._cast(a, dtype) for a in reversed(args)]
        out = op(*reversed(cast_args), **kwargs)
        _drop_lists(cast_args)
        return out

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``cached_cast``: fp32 leaves that train are cast once a region."""
        if isinstance(value, torch.Tensor):
            if value.dtype == dtype or not _eligible(value):
                return value
            if not (value.is_leaf and value.dtype == torch.float32):
                return value.to(dtype)
            cacheable = (
                value.requires_grad
                and not value._is_view()
                and dtype == torch.get_autocast_dtype("cuda")
                and torch.is_autocast_cache_enabled()
            )
            if cacheable and (hit := self._cache.get(id(value))) is not None:
                return hit[1]
            copy = value.to(dtype)
            if isinstance(value, torch.nn.Parameter):
                self._recorder.tag(copy, Category.AUTOCAST_COPIES)
            if cacheable:
                self._cache[id(value)] = (value, copy)
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast(item, dtype) for item in value)
        return value


def _float32(_: Any) -> torch.dtype:
    return torch.float32


def _low_precision(_: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _widest(values: Any) -> torch.dtype:
    """The widest dtype of what an operator is given."""
    if any(v.dtype == torch.float32 for v in _flat(values) if _eligible(v)):
        return torch.float32
    return torch.get_autocast_dtype("cuda")


def _with_dtype(op: Any, args: Any, kwargs: Any) -> Any:
    """Told to compute in fp32 by the argument that the operator has for it."""
    arguments = op._schema.arguments
    position = [a.name for a in arguments].index("dtype")
    dtype = args[position] if len(args) > position else kwargs.get("dtype")
    if dtype is None and _eligible(args[0]):
        args = args[:position]
        if arguments[position].kwarg_only or len(args) != position:
            kwargs["dtype"] = torch.float32
        else:
            args = (*args, torch.float32)
    return op(*args, **kwargs)


def _append_dtype(op: Any, args: Any, kwargs: Any) -> Any:
    """``norm``, told so through the overload that has such an argument."""
    x, p, *rest = args if len(args) > 1 else (args[0], kwargs.pop("p", 2))
    if not _eligible(x):
        return op(x, p, *rest, **kwargs)
    if not rest and not kwargs:
        return torch.ops.aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float32)
    dim = rest[0] if rest else kwargs["dim"]
    keepdim = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)


def _refuse(op: Any, args: Any, kwargs: Any) -> Any:
    name = op._schema.name.removeprefix("aten::")
    raise RuntimeError(
        f"torch.nn.functional.{name} is unsafe to autocast, and CUDA's autocast refuses "
        "it: use binary_cross_entropy_with_logits"
    )


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type != "cpu"
    )


def _drop_lists(values: list[Any]) -> None:
    """Let go of the casts in lists from the first to the last, as a C++ vector does."""
    for value in values:
        if isinstance(value, list):
            value.reverse()
            value.clear()  # Python drops the last one first


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
