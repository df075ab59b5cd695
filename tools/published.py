"""Run published measurements through memest and write the tables of ``docs/accuracy.md``.

    python tools/published.py                  all records, table on stdout, tables into the page
    python tools/published.py --only t5 --dry  some records, nothing written

Records are JSON lines in ``data/reference``; a folder named by ``MEMEST_REFERENCE`` may hold
more in the same form. A record that names no sequence length is a range: it is run at both ends and
not scored.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memest.assemble import moment
from memest.cards import NO_PROFILE, Card, card_for
from memest.errors import MemestError
from memest.events import Chains, Phase
from memest.fit import largest_batch
from memest.models.resolve import resolve_model
from memest.needs import needs_of
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.setup import Setup, Software
from memest.steps.stream import Stream
from memest.tracing import Tracer
from memest.units import MIB

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "data" / "reference"
PAGE = ROOT / "docs" / "accuracy.md"
OUTCOMES = ROOT / "data" / "accuracy" / "outcomes.jsonl"
LOSSES = {"mean of the logits": lambda outputs, _batch: outputs.logits.mean()}
"""Losses of scripts that train on none of their own, by the words of a record."""
SHORTEST, LONGEST = 2, 128
DIVIDED = 20
"""Sets of more records than this are also summed up by model and by optimizer."""
SURE_LENGTH = 10
"""Batches of texts from which on the longest row surely has the full length."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What memest says about one record.

    Attributes:
        record: the record.
        predicted: bytes to compare with ``measured``, None where tracing failed.
        measured: bytes of the record less what is not this run's.
        where: phase, step and operator of the allocated peak; or why there is no number.
        retries: how often the allocator released its cache under the card's limit.
        oom: out of memory under that limit; None where no limit is known.
        low: for a record that is a range, the prediction at its lower end.
        basis: what was added and subtracted.
        range: low and high end that an estimate gives for the device peak, not told of any
            context that was read on the card; None for other metrics.
    """

    record: dict[str, Any]
    predicted: int | None
    measured: int
    where: str
    retries: int = 0
    oom: bool | None = None
    low: int | None = None
    basis: str = ""
    range: tuple[int, int] | None = None

    @property
    def error(self) -> float | None:
        """Signed error in percent."""
        if self.predicted is None:
            return None
        return (self.predicted / self.measured - 1) * 100

    @property
    def inside(self) -> bool | None:
        """Whether the reading lies in the range; None where none was told or the run failed."""
        if self.range is None or self.record.get("oom"):
            return None
        low, high = self.range
        return low <= self.measured <= high

    @property
    def scored(self) -> bool:
        """Whether there is a number to be hit.

        Not where the length or the context is not published, nor where the run failed.
        """
        known = self.record["metric"] != "device" or bool(self.record.get("device_context_bytes"))
        number = self.predicted is not None and self.low is None
        return number and known and not self.record.get("oom")


def records(only: str = "") -> list[dict[str, Any]]:
    """All complete records, those of the repository first; ids are taken once."""
    extra = os.environ.get("MEMEST_REFERENCE")
    more = sorted(Path(extra).glob("*.jsonl")) if extra else []
    found: dict[str, dict[str, Any]] = {}
    for path in (*sorted(RECORDS.glob("*.jsonl")), *more):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line) if line.strip() else {}
            if isinstance(record.get("setup"), dict) and "metric" in record:
                record.setdefault("set", path.stem)
                found.setdefault(record["id"], record)
    return [r for r in found.values() if only in f"{r['id']} {r['model']} {r['gpu']} {r['set']}"]


def setup_of(record: dict[str, Any], **changes: Any) -> Setup:
    """The training setup of a record, with the software it ran on."""
    software = ",".join(f"{k}={v}" for k, v in record.get("software", {}).items() if v)
    values = {"task": record.get("task", "auto"), **record["setup"], **changes}
    return Setup(software=Software.parse(software), **values)


def card_of(record: dict[str, Any], setup: Setup) -> Card:
    """The record's card, with the context that was read on it where there is one."""
    torch_version = setup.software.torch or (2, 13)
    return card_for(record["gpu"], setup, torch_version, record.get("device_context_bytes"), None)


def untold(record: dict[str, Any], setup: Setup) -> Card:
    """The record's card as an estimate knows it, without calibration."""
    torch_version = setup.software.torch or (2, 13)
    return card_for(record["gpu"], setup, torch_version, None, None, NO_PROFILE)


