"""The recorder: a dispatch mode that writes down every storage's birth and death.

The step runs for real, on the meta device: shapes, dtypes, strides, autograd graph and Python
references are the real ones, only the numbers are missing. A storage is born when an operator
returns a tensor on it for the first time, and dies when the last reference, Python's or
autograd's, is gone.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memest.events import (
    ALLOC,
    CALL,
    CATEGORY_ORDER,
    FREE,
    MARK,
    Category,
    Cue,
    CueKind,
    Mark,
    Phase,
    Seam,
    SeamKind,
    Trace,
    on_stream,
)
from memest.trace.cuda.known_values import track
from memest.trace.cuda.streams import current_streams
from memest.trace.meta_results import MetaResults
from memest.workspaces.operator_call import OpCall, TensorSpec, Value
from memest.workspaces.registry import reads_calls

__all__ = ["Handler", "PhaseDone", "Recorder", "local"]

Handler = Callable[..., Any]

_CODE = {category: index for index, category in enumerate(CATEGORY_ORDER)}
_TEMPORARY = _CODE[Category.TEMPORARIES]
_ACTIVATION = _CODE[Category.ACTIVATIONS]
_BIRTH_CATEGORY = {
    Phase.BATCH: _CODE[Category.INPUTS],
}

# AccumulateGrad has the greatest sequence number there is
_ACCUMULATES = 1 << 63
# They return an alias of their argument, on a storage that may be new or may have grown.
_NEW_STORAGE = frozenset(("aten::resize_", "aten::set_"))
# They take memory and launch no kernel.
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
# Tensors that stand for others: their operators are seen when they come down to these.
_STANDING_FOR = frozenset(("DTensor", "AsyncCollectiveTensor"))
# How an operator's result is looked at; views and bare memory launch nothing.
_PLAIN, _ALIASES, _SITE, _VIEW, _MEMORY = 0, 1, 2, 3, 4


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor: the shard of a distributed one, else the tensor itself."""
    kind = type(tensor).__name__
    if kind not in _STANDING_FOR:
        return tensor
    shard: torch.Tensor = getattr(tensor, "_local_tensor" if kind == "DTensor" else "elem")
    return local(shard)


class PhaseDone(BaseException):
    """The phase that was asked for is at its end: no error, and for nobody else to catch."""


_LONGEST_MODULE = 120
"""Letters of a module's own words beyond which they are left out."""


def _described(name: str, module: torch.nn.Module, args: Sequence[Any]) -> str:
    """A module that failed; one without parts with what it is and what it was fed."""
    fed = [str(list(each.shape)) for each in args if isinstance(each, torch.Tensor)]
    words = repr(module)
    if not name or not fed or next(module.children(), None) or len(words) > _LONGEST_MODULE:
        return name
    return f"{name} ({words}, which was fed {' and '.join(fed)})"


