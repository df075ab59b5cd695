"""The table of options: nothing of Setup is left out, every spelling leads home."""

import dataclasses
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

import memest
from memest.config.option import Kind
from memest.config.option_table import OPTIONS
from memest.config.options import HARMLESS_ARGUMENTS, find_option, setup_from_options
from memest.config.setup import Setup, Software
from memest.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(Setup)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_has_an_option_with_help(field):
    options = [option for option in OPTIONS if field in (option.field, option.name)]
    assert options, f"{field} cannot be given on the command line"
    for option in options:
        assert option.flags
        assert option.flags[0].startswith("--")
        assert len(option.help) > 15
        assert option.help.endswith(".")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_is_whole(option):
    assert option.field in (*FIELDS, "")
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        assert option.metavar == ""
    else:
        assert option.metavar
    if option.kind is Kind.EITHER:
        assert option.flags[1] == f"--no-{option.flags[0][2:]}"


def test_no_spelling_is_taken_twice():
    seen = {}
    for option in OPTIONS:
        for keyword in option.keywords:
            assert seen.setdefault(keyword, option) is find_option(keyword) is option, keyword
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))


def test_no_option_gives_the_defaults():
    assert setup_from_options() == Setup()
    assert setup_from_options(**dict.fromkeys(FIELDS)) == Setup()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch": 4, "bf16": True}, {"batch": 4, "precision": "bf16"}),
        ({"per_device_train_batch_size": 4}, {"batch": 4}),
        ({"batch_size": "4"}, {"batch": 4}),
        ({"gradient_accumulation_steps": 2}, {"grad_accum": 2}),
        ({"max_seq_length": 128}, {"seq_len": 128}),
        ({"max_length": 128, "seq_len": 128}, {"seq_len": 128}),
        ({"fp16": False, "bf16": None}, {}),
        ({"fp16": "True"}, {"precision": "fp16"}),
        ({"mixed_precision": "no"}, {}),
        ({"mixed_precision": "bf16", "bf16": True}, {"precision": "bf16"}),
        ({"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"gradient_checkpointing": True}, {"checkpointing": "full"}),
        (
            {"method": "sft"},
            {
                "checkpointing": "full",
                "precision": "bf16",
                "dtype": "float32",
                "fused_loss": "trl-fused",
            },
        ),
        (
            {"method": "sft", "use_liger_kernel": True, "fp16": True, "checkpointing": "none"},
            {"use_liger_kernel": True, "precision": "fp16", "dtype": "float32"},
        ),
        ({"activation_checkpointing": "every_n:2"}, {"checkpointing": "every_n:2"}),
        ({"gradient_checkpointing": False}, {}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, {"use_reentrant": False}),
        (
            {"checkpointing": True, "gradient_checkpointing_kwargs": '{"every_n_layers": 3}'},
            {"checkpointing": "every_n:3"},
        ),
        ({"software": "torch=1.10"}, {"software": Software(torch=(1, 10))}),
        ({"software": {"torch": "1.10"}}, {"software": Software(torch=(1, 10))}),
        ({"software": Software(torch=(2, 0))}, {"software": Software(torch=(2, 0))}),
        ({"freeze": "embeddings"}, {"freeze": ("embeddings",)}),
        ({"freeze": ["a", "b"]}, {"freeze": ("a", "b")}),
        ({"max_grad_norm": "0"}, {"max_grad_norm": 0.0}),
        ({"use_cache": "false"}, {"use_cache": False}),
        ({"steps": 2}, {"num_steps": 2}),
        ({"expandable_segments": True}, {"alloc_conf": "expandable_segments:True"}),
        (
            {"expandable_segments": True, "alloc_conf": "max_split_size_mb:128"},
            {"alloc_conf": "max_split_size_mb:128,expandable_segments:True"},
        ),
        (
            {"expandable_segments": True, "alloc_conf": "expandable_segments:True"},
            {"alloc_conf": "expandable_segments:True"},
        ),
        ({"learning_rate": 1e-4, "lr": 1e-4, "num_train_epochs": 3, "output_dir": "x"}, {}),
    ],
)
def test_setup_from_options(options, expected):
    assert setup_from_options(**options) == Setup(**expected)


