"""Predict PEFT's own comparison of its methods, and write its table into ``docs/accuracy.md``.

    python tools/adapters_published.py             all rows, about 40 minutes
    python tools/adapters_published.py --new       those that are not kept yet
    python tools/adapters_published.py --page      none, the table anew from what was kept

The rows (``data/methods/peft.jsonl``) are maxima of reserved memory over 5,000 steps on
texts whose lengths are drawn from a data set that is not part of them. So the longest batch is read
off one row (:data:`REFERENCE`), as the length whose prediction is nearest to its measurement, and
what is scored is the *difference* between every other row and that one, the median of lengths
around it (:data:`AROUND`). With all texts as long as the cap, predictions have to be above
measurements. The loop is that of ``method_comparison/MetaMathQA/run.py``: it gives the allocator's
cache back every 10 steps, and its ``BucketIterator`` sorts 20 batches, the longest first. So the
first step of the run, which makes the optimizer's states, is the longest of its bucket and leaves
them among what is large; the shortest of a bucket comes 9 steps behind an empty cache, and its
outputs, which the loop still holds, lie in what those steps reserved; the longest comes next, after
another empty cache (:data:`BEFORE`, the same in every row).

What is allocated behind a step, on the average of all, is published beside: weights, gradients,
states and what the loop still holds, whatever the lengths. It says of each method apart from the
peak whether its tensors are those of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from page_sections import write_sections

from memest.config.options import setup_from_options
from memest.errors import MemestError
from memest.estimation.gpu_target import target_gpus
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.estimation.whole_run import resolve_run
from memest.events import Phase
from memest.profiles.joined import STEPS_NEEDED, join_runs
from memest.profiles.stream import Stream
from memest.replay.replay import replay
from memest.units import MIB

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "data" / "methods" / "peft.jsonl"
OUTCOMES = ROOT / "data" / "accuracy" / "adapters.jsonl"
PAGE = ROOT / "docs" / "accuracy.md"
REFERENCE = "lora--llama-3.2-3B-rank32"
"""The row whose length is read off: LoRA, with the settings that most people train with."""
CAP = 768
"""Tokens that texts are cut at (``max_seq_length``)."""
BEFORE = (400, 400, 210, 64)
"""Tokens of the steps that the longest batch comes after: twice the first of the run, the first
behind an emptied cache in the middle of a bucket, its last. The rows say nothing of them but a mean
of 210."""
EMPTIED = (3, 5)
"""Steps of these, from 1, in front of which the cache is given back."""
_STEP = 3
AROUND = (-_STEP, 0, _STEP)
"""Tokens beside the length read off, which is not known to the token."""
NEW_TOKENS, PROMPT, EVAL_BATCH = 300, 500, 50
"""What an evaluation generates, after prompts that leave room for it in ``max_length`` 800."""
GOAL = 20 * MIB
_MIDDLE = AROUND.index(0)
_NEAR = 3
"""Steps around the length: reserved memory grows by jumps, and falls where a block fits better."""
_UNPRICED = {"lora-fa": "the optimizer lora-fa is not modelled"}


def read_rows() -> list[dict[str, Any]]:
    """All rows, one run each."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def setup_of(row: dict[str, Any], seq_len: int, **more: Any) -> Any:
    """The run of a row at one length of its texts, as its script trains."""
    adapter = row["adapter"]
    more["software"] = {"peft": ".".join(row["peft"].split(".")[:2])}
    if adapter is not None:
        more["adapter"] = {**adapter, "autocast_adapter_dtype": row["autocast_adapter_dtype"]}
    loop = {"loop": "trainer"} if "generate" in more else {
        "loop": "plain", "zero_grad_at": "before-forward", "num_steps": STEPS_NEEDED
    }  # fmt: skip
    return setup_from_options(
        dtype=row["dtype"], batch=row["batch"], seq_len=seq_len, padded=True, optim="adamw_torch",
        max_grad_norm=1.0, grad_accum=1, **loop, **more,
    )  # fmt: skip


def empties(stream: Stream, emptied: Collection[int] | None = None) -> tuple[int, ...]:
    """Events in front of which the cache is given back: these steps, or all but the first."""
    steps: dict[int, int] = {}
    for place, mark in zip(stream.mark_positions, stream.marks, strict=True):
        if mark.phase is not Phase.LOAD and mark.step > 1:
            steps.setdefault(mark.step, place)
    return tuple(sorted(place for n, place in steps.items() if emptied is None or n in emptied))


