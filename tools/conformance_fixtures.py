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
from dataclasses import asdict, replace
from pathlib import Path

from memest.calibration.case import case_from_dict
from memest.calibration.device import LATEST_TORCH, software_of
from memest.calibration.recording.causes import Difference
from memest.calibration.recording.conformance import Conformance, compare
from memest.calibration.recording.differences import Relation
from memest.calibration.recording.history import read_history
from memest.calibration.recording.recorded import History
from memest.errors import ConfigError, MemestError
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.stream import Stream

FOLDER = Path(__file__).parents[1] / "data" / "measurements" / "events"
SUFFIX = ".jsonl.gz"
COLUMNS = (
    "recording | events | matched | allocated peak, recorded | predicted − recorded "
    "| reserved peak, recorded | predicted − recorded"
)
HEAD = f"| {COLUMNS} |\n|---|{'---:|' * 6}"


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
    comparisons, failed = [], False
    for path in paths:
        try:
            one = _comparison(path, options.only)
        except MemestError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        if one is not None:
            comparisons.append(one)
    if options.json:
        print(json.dumps([asdict(one) for one in comparisons], indent=1))
    else:
        _print(comparisons, options.details)
    return int(failed)


def _comparison(path: Path, only: str) -> Conformance | None:
    history = read_history(path)
    case = str(history.case.get("id", ""))
    if only not in path.name and only not in case:
        return None
    stream = predict_stream(history)
    return compare(history, stream, name=case or path.name.removesuffix(SUFFIX))


def predict_stream(history: History, profiler: Profiler | None = None) -> Stream:
    """The stream of the whole run, for its GPU and with its software.

    Args:
        history: names case and device.
        profiler: of the case's model, if there is one already.

    Raises:
        MemestError: the history does not say what ran, or that cannot be traced.
    """
    if not history.case:
        raise ConfigError("the history does not say what ran: its header has no case")
    case = case_from_dict(history.case)
    if case.processes > 1:
        raise ConfigError(f"{case.processes} processes with {case.parallel}: not modelled yet")
    device = history.device
    software = software_of(device.torch, device.transformers, device.cuda)
    setup = replace(case.setup, software=software)
    profiler = Profiler.of(case.model) if profiler is None else profiler
    return steps_run(profiler, setup, device.traits(software.torch or LATEST_TORCH), None).stream


def _print(comparisons: list[Conformance], details: int) -> None:
    print(HEAD)
    for one in comparisons:
        print(table_row(one))
    if details:
        for one in comparisons:
            if not one.equal:
                print(f"\n{to_markdown(one, most=details)}", end="")


def table_row(one: Conformance) -> str:
    """A comparison as a row below ``HEAD``."""
    peaks = one.peaks
    cells = (
        one.name,
        _digits(one.counts.recorded),
        _digits(one.counts.matched),
        _digits(peaks.recorded_allocated),
        _offset(peaks.predicted_allocated, peaks.recorded_allocated),
        _digits(peaks.recorded_reserved),
        _offset(peaks.predicted_reserved, peaks.recorded_reserved),
    )
    return f"| {' | '.join(cells)} |"


def to_markdown(one: Conformance, *, most: int = 20) -> str:
    """A comparison as a page's section.

    Args:
        one: the comparison.
        most: differences that are listed; the rest is counted.
    """
    lines = [f"### {one.name}", "", HEAD, table_row(one), ""]
    counts = one.counts
    if not one.equal:
        lines.append(
            f"Predicted {_digits(counts.predicted)} events. Of another size: "
            f"{counts.other_size}; another one freed: {counts.other_partner}; in another "
            f"order: {counts.reordered}; at another place: {counts.moved}; only recorded: "
            f"{counts.only_recorded}; only predicted: {counts.only_predicted}.\n"
        )
    lines += [f"{note}." for note in one.notes]
    if one.notes:
        lines.append("")
    if not one.differences:
        return "\n".join([*lines, "No event differs.", ""])
    lines += [
        "| difference | operator, module | recorded at | times | bytes | at the peak | first |",
        "|---|---|---|---:|---:|---:|---|",
        *(_difference_row(difference) for difference in one.differences[:most]),
    ]
    rest = len(one.differences) - most
    if rest > 0:
        lines += ["", f"{rest} more kinds of differences are smaller."]
    return "\n".join([*lines, ""])


def _digits(value: int | None) -> str:
    """Digits in groups of three; a narrow blank keeps them together."""
    return "–" if value is None else f"{value:,}".replace(",", " ")


def _offset(value: int | None, base: int | None) -> str:
    return "–" if value is None or base is None else _signed_digits(value - base)


def _signed_digits(value: int) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{_digits(abs(value))}"


def _difference_row(one: Difference) -> str:
    what = one.relation.value
    if one.relation is Relation.SIZE:
        what += f" (× {one.ratio:g})"
    where = f"`{one.operator}` {one.module}".strip() if one.operator else f"after {one.near}"
    sizes = " → ".join(str(size) for size in (one.recorded_bytes, one.predicted_bytes) if size)
    cells = (
        what,
        where,
        one.frame.replace("|", "\\|") or "–",
        str(one.count),
        _digits(one.bytes),
        _signed_digits(one.peak_bytes),
        f"event {one.recorded_event if one.recorded_event >= 0 else one.predicted_event}: {sizes}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
