"""FSDP2 (``fully_shard``): the state machine of its hooks, with allocations for its tensors.

Source: ``torch/distributed/fsdp/_fully_shard`` of torch 2.13: ``_fsdp_state.py`` (hooks of modules,
the final callback), ``_fsdp_param_group.py`` (unshard, wait, reshard, post-backward, prefetch),
``_fsdp_collectives.py`` (buffers), ``_fsdp_param.py`` (shards). Names here are those there.

What is freed later than its last use is freed where the library lets go of its reference: the
gathered buffer of a forward with the next gather, the input of a reduce-scatter with the
post-backward of the next unit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import CAST, Category, CueKind, Mark, Phase
from memest.hidden.call import DTYPE_BYTES
from memest.sharding.partitioned import PartitionedWrapper
from memest.sharding.shards import num_elements, padded_elements
from memest.sharding.units import UnitPlan

__all__ = ["ALL_REDUCE_STREAM", "COPY_IN_STREAM", "REDUCE_SCATTER_STREAM", "Fsdp2", "State", "Unit"]

COPY_IN_STREAM = 1
REDUCE_SCATTER_STREAM = 2
ALL_REDUCE_STREAM = 3
_ROOT = ""


class State(enum.Enum):
    """``TrainingState`` of the library."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()


@dataclass(slots=True, eq=False)
class Unit:
    """A parameter group.

    Attributes:
        plan: which modules and weights.
        is_root: the outermost one.
        state: where its training is.
        gathered: its all-gather buffer, while a gather waits to be copied out.
        full: its unsharded parameters, by weight.
        accumulated: gradients that took the place of autograd's: in the dtype of the reduction,
            kept where nothing was reduced; or the rank's part of a whole one.
        sharded_gradients: storages that the shards' gradients are views of.
        awaited: modules of a group whose forward has not run yet.
        fed_by: the module whose inputs lead back to earlier layers: when autograd leaves it, the
            unit is done.
        reached: autograd is in that module.
        indices: places in the order of forwards.
        dropped: weights whose gradients ``zero_grad`` has dropped.
        reduced: buffers of all-reduces under way.
        on_host: its gradients are counted among what is in host memory.
    """

    plan: UnitPlan
    is_root: bool
    state: State = State.IDLE
    gathered: int | None = None
    full: dict[int, int] = field(default_factory=dict)
    accumulated: dict[int, int] = field(default_factory=dict)
    sharded_gradients: list[int] = field(default_factory=list)
    awaited: set[str] = field(default_factory=set)
    fed_by: str | None = None
    reached: bool = False
    indices: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)
    on_host: bool = False

    def holds(self, module: str) -> bool:
        """Whether a module is one of its own, or inside one."""
        return any(_inside(module, own) for own in self.plan.modules)


def _inside(module: str, outer: str) -> bool:
    return outer == _ROOT or module == outer or module.startswith(f"{outer}.")


