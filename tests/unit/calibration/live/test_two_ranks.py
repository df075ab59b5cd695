"""All ranks measure; rank 0 logs for all, and keeps the record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from memest.calibration.store import MeasurementStore
from support.paths import TESTS


@pytest.mark.slow
def test_rank_0_logs_what_all_measured(tmp_path):
    script = TESTS / "support/two_ranks.py"
    store, answers = tmp_path / "store.db", tmp_path / "rank"
    words = [str(store), str(tmp_path / "out"), str(answers)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), *words],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads(Path(f"{answers}-{r}.json").read_text()) for r in (0, 1))

    assert (first["problem"], first["gpus"]) == ("", 2)
    assert first["measured"] == 100 << 20
    assert second["measured"] == 101 << 20
    assert first["logs"]["memest/measured_allocated_bytes"] == 100 << 20
    assert first["logs"]["memest/measured_allocated_bytes_max_over_ranks"] == 101 << 20
    assert first["logs"]["memest/measured_device_bytes_max_over_ranks"] == 901 << 20
    assert second["logs"] == {}
    with MeasurementStore(store) as kept:
        (record,) = kept.measurements()
    assert (record.case.processes, record.case.parallel.value) == (2, "ddp")
