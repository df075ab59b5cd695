"""All cases by name, and a run of them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from speed import answers, commands, history, page, replays, traces
from speed.case import Bench, Case, Work
from speed.reference import REFERENCES
from speed.timing import Figure, RunTime, figure, time_run

CASES: dict[str, Case] = {
    case.name: case for part in (commands, traces, answers, replays, page) for case in part.CASES
}

Round = tuple[RunTime, RunTime, RunTime]


def choose_cases(names: Sequence[str], *, everything: bool = False) -> list[Case]:
    """Cases by name; without names those that do not take long, or all.

    Raises:
        KeyError: a name that no case has.
    """
    if names:
        return [CASES[name] for name in dict.fromkeys(names)]
    return [case for case in CASES.values() if everything or not case.long]


def measure(
    cases: Sequence[Case], rounds: int, say: Callable[[str], None] = lambda text: None
) -> history.Run:
    """Run the cases, rounds interleaved: what disturbs a minute disturbs all of them."""
    load, (revision, changed) = os.getloadavg()[0], history.commit()
    with tempfile.TemporaryDirectory(prefix="memest-speed-") as folder:
        bench, work = Bench(Path(folder)), {}
        for name in {case.reference: None for case in cases}:
            say(f"warming {name}")
            REFERENCES[name]()
        for case in cases:
            say(f"preparing {case.name}")
            work[case.name] = case.prepare(bench)
        rounds_by_case: dict[str, list[Round]] = {case.name: [] for case in cases}
        memory: dict[str, int] = {}
        for number in range(rounds):
            for case in cases:
                if case.long and number >= max(1, rounds // 3):
                    continue
                say(f"round {number + 1} of {rounds}: {case.name}")
                rounds_by_case[case.name].append(_round(case, work[case.name], memory))
    figures: dict[str, Figure] = {
        case.name: figure(
            case.reference,
            case.version,
            rounds_by_case[case.name],
            case.units,
            memory.get(case.name),
        )
        for case in cases
    }
    return history.Run(
        date=history.now(), commit=revision, changed=changed, machine=history.machine(),
        load=round(load, 2), references=_references(cases, rounds_by_case), cases=figures,
    )  # fmt: skip


def _round(case: Case, work: Work, memory: dict[str, int]) -> Round:
    reference = REFERENCES[case.reference]
    before, _ = time_run(reference)
    own, result = time_run(work)
    after, _ = time_run(reference)
    if isinstance(result, int):
        memory[case.name] = max(result, memory.get(case.name, 0))
    return before, own, after


def _references(cases: Sequence[Case], rounds_by_case: dict[str, list[Round]]) -> dict[str, float]:
    """Median seconds on the clock of each reference."""
    clocks: dict[str, list[float]] = {}
    for case in cases:
        for before, _, after in rounds_by_case[case.name]:
            clocks.setdefault(case.reference, []).extend((before.clock, after.clock))
    return {name: median(seconds) for name, seconds in clocks.items()}


def say_on_stderr(text: str) -> None:
    """One line that is written over."""
    sys.stderr.write(f"\r\033[K{text}" if sys.stderr.isatty() else "")
    sys.stderr.flush()
