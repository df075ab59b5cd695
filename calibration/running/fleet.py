"""A campaign on a Ray cluster: an actor beside every GPU, and one store, which is the driver's.

Cases belong to an environment, that is a kind of GPU with its software: every environment gets all
of them, and the actors of one environment take them from one queue. What workers say travels to the
driver as they say it, and is kept as the local runner keeps it. So an actor or a node that is lost
takes with it no more than the end of its case.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import Failure, Status, environment_from_dict
from memest.calibration.running.runner import Progress, Summary, events_folder
from memest.calibration.running.station import Station
from memest.calibration.store import MeasurementStore, Open
from memest.errors import DeviceError, MemestError
from memest.installed import release
from memest.search.on_ray import check_ray, connect
from memest.whole_files import write_whole

__all__ = ["Place", "places_of", "run_on_ray"]

_START_SECONDS = 600.0
"""Stations that are not there by then (others may use their GPUs) are done without."""
_MORE_SECONDS = 60.0
"""The same where others of the kind have measured everything."""
_POLL_SECONDS = 2.0
_TRIES = 2
"""How often a case is begun that takes its actor with it."""
_LOSSES = 3
"""How many actors a place may lose before it is left alone."""


@dataclass(eq=False, slots=True)
class Place:
    """One device of a cluster.

    Attributes:
        node: Ray's identifier of the node.
        kind: ``cpu``, or the type of accelerator as Ray names it; empty if it does not.
        lost: actors that were lost there.
    """

    node: str
    kind: str
    lost: int = 0


@dataclass(eq=False, slots=True)
class _Group:
    """The stations of one environment, and what is left for them to do."""

    summary: Summary
    queue: deque[tuple[Case, int]]


@dataclass(eq=False, slots=True)
class _Post:
    """The driver's side of a station.

    Attributes:
        pending: what it is expected to answer, or the stream of its messages; None while idle.
        host: its node's name, once it has told.
        opened: the run under way.
        tries: how often its case was begun.
    """

    place: Place
    actor: Any
    pending: Any
    host: str = ""
    group: _Group | None = None
    opened: Open | None = None
    tries: int = 0


def run_on_ray(
    cases: Sequence[Case], device: str, store: MeasurementStore, *, command: str, timeout: float,
    budget: float | None, address: str | None, tell: Callable[[Progress], None],
) -> list[Summary]:  # fmt: skip
    """Measure all cases on every kind of GPU of a cluster; those in the store are passed over.

    Args:
        cases: in the order to be run.
        device: ``auto`` (GPUs where the cluster has any, else CPUs), ``cuda`` or ``cpu``.
        store: where results go.
        command: the command line, for the records.
        timeout: seconds after which a case is ended.
        budget: seconds after which no further case is begun, None = no limit.
        address: of the cluster; None for ``RAY_ADDRESS``, and without that for one of this machine.
            A connection that is there already is used as it is.
        tell: hears of the progress.

    Returns:
        What was done in each environment.

    Raises:
        MissingDependencyError: without ray.
        MemestError: no cluster can be reached, it has no such devices, or another memest.
        KeyboardInterrupt: cases under way are kept as interrupted.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    check_ray(address, what="Measuring on a cluster")
    import ray

    if release("memest") is None:
        raise MemestError(
            "Measuring on a cluster needs memest installed, here and on every node: "
            "pip install 'memest[calibration,ray]'."
        )
    store.recover()
    connected = ray.is_initialized()
    if not connected:
        connect(address)
    try:
        places = places_of(ray.nodes(), device, most=len(cases))
        fleet = _Fleet(cases, store, command, timeout, budget, tell)
        return fleet.run(places)
    finally:
        if not connected:
            ray.shutdown()


def places_of(nodes: Sequence[dict[str, Any]], device: str, *, most: int) -> list[Place]:
    """The devices of a cluster, no more of one kind than there are cases.

    Args:
        nodes: as ``ray.nodes()`` lists them.
        device: ``auto``, ``cuda`` or ``cpu``.
        most: cases.

    Raises:
        DeviceError: there is none.
    """
    found: dict[str, list[Place]] = {}
    for node in nodes:
        resources = node["Resources"] if node["Alive"] else {}
        types = [n.partition(":")[2] for n in resources if n.startswith("accelerator_type:")]
        kind = types[0] if types else ""
        for name, label in (("GPU", kind), ("CPU", "cpu")):
            number = int(resources.get(name, 0))
            found.setdefault(name, []).extend(Place(node["NodeID"], label) for _ in range(number))
    wanted = "CPU" if device == "cpu" else "GPU"
    if device == "auto" and not found.get("GPU"):
        wanted = "CPU"
    out: list[Place] = []
    for place in found.get(wanted, ()):
        if sum(1 for other in out if other.kind == place.kind) < most:
            out.append(place)
    if not out:
        raise DeviceError(
            f"--device {device}: no node of the Ray cluster has a {wanted}. `ray status` on the "
            "cluster lists what it has."
        )
    return out


