"""Every command of README, pages and helps is run, or stands below with why not.

Models are the named ones with fewer layers (``MODEL?name=value``): what is proved is that a command
works as it is written, not what it says of a large model. Files that a command names are made.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from blocks import PAGES, ROOT, CommandLine, blocks, command_lines, name_of

from memest.cli.commands import build
from memest.cli.examples import EXAMPLES
from memest.cli.main import run

READERS = ROOT / "tests/readers/examples"

GPU = "trains on a GPU of this machine, or needs what was measured there (tests/calibration)"
NETWORK = "fetches packages"
SERVER = "serves until it is stopped (tests/app)"
CAMPAIGN = "takes minutes to hours"
NOT_RUN = {
    r"memest calibrate (run|fit|verify|report)": GPU,
    r"memest estimate gpt2 --gpu local": GPU,
    r"memest app": SERVER,
    r"memest env --check": CAMPAIGN,
    r"memest cache --clear": "empties a cache that others share (tests/cli/test_cache.py)",
    r"python benchmarks/speed": "measures (tests/speed)",
    r"python (tools|benchmarks)/": CAMPAIGN,
    r"(\.venv/bin/)?pip |python3 -m venv": NETWORK,
    r"\.venv/bin/python -m pytest": "this run",
    r"bash \.ci/run": CAMPAIGN,
}
"""Beginnings of command lines that are not run here, and why."""

LLAMA = "meta-llama/Llama-3.2-1B?hidden_size=128&intermediate_size=256&vocab_size=1000"
SMALL = {
    "gpt2": "gpt2?n_layer=2",
    "gpt2-xl": "gpt2?n_layer=2",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B?num_hidden_layers=2",
    "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.1-8B?num_hidden_layers=2",
    "meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf?num_hidden_layers=2",
    "llama-3.2-1b": "llama-3.2-1b?num_hidden_layers=2",
    "google/vit-base-patch16-224": "google/vit-base-patch16-224?num_hidden_layers=2",
    "t5-base": "t5-base?num_layers=2&num_decoder_layers=2",
    "t5-large": "t5-large?num_layers=2&num_decoder_layers=2",
    "MODEL": f"{LLAMA}&num_hidden_layers=8",
}
DEEPER = {"--pp-split": f"{LLAMA}&num_hidden_layers=32"}


def not_run(line: str) -> str | None:
    return next((why for start, why in NOT_RUN.items() if re.match(start, line)), None)


EXAMPLE_LINES = [
    CommandLine("memest help", line) for lines in EXAMPLES.values() for line, _ in lines
]
LINES = list({line.line: line for line in (*EXAMPLE_LINES, *command_lines())}.values())
RUN = [line for line in LINES if not_run(line.line) is None]


def small(words: list[str]) -> list[str]:
    deeper = next((model for flag, model in DEEPER.items() if flag in words), None)
    return [deeper if deeper and word == "MODEL" else SMALL.get(word, word) for word in words]


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
        "a.yaml": "accelerate_fsdp.yaml", "run.yaml": "sft.yaml",
        "qlora.yaml": "axolotl_qlora.yaml", "args.json": "training_args.json",
        "ds.json": "ds_zero2.json",
    }.items():  # fmt: skip
        text = (READERS / source).read_text(encoding="utf-8")
        for model in ("NousResearch/Llama-3.2-1B", "Qwen/Qwen3-0.6B"):
            text = text.replace(model, f"{LLAMA}&num_hidden_layers=2")
        # what memest refuses by name (docs/several-gpus.md)
        write(name, text.replace('"round_robin_gradients": true', '"round_robin_gradients": false'))
    for name in ("fsdp.yaml", "a.yaml"):  # those that stand beside gpt2
        text = (folder / name).read_text(encoding="utf-8")
        write(name, text.replace("LlamaDecoderLayer", "GPT2Block"))
    text = (READERS / "llama3/config_registry.py").read_text(encoding="utf-8")
    write("llama3/config_registry.py", text.replace("def llama3_1b()", "def llama3_8b()"))
    write("lengths.csv", "".join(f"{length}\n" for length in (17, 120, 300, 512, 511, 90) * 4))
    write("train.jsonl", '{"text": "a b a"}\n{"text": "b"}\n' * 8)
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacity of 14.74 GiB of which 2.12 MiB is free. Process 1 has 14.73 GiB memory in "
        "use. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 120.00 MiB is "
        "reserved by PyTorch but unallocated.\n"
    )
    write("slurm-123.out", message)
    write("run.log", message)
    (record,) = blocks(ROOT / "docs/validation.md", "json")
    record = json.dumps(json.loads(record)) + "\n"
    for name in ("measurements.jsonl", "runs.jsonl", "a.jsonl", "old.jsonl"):
        write(name, record)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(record.replace("my-run", "b").encode()))
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "my-model/tokenizer.json"))
    return folder


@pytest.mark.parametrize("line", RUN, ids=str)
def test_the_command_runs(line, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    monkeypatch.syspath_prepend(str(files))
    if not (files / "run.pickle").exists():
        assert run(["estimate", "gpt2?n_layer=2", "--snapshot", "run.pickle"]) == 0
        assert pickle.loads((files / "run.pickle").read_bytes())["segments"]
        assert run(["estimate", "gpt2?n_layer=2", "--snapshot", "run.json"]) == 0
        capsys.readouterr()
    words = small(line.words)
    if "<" in shlex.split(line.line, comments=True):
        monkeypatch.setattr("sys.stdin", (files / "run.log").open(encoding="utf-8"))

    code = run(words[1:])

    said = capsys.readouterr()
    # what does not fit, or just so, is an answer of these
    answers = (0, 3, 4) if words[1] in ("fits", "max-batch", "sweep", "advise") else (0,)
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


# the page of commands is the helps themselves (tools/cli_page.py)
WRITTEN = [page for page in PAGES if page.name != "cli.md"]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_in_sentences_exist(page):
    for text in INLINE.findall(page.read_text(encoding="utf-8")):
        command, words = commands_of([w for w in text.split() if not w.startswith("[")])
        assert command is not ROOT_COMMAND, text
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {w for w in words if w.startswith("--") and w != "--"} <= flags | {"--help"}, text
