"""When ZeRO-3 gathers parameters, how many ahead, and when it gives them back.

Source: ``PartitionedParameterCoordinator`` of DeepSpeed 0.19.8
(``deepspeed/runtime/zero/partitioned_param_coordinator.py``) and the handles of its gathers
(``partition_parameters.py``). The first pass over the model is recorded: every module's parameters
are gathered when it is entered and given back when it is left. From the second pass on the record
says what comes next: parameters are gathered ahead, and what is needed again soon is kept.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memest.events import Category, Weight
from memest.sharding.engine import DEFAULT_STREAM, Rewriter, num_elements
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["GATHER_STREAM", "Fetcher", "Limits"]

GATHER_STREAM = 1
_NEVER = -(10**10)
_GATHERED = "zero: gathered parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a configuration says of gathers, in elements; there with ``stage3_`` before the names.

    Attributes:
        prefetch_bucket_size: gathered ahead at once.
        max_live_parameters: above so many nothing is gathered ahead.
        max_reuse_distance: what is used again within so many is kept.
        param_persistence_threshold: smaller ones stay.
        model_persistence_threshold: so many stay at most.
    """

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = (1 << 63) - 1


class _Status(enum.Enum):
    """``ZeroParamStatus``."""

    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


class _TraceMode(enum.Enum):
    """``ZeRoTraceMode``."""

    RECORD = enum.auto()
    COMPLETE = enum.auto()
    INVALID = enum.auto()


@dataclass(slots=True, eq=False)
class _Handle:
    """A gather under way.

    Attributes:
        weights: gathered together, in order; one alone needs no copy out.
        flats: buffers of the gather, alive until every weight was waited for.
        copies: shards on their way from the host.
        pending_weights: weights that nobody waited for yet.
        done: it was waited for.
    """

    weights: Sequence[int]
    flats: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    pending_weights: set[int] = field(default_factory=set)
    done: bool = False


