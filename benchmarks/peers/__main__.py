"""Head to head: the same measured runs through memest and its peers.

    python benchmarks/peers                      # all records, table on stdout
    python benchmarks/peers --write              # and into docs/peers.md
    python benchmarks/peers --only t5            # some records
    python benchmarks/peers --fresh              # ask again about runs that were asked about before
    python benchmarks/peers --page               # ask nobody: the page from what was answered

Needs the packages of the tests, and fitcheck-llm for its column: `pip install fitcheck-llm==0.3.1`.
Every peer is asked in this process, one after the other; times are CPU seconds of one estimate
(what else the machine does is not in them), imports warm. memest's caches are empty at the start:
models are traced here. A peer that has not answered after 120 CPU seconds is stopped, and the page
says so. Answers are kept in ``data/accuracy/peers.jsonl`` as they come, so a comparison can be
ended and go on later.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
os.environ["MEMEST_CACHE"] = tempfile.mkdtemp(prefix="memest-peers-")
os.environ["HF_HUB_OFFLINE"] = "1"

from memest.calibration.validation.predict import Predictor  # noqa: E402
from memest.calibration.validation.records import CaseRecord, read_records  # noqa: E402
from memest.calibration.validation.scores import Errors  # noqa: E402
from memest.errors import MemestError  # noqa: E402
from peers import formulas, libraries  # noqa: E402 - beside this file
from peers.question import NotForThisError, Question  # noqa: E402

PAGE = ROOT / "docs" / "peers.md"
ANSWERS = ROOT / "data" / "accuracy" / "peers.jsonl"
_PATIENCE = 120
"""CPU seconds that a peer has for one estimate."""
RECORDS = sorted((ROOT / "data" / "reference").glob("*.jsonl"))

PEERS: dict[str, Callable[[Question], int]] = {
    "accelerate estimate-memory": libraries.accelerate_estimate,
    "DeepSpeed ZeRO-2 estimator": formulas.deepspeed_zero2,
    "EleutherAI cookbook": formulas.eleuther,
    "Megatron (2205.05198)": formulas.megatron,
    "PyTorch MemTracker": libraries.mem_tracker,
    "fitcheck-llm 0.3.1": libraries.fitcheck,
}
PUBLISHED_PEERS = {
    "xMem (published)": "xmem", "DNNMem (published by xMem)": "dnnmem",
    "SchedTune (published by xMem)": "schedtune", "LLMem (published by xMem)": "llmem",
}  # fmt: skip


@dataclass(slots=True)
class Column:
    """What one way said: signed errors and seconds, and why it said nothing."""

    errors: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def documents() -> dict[str, dict]:
    """The records as they are written, by id."""
    lines = [line for path in RECORDS for line in path.read_text(encoding="utf-8").splitlines()]
    return {d["id"]: d for d in map(json.loads, lines)}


def target(record: CaseRecord) -> int:
    """What is to be hit without a context: peers have none."""
    context = record.context_bytes if record.metric == "device" else 0
    return (record.measured_bytes or 0) - (context or 0)


def answers() -> dict[str, dict]:
    """What is kept, by the id of the record."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.is_file() else []
    return {answer["id"]: answer for answer in map(json.loads, lines)}


def run(records: list[CaseRecord], *, fresh: bool) -> dict[str, Column]:
    """Ask everybody about every record that nobody was asked about yet."""
    known_answers = {} if fresh else answers()
    if fresh:
        ANSWERS.unlink(missing_ok=True)
    predictor, parameters, record_documents = Predictor(trust_code=True), {}, documents()
    left = [record for record in records if record.id not in known_answers]
    for number, record in enumerate(sorted(left, key=lambda r: r.model), start=1):
        sys.stderr.write(f"\r{number} of {len(left)}: {record.id:40s}")
        answer = ask_all(record, predictor, parameters)
        known_answers[record.id] = answer
        with ANSWERS.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(answer)}\n")
    sys.stderr.write("\n")
    return columns_of([known_answers[record.id] for record in records], record_documents)


def ask_all(record: CaseRecord, predictor: Predictor, parameters: dict[str, int]) -> dict:
    """What everybody says about one record: an error and seconds, or why there is none."""
    start = time.process_time()
    outcome = predictor.predict(record)
    ours: dict = {"seconds": time.process_time() - start}
    if outcome.error is None:
        ours = {"refused": outcome.failure or "no number to be hit"}
        return {"id": record.id, "said": {"memest": ours}}
    results = {"memest": {**ours, "error": outcome.error}}
    try:
        setup = predictor.setup_of(record)
        if record.model not in parameters:
            parameters[record.model] = count(record)
        question = Question.of(record, setup, parameters[record.model])
    except MemestError as error:
        return {"id": record.id, "said": results, "problem": str(error)}
    results |= {name: ask(peer, question) for name, peer in PEERS.items()}
    return {"id": record.id, "said": results}


