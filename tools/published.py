"""Run published measurements through memest and write the tables of ``docs/accuracy.md``.

    python tools/published.py                  all records, table on stdout, tables into the page
    python tools/published.py --set litgpt     one set anew, the others as they were kept
    python tools/published.py --new            those alone that are new, or were changed, since
    python tools/published.py --stale          those that other code predicted than is installed
    python tools/published.py --page           none, the page anew from what was kept
    python tools/published.py --only t5 --dry  some records, nothing written

Records are JSON lines in ``data/reference``, case records as ``memest validate`` takes them; a
folder named by ``MEMEST_REFERENCE`` may hold more. A record of which only bounds of the length are
known is run at both ends and not scored, nor is a device peak whose context nobody read. What was
predicted is kept in ``data/accuracy/outcomes.jsonl``, after each record, so a run that was stopped
goes on with ``--new``; with each stands which memest said it, so that what other code said is told.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from memest.calibration.validation import CaseRecord, Scores, read_records
from memest.calibration.validation.predict import Predictor, RecordOutcome
from memest.calibration.validation.records import Records
from memest.calibration.validation.scores import VerdictTest
from memest.catalog.resolve import resolve_model
from memest.estimation.profiler import Profiler
from memest.estimation.verdict import largest_batch
from memest.replay.conf import parse_alloc_conf
from memest.units import MIB

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "data" / "reference"
PAGE = ROOT / "docs" / "accuracy.md"
OUTCOMES = ROOT / "data" / "accuracy" / "outcomes.jsonl"
LARGE_SET = 20
"""Sets of more records than this are also summed up by model and by optimizer."""
SURE_LENGTH = 10
"""Batches of texts from which on the longest row surely has the full length."""


def read(only: str = "") -> Records:
    """All records, those of the repository first; ids are taken once."""
    extra = os.environ.get("MEMEST_REFERENCE")
    more = sorted(Path(extra).glob("*.jsonl")) if extra else []
    return read_records([*sorted(RECORDS.glob("*.jsonl")), *more], only=only)


def records(only: str = "") -> list[CaseRecord]:
    """All complete records."""
    return read(only).complete


def predict(record: CaseRecord) -> RecordOutcome:
    """Run one record."""
    return Predictor(trust_code=True).predict(record)


def batch_that_fits(record: CaseRecord) -> tuple[int, int]:
    """(largest, largest safe) batch of the record's setup on its card."""
    predictor = Predictor(trust_code=True)
    setup = predictor.setup_of(record)
    tracer = Profiler(source=resolve_model(record.model))
    card = predictor.card_of(record, setup, with_context=True)
    return largest_batch(card, tracer, setup, parse_alloc_conf(setup.alloc_conf))


# -- reports --------------------------------------------------------------------------------------


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f} %"


def _what(record: CaseRecord) -> str:
    setup = record.setup
    parts = [f"batch {setup['batch']}"]
    if setup.get("num_gpus", 1) > 1:
        parts.insert(0, f"{setup['num_gpus']} GPUs")
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


def _remark(outcome: RecordOutcome) -> str:
    remarks = []
    record = outcome.record
    if outcome.failure:
        remarks.append(outcome.failure.partition(". ")[0])
    if record.oom:
        remarks.append("run failed; " + ("predicted" if outcome.runs_out else "**not predicted**"))
    elif outcome.runs_out:
        remarks.append("**predicted to fail, did not**")
    if outcome.retries and not record.oom:
        remarks.append("at the card's limit, cache released")
    if record.metric == "device" and not outcome.context_read and not remarks:
        remarks.append("context not published: not scored")
    if outcome.low_bytes is not None and record.lengths is not None:
        remarks.append(
            f"length not recorded: {_mib(outcome.low_bytes)} to {_mib(outcome.predicted_bytes)} "
            f"MiB for {record.lengths[0]} to {record.lengths[1]} tokens, "
            f"{'inside' if outcome.inside else '**outside**'}"
        )
    return "; ".join(remarks)


def table(outcomes: Iterable[RecordOutcome]) -> Iterator[str]:
    """The rows of a Markdown table."""
    yield "| model | GPU | run | measured MiB | predicted MiB | error | peak at | |"
    yield "|---|---|---|---:|---:|---:|---|---|"
    for outcome in outcomes:
        record = outcome.record
        predicted_bytes = outcome.predicted_bytes if outcome.low_bytes is None else None
        cells = (
            record.model.rpartition("/")[2], record.gpu, _what(record),
            _mib(record.measured_bytes), _mib(predicted_bytes),
            _percent(outcome.error if outcome.scored else None), outcome.where, _remark(outcome),
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def _groups(every: list[RecordOutcome]) -> dict[str, list[RecordOutcome]]:
    """The groups that are summed up, by name."""
    groups: dict[str, list[RecordOutcome]] = {}
    large = [s for s, n in Counter(o.record.group for o in every).items() if n > LARGE_SET]
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
        f"{f'{scores.inside} of {scores.num_ranged}' if scores.num_ranged else '-'} |"
    ).replace("%", " %")


