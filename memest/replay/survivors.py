"""What a recording keeps: allocations of each pass of the training loop that never die.

A recording has no steps. Its passes are found by what repeats: code that allocates once in a pass
does so as often as there are passes, whatever the sizes, and most code of a step is of that kind
or repeats a multiple of it. Layers repeat likewise within one step; but the embedding goes before
them, and behind the last of them come the head and the backward, which are in no other repetition.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from memest.replay.sites import Role, line_of, role_of, site_of
from memest.replay.sizes import round_size
from memest.replay.snapshot import Snapshot, TraceEvent

__all__ = ["KeptSite", "PassPoint", "RecordedPasses", "passes_of"]

_FEWEST = 4
"""Passes that growth can be told by: the first differs, the last is not over."""
_COVERED = 0.3
"""How much of a recording the births of code must span to be of every pass of it."""
_SHARE = 0.15
"""Places in the code that repeat once a pass, for each of those that repeat most alike: a layer has
more of them than what is around the layers."""
_NEW = 0.1
"""Code that is only before the first repetition, or only in the last one, for each that is in them:
above it, what repeats are layers. An evaluation, or the first optimizer step, may come last."""
_TAKEN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_IN_USE = ("active_allocated", "active_awaiting_free", "active_pending_free")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSite:
    """One place in the code whose allocations stay.

    Attributes:
        site: the innermost code and its caller; empty where no Python frame was recorded.
        line: the innermost line of the user's own code.
        role: the part of a step it is of.
        places: different ways there, with the frames of torch that the site leaves out.
        count: allocations that are alive at the end.
        bytes: of them all.
        passes: those that they were made in, 0 for the first; -1 for what came before.
        pass_bytes: made and kept in a pass, the median over the passes that kept any.
        grows: whether pass after pass adds to it.
    """

    site: str
    line: str
    role: Role
    places: int
    count: int
    bytes: int
    passes: tuple[int, ...]
    pass_bytes: int
    grows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPoint:
    """Memory in one pass: what was allocated when it ended, at most, and reserved; bytes.

    Attributes:
        largest_bytes: the largest request of it.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPasses:
    """A device's recording, pass by pass.

    Attributes:
        device: its index.
        before_bytes: allocated before the first pass.
        points: of each pass; none where nothing repeats.
        sites: what is alive at the end of what was recorded, the largest first.
        has_frames: whether the recording says what code allocates.
    """

    device: int
    before_bytes: int
    points: tuple[PassPoint, ...]
    sites: tuple[KeptSite, ...]
    has_frames: bool


def passes_of(snapshot: Snapshot, content: Mapping[str, Any]) -> RecordedPasses | None:
    """The passes of the device with the longest history; None where there is no history.

    Args:
        snapshot: a recording.
        content: what it was read from, with the frames.
    """
    device = max(range(len(snapshot.traces)), key=lambda d: len(snapshot.traces[d]), default=None)
    if device is None or not snapshot.traces[device]:
        return None
    stacks, frames = _stacks(content["device_traces"][device])
    begins = _begins(stacks, frames)
    before, points = _points(snapshot, device, begins) if begins else (0, [])
    return RecordedPasses(
        device=device,
        before_bytes=before,
        points=tuple(points),
        sites=_kept(snapshot, device, stacks, frames, begins),
        has_frames=any(frames),
    )


def _stacks(trace: Sequence[Mapping[str, Any]]) -> tuple[array[int], list[Any]]:
    """For each entry the number of its stack, -1 where nothing is allocated; and the stacks."""
    numbers: dict[tuple[Any, ...], int] = {}
    by_identity: dict[int, int] = {}
    stacks = array("l", [-1]) * len(trace)
    frames: list[Any] = []
    for index, entry in enumerate(trace):
        if entry["action"] != "alloc":
            continue
        found = entry.get("frames") or []
        number = by_identity.get(id(found))  # a pickle has equal stacks once, or many times
        if number is None:
            key = tuple((f["filename"], f["line"], f["name"]) for f in found)
            number = numbers.setdefault(key, len(frames))
            if number == len(frames):
                frames.append(found)
            if found:
                by_identity[id(found)] = number
        stacks[index] = number
    return stacks, frames