def columns_of(answers: list[dict], record_documents: dict[str, dict]) -> dict[str, Column]:
    """The answers by who gave them, with what was published besides."""
    columns: dict[str, Column] = {"memest": Column(), **{name: Column() for name in PEERS}}
    for answer in answers:
        name = answer["id"]
        for who, result in answer["said"].items():
            column = columns.setdefault(who, Column())
            if "error" not in result:
                column.reasons[name] = result["refused"]
                continue
            column.errors[name] = result["error"]
            column.seconds.append(result["seconds"])
        if name not in columns["memest"].errors:
            continue
        for who, key in PUBLISHED_PEERS.items():
            published_bytes = record_documents[name].get("peers", {}).get(f"{key}_bytes")
            if published_bytes:
                column = columns.setdefault(who, Column())
                # as its authors scored it: their figure against the card's rise
                column.errors[name] = published_bytes / record_documents[name]["measured_bytes"] - 1
                if key == "xmem":
                    column.seconds.append(record_documents[name]["peers"]["xmem_seconds"])
    return columns


def count(record: CaseRecord) -> int:
    """Parameters of the model, tied ones once."""
    import memest

    setup = {k: v for k, v in record.setup.items() if k == "task"}
    facts = memest.estimate(record.model, batch=1, seq_len=16, max_batch=False, **setup).model
    return facts.parameters


class TooSlowError(Exception):
    """A peer takes longer than anybody waits for an estimate."""


@contextlib.contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """Stop what takes more CPU seconds than this."""

    def stop(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def ask(peer: Callable[[Question], int], question: Question) -> dict:
    """One peer about one record."""
    start = time.process_time()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            cpu_limit(_PATIENCE),
        ):
            warnings.simplefilter("ignore")
            prediction = peer(question)
    except NotForThisError as error:
        return {"refused": str(error)}
    except TooSlowError:
        return {"refused": f"no answer within {_PATIENCE} CPU seconds"}
    except Exception as error:  # noqa: BLE001 - a peer's fault is a result of the comparison
        return {"refused": f"{type(error).__name__}: {error}"[:120]}
    seconds = time.process_time() - start
    return {"error": prediction / target(question.record) - 1, "seconds": seconds}


def table(columns: dict[str, Column]) -> str:
    """The comparison as Markdown; memest's error over the very same runs stands beside each."""
    rows = [
        "| | runs | median error | p90 | worst | too low | memest on these | CPU seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    ours = columns["memest"].errors
    for name, column in columns.items():
        errors = Errors.of_signed(list(column.errors.values()))
        if errors is None:
            rows.append(f"| {name} | 0 | - | - | - | - | - | - |")
            continue
        same = Errors.of_signed([ours[key] for key in column.errors])
        seconds = f"{median(column.seconds):.3g}" if column.seconds else "-"
        rows.append(
            f"| {name} | {errors.count} | {errors.median:.1%} | {errors.p90:.1%} | "
            f"{errors.worst:+.1%} | {errors.below:.0%} | {same.median:.1%} | {seconds} |"
        )
    return "\n".join(rows)


def refusals(columns: dict[str, Column]) -> str:
    """Why peers said nothing, counted."""
    lines = []
    for name, column in columns.items():
        reasons: dict[str, int] = {}
        for why in column.reasons.values():
            reasons[why] = reasons.get(why, 0) + 1
        if reasons:
            text = "; ".join(f"{why} ({number})" for why, number in reasons.items())
            lines.append(f"- {name}: {text}.")
    return "\n".join(lines)


def better(columns: dict[str, Column]) -> str:
    """Runs on which a peer is nearer than memest, by peer."""
    ours = columns["memest"].errors
    lines = []
    for name, column in columns.items():
        better_runs = [k for k, e in column.errors.items() if abs(e) < abs(ours[k])]
        if name != "memest" and column.errors:
            listing = f": {', '.join(sorted(better_runs)[:12])}" if better_runs else ""
            lines.append(f"- {name}: {len(better_runs)} of {len(column.errors)}{listing}.")
    return "\n".join(lines)


def write(parts: dict[str, str]) -> None:
    """Put the tables between their markers in the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, body in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the comparison."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of id, model, GPU or file")
    parser.add_argument("--write", action="store_true", help="write docs/peers.md")
    parser.add_argument("--fresh", action="store_true", help="drop what was kept before")
    parser.add_argument("--page", action="store_true", help="write docs/peers.md, asking nobody")
    options = parser.parse_args()
    records = [
        r for r in read_records(RECORDS, only=options.only).complete if r.metric != "forward"
    ]
    known_answers = answers()
    if options.page:
        columns = columns_of(
            [known_answers[r.id] for r in records if r.id in known_answers], documents()
        )
    else:
        columns = run(records, fresh=options.fresh)
        known_answers = answers()
    count = (
        f"{sum(record.id in known_answers for record in records)} of {len(records)} "
        "complete records"
    )
    parts = {
        "table": f"{count} asked about.\n\n{table(columns)}",
        "refusals": refusals(columns),
        "better": better(columns),
    }
    sys.stdout.write("\n\n".join(parts.values()) + "\n")
    if options.write or options.page:
        write(parts)


if __name__ == "__main__":
    main()