def summary(outcomes: list[RecordOutcome]) -> Iterator[str]:
    """The rows of the summary: each set, then its models and optimizers."""
    yield "| group | runs | median error | p90 | worst | median, signed | too low | in range |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, group in sorted(_groups(outcomes).items()):
        scores = Scores.of(name, (o for o in group if o.scored))
        if scores is not None:
            inside = [o.inside for o in group if o.inside is not None and o.low_bytes is None]
            yield _row(Scores(name, scores.errors, sum(inside), len(inside)))


def _several(record: CaseRecord) -> bool:
    return bool(record.setup.get("num_gpus", 1) > 1)


def _has_adapter(record: CaseRecord) -> bool:
    return bool(record.setup.get("adapter") or record.setup.get("peft"))


_TARGETS: tuple[tuple[str, float, Callable[[CaseRecord], bool]], ...] = (
    ("xMem's own runs", 0.025, lambda r: r.group == "xmem"),
    ("all complete records of one GPU", 0.04, lambda r: not _several(r)),
    ("several GPUs alone", 0.06, _several),
    ("adapters alone (LoRA, QLoRA; LitGPT's own LoRA not counted)", 0.06, _has_adapter),
    (
        "several GPUs, and adapters on one", 0.06,
        lambda r: _several(r) or _has_adapter(r),
    ),
)  # fmt: skip
_MOST_FAILURES = 0.05
"""Share of xMem's runs whose verdict may be wrong."""
_FAR = 0.1
"""An error that asks for its cause."""


def targets(outcomes: list[RecordOutcome]) -> Iterator[str]:
    """The rows of what was to be reached, and what is."""
    yield "| what | target | reached | runs | beyond 10 % | refused |"
    yield "|---|---|---|---:|---:|---:|"
    for name, most, belongs in _TARGETS:
        group = [o for o in outcomes if belongs(o.record)]
        scores = Scores.of(name, (o for o in group if o.scored))
        if scores is None:
            continue
        far = sum(abs(o.error or 0) > _FAR for o in group if o.scored)
        result_text = f"{100 * scores.errors.median:.2f} %"
        if scores.errors.median > most:
            result_text += " **missed**"
        yield (
            f"| {name} | median error <= {100 * most:g} % | {result_text} | "
            f"{scores.errors.count} | {far} | {sum(bool(o.failure) for o in group)} |"
        )
    test = VerdictTest.of([o for o in outcomes if o.record.group == "xmem"])
    if test.least is not None:
        result_text = f"{100 * test.least:.1f} %"
        if test.least > _MOST_FAILURES:
            result_text += " **missed**"
        what = f"xMem's runs whose verdict is wrong | <= {100 * _MOST_FAILURES:g} %"
        yield f"| {what} | {result_text} | {test.num_tried} | | |"


def release_rows(outcomes: list[RecordOutcome]) -> Iterator[str]:
    """The rows of which memest predicted how many records, the most first."""
    yield "| memest | predictions |"
    yield "|---|---:|"
    counts = Counter(one.made_with or "not recorded" for one in outcomes)
    for who, count in sorted(counts.items(), key=lambda row: (-row[1], row[0])):
        yield f"| {who} | {count} |"


def refusal_rows(outcomes: list[RecordOutcome]) -> Iterator[str]:
    """The rows of complete records for which there is no prediction, by set and reason."""
    yield "| set | records | what memest says |"
    yield "|---|---:|---|"
    counts = Counter((o.record.group, o.failure.partition(". ")[0]) for o in outcomes if o.failure)
    for (group, why), count in sorted(counts.items()):
        yield f"| {group} | {count} | {why} |"


def incomplete(all_records: Records) -> Iterator[str]:
    """The rows of what is not complete, by the set it is of and what it lacks."""
    yield "| set | records | lacks |"
    yield "|---|---:|---|"
    counts = Counter((one.group, ", ".join(one.missing)) for one in all_records.incomplete)
    for (group, missing), count in sorted(counts.items()):
        yield f"| {group} | {count} | {missing} |"


def write_page(
    outcomes: list[RecordOutcome], page: Path = PAGE, all_records: Records | None = None
) -> None:
    """Replace what stands between the markers of the page; the prose around them stays."""
    text = page.read_text(encoding="utf-8")
    parts = {
        "summary": "\n".join(summary(outcomes)), "targets": "\n".join(targets(outcomes)),
        "refused": "\n".join(refusal_rows(outcomes)), "made": "\n".join(release_rows(outcomes)),
    }  # fmt: skip
    if all_records is not None:
        parts["incomplete"] = "\n".join(incomplete(all_records))
    for name in dict.fromkeys(o.record.group for o in outcomes):
        parts[name] = "\n".join(table(o for o in outcomes if o.record.group == name))
    for name, body in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin in text and end in text:
            head, rest = text.split(begin, 1)
            text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text, encoding="utf-8")


# -- what is kept ---------------------------------------------------------------------------------

