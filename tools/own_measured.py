"""Predict memest's own measurements of ranks and of TRL's trainers, and write the tables of them.

    python tools/own_measured.py             # docs/accuracy.md
    python tools/own_measured.py --only dpo  # print some, write nothing

The measurements are those of ``tools/measure_ranks.py`` and ``tools/measure_trainers.py`` in
``data/measurements``. Cases that ask for Liger's kernels need ``liger-kernel``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_sections import write_sections

from memest import estimate
from memest.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "data" / "measurements"
RANKS, TRAINERS = "ranks-h100-torch-2.11.jsonl.gz", "trainers-h100-trl-1.16.jsonl.gz"
SOFTWARE = "torch=2.11,transformers=5.17"
STALE = "accelerate-fsdp1"
"""Runs whose optimizer was made before FSDP1 replaced the parameters, and updates none."""
END = 1
"""The token that TRL puts behind a text that is learned from."""


def main() -> None:
    """Predict all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the cases' names")
    only = parser.parse_args().only
    tables = {
        "own_ranks": _table(
            (row, row["options"]) for row in measured_rows(RANKS) if only in row["name"]
        ),
        "own_trainers": _table(
            (row, options_of(row)) for row in measured_rows(TRAINERS) if only in row["name"]
        ),
    }
    if not only:
        write_sections(ROOT / "docs" / "accuracy.md", tables)


def measured_rows(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a file that a prediction is laid beside: each case once."""
    with gzip.open(MEASURED / name, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            failed = row.get("status") != "ok" or row["name"].startswith(STALE)
            if not failed and not row.get("repeated"):
                yield row


def _table(rows: Iterator[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    lines = [
        "| case | model | allocated, measured MiB | error | reserved, measured MiB | error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    errors: list[tuple[float, float]] = []
    for row, options in rows:
        try:
            peak = estimate(
                row["model"], gpu="h100", software=SOFTWARE, max_batch=False, **options
            ).peak
        except ConfigError:
            lines.append(f"| {row['name']} | {row['model'].rpartition('/')[2]} | | refused | | |")
            continue
        measured = row["allocated_bytes"], row["reserved_bytes"]
        found = peak.allocated_bytes / measured[0] - 1, peak.reserved_bytes / measured[1] - 1
        errors.append(found)
        cells = [f"{n / 2**20:,.0f} | {e:+.2%}" for n, e in zip(measured, found, strict=True)]
        link = f", {row['link']} GB/s" if row.get("link") else ""
        model = row["model"].rpartition("/")[2]
        lines.append(
            f"| {row['name'].replace('-link', '')}{link} | {model} | {' | '.join(cells)} |"
        )
        print(lines[-1], flush=True)
    if not errors:
        return ""
    medians = [f"{statistics.median(map(abs, kind)):.2%}" for kind in zip(*errors, strict=True)]
    worst = [f"{max(kind, key=abs):+.2%}" for kind in zip(*errors, strict=True)]
    lines.append(
        f"| **{len(errors)} runs** | | median, worst | {medians[0]}, {worst[0]} | median, worst "
        f"| {medians[1]}, {worst[1]} |"
    )
    return "\n".join(lines)


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """The options of a case of ``measure_trainers``: TRL's defaults, and what the case states."""
    arguments = dict(row.get("args", {}))
    arguments.pop("max_length", None)  # above the texts' own
    method = row["method"]
    generates = method in ("grpo", "rloo", "online-dpo")
    out: dict[str, Any] = {
        "batch": row["batch"],
        "seq_len": row["prompt"] + row["completion"] + (0 if generates else END),
        "bf16": True,
        "dtype": row["dtype"],
        "loop": "trainer",
        "num_steps": 3,
        "optim": row.get("optim", "adamw_torch_fused"),
        "checkpointing": "full" if arguments.pop("gradient_checkpointing", True) else "none",
    }
    if method == "sft":
        arguments.pop("loss_type", None)  # TRL 1.16: another name of the same
        if not arguments.get("use_liger_kernel"):
            out["fused_loss"] = "trl-fused"
    else:
        (out["method"],) = arguments.pop("loss_type", [method])
    if generates:
        out["completion_len"] = row["completion"]
    if row.get("lora"):
        out |= {"lora_r": row["lora"]["r"], "lora_target_modules": row["lora"]["target_modules"]}
    if row.get("quantised"):
        # TRL prepares nothing, and casts adapters on quantised weights
        out |= {"prepare_kbit": False, "cast_weights": ["trainable=bfloat16"]}
    if row.get("quantised") == "nf4":
        out |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": row["dtype"],
        }
    elif row.get("quantised"):
        out["load_in_8bit"] = True
    return out | arguments


if __name__ == "__main__":
    main()
