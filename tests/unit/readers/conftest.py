"""Configurations in the style of each framework, and a place to read them from."""

import pytest

import memest
from support.paths import RUN_CONFIGURATIONS as EXAMPLES
from support.training_scripts import TRAINER


@pytest.fixture
def examples(monkeypatch):
    """The working directory is the one that a training is launched from."""
    monkeypatch.chdir(EXAMPLES)
    return EXAMPLES


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the working directory of a test."""
    monkeypatch.chdir(tmp_path)

    def make(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
        return name

    return make


@pytest.fixture
def options(write):
    """What a configuration comes to: values of options, and the keys that are not modelled."""

    def read(text, name="run.yaml", **more):
        run = memest.read_config(write(name, text), **more)
        missed = {remark.key.rpartition(":")[2].strip() for remark in run.not_modelled}
        return run.options, missed

    return read


@pytest.fixture
def script(write):
    """A run of a Trainer, with parts of its script given."""

    def read(**parts):
        names = ("before", "arguments", "between", "trainer", "after")
        text = TRAINER.format(**{**dict.fromkeys(names, ""), "model": "'gpt2'", **parts})
        return memest.read_config(write("train.py", text), seq_len=8)

    return read