def test_options_change_a_base():
    base = Setup(batch=4, seq_len=64, alloc_conf="max_split_size_mb:64")
    changed = setup_from_options(base, fp16=True, expandable_segments=True)
    assert changed == dataclasses.replace(
        base, precision="fp16", alloc_conf="max_split_size_mb:64,expandable_segments:True"
    )


def test_counts_out_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert setup_from_options(batch=numpy.int64(4)).batch == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bach": 4}, "Did you mean batch"),
        ({"gradient_acumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"zzzzzz": 4}, "'zzzzzz' is not an option"),
        ({"gpu": "h100"}, "argument of memest.estimate"),
        ({"fp16": True, "bf16": True}, "exclude each other"),
        ({"fp16": True, "precision": "bf16"}, "contradict"),
        ({"batch": 4, "per_device_train_batch_size": 8}, "same option"),
        ({"batch": 0}, "out of range"),
        ({"batch": -1}, "out of range"),
        ({"batch": "x"}, "not a whole number"),
        ({"batch": True}, "not a whole number"),
        ({"batch": 1.5}, "not a whole number"),
        ({"batch": 10**30}, "out of range"),
        ({"audio_seconds": "x"}, "not a number"),
        ({"audio_seconds": float("nan")}, "out of range"),
        ({"padded": "perhaps"}, "neither true nor false"),
        ({"optim": "adamm"}, "Did you mean 'adam'"),
        ({"mixed_precision": "fp8"}, "Legal: fp32, fp16, bf16"),
        ({"gradient_checkpointing": "sometimes"}, "Legal: none, full, every_n:K"),
        ({"gradient_checkpointing_kwargs": "{x"}, "not valid JSON"),
        ({"gradient_checkpointing_kwargs": "[1]"}, "takes a JSON object"),
        ({"checkpointing_kwargs": {"use_reentrnt": True}}, "Did you mean 'use_reentrant'"),
        ({"checkpointing_kwargs": {"every_n_layers": 2}}, "add --checkpointing"),
        (
            {"use_reentrant": True, "checkpointing_kwargs": {"use_reentrant": False}},
            "--use-reentrant and --checkpointing-kwargs contradict each other",
        ),
        ({"expandable_segments": True, "alloc_conf": "expandable_segments:False"}, "contradict"),
        ({"freeze": [1]}, "--freeze \\[1\\] is neither a text nor several"),
        ({"fsdp_wrap": 3}, "--fsdp-wrap 3 is neither a text nor several"),
        ({"software": "torch=new"}, "is no version"),
        ({"software": "torch=1.31"}, "has no release 1.31"),
        ({"software": "torch=29"}, "the newest that memest knows is"),
        ({"software": "2022-13"}, "write the year and the month as in 2022-01"),
        ({"software": "2052-01"}, "memest knows which releases there were from 2019 to 2026-11"),
        ({"software": "2022"}, "or the month that the software is of, as in 2022-01"),
        ({"software": "trl=0.16"}, "which TRL is said by --log-probs"),
        ({"method": "grpo", "engine_share": 0.3}, "add --engine vllm or drop it"),
        ({"software": "2022-01,2023-01"}, "names 2 months: 2022-01 and 2023-01"),
        ({"software": "torch=2.3", "num_gpus": 2, "fsdp": "full_shard"}, "Add --fsdp-version 1"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        setup_from_options(**options)


@pytest.mark.parametrize(
    ("before", "change", "same"),
    [
        ({"bf16": True}, {"bf16": False}, {}),
        ({"bf16": True}, {"fp16": False}, {"bf16": True}),
        ({"eval_batch": 4, "eval_samples": 9}, {"eval_strategy": "no"}, {}),
        ({"eval_batch": 4, "eval_samples": 9}, {"prediction_loss_only": True}, {"eval_batch": 4}),
        ({"expandable_segments": True}, {"expandable_segments": False}, {}),
        ({"packing": "bfd", "seq_len": 64}, {"packing": "none"}, {"seq_len": 64}),
        ({"packing": "bfd", "seq_len": 64}, {"packing": "wrapped"}, {"seq_len": 64}),
        (
            {"predict_with_generate": True, "generation_max_length": 60},
            {"generate": 10},
            {"generate": 10, "eval_batch": 8},
        ),
    ],
    ids=str,
)
def test_what_a_change_switches_off_is_off(before, change, same):
    """As ``memest compare --vs`` and ``profile.estimate`` change a run."""
    assert setup_from_options(setup_from_options(**before), **change) == setup_from_options(**same)


def test_enumerations_are_what_they_hold():
    """As TrainingArguments of transformers hold their optimizer."""
    held = Enum("OptimizerNames", {"ADAFACTOR": "adafactor"}).ADAFACTOR
    assert setup_from_options(optim=held) == setup_from_options(optim="adafactor")


def test_what_is_short_for_several_options_is_not_switched_off():
    with pytest.raises(ConfigError, match="say which are off, load_in_4bit=false for one"):
        setup_from_options(setup_from_options(qlora=True), qlora=False)


NEW = """
    checkpoint_stride: int = option(
        7, "Something new.", "stride", panel=Panel.RECOMPUTE, between=(1, 9)
    )
"""
ASKED = """
import contextlib, io
from memest.cli.main import run
from memest.config.options import find_option, setup_from_options
from memest.config.setup import Setup
from memest.config.spelling import command_words, read_scenario
from memest.errors import ConfigError
from memest.profiles.axes import key_of, structure_of
from memest.readers.values import option_called

option = find_option("stride")
assert option.flags == ("--checkpoint-stride",) and option.help.endswith("Default: 7.")
setup = setup_from_options(stride="3")
assert setup.checkpoint_stride == setup.to_dict()["checkpoint_stride"] == 3
assert "checkpoint_stride" not in key_of(structure_of(Setup()))
assert key_of(structure_of(setup))["checkpoint_stride"] == 3
assert option_called("stride") is option
assert read_scenario("stride=3") == {"checkpoint_stride": "3"}
assert command_words("estimate", "x", {"stride": 3})[-2:] == ["--checkpoint-stride", "3"]
with contextlib.redirect_stdout(io.StringIO()) as shown:
    run(["estimate", "--help", "all"])
assert "--checkpoint-stride" in shown.getvalue()
try:
    setup_from_options(stride=10)
except ConfigError as error:
    assert str(error) == "--checkpoint-stride 10 is out of range: it must be 1 to 9."
else:
    raise AssertionError
"""


def test_a_new_option_is_one_declaration(tmp_path):
    """Its flag, help, range, readers, scenarios and the keys of profiles follow from its field."""
    package = tmp_path / "memest"
    ignore = shutil.ignore_patterns("__pycache__", "calibration", "app", "data")
    shutil.copytree(Path(memest.__file__).parent, package, ignore=ignore)
    declarations = package / "config" / "training_options.py"
    text = declarations.read_text(encoding="utf-8")
    declarations.write_text(text.replace("    batch: int", NEW + "    batch: int", 1), "utf-8")

    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ASKED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FP16_FILE = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"method": "dpo"}, "float32"),
        ({"method": "grpo", "lora_r": 8}, "float32"),
        ({"method": "dpo", "dtype": "auto"}, "auto"),
        ({"method": "dpo", "qlora": True}, "auto"),
        ({"method": "supervised"}, "auto"),
    ],
)
def test_trl_loads_a_model_by_name_in_float32(options, dtype):
    assert setup_from_options(**options).dtype == dtype


