"""What FSDP1 and FSDP2 share: units that are gathered when hooks of modules ask for them.

The two differ in what a unit's storages are (one flat parameter, or each parameter by itself) and
in when they are made and let go of: :mod:`memest.sharding.fsdp1`, :mod:`memest.sharding.fsdp2`.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import CAST, Category, CueKind, Mark, Phase
from memest.sharding.engine import ShardedRank, num_elements
from memest.sharding.fsdp_units import ROOT, UnitPlan
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["ALL_REDUCE_STREAM", "FsdpRank", "FsdpUnit", "State", "is_inside"]

ALL_REDUCE_STREAM = 3


class State(enum.Enum):
    """``TrainingState`` of the library."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is another one, or lies in it."""
    return outer == ROOT or module == outer or module.startswith(f"{outer}.")


@dataclass(slots=True, eq=False)
class FsdpUnit:
    """A parameter group.

    Attributes:
        plan: which modules and weights.
        is_root: the outermost one.
        state: where its training is.
        gather_buffer: of its all-gather, while a gather waits to be copied out.
        full: its unsharded parameters, by weight.
        sharded_gradient: the storage that the shards' gradients are views of.
        fed_by: the module whose inputs lead back to earlier layers: when autograd leaves it, the
            unit is done.
        dropped_gradients: weights whose gradients ``zero_grad`` has dropped.
    """

    plan: UnitPlan
    is_root: bool
    state: State = State.IDLE
    gather_buffer: int | None = None
    full: dict[int, int] = field(default_factory=dict)
    sharded_gradient: int | None = None
    fed_by: str | None = None
    dropped_gradients: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class FsdpRank(ShardedRank):
    """One rank of FSDP.

    Attributes:
        stored_dtypes: in which each weight is stored.
        plans: units in the order in which they are made.
        ranks: of the group that shards.
        replicated: there are other groups, with which reduced gradients are averaged (HSDP).
        offloads: shards and their gradients are in host memory (``CPUOffloadPolicy``).
        skips_sync: all micro-steps but the last of a step accumulate without reduction.
        on_device: the weights are on the device before they are cut, all at once: quantized ones
            are made there.
        units: one for each plan.
        syncs: gradients of this micro-step are reduced.
        has_begun: autograd has come to the first module of this backward.
    """

    stored_dtypes: Sequence[str]
    plans: Sequence[UnitPlan]
    ranks: int
    replicated: bool = False
    offloads: bool = False
    skips_sync: bool
    on_device: bool = False
    units: list[FsdpUnit] = field(default_factory=list)
    syncs: bool = True
    has_begun: bool = False
    _unit_of: dict[int, FsdpUnit] = field(default_factory=dict)
    _number_of: dict[FsdpUnit, int] = field(default_factory=dict)
    _units_at: dict[str, list[FsdpUnit]] = field(default_factory=dict)
    _in_order: list[FsdpUnit] = field(default_factory=list)
    _order: list[FsdpUnit] = field(default_factory=list)
    _cast: int | None = None
    _storage_before_cast: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, plan in enumerate(self.plans):
            unit = FsdpUnit(plan, is_root=plan.modules == (ROOT,))
            self.units.append(unit)
            self._number_of[unit] = number
            self._unit_of.update(dict.fromkeys(plan.weights, unit))
            for module in plan.modules:
                self._units_at.setdefault(module, []).append(unit)

    # -- what the stream brings

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`.

        Casts are gathers' own here: weights that lie there keep the dtype that they came in.
        """
        if self.on_device and self.to.phase is Phase.LOAD and self.to.label(number) == CAST:
            self._cast = number
            return False
        return ShardedRank.allocates(self, number)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        if self._cast is None:
            return ShardedRank.frees(self, number)
        self._storage_before_cast[self._cast], self._cast = number, None
        return False

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        ShardedRank.begins(self, mark)
        self.has_begun = False
        if mark.phase is Phase.FORWARD:
            self.syncs = not self.skips_sync or self.is_boundary

    def hook(self, kind: CueKind, index: int) -> None:
        """See :meth:`ShardedRank.hook`."""
        if kind in (CueKind.ENTER, CueKind.ENTER_FED):
            self.enter(self.name(index), fed=kind is CueKind.ENTER_FED)
        elif kind is CueKind.LEAVE:
            self.leave(self.name(index))
        elif kind is CueKind.BACKWARD:
            self.autograd_at(self.name(index))

    def name(self, module: int) -> str:
        """Path of a module."""
        return self.to.out.module_names[module]

    # -- what the versions do

    @abstractmethod
    def enter(self, module: str, *, fed: bool) -> None:
        """The forward of a module begins.

        Args:
            module: its path.
            fed: its inputs lead back to earlier layers.
        """

    @abstractmethod
    def leave(self, module: str) -> None:
        """The forward of a module is done."""

    @abstractmethod
    def autograd_at(self, module: str) -> None:
        """Autograd comes to what a module has computed."""

    @abstractmethod
    def gather(self, unit: FsdpUnit) -> None:
        """The parameters of a unit are gathered, unless they are."""

    # -- what both do

    def whole(self, weight: int) -> int:
        """A weight before it is cut: where it lies, or brought to the device for that."""
        if self.on_device:
            here = self.storages[weight]
            return self._storage_before_cast.get(here, here)
        nbytes = num_elements(self.weights[weight].shape) * DTYPE_BYTES[self.stored_dtypes[weight]]
        return self.to.alloc(nbytes, Category.COMMUNICATION, "fsdp: whole parameter")

    def alloc_buffer(self, nbytes: int, label: str, stream: int) -> int:
        """Storage of a gather or a reduction."""
        return self.to.alloc(nbytes, Category.COMMUNICATION, label, stream=stream)

    def reshard(self, unit: FsdpUnit) -> None:
        """What was gathered goes."""
        self.to.free(*unit.full.values())
        unit.full.clear()

    def keep_gradient(self, unit: FsdpUnit, number: int) -> None:
        """A storage becomes that of the gradients of a unit's shards."""
        unit.sharded_gradient = number
        unit.dropped_gradients.clear()

    def drop_gradient(self, unit: FsdpUnit) -> None:
        """The gradients of a unit's shards go."""
        if unit.sharded_gradient is not None:
            self.to.free(unit.sharded_gradient)
            unit.sharded_gradient = None

    def drop_if_zeroed(self, unit: FsdpUnit) -> None:
        """They go once ``zero_grad`` has dropped all of them."""
        trained_weights = {weight for weight in unit.plan.weights if self.weights[weight].has_grad}
        if trained_weights and unit.dropped_gradients >= trained_weights:
            self.drop_gradient(unit)
            unit.dropped_gradients.clear()

    def in_module_order(self) -> list[FsdpUnit]:
        """The units as a walk over the modules meets them."""
        if not self._in_order:
            names = {name: place for place, name in enumerate(self.to.out.module_names)}
            self._in_order = sorted(
                self.units, key=lambda unit: min(names.get(m, 0) for m in unit.plan.modules)
            )
        return self._in_order
