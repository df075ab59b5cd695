"""Which slow tests a change can touch, and what a full run was, for those who ask by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.affected.checkout import Checkout
from support.affected.full_run import counts, line, of_log
from support.affected.rules import touched_tests
from support.paths import ROOT


def main() -> None:
    """Say what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m support.affected", description=__doc__)
    parser.add_argument("tests", nargs="*", help="of these files of tests alone")
    parser.add_argument("--counts", type=Path, metavar="LOG", help="a log's runs, as one line")
    parser.add_argument("--record", metavar="COMMIT", help="with --counts: record the run of all")
    parser.add_argument("--workers", type=int, default=1, help="with --record: how many there were")
    arguments = parser.parse_args()
    if arguments.counts:
        log = arguments.counts.read_text(encoding="utf-8")
        if arguments.record:
            of_log(arguments.record, log, arguments.workers).write(ROOT)
        say(line(*counts(log)))
        return
    selection = touched_tests(Checkout(ROOT))
    if selection.everything:
        say(f"everything: {selection.everything}")
        return
    reasons = sorted({**selection.tests, **selection.cases}.items())
    prefixes = tuple(arguments.tests) or ("",)
    say(*(f"{name}: {why}" for name, why in reasons if name.startswith(prefixes)))


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.writelines(f"{one}\n" for one in lines)


if __name__ == "__main__":
    main()