@pytest.mark.parametrize(
    ("options", "precision", "checkpointing"),
    [
        ({"method": "grpo"}, "bf16", "full"),
        ({"method": "orpo", "fp16": True}, "fp16", "full"),
        ({"method": "orpo", "fp16": False}, "bf16", "full"),
        ({"method": "kto", "bf16": False}, "fp32", "full"),
        ({"method": "dpo", "precision": "fp32", "checkpointing": "none"}, "fp32", "none"),
        ({"method": "dpo", "checkpointing": "every_n:2"}, "bf16", "every_n:2"),
        ({"method": "dpo", "zero_settings": FP16_FILE, "num_gpus": 2}, "fp16", "full"),
        ({"method": "supervised"}, "fp32", "none"),
    ],
)
def test_methods_of_trl_have_its_defaults(options, precision, checkpointing):
    """``_BaseConfig`` of TRL 1.16, ahead of which goes what is named."""
    setup = setup_from_options(**options)
    assert (setup.precision, setup.checkpointing) == (precision, checkpointing)


LORA_16 = {"lora_r": 16}


@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [
        ({"qlora": True}, "full"),
        ({"load_in_4bit": True, **LORA_16}, "full"),
        ({"load_in_8bit": True, "peft": "ia3"}, "full"),
        ({"quantization": {"load_in_4bit": True}, **LORA_16}, "full"),
        ({"load_in_4bit": True, "loop": "plain"}, "none"),
        (LORA_16, "none"),
        *(
            ({**asked, **more}, said)
            for asked in ({"qlora": True}, {"load_in_4bit": True, **LORA_16})
            for more, said in (
                ({"checkpointing": "none"}, "none"),
                ({"checkpointing": "every_n:2"}, "every_n:2"),
                ({"prepare_kbit": False}, "none"),
            )
        ),
    ],
)
def test_a_base_that_peft_prepares_is_recomputed_unless_told_otherwise(options, checkpointing):
    """One rule, however the base and its adapters were asked for (``utils/other.py`` of peft)."""
    assert setup_from_options(**options).checkpointing == checkpointing


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_qlora_beside_fsdp1_is_the_one_run_that_flattens(precision):
    half = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    spread = {"num_gpus": 2, "fsdp": "full_shard", "fsdp_version": 1, precision: True}
    setup = setup_from_options(qlora=True, **spread)

    assert (setup.quantization.quant_storage, setup.dtype, setup.prepares_base) == (
        half,
        half,
        False,
    )
    assert setup.distributed.fsdp_cpu_ram_efficient_loading
    assert setup.checkpointing == "full"
    named = setup_from_options(qlora=True, checkpointing="none", **spread)
    assert named.checkpointing == "none"
    with pytest.raises(ConfigError, match="cannot flatten 4-bit weights that are stored as uint8"):
        setup_from_options(qlora=True, bnb_4bit_quant_storage="uint8", **spread)
    # asked part by part it is as asked, and refused as before
    with pytest.raises(ConfigError, match="cannot flatten 4-bit weights that are stored as uint8"):
        setup_from_options(load_in_4bit=True, lora_r=8, **spread)
    beside = setup_from_options(setup_from_options(**spread), qlora=True)
    assert beside.quantization.quant_storage == half


