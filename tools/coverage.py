"""Trace every model of the catalogue and write what works to ``docs/coverage.md``.

    python tools/coverage.py                every entry in full size, in a quarter of an hour
    python tools/coverage.py --only bert    entries of one family

Each entry is built on the meta device with the head that ``--task auto`` chooses, and its training
steps are traced as an estimate does it: forward, backward, optimizer, from few layers where the
others follow from them; then all layers run forward once. Nothing is downloaded. ``--results FILE``
keeps one JSON line for each entry as it is done and skips those already there, so a run can be
stopped and taken up again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

LAYER_KEYS = frozenset(
    """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
    num_decoder_layers num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers
    n_block num_hidden_groups""".split()
)
# how often a hybrid model has a layer of the rarer kind
PERIOD_KEYS = ("full_attention_interval", "attn_layer_period")
BATCH = 2
SEQ_LEN = 128
TRACED_STEPS = 2


def reduced_config(config: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    """A copy of a configuration with few layers, but at least one of every kind."""
    out = {k: reduced_config(v, layers) if isinstance(v, dict) else v for k, v in config.items()}
    if isinstance(out.get("depths"), list):
        out["depths"] = [min(depth, layers) for depth in out["depths"]]
        return out
    counts = {out[key] for key in LAYER_KEYS if isinstance(out.get(key), int)}
    keep = _enough(out, counts, layers)
    for key, value in list(out.items()):
        if key in LAYER_KEYS and isinstance(value, int):
            out[key] = min(value, keep)
        elif isinstance(value, list) and len(value) in counts and len(value) > keep:
            out[key] = value[:keep]
        elif key.endswith(("_indices", "_indexes")) and isinstance(value, list):
            out[key] = [min(index, keep - 1) for index in value]
    if isinstance(out.get("cross_attention_layers"), list):
        out["cross_attention_layers"] = [i for i in out["cross_attention_layers"] if i < keep]
    if isinstance(config.get("linear_attn_config"), dict):  # its lists number layers from 1
        out["linear_attn_config"] = {
            name: [layer for layer in value if layer <= keep] if isinstance(value, list) else value
            for name, value in config["linear_attn_config"].items()
        }
    if isinstance(out.get("attention_types"), list) and counts:
        out["attention_types"] = [[["global", "local"], keep // 2]]
    if isinstance(out.get("hybrid_override_pattern"), str):
        out["hybrid_override_pattern"] = out["hybrid_override_pattern"][:keep]
    return out


def _enough(config: dict[str, Any], counts: set[int], layers: int) -> int:
    keep = max([layers, *(config[k] for k in PERIOD_KEYS if isinstance(config.get(k), int))])
    full_attention = config.get("linear_attn_config", {}).get("full_attn_layers")
    if full_attention:
        keep = max(keep, min(full_attention))
    if isinstance(config.get("block_types"), list):
        keep = max(keep, len(config["block_types"]))
    if isinstance(config.get("cross_attention_layers"), list) and config["cross_attention_layers"]:
        keep = max(keep, config["cross_attention_layers"][0] + 2)
    if isinstance(config.get("first_k_dense_replace"), int):
        keep = max(keep, config["first_k_dense_replace"] + 1)
    pattern = config.get("hybrid_override_pattern") or ""
    keep = max([keep, *(pattern.index(kind) + 1 for kind in set(pattern))])
    if config.get("model_type") == "zamba":
        # its shared block must be used twice
        keep = max(keep, 10)
    for value in config.values():
        if isinstance(value, list) and len(value) in counts:
            kinds = {kind for kind in value if isinstance(kind, str)}
            keep = max([keep, *(value.index(kind) + 1 for kind in kinds)])
    return keep


def trace_entry(
    entry_id: str, config: dict[str, Any], *, seq_len: int = SEQ_LEN, **options: Any
) -> dict[str, Any]:
    """Build and trace one configuration; returns what was built and how large the trace is."""
    from memest.catalog.resolve import ModelSource
    from memest.config.setup import Setup
    from memest.errors import ConfigError
    from memest.events import Category
    from memest.trace.inputs.batch import plan_batch, realise
    from memest.trace.losses.loss import loss_for
    from memest.trace.model.adjust import set_use_cache
    from memest.trace.model.build import build_model, count
    from memest.trace.training import trace_training
    from memest.workspaces.operator_call import GpuTraits

    gpu = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
    source = ModelSource(kind="catalogue", id=entry_id, config=config, provenance="the catalogue")
    options = {"batch": BATCH, **options}
    setup = Setup(seq_len=seq_len, **options)
    built_model = build_model(source, setup)
    try:
        plans, sizes, notes = plan_batch(built_model, setup)
    except ConfigError:
        # an image that needs more tokens, or a position table that has fewer
        setup = Setup(**options)
        plans, sizes, notes = plan_batch(built_model, setup)
    set_use_cache(built_model.model, setup)
    trace = trace_training(
        built_model.model,
        setup,
        make_batch=lambda: realise(plans),
        loss_of=loss_for(built_model),
        gpu=gpu,
    )
    gradients = sum(
        size
        for number, size in enumerate(trace.sizes)
        if trace.category(number) is Category.GRADIENTS
    )
    return {
        "class": type(built_model.model).__name__,
        "task": built_model.task.value,
        "attention": built_model.attention,
        "parameters": count(built_model.model).parameters,
        "events": len(trace.events),
        "sizes": {k: v for k, v in _as_dict(sizes).items() if v is not None},
        "notes": [*built_model.notes, *notes, *trace.notes],
        "gradient_share": gradients / TRACED_STEPS / count(built_model.model).parameter_bytes,
    }


def _as_dict(sizes: Any) -> dict[str, Any]:
    return {name: getattr(sizes, name) for name in type(sizes).__dataclass_fields__}


def _measure(entry: Any) -> dict[str, Any]:
    """The row of an entry in its real size."""
    from memest.catalog.gpus import find_gpu, traits
    from memest.catalog.resolve import resolve_model
    from memest.config.setup import Setup
    from memest.errors import ConfigError
    from memest.estimation.profiler import Profiler

    profiler = Profiler(source=resolve_model(entry.id), stores=())
    gpu = traits(find_gpu("a100-80gb"))
    try:
        question = profiler.question(Setup(batch=BATCH, seq_len=SEQ_LEN), gpu, None)
    except ConfigError:
        # an image that needs more tokens, or a position table that has fewer
        question = profiler.question(Setup(batch=BATCH), gpu, None)
    run = profiler.run(question)
    family, _ = profiler.families.shallow(question)
    return {
        "status": "ok",
        "class": run.card.class_name,
        "task": run.card.task.value,
        "attention": run.card.about[-1].removeprefix("attention: "),
        "parameters": run.counts[0],
        "events": len(run.stream.events),
        "whole_because": family.whole_because,
        "notes": run.card.remarks,
    }


def _left_out() -> list[str]:
    """Models that were looked for and are not in the catalogue."""
    from memest.catalog.models import left_out

    return [
        "## Not in the catalogue",
        "",
        "Looked for, and left out. Entries are made from published configurations alone; the",
        "Hugging Face hub's own, or the path of a config.json, answers for these too.",
        "",
        "| model | why |",
        "|---|---|",
        *(f"| {id_} | {reason} |" for id_, reason in left_out().items()),
    ]


def _report(rows: list[dict[str, Any]]) -> str:
    import torch
    import transformers

    status = Counter(row["status"] for row in rows)
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["model_type"], []).append(row)
    few = sum(row["status"] == "ok" and not row["whole_because"] for row in rows)
    how = (
        "Every entry of the catalogue in full size: built on the meta device with the head that "
        f"`--task auto` chooses, training steps traced at batch {BATCH} and sequence length "
        f"{SEQ_LEN} (models of images, sound or short texts at their own sizes), {few} of them "
        "from few layers, whose others follow ([how](folding.md)) and run forward once. "
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}."
    )
    result = (
        f"**{status['ok']} of {len(rows)} models trace, {len(families)} families.** "
        f"{status['fails']} fail, {status['slow']} are too slow."
    )
    lines = [
        "# Coverage",
        "",
        "Written by `tools/coverage.py`; do not edit.",
        "",
        how,
        "",
        result,
        "",
    ]
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        lines += ["## What does not trace", "", "| model | family | why |", "|---|---|---|"]
        for row in bad:
            reason = " ".join(row["reason"].split()).replace("|", "\\|")
            lines.append(f"| {row['id']} | {row['model_type']} | {reason} |")
        lines.append("")
    lines += [
        "## Families",
        "",
        "| family | models | trace | class | task | attention | most events of two steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, members in sorted(families.items()):
        good = [row for row in members if row["status"] == "ok"]
        names = ", ".join(dict.fromkeys(row["class"] for row in good)) or "-"
        tasks = ", ".join(dict.fromkeys(row["task"] for row in good)) or "-"
        attention = ", ".join(dict.fromkeys(row["attention"] for row in good)) or "-"
        largest = max((row["events"] for row in good), default=0)
        lines.append(
            f"| {family} | {len(members)} | {len(good)} | {names} | {tasks} | {attention} "
            f"| {largest:,} |"
        )
    lines += ["", *_left_out()]
    lines += ["", "## What was assumed", "", "| note | models |", "|---|---|"]
    notes = Counter(note for row in rows for note in set(row.get("notes", ())))
    general = [(note, number) for note, number in notes.most_common() if number > 1]
    lines += [f"| {note.replace('|', chr(92) + '|')} | {number} |" for note, number in general]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the catalogue."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="an id or a family; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="entries at a time")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one entry")
    parser.add_argument("--results", type=Path, help="keep results here, one JSON line each")
    parser.add_argument("--out", type=Path, default=Path("docs/coverage.md"))
    arguments = parser.parse_args(argv)

    from one_by_one import rows_of

    from memest.catalog.models import catalogue

    names = set(arguments.only or ())
    entries = [e for e in catalogue() if not names or {e.id, e.model_type} & names]
    rows = rows_of(
        entries,
        _measure,
        limit=arguments.limit,
        jobs=arguments.jobs,
        results=arguments.results,
    )
    if not names:
        arguments.out.write_text(_report(rows))
        from campaigns import record

        num_traced = sum(row["status"] == "ok" for row in rows)
        record("catalogue", f"{num_traced} of {len(rows)} models trace")
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
