"""Parsers of command lines: what a script's arguments come to, by default and by the command."""

from __future__ import annotations

import textwrap

import pytest

import memest

_BODY = """
model = AutoModelForCausalLM.from_pretrained({model})
arguments = TrainingArguments(
    "out", per_device_train_batch_size={batch}, gradient_accumulation_steps={accum}, bf16={bf16}
)
Trainer(model=model, args=arguments, train_dataset=data).train()
"""
_IMPORTS = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"


def _script(head: str, prefix: str = "", *, indent: int = 4, tail: str = "") -> str:
    """A script whose head makes the arguments, and whose body trains with them."""
    names = {name: f"{prefix}{name}" for name in ("model", "batch", "accum", "bf16")}
    body = textwrap.indent(_BODY.format(**names), " " * indent)
    return f"{_IMPORTS}{textwrap.dedent(head)}{body}\n{textwrap.dedent(tail)}"


_ARGPARSE = _script(
    """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", "-m", type=str, default="gpt2")
    parser.add_argument("--batch", "-b", "--batch_size", dest="batch", type=int, default=8)
    parser.add_argument("--accum", type=int, default="2")
    parser.add_argument("--bf16", type=bool, default=False)
    args = parser.parse_args()
    """,
    "args.",
    indent=0,
)
_CLICK = _script(
    """
    import click
    @click.command()
    @click.option("--model", default="gpt2")
    @click.option("--batch", "-b", default=8)
    @click.option("--accumulate", "accum", type=int, default=2)
    @click.option("--bf16/--no-bf16", default=False)
    @click.argument("folder")
    def main(model, batch, accum, bf16, folder):
    """,
    tail="main()",
)
_CLICK_GROUP = _script(
    """
    import click
    @click.group()
    def cli():
        pass
    @cli.command()
    @click.option("--batch", default=100)
    def evaluate(batch):
        model = AutoModelForCausalLM.from_pretrained("gpt2-xl")
        Trainer(model=model, args=TrainingArguments("o", per_device_train_batch_size=batch)).train()
    @cli.command("fit")
    @click.option("--model", default="gpt2")
    @click.option("--batch", default=8)
    @click.option("--accum", default=2)
    @click.option("--bf16", is_flag=True)
    def fit(model, batch, accum, bf16):
    """,
    tail="cli()",
)
_TYPER = _script(
    """
    import typer
    from typing_extensions import Annotated
    app = typer.Typer()
    @app.command()
    def main(
        model: str = "gpt2",
        batch: int = typer.Option(8, "--batch-size", "-b"),
        accum: Annotated[int, typer.Option(help="micro-steps")] = 2,
        bf16: bool = False,
    ):
    """,
    tail="app()",
)
_FIRE = _script(
    """
    import fire
    def main(model="gpt2", batch=8, accum=2, bf16=False):
    """,
    tail="fire.Fire(main)",
)
_FIRE_NAMES = _FIRE.replace("fire.Fire(main)", 'fire.Fire({"train": main})')
_ABSL = _script(
    """
    from absl import app, flags
    FLAGS = flags.FLAGS
    flags.DEFINE_string("model", "gpt2", "")
    flags.DEFINE_integer("batch", 8, "")
    _ACCUM = flags.DEFINE_integer("accum", 2, "")
    flags.DEFINE_bool("bf16", False, "")
    def main(argv):
        accum = _ACCUM.value
    """,
    "FLAGS.",
    tail="app.run(main)",
)
_TYRO = _script(
    """
    import tyro
    from dataclasses import dataclass, field
    @dataclass
    class Steps:
        accum: int = 2
    @dataclass
    class Args:
        model: str = "gpt2"
        batch: int = 8
        bf16: bool = False
        steps: Steps = field(default_factory=Steps)
    def main(args: Args):
    """,
    "args.",
    tail="tyro.cli(main)",
).replace("args.accum", "args.steps.accum")
_OMEGACONF = _script(
    """
    from dataclasses import dataclass
    from omegaconf import OmegaConf
    @dataclass
    class Config:
        model: str = "gpt2"
        batch: int = 8
        bf16: bool = False
    cfg = OmegaConf.structured(Config)
    cfg = OmegaConf.merge(cfg, OmegaConf.create({"accum": 2}), OmegaConf.from_cli())
    """,
    "cfg.",
    indent=0,
)