def test_qlora_beside_fsdp2_keeps_the_default_where_it_runs():
    spread = {"num_gpus": 2, "fsdp": "full_shard"}
    assert setup_from_options(qlora=True, **spread).quantization.quant_storage == "uint8"
    script = setup_from_options(qlora=True, loop="plain", **spread)
    assert script.quantization.quant_storage == "bfloat16"
    assert script.prepares_base


@pytest.mark.parametrize(
    ("options", "prepares", "casts"),
    [
        ({}, True, ()),
        ({"method": "orpo"}, True, ()),
        ({"method": "dpo"}, False, ("trainable=bfloat16",)),
        ({"method": "grpo", "num_gpus": 2, "zero": 3}, False, ("trainable=bfloat16",)),
        ({"method": "dpo", "log_probs": "float32"}, True, ()),
        ({"method": "dpo", "prepare_kbit": True}, True, ("trainable=bfloat16",)),
        ({"method": "dpo", "cast_weights": "norm=float32"}, False, ("norm=float32",)),
    ],
)
def test_trl_s_own_trainers_prepare_no_base_and_cast_what_trains(options, prepares, casts):
    setup = setup_from_options(qlora=True, **options)
    assert (setup.prepares_base, setup.casts) == (prepares, casts)
    assert setup.checkpointing == "full"  # what TRL's configurations have on, too