@dataclass(eq=False)
class _Fleet:
    cases: Sequence[Case]
    store: MeasurementStore
    command: str
    timeout: float
    budget: float | None
    tell: Callable[[Progress], None]
    _groups: dict[str, _Group] = field(default_factory=dict)
    _posts: list[_Post] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def run(self, places: Sequence[Place]) -> list[Summary]:
        """Have all cases measured at all places."""
        try:
            for place in places:
                self._start(place)
            while any(post.pending is not None for post in self._posts):
                self._turn()
        except BaseException as error:
            self._interrupt(error)
            raise
        finally:
            for post in list(self._posts):
                self._dismiss(post)
        if not self._groups:
            raise DeviceError(self._problems[0])
        return self._summaries()

    # -- stations

    def _start(self, place: Place) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_cpu = place.kind == "cpu"
        options: dict[str, Any] = {"num_cpus": 1} if on_cpu else {"num_cpus": 0, "num_gpus": 1}
        if place.kind and not on_cpu:
            options["accelerator_type"] = place.kind
        there = NodeAffinitySchedulingStrategy(node_id=place.node, soft=False)
        make = ray.remote(Station).options(scheduling_strategy=there, max_restarts=0, **options)
        actor = make.remote("cpu" if on_cpu else "cuda:0", self.command)
        self._posts.append(_Post(place, actor, actor.describe.remote(release("memest"))))

    def _turn(self) -> None:
        """Wait for what stations have to say, and answer it."""
        import ray

        posts = {post.pending: post for post in self._posts if post.pending is not None}
        ready, _ = ray.wait(list(posts), num_returns=1, timeout=_POLL_SECONDS)
        if ready:
            # all that have something to say by now, so that nobody waits for the talkative
            ready, _ = ray.wait(list(posts), num_returns=len(posts), timeout=0)
        for pending in ready:
            if posts[pending] in self._posts:
                self._answer(posts[pending])
        for post in self._posts:
            if post.opened is not None:
                post.opened.still_here()
        self._do_without_late_ones()

    def _answer(self, post: _Post) -> None:
        import ray

        try:
            if post.group is None:
                self._described(post, ray.get(post.pending))
                return
            for message in ray.get(next(post.pending)):
                self._hear(post, message)
        except (ray.exceptions.RayError, StopIteration) as error:
            self._lose(post, error)

    def _described(self, post: _Post, told: dict[str, Any]) -> None:
        post.host = told["host"]
        if "another" in told:
            raise MemestError(
                f"{post.host} of the Ray cluster has memest {told['another']} and this machine "
                f"has {release('memest')}: install the same version everywhere."
            )
        if "problem" in told:
            self._problems.append(f"{post.host} of the Ray cluster: {told['problem']}")
            self._dismiss(post)
            return
        environment = environment_from_dict(told["environment"])
        post.group = self._groups.setdefault(
            environment.key,
            _Group(Summary(environment), deque((case, 1) for case in self.cases)),
        )
        self._next(post)

    def _lose(self, post: _Post, error: Exception) -> None:
        """A station is gone: its case goes to another one, and its place gets a new one."""
        import ray

        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"{post.host or 'a node'} of the Ray cluster: {lines[-1].strip()}"
        self._dismiss(post)
        group, opened = post.group, post.opened
        if group is None:
            if not post.place.lost:  # else the node itself is going, and its loss is on record
                self._problems.append(f"{why} (nodes need memest with its extra for calibration)")
            return
        if opened is not None:
            failure = Failure(kind=type(error).__name__, message=f"its actor is gone; {why}")
            self._ended(post, opened, Status.CRASHED, failure)
            if post.tries < _TRIES:
                group.queue.appendleft((opened.case, post.tries + 1))
        post.place.lost += 1
        alive = any(n["NodeID"] == post.place.node and n["Alive"] for n in ray.nodes())
        if group.queue and alive and post.place.lost < _LOSSES:
            self._start(post.place)
        for other in self._posts:
            if other.group is group and other.pending is None:
                self._next(other)

    def _dismiss(self, post: _Post) -> None:
        import ray

        if post in self._posts:
            self._posts.remove(post)
        post.pending = None
        with contextlib.suppress(Exception):
            # its nursery and its worker go with it
            ray.kill(post.actor)

    def _do_without_late_ones(self) -> None:
        """Nobody waits for ever for devices that others use."""
        if any(post.opened is not None for post in self._posts):
            return
        spent = time.monotonic() - self._began
        over = self.budget is not None and spent > self.budget and bool(self._groups)
        known = {post.place.kind for post in self._posts if post.group is not None}
        late = [
            post
            for post in self._posts
            if post.pending is not None
            and (over or spent > (_MORE_SECONDS if post.place.kind in known else _START_SECONDS))
        ]
        if late and not over:
            self._problems.append(
                f"{len(late)} devices of the Ray cluster were not free within {spent:.0f} s"
            )
        for post in late:
            self._dismiss(post)

    # -- cases

    def _next(self, post: _Post) -> None:
        """Give a station the next case of its group; without one it stays, in case of a loss."""
        group = post.group
        assert group is not None
        post.pending = None
        while group.queue:
            spent = time.monotonic() - self._began
            if self.budget is not None and spent > self.budget:
                return
            case, post.tries = group.queue.popleft()
            if case.processes > 1 and post.place.kind != "cpu":
                group.summary.passed_over += 1  # an actor has one GPU
                self._tell(case, skipped=True)
                continue
            opened = self.store.begin(case, group.summary.environment)
            if opened is None:
                group.summary.skipped += 1
                self._tell(case, skipped=True)
                continue
            limit = self.timeout
            if self.budget is not None:
                limit = min(limit, max(self.budget - spent, 1.0) + self.timeout / 4)
            post.opened = opened
            streaming = post.actor.measure.options(num_returns="streaming")
            post.pending = streaming.remote(opened.run, case.to_dict(), limit)
            self._tell(case)
            return

    def _hear(self, post: _Post, message: dict[str, Any]) -> None:
        assert post.opened is not None
        if message["kind"] != "end" or message.get("rank"):
            post.opened.hear(message)
            return
        events = ""
        if message["history"] is not None:
            folder = events_folder(self.store.path)
            folder.mkdir(parents=True, exist_ok=True)
            events = f"{post.opened.run}.jsonl.gz"
            write_whole(folder / events, message["history"])
        opened, post.opened = post.opened, None
        self._ended(post, opened, message["status"], message["failure"], events)
        self._next(post)

    def _ended(
        self, post: _Post, opened: Open, status: Status, failure: Failure | None, events: str = ""
    ) -> None:
        assert post.group is not None
        measured = opened.close(status, failure, events)
        post.group.summary.measured.append(measured)
        self._tell(opened.case, measured=measured)

    def _interrupt(self, error: BaseException) -> None:
        by_hand = isinstance(error, KeyboardInterrupt)
        said = "the campaign was ended by hand" if by_hand else str(error)
        kind = type(error).__name__
        for post in self._posts:
            if post.opened is not None:
                post.opened.close(Status.INTERRUPTED, Failure(kind=kind, message=said or kind))
                post.opened = None

    # -- what is said

    def _tell(self, case: Case, **how: Any) -> None:
        summaries = [group.summary for group in self._groups.values()]
        ended = sum(len(s.measured) + s.skipped + s.passed_over for s in summaries)
        queued = sum(len(group.queue) for group in self._groups.values())
        busy = sum(1 for post in self._posts if post.opened is not None)
        total = ended + queued + busy
        seconds = [m.seconds for s in summaries for m in s.measured]
        left = None
        if seconds:
            left = sum(seconds) / len(seconds) * (total - ended) / max(len(self._posts), 1)
        number = ended if how else ended + busy
        self.tell(Progress(number, total, case, seconds_left=left, **how))

    def _summaries(self) -> list[Summary]:
        spent = time.monotonic() - self._began
        in_time = self.budget is None or spent <= self.budget
        out = [group.summary for group in self._groups.values()]
        for group in self._groups.values():
            group.summary.left = len(group.queue)
            group.summary.seconds = round(spent, 3)
            if group.queue and in_time:
                gpu = group.summary.environment.gpu
                self._problems.append(f"no actor on a {gpu} is left, start the campaign again")
        if any(summary.passed_over for summary in out):
            self._problems.append(
                "An actor has one GPU: runs of several processes are measured without --ray"
            )
        out[0].remarks = tuple(dict.fromkeys(self._problems))
        return out
