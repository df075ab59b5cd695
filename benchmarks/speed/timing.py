"""Seconds of a case beside the seconds of its reference, round after round."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunTime:
    """What one run took: seconds on the clock, seconds of the processor, children's included."""

    clock: float
    processor: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A case in one run of the suite.

    ``ratio``, ``low`` and ``high`` are the median and the quartiles, over the rounds, of processor
    time as a multiple of the reference's; ``seconds`` is the median time on the clock of one unit
    of work; ``rss_bytes`` the largest resident set of a command, ``None`` for work in this process.
    """

    reference: str
    version: int
    rounds: int
    ratio: float
    low: float
    high: float
    seconds: float
    rss_bytes: int | None = None


def processor_seconds() -> float:
    """Processor time of this process, all threads, and of the children it has waited for."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def time_run(run: Callable[[], object]) -> tuple[RunTime, object]:
    """Time a run; garbage of what came before is collected first and not counted."""
    gc.collect()
    clock, processor = time.perf_counter(), processor_seconds()
    result = run()
    return RunTime(time.perf_counter() - clock, processor_seconds() - processor), result


AS_COMMAND = """
import sys
from memest.cli.main import run
code = run()
sys.stdout.flush()
try:
    status = open("/proc/self/status").read()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
except (OSError, IndexError, ValueError):
    peak = 0
print(peak, file=sys.stderr)
sys.exit(code)
"""
"""``python -m memest``, and the largest resident set behind it.

What ``wait4`` reports of a child holds the parent's memory, too, which it shared before it became
another program; the kernel's account of the process itself does not.
"""


def environment() -> dict[str, str]:
    """As an installed memest runs: with its bytecode kept, beside the cache of this run."""
    variables = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    return {**variables, "PYTHONPYCACHEPREFIX": f"{variables['MEMEST_HOME']}-bytecode"}


def run_command(*command: str) -> int:
    """Run memest as a command.

    Returns:
        The largest resident set of the process in bytes, 0 where the system does not tell.

    Raises:
        RuntimeError: the command failed; with what it said.
    """
    process = subprocess.run(
        [sys.executable, "-c", AS_COMMAND, *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
        check=False,
    )  # fmt: skip
    if process.returncode != 0:
        raise RuntimeError(
            f"memest {' '.join(command)} ended with {process.returncode}: {process.stderr}"
        )
    return int(process.stderr.split()[-1])


def figure(
    reference: str, version: int, rounds: list[tuple[RunTime, RunTime, RunTime]], units: int,
    rss_bytes: int | None = None,
) -> Figure:  # fmt: skip
    """The figure of a case whose every round is (reference before, case, reference after)."""
    ratios = [case.processor * 2 / (a.processor + b.processor) for a, case, b in rounds]
    low, ratio, high = quartiles(ratios)
    clock = statistics.median(case.clock for _, case, _ in rounds)
    return Figure(reference, version, len(rounds), ratio, low, high, clock / units, rss_bytes)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of one value it is that value three times."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
