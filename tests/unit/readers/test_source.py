"""Notebooks as Python: magics, cells that are none."""

import json

import memest
from support.training_scripts import TRAINER


def test_magics_are_dropped_and_other_cells_are_left_out(write):
    cells = [
        ["!pip install trl\n", "%matplotlib inline\n", "B = 2"],
        ["%%bash\n", "rm -rf ("],
        ["files = !ls\n", "help?\n", "x = (9\n", "  % 4)"],
        ["from transformers import *\n", "import transformers\n",
         "model = transformers.AutoModelForCausalLM.from_pretrained('gpt2')\n",
         "transformers.Trainer(model, transformers.TrainingArguments(\n",
         "    per_device_train_batch_size=B)).train()"],
    ]  # fmt: skip
    document = {"cells": [{"cell_type": "code", "source": each} for each in cells]}

    run = memest.read_config(write("run.ipynb", json.dumps(document)), seq_len=8)

    assert (run.model, run.options["batch"]) == ("gpt2", 2)


def test_lines_that_go_on_belong_to_their_magic_and_a_cell_that_is_no_python_is_named(write):
    cells = [
        "if True:\n    !pip install \\\n        trl \\\n        x==0.0.32.post2\nelse:\n    a = 1",
        "x = (",
        TRAINER.format(model="'gpt2'", before="", arguments="", between="", trainer="", after=""),
    ]
    document = {"cells": [{"cell_type": "code", "source": each} for each in cells]}

    run = memest.read_config(write("run.ipynb", json.dumps(document)), seq_len=8)

    assert run.model == "gpt2"
    (unpriced,) = run.setup.unpriced
    assert unpriced == "run.ipynb:cell 2, line 1 cell: it is not read: '(' was never closed."
