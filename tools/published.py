"""Run published measurements through memest and write the tables of ``docs/accuracy.md``.

    python tools/published.py                  all records, table on stdout, tables into the page
    python tools/published.py --only t5 --dry  some records, nothing written

Records are JSON lines in ``data/reference``, case records as ``memest validate`` takes them; a
folder named by ``MEMEST_REFERENCE`` may hold more. A record of which only bounds of the length are
known is run at both ends and not scored, nor is a device peak whose context nobody read.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from memest.fit import largest_batch
from memest.models.resolve import resolve_model
from memest.replay.conf import parse_alloc_conf
from memest.tracing import Tracer
from memest.units import MIB
from memest.validation import CaseRecord, Scores, read_records
from memest.validation.predict import Outcome, Predictor

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "data" / "reference"
PAGE = ROOT / "docs" / "accuracy.md"
OUTCOMES = ROOT / "data" / "accuracy" / "outcomes.jsonl"
DIVIDED = 20
"""Sets of more records than this are also summed up by model and by optimizer."""
SURE_LENGTH = 10
"""Batches of texts from which on the longest row surely has the full length."""


def records(only: str = "") -> list[CaseRecord]:
    """All complete records, those of the repository first; ids are taken once."""
    extra = os.environ.get("MEMEST_REFERENCE")
    more = sorted(Path(extra).glob("*.jsonl")) if extra else []
    return read_records([*sorted(RECORDS.glob("*.jsonl")), *more], only=only).complete


def predict(record: CaseRecord) -> Outcome:
    """Run one record."""
    return Predictor().predict(record)


def batch_that_fits(record: CaseRecord) -> tuple[int, int]:
    """(largest, largest safe) batch of the record's setup on its card."""
    predictor = Predictor()
    setup = predictor.setup_of(record)
    tracer = Tracer(source=resolve_model(record.model))
    card = predictor.card_of(record, setup, told=True)
    return largest_batch(card, tracer, setup, parse_alloc_conf(setup.alloc_conf))


# -- reports --------------------------------------------------------------------------------------


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f} %"


def _what(record: CaseRecord) -> str:
    setup = record.setup
    parts = [f"batch {setup['batch']}"]
    if setup.get("grad_accum", 1) > 1:
        parts.append(f"x {setup['grad_accum']}")
    if record.metric == "forward":
        parts.append("after forward")
    if setup.get("adapter"):
        parts.append("QLoRA" if setup.get("quantization") else "LoRA")
        parts.append(f"{setup['seq_len']} tokens")
    parts.append(str(setup.get("optim", "")))
    if setup.get("precision", "fp32") != "fp32":
        parts.append(setup["precision"])
    if setup.get("checkpointing", "none") != "none":
        parts.append("checkpointing")
    at = setup.get("zero_grad_at")
    if at:
        parts.append(f"zero_grad {at}")
    return ", ".join(parts).replace(", x", " x")