class Recorder(TorchDispatchMode):
    """Records the allocations of whatever runs inside it.

    Args:
        handlers: operators that are answered otherwise than by their meta kernel; each handler is
            called as ``handler(recorder, func, args, kwargs)`` and returns the result.
        device: type of the device whose storages count.
        prefix: what a wrapper puts before the names of the model's modules; left out of the trace.
    """

    def __init__(
        self, handlers: dict[Any, Handler] | None = None, device: str = "meta", prefix: str = ""
    ) -> None:
        super().__init__()
        self._prefix = prefix
        self.trace = Trace()
        self.handlers = dict(handlers or {})
        self._device = device
        self._live: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[Any, int] = {}
        self._op_index: dict[Any, int] = {}
        self._call_index: dict[OpCall, int] = {}
        self._module_index: dict[str, int] = {"": 0}
        self.trace.module_names.append("")
        self._stack: list[int] = [0]
        self._names: dict[int, int] = {}
        self._node_starts: list[int] = []
        self._node_modules: list[int] = []
        self._recompute_allocations: list[int] = []
        self._references: list[list[torch.Tensor]] = [[]]
        self._birth_category = _TEMPORARY
        self._in_backward = False
        self._updates = False
        self._stopped = False
        self._module_of_node = -1
        self._notes: dict[str, None] = {}
        self.last_op = ""
        self.questions: dict[str, int] = {}
        self.failed_module = ""
        self.failed_update = False
        self.ends_after: Phase | None = None
        self._results = MetaResults()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode; nothing is compiled while it is active."""
        return True

    # -- phases ---------------------------------------------------------------------------------

    def mark(self, phase: Phase, step: int, micro_step: int = 0) -> None:
        """Begin a phase; what is born in forward and alive when it ends becomes an activation."""
        trace = self.trace
        if trace.marks and trace.marks[-1].phase is Phase.FORWARD:
            self._promote(trace.marks[-1])
        if trace.marks and trace.marks[-1].phase is self.ends_after:
            self.forget()
            raise PhaseDone
        self._settle_recompute()
        trace.events.append(len(trace.marks) << 2 | MARK)
        trace.marks.append(Mark(phase, step, micro_step))
        trace.launches.append(0)
        self._phase_start = len(trace.sizes)
        self._birth_category = _BIRTH_CATEGORY.get(phase, _TEMPORARY)
        if phase is Phase.FORWARD and (streams := current_streams()) is not None:
            streams.step_begins()
        self._in_backward = phase is Phase.BACKWARD
        self._module_of_node = -1

    def seam(self, kind: SeamKind, step: int, index: int = 0) -> None:
        """Note a place where the run can be cut."""
        self.trace.seams.append(Seam(len(self.trace.events), kind, step, index))

    def cue(self, kind: CueKind, index: int, tensor: torch.Tensor | None = None) -> None:
        """Note a place where wrappers of the model act.

        Args:
            kind: what happens.
            index: number of the module or the weight.
            tensor: what it is about.
        """
        if self._stopped and kind in (CueKind.LET_GO, CueKind.LET_GO_NEWEST):
            return
        allocation = None if tensor is None else self.allocation_of(tensor)
        number = -1 if allocation is None else allocation
        self.trace.cues.append(Cue(len(self.trace.events), kind, index, number))

    def _promote(self, mark: Mark) -> None:
        categories = self.trace.categories
        for allocation in self._live.values():
            if allocation >= self._phase_start and categories[allocation] == _TEMPORARY:
                categories[allocation] = _ACTIVATION

    def _settle_recompute(self) -> None:
        """What a recompute leaves behind when autograd takes over again is an activation."""
        if self._recompute_allocations:
            alive = set(self._live.values())
            categories = self.trace.categories
            for allocation in self._recompute_allocations:
                if allocation in alive and categories[allocation] == _TEMPORARY:
                    categories[allocation] = _ACTIVATION
            self._recompute_allocations.clear()

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs (a recompute has grad mode on, the rest of backward has not)."""
        return self._in_backward

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While an optimizer updates in backward: nothing here is autograd's doing."""
        before, self._updates = self._updates, True
        try:
            yield
        except Exception:
            self.failed_update = True
            raise
        finally:
            self._updates = before

    @property
    def autograd_writes(self) -> bool:
        """Whether what runs is autograd's own arithmetic."""
        return self._in_backward and not self._updates

    # -- what is known of allocations -------------------------------------------------------------

    def allocation_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the live allocation behind a tensor, None if it is not recorded."""
        return self._live.get(local(tensor).untyped_storage()._cdata)

    def tag(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Say what the storage behind a tensor is for."""
        allocation = self.allocation_of(tensor)
        if allocation is not None:
            self.trace.categories[allocation] = _CODE[category]
            if module is not None:
                self.trace.modules[allocation] = self.module_number(module)

    def origin_of(self, tensor: torch.Tensor) -> str:
        """The operator that made the storage behind a tensor ("" if unknown)."""
        allocation = self.allocation_of(tensor)
        return "" if allocation is None else self.trace.op_names[self.trace.ops[allocation]]

    def adopt(self, tensor: torch.Tensor, category: Category, module: str, op: str) -> None:
        """Record a storage that exists already: model weights as they move to the GPU."""
        before = len(self.trace.sizes)
        self.record_storage(tensor, op)
        if len(self.trace.sizes) > before:
            self.trace.categories[before] = _CODE[category]
            self.trace.modules[before] = self.module_number(module)

    def note(self, text: str) -> None:
        """Keep one sentence for the user, once."""
        self._notes[text] = None

    @property
    def notes(self) -> list[str]:
        """The sentences kept so far."""
        return list(self._notes)

    def count_launch(self) -> None:
        """Count a kernel that no operator stands for."""
        if self.trace.launches:
            self.trace.launches[-1] += 1

    def site(self, op: str, args: tuple[Value, ...], outputs: tuple[TensorSpec, ...]) -> None:
        """Note a call that is no operator, and that a rule of ``memest.workspaces`` knows."""
        self._note_call(OpCall(op, args, (), outputs, self._thread()))

    # -- modules ----------------------------------------------------------------------------------

    def module_number(self, name: str) -> int:
        """The index of a module path in the trace."""
        trace_name = "" if self._prefix.startswith(f"{name}.") else name.removeprefix(self._prefix)
        return self._index_of(trace_name)

    def hooked_number(self, name: str) -> int:
        """The same, with a number for each layer that adapters put around a model's own.

        Everything else takes the outermost for all of them; hooks of modules are on each.
        """
        around = name and self._prefix.startswith(f"{name}.")
        return self._index_of(name) if around else self.module_number(name)

    def _index_of(self, name: str) -> int:
        number = self._module_index.get(name)
        if number is None:
            number = self._module_index[name] = len(self.trace.module_names)
            self.trace.module_names.append(name)
        return number

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive until the forward of the current module returns."""
        if len(self._references) > 1:
            self._references[-1].append(tensor)

    @property
    def current_module(self) -> str:
        """Path of the module whose forward runs."""
        return self.trace.module_names[self._stack[-1]]

    @contextmanager
    def modules(
        self, model: torch.nn.Module, others: Mapping[str, torch.nn.Module] = MappingProxyType({})
    ) -> Iterator[None]:
        """Follow which module of ``model`` runs, in forward, recompute and backward.

        Args:
            model: that trains.
            others: models beside it, by what stands before the names of their modules.
        """
        self._names = {
            id(module): self.module_number(name) for name, module in model.named_modules()
        }
        for prefix, other in others.items():
            for name, module in other.named_modules(prefix=prefix):
                self._names[id(module)] = self._index_of(name)
        root = self.module_number("")
        # a wrapper's own layers stand for the model: one of them says when it is entered and left
        uncued_ids = {id(m) for n, m in model.named_modules() if n and self._names[id(m)] == root}
        names, stack = self._names, self._stack
        original = torch.nn.Module.__call__
        next_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
        starts, owners = self._node_starts, self._node_modules
        references = self._references

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            number = names.get(id(module))
            if number is None:
                return original(module, *args, **kwargs)
            stack.append(number)
            references.append([])
            starts.append(next_sequence_number())
            owners.append(number)
            is_cued = id(module) not in uncued_ids
            if is_cued:
                if number == 0 and not torch.is_grad_enabled():
                    self.cue(CueKind.NO_GRAPH, number)
                self.cue(
                    CueKind.ENTER_FED if _requires_grad(args, kwargs) else CueKind.ENTER, number
                )
            try:
                return original(module, *args, **kwargs)
            except Exception:
                name = self.trace.module_names[number]
                self.failed_module = self.failed_module or _described(name, module, args)
                raise
            finally:
                if is_cued:
                    self.cue(CueKind.LEAVE, number)
                stack.pop()
                references.pop()
                starts.append(next_sequence_number())
                owners.append(stack[-1])

        torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    def _module_here(self) -> int:
        stack = self._stack
        if len(stack) > 1 or not self._in_backward:
            return stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return 0
        position = bisect_right(self._node_starts, node._sequence_nr()) - 1
        return self._node_modules[position] if position >= 0 else 0

    def _stream_here(self) -> int:
        streams = current_streams()
        return 0 if streams is None else streams.here(in_backward=self._in_backward)

    def _thread(self) -> str:
        """Who calls a library: handles are of a thread, their workspaces of a stream too."""
        return on_stream("autograd" if self._in_backward else "main", self._stream_here())

    def _follow_autograd(self) -> None:
        """Note where autograd goes on with another module."""
        node = torch._C._current_autograd_node()
        # accumulation of a gradient belongs to the parameter, and is younger than every operator
        if node is None or node._sequence_nr() >= _ACCUMULATES:
            return
        module = self._module_here()
        if module != self._module_of_node:
            self._module_of_node = module
            self.cue(CueKind.BACKWARD, module)

    # -- the stream -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not _STANDING_FOR.isdisjoint(kind.__name__ for kind in types):
            return NotImplemented
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._kind(func)
        handler = self.handlers.get(func)
        if self._in_backward and len(self._stack) == 1:
            self._follow_autograd()
        try:
            if handler is None:
                out = self.result_of(func, args, kwargs)
            else:
                out = handler(self, func, args, kwargs or {})
        except Exception:
            self.last_op = str(func)
            raise
        track(func, args, kwargs or {}, out)
        if kind == _VIEW:
            return out
        if kind != _MEMORY:
            self._count_launch_of(out)
        if kind == _ALIASES:
            return out
        if isinstance(out, torch.Tensor):
            self.record_storage(out, func)
        elif isinstance(out, (tuple, list)):
            for item in _as_born(func, out):
                if isinstance(item, torch.Tensor):
                    self.record_storage(item, func)
        if kind == _SITE:
            self._site(func, args, kwargs, out)
        return out

    def _kind(self, func: Any) -> int:
        name = str(func)
        if reads_calls(name):
            return _SITE
        self.trace.unnoted_ops.append(name)
        schema = func._schema
        returns = schema.returns
        if schema.name in _NEW_STORAGE or schema.name in _NO_KERNEL:
            return _MEMORY
        if returns and all(r.alias_info is not None for r in returns):
            return _ALIASES if any(r.alias_info.is_write for r in returns) else _VIEW
        return _PLAIN if returns else _ALIASES

    def _count_launch_of(self, out: Any) -> None:
        """Count an operator that launches a kernel on the device."""
        launches = self.trace.launches
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if launches and (not isinstance(first, torch.Tensor) or first.device.type == self._device):
            launches[-1] += 1

    def result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator's meta kernel returns, remembered (:class:`MetaResults`).

        For handlers that leave an operator to its kernel: additions are a tenth of a trace of LoRA.
        """
        return self._results.call(func, args, kwargs)

    def record(self, tensor: torch.Tensor, func: Any) -> torch.Tensor:
        """Record a tensor's storage and return the tensor: what a handler makes on the way."""
        self.record_storage(tensor, func)
        return tensor

    def record_storage(self, tensor: torch.Tensor, func: Any) -> None:
        """Record the storage of a tensor that an operator, or its handler, has just made."""
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        allocation = self._live.get(key)
        if allocation is not None:
            if size > self.trace.sizes[allocation]:
                self._record_growth(tensor, func, allocation)
            return
        if size == 0 or tensor.device.type != self._device:
            return
        trace = self.trace
        stream = self._stream_here()
        key_of_op = (func, stream) if stream else func
        op = self._op_index.get(key_of_op)
        if op is None:
            op = self._op_index[key_of_op] = len(trace.op_names)
            trace.op_names.append(on_stream(str(func), stream))
        number = len(trace.sizes)
        trace.sizes.append(size)
        trace.categories.append(self._birth_category)
        trace.modules.append(self._module_here())
        trace.ops.append(op)
        trace.events.append(number << 2 | ALLOC)
        self._live[key] = number
        self._watch[key] = weakref.ref(storage, self._death_callback(key))
        if self._in_backward:
            if torch.is_grad_enabled():
                self._recompute_allocations.append(number)
            elif self._recompute_allocations:
                self._settle_recompute()

    def _record_growth(self, tensor: torch.Tensor, func: Any, allocation: int) -> None:
        """A storage grew in place: new memory is taken, then the old given back."""
        key = tensor.untyped_storage()._cdata
        del self._live[key]
        self.record_storage(tensor, func)
        self.trace.categories[self._live[key]] = self.trace.categories[allocation]
        self.trace.events.append(allocation << 2 | FREE)

    def _death_callback(self, key: int) -> Callable[[Any], None]:
        live, watch, events = self._live, self._watch, self.trace.events

        def died(_: Any) -> None:
            number = live.pop(key, None)
            watch.pop(key, None)
            if number is not None:
                events.append(number << 2 | FREE)

        return died

    def forget(self) -> None:
        """Stop watching: what dies from now on is not part of the trace."""
        self._stopped = True
        self._live.clear()
        self._watch.clear()

    def _site(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        devices = {o.device.type for o in outputs if isinstance(o, torch.Tensor)}
        if devices and self._device not in devices:
            return  # on the host: what a model computes there takes nothing from the GPU
        call = OpCall(
            op=str(func),
            args=tuple(_value(a) for a in args),
            kwargs=tuple((k, _value(v)) for k, v in sorted((kwargs or {}).items())),
            outputs=tuple(_spec(o) if isinstance(o, torch.Tensor) else None for o in outputs),
            thread=self._thread(),
        )
        self._note_call(call)

    def _note_call(self, call: OpCall) -> None:
        trace = self.trace
        number = self._call_index.get(call)
        if number is None:
            number = self._call_index[call] = len(trace.calls)
            trace.calls.append(call)
        trace.events.append(len(trace.call_of_site) << 2 | CALL)
        trace.call_of_site.append(number)
        trace.site_modules.append(self._module_here())


_BORN_FIRST = {
    # dropout_cuda of cuda/Dropout.cu
    torch.ops.aten.native_dropout.default: (1,),
}
"""Results, by position, that a kernel makes before those that it returns before them. Recorded
(torch 2.11, H200)."""


def _as_born(func: Any, out: Sequence[Any]) -> Sequence[Any]:
    """Results of an operator in the order in which it makes them."""
    first = _BORN_FIRST.get(func)
    if first is None:
        return out
    return [out[i] for i in first] + [v for i, v in enumerate(out) if i not in first]


def _requires_grad(*values: Any) -> bool:
    """Whether a tensor among values, in tuples, lists or dicts, requires a gradient."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and torch.is_grad_enabled():
                return True
        elif isinstance(value, (tuple, list)):
            if _requires_grad(*value):
                return True
        elif isinstance(value, dict) and _requires_grad(*value.values()):
            return True
    return False


_DTYPE_NAMES: dict[torch.dtype, str] = {}


def _spec(tensor: torch.Tensor) -> TensorSpec:
    dtype = tensor.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), tensor.stride(), name, tensor.device.type == "cpu")


def _value(value: Any) -> Value:
    if isinstance(value, torch.Tensor):
        return _spec(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Sequence):
        return tuple(_value(item) for item in value)
    return str(value)
