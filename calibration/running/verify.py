"""The verdict test: does a run survive in the memory that memest says it needs at most?

Three kinds of trials, all of them real runs whose allocator is held to a limit:

* at the upper bound: a run that was measured is run again in no more than its predicted bound;
* at the size of a smaller card: the verdict for that card says what must happen;
* at the largest batch for a card, which must complete, and at one more, which must not.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memest.calibration.case import Case, Parallel
from memest.calibration.measurement import CPU, Environment, Measurement, Status
from memest.calibration.running.runner import CASE_SECONDS, Bench, Progress
from memest.calibration.store import MeasurementStore
from memest.errors import ConfigError, MemestError, UnknownGpuError
from memest.report.result import Estimate, Verdict
from memest.search.profile import Profile, profile
from memest.units import GIB, format_size

__all__ = ["CARD_SIZES", "Expectation", "Trial", "VerifyOutcome", "trials_of", "verify_store"]

CARD_SIZES = tuple(size * GIB for size in (8, 12, 16, 24, 40, 80))
"""Memory of the cards that people have, bytes."""


class Expectation(enum.StrEnum):
    """What must become of a trial."""

    COMPLETES = "completes"
    RUNS_OUT = "out of memory"
    EITHER = "either"
    """Too close to call: whatever happens is no news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run under a limit, and what must become of it.

    Attributes:
        kind: ``upper bound``, ``card``, ``largest batch`` or ``one more``.
        case: with the limit of its allocator.
        memory_bytes: what the process may have in all: the limit and what it holds beside it.
        expected: what must become of it.
    """

    kind: str
    case: Case
    memory_bytes: int
    expected: Expectation


@dataclass(slots=True)
class VerifyOutcome:
    """What became of all trials.

    Attributes:
        environment: where.
        trials: trials with their measurements.
        skip_reasons: why measured cases were not tried, by case.
        num_left: measured runs that were not tried because the time was spent.
    """

    environment: Environment
    trials: list[tuple[Trial, Measurement]] = field(default_factory=list)
    skip_reasons: dict[str, str] = field(default_factory=dict)
    num_left: int = 0

    @property
    def wrong_trials(self) -> list[tuple[Trial, Measurement]]:
        """Trials that went otherwise than memest said."""
        return [(t, m) for t, m in self.trials if judge(t, m) is False]

    @property
    def kept_its_word(self) -> bool:
        """Whether something was tried and nothing went otherwise."""
        return bool(self.trials) and not self.wrong_trials

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema_version": 1,
            "environment": dataclasses.asdict(self.environment),
            "trials": [
                {
                    "kind": t.kind,
                    "case": t.case.id,
                    "memory_bytes": t.memory_bytes,
                    "cap_bytes": t.case.cap_bytes,
                    "expected": t.expected,
                    "status": m.status.value,
                    "right": judge(t, m),
                    "run": m.run,
                }
                for t, m in self.trials
            ],
            "skipped": self.skip_reasons,
            "left": self.num_left,
        }

    def text(self) -> str:
        """A paragraph for each kind of trial, and a line for each that went otherwise."""
        lines = [f"{self.environment.gpu}, torch {self.environment.torch}"]
        for kind in dict.fromkeys(t.kind for t, _ in self.trials):
            judgements = [(t, m, judge(t, m)) for t, m in self.trials if t.kind == kind]
            right = sum(1 for *_, ok in judgements if ok)
            wrong = sum(1 for *_, ok in judgements if ok is False)
            text = f"{kind}: {right} of {right + wrong} as predicted"
            if open_ := len(judgements) - right - wrong:
                text += f", {open_} without a verdict (too close to call, or the worker failed)"
            lines.append(text)
        for t, m in self.wrong_trials:
            lines.append(
                f"  {t.kind}, {t.case.id} in {format_size(t.memory_bytes)}: {t.expected} was "
                f"predicted, {_status_words(m)}"
            )
        for case, why in self.skip_reasons.items():
            lines.append(f"  not tried: {case}: {why}")
        if self.num_left:
            lines.append(f"{self.num_left} measured runs left for another time")
        if not self.trials:
            lines.append("nothing was tried")
        return "\n".join(lines)


def _status_words(measurement: Measurement) -> str:
    words = {Status.OK: "it completed", Status.OOM: "it ran out of memory"}
    return words.get(measurement.status, f"it {measurement.status.value}")


def judge(trial: Trial, measurement: Measurement) -> bool | None:
    """Whether a trial went as predicted; None where that cannot be said."""
    if measurement.status not in (Status.OK, Status.OOM) or trial.expected is Expectation.EITHER:
        return None
    return (measurement.status is Status.OK) == (trial.expected is Expectation.COMPLETES)


def verify_store(
    store: MeasurementStore,
    device: str,
    *,
    pattern: re.Pattern[str],
    profile: str | None = None,
    boundaries: int = 6,
    command: str = "",
    timeout: float = CASE_SECONDS,
    budget: float | None = None,
    tell: Callable[[Progress], None] = lambda _: None,
) -> VerifyOutcome:
    """Try what a store's measurements and memest's predictions say of this device.

    Args:
        store: results go there too; what was tried before is not tried again.
        device: ``cuda`` or ``cuda:1``.
        pattern: of the names of cases to take.
        profile: file of a calibration whose bounds count, None as by default.
        boundaries: how many setups are tried at their largest batch.
        command: the command line, for the records.
        timeout: seconds after which a run is ended.
        budget: seconds after which no further run is begun.
        tell: hears of the progress.

    Raises:
        ConfigError: on a CPU, whose memory cannot be capped; or nothing was measured yet.
    """
    if device == CPU:
        raise ConfigError(
            "memest calibrate verify needs a GPU: the memory of a CPU run cannot be capped."
        )
    began = time.monotonic()
    with Bench(device, store, command=command, timeout=timeout) as bench:
        outcome = VerifyOutcome(bench.environment)
        measurements = _latest_measurements(store, bench.environment, pattern)
        if not measurements:
            raise ConfigError(
                f"{store.path} has no measurement of {bench.environment.gpu} with this software "
                "to verify: run `memest calibrate run` first."
            )
        # made one after the other: predictions take time too, and time may be short
        for number, m in enumerate(measurements):
            if budget is not None and time.monotonic() - began > budget:
                outcome.num_left = len(measurements) - number
                break
            for trial in trials_of(
                m, outcome.skip_reasons, profile=profile, edge=number < boundaries
            ):
                tell(Progress(number + 1, len(measurements), trial.case))
                measurement = bench.measure(trial.case)
                if measurement is not None:
                    outcome.trials.append((trial, measurement))
                skipped = measurement is None
                tell(
                    Progress(
                        number + 1, len(measurements), trial.case, measurement, skipped=skipped
                    )
                )
        return outcome


def _latest_measurements(
    store: MeasurementStore, environment: Environment, pattern: re.Pattern[str]
) -> list[Measurement]:
    latest: dict[str, Measurement] = {}
    for m in store.measurements():
        same = m.environment is not None and m.environment.key == environment.key
        plain = m.case.cap_bytes is None and m.case.parallel is Parallel.NONE
        matches = pattern.search(m.case.id) or pattern.search(m.case.model)
        if same and plain and matches and m.status is Status.OK:
            latest[m.case.id] = m
    return list(latest.values())


def trials_of(
    m: Measurement, skip_reasons: dict[str, str], *, profile: str | None = None, edge: bool = True
) -> Iterator[Trial]:
    """What to try of a measured run: its upper bound, cards next to its size, their largest batch.

    Args:
        m: a run that completed on this device.
        skip_reasons: takes the reason where it cannot be tried.
        profile: file of a calibration.
        edge: try the largest batch too.
    """
    try:
        model, options = _question(m, profile)
        bound_trial = _upper_bound(m, model, options)
        rest = [*_at_cards(m, model, options), *(_at_the_edge(m, model, options) if edge else ())]
    except MemestError as error:
        skip_reasons[m.case.id] = str(error)
        return
    yield from (trial for trial in (bound_trial, *rest) if trial is not None)


def _question(m: Measurement, path: str | None) -> tuple[Profile, dict[str, Any]]:
    """The predictor of a measured run, for the very device it ran on."""
    assert m.environment is not None
    if m.process_bytes is None:
        raise ConfigError("what the process holds beside its segments was not read")
    options: dict[str, Any] = {"gpu": _gpu_name(m.environment)}
    if path is not None:
        options["calibration"] = path
    return profile(m.case.model, m.setup), options


def _gpu_name(environment: Environment) -> str:
    from memest.catalog.gpus import find_gpu

    try:
        return find_gpu(environment.gpu, total_bytes=environment.total_bytes).name
    except UnknownGpuError:
        return "local"


def _trial(
    kind: str, m: Measurement, memory: int, expected: Expectation, **changes: Any
) -> Trial | None:
    """A run in so much memory: the allocator gets what the process leaves of it, if anything."""
    assert m.process_bytes is not None
    cap = memory - m.process_bytes
    if cap <= 0:
        return None
    setup = dataclasses.replace(m.case.setup, **changes) if changes else m.case.setup
    case = dataclasses.replace(m.case, setup=setup, cap_bytes=cap, record_events=False)
    return Trial(kind=kind, case=case, memory_bytes=memory, expected=expected)


def _upper_bound(m: Measurement, model: Profile, options: dict[str, Any]) -> Trial | None:
    memory = model.spot(**options).interval.high_bytes
    total = m.environment.total_bytes if m.environment else None
    if total is not None and memory > total:
        return None  # the whole card is less than the bound
    return _trial("upper bound", m, memory, Expectation.COMPLETES)


_EXPECTATIONS = {
    Verdict.FITS: Expectation.COMPLETES,
    Verdict.RELEASES_CACHE: Expectation.COMPLETES,
    Verdict.TIGHT: Expectation.EITHER,
    Verdict.CANNOT_SAY: Expectation.EITHER,
    Verdict.DOES_NOT_FIT: Expectation.RUNS_OUT,
}


def _card_sizes(m: Measurement) -> tuple[int, ...]:
    """The two sizes of cards next to what a run needs, the larger one below this device's."""
    device, total = m.device_bytes, m.environment.total_bytes if m.environment else None
    if device is None or total is None:
        return ()
    smaller = [size for size in CARD_SIZES if size < device][-1:]
    larger = [size for size in CARD_SIZES if device <= size < total][:1]
    return (*smaller, *larger)


def _at_cards(m: Measurement, model: Profile, options: dict[str, Any]) -> Iterator[Trial | None]:
    """The two card sizes next to what the run needs: there a verdict says something."""
    for memory in _card_sizes(m):
        verdict = model.spot(**options, gpu_memory=memory).verdict
        yield _trial("card", m, memory, _EXPECTATIONS[verdict])


def _at_the_edge(m: Measurement, model: Profile, options: dict[str, Any]) -> Iterator[Trial | None]:
    """The largest batch for the card next in size, and one more."""
    memory = next((size for size in _card_sizes(m) if size >= (m.device_bytes or 0)), None)
    if memory is None:
        return
    # what the process holds was measured: what is tried is the batch, not the context
    assert m.process_bytes is not None
    peak = model.spot(**options).peak
    room = memory - m.process_bytes + peak.device_bytes - peak.reserved_bytes
    answer: Estimate = model.estimate(**options, gpu_memory=room, max_batch=True)
    if not answer.max_batch:
        return
    yield _trial("largest batch", m, memory, Expectation.COMPLETES, batch=answer.max_batch)
    yield _trial("one more", m, memory, Expectation.RUNS_OUT, batch=answer.max_batch + 1)