def tracer_of(record: dict[str, Any]) -> Tracer:
    """The record's model; a script of its own feeds it what the record names.

    A model may be a folder of ``data/reference/models``.
    """
    own = RECORDS / "models" / record["model"]
    source = resolve_model(str(own) if own.is_dir() else record["model"])
    shapes = record.get("inputs")
    if not shapes:
        return Tracer(source=source)
    import torch

    inputs = {name: torch.ones(shape, dtype=torch.int64) for name, shape in shapes.items()}
    return Tracer(source=source, inputs=inputs, loss=LOSSES[record["loss"]])


def predict(record: dict[str, Any]) -> Outcome:
    """Run one record."""
    measured = record["measured_bytes"] - record.get("device_offset_bytes", 0)
    try:
        if record["setup"].get("seq_len", 0) is None:
            low = _predict(record, measured, seq_len=SHORTEST)
            return replace(_predict(record, measured, seq_len=LONGEST), low=low.predicted)
        return _predict(record, measured)
    except MemestError as error:
        return Outcome(record, None, measured, str(error).partition(".")[0])


def _predict(record: dict[str, Any], measured: int, **changes: Any) -> Outcome:
    setup = setup_of(record, **changes)
    card = card_of(record, setup)
    found = tracer_of(record).find(setup, card.traits)
    stream = found.stream
    if record["metric"] == "forward":
        stream = forward_only(stream)
    conf = parse_alloc_conf(setup.alloc_conf)
    context = card.context.expected_bytes if record["metric"] == "device" else 0
    limit = record.get("limit_bytes") or (card.usable_bytes - context if context else None)
    result = replay(stream.events, stream.sizes, conf, chains=stream.chains)
    at = moment(stream, result)
    told = None
    if record["metric"] == "device":
        needs = needs_of(untold(record, setup), found, stream, result)
        told = needs.low_bytes, needs.high_bytes
    if limit is not None and result.peak_reserved_bytes > limit:
        result = replay(stream.events, stream.sizes, conf, limit_bytes=limit)
    peak = {
        "allocated": result.peak_allocated_bytes,
        "forward": result.final_allocated_bytes,
    }.get(record["metric"], result.peak_reserved_bytes)
    return Outcome(
        record,
        peak + context,
        measured,
        f"{at.phase} {at.step}, {at.op.removeprefix('aten.').partition('.')[0]}",
        retries=result.num_alloc_retries,
        oom=None if limit is None else bool(result.num_ooms),
        basis=f"{context // MIB} MiB context" if context else "",
        range=told,
    )


def forward_only(stream: Stream) -> Stream:
    """A run up to its first backward: what is alive at its end is what a script reads there."""
    end = next(
        position
        for position, mark in zip(stream.mark_positions, stream.marks, strict=True)
        if mark.phase is Phase.BACKWARD
    )
    out = replace(stream)
    out.events = stream.events[:end]
    out.chains = Chains()
    return out


def batch_that_fits(record: dict[str, Any]) -> tuple[int, int]:
    """(largest, largest safe) batch of the record's setup on its card."""
    setup = setup_of(record)
    tracer = tracer_of(record)
    conf = parse_alloc_conf(setup.alloc_conf)
    return largest_batch(card_of(record, setup), tracer, setup, conf)


# -- reports --------------------------------------------------------------------------------------


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f} %"


