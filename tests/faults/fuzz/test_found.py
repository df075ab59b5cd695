"""What campaigns found: each kind of input that once ended in something else than an error."""

import json

import pytest

from memest.app.question import ExplorerQuestion
from memest.app.uploads import check_question
from memest.config.adapter import read_adapter
from memest.config.deepspeed import read_deepspeed
from memest.errors import ConfigError, MemestError, ReplayError
from memest.readers.reading import read_command
from memest.replay import load_snapshot


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "2.5"])
def test_a_bucket_of_no_whole_size(tmp_path, value):
    file = tmp_path / "ds.json"
    file.write_text(f'{{"zero_optimization": {{"stage": 2, "reduce_bucket_size": {value}}}}}')
    with pytest.raises(ConfigError, match="is not a whole number"):
        read_deepspeed(str(file))


def test_a_deepspeed_file_nested_without_end(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ConfigError, match="nested too deep"):
        read_deepspeed(str(file))


@pytest.mark.parametrize("alpha", [10**400, -(10**400), float("inf"), float("nan")])
def test_an_alpha_that_no_float_holds(tmp_path, alpha):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": alpha}))
    with pytest.raises(ConfigError, match="lora_alpha"):
        read_adapter(str(file))


def test_a_snapshot_with_an_infinite_address(tmp_path):
    segment = {
        "address": float("inf"), "total_size": 512, "segment_type": "small",
        "blocks": [{"size": 512, "state": "inactive"}],
    }  # fmt: skip
    file = tmp_path / "snapshot.json"
    file.write_text(json.dumps({"segments": [segment], "device_traces": [[]]}))
    with pytest.raises(ReplayError, match="not of a memory snapshot"):
        load_snapshot(str(file))


@pytest.mark.parametrize("model", ["\0", "./a\0b", "/etc/pass\0wd", "bert\0-base?n_layer=2"])
def test_a_link_with_a_null_byte(model):
    with pytest.raises(MemestError, match="null byte"):
        check_question(ExplorerQuestion(model=model))


@pytest.mark.parametrize("launcher", ["python", "python -m", "torchrun", "torchrun -m"])
def test_a_program_longer_than_a_name_of_a_file(launcher):
    run = read_command(f"{launcher} {'x' * 400}.train --batch 1", model="gpt2")
    assert run.setup.unpriced or run.not_modelled
