"""Write the catalogues under ``data/`` from their sources.

    python tools/build_catalogues.py gpus GPUS.csv data/gpus.json
    python tools/build_catalogues.py models CONFIG_FOLDER data/models

``gpus`` turns the sourced table into typed JSON. ``models`` builds every configuration on the meta
device (no weights, no remote code) and keeps only what transformers really builds; the rest is
listed in ``excluded.csv`` with the reason. CONFIG_FOLDER holds ``index.csv``, ``aliases.csv``,
``excluded.csv`` (models without a published configuration) and one JSON file per architecture.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

MIB = 1 << 20
INDEX_FIELDS = (
    "id",
    "file",
    "model_type",
    "auto_class",
    "parameters",
    "published_parameters",
    "published_basis",
    "source",
    "provenance",
    "license",
    "note",
)
ALIAS_FIELDS = ("alias", "id", "reason")
EXCLUDED_FIELDS = ("id", "auto_class", "reason")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _write_csv(path: Path, fields: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _number(text: str) -> int | float | None:
    if not text:
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def _parameter_count(text: str) -> int | None:
    """A published figure, ``335143938`` or rounded ``9.4B`` / ``22M``."""
    if not text:
        return None
    factor = {"T": 10**12, "B": 10**9, "M": 10**6}.get(text[-1], 1)
    return round(float(text.rstrip("TBM")) * factor) if factor > 1 else int(text)


def _capability(row: dict[str, str]) -> list[int] | str:
    text = row["compute_capability"]
    if row["backend"] != "cuda":
        return text
    major, minor = text.split(".")
    return [int(major), int(minor)]


def gpu_entry(row: dict[str, str]) -> dict[str, Any]:
    """One row of the table as JSON: sizes in bytes, None where the table is silent."""
    nvml_mib = _number(row["nvml_total_mib"])
    return {
        "name": row["name"],
        "aliases": [alias.strip() for alias in row["aliases"].split(";") if alias.strip()],
        "backend": row["backend"],
        "architecture": row["architecture"],
        "compute_capability": _capability(row),
        "sm_count": _number(row["sm_count"]),
        "max_threads_per_sm": _number(row["max_threads_per_sm"]),
        "memory_marketing_gb": _number(row["memory_marketing_gb"]),
        "nvml_total_bytes": None if nvml_mib is None else int(nvml_mib * MIB),
        "torch_total_bytes": _number(row["torch_total_bytes"]),
        "torch_total_precision": row["torch_total_precision"] or None,
        "memory_bandwidth_gbs": _number(row["memory_bandwidth_gbs"]),
        "fp16_dense_tflops": _number(row["fp16_dense_tflops"]),
        "l2_mib": _number(row["l2_mib"]),
        "launch_year": _number(row["launch_year"]),
        "sources": [part.strip() for part in row["source"].split(" | ") if part.strip()],
        "confidence": row["confidence"],
        "notes": [row["notes"].strip()] if row["notes"].strip() else [],
    }


def build_gpus(source: Path, target: Path) -> None:
    """Write the GPU table as JSON, one entry a line so that diffs stay readable."""
    lines = ",\n".join(json.dumps(gpu_entry(row), ensure_ascii=False) for row in _rows(source))
    target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def count_parameters(path: Path, auto_class: str) -> int:
    """Build ``path`` with ``auto_class`` on the meta device and count its parameters.

    Shared (tied) parameters count once.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def _attempt(path: Path, auto_class: str) -> tuple[int, str]:
    try:
        return count_parameters(path, auto_class), ""
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason we record
        text = " ".join(str(error).split())[:200]
        return 0, f"{type(error).__name__}: {text}"


def build_models(source: Path, target: Path) -> None:
    """Copy every configuration that builds, with its index, aliases and what was left out."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    folder = target / "configs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index_rows: list[dict[str, Any]] = []
    left_out = source / "excluded.csv"
    excluded_rows: list[dict[str, Any]] = [*_rows(left_out)] if left_out.is_file() else []
    start = time.monotonic()
    for number, row in enumerate(_rows(source / "index.csv"), start=1):
        path = source / row["file"]
        parameters, reason = _attempt(path, row["auto_class"])
        if reason:
            excluded_rows.append(
                {"id": row["hf_id"], "auto_class": row["auto_class"], "reason": reason}
            )
        else:
            (folder / row["file"]).write_bytes(path.read_bytes())
            index_rows.append(
                {
                    "id": row["hf_id"],
                    "file": row["file"],
                    "model_type": json.loads(path.read_bytes())["model_type"],
                    "auto_class": row["auto_class"],
                    "parameters": parameters,
                    "published_parameters": _parameter_count(row["expected_params"]),
                    "published_basis": row["expected_basis"],
                    "source": row["source"],
                    "provenance": row["provenance"],
                    "license": row["license"],
                    "note": row["note"],
                }
            )
        differs = "" if reason or str(parameters) == row["counted_params"] else " COUNT DIFFERS"
        seconds = time.monotonic() - start
        sys.stderr.write(
            f"{number} {seconds:.0f}s {row['hf_id']} {reason or parameters}{differs}\n"
        )
        gc.collect()
    ids = {row["id"] for row in index_rows}
    aliases = [
        {"alias": row["alias"], "id": row["hf_id"], "reason": row["reason"]}
        for row in _rows(source / "aliases.csv")
        # an alias that only changes case is answered by the lookup itself
        if row["hf_id"] in ids and row["alias"].lower() != row["hf_id"].lower()
    ]
    _write_csv(target / "index.csv", INDEX_FIELDS, index_rows)
    _write_csv(target / "aliases.csv", ALIAS_FIELDS, aliases)
    _write_csv(target / "excluded.csv", EXCLUDED_FIELDS, excluded_rows)


def main() -> int:
    """Parse the command line and write one catalogue."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("catalogue", choices=("gpus", "models"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    build = build_gpus if arguments.catalogue == "gpus" else build_models
    build(arguments.source, arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