def _begins(stacks: Sequence[int], frames: Sequence[Any]) -> list[int]:
    """Where passes begin: the births of the earliest code that allocates once in each."""
    births: dict[int, list[int]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        if stack >= 0:
            births[stack].append(index)
    lasting = [
        at for at in births.values() if len(at) > 1 and at[-1] - at[0] >= _COVERED * len(stacks)
    ]
    alike = Counter(map(len, lasting))
    # a recording can begin and end within a pass
    near = {count: alike[count] + alike[count + 1] for count in alike}
    enough = max([2.0, *(_SHARE * number for number in near.values())])
    passes = min((count for count, number in near.items() if number >= enough), default=0)
    if passes < _FEWEST:
        return []
    begins = min(at for at in lasting if passes <= len(at) <= passes + 1)
    return [] if _are_layers(begins, births, frames) else begins


def _are_layers(
    begins: Sequence[int], births: Mapping[int, Sequence[int]], frames: Sequence[Any]
) -> bool:
    """Whether what repeats are layers of one step: other code goes before, or comes behind them."""
    roles = {stack: role_of(frames[stack]) for stack in births}
    ends = (Role.EVALUATION, Role.OPTIMIZER)
    new = sum(at[0] > begins[-1] and roles[stack] not in ends for stack, at in births.items())
    old = sum(at[-1] < begins[0] and roles[stack] is Role.FORWARD for stack, at in births.items())
    seen = sum(at[-1] >= begins[0] and at[0] <= begins[-1] for at in births.values())
    return any(count > max(1, _NEW * seen) for count in (new, old))


def _points(snapshot: Snapshot, device: int, begins: Sequence[int]) -> tuple[int, list[PassPoint]]:
    """Memory in front of the passes, and in each: counted back from the segments of the end."""
    trace = snapshot.traces[device]
    segments = [segment for segment in snapshot.segments if segment.device == device]
    allocated = sum(b.size for s in segments for b in s.blocks if b.state in _IN_USE)
    reserved = sum(segment.size for segment in segments)
    reserved -= sum(_TAKEN.get(event.action, 0) * event.size for event in trace)
    divisions = snapshot.conf.roundup_power2_divisions

    def added(event: TraceEvent) -> int:
        """Bytes of blocks that an event hands out; a trace has what was requested."""
        if event.action not in ("alloc", "free_completed"):
            return 0
        size = round_size(event.size, divisions)
        return size if event.action == "alloc" else -size

    allocated -= sum(map(added, trace))
    before, points, start = 0, [], 0
    for stop in (*begins, len(trace)):
        peak, largest = allocated, 0
        for event in trace[start:stop]:
            allocated += added(event)
            peak = max(peak, allocated)
            reserved += _TAKEN.get(event.action, 0) * event.size
            if event.action == "alloc":
                largest = max(largest, event.size)
        if stop != start or start:
            points.append(
                PassPoint(
                    allocated_bytes=allocated,
                    peak_allocated_bytes=peak,
                    reserved_bytes=reserved,
                    largest_bytes=largest,
                )
            )
        start = stop
    if begins[0]:
        before = points.pop(0).allocated_bytes
    return before, points


def _kept(
    snapshot: Snapshot,
    device: int,
    stacks: Sequence[int],
    frames: Sequence[Any],
    begins: Sequence[int],
) -> tuple[KeptSite, ...]:
    """The sites of what was born in the recording and is alive at its end."""
    trace, divisions = snapshot.traces[device], snapshot.conf.roundup_power2_divisions
    alive: dict[int, int] = {}
    for index, event in enumerate(trace):
        if event.action == "alloc":
            alive[event.address] = index
        elif event.action == "free_requested":
            alive.pop(event.address, None)
    by_site: dict[tuple[str, str, Role], list[int]] = defaultdict(list)
    names = {stack: _name(frames[stack]) for stack in {stacks[index] for index in alive.values()}}
    for index in alive.values():
        by_site[names[stacks[index]]].append(index)
    sites = []
    for (site, line, role), indices in by_site.items():
        kept: Counter[int] = Counter()
        for index in indices:
            kept[bisect_right(begins, index) - 1] += round_size(trace[index].size, divisions)
        sites.append(
            KeptSite(
                site=site,
                line=line,
                role=role,
                places=len({stacks[index] for index in indices}),
                count=len(indices),
                bytes=kept.total(),
                passes=tuple(sorted(kept)),
                pass_bytes=int(median(size for number, size in kept.items() if number >= 0))
                if max(kept) >= 0
                else 0,
                grows=_grows(kept, len(begins)),
            )
        )
    return tuple(sorted(sites, key=lambda each: -each.bytes))


def _name(frames: Any) -> tuple[str, str, Role]:
    if not frames:
        return "", "", Role.BACKWARD  # the autograd engine's threads have no Python frames
    return site_of(frames), line_of(frames), role_of(frames)


def _grows(kept: Mapping[int, int], passes: int) -> bool:
    """Whether passes between the first and the last kept some, over half of the recording.

    What lives from one pass to the next, as gradients and the batch do, is of the last pass alone;
    what stays from the first one, as states of the optimizer do, of the first.
    """
    if passes < _FEWEST:
        return False
    between = [number for number in kept if 0 < number < passes - 1]
    return len(between) > 1 and between[-1] - between[0] >= (passes - 1) // 2 - 1