def _what(record: dict[str, Any]) -> str:
    setup = record["setup"]
    parts = [f"batch {setup['batch']}"]
    if setup.get("grad_accum", 1) > 1:
        parts.append(f"x {setup['grad_accum']}")
    if record["metric"] == "forward":
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
    if outcome.record.get("oom"):
        said.append("run failed; " + ("predicted" if outcome.oom else "**not predicted**"))
    elif outcome.oom:
        said.append("**predicted to fail, did not**")
    if outcome.retries and not outcome.record.get("oom"):
        said.append("at the card's limit, cache released")
    if not outcome.scored and outcome.low is None and outcome.predicted and not said:
        said.append("context not published: not scored")
    if outcome.low is not None:
        inside = outcome.low <= outcome.measured <= (outcome.predicted or 0)
        said.append(
            f"length not recorded: {_mib(outcome.low)} to {_mib(outcome.predicted)} MiB for "
            f"{SHORTEST} to {LONGEST} tokens, {'inside' if inside else '**outside**'}"
        )
    return "; ".join(said)


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """The rows of a Markdown table."""
    yield "| model | GPU | run | measured MiB | predicted MiB | error | peak at | |"
    yield "|---|---|---|---:|---:|---:|---|---|"
    for outcome in outcomes:
        record = outcome.record
        shown = outcome.predicted if outcome.low is None else None
        cells = (
            record["model"].rpartition("/")[2], record["gpu"], _what(record),
            _mib(outcome.measured), _mib(shown),
            _percent(outcome.error if outcome.scored else None), outcome.where, _remark(outcome),
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute errors of a group in percent."""

    name: str
    count: int
    median: float
    p90: float
    worst: float
    signed: float
    below: int
    inside: tuple[int, int]
    """Device readings inside the range told before, and how many there are; scored or not."""

    @classmethod
    def of(cls, name: str, outcomes: Iterable[Outcome]) -> Summary | None:
        """Summarise the scored outcomes, None where there are none."""
        every = list(outcomes)
        errors = [o.error for o in every if o.scored and o.error is not None]
        if not errors:
            return None
        sizes = sorted(map(abs, errors))
        return cls(
            name, len(errors), statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1) + 0.5)],
            sizes[-1], statistics.median(errors), sum(e < 0 for e in errors),
            (sum(o.inside is True for o in every), sum(o.inside is not None for o in every)),
        )  # fmt: skip

    def row(self) -> str:
        """As a row of the summary table."""
        return (
            f"| {self.name} | {self.count} | {self.median:.2f} % | {self.p90:.2f} % | "
            f"{self.worst:.2f} % | {self.signed:+.2f} % | {self.below} | {self._inside()} |"
        )

    def _inside(self) -> str:
        inside, told = self.inside
        return f"{inside} of {told}" if told else "-"


def _groups(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Names of the groups that are summed up, and the ids in each."""
    groups: dict[str, list[str]] = {}
    large = [s for s, n in Counter(r["set"] for r in records).items() if n > DIVIDED]
    for record in records:
        of, setup = record["set"], record["setup"]
        names = [f"**{of}**"]
        if of in large:
            if setup["batch"] >= SURE_LENGTH:
                names.append(f"{of}, batch {SURE_LENGTH} and more")
            names += [f"{of}, {record['model']}", f"{of}, {setup['optim']}"]
        for name in names:
            groups.setdefault(name, []).append(record["id"])
    return groups


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """The rows of the summary: each set, then its models and optimizers."""
    yield "| group | runs | median error | p90 | worst | median, signed | too low | in range |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    by_id = {o.record["id"]: o for o in outcomes}
    for name, ids in sorted(_groups([o.record for o in outcomes]).items()):
        found = Summary.of(name, [by_id[i] for i in ids])
        if found is not None:
            yield found.row()


def write_page(outcomes: list[Outcome], page: Path = PAGE) -> None:
    """Replace what stands between the markers of the page; the prose around them stays."""
    text = page.read_text(encoding="utf-8")
    parts = {"summary": "\n".join(summary(outcomes))}
    for name in dict.fromkeys(o.record["set"] for o in outcomes):
        parts[name] = "\n".join(table(o for o in outcomes if o.record["set"] == name))
    for name, body in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin in text and end in text:
            head, rest = text.split(begin, 1)
            text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text, encoding="utf-8")


def write_outcomes(outcomes: list[Outcome], path: Path = OUTCOMES) -> None:
    """Keep what was predicted, for the explorer's accuracy page: one JSON object a line."""
    lines = []
    for outcome in outcomes:
        record = outcome.record
        own = RECORDS / "models" / record["model"]
        config = resolve_model(str(own) if own.is_dir() else record["model"]).config or {}
        lines.append(
            json.dumps({
                "id": record["id"], "set": record["set"], "model": record["model"],
                "family": config.get("model_type", ""), "gpu": record["gpu"],
                "run": _what(record), "metric": record["metric"],
                "measured_bytes": outcome.measured, "predicted_bytes": outcome.predicted,
                "low_bytes": outcome.low, "range_bytes": outcome.range, "inside": outcome.inside,
                "scored": outcome.scored, "peak_at": outcome.where,
                "remark": _remark(outcome).replace("**", ""), "source": record["source"],
            })
        )  # fmt: skip
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of id, model, GPU or set")
    parser.add_argument("--dry", action="store_true", help="do not write the page")
    arguments = parser.parse_args(argv)
    outcomes = []
    for record in records(arguments.only):
        start = time.perf_counter()
        outcome = predict(record)
        outcomes.append(outcome)
        print(
            f"{record['id']:48s} {_mib(outcome.measured):>8s} {_mib(outcome.predicted):>8s} "
            f"{_percent(outcome.error):>9s}  {outcome.where}  {_remark(outcome)} "
            f"[{time.perf_counter() - start:.1f} s]",
            flush=True,
        )
    print("\n".join(summary(outcomes)))
    if not arguments.dry and not arguments.only:
        write_page(outcomes)
        write_outcomes(outcomes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
