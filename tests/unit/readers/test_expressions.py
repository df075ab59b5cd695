"""Values of a script that can be told without running it, and those that cannot."""

import pytest

import memest
from memest.errors import ConfigError
from support.training_scripts import LOOP

DATACLASS = """
from dataclasses import dataclass, field
@dataclass
class C:
    b: int = field(default=4)
c = C()
"""

PARSER = """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--b', type=int, {})
args = p.parse_args()
"""


@pytest.mark.parametrize(
    ("before", "expression", "batch"),
    [
        ("B = 4", "B", 4),
        ("B = 2\nB = 4", "B", 4),
        ("B = 2\nB += 2", "B", 4),
        ("A, B = 1, 4", "B", 4),
        ("C = dict(b=4)", "C['b']", 4),
        ("C = {'a': {'b': 4}}", "C['a']['b']", 4),
        ("TOTAL = 32", "TOTAL // 8", 4),
        ("TOTAL = 32", "int(TOTAL / 8)", 4),
        ("DEBUG = False", "1 if DEBUG else 4", 4),
        ("DEBUG = False\nif DEBUG:\n    B = 1\nelse:\n    B = 4", "B", 4),
        ("def size(n=2):\n    return n * 2", "size()", 4),
        ("def size(n=2):\n    return n * 2", "size(n=3)", 6),
        ("class Config:\n    batch = 4\ncfg = Config()", "cfg.batch", 4),
        ("class Config:\n    batch = 4", "Config.batch", 4),
        (DATACLASS, "c.b", 4),
        (PARSER.format("default='4'"), "args.b", 4),
        ("try:\n    B = 4\nexcept ImportError:\n    B = 1", "B", 4),
    ],
)  # fmt: skip
def test_values_that_can_be_told(script, before, expression, batch):
    run = script(before=before, arguments=f"per_device_train_batch_size={expression}")

    assert run.options["batch"] == batch
    assert not run.setup.unpriced


@pytest.mark.parametrize(
    ("before", "expression"),
    [
        ("from config import B", "B"),
        ("import config", "config.B"),
        ("import os", "int(os.environ['B'])"),
        ("import os", "int(os.environ.get('B', 4))"),
        ("import sys", "int(sys.argv[1])"),
        ("import random", "random.choice([1, 2])"),
        ("from util import big\nB = 8\nif big():\n    B = 4", "B"),
        ("from util import big", "4 if big() else 8"),
        ("B = 1\nfor _ in range(3):\n    B *= 2", "B"),
        ("B = [1]\nB.append(2)", "B[1]"),
        ("def size(n):\n    return size(n)", "size(1)"),
        ("C = {'b': 8}\nfrom util import big\nif big():\n    C['b'] = 4", "C['b']"),
        (PARSER.format("required=True"), "args.b"),
        ("", "nowhere"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_told_are_said(script, before, expression):
    """Never guessed: the default is priced, the verdict rests on it, and the flag settles it."""
    run = script(before=before, arguments=f"per_device_train_batch_size={expression}")

    assert run.options["batch"] == 8
    assert "per_device_train_batch_size: cannot be told without running" in run.setup.unpriced[0]
    assert "train.py:" in run.setup.unpriced[0]
    assert not run.with_options(batch=4).setup.unpriced


def test_what_matters_nothing_may_be_unknown(script):
    run = script(before="from util import rate", arguments="learning_rate=rate(), seed=rate()")

    assert not run.setup.unpriced


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("kw.update(per_device_train_batch_size=32)", 32),
        ("kw.setdefault('per_device_train_batch_size', 32)", 4),
        ("kw.setdefault('gradient_accumulation_steps', 2)", 4),
        ("kw.pop('per_device_train_batch_size')", 8),
        ("del kw['per_device_train_batch_size']", 8),
        ("kw = kw.copy(); kw['per_device_train_batch_size'] = 16", 16),
    ],
)
def test_arguments_in_a_mapping(script, change, expected):
    before = f"kw = {{'per_device_train_batch_size': 4}}\n{change}"
    run = script(before=before, arguments="**kw")

    assert run.options.get("batch", 8) == expected
    assert run.options.get("grad_accum", 1) == (2 if "accumulation" in change else 1)


@pytest.mark.parametrize("change", ["kw.update(more)", "kw.pop(name)", "kw.setdefault(name, 1)"])
def test_a_mapping_that_changes_by_what_cannot_be_told(script, change):
    before = f"from util import more, name\nkw = {{'fp16': True}}\n{change}"
    run = script(before=before, arguments="**kw")

    assert "further arguments cannot be told" in " ".join(run.setup.unpriced)


@pytest.mark.parametrize(
    ("between", "batch"),
    [
        ("setattr(args, 'per_device_train_batch_size', 32)", 32),
        ("for name in ('a', 'b'):\n    setattr(args, name, 3)", None),
        ("args.set_training(batch_size=32)", None),
    ],
)
def test_arguments_that_are_set_later(script, between, batch):
    run = script(between=f"args = TrainingArguments('out')\n{between}")

    if batch is None:
        assert "further arguments cannot be told" in " ".join(run.setup.unpriced)
    else:
        assert run.options["batch"] == batch


def test_an_adapter_that_is_changed_after_it_was_made(script):
    run = script(
        before="from peft import LoraConfig, get_peft_model",
        between="config = LoraConfig(r=8)\nconfig.r = 256\nmodel = get_peft_model(model, config)",
    )
    assert run.options["adapter"]["r"] == 256


def test_a_function_that_may_be_another_has_no_defaults(write):
    text = LOOP.format(optimizer="torch.optim.AdamW(model.parameters())", body="    pass")
    text = text.replace("loader = DataLoader([], batch_size=4)", MOCKED).replace("    pass", "")
    run = memest.read_config(write("loop.py", text + "    model(**batch).loss.backward()"))

    assert "batch" not in run.options
    assert "batch_size, an argument" in " ".join(run.setup.unpriced)


MOCKED = """
import os
def make(batch_size=16):
    return DataLoader([], batch_size=batch_size)
if os.environ.get("MOCKED") == "1":
    from mocks import make
loader = make(2)
"""


def test_dataclasses_are_filled_by_the_command(write):
    text = """
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "the model"})
    dtype: str = "bfloat16"
parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, training_args = parser.parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(
    model_args.model_name_or_path, torch_dtype=model_args.dtype
)
Trainer(model=model, args=training_args).train()
"""
    write("train.py", text)

    with pytest.raises(ConfigError, match=r"model cannot be told .*--model_name_or_path"):
        memest.read_config("train.py").with_model(None, {})
    run = memest.read_command(
        "python train.py --model_name_or_path gpt2 --per_device_train_batch_size 3 --output_dir o",
        seq_len=8,
    )
    assert (run.model, run.options["batch"], run.options["dtype"]) == ("gpt2", 3, "bfloat16")
    assert not run.setup.unpriced
