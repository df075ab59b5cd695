"""Figures as a table in the terminal, and as the page in ``docs/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from speed.case import Case
from speed.history import ROOT, Run
from speed.regressions import Change, Comparison, compare
from speed.timing import Figure

PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- begin figures -->", "<!-- end figures -->"


def time_text(seconds: float) -> str:
    """Three digits with the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def ratio_text(figure: Figure) -> str:
    """The median and the quartiles around it."""
    return f"{figure.ratio:.3g} ({figure.low:.3g}–{figure.high:.3g})"


def change_text(comparison: Comparison) -> str:
    """What became of a case, in words and per cent."""
    if comparison.factor is None:
        return str(comparison.change)
    return f"{comparison.change} ({comparison.factor - 1:+.1%})"


def machine_text(run: Run) -> str:
    """On what a run was made."""
    facts = run.machine
    return (
        f"{facts.get('cpu')}, {facts.get('cores')} cores, Python {facts.get('python')}, "
        f"torch {facts.get('torch')}, transformers {facts.get('transformers')}"
    )


def table(comparisons: Sequence[Comparison]) -> str:
    """The figures of one run and what became of them, in columns."""
    rows = [("case", "time", "× reference", "of", "beside earlier runs")]
    rows += [
        (c.name, time_text(c.figure.seconds), ratio_text(c.figure), c.figure.reference,
         change_text(c))
        for c in comparisons
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:<{widths[3]}}  {row[4]}"
        for row in rows
    ]
    lines.insert(1, "─" * max(len(line) for line in lines))
    return "\n".join(line.rstrip() for line in lines)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """One sentence on the whole."""
    slower = [c.name for c in comparisons if c.change is Change.SLOWER]
    num_known = sum(c.change is not Change.UNKNOWN for c in comparisons)
    if slower:
        return f"Slower than before, beyond the spread: {', '.join(slower)}."
    if not num_known:
        return "No earlier run on such a machine: nothing to compare with."
    return f"No case of {num_known} that were measured before is slower beyond the spread."


def figures(runs: Sequence[Run], cases: Mapping[str, Case]) -> str:
    """The part of the page that history writes: the newest figure of every case."""
    newest: dict[str, tuple[Run, Comparison]] = {}
    for index, run in enumerate(runs):
        newest |= {c.name: (run, c) for c in compare(run, runs[:index])}
    if not newest:
        return "No run is recorded yet."
    lines = [
        "| case | what | time | × reference | reference | runs before |",
        "|---|---|---:|---:|---|---|",
    ]
    recorded_runs: list[Run] = []
    for name, case in cases.items():
        if name not in newest:
            continue
        run, comparison = newest[name]
        if run not in recorded_runs:
            recorded_runs.append(run)
        figure = comparison.figure
        memory = f", {figure.rss_bytes >> 20:,} MiB" if figure.rss_bytes else ""
        lines.append(
            f"| {name} | {case.what} | {time_text(figure.seconds)}{memory} | "
            f"{ratio_text(figure)} | {figure.reference} | {change_text(comparison)} |"
        )
    lines += [
        "",
        f"Recorded: {'; '.join(map(_run_text, recorded_runs))}.",
        "",
        *_progress(runs, cases),
    ]
    return "\n".join(lines)


def _run_text(run: Run) -> str:
    # sorted, as the history keeps them: the page is the same from a run and from its line
    took = ", ".join(f"{name} {time_text(run.references[name])}" for name in sorted(run.references))
    changes_text = " with changes" if run.changed else ""
    return (
        f"{run.date[:10]}, commit {run.commit}{changes_text}, {machine_text(run)}, "
        f"load {run.load:.1f} before the start (references: {took})"
    )


def _progress(runs: Sequence[Run], cases: Mapping[str, Case]) -> list[str]:
    """Ratios of the last runs side by side, where there is more than one."""
    last = runs[-6:]
    if len(last) < 2:
        return []
    heads = [f"{run.date[:10]} {run.commit[:7]}" for run in last]
    lines = ["## Over time", "", "Ratios to the reference, oldest first.", ""]
    lines += [f"| case | {' | '.join(heads)} |", f"|---|{'---:|' * len(last)}"]
    for name in cases:
        ratios = [f"{run.cases[name].ratio:.3g}" if name in run.cases else "" for run in last]
        if any(ratios):
            lines.append(f"| {name} | {' | '.join(ratios)} |")
    return [*lines, ""]


def page(text: str, runs: Sequence[Run], cases: Mapping[str, Case]) -> str:
    """The page with the figures of the history between its marks."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{figures(runs, cases)}\n{END}{rest.partition(END)[2]}"


def write_page(runs: Sequence[Run], cases: Mapping[str, Case], path: Path = PAGE) -> None:
    """Bring the page up to the history."""
    path.write_text(page(path.read_text(encoding="utf-8"), runs, cases), encoding="utf-8")