def _remark(outcome: Outcome) -> str:
    said = []
    record = outcome.record
    if outcome.failure:
        said.append(outcome.failure.partition(". ")[0])
    if record.oom:
        said.append("run failed; " + ("predicted" if outcome.runs_out else "**not predicted**"))
    elif outcome.runs_out:
        said.append("**predicted to fail, did not**")
    if outcome.retries and not record.oom:
        said.append("at the card's limit, cache released")
    if record.metric == "device" and not outcome.context_read and not said:
        said.append("context not published: not scored")
    if outcome.low_bytes is not None and record.lengths is not None:
        said.append(
            f"length not recorded: {_mib(outcome.low_bytes)} to {_mib(outcome.predicted_bytes)} "
            f"MiB for {record.lengths[0]} to {record.lengths[1]} tokens, "
            f"{'inside' if outcome.inside else '**outside**'}"
        )
    return "; ".join(said)


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """The rows of a Markdown table."""
    yield "| model | GPU | run | measured MiB | predicted MiB | error | peak at | |"
    yield "|---|---|---|---:|---:|---:|---|---|"
    for outcome in outcomes:
        record = outcome.record
        shown = outcome.predicted_bytes if outcome.low_bytes is None else None
        cells = (
            record.model.rpartition("/")[2], record.gpu, _what(record),
            _mib(record.measured_bytes), _mib(shown),
            _percent(outcome.error if outcome.scored else None), outcome.where, _remark(outcome),
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def _groups(every: list[Outcome]) -> dict[str, list[Outcome]]:
    """The groups that are summed up, by name."""
    groups: dict[str, list[Outcome]] = {}
    large = [s for s, n in Counter(o.record.group for o in every).items() if n > DIVIDED]
    for one in every:
        of, setup = one.record.group, one.record.setup
        names = [f"**{of}**"]
        if of in large:
            if setup["batch"] >= SURE_LENGTH:
                names.append(f"{of}, batch {SURE_LENGTH} and more")
            names += [f"{of}, {one.record.model}", f"{of}, {setup['optim']}"]
        for name in names:
            groups.setdefault(name, []).append(one)
    return groups


def _row(scores: Scores) -> str:
    errors = scores.errors
    return (
        f"| {scores.name} | {errors.count} | {errors.median:.2%} | {errors.p90:.2%} | "
        f"{abs(errors.worst):.2%} | {errors.median_signed:+.2%} | "
        f"{round(errors.below * errors.count)} | "
        f"{f'{scores.inside} of {scores.ranged}' if scores.ranged else '-'} |"
    ).replace("%", " %")


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """The rows of the summary: each set, then its models and optimizers."""
    yield "| group | runs | median error | p90 | worst | median, signed | too low | in range |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, group in sorted(_groups(outcomes).items()):
        found = Scores.of(name, (o for o in group if o.scored))
        if found is not None:
            told = [o.inside for o in group if o.inside is not None and o.low_bytes is None]
            yield _row(Scores(name, found.errors, sum(told), len(told)))


def write_page(outcomes: list[Outcome], page: Path = PAGE) -> None:
    """Replace what stands between the markers of the page; the prose around them stays."""
    text = page.read_text(encoding="utf-8")
    parts = {"summary": "\n".join(summary(outcomes))}
    for name in dict.fromkeys(o.record.group for o in outcomes):
        parts[name] = "\n".join(table(o for o in outcomes if o.record.group == name))
    for name, body in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin in text and end in text:
            head, rest = text.split(begin, 1)
            text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text, encoding="utf-8")


def write_outcomes(outcomes: list[Outcome], path: Path = OUTCOMES) -> None:
    """Keep what was predicted, for the explorer's accuracy page: one JSON object a line."""
    lines = []
    for one in outcomes:
        record = one.record
        told = one.floor_bytes, one.bound_bytes
        lines.append(
            json.dumps({
                "id": record.id, "set": record.group,
                "model": record.model.rpartition("models/")[2],
                "family": one.family, "gpu": record.gpu, "run": _what(record),
                "metric": record.metric, "measured_bytes": record.measured_bytes,
                "predicted_bytes": one.predicted_bytes, "low_bytes": one.low_bytes,
                "range_bytes": told if record.metric == "device" else None, "inside": one.inside,
                "scored": one.scored, "peak_at": one.where,
                "remark": _remark(one).replace("**", ""), "source": record.source,
            })
        )  # fmt: skip
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of id, model, GPU or set")
    parser.add_argument("--dry", action="store_true", help="do not write the page")
    arguments = parser.parse_args(argv)
    outcomes, predictor = [], Predictor()
    for record in records(arguments.only):
        start = time.perf_counter()
        outcome = predictor.predict(record)
        outcomes.append(outcome)
        print(
            f"{record.id:48s} {_mib(record.measured_bytes):>8s} "
            f"{_mib(outcome.predicted_bytes):>8s} {_percent(outcome.error):>9s}  {outcome.where}  "
            f"{_remark(outcome)} [{time.perf_counter() - start:.1f} s]",
            flush=True,
        )
    print("\n".join(summary(outcomes)))
    if not arguments.dry and not arguments.only:
        write_page(outcomes)
        write_outcomes(outcomes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
