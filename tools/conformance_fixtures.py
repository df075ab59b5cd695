"""Predict the runs whose histories are kept, and lay prediction and history side by side.

    python tools/conformance_fixtures.py                     all histories of data/measurements
    python tools/conformance_fixtures.py FOLDER --only bert  some of another folder
    python tools/conformance_fixtures.py --details 20        and what differs, by cause
    python tools/conformance_fixtures.py --json              the same as data

Writes nothing. The table is the one of ``docs/conformance.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memest.calibration.recording.conformance import Comparison, compare
from memest.calibration.recording.history import read_history
from memest.calibration.recording.predicted_stream import predict_stream
from memest.errors import MemestError

FOLDER = Path(__file__).parents[1] / "data" / "measurements" / "events"
SUFFIX = ".jsonl.gz"


def main() -> int:
    """Compare all and print; returns 1 where something could not be compared."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--only", default="", help="part of a file's name or of a case's id")
    parser.add_argument("--details", type=int, default=0, help="kinds of differences to list")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    options = parser.parse_args()
    paths = sorted(options.folder.glob(f"*{SUFFIX}"))
    if not paths:
        print(f"{options.folder} has no histories ({SUFFIX}).", file=sys.stderr)
        return 0
    compared, failed = [], False
    for path in paths:
        try:
            one = _compared(path, options.only)
        except MemestError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        if one is not None:
            compared.append(one)
    if options.json:
        print(json.dumps([one.to_dict() for one in compared], indent=1))
    else:
        _print(compared, options.details)
    return int(failed)


def _compared(path: Path, only: str) -> Comparison | None:
    history = read_history(path)
    case = str(history.case.get("id", ""))
    if only not in path.name and only not in case:
        return None
    stream = predict_stream(history)
    return compare(history, stream, name=case or path.name.removesuffix(SUFFIX))


def _print(compared: list[Comparison], details: int) -> None:
    print(Comparison.table_head())
    for one in compared:
        print(one.row())
    if details:
        for one in compared:
            if not one.equal:
                print(f"\n{one.to_markdown(most=details)}", end="")


if __name__ == "__main__":
    sys.exit(main())