@dataclass(slots=True, kw_only=True)
class Fsdp2(PartitionedWrapper):
    """One rank of FSDP2.

    Attributes:
        stored: dtype in which each is stored.
        plans: units in the order in which they are made.
        ranks: of the group that shards.
        replicated: there are other groups, with which reduced gradients are averaged (HSDP).
        offloads: shards and their gradients are in host memory (``CPUOffloadPolicy``).
        skips_sync: all micro-steps but the last of a step accumulate without reduction.
        last_micro_step: number of the last one.
        on_device: the weights are on the device before they are cut, all at once: quantised ones
            are made there.
        reduce_dtype: of reductions; None = as the gradients are.
        tensor_ranks: that share layers by tensor parallelism; ``weights`` are what one of them has.
    """

    stored: Sequence[str]
    plans: Sequence[UnitPlan]
    ranks: int
    replicated: bool
    offloads: bool
    skips_sync: bool
    last_micro_step: int
    on_device: bool = False
    reduce_dtype: str | None = None
    tensor_ranks: int = 1
    _units: list[Unit] = field(default_factory=list)
    _unit_of: dict[int, Unit] = field(default_factory=dict)
    _by_module: dict[str, list[Unit]] = field(default_factory=dict)
    _held: int | None = None
    _order: list[Unit] = field(default_factory=list)
    _reducing: list[int] = field(default_factory=list)
    _syncs: bool = True
    _casting: int | None = None
    _uncast: dict[int, int] = field(default_factory=dict)
    _forward_root: Unit | None = None
    _in_backward: bool = False
    _began: bool = False
    _gather_stream: int = COPY_IN_STREAM
    _ended_by_root: list[Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        for plan in self.plans:
            unit = Unit(plan, is_root=plan.modules == (_ROOT,))
            self._units.append(unit)
            self._unit_of.update(dict.fromkeys(plan.weights, unit))
            for module in plan.modules:
                self._by_module.setdefault(module, []).append(unit)

    # -- what the stream brings

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        if self.on_device:
            return self._stays(number)
        return PartitionedWrapper.allocates(self, number)

    def _stays(self, number: int) -> bool:
        """Casts are gathers' own here: weights keep the dtype that they came in."""
        label = self.to.out.label_names[self.to.out.labels[number]]
        if self.to.phase is Phase.LOAD and label == CAST:
            self._casting = number
            return False
        return True

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        if self._casting is not None:
            self._uncast[self._casting], self._casting = number, None
            return False
        return PartitionedWrapper.frees(self, number)

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        self._in_backward = mark.phase is Phase.BACKWARD
        self._began = False
        if mark.phase is Phase.FORWARD:
            self._syncs = not self.skips_sync or mark.micro_step == self.last_micro_step

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.PLACED:
            self._placed[index] = number
            if index == len(self.weights) - 1:
                self._construct()
        elif kind in (CueKind.ENTER, CueKind.ENTER_FED):
            self._enter(self._name(index), fed=kind is CueKind.ENTER_FED)
        elif kind is CueKind.LEAVE:
            self._leave(self._name(index))
        elif kind is CueKind.BACKWARD:
            self._autograd_at(self._name(index))
        elif kind is CueKind.GRADIENT:
            self.computed(index, number)
        elif kind is CueKind.READY:
            self.accumulated(index, number)
        elif kind is CueKind.DONE:
            self._final_callback()

    def _name(self, index: int) -> str:
        return self.to.out.module_names[index]

    # -- sizes

    def _ranks(self, unit: Unit) -> int:
        return unit.plan.ranks or self.ranks

    def _shard_bytes(self, weight: int, dtype: str) -> int:
        ranks = self._ranks(self._unit_of[weight])
        return padded_elements(self.weights[weight], ranks) * DTYPE_BYTES[dtype]

    def _full_bytes(self, weight: int) -> int:
        ranks = self._ranks(self._unit_of[weight])
        return ranks * self._shard_bytes(weight, self.weights[weight].dtype)

    def _casts(self, weight: int) -> bool:
        return self.stored[weight] != self.weights[weight].dtype

    # -- construction

    def _whole(self, weight: int) -> int:
        """A weight before it is cut: where it lies, or brought to the device for that."""
        if self.on_device:
            here = self._placed[weight]
            return self._uncast.get(here, here)
        nbytes = num_elements(self.weights[weight].shape) * DTYPE_BYTES[self.stored[weight]]
        return self.to.alloc(nbytes, Category.COMMUNICATION, "fsdp: whole parameter")

    def _construct(self) -> None:
        """``fully_shard``, unit by unit: whole on the device, cut, and let go of."""
        to = self.to
        self.copy_unplaced()
        for unit in self._units:
            whole = [self._whole(weight) for weight in unit.plan.weights]
            for weight in unit.plan.weights:
                nbytes = self._shard_bytes(weight, self.stored[weight])
                shard = to.alloc(
                    nbytes, Category.PARAMETERS, "fsdp: shard",
                    module=self.module_of(weight),
                )  # fmt: skip
                if self.offloads:
                    to.free(shard)
                    to.out.host_bytes += nbytes
            for number in whole:
                to.free(number)

    # -- hooks of modules

    def _enter(self, module: str, *, fed: bool) -> None:
        for unit in self._by_module.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                if not unit.full:
                    self._unshard(unit)
                    self._wait(unit)
                continue
            first = unit.state is not State.FORWARD
            if not unit.awaited:
                unit.awaited = set(unit.plan.modules)
            unit.state = State.FORWARD
            if first and self._forward_root is None:
                self._forward_root = unit
                self._ended_by_root.clear()  # a forward without a backward has left them
            self._unshard(unit)
            self._wait(unit)
            if first:
                if fed and unit.indices and not self._in_backward:
                    self._say_called_twice(module)
                unit.fed_by = module if fed else None
                unit.reached = False

    def _say_called_twice(self, module: str) -> None:
        said = (
            f"{module} is called more than once in a forward: its gradients are reduced after each "
            "call, and are priced as reduced once."
        )
        if said not in self.notes:
            self.notes.append(said)

    def _leave(self, module: str) -> None:
        for unit in self._by_module.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                continue
            unit.awaited.discard(module)
            if unit.awaited:
                continue
            self._post_forward(unit)
            if unit is self._forward_root:
                self._complete_partial()
                self._drop_held()
                self._forward_root = None

    def _post_forward(self, unit: Unit) -> None:
        if not self._in_backward:
            if unit.plan.reshards:
                self._reshard(unit)
            if unit.plan.weights:
                unit.indices.append(len(self._order))
                self._order.append(unit)
        unit.state = State.IDLE

    def _complete_partial(self) -> None:
        """``_force_complete_incomplete_states``: groups of which not every module has run.

        A loss that multiplies by the head's weight leaves the head itself uncalled. Its group,
        which the norm has gathered, ends with the root, and has its hook on the root's outputs.
        """
        for unit in reversed(self._in_module_order()):
            if unit.awaited and not unit.is_root:
                unit.awaited.clear()
                self._post_forward(unit)
                self._ended_by_root.append(unit)

    def _autograd_at(self, module: str) -> None:
        if not self._began:
            self._began = True
            for unit in self._units:
                if unit.is_root:
                    self._pre_backward(unit)
            for unit in self._ended_by_root:
                self._pre_backward(unit)
            self._ended_by_root.clear()
        for unit in self._units:
            if unit.fed_by is None or not unit.reached:
                continue
            if not _inside(module, unit.fed_by):
                unit.reached, unit.fed_by = False, None
                self._post_backward(unit)
        for unit in self._units:
            if unit.is_root or not unit.holds(module):
                continue
            if unit.state is State.IDLE and unit.indices:
                self._pre_backward(unit)
            if unit.fed_by is not None and _inside(module, unit.fed_by):
                unit.reached = True

    # -- gradients

    def zeroed(self, weight: int) -> None:
        """``zero_grad`` drops the gradient of a shard; their storage is that of the unit."""
        unit = self._unit_of[weight]
        unit.dropped.add(weight)
        if unit.dropped >= {w for w in unit.plan.weights if self.weights[w].has_grad}:
            for number in unit.sharded_gradients:
                self.to.free(number)
            unit.sharded_gradients.clear()
            unit.dropped.clear()

    # -- what a unit does

    def _unshard(self, unit: Unit) -> None:
        """``foreach_all_gather``: inputs in one buffer, of which this rank's part is a slice."""
        if unit.gathered is not None or unit.full or not unit.plan.weights:
            return
        if self._ranks(unit) == 1:
            return
        to, temporary = self.to, []
        for weight in unit.plan.weights:
            if self.offloads:
                stored = self._shard_bytes(weight, self.stored[weight])
                number = self._alloc(stored, "fsdp: shard from the host", self._gather_stream)
                if self._casts(weight):
                    own = self._shard_bytes(weight, self.weights[weight].dtype)
                    cast = self._alloc(own, "fsdp: shard in half precision", self._gather_stream)
                    to.free(number)
                    number = cast
                temporary.append(number)
        halves = [w for w in unit.plan.weights if self._casts(w) and not self.offloads]
        if halves:
            nbytes = sum(self._shard_bytes(w, self.weights[w].dtype) for w in halves)
            temporary.append(
                self._alloc(nbytes, "fsdp: shards in half precision", self._gather_stream)
            )
        nbytes = sum(self._full_bytes(weight) for weight in unit.plan.weights)
        unit.gathered = self._alloc(nbytes, "fsdp: all-gather", self._gather_stream)
        for number in temporary:
            to.free(number)

    def _wait(self, unit: Unit) -> None:
        """``wait_for_unshard``: every parameter is copied out of the buffer."""
        if unit.full or not unit.plan.weights:
            return
        if self._ranks(unit) == 1:
            self._copy_alone(unit)
            if unit.state is State.FORWARD:
                self._drop_held()
            return
        if unit.gathered is None:
            return
        self._alloc_full(unit)
        if unit.state is State.FORWARD:
            # the one before is let go of at once, but for a local name that lives until the return
            self._drop_held()
            self._held = unit.gathered
        else:
            self.to.free(unit.gathered)
        unit.gathered = None

    def _copy_alone(self, unit: Unit) -> None:
        """A group of one rank copies without communication."""
        for weight in unit.plan.weights:
            cast = None
            if self._casts(weight):
                own = self._shard_bytes(weight, self.weights[weight].dtype)
                cast = self._alloc(own, "fsdp: shard in half precision", 0)
            self._alloc_one(unit, weight)
            if cast is not None:
                self.to.free(cast)

    def _alloc_full(self, unit: Unit) -> None:
        for weight in unit.plan.weights:
            self._alloc_one(unit, weight)

    def _alloc_one(self, unit: Unit, weight: int) -> None:
        module = self.module_of(weight)
        unit.full[weight] = self.to.alloc(
            self._full_bytes(weight), Category.COMMUNICATION, "fsdp: gathered parameter",
            module=module,
        )  # fmt: skip

    def _alloc(self, nbytes: int, label: str, stream: int) -> int:
        return self.to.alloc(nbytes, Category.COMMUNICATION, label, stream=stream)

    def _drop_held(self) -> None:
        if self._held is not None:
            self.to.free(self._held)
            self._held = None

    def _reshard(self, unit: Unit) -> None:
        for number in unit.full.values():
            self.to.free(number)
        unit.full.clear()

    def _pre_backward(self, unit: Unit) -> None:
        unit.state = State.PRE_BACKWARD
        self._unshard(unit)
        self._wait(unit)
        if not unit.indices:
            return
        index = unit.indices.pop()
        if index > 0:
            # prefetch: the unit whose forward was before this one's
            self._unshard(self._order[index - 1])

    def _post_backward(self, unit: Unit) -> None:
        unit.state = State.POST_BACKWARD
        to = self.to
        for weight in unit.accumulated:
            if weight in self.gradients:
                self.consume(weight)
        if not self._syncs:
            self._reshard(unit)
            self._keep_unreduced(unit)
            return
        gradients = [w for w in unit.plan.weights if w in self.gradients or w in unit.accumulated]
        self._redistribute(unit)
        self._reshard(unit)
        while self._reducing:
            to.free(self._reducing.pop(0))
        if gradients:
            self._reduce(unit, gradients)

    def _redistribute(self, unit: Unit) -> None:
        """Gradients that are whole where tensor parallelism shares the weight: the rank's part.

        Source: ``FSDPParam._get_grad_inner_tensor`` of torch 2.13. An embedding's is whole.
        """
        if self.tensor_ranks == 1:
            return
        for weight in unit.plan.weights:
            own = num_elements(self.weights[weight].shape) * DTYPE_BYTES[self.weights[weight].dtype]
            number = self.gradients.get(weight)
            if number is not None and self.to.out.sizes[number] > own:
                unit.accumulated[weight] = self.to.alloc(
                    own, Category.GRADIENTS, "fsdp: the rank's part of a whole gradient"
                )
                self.consume(weight)

    def _keep_unreduced(self, unit: Unit) -> None:
        """Without reduction, gradients are kept whole, in the dtype of the reduction."""
        for weight in unit.plan.weights:
            if weight not in self.gradients or self.reduce_dtype is None:
                continue
            if self.reduce_dtype == self.weights[weight].dtype:
                continue
            elements = num_elements(self.weights[weight].shape)
            unit.accumulated[weight] = self.to.alloc(
                elements * DTYPE_BYTES[self.reduce_dtype], Category.GRADIENTS,
                "fsdp: gradient that is not reduced yet",
            )  # fmt: skip
            self.consume(weight)

    def _reduce(self, unit: Unit, gradients: list[int]) -> None:
        """``foreach_reduce``: one input, one output; the shards' gradients are views of it."""
        to = self.to
        dtypes = [self.reduce_dtype or self.weights[w].dtype for w in gradients]
        shard = sum(self._shard_bytes(w, dtype) for w, dtype in zip(gradients, dtypes, strict=True))
        ranks = self._ranks(unit)
        source = self._alloc(ranks * shard, "fsdp: reduce-scatter input", 0)
        # a loop variable of foreach_reduce keeps the last one until it returns
        last = gradients[-1:] if ranks > 1 else []
        # list.clear() begins at the end
        for weight in reversed(gradients[: len(gradients) - len(last)]):
            self._let_go(unit, weight)
        result = to.alloc(
            shard, Category.GRADIENTS, "fsdp: reduce-scatter output", stream=REDUCE_SCATTER_STREAM
        )
        if ranks == 1 and unit.plan.ranks is not None:
            # the batches of other ranks are in these gradients too: divided before they are copied
            to.free(self._alloc(shard, "fsdp: divided gradients", REDUCE_SCATTER_STREAM))
        stored = {self.stored[w] for w in gradients}
        passing = []
        if stored != set(dtypes):
            own = sum(self._shard_bytes(w, self.stored[w]) for w in gradients)
            stream = ALL_REDUCE_STREAM if self.replicated else REDUCE_SCATTER_STREAM
            cast = to.alloc(own, Category.GRADIENTS, "fsdp: reduced gradients", stream=stream)
            passing.append(result)
            result = cast
            self._pass(unit, passing)
            passing = []
        for weight in last:
            self._let_go(unit, weight)
        if self.offloads:
            if not unit.on_host:
                unit.on_host = True
                to.out.host_bytes += sum(self._shard_bytes(w, self.stored[w]) for w in gradients)
            passing.append(result)
        elif unit.sharded_gradients:
            passing.append(result)
        else:
            unit.sharded_gradients.append(result)
            unit.dropped.clear()
        self._pass(unit, passing)
        self._reducing.append(source)

    def _pass(self, unit: Unit, numbers: Sequence[int]) -> None:
        """What is reduced and not kept goes, with replicas at the end of the backward.

        Until then a reference keeps the all-reduce's buffer (``AllReduceState``).
        """
        if self.replicated:
            unit.reduced.extend(numbers)
        else:
            for number in numbers:
                self.to.free(number)

    def _let_go(self, unit: Unit, weight: int) -> None:
        if weight in unit.accumulated:
            self.to.free(unit.accumulated.pop(weight))
        else:
            self.consume(weight)

    def _final_callback(self) -> None:
        """``_root_post_backward_final_callback``, over all units in the order of the modules."""
        if not self._began:
            return
        self._began = False
        for unit in self._in_module_order():
            if unit.state is not State.POST_BACKWARD and unit.plan.weights:
                self._post_backward(unit)
            unit.state = State.IDLE
            unit.fed_by, unit.reached = None, False
            unit.indices.clear()
            unit.awaited.clear()
            while unit.reduced:
                self.to.free(unit.reduced.pop(0))
            if unit.gathered is not None:
                self.to.free(unit.gathered)
                unit.gathered = None
        self._order.clear()
        while self._reducing:
            self.to.free(self._reducing.pop(0))

    def _in_module_order(self) -> list[Unit]:
        names = {name: place for place, name in enumerate(self.to.out.module_names)}
        return sorted(self._units, key=lambda unit: min(names.get(m, 0) for m in unit.plan.modules))
