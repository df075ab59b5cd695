"""Scripts that a notebook writes, and beginnings of arguments in a command. Tier: fast."""

from __future__ import annotations

import json

import memest

TRAINS = """
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args, train_dataset=d).train()
"""


def notebook(write, *cells):
    cells = [{"cell_type": "code", "source": cell, "metadata": {}} for cell in cells]
    return write("run.ipynb", json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))


def test_a_notebook_may_write_the_script_that_it_starts(write):
    command = "!torchrun --nproc_per_node 2 train.py --output_dir o --fp16"
    path = notebook(write, f"%%writefile train.py\n{TRAINS}", command)
    run = memest.read_config(path, seq_len=8)
    assert (run.model, run.options["num_gpus"], run.options["precision"]) == ("gpt2", 2, "fp16")
    assert not run.not_modelled


def test_a_notebook_that_trains_says_that_it_starts_a_command_besides(write):
    python = TRAINS.replace(
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()",
        'args = TrainingArguments("o", per_device_train_batch_size=3)',
    )
    command = "!python other.py --model_name_or_path t5-small --per_device_train_batch_size 2"
    run = memest.read_config(notebook(write, python, command), seq_len=8)
    assert (run.model, run.options["batch"]) == ("gpt2", 3)
    assert any("other.py is started besides" in str(each) for each in run.not_modelled)


def test_beginnings_of_arguments_are_what_they_stand_for(write):
    path = write("train.py", TRAINS)
    run = memest.read_command(f"python {path} --output_dir o --per_device_train 3", seq_len=8)
    assert run.options["batch"] == 3
    run = memest.read_command(f"python {path} --output_dir o --per_device 3", seq_len=8)
    assert run.options["batch"] == 8  # two arguments begin so: argparse stops
