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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from memest.events import Category
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

    def registered(self) -> list[str]:
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
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
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
    library = torch.library.Library("aten", "IMPL")
    original_clear = torch.clear_autocast_cache
    original_init = torch.autocast.__init__

    def clear() -> None:
        cache.clear()
        original_clear()

    @functools.wraps(original_init)  # Dynamo asks for the signature
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # models ask for autocast on "the device of my input"
        original_init(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    try:
        with warnings.catch_warnings():
            # replacing kernels is the purpose here
            warnings.simplefilter("ignore", UserWarning)
            _install(library, caster, torch_version)
        with (
            mock.patch.object(torch, "clear_autocast_cache", clear),
            mock.patch.object(torch.autocast, "__init__", init),
            mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
            mock.patch("torch.cuda.is_bf16_supported", return_value=True),
            # checkpointing enters autocast again for the device of its inputs (a function, not a
            # mock's return_value: mocks keep the arguments of their calls, here the inputs, alive)
            mock.patch("torch.utils.checkpoint._infer_device_type", lambda *_: "cuda"),  # noqa: PT008
            torch._C._IncludeDispatchKeyGuard(_KEY),
        ):
            yield
    finally:
        cache.clear()
        with suppress(AttributeError):
            library._destroy()


def _install(library: Any, caster: _Caster, torch_version: tuple[int, int]) -> None:
    lists = caster.lists
    own = lists.registered()
    for name in {*own, *CUDA.registered()}:
        since = lists.fp32_since.get(name, (0, 0))
        packet, _, overload = name.partition(".")
        if name in own and torch_version >= since:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernel = caster.kernel(name, op)
        else:
            kernel = torch.library.fallthrough_kernel
        library.impl(name, kernel, "AutocastCUDA", allow_override=True)
    for name, until in lists.fp32_before.items():
        if torch_version < until:
            kernel = caster.kernel(name, getattr(torch.ops.aten, name).default)
            library.impl(name, kernel, "AutocastCUDA", allow_override=True)


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
        lists = self.lists
        if name in lists.lower:
            return self._casting(op, self._lower)
        if name in lists.optional_dtype:
            return self._with_dtype(op)
        if name in lists.append_dtype:
            return self._appending(op)
        if name in lists.promote:
            return self._promoting(op)
        if name in lists.banned:
            return self._banned(name)
        return self._casting(op, self._float)

    def _casting(self, op: Any, cast: Callable[[Any], Any]) -> Callable[..., Any]:
        keys = self._keys

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                # compilers evaluate C++ arguments from the last to the first: weights come first
                kwargs = {k: cast(v) for k, v in reversed(kwargs.items())}
                cast_args = [cast(a) for a in reversed(args)]
                out = op(*reversed(cast_args), **kwargs)
                _drop_lists(cast_args)
                return out

        return kernel

    def _with_dtype(self, op: Any) -> Callable[..., Any]:
        keys = self._keys
        names = [a.name for a in op._schema.arguments]
        position = names.index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                dtype = args[position] if len(args) > position else kwargs.get("dtype")
                if dtype is None and _eligible(args[0]):
                    args = args[:position]
                    kwargs["dtype"] = torch.float32
                    arguments = op._schema.arguments[: position + 1]
                    if not arguments[position].kwarg_only and len(args) == position:
                        args = (*args, kwargs.pop("dtype"))
                return op(*args, **kwargs)

        return kernel

    def _appending(self, op: Any) -> Callable[..., Any]:
        keys = self._keys
        wider = torch.ops.aten.norm.ScalarOpt_dtype
        wider_dim = torch.ops.aten.norm.ScalarOpt_dim_dtype

        def kernel(x: Any, p: Any = 2, *rest: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                if not _eligible(x):
                    return op(x, p, *rest, **kwargs)
                if rest or kwargs:
                    dim = rest[0] if rest else kwargs["dim"]
                    keepdim = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
                    return wider_dim(x, p, dim, keepdim, dtype=torch.float32)
                return wider(x, p, dtype=torch.float32)

        return kernel

    def _promoting(self, op: Any) -> Callable[..., Any]:
        keys = self._keys

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                tensors = [a for a in _flat((*args, *kwargs.values())) if _eligible(a)]
                widest = torch.get_autocast_dtype("cuda")
                if any(t.dtype == torch.float32 for t in tensors):
                    widest = torch.float32
                kwargs = {k: self._cast(v, widest) for k, v in reversed(kwargs.items())}
                cast_args = [self._cast(a, widest) for a in reversed(args)]
                out = op(*reversed(cast_args), **kwargs)
                _drop_lists(cast_args)
                return out

        return kernel

    def _banned(self, name: str) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> Any:
            raise RuntimeError(
                f"torch.nn.functional.{name} is unsafe to autocast, and CUDA's autocast refuses "
                "it: use binary_cross_entropy_with_logits"
            )

        return kernel

    def _lower(self, value: Any) -> Any:
        return self._cast(value, torch.get_autocast_dtype("cuda"))

    def _float(self, value: Any) -> Any:
        return self._cast(value, torch.float32)

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
