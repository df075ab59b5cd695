"""The speed of memest, each figure as a multiple of fixed work done beside it.

    python benchmarks/speed                      # the cases that take no minutes, table on stdout
    python benchmarks/speed trace replay         # some of them
    python benchmarks/speed --all                # those that take minutes, too
    python benchmarks/speed --write              # and into data/speed and docs/speed.md
    python benchmarks/speed --check              # exit code 1 if a case is slower than it was
    python benchmarks/speed --check --last       # the last recorded run, nothing measured
    python benchmarks/speed --page               # docs/speed.md from the history, nothing measured
    python benchmarks/speed --list               # what there is

Needs the packages of the tests. A cache folder of its own is used. See ``docs/speed.md``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from speed import history, regressions, report  # noqa: E402 - beside this file
from speed.suite import CASES, choose_cases, measure, say_on_stderr  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/speed", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--all", action="store_true", help="the cases that take minutes, too")
    parser.add_argument("--rounds", type=int, default=7, help="how often each case runs (7)")
    parser.add_argument(
        "--write", action="store_true", help="add the run to the history and the page"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a case is slower")
    parser.add_argument(
        "--last", action="store_true", help="the last recorded run; measures nothing"
    )
    parser.add_argument(
        "--history", type=Path, default=history.HISTORY, help="another history file"
    )
    parser.add_argument("--tolerance", type=float, default=regressions.TOLERANCE,
                        help="share by which a median may grow (0.05)")  # fmt: skip
    parser.add_argument("--page", action="store_true", help="write docs/speed.md from the history")
    parser.add_argument("--list", action="store_true", help="print the cases")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    if options.tolerance < 0:
        parser.error(f"--tolerance must be 0 or more, not {options.tolerance}")
    if options.last and (options.write or options.names or options.all):
        parser.error("--last measures nothing: leave out --write, --all and the names of cases")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, compare, print, and write what was asked for."""
    options = parse(arguments)
    if options.list:
        sys.stdout.writelines(
            f"{case.name:<18} {case.what}{' (with --all)' if case.long else ''}\n"
            for case in CASES.values()
        )
        return 0
    earlier, problems = history.read(options.history)
    for problem in problems:
        sys.stderr.write(f"{options.history.name}, {problem}: left out\n")
    if options.page:
        report.write_page(earlier, CASES)
        return 0
    if options.last:
        if not earlier:
            sys.stderr.write(f"no run in {options.history.name}: record one with --write\n")
            return 2
        run, earlier = earlier[-1], earlier[:-1]
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        run = measure(
            choose_cases(options.names, everything=options.all), options.rounds, say_on_stderr
        )
        say_on_stderr("")
    comparisons = regressions.compare(run, earlier, tolerance=options.tolerance)
    sys.stdout.write(
        f"{run.date}, commit {run.commit}{' with changes' if run.changed else ''}\n"
        f"{report.machine_text(run)}, load {run.load}\n\n{report.table(comparisons)}\n\n"
        f"{report.verdict(comparisons)}\n"
    )
    if options.write:
        history.append(run, options.history)
        if options.history == history.HISTORY:
            report.write_page([*earlier, run], CASES)
    slower = any(c.change is regressions.Change.SLOWER for c in comparisons)
    return 1 if options.check and slower else 0


if __name__ == "__main__":
    sys.exit(main())
