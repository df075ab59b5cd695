"""The record of the last run of all tests, kept in the repository.

It names the commit that all tests passed on, and is committed after it. What changes nothing but
this file changes nothing that a test can see.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = ".ci/full-run.json"
SUMMARY = re.compile(r"^[= ]*(\d+ \w+(?:, \d+ \w+)*) in ([\d.]+)s\b", re.MULTILINE)


@dataclass(frozen=True)
class FullRun:
    """A run of all tests in which none failed.

    Attributes:
        commit: what was tested, whole.
        date: UTC, as ISO 8601 has it.
        minutes: that the tests took.
        passed: how many.
        skipped: how many lacked something of the machine.
        workers: processes that shared them.
    """

    commit: str
    date: str
    minutes: float
    passed: int
    skipped: int
    workers: int

    @staticmethod
    def read(root: Path) -> FullRun | None:
        """The record of a checkout, if it has one.

        Raises:
            ValueError: it has one that cannot be read.
        """
        path = root / RECORD
        if not path.is_file():
            return None
        try:
            return FullRun(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{RECORD} cannot be read: {error}") from error

    def write(self, root: Path) -> None:
        """Put it where it is looked for."""
        text = json.dumps(asdict(self), indent=2)
        (root / RECORD).write_text(text + "\n", encoding="utf-8")


def counts(log: str) -> tuple[Counter[str], float]:
    """What pytest's last lines in a log say together: tests by outcome, and seconds.

    What one run left to another (deselected) is nothing of them together.
    """
    outcomes: Counter[str] = Counter()
    seconds = 0.0
    for summary, took in SUMMARY.findall(log):
        seconds += float(took)
        for number, outcome in re.findall(r"(\d+) (\w+)", summary):
            if outcome != "deselected":
                outcomes[outcome] += int(number)
    return outcomes, seconds


def line(outcomes: Counter[str], seconds: float) -> str:
    """Counts as pytest says them."""
    text = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
    return f"{text or 'no tests ran'} in {seconds:.2f}s ({dt.timedelta(seconds=int(seconds))})"


def of_log(commit: str, log: str, workers: int) -> FullRun:
    """The record of a run by what pytest said of it."""
    outcomes, seconds = counts(log)
    return FullRun(
        commit=commit,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        minutes=round(seconds / 60, 1),
        passed=outcomes["passed"],
        skipped=outcomes["skipped"],
        workers=workers,
    )
