"""A model that is trained beside a reference that does not train, each wrapped by itself.

To the library the reference is a model of its own, with its own root, order of gathers and shards
(``prepare_fsdp`` and ``prepare_deepspeed`` of TRL 1.16, ``trl/models/utils.py``, which wrap it
before the Trainer wraps the other). Under FSDP2 TRL calls ``fully_shard`` on it once: all of it is
one unit, which a forward gathers at once. Under ZeRO-3 it is an engine without an optimizer, which
gathers and prefetches as the other does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from memest.errors import TraceError
from memest.events import (
    OF_MODULES,
    OF_WEIGHTS,
    REFERENCE,
    Category,
    CueKind,
    Landmarks,
    Mark,
    Phase,
    Weight,
)
from memest.sharding.engine import ShardedRank, Wrapper
from memest.sharding.fsdp import is_inside
from memest.sharding.fsdp_units import UnitPlan
from memest.sharding.zero3_fetch import Fetcher

__all__ = [
    "REFERENCE_STREAM",
    "WithReference",
    "reference_landmarks",
    "reference_unit",
    "reference_weights",
]

REFERENCE_STREAM = 4
"""Where the reference is gathered: a root of FSDP2 and an engine of DeepSpeed have streams of their
own (``FSDPCommContext``, ``DeepSpeedZeRoOffload``), and blocks are of one stream."""


def reference_weights(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The parameters of the reference: those of the model once more, none of which trains."""
    return tuple(
        replace(weight, name=f"{REFERENCE}.{weight.name}", trains=False, has_grad=False)
        for weight in weights
    )


def reference_landmarks(landmarks: Landmarks) -> Landmarks:
    """What the reference has of a model's landmarks: who shares parameters."""
    paths = landmarks.shared_paths.items()
    return Landmarks(
        shared_paths={f"{REFERENCE}.{alias}": f"{REFERENCE}.{name}" for alias, name in paths}
    )


def reference_unit(num_weights: int, *, reshards: bool) -> UnitPlan:
    """The one call of ``fully_shard`` on the reference."""
    return UnitPlan(modules=(REFERENCE,), weights=tuple(range(num_weights)), reshards=reshards)


@dataclass(slots=True, kw_only=True)
class WithReference(Wrapper):
    """Two wrapped models in one stream.

    The reference is loaded behind the model, tensor by tensor in the same order: so each of its
    parameters is known by that of the model.

    Attributes:
        trained: the rank's part of the model.
        reference: its part of the reference.
        synced: what gathers both, where the reference takes the model's weights over after every
            step; none where nothing is gathered for it.
    """

    trained: ShardedRank
    reference: ShardedRank
    synced: Sequence[Fetcher] = ()
    _loaded: list[int] = field(default_factory=list)
    _loaded_again: list[int] = field(default_factory=list)
    _twins: dict[int, int] = field(default_factory=dict)
    _runs: bool = False

    def __post_init__(self) -> None:
        self.notes, self.on_host = self.trained.notes, self.trained.on_host

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        if self.to.phase is not Phase.LOAD:
            return self.trained.allocates(number)
        if self.to.category(number) is not Category.REFERENCE:
            self._loaded.append(number)
            return self.trained.allocates(number)
        place = len(self._loaded_again)
        self._loaded_again.append(number)
        twin = self._loaded[min(place, len(self._loaded) - 1)]
        return self.to.category(twin) is not Category.PARAMETERS

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        return self.trained.frees(number)

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`: backwards and updates are none of the reference's."""
        self.trained.begins(mark)
        if mark.phase is Phase.ZERO_GRAD:
            self._sync()

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        self.trained.leaves(phase)

    def _sync(self) -> None:
        """``SyncRefModelCallback.sync_target_model`` of TRL 1.16, at the end of a step.

        Under stage 3 all parameters of both are gathered at once, and partitioned into the shards
        that there are; what is computed between is computed in place.
        """
        for fetcher in self.synced:
            fetcher.gather_all()
        for fetcher in self.synced:
            fetcher.partition_all(forgets=False)

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`; the reference is wrapped first."""
        if kind is CueKind.PLACED:
            if not self._twins:
                self._pair()
            self.reference.cue(kind, index, self._twins[number])
        elif self._is_asked(kind, index):
            self.reference.cue(kind, index, number)
            return
        self.trained.cue(kind, index, number)

    def _pair(self) -> None:
        if len(self._loaded) != len(self._loaded_again):
            raise TraceError(
                f"the reference is loaded in {len(self._loaded_again)} pieces and the model in "
                f"{len(self._loaded)}, so what shards it is not known: leave --fsdp or --zero out."
            )
        self._twins = dict(zip(self._loaded, self._loaded_again, strict=True))

    def _is_asked(self, kind: CueKind, index: int) -> bool:
        """Whether a cue is about the reference; weights have the numbers of the model's."""
        if kind not in OF_MODULES:
            return self._runs and kind in OF_WEIGHTS
        name = self.to.out.module_names[index]
        if name == REFERENCE and kind in (CueKind.PRE_FORWARD, CueKind.POST_FORWARD):
            self._runs = kind is CueKind.PRE_FORWARD
        return is_inside(name, REFERENCE)