DEFAULTS = ("gpt2", 8, 2, "fp32")
COMMANDS = {
    "argparse, defaults": (_ARGPARSE, "", DEFAULTS),
    "argparse, the last of two counts": (_ARGPARSE, "--batch 2 -b 3", ("gpt2", 3, 2, "fp32")),
    "argparse, short without a space": (_ARGPARSE, "-b4 -m gpt2-xl", ("gpt2-xl", 4, 2, "fp32")),
    "argparse, beginnings": (_ARGPARSE, "--mod gpt2-xl --acc=4", ("gpt2-xl", 8, 4, "fp32")),
    "argparse, any text is true": (_ARGPARSE, "--bf16 False", ("gpt2", 8, 2, "bf16")),
    "click, defaults": (_CLICK, "data", DEFAULTS),
    "click": (_CLICK, "-b 4 --accumulate=8 --bf16 data", ("gpt2", 4, 8, "bf16")),
    "click, switched off": (_CLICK, "data --no-bf16", DEFAULTS),
    "click, a command of a group": (_CLICK_GROUP, "fit --batch 4 --bf16", ("gpt2", 4, 2, "bf16")),
    "typer, defaults": (_TYPER, "", DEFAULTS),
    "typer": (_TYPER, "-b 4 --accum 3 --bf16", ("gpt2", 4, 3, "bf16")),
    "fire, defaults": (_FIRE, "", DEFAULTS),
    "fire, by place and by name": (_FIRE, "gpt2-xl --batch=4 --bf16", ("gpt2-xl", 4, 2, "bf16")),
    "fire, switched off": (_FIRE.replace("bf16=False", "bf16=True"), "--nobf16", DEFAULTS),
    "fire, functions by name": (_FIRE_NAMES, "train --batch 4", ("gpt2", 4, 2, "fp32")),
    "fire, a list": (
        _FIRE.replace("bf16=False", "bf16=False, names=()").replace("(model)", "(model[0])"),
        "--model=[gpt2,x]", DEFAULTS,
    ),
    "absl, defaults": (_ABSL, "", DEFAULTS),
    "absl": (_ABSL, "--batch=4 --accum 3 --bf16", ("gpt2", 4, 3, "bf16")),
    "absl, switched off": (_ABSL.replace('"bf16", False', '"bf16", True'), "--nobf16", DEFAULTS),
    "tyro, defaults": (_TYRO, "", DEFAULTS),
    "tyro": (_TYRO, "--args.batch 4 --args.steps.accum 3 --args.bf16", ("gpt2", 4, 3, "bf16")),
    "OmegaConf, defaults": (_OMEGACONF, "", DEFAULTS),
    "OmegaConf": (_OMEGACONF, "batch=4 bf16=true", ("gpt2", 4, 2, "bf16")),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_says_reaches_the_run(name, tmp_path, monkeypatch):
    """The model, batch, micro-steps and precision are those that the parser would hand on."""
    text, words, expected = COMMANDS[name]
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command(f"python train.py {words}")

    found = tuple(run.options.get(key) for key in ("batch", "grad_accum", "precision"))
    assert expected == (run.model, *found)
    assert not [each for each in run.not_modelled if "cannot be told" in each.why]
    assert "--batch" not in str([each.key for each in run.ignored])


@pytest.mark.parametrize("name", [each for each in COMMANDS if "defaults" in each])
def test_a_script_alone_has_its_defaults(name, tmp_path):
    """Without a command no argument of a script is known to be any but its default."""
    (tmp_path / "train.py").write_text(COMMANDS[name][0])

    run = memest.read_config(tmp_path / "train.py")

    found = tuple(run.options.get(key) for key in ("batch", "grad_accum", "precision"))
    assert (run.model, *found) == DEFAULTS


def test_what_has_no_default_is_not_guessed(tmp_path, monkeypatch):
    """An argument that a command must have, and has not, is named."""
    text = _CLICK.replace('"--batch", "-b", default=8', '"--batch", "-b", required=True')
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command("python train.py data")

    assert "--batch of the command line" in str(run.not_modelled)


_SETTINGS = "batch: 16\nmodel: gpt2-medium\n"
_READ = 'yaml.safe_load(open("settings.yaml"))'
CHANGES = {
    f"for k, v in {_READ}.items():\n    setattr(args, k, v)": ("gpt2-medium", 16),
    f"for k, v in {_READ}.items():\n    if hasattr(args, k):\n        setattr(args, k, v)": (
        "gpt2-medium", 16,
    ),
    f"args.__dict__.update({_READ})": ("gpt2-medium", 16),
    f"vars(args).update({_READ})": ("gpt2-medium", 16),
    "vars(args).update(elsewhere())": (None, 8),
    "for k, v in elsewhere().items():\n    setattr(args, k, v)": (None, 8),
    "if elsewhere():\n    args.__dict__.update({'model': 'x'})": (None, 5),
}  # fmt: skip
"""What is done to arguments behind the parser, and the model and the batch that follow."""


@pytest.mark.parametrize("change", CHANGES)
def test_arguments_that_are_changed_behind_the_parser(change, tmp_path, monkeypatch):
    """A file over the command line, as many scripts have it; what cannot be told is not known."""
    text = _ARGPARSE.replace(
        "args = parser.parse_args()\n", f"args = parser.parse_args()\n{change}\n"
    )
    (tmp_path / "train.py").write_text(f"import yaml\n{text}")
    (tmp_path / "settings.yaml").write_text(_SETTINGS)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command("python train.py --batch 5")

    known = [each for each in run.not_modelled if "per_device_train_batch_size" in each.key]
    model, batch = CHANGES[change]
    assert run.model == model
    assert (run.options["batch"] == batch) or known


@pytest.mark.parametrize(("words", "expected"), [
    ("", DEFAULTS),
    ("-c settings.yaml", ("gpt2-medium", 16, 2, "fp32")),
    ("--config settings.yaml --batch 5", ("gpt2-medium", 5, 2, "fp32")),
])  # fmt: skip
def test_a_file_of_the_scripts_own_gives_defaults(words, expected, tmp_path, monkeypatch):
    """Two parsers: the first takes the file, whose values are the second's defaults."""
    head = """
    import argparse, yaml
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("-c", "--config", default="", type=str)
    parser = argparse.ArgumentParser(parents=[first])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    known, rest = first.parse_known_args()
    if known.config:
        with open(known.config) as file:
            parser.set_defaults(**yaml.safe_load(file))
    args = parser.parse_args(rest)
    """
    (tmp_path / "train.py").write_text(_script(head, "args.", indent=0))
    (tmp_path / "settings.yaml").write_text(_SETTINGS)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command(f"python train.py {words}")

    found = tuple(run.options.get(key) for key in ("batch", "grad_accum", "precision"))
    assert (run.model, *found) == expected


def test_a_command_of_argparse_has_its_own_arguments(tmp_path, monkeypatch):
    head = """
    import argparse
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="what")
    for_training = commands.add_parser("train")
    for name, value in (("model", "gpt2"), ("x", 1)):
        pass
    for_training.add_argument("--model", default="gpt2")
    for_training.add_argument("--batch", type=int, default=8)
    for_training.add_argument("--accum", type=int, default=2)
    for_training.add_argument("--bf16", action="store_true")
    other = commands.add_parser("test")
    other.add_argument("--batch", type=int, default=100)
    args = parser.parse_args()
    """
    (tmp_path / "train.py").write_text(_script(head, "args.", indent=0))
    monkeypatch.chdir(tmp_path)

    run = memest.read_command("python train.py train --bf16")

    assert (run.model, run.options["batch"], run.options["precision"]) == ("gpt2", 8, "bf16")


def test_what_exec_runs_with_a_command_may_set_any_name(tmp_path, monkeypatch):
    """As nanoGPT's ``configurator.py`` does with the words of the command."""
    head = "model, batch, accum, bf16 = 'gpt2', 8, 2, False\nexec(open('configurator.py').read())\n"
    (tmp_path / "train.py").write_text(_script(head, indent=0))
    monkeypatch.chdir(tmp_path)

    assert memest.read_config("train.py").options["batch"] == 8
    told = memest.read_command("python train.py --batch=4")
    assert told.model is None
    assert "what exec runs may set it" in str(told.not_modelled)


_HYDRA = _script(
    """
    import hydra
    @hydra.main(version_base=None, config_path="conf", config_name="train")
    def main(cfg):
    """,
    "cfg.train.",
    tail="main()",
).replace("cfg.train.model", "cfg.model.name")
_CONF = {
    "train.yaml": "defaults:\n- model: small\n- optional local: x\n- _self_\n"
    "size: 8\ntrain: {batch: '${size}', accum: 2, bf16: false}\n",
    "model/small.yaml": "name: gpt2\n",
    "model/large.yaml": "defaults:\n- small\n- _self_\nname: gpt2-large\n",
    "experiment/big.yaml": "# @package _global_\ndefaults:\n- override /model: large\n"
    "train:\n  accum: 16\n",
}
HYDRA = {
    "": DEFAULTS,
    "train.batch=4 train.bf16=true": ("gpt2", 4, 2, "bf16"),
    "size=3": ("gpt2", 3, 2, "fp32"),
    "model=large": ("gpt2-large", 8, 2, "fp32"),
    "+experiment=big": ("gpt2-large", 8, 16, "fp32"),
    "+experiment=big model=small train.accum=1": ("gpt2", 8, 1, "fp32"),
}
"""Words of a command, and what Hydra 1.3.8 composes of the files above."""


@pytest.mark.parametrize("words", HYDRA)
def test_settings_of_hydra_are_composed(words, tmp_path, monkeypatch):
    """Groups, packages, overrides of groups, references and words of the command."""
    for name, text in {"train.py": _HYDRA, **{f"conf/{k}": v for k, v in _CONF.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command(f"python train.py {words}")

    found = tuple(run.options.get(key) for key in ("batch", "grad_accum", "precision"))
    assert HYDRA[words] == (run.model, *found)


@pytest.mark.parametrize("words", ["~model", "-m train.batch=1,2", "--config-path=../other"])
def test_settings_that_hydra_makes_otherwise_are_not_guessed(words, tmp_path, monkeypatch):
    """What is not composed here leaves every value unknown, and says so."""
    (tmp_path / "train.py").write_text(_HYDRA)
    (tmp_path / "conf/model").mkdir(parents=True)
    for name, text in _CONF.items():
        (tmp_path / "conf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    run = memest.read_command(f"python train.py {words}")

    assert run.model is None
    assert "cannot be told" in str(run.not_modelled)


_OWN_ARGUMENTS = """
import argparse
from dataclasses import dataclass, field
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser
from transformers import Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model: str = "gpt2"
@dataclass
class Arguments(TrainingArguments):
    bits: int = field(default=4)
    use_lora: bool = True
    per_device_train_batch_size: int = 3
models, arguments = HfArgumentParser((ModelArguments, Arguments)).parse_args_into_dataclasses()
args = argparse.Namespace(**vars(models), **vars(arguments))
"""
_IN_FULL = "model = AutoModelForCausalLM.from_pretrained(args.model)\n"
_BY_BITS = (
    "how = BitsAndBytesConfig(load_in_4bit=args.bits == 4, load_in_8bit=args.bits == 8)\n"
    "model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=how)\n"
    "model = get_peft_model(model, LoraConfig(r=8))\n"
)


@pytest.mark.parametrize(
    ("load", "words", "bits"),
    [(_IN_FULL, "", 16), (_IN_FULL, "--bits 8", 16), (_BY_BITS, "", 4), (_BY_BITS, "--bits 8", 8)],
)
def test_fields_of_ones_own_mean_what_the_code_makes_of_them(
    load, words, bits, tmp_path, monkeypatch
):
    """A trainer takes no ``bits`` and no ``use_lora``: only what the load is given counts."""
    end = "Trainer(model=model, args=arguments, train_dataset=data).train()\n"
    (tmp_path / "train.py").write_text(f"{_OWN_ARGUMENTS}{load}{end}")
    monkeypatch.chdir(tmp_path)

    setup = memest.read_command(f"python train.py {words}").setup

    found = None if setup.quantization is None else setup.quantization.format.value[-4]
    assert found == (None if bits == 16 else str(bits))
    assert (setup.adapter is not None) == (bits != 16)
    assert setup.batch == 3


def test_a_model_of_a_library_that_is_not_built_is_no_model_of_transformers(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom diffusers import UNet2DConditionModel\n"
        "unet = UNet2DConditionModel.from_pretrained('some/pipeline', subfolder='unet')\n"
        "optimizer = torch.optim.AdamW(unet.parameters())\n"
        "for batch in torch.utils.data.DataLoader(data, batch_size=4):\n"
        "    unet(batch).sample.mean().backward()\n    optimizer.step()\n"
    )

    run = memest.read_config(tmp_path / "train.py")

    assert run.model is None
    assert "diffusers.UNet2DConditionModel" in run.model_problem
    assert "`memest help diffusers`" in run.model_problem


_PREPARED = """
import fire
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
def main(eight: bool = True):
    how = BitsAndBytesConfig(load_in_8bit=eight)
    model = AutoModelForCausalLM.from_pretrained(
        "gpt2", quantization_config=how, torch_dtype="float16"
    )
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8))
    Trainer(model=model, args=TrainingArguments("out", fp16=True)).train()
fire.Fire(main)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", (True, "float16", "full")), ("--noeight", (False, "float32", "none"))],
)
def test_a_base_that_is_prepared_and_not_quantised_becomes_float32(
    words, expected, tmp_path, monkeypatch
):
    """peft casts it all the same, and switches no checkpointing on (``utils/other.py``)."""
    (tmp_path / "train.py").write_text(_PREPARED)
    monkeypatch.chdir(tmp_path)

    setup = memest.read_command(f"python train.py {words}").setup

    assert (setup.quantization is not None, str(setup.dtype), setup.checkpointing) == expected


def test_what_spawn_hands_on_reaches_the_run(tmp_path, monkeypatch):
    """``torch.multiprocessing.spawn`` calls a function with its rank and with these."""
    head = """
    import torch
    import torch.multiprocessing as mp
    def make(model):
        return AutoModelForCausalLM.from_pretrained(model)
    def main(rank, world, model, batch, accum, bf16):
        make(model)
    """
    end = "mp.spawn(main, args=(2, 'gpt2', 4, 2, True), nprocs=2)"
    (tmp_path / "train.py").write_text(
        _script(head, tail=end)
        .replace("    make(model)\n", "")
        .replace(
            "AutoModelForCausalLM.from_pretrained(model)\n    arguments",
            "make(model)\n    arguments",
        )
    )
    monkeypatch.chdir(tmp_path)

    run = memest.read_config("train.py")

    found = [run.options.get(key) for key in ("batch", "grad_accum", "precision", "num_gpus")]
    assert (run.model, *found) == ("gpt2", 4, 2, "bf16", 2)
    assert "further" not in str(run.not_modelled)


_OWN_FILE = """
import sys
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Arguments:
    name: str = "gpt2"
    size: int = 8
parser = HfArgumentParser((Arguments,))
(args,) = {how}
model = AutoModelForCausalLM.from_pretrained(args.name)
Trainer(model=model, args=TrainingArguments("o", per_device_train_batch_size=args.size)).train()
"""


@pytest.mark.parametrize(
    ("how", "command", "expected"),
    [
        ("parser.parse_json_file(sys.argv[1])", "python train.py own.json", ("gpt2-medium", 16)),
        ("parser.parse_json_file('own.json')", None, ("gpt2-medium", 16)),
        ("parser.parse_dict({'size': 4})", None, ("gpt2", 4)),
        ("parser.parse_json_file(sys.argv[1])", None, (None, 8)),
        ("parser.parse_args_into_dataclasses()", "python train.py --size 2", ("gpt2", 2)),
    ],
)
def test_dataclasses_of_a_file_have_its_values(how, command, expected, tmp_path, monkeypatch):
    """And no defaults in their place where the file cannot be told."""
    (tmp_path / "train.py").write_text(_OWN_FILE.replace("{how}", how))
    (tmp_path / "own.json").write_text('{"name": "gpt2-medium", "size": 16}')
    monkeypatch.chdir(tmp_path)

    run = memest.read_config("train.py") if command is None else memest.read_command(command)

    assert (run.model, run.options["batch"]) == expected
    assert ("cannot be told" in str(run.not_modelled)) == (expected[0] is None)


def test_what_trls_functions_make_of_its_model_config_is_read_once(tmp_path, monkeypatch):
    """``get_quantization_config`` beside a name, as TRL's own scripts had it."""
    (tmp_path / "sft.py").write_text(
        "from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_quantization_config\n"
        "arguments, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n"
        "how = dict(quantization_config=get_quantization_config(model))\n"
        "arguments.model_init_kwargs = how\n"
        "SFTTrainer(model=model.model_name_or_path, args=arguments, train_dataset=data).train()\n"
    )
    monkeypatch.chdir(tmp_path)

    run = memest.read_command("python sft.py --model_name_or_path gpt2 --use_peft --load_in_4bit")

    assert run.setup.quantization is not None
    assert "quantization_config" not in str(run.not_modelled)
