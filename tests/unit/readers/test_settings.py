"""Settings that a script has from elsewhere: files beside it, dataclasses that a parser fills."""

from __future__ import annotations

import json

import pytest

import memest

SETTINGS = {"model": {"name": "gpt2"}, "train": {"per_device_train_batch_size": 4, "fp16": True}}
SCRIPT = """
import json, tomllib, tyro, yaml
from dataclasses import dataclass
from easydict import EasyDict
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{}
model = AutoModelForCausalLM.from_pretrained({})
Trainer(model, TrainingArguments("o", {}), train_dataset=d).train()
"""
ENTRIES = ('c["model"]["name"]', '**c["train"]')
ATTRIBUTES = ("c.model.name", "per_device_train_batch_size=c.train.per_device_train_batch_size")
READS = {
    "with open('conf/run.json') as f:\n    c = json.load(f)": ENTRIES,
    "c = json.load(open('conf/run.json'))": ENTRIES,
    "c = yaml.safe_load(open('conf/run.json'))": ENTRIES,
    "c = OmegaConf.load('conf/run.json')": ATTRIBUTES,
    "c = EasyDict(yaml.safe_load(open('conf/run.json')))": ATTRIBUTES,
}
NOWHERE = ("json.load(open('conf/none.json'))", "json.load(open('../run.json'))",
           "json.load(open('{folder}/conf/run.json'))", "yaml.safe_load(open('train.py'))",
           "json.load(handle)")  # fmt: skip


@pytest.fixture
def read(tmp_path):
    (tmp_path / "conf").mkdir()
    for folder in (tmp_path / "conf", tmp_path.parent):
        (folder / "run.json").write_text(json.dumps(SETTINGS))

    def read(*parts, words=()):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(*parts))
        command = ["python", str(path), *words]
        return (
            memest.read_command(command, seq_len=8)
            if words
            else memest.read_config(path, seq_len=8)
        )

    return read


@pytest.mark.parametrize("code", READS)
def test_files_of_settings_are_read(read, code):
    run = read(code, *READS[code])
    assert (run.model, run.options["batch"], run.setup.unpriced) == ("gpt2", 4, ())


@pytest.mark.parametrize("code", NOWHERE)
def test_no_other_file_is_looked_at(read, tmp_path, code):
    run = read(f"c = {code.format(folder=tmp_path)}", *ENTRIES)
    assert run.model is None


DATACLASS = "@dataclass\nclass C:\n    name: str = 'gpt2'\n    batch: int = 4\n"


@pytest.mark.parametrize("parser", ["tyro.cli(C)", "tyro.cli(C, description='x')"])
def test_a_dataclass_is_filled_from_the_command_line(read, parser):
    parts = (f"{DATACLASS}c = {parser}", "c.name", "per_device_train_batch_size=c.batch")
    run = read(*parts)
    assert (run.model, run.options["batch"]) == ("gpt2", 4)
    run = read(*parts, words=("--batch", "16", "--name", "distilgpt2"))
    assert (run.model, run.options["batch"]) == ("distilgpt2", 16)
