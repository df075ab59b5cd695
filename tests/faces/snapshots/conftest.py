"""Predicted snapshots of a tiny model, written by the real command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys

import pytest

from memest.cli.main import run

TINY = (
    "bert-large-uncased?num_hidden_layers=2&hidden_size=64&intermediate_size=128"
    "&num_attention_heads=2&vocab_size=1000"
)
RUNS = {
    "plain": [],
    "expandable": ["--alloc-conf", "expandable_segments:True"],
    "rounded": ["--alloc-conf", "roundup_power2_divisions:[1:4,>:8],max_split_size_mb:64"],
    "several GPUs": [
        "--num-gpus", "4", "--fsdp", "full_shard", "--fsdp-wrap", "BertLayer",
    ],
    "evaluation": ["--eval-batch", "4", "--eval-samples", "12"],
}  # fmt: skip


class Written:
    """One predicted run: the estimate's document and both files."""

    def __init__(self, folder, name):
        self.pickle, self.json = folder / "run.pickle", folder / "run.json"
        command = [
            sys.executable, "-m", "memest", "estimate", TINY, "--batch", "4", "--seq-len", "32",
            "--json", *RUNS[name],
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            assert run(command[3:]) == 0  # what needs torch, in this process, which has it
        printed = []
        for path in (self.pickle, self.json):
            done = subprocess.run(
                [*command, "--snapshot", str(path)], capture_output=True, text=True, check=False,
                env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
        assert printed[0] == printed[1]
        self.estimate = json.loads(printed[0])
        self.content = pickle.loads(self.pickle.read_bytes())


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A run by its name in :data:`RUNS`; each is written once."""
    pytest.importorskip("transformers")
    made = {}

    def of(name):
        if name not in made:
            made[name] = Written(tmp_path_factory.mktemp("snapshot"), name)
        return made[name]

    return of
