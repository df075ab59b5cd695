"""Case records of a tiny model whose peaks an estimate gives."""

from __future__ import annotations

import json

import pytest

import memest
from support.case_records import SETUP


@pytest.fixture
def written(tmp_path):
    """Writes records to a file and gives its path."""

    def write(*records, name="runs.jsonl"):
        path = tmp_path / name
        lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def truth():
    """The estimate of the setup, which a perfect measurement would have read."""
    return memest.estimate(
        "prajjwal1/bert-tiny", task="sequence-classification", gpu="RTX 3090", profile="none",
        software="torch=2.6,transformers=4.51", **SETUP,
    )  # fmt: skip
