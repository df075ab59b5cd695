"""Training scripts and notebooks: read from the syntax tree, and nothing of them runs."""

import subprocess
import sys
import time

import pytest

import memest
from memest.errors import ConfigError
from support.paths import RUN_CONFIGURATIONS

SCRIPTS = RUN_CONFIGURATIONS / "scripts"

EXAMPLES = {
    "plain_loop.py": (
        {"task": "sequence-classification", "num_labels": 5, "batch": 8, "seq_len": 512,
         "padded": True, "optim": "adamw_torch", "loop": "plain"},
        "bert-large-uncased", "", "",
    ),
    "qlora.py": (
        {"task": "causal-lm", "batch": 4, "grad_accum": 16, "precision": "fp16",
         "optim": "paged_adamw_8bit", "checkpointing": "full", "prepare_kbit": True,
         "use_cache": False, "seq_len": 256},
        "meta-llama/Llama-2-7b-hf", "", "",
    ),
    "sft.py": (
        {"batch": 4, "grad_accum": 2, "seq_len": 2048, "packing": "bfd", "dtype": "bfloat16",
         "attn_implementation": "flash_attention_2", "precision": "bf16",
         "checkpointing": "full"},
        "Qwen/Qwen2.5-0.5B", "", "",
    ),
    "dpo.py": (
        {"batch": 2, "seq_len": 1024, "dtype": "bfloat16", "method": "dpo"},
        "Qwen/Qwen2.5-0.5B-Instruct", "", "",
    ),
    "accelerate_loop.py": (
        {"batch": 16, "seq_len": 128, "grad_accum": 2, "precision": "bf16",
         "loop": "accelerate", "max_grad_norm": 1.0},
        "bert-base-cased", "", "",
    ),
    "arguments.py": (
        {"batch": 4, "seq_len": 1024, "grad_accum": 8, "optim": "adamw_torch_fused",
         "max_grad_norm": 1.0, "precision": None, "checkpointing": None},
        "gpt2-medium", "", "",
    ),
    "made_elsewhere.py": (
        {"batch": 2, "precision": "bf16"}, None, "cannot be told", "",
    ),
    "unsloth_colab.ipynb": (
        {"batch": 2, "grad_accum": 4, "seq_len": 2048, "precision": "bf16", "dtype": "bfloat16",
         "optim": "adamw_8bit", "weight_decay": 0.01, "checkpointing": "full",
         "prepare_kbit": False, "packing": None, "fused_loss": None},
        "unsloth/llama-3-8b", "kernels keep buffers", "checkpoints move to the host",
    ),
}  # fmt: skip
"""By file: options, the model, what the verdict must rest on, and what must be named besides."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_script_says(name, examples):
    """Each value is one of the file's, and the file is never run: its first line would stop it."""
    options, model, unpriced, named = EXAMPLES[name]

    run = memest.read_config(SCRIPTS / name)

    assert model == run.model
    assert options == {key: run.options.get(key) for key in options}
    assert all(each.origin.startswith((name, "default", "what is not")) for each in run.values)
    assert unpriced in " ".join(run.setup.unpriced)
    assert bool(unpriced) == bool(run.setup.unpriced)
    assert named in " ".join(map(str, run.not_modelled))


def test_origins_name_file_and_line():
    origins = {each.option: each.origin for each in memest.read_config(SCRIPTS / "sft.py").values}

    assert origins["batch"] == "sft.py:14 per_device_train_batch_size"
    origins = {each.option: each.origin for each in _notebook().values}
    assert origins["batch"].startswith("unsloth_colab.ipynb:cell 7, line 14 ")


def _notebook(**options):
    return memest.read_config(SCRIPTS / "unsloth_colab.ipynb", **options)


def test_what_unsloth_only_lowers_leaves_the_verdict():
    """What adds is in ``unpriced``; offloading and the fused loss are named and bounded."""
    run = _notebook()

    assert len(run.setup.unpriced) == 1
    assert "loss works in chunks" in " ".join(map(str, run.not_modelled))


def test_the_command_line_wins_over_defaults(examples):
    run = memest.read_command(
        "python scripts/arguments.py --bf16 -b 2 --checkpointing --max_length=256"
    )

    assert {"batch": 2, "precision": "bf16", "checkpointing": "full", "seq_len": 256}.items() <= (
        run.options.items()
    )
    origins = {each.option: each.origin for each in run.values}
    assert origins["batch"] == "command: --batch-size"
    assert origins["model"] == "arguments.py:26 default of --model_name"
    assert not run.setup.unpriced


def test_code_comes_before_what_launches_it(examples):
    run = memest.read_command(
        "accelerate launch --num_processes 2 --mixed_precision fp16 scripts/accelerate_loop.py"
    )

    assert run.options["precision"] == "bf16"
    assert run.options["num_gpus"] == 2


def test_nothing_bounds_what_a_script_does_that_is_not_here_and_says_nothing():
    setup = memest.read_command("python elsewhere.py model.path=gpt2", model="gpt2").setup

    assert any("the script is not read" in remark for remark in setup.unpriced)


@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("deepspeed --module openrlhf.cli.train_dpo --pretrain gpt2 --beta 0.1", "OpenRLHF"),
        ("torchrun -m verl.trainer.sft_trainer data.train_batch_size=8", "verl"),
        ("deepspeed openrlhf/cli/train_kto.py --pretrain gpt2 --max_len 2048", "OpenRLHF"),
        ("python3 /home/me/verl/verl/trainer/main_generation.py model.path=gpt2", "verl"),
    ],
)
def test_a_framework_that_nobody_reads_is_refused_by_its_name(command, framework):
    with pytest.raises(memest.ConfigError, match=f"is {framework}'s") as refused:
        memest.read_command(command, model="gpt2")

    assert "\n" not in str(refused.value)


def test_a_script_that_is_not_here_is_read_by_its_arguments(write):
    run = memest.read_command("python elsewhere.py --model_name_or_path gpt2 --bf16")

    assert run.options["precision"] == "bf16"
    assert "the script is not read" in str(run.not_modelled[-1])


def test_a_script_here_that_is_no_python_is_read_by_its_arguments(write):
    write("old.py", "print 'training'\n")

    run = memest.read_command("python old.py --model_name_or_path gpt2 --bf16")

    assert "it is Python 2" in " ".join(map(str, run.not_modelled))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from transformers import pipeline\npipeline('text-generation')('a')\n", "pipeline"),
        ("import transformers as t\nt.AutoModel.from_pretrained('gpt2').generate()\n", "generate"),
        ("print(1)\n", "has no model"),
        ("", "has no model"),
    ],
)  # fmt: skip
def test_a_script_that_trains_nothing_is_told_so(write, text, words):
    with pytest.raises(ConfigError, match="trains nothing") as caught:
        memest.read_config(write("use.py", text))
    assert words in str(caught.value)


def test_a_trainer_of_another_library_is_named(write):
    text = "import sentence_transformers as s\ns.SentenceTransformerTrainer('a').train()\n"

    with pytest.raises(ConfigError, match="trains by sentence_transformers"):
        memest.read_config(write("train.py", text))


def test_reading_is_quick_and_loads_no_torch():
    code = (
        "import sys, memest\n"
        f"memest.read_config({str(SCRIPTS / 'unsloth_colab.ipynb')!r})\n"
        "assert not {'torch', 'pandas', 'yaml', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    start = time.perf_counter()
    memest.read_config(SCRIPTS / "unsloth_colab.ipynb")
    assert time.perf_counter() - start < 0.5