_OUTCOME_FIELDS = (
    "predicted_bytes", "low_bytes", "bound_bytes", "floor_bytes", "context_bytes", "context_read",
    "limit_bytes", "runs_out", "retries", "slack_bytes", "fragmentation_bytes", "family",
    "precision", "optimizer", "failure",
    "made_with",
)  # fmt: skip


def _digest(record: CaseRecord) -> str:
    """Of everything that a prediction depends on, the code beside the file too."""
    what = {name: getattr(record, name) for name in record.__dataclass_fields__}
    for name in ("source", "notes", "measured_bytes", "rounding_bytes"):
        del what[name]
    for name in ("model", "code"):
        what[name] = what[name].rpartition("models/")[2].rpartition("/models")[2]
    if record.code:
        path = Path(record.code) / f"{record.model.partition(':')[0]}.py"
        what["code"] = path.read_text(encoding="utf-8")
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _line(one: RecordOutcome) -> str:
    record = one.record
    range_bytes = one.floor_bytes, one.bound_bytes
    return json.dumps({
        "id": record.id, "set": record.group,
        "model": record.model.rpartition("models/")[2],
        "family": one.family, "gpu": record.gpu, "run": _what(record),
        "num_gpus": record.setup.get("num_gpus", 1), "adapters": _has_adapter(record),
        "metric": record.metric, "measured_bytes": record.measured_bytes,
        "predicted_bytes": one.predicted_bytes, "low_bytes": one.low_bytes,
        "range_bytes": None if one.bound_bytes is None else range_bytes, "inside": one.inside,
        "scored": one.scored, "error": one.error, "peak_at": one.where,
        "remark": _remark(one).replace("**", ""), "source": record.source,
        "record": _digest(record),
        "outcome": {name: getattr(one, name) for name in _OUTCOME_FIELDS},
    })  # fmt: skip


def write_outcomes(outcomes: list[RecordOutcome], path: Path = OUTCOMES) -> None:
    """Keep what was predicted, for the explorer's accuracy page: one JSON object a line."""
    path.write_text("".join(f"{_line(one)}\n" for one in outcomes), encoding="utf-8")


def read_outcomes(every: list[CaseRecord], path: Path = OUTCOMES) -> dict[str, RecordOutcome]:
    """What was kept, by id, of those records that are still the same."""
    if not path.is_file():
        return {}
    by_id = {record.id: record for record in every}
    outcomes = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        record = by_id.get(line["id"])
        if record is not None and line.get("record") == _digest(record):
            outcomes[record.id] = RecordOutcome(
                record=record, where=line["peak_at"], **line["outcome"]
            )
    return outcomes


def main(argv: list[str] | None = None) -> int:
    """Run the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of id, model, GPU or set")
    parser.add_argument("--set", action="append", default=[], help="name of a file; repeatable")
    parser.add_argument("--new", action="store_true", help="those that no kept outcome is of")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="those that other code predicted, or nobody knows which",
    )
    parser.add_argument("--page", action="store_true", help="run none: the page from what is kept")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    all_records = read()
    every = all_records.complete
    outcomes_by_id = read_outcomes(every)
    chosen_ids = {one.id for one in read(arguments.only).complete}
    unknown = sorted(set(arguments.set) - {one.group for one in every})
    if unknown:
        parser.error(f"--set {unknown[0]}: no such file of complete records in {RECORDS}")
    todo = [
        one for one in every
        if one.id in chosen_ids and not arguments.page
        and (not arguments.set or one.group in arguments.set)
        and (not arguments.new or one.id not in outcomes_by_id)
        and (not arguments.stale or one.id not in outcomes_by_id or outcomes_by_id[one.id].stale)
    ]  # fmt: skip
    predictor = Predictor(trust_code=True)
    for record in todo:
        start = time.perf_counter()
        outcome = predictor.predict(record)
        outcomes_by_id[record.id] = outcome
        print(
            f"{record.id:48s} {_mib(record.measured_bytes):>8s} "
            f"{_mib(outcome.predicted_bytes):>8s} {_percent(outcome.error):>9s}  {outcome.where}  "
            f"{_remark(outcome)} [{time.perf_counter() - start:.1f} s]",
            flush=True,
        )
        if not arguments.dry:
            write_outcomes([outcomes_by_id[one.id] for one in every if one.id in outcomes_by_id])
    page_records = todo if arguments.dry else every
    outcomes = [outcomes_by_id[one.id] for one in page_records if one.id in outcomes_by_id]
    print("\n".join(summary(outcomes)))
    if not arguments.dry:
        write_outcomes(outcomes)
        write_page(outcomes, all_records=all_records)
        lacking = [one.id for one in every if one.id not in outcomes_by_id]
        stale = sum(one.stale for one in outcomes)
        if stale:
            what = f"{stale} were predicted by other code: python tools/published.py --stale"
            print(what, file=sys.stderr)
        if not (stale or lacking):
            from campaigns import record

            record("published", f"{len(outcomes)} measurements predicted")
        if lacking:
            what = f"{len(lacking)} records were not run: python tools/published.py --new"
            print(what, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
