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
from itertools import pairwise
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
        forward_places: different ways to allocations of a forward, whether they stay or not.
    """

    device: int
    before_bytes: int
    points: tuple[PassPoint, ...]
    sites: tuple[KeptSite, ...]
    has_frames: bool
    forward_places: int


def passes_of(snapshot: Snapshot, content: Mapping[str, Any], device: int) -> RecordedPasses:
    """The passes of a device.

    Args:
        snapshot: a recording.
        content: what it was read from, with the frames.
        device: its index.
    """
    stacks, frames = _stacks(content["device_traces"][device])
    names = [_name(each) for each in frames]
    begins = _begins(stacks, [role for _, _, role in names])
    before, points = _points(snapshot, device, begins) if begins else (0, [])
    return RecordedPasses(
        device=device,
        before_bytes=before,
        points=tuple(points),
        sites=_kept(snapshot, device, stacks, names, begins),
        has_frames=any(frames),
        forward_places=sum(role in (Role.FORWARD, Role.EVALUATION) for _, _, role in names),
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


def _begins(stacks: Sequence[int], roles: Sequence[Role]) -> list[int]:
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
    return [] if _are_layers(begins, births, roles) else begins


def _are_layers(
    begins: Sequence[int], births: Mapping[int, Sequence[int]], roles: Sequence[Role]
) -> bool:
    """Whether what repeats are layers of one step: other code goes before, or comes behind them."""
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
    names: Sequence[tuple[str, str, Role]],
    begins: Sequence[int],
) -> tuple[KeptSite, ...]:
    """The sites of what was born in the recording and is alive at its end."""
    trace, divisions = snapshot.traces[device], snapshot.conf.roundup_power2_divisions
    alive: dict[int, int] = {}
    longest: Counter[tuple[str, str, Role]] = Counter()  # passes that what died had lived through
    for index, event in enumerate(trace):
        if event.action == "alloc":
            alive[event.address] = index
        elif event.action.startswith("free_") and (born := alive.pop(event.address, -1)) >= 0:
            name, lived = names[stacks[born]], bisect_right(begins, index)
            longest[name] = max(longest[name], lived - bisect_right(begins, born))
    by_site: dict[tuple[str, str, Role], list[int]] = defaultdict(list)
    for index in alive.values():
        by_site[names[stacks[index]]].append(index)
    sites = []
    for name, indices in by_site.items():
        site, line, role = name
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
                grows=_grows(sorted(kept), len(begins), longest[name]),
            )
        )
    return tuple(sorted(sites, key=lambda each: -each.bytes))


def _name(frames: Any) -> tuple[str, str, Role]:
    if not frames:
        return "", "", Role.BACKWARD  # the autograd engine's threads have no Python frames
    return site_of(frames), line_of(frames), role_of(frames)


def _grows(kept: Sequence[int], passes: int, longest: int) -> bool:
    """Whether passes between the first and the last kept some, over half of the recording.

    What lives from one pass to the next, as gradients and the batch do, is of the last pass alone;
    what stays from the first one, as states of the optimizer do, of the first. A buffer that is
    full takes no more, or gives back what is as old as the oldest it has.

    Args:
        kept: passes that kept some, in order.
        passes: how many there are.
        longest: passes that what died had lived through.
    """
    between = [number for number in kept if 0 < number < passes - 1]
    if passes <= _FEWEST or len(between) < 2:
        return False
    seldom = max(after - before for before, after in pairwise(between))
    return (
        between[-1] - between[0] >= (passes - 1) // 2 - 1
        and passes - 2 - between[-1] <= seldom
        and passes - 1 - between[0] > longest
    )
