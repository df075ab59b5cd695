"""``memest replay``: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MEMEST_SNAPSHOTS", Path(__file__).parents[3] / "shared/snapshots"))


def test_a_recorded_snapshot_is_identical(cli):
    path = FOLDER / "small_lm_fp32_fwd_bwd.pickle"
    if not path.is_file():
        pytest.skip("the recorded snapshots are not here")

    done = cli("replay", str(path), "--json")
    (device,) = json.loads(done.stdout)["devices"]
    assert done.returncode == 0
    assert device["is_exact"]
    assert device["address_mismatches"] == 0
    assert "identical" in cli("replay", str(path)).stdout


def test_a_snapshot_without_history_says_how_to_record_one(cli, tmp_path):
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))

    done = cli("replay", str(path))
    assert done.returncode == 1
    assert "_record_memory_history" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(Path("x"))])
def test_a_foreign_file_is_refused(cli, tmp_path, content):
    path = tmp_path / "foreign.pickle"
    path.write_bytes(content)

    done = cli("replay", str(path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