class Predictor:
    """Runs of one row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self._gpu = target_gpus(setup_of(row, CAP), gpu="l40s").main.traits
        self._profiler = Profiler.of(row["model"])

    def run(self, seq_len: int, **more: Any) -> Run:
        """The row at one length."""
        return resolve_run(self._profiler, setup_of(self.row, seq_len, **more), self._gpu)

    def reserved(self, seq_len: int) -> int:
        """Greatest reserved bytes of a run whose longest batch comes as the script has it."""
        streams = {n: self.run(n).short_stream for n in {*BEFORE, seq_len}}
        stream = join_runs([streams[n] for n in (*BEFORE, seq_len)])
        return _replay(stream, emptied=EMPTIED).peak_reserved_bytes

    def bound(self) -> int:
        """The same with all texts as long as the cap."""
        return _replay(self.run(CAP).short_stream).peak_reserved_bytes

    def settled(self, seq_len: int) -> int:
        """Allocated bytes behind a step."""
        stream = self.run(seq_len).short_stream
        curve = _replay(stream, curve=True, emptied=()).allocated_curve
        assert curve is not None
        return int(curve[empties(stream, (STEPS_NEEDED,))[0] - 1])

    def evaluation(self) -> int:
        """Greatest allocated bytes of a generation behind the last step.

        That of the Trainer, which knows a batch of its own for it; what is generated is the same.
        """
        run = self.run(PROMPT, generate=NEW_TOKENS, eval_batch=EVAL_BATCH)
        stream = run.short_stream
        begins = next(
            place
            for place, mark in zip(stream.mark_positions, stream.marks, strict=True)
            if mark.phase is Phase.GENERATION
        )
        curve = _replay(stream, curve=True).allocated_curve
        assert curve is not None
        return max(curve[begins:])

    @property
    def trained_parameters(self) -> int:
        """How many numbers train."""
        return self._profiler.facts(self.run(CAP)).trainable_parameters


def _replay(stream: Stream, *, curve: bool = False, emptied: Collection[int] | None = None) -> Any:
    return replay(
        stream.events, stream.sizes, curve=curve, streams=stream.on_streams,
        empty_cache_at=empties(stream, emptied),
    )  # fmt: skip


def reference_length(row: dict[str, Any]) -> int:
    """The length whose prediction is nearest to what a row measured, near where it gets there."""
    predictor = Predictor(row)
    measured = row["max_reserved_bytes"]
    low, high = CAP // 2 // _STEP, CAP // _STEP
    while low < high:
        middle = (low + high) // 2
        is_short = predictor.reserved(middle * _STEP) < measured
        low, high = (middle + 1, high) if is_short else (low, middle)
    near = (n * _STEP for n in range(low - _NEAR, low + _NEAR + 1) if n * _STEP <= CAP)
    return min(near, key=lambda n: abs(predictor.reserved(n) - measured))


def mean_length(row: dict[str, Any]) -> int:
    """The length behind whose step as much is allocated as a row has on the average."""
    predictor = Predictor(row)
    low, high = (predictor.settled(n) for n in (CAP // 4, CAP // 2))
    tokens = (row["mean_allocated_bytes"] - low) * (CAP // 4) / (high - low)
    return CAP // 4 + round(tokens)


def predict(row: dict[str, Any], seq_len: int, mean: int) -> dict[str, Any]:
    """What is kept of one row, at the longest of its lengths and at their mean."""
    kept: dict[str, Any] = {"id": row["id"], "seq_len": seq_len}
    if row["optimizer"] in _UNPRICED:
        return {**kept, "failure": _UNPRICED[row["optimizer"]]}
    if row["model"] != "meta-llama/Llama-3.2-3B":
        return {**kept, "failure": f"{row['model']} is a model of diffusers, which is not built"}
    try:
        predictor = Predictor(row)
        kept["predicted_bytes"] = [predictor.reserved(seq_len + more) for more in AROUND]
        kept["bound_bytes"] = predictor.bound()
        kept["settled_len"], kept["settled_bytes"] = mean, predictor.settled(mean)
        kept["trained_parameters"] = predictor.trained_parameters
    except MemestError as error:
        kept["failure"] = str(error).partition("\n")[0]
    return kept


# -- the page -------------------------------------------------------------------------------------


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f}"


def _name(row: dict[str, Any]) -> str:
    return str(row["id"]).replace("--llama-3.2-3B", "").replace("--", " ")


def _same_run(row: dict[str, Any], outcome: dict[str, Any]) -> bool:
    return bool(outcome["trained_parameters"] == row["trained_parameters"])


def table(rows: list[dict[str, Any]], outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of the section."""
    reference, at = next(r for r in rows if r["id"] == REFERENCE), outcomes[REFERENCE]
    scored, settled, bounds, lines, refused = [], [], [], [], []
    for row in rows:
        outcome = outcomes.get(row["id"])
        if outcome is None or row["id"] == REFERENCE:
            continue
        if "failure" in outcome:
            if row["model"] == reference["model"]:
                refused.append((_name(row), outcome["failure"]))
            continue
        measured = row["max_reserved_bytes"] - reference["max_reserved_bytes"]
        predicted = statistics.median(
            mine - its
            for mine, its in zip(outcome["predicted_bytes"], at["predicted_bytes"], strict=True)
        )
        held = row["mean_allocated_bytes"] - reference["mean_allocated_bytes"]
        held_off = outcome["settled_bytes"] - at["settled_bytes"] - held
        remark = ""
        if not _same_run(row, outcome):
            remark = (
                f"other settings than published: {row['trained_parameters']:,} numbers trained, "
                f"{outcome['trained_parameters']:,} here; not scored"
            )
        else:
            scored.append(abs(predicted - measured))
            settled.append(abs(held_off))
            bounds.append(outcome["bound_bytes"] >= row["max_reserved_bytes"])
        lines.append(
            f"| {_name(row)} | {_mib(held)} | {_mib(held_off)} | {_mib(measured)} "
            f"| {_mib(predicted)} | {_mib(predicted - measured)} "
            f"| {_mib(outcome['bound_bytes'] - row['max_reserved_bytes'])} "
            f"| {_mib(outcome.get('evaluation_bytes', 0))} | {remark} |"
        )
    median, settled_median = statistics.median(scored), statistics.median(settled)
    goal = "" if median <= GOAL else " **missed**"
    yield (
        f"**Differences from LoRA of rank 32: median {_mib(median)} MiB off over {len(scored)} rows"
        f"** (goal: <= {_mib(GOAL)} MiB{goal}; {sum(d <= GOAL for d in scored)} are within it, "
        f"{sum(d <= 100 * MIB for d in scored)} within 100 MiB). With all texts at the cap of "
        f"{CAP} tokens {sum(bounds)} of {len(bounds)} are above their measurement. The length read "
        f"off the reference is {at['seq_len']} tokens ({_mib(at['predicted_bytes'][_MIDDLE])} "
        f"predicted, {_mib(reference['max_reserved_bytes'])} MiB measured)."
    )
    yield ""
    yield (
        f"What is allocated behind a step, on the average of all, less LoRA's: median "
        f"{settled_median / MIB:.1f} MiB off, at texts of {at['settled_len']} tokens, read off "
        f"LoRA too."
    )
    yield ""
    yield (
        "| run | behind a step, less LoRA | off | maximum, less LoRA | predicted, less LoRA | off "
        "| bound, less measured | in evaluation | |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    yield from sorted(lines)
    yield ""
    words = (f"{name} ({why.rstrip('.')})" for name, why in refused)
    yield f"Not predicted: {'; '.join(words)}."


def write_page(rows: list[dict[str, Any]], outcomes: dict[str, dict[str, Any]]) -> None:
    """Replace what stands between the markers of the page."""
    write_sections(PAGE, {"adapters": "\n".join(table(rows, outcomes))})


def _kept() -> dict[str, dict[str, Any]]:
    if not OUTCOMES.is_file():
        return {}
    lines = OUTCOMES.read_text(encoding="utf-8").splitlines()
    return {one["id"]: one for one in map(json.loads, lines)}


def _keep(outcomes: dict[str, dict[str, Any]]) -> None:
    text = "".join(f"{json.dumps(one)}\n" for one in outcomes.values())
    OUTCOMES.write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Predict and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--new", action="store_true", help="rows that are not kept yet")
    parser.add_argument("--page", action="store_true", help="the page alone")
    arguments = parser.parse_args(argv)
    rows = read_rows()
    outcomes = _kept() if arguments.new or arguments.page else {}
    if not arguments.page:
        reference = next(row for row in rows if row["id"] == REFERENCE)
        if REFERENCE not in outcomes:
            mean = mean_length(reference)
            outcomes[REFERENCE] = predict(reference, reference_length(reference), mean)
        lengths = (outcomes[REFERENCE]["seq_len"], outcomes[REFERENCE]["settled_len"])
        for row in rows:
            if row["id"] not in outcomes:
                outcomes[row["id"]] = predict(row, *lengths)
                print(row["id"], outcomes[row["id"]], flush=True)
                _keep(outcomes)
        for row in rows:
            kept = outcomes[row["id"]]
            if "failure" not in kept and "evaluation_bytes" not in kept:
                kept["evaluation_bytes"] = Predictor(row).evaluation()
                _keep(outcomes)
    write_page(rows, outcomes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
