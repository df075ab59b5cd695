"""The script that writes the catalogues."""

from __future__ import annotations

import csv
import json

import pytest

from support.tools import load_tool


@pytest.fixture(scope="module")
def script():
    return load_tool("build_catalogues")


ROW = {
    "name": "Card",
    "aliases": "card;c 1",
    "backend": "cuda",
    "architecture": "Ampere",
    "compute_capability": "8.6",
    "sm_count": "10",
    "max_threads_per_sm": "1536",
    "memory_marketing_gb": "12",
    "nvml_total_mib": "12288",
    "torch_total_bytes": "",
    "torch_total_precision": "",
    "memory_bandwidth_gbs": "192.2",
    "fp16_dense_tflops": "",
    "l2_mib": "1.5",
    "launch_year": "2020",
    "source": "a: b | c: d",
    "confidence": "low",
    "notes": "",
}


def test_gpus_are_written(script, tmp_path):
    source = tmp_path / "gpus.csv"
    with source.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(ROW))
        writer.writeheader()
        writer.writerow(ROW)
    script.build_gpus(source, tmp_path / "gpus.json")
    (entry,) = json.loads((tmp_path / "gpus.json").read_text())
    expected = {
        "nvml_total_bytes": 12288 << 20,
        "torch_total_bytes": None,
        "torch_total_precision": None,
        "compute_capability": [8, 6],
        "aliases": ["card", "c 1"],
        "sources": ["a: b", "c: d"],
        "notes": [],
        "memory_bandwidth_gbs": 192.2,
    }
    assert {name: entry[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", None), ("335143938", 335143938), ("9.4B", 9_400_000_000), ("22M", 22_000_000)],
)
def test_published_figures(script, text, expected):
    assert script._parameter_count(text) == expected
