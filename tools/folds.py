"""Trace a model of every family whole and from few layers, compare, and write ``docs/folding.md``.

    python tools/folds.py                      one model of every family, about 10 minutes
    python tools/folds.py --only bert          a family, or a model by its name
    python tools/folds.py --seed 7             other setups and depths

Each family's cheapest deep model is traced as memest answers for it, from few layers, and layer by
layer, at its own depth and at three others that are drawn; both must be the same trace, event for
event. Setups are drawn too: precision, checkpointing, adapters, quantisation. ``--results FILE``
keeps one JSON line for each model as it is done, so a run can be stopped and taken up again.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections import Counter
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

_DEPTHS = 3
_SETUPS: tuple[dict[str, Any], ...] = (
    {"bf16": True},
    {"bf16": True, "checkpointing": True},
    {"fp16": True},
    {"dtype": "bfloat16", "checkpointing": True},
    {"bf16": True, "lora_r": 8},
    {"bf16": True, "lora_r": 8, "checkpointing": True},
    {"bf16": True, "qlora": True, "lora_r": 8, "checkpointing": True},
    {"grad_accum": 1, "loop": "plain"},
)


def compare(model: str, options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Trace a model from few layers and whole.

    Args:
        model: its name.
        options: of the setup.
        rng: draws the depths.

    Returns:
        The layers that repeat, the depths that were compared, and which of them differ.
    """
    from memest.config.options import setup_from_options
    from memest.estimation.gpu_target import target_gpus
    from memest.estimation.profiler import Profiler
    from memest.profiles.family import single_trace_family
    from memest.profiles.fold import unfold

    setup = setup_from_options(batch=2, **options)
    gpu = target_gpus(setup, gpu="a100-80gb").main.traits
    profiler = Profiler.of(model)
    question = profiler.question(setup, gpu)
    tracer = profiler._tracer
    folded = tracer.folded(question, [])
    if folded.fold is None:
        return {"status": "whole", "reason": folded.whole_because}
    fold = folded.fold
    counts = [stack.count for stack in fold.stacks]
    depths = [tuple(counts)]
    for _ in range(_DEPTHS):
        drawn = tuple(rng.randint(k + 2, n) for k, n in zip(fold.kept, counts, strict=True))
        if drawn not in depths:
            depths.append(drawn)
    different, reordered = [], []
    for periods in depths:
        repeats = [n - kept for n, kept in zip(periods, fold.kept, strict=True)]
        whole = tracer.steps(question, fold.stacks, periods)
        unfolded = unfold(folded.trace, fold, repeats)
        if periods == depths[0]:
            family = single_trace_family(folded.trace, question.sizes, fold)
            unfolded = family.unfolded().at(())
        if unfolded != whole:
            unfolded.events, whole.events = map(in_one_order, (unfolded.events, whole.events))
            (reordered if unfolded == whole else different).append(periods)
    return {
        "status": "differs" if different else "equal",
        "stacks": [f"{s.period} x {s.count}" for s in fold.stacks],
        "depths": depths,
        "different": different,
        "reordered": reordered,
        "events": len(whole.events),
    }


def in_one_order(events: array[int]) -> array[int]:
    """Events with what dies at once in the order of its birth.

    Torch lets go of some graphs in an order that changes with their size. The allocator cannot
    tell: what it has after frees with nothing between them does not depend on their order.
    """
    from memest.events import FREE

    out = array("q")
    for is_free, group in groupby(events, key=lambda event: event & 3 == FREE):
        members = list(group)
        out.extend(sorted(members) if is_free else members)
    return out


def _measure(entry: Any, *, seed: int) -> dict[str, Any]:
    from memest.errors import MemestError

    rng = random.Random(f"{seed} {entry.id}")  # noqa: S311 - draws, not secrets
    options = rng.choice(_SETUPS)
    try:
        return {"setup": options, **compare(entry.id, options, rng)}
    except MemestError:
        # not every model takes adapters, or has checkpointing
        return {"setup": {}, **compare(entry.id, {}, rng)}


def _entries(names: set[str]) -> list[Any]:
    """The cheapest model of every family, those that are named."""
    from memest.catalog.models import catalogue

    if names:
        return [e for e in catalogue() if {e.id, e.model_type} & names]
    cheapest: dict[str, Any] = {}
    for entry in catalogue():
        other = cheapest.get(entry.model_type)
        if other is None or (entry.parameters or 0) < (other.parameters or 0):
            cheapest[entry.model_type] = entry
    return [cheapest[family] for family in sorted(cheapest)]


def _report(rows: list[dict[str, Any]], seed: int) -> str:
    status = Counter(row["status"] for row in rows)
    how = (
        "Layers of one kind do the same, so memest traces a few of them and works out what the "
        "others do ([how](architecture.md#step-profiles-memestprofiles)). One model of every "
        "family of the catalogue, the smallest, with a setup that is drawn: traced from few "
        f"layers, and layer by layer, at its own depth and at {_DEPTHS} others (seed {seed})."
    )
    result = (
        f"**{status['equal']} of {len(rows)} families come out event for event; "
        f"{status['differs']} do not.** {status['whole']} are traced whole: too few layers are "
        "alike, or what they do does not repeat. "
        f"{status['fails'] + status['slow']} could not be compared."
    )
    lines = [
        "# Folding",
        "",
        "Written by `tools/folds.py`; do not edit.",
        "",
        how,
        "",
        result,
        "",
        "| family | model | setup | layers that repeat | depths compared (periods) | events |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        setup = ", ".join(f"{k}={v}" for k, v in row.get("setup", {}).items())
        what = "; ".join(row.get("stacks", ())) or row.get("reason", "")
        depths = "; ".join(", ".join(map(str, depth)) for depth in row.get("depths", ()))
        reordered = row.get("reordered")
        note = " (some blocks that die at once die in another order)" if reordered else ""
        mark = "" if row["status"] in ("equal", "whole") else f"**{row['status']}** "
        events = f"{row['events']:,}" if "events" in row else ""
        lines.append(
            f"| {row['model_type']} | {row['id']} | {setup} | {mark}{what}{note} | {depths} "
            f"| {events} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="an id or a family; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="of setups and depths")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one model")
    parser.add_argument("--results", type=Path, help="keep results here, one JSON line each")
    parser.add_argument("--out", type=Path, default=Path("docs/folding.md"))
    arguments = parser.parse_args(argv)

    from one_by_one import rows_of

    rows = rows_of(
        _entries(set(arguments.only or ())),
        partial(_measure, seed=arguments.seed),
        limit=arguments.limit,
        jobs=arguments.jobs,
        results=arguments.results,
    )
    if not arguments.only:
        arguments.out.write_text(_report(rows, arguments.seed), encoding="utf-8")
        from campaigns import record

        equal = sum(row["status"] == "equal" for row in rows)
        whole = sum(row["status"] == "whole" for row in rows)
        record("folds", f"{equal} of {len(rows)} families come out event for event, {whole} whole")
    return 0 if all(row["status"] in ("equal", "whole") for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