@pytest.mark.parametrize(
    ("options", "casts"),
    [
        ({"zero": 3}, False),
        ({"zero": 2}, True),
        ({"zero": 3, "autocast_adapter_dtype": True}, True),
        ({"zero": 3, "method": "orpo"}, True),
        ({"zero": 3, "method": "supervised"}, True),
    ],
)
def test_trl_s_own_trainers_leave_adapters_in_their_base_s_dtype_under_stage_3(options, casts):
    asked = {"method": "dpo", "lora_r": 8, "num_gpus": 2, "checkpointing": True, **options}
    setup = setup_from_options(**asked)
    assert setup.adapter.autocast_adapter_dtype is casts
    of_trl = options["zero"] == 3 and "method" not in options
    assert setup.recomputes_reentrantly is of_trl


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_r": 0}, r"^--lora-r 0 is out of range: it must be a whole number, 1 to"),
        ({"peft": "adalora", "lora_r": 0}, r"^--lora-r 0 is out of range"),
        ({"lora_r": 4, "lora_dropout": 2.0}, r"^--lora-dropout 2.0 is out of range"),
        ({"peft": "lora", "peft_args": ("r=0",)}, r"^--peft: r 0 is out of range"),
        ({"adapter": '{"peft_type": "LORA", "r": 0}'}, r"^--peft-config: r 0 is out of range"),
    ],
)
def test_a_wrong_number_of_adapters_is_called_by_the_flag_that_gave_it(options, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(**options)


def test_a_setup_that_is_changed_keeps_its_checkpointing():
    """What was decided once is not decided anew by a change of another option."""
    before = setup_from_options(batch=2, **LORA_16)

    after = setup_from_options(before, load_in_4bit=True)

    assert after.prepares_base
    assert after.checkpointing == "none"


def test_a_dump_of_training_arguments_is_taken_from_python(tmp_path):
    """All fields, with what they are unless named; what says something is read as ever."""
    from transformers import Seq2SeqTrainingArguments

    named = {"per_device_train_batch_size": 3, "max_grad_norm": 0.5, "adam_beta2": 0.95}
    dump = Seq2SeqTrainingArguments(str(tmp_path), **named).to_dict()

    setup = setup_from_options(**dump)

    assert (setup.batch, setup.max_grad_norm) == (3, 0.5)
    for name, value in {"label_smoothing_factor": 0.1, "auto_find_batch_size": True}.items():
        with pytest.raises(ConfigError, match=name):
            setup_from_options(**{**dump, name: value})


def test_no_option_is_passed_over():
    assert HARMLESS_ARGUMENTS.isdisjoint(
        keyword for option in OPTIONS for keyword in option.keywords
    )


def test_sft_trainer_in_place_of_another_keeps_what_the_run_says_and_has_its_loss():
    base = setup_from_options(checkpointing="none", precision="fp32")
    by_sft = setup_from_options(base, method="sft")
    assert by_sft == setup_from_options(base, fused_loss="trl-fused")
    assert setup_from_options(by_sft, method="supervised") == base  # and the Trainer in its place
    with_liger = setup_from_options(base, use_liger_kernel=True)
    assert setup_from_options(with_liger, method="sft") == with_liger
    beside_a_base = setup_from_options(base, method="sft", qlora=True, lora_r=8)
    prepared = setup_from_options(beside_a_base, method="supervised")
    assert (prepared.fused_loss, prepared.cast_weights) == ("", ())
    assert prepared.prepares_base
    assert "trainable=bfloat16" in beside_a_base.cast_weights
    assert not beside_a_base.prepares_base
