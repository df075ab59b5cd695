"""Notebooks that train nothing themselves, and start a command that does."""

from __future__ import annotations

import json

import pytest

import memest
from memest.errors import ConfigError

RUN = "run_clm.py --model_name_or_path gpt2 --block_size 256 --output_dir out"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a notebook of some cells."""
    monkeypatch.chdir(tmp_path)

    def read_cells(*cells):
        document = {
            "nbformat": 4,
            "cells": [{"cell_type": "code", "source": cell} for cell in cells],
        }
        (tmp_path / "colab.ipynb").write_text(json.dumps(document))
        return memest.read_config("colab.ipynb")

    return read_cells


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([f"!python {RUN} --per_device_train_batch_size 4"], (4, 1)),
        ([f"!torchrun --nproc_per_node=2 {RUN} \\\n  --per_device_train_batch_size 4"], (4, 2)),
        ([f"out = !accelerate launch --num_processes 2 {RUN}"], (8, 2)),
        ([f"%%bash\npip install x\ntorchrun --nproc_per_node 2 {RUN}"], (8, 2)),
        (["bs = 2 * 8", f"!python {RUN} --per_device_train_batch_size {{bs}}"], (16, 1)),
        (["bs = 4", f"!python {RUN} --per_device_train_batch_size $bs"], (4, 1)),
        (["%env BS=4", f"!python {RUN} --per_device_train_batch_size $BS"], (4, 1)),
        (["%env BS 4", f"!python {RUN} --per_device_train_batch_size ${{BS}}"], (4, 1)),
        (
            ["import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", f"!accelerate launch {RUN}"],
            (8, 2),
        ),
        (["!nvidia-smi\n!python -m pip install x", "%%writefile a.py", f"!python {RUN}"], (8, 1)),
    ],
)  # fmt: skip
def test_the_command_of_a_notebook_is_read(cells, expected, read):
    """With the plain values of its Python and of its environment in it."""
    run = read(*cells)

    assert run.model == "gpt2"
    assert (run.options["batch"], run.options["num_gpus"], run.options["seq_len"]) == (
        *expected,
        256,
    )


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["pip = 1", "!pip install transformers"], "trains nothing that memest can see"),
        ([f"!python {RUN}", "!python run_glue.py --bf16"], "cell 1, line 1; cell 2, line 1"),
        (
            ["import c", f"\n!python {RUN} --per_device_train_batch_size {{c.bs}}"],
            r"cell 2, line 2: --per_device_train_batch_size \{c.bs\} is what the notebook computes",
        ),
        ([f"!torchrun --nproc_per_node $N {RUN}"], r"--nproc_per_node \$N is what the notebook"),
    ],
)
def test_what_cannot_be_told_of_it_is_refused(cells, words, read):
    with pytest.raises(ConfigError, match=words):
        read(*cells)


def test_a_notebook_that_trains_is_read_for_what_it_does(read):
    """Its own training comes before any command."""
    run = read(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2-medium')\n"
        "Trainer(model=model, args=TrainingArguments('out')).train()",
        f"!python {RUN}",
    )

    assert run.model == "gpt2-medium"