@dataclass(slots=True, kw_only=True)
class Fetcher:
    """The coordinator of one rank.

    Attributes:
        to: the stream that is written.
        weights: parameters of the model.
        owned_weights: the parameters that each module has itself, by number of the module.
        ranks: that partition the parameters.
        limits: of gathers.
        overlaps: gathers run on a stream of their own.
        from_host: shards come from host memory.
        stream: where gathers run that overlap.
        homes: modules of the storages, for reports.
    """

    to: Rewriter
    weights: Sequence[Weight]
    owned_weights: Mapping[int, tuple[int, ...]]
    ranks: int
    limits: Limits
    overlaps: bool
    from_host: bool
    stream: int = GATHER_STREAM
    homes: dict[int, int] = field(default_factory=dict)
    persistent: tuple[int, ...] = ()
    _status: list[_Status] = field(default_factory=list)
    _buffer: dict[int, int] = field(default_factory=dict)
    _inflight: dict[int, _Handle] = field(default_factory=dict)
    _holds: dict[int, deque[int]] = field(default_factory=dict)
    _holders: dict[int, int] = field(default_factory=dict)
    _orphans: set[int] = field(default_factory=set)
    _active_modules: dict[int, set[int]] = field(default_factory=dict)
    _mode: _TraceMode = _TraceMode.INVALID
    _modules: list[int] = field(default_factory=list)
    _order: list[tuple[int, int]] = field(default_factory=list)
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _recent: dict[int, int] = field(default_factory=dict)
    _step: int = 0
    _num_available: int = 0
    _release_cache: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    _in_backward: dict[int, None] = field(default_factory=dict)
    _recomputed_weights: dict[int, set[int]] = field(default_factory=dict)
    _running: list[int] = field(default_factory=list)
    _external: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._status = [_Status.AWAY] * len(self.weights)
        self._active_modules = {index: set() for index in range(len(self.weights))}
        self.persistent = self._small()

    def _small(self) -> tuple[int, ...]:
        """``mark_persistent_parameters``."""
        out, total = [], 0
        for index in range(len(self.weights)):
            size = self.elements(index)
            if size + total > self.limits.model_persistence_threshold:
                continue
            if size <= self.limits.param_persistence_threshold:
                out.append(index)
                total += size
        return tuple(out)

    # -- sizes

    def elements(self, weight: int) -> int:
        """Elements of a weight."""
        return num_elements(self.weights[weight].shape)

    def shard_elements(self, weight: int) -> int:
        """Elements of a rank's part, padded (``_aligned_size``)."""
        return -(-self.elements(weight) // self.ranks)

    def _item(self, weight: int) -> int:
        return DTYPE_BYTES[self.weights[weight].dtype]

    def shard_bytes(self, weight: int) -> int:
        """Bytes of a rank's part."""
        return self.shard_elements(weight) * self._item(weight)

    @property
    def _stream(self) -> int:
        return self.stream if self.overlaps else DEFAULT_STREAM

    def _alloc(self, nbytes: int, label: str, weight: int, stream: int) -> int:
        return self.to.alloc(
            nbytes, Category.COMMUNICATION, label, module=self.homes.get(weight, 0), stream=stream
        )

    def _of(self, module: int) -> tuple[int, ...]:
        """What is gathered for a module: its own parameters, and those it was seen to read."""
        own, read = self.owned_weights.get(module, ()), self._external.get(module)
        return own if read is None else tuple(sorted({*own, *read}))

    # -- passes over the model

    def begin(self) -> None:
        """The forward of the model begins (``reset_step``)."""
        self._drop_inflight()
        if self._mode is _TraceMode.RECORD:
            self._mode = _TraceMode.COMPLETE
            self._order = [
                (weight, step)
                for step, module in enumerate(self._modules)
                for weight in self._of(module)
            ]
        elif self._mode is _TraceMode.INVALID:
            self._mode = _TraceMode.RECORD
        self._queue = deque(self._order)
        self._recent.clear()
        self._running.clear()
        self._step = 0
        self._num_available = 0

    def _drop_inflight(self) -> None:
        """Gathers that nobody waits for any more end, and what they brought is given back."""
        for weight in list(self._inflight):
            self._finish(self._inflight[weight])
            self._release(weight)
        for handle in dict.fromkeys(self._inflight.values()):
            self._drop(handle)
        self._inflight.clear()

    def _follow(self, module: int) -> None:
        """``trace_prologue`` and ``record_module``."""
        if self._mode is _TraceMode.COMPLETE:
            recorded_modules = self._modules
            if self._step >= len(recorded_modules) or recorded_modules[self._step] != module:
                self._forget()
        if self._mode is _TraceMode.RECORD:
            self._modules.append(module)

    def _forget(self) -> None:
        """``_invalidate_trace``: another way through the model than the recorded one."""
        self._mode = _TraceMode.INVALID
        self._modules, self._order = [], []
        self._queue.clear()
        self._recent.clear()
        self._drop_inflight()

    def enter(self, module: int, *, backward: bool, recomputing: bool = False) -> None:
        """A module needs its parameters: ``fetch_sub_module``."""
        if not backward:
            self._running.append(module)
        self._follow(module)
        if backward:
            self._in_backward[module] = None
        own = self._of(module)
        self._gather(own)
        for weight in own:
            self._active_modules[weight].add(module)
            if recomputing and self._in_backward and not self.weights[weight].trains:
                owner = next(reversed(self._in_backward))
                self._recomputed_weights.setdefault(owner, set()).add(weight)
                self._active_modules[weight].add(owner)
            if weight in self._inflight:
                self._wait(weight)
        if self._mode is _TraceMode.COMPLETE:
            self._prefetch(own)
        self._step += 1

    def read(self, weight: int) -> None:
        """The forward reads a parameter outside of its module (``ZeROOrderedDict.__getitem__``).

        What is not there is gathered at once, on this stream and into one buffer
        (``_allgather_params_sequential``, of a single rank too), and made an external parameter of
        the innermost module that runs (``register_external_parameter``): from its next forward on
        that module gathers it when it is entered, and has it until it is left. So the whole model
        has a head that its loss reads, from the second forward's beginning to the backward's end.
        The gather is not counted among what is available, the giving back is.
        """
        if self._status[weight] is not _Status.AWAY:
            return
        module = self._running[-1]
        self._external[module] = (*self._external.get(module, ()), weight)
        self._gather_alone(weight)

    def _prefetch(self, own: Sequence[int]) -> None:
        new_weights = {w for w in own if self._recent.get(w, _NEVER) < self._step}
        passed_weights: set[int] = set()
        while self._queue and len(passed_weights) < len(new_weights):
            weight, step = self._queue.popleft()
            self._recent[weight] = step
            passed_weights.add(weight)
        limit = min(
            self.limits.max_live_parameters - self._num_available, self.limits.prefetch_bucket_size
        )
        if self.limits.prefetch_bucket_size <= 0:
            return
        prefetch_weights: dict[int, None] = {}
        count = 0
        while self._queue and count < limit:
            weight, step = self._queue.popleft()
            self._recent[weight] = max(self._recent.get(weight, _NEVER), step)
            if self._status[weight] is _Status.AWAY and weight not in prefetch_weights:
                prefetch_weights[weight] = None
                count += self.elements(weight)
        self._gather(prefetch_weights)

    def leave(self, module: int, *, backward: bool) -> None:
        """A module is done with its parameters: ``release_sub_module``."""
        if not backward:
            self._running.pop()
        own = self._of(module)
        complete = self._mode is _TraceMode.COMPLETE
        to_release = set(self._to_release(module, own) if complete else own)
        weights = list(own)
        if backward:
            recomputed_weights = self._recomputed_weights.pop(module, set())
            to_release |= {weight for weight in recomputed_weights if weight not in self.persistent}
            weights += sorted(recomputed_weights - set(own))
            self._in_backward.pop(module, None)
        for weight in weights:
            self._active_modules[weight].discard(module)
            if weight in to_release:
                self._release(weight)

    def _to_release(self, module: int, own: Sequence[int]) -> frozenset[int]:
        """``__params_to_release``, which remembers its answers."""
        key = module, self._step
        answer = self._release_cache.get(key)
        if answer is not None:
            return answer
        out = {weight for weight in own if weight not in self.persistent}
        for weight in own:
            if self._recent.get(weight, _NEVER) > self._step:
                out.discard(weight)
        distance = 0
        for later in self._modules[self._step :]:
            if distance >= self.limits.max_reuse_distance:
                break
            for weight in self._of(later):
                out.discard(weight)
                distance += self.elements(weight)
        answer = self._release_cache[key] = frozenset(out)
        return answer

    def backward_done(self) -> None:
        """``release_backward_leftovers``: modules that autograd did not leave by their inputs."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            recomputed_weights = self._recomputed_weights.pop(module, set())
            for weight in dict.fromkeys((*self._of(module), *sorted(recomputed_weights))):
                self._active_modules[weight].discard(module)
                if weight not in self.persistent:
                    self._release(weight)

    def release_all(self) -> None:
        """``release_and_reset_all``: before an update nothing stays gathered."""
        for weight in range(len(self.weights)):
            if weight in self._inflight:
                self._wait(weight)
            self._active_modules[weight].clear()
            self._release(weight)

    def gather_persistent(self) -> None:
        """After an update."""
        self.gather_at_once(self.persistent)

    def gather_at_once(self, weights: Iterable[int]) -> None:
        """``_allgather_params_coalesced``: a buffer for each, on this stream."""
        away = [weight for weight in weights if self._status[weight] is _Status.AWAY]
        moves = away if self.from_host and self.ranks > 1 else ()
        copies = [self._alloc(self.shard_bytes(w), _COPY, w, DEFAULT_STREAM) for w in moves]
        for weight in away:
            self._status[weight] = _Status.HERE
            self._place(weight, DEFAULT_STREAM)
        self.to.free(*copies)

    # -- ``GatheredParameters``, which neither counts what is available nor spares what is to stay

    def hand_out(self) -> None:
        """Every parameter is gathered by itself, read and partitioned.

        Who reads it has a name for it, which is the next one's when that is there.
        """
        last: int | None = None
        for weight in range(len(self.weights)):
            if self._status[weight] is _Status.AWAY:
                self._gather_alone(weight)
            if last is not None:
                self.to.free(last)
            last = self._buffer.pop(weight, None)
            self._status[weight] = _Status.AWAY
        if last is not None:
            self.to.free(last)

    def gather_all(self) -> None:
        """All parameters are gathered at once."""
        self.gather_at_once(range(len(self.weights)))

    def partition_all(self, *, forgets: bool) -> None:
        """They are partitioned.

        Args:
            forgets: hooks were taken off meanwhile and are there again: the record is void
                (``add_hooks`` of TRL).
        """
        for weight in range(len(self.weights)):
            if self._status[weight] is _Status.HERE:
                self._take_back(weight)
                self._status[weight] = _Status.AWAY
        if forgets:
            self._forget()

    def _gather_alone(self, weight: int) -> None:
        """``_allgather_params_sequential``: into a buffer of its own, of a single rank too."""
        nbytes = self.ranks * self.shard_bytes(weight)
        self._buffer[weight] = self._alloc(nbytes, _GATHERED, weight, DEFAULT_STREAM)
        if self.from_host:
            self.to.free(self._alloc(self.shard_bytes(weight), _COPY, weight, DEFAULT_STREAM))
        self._status[weight] = _Status.HERE

    def gather_one_by_one(self, weights: Iterable[int]) -> None:
        """Gathers that are given back at once, as those in which hooks are made."""
        for weight in weights:
            self._place(weight, DEFAULT_STREAM)
            self._take_back(weight)

    # -- gathers

    def _place(self, weight: int, stream: int) -> None:
        """A buffer that a gather fills, of which the parameter is a slice."""
        if self.ranks == 1 and not self.from_host:
            return
        nbytes = self.ranks * self.shard_bytes(weight)
        self._buffer[weight] = self._alloc(nbytes, _GATHERED, weight, stream)

    def _take_back(self, weight: int) -> None:
        number = self._buffer.pop(weight, None)
        if number is None:
            return
        if self._holders.get(number):
            self._orphans.add(number)
        else:
            self.to.free(number)

    def hold(self, weight: int) -> None:
        """Autograd has a reference to what is gathered of a weight."""
        number = self._buffer.get(weight, -1)
        self._holds.setdefault(weight, deque()).append(number)
        self._holders[number] = self._holders.get(number, 0) + 1

    def let_go(self, weight: int, *, newest: bool = False) -> None:
        """It drops the oldest of them or the newest; what was given back meanwhile is free now."""
        holds = self._holds[weight]
        number = holds.pop() if newest else holds.popleft()
        self._holders[number] -= 1
        if not self._holders[number]:
            del self._holders[number]
            if number in self._orphans:
                self._orphans.discard(number)
                self.to.free(number)

    def _gather(self, weights: Iterable[int]) -> None:
        """``__all_gather_params``."""
        away = sorted(w for w in weights if self._status[w] is _Status.AWAY)
        if not away:
            return
        self._num_available += sum(map(self.elements, away))
        handle = _Handle(weights=away, pending_weights=set(away))
        for weight in away:
            self._status[weight] = _Status.COMING
            self._inflight[weight] = handle
        if self.ranks == 1:
            for weight in away:
                self._place(weight, self._stream)
        elif len(away) == 1:
            self._place(away[0], self._stream)
            if self.from_host:
                size = self.shard_bytes(away[0])
                handle.copies.append(self._alloc(size, _COPY, away[0], self._stream))
        else:
            self._gather_together(handle)

    def _gather_together(self, handle: _Handle) -> None:
        """``_all_gather_dtype``, for each dtype."""
        for dtype in sorted({self.weights[w].dtype for w in handle.weights}):
            members = [w for w in handle.weights if self.weights[w].dtype == dtype]
            nbytes = self.ranks * sum(map(self.shard_bytes, members))
            handle.flats.append(
                self._alloc(nbytes, "zero: gathered together", members[0], self._stream)
            )
            if self.from_host:
                copies = [self._alloc(self.shard_bytes(w), _COPY, w, self._stream) for w in members]
                self.to.free(*copies)

    def _wait(self, weight: int) -> None:
        handle = self._inflight.pop(weight)
        self._finish(handle)
        handle.pending_weights.discard(weight)
        if not handle.pending_weights:
            self._drop(handle)

    def _finish(self, handle: _Handle) -> None:
        """``wait``: parameters that were gathered together are copied out, each by itself."""
        if handle.done:
            return
        handle.done = True
        self.to.free(*handle.copies)
        handle.copies.clear()
        # one gather for each dtype, waited for one after the other
        for weight in sorted(handle.weights, key=lambda weight: self.weights[weight].dtype):
            self._status[weight] = _Status.HERE
            if handle.flats:
                nbytes = self.elements(weight) * self._item(weight)
                self._buffer[weight] = self._alloc(nbytes, _GATHERED, weight, self._stream)

    def _drop(self, handle: _Handle) -> None:
        self.to.free(*handle.flats)
        handle.flats.clear()

    def _release(self, weight: int) -> None:
        if self._status[weight] is _Status.HERE and not self._active_modules[weight]:
            self._take_back(weight)
            self._status[weight] = _Status.AWAY
            self._num_available -= self.elements(weight)


_COPY = "zero: shard from the host"
