"""Every command of README, pages and helps is run, or stands below with why not.

Models are the named ones with few layers (``MODEL?name=value``): what is proved is that a command
works as it is written, not what it says of a large model. Widths stay as they are: they cost a
trace nothing, and narrow models fit in batches that do. Files that a command names are made.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest

from support.paths import RUN_CONFIGURATIONS

pytest.importorskip("transformers")

from memest.catalog.libraries import LIBRARIES
from memest.catalog.models import lookup
from memest.cli.commands import build
from memest.cli.examples import EXAMPLES
from memest.cli.main import run
from memest.readers import torchtitan
from support.blocks import PAGES, ROOT, CommandLine, blocks, command_lines, name_of
from support.tools import load_tool

READERS = RUN_CONFIGURATIONS

GPU = "trains on a GPU of this machine, or needs what was measured there (tests/unit/calibration)"
NETWORK = "fetches packages"
SERVER = "serves until it is stopped (tests/faces/app)"
CAMPAIGN = "takes minutes to hours"
NOT_RUN = {
    r"memest calibrate (run|fit|verify|report)": GPU,
    r"memest estimate gpt2 --gpu local": GPU,
    r"memest app": SERVER,
    r"memest [\w-]+ examples[/.]": "played on the examples' page (tests/faces/examples)",
    r"memest mcp": "serves a client on stdin and stdout (tests/faces/mcp)",
    r"memest selftest --full": CAMPAIGN,
    r"memest cache --clear": "empties a cache that others share (tests/faces/cli/test_cache.py)",
    r"python benchmarks/speed": "measures (tests/unit/benchmarks)",
    r"(\.venv/bin/)?python (tools|benchmarks)/": CAMPAIGN,
    r"(\.venv/bin/)?pip |python3 -m venv": NETWORK,
    r"(\.venv/bin/)?python -m pytest": "this run",
    r"bash \.ci/run": CAMPAIGN,
}
"""Beginnings of command lines that are not run here, and why."""

LLAMA = "meta-llama/Llama-3.1-8B"  # stands for MODEL
LOOKED_UP = "memest models"


def few_layers(name: str, layers: int = 2) -> str:
    """A model of the catalogue with few layers, as a command may name it; others as they are."""
    entry = lookup(name)
    if entry is None:
        return name
    config = entry.config()
    reduced = load_tool("coverage").reduced_config(config, layers)
    changes = {key: value for key, value in reduced.items() if value != config.get(key)}
    said = [f"{key}={quote(json.dumps(value))}" for key, value in changes.items()]
    return f"{name}?{'&'.join(said)}" if said else name


def small(words: list[str]) -> list[str]:
    """A command with few layers in its models: two, or as many as its pipeline needs."""
    if " ".join(words).startswith(LOOKED_UP):
        return words
    layers = 2
    if "--pp" in words:
        layers = 2 * int(words[words.index("--pp") + 1])
    if "--pp-split" in words:
        layers = sum(map(int, words[words.index("--pp-split") + 1].split(",")))
    return [few_layers(LLAMA if word == "MODEL" else word, layers) for word in words]


def not_run(line: str) -> str | None:
    return next((why for start, why in NOT_RUN.items() if re.match(start, line)), None)


EXAMPLE_LINES = [
    CommandLine("memest help", line) for lines in EXAMPLES.values() for line, _ in lines
]
LINES = list({line.line: line for line in (*EXAMPLE_LINES, *command_lines())}.values())
RUN = list(
    # what differs in the comment or in spaces is one command
    {
        (*small(line.words), "<" in line.line): line for line in LINES if not_run(line.line) is None
    }.values()
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """What the commands of the pages name: configurations, records, messages, modules."""
    folder = tmp_path_factory.mktemp("files")

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    bert = {
        "model_type": "bert", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    llama = {
        "model_type": "llama", "hidden_size": 256, "num_attention_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1000,
    }  # fmt: skip
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    write("my-model/config.json", json.dumps(bert))
    write("my-llama-gptq/config.json", json.dumps({**llama, "quantization_config": gptq}))
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q", "v"]}
    write("my-adapter/adapter_config.json", json.dumps(adapter))
    build_model = "import torch\n\ndef build{}(depth=2):\n    net = torch.nn.Sequential({})\n"
    write("my_pkg/__init__.py", "")
    returned = "    return net, {'input': torch.zeros(4, 8)}, lambda out, batch: out.mean()\n"
    write("my_pkg/models.py", build_model.format("", "torch.nn.Linear(8, 8)") + returned)
    write("my_package/__init__.py", "")
    layers = "torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()"
    write("my_package/train.py", build_model.format("_model", layers) + "    return net\n")
    for name, source in {
        "fsdp.yaml": "accelerate_fsdp.yaml", "accelerate.yaml": "accelerate_deepspeed.yaml",
        "a.yaml": "accelerate_fsdp.yaml", "run.yaml": "axolotl_qlora.yaml",
        "qlora.yaml": "axolotl_qlora.yaml", "args.json": "training_args.json",
        "ds.json": "ds_zero2.json",
    }.items():  # fmt: skip
        text = (READERS / source).read_text(encoding="utf-8")
        for model in ("NousResearch/Llama-3.2-1B", "Qwen/Qwen3-0.6B"):
            text = text.replace(model, few_layers(LLAMA))
        # what memest refuses by name (docs/several-gpus.md)
        write(name, text.replace('"round_robin_gradients": true', '"round_robin_gradients": false'))
    verl = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator={} {} "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 data.max_response_length=64 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=2\n"
    )
    model = few_layers(LLAMA)
    actor = f"'actor_rollout_ref.model.path={model}'"
    write("run_grpo.sh", verl.format("grpo", actor))
    write("run_ppo.sh", verl.format("gae", f"{actor} 'critic.model.path={model}'"))
    for name in ("fsdp.yaml", "a.yaml"):  # those that stand beside gpt2
        text = (folder / name).read_text(encoding="utf-8")
        write(name, text.replace("LlamaDecoderLayer", "GPT2Block"))
    text = (READERS / "llama3/config_registry.py").read_text(encoding="utf-8")
    write("llama3/config_registry.py", text.replace("def llama3_1b()", "def llama3_8b()"))
    notebook = (READERS / "scripts/unsloth_colab.ipynb").read_text(encoding="utf-8")
    notebook = notebook.replace("unsloth/llama-3-8b-bnb-4bit", few_layers(LLAMA))
    for name in ("colab.ipynb", "unsloth_colab.ipynb"):
        write(name, notebook)
    launch = "accelerate launch --num_processes ${NODES:-1} train.py --bf16 --max_length 64"
    for name in ("train.slurm", "train.sh"):
        write(name, f"#SBATCH -N 1\n{launch} --model_name_or_path '{few_layers(LLAMA)}'\n")
    write("qlora.py", (READERS / "scripts/qlora.py").read_text(encoding="utf-8"))
    write("lengths.csv", "".join(f"{length}\n" for length in (504, 512) * 12))
    write("train.jsonl", '{"text": "a b a"}\n{"text": "b"}\n' * 8)
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacity of 14.74 GiB of which 2.12 MiB is free. Process 1 has 14.73 GiB memory in "
        "use. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 120.00 MiB is "
        "reserved by PyTorch but unallocated.\n"
    )
    write("slurm-123.out", message)
    write("run.log", message)
    write("memory.csv", (ROOT / "tests/support/memory.csv").read_text(encoding="utf-8"))
    (record,) = blocks(ROOT / "docs/validation.md", "json")
    content = json.loads(record)
    record = json.dumps({**content, "model": few_layers(content["model"])}) + "\n"
    for name in ("measurements.jsonl", "runs.jsonl", "a.jsonl", "old.jsonl"):
        write(name, record)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(record.replace("my-run", "b").encode()))
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "my-model/tokenizer.json"))
    return folder


PROMISED = ("README.md", "memest help")
"""Pages whose commands are run with every run of the tests."""


@pytest.mark.slow(
    "memest help: memest estimate bert-large-uncased --batch 8 --fp16",
    "memest help: memest max-batch gpt2 --gpu t4 --of seq-len",
    "memest help: memest compare gpt2 --batch 8 --vs fp16 --vs checkpointing=full",
    "memest help: memest advise gpt2 --gpu t4 --effective-batch 64",
    "memest help: memest advise gpt2 --gpu t4 -n 64 --any-precision --json",
    "memest help: memest estimate gpt2 --batch 8 --gpu t4 --by layer",
    "memest help: memest stages gpt2-xl --num-gpus 8 --bf16",
    "memest help: memest stages gpt2-xl --num-gpus 8 --bf16 --json",
    "memest help: memest sweep gpt2 --over batch=1:64:x2 --over seq-len=256,512",
    "memest help: memest explain-oom slurm-123.out gpt2 --batch 32 --fp16",
    "memest help: memest explain-growth memory.csv gpt2 --batch 8 --fp16",
)
@pytest.mark.parametrize(
    "line",
    [pytest.param(x, marks=[] if x.page in PROMISED else pytest.mark.slow) for x in RUN],
    ids=str,
)
def test_the_command_runs(line, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    monkeypatch.syspath_prepend(str(files))
    flavours = {flavour: few_layers(model) for flavour, model in torchtitan._MODELS.items()}
    monkeypatch.setattr(torchtitan, "_MODELS", flavours)
    if not (files / "run.pickle").exists():
        assert run(["estimate", "gpt2?n_layer=2", "--snapshot", "run.pickle"]) == 0
        assert pickle.loads((files / "run.pickle").read_bytes())["segments"]
        assert run(["estimate", "gpt2?n_layer=2", "--snapshot", "run.json"]) == 0
        capsys.readouterr()
    words = small(line.words)
    for library in LIBRARIES:
        if any(word.strip("'").startswith(f"{library}/") for word in words):
            pytest.importorskip(library)
    if "<" in shlex.split(line.line, comments=True):
        monkeypatch.setattr("sys.stdin", (files / "run.log").open(encoding="utf-8"))

    code = run(words[1:])

    said = capsys.readouterr()
    # what does not fit, just so, or cannot be said is an answer of these
    asking = ("fits", "max-batch", "sweep", "advise", "explain-growth")
    answers = (0, 3, 4, 7) if words[1] in asking else (0,)
    assert code in answers, said.err
    assert said.out or "--quiet" in words or "--out" in words


def test_what_is_not_run_is_there_with_a_reason():
    for start in NOT_RUN:
        assert any(re.match(start, line.line) for line in LINES), f"nothing begins with {start}"


@pytest.mark.parametrize(
    "line", [x for x in LINES if x not in RUN and x.line.startswith("memest ")], ids=str
)
def test_what_is_not_run_parses_too(line):
    command, words = commands_of(line.words[1:])
    flags = {flag for parameter in command.params for flag in parameter.opts}
    asked = {w.partition("=")[0] for w in words[: words.index("--") if "--" in words else None]}
    asked = {word for word in asked if word.startswith("--")}
    flags |= {f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")}

    assert asked <= {flag.replace("_", "-") for flag in flags}


def commands_of(words):
    command = ROOT_COMMAND
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


ROOT_COMMAND = build()

INLINE = re.compile(r"`memest ([a-z][^`]*)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_exist(page):
    for text in INLINE.findall(page.read_text(encoding="utf-8")):
        own = text.partition(" -- ")[0]  # what follows is another command
        command, words = commands_of([w for w in own.split() if not w.startswith("[")])
        assert command is not ROOT_COMMAND, text
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {w for w in words if w.startswith("--") and w != "--"} <= flags | {"--help"}, text
