"""The profiles that come with the package: readable, small, and what a trace would say today.

`-k gpt2` asks of one model alone.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import TESTS
from support.tools import load_tool

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.installed import release
from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.cache import Store
from memest.profiles.document import domain_from_json, family_from_json
from memest.profiles.known_profiles import shipped_folder

SOFTWARE = json.loads((shipped_folder() / "software.json").read_text())
same_software = pytest.mark.skipif(
    any(release(name) != wanted for name, wanted in SOFTWARE.items()),
    reason="the profiles were traced with other releases",
)
tool = load_tool("ship_profiles")
MODELS = tool.MODELS
PROGRAM = TESTS / "support" / "without_tracers.py"
QLORA = {"bf16": True, "checkpointing": "full", "lora_r": 16, "load_in_4bit": True}


def shipped():
    return Store(shipped_folder(), shipped=True)


@pytest.mark.slow
def test_they_are_small_and_whole():
    files = [file for file in shipped_folder().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 9_000_000

    names = 0
    for entry in shipped().entries():
        for document in shipped().read(entry.digest, "steps"):
            family = family_from_json(document.content)
            assert family.domain == domain_from_json(document.about)
            names += 1
        for document in shipped().read(entry.digest, "updates"):
            family_from_json(document.content)
            names += 1
        assert entry.key["torch"] == SOFTWARE["torch"]
    assert names > 100
    assert not [file for file in files if file.name.endswith(".part")]


def ask_without_tracers(questions):
    """The answers of a process that has nothing that traces."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input="\n".join(map(json.dumps, questions)),
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def asked_of(model):
    """What the tool promises, at sizes that were not traced.

    Runs that differ in the number of GPUs alone have the same traces: of each such set one is
    asked, with numbers, cards and batches in turn.
    """
    sets = {}
    for question in tool.questions(model):
        run = {name: value for name, value in question.options.items() if name != "num_gpus"}
        sets.setdefault(json.dumps(run), []).append(question)
    for turn, alike in enumerate(sets.values()):
        question = alike[turn % len(alike)]
        sizes = {**dict.fromkeys(tool.sizes_of(model), 384), "batch": 24}
        if question.single and turn % 2:
            sizes["batch"] = 1
        gpu = question.gpus[turn % len(question.gpus)]
        yield {"model": model, "gpu": gpu, "options": {**question.options, **sizes}}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_all_that_is_promised_is_answered_where_nothing_traces(model):
    questions = list(asked_of(model))
    answers = ask_without_tracers(questions)
    refused = [pair for pair in zip(questions, answers, strict=True) if pair[1]["exit"]]
    assert not refused, f"{len(refused)} of {len(questions)}, {refused[:3]}"
    assert len(questions) > 40
    assert all(answer["bytes"] > 1 << 29 for answer in answers)


@pytest.mark.slow(
    but=(
        "bert-base-uncased",
        "roberta-base",
        "gpt2",
        "google/vit-base-patch16-224",
    )
)
@same_software
@pytest.mark.parametrize("model", MODELS)
def test_a_first_question_is_answered_without_a_trace(model):
    tracer = Profiler(source=resolve_model(model), stores=(Store(None), shipped()))
    precisions = ("fp32", "bf16") if "/" in model and "vit" not in model else ("fp32", "fp16")
    for precision in precisions:
        for gpu in ("a100", "t4", "h100"):
            for batch in (1, 2, 7):
                found = steps_run(
                    tracer,
                    setup_from_options(batch=batch, precision=precision),
                    traits(find_gpu(gpu)),
                )
                assert found.stream.sizes
    assert tracer.traces_made == 0


@pytest.mark.slow
@same_software
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bert-base-uncased", {"batch": 5, "seq_len": 256, "fp16": True}),
        ("gpt2", {"batch": 3, "seq_len": 384, "checkpointing": "full"}),
        ("t5-base", {"batch": 1, "seq_len": 128, "bf16": True}),
        ("google/vit-base-patch16-224", {"batch": 19}),
        ("mistralai/Mistral-7B-v0.1", {"batch": 2, "seq_len": 640, "checkpointing": "full"}),
        ("bert-base-uncased", {"batch": 70, "fp16": True, "num_gpus": 2}),
        ("gpt2", {"batch": 3, "bf16": True, "num_gpus": 4, "fsdp": "full_shard"}),
        ("gpt2", {"batch": 9, "fp16": True, "num_gpus": 8, "zero": 3}),
        ("gpt2", {"batch": 1, "bf16": True, "lora_r": 16, "lora_alpha": 8}),
        ("meta-llama/Meta-Llama-3-8B", {"batch": 6, **QLORA}),
    ],
    ids=str,
)
def test_they_say_what_a_trace_says(model, options):
    setup, gpu = setup_from_options(**options), traits(find_gpu("a100"))
    kept = Profiler(source=resolve_model(model), stores=(Store(None), shipped()))
    fresh = Profiler(source=resolve_model(model), stores=())

    found, traced = steps_run(kept, setup, gpu), fresh.trace(setup, gpu)

    assert kept.traces_made == 0
    assert found.setup == traced.setup
    assert found.counts == traced.counts
    one, other = found.stream, traced.stream
    assert list(one.events) == list(other.events)
    assert one.sizes == other.sizes
    assert one.categories == other.categories
    assert [one.label_names[i] for i in one.labels] == [other.label_names[i] for i in other.labels]
    assert kept.assumptions(setup) == fresh.assumptions(setup)


def test_they_answer_where_no_torch_is():
    words = ["estimate", "bert-large-uncased", "--batch", "8", "--fp16"]
    (answer,) = ask_without_tracers([{"words": words}])

    assert answer["exit"] == 0, answer["said"]
    assert answer["allocated"] > 1 << 33


LLAMA = "meta-llama/Meta-Llama-3-8B"
MADE_WITH = [f"{name} {SOFTWARE.get(name)}" for name in ("torch", "transformers", "peft")]


@pytest.mark.slow(
    "meta-llama/Meta-Llama-3-8B --num-gpus 8 --fsdp full_shard --bf16-",
    "meta-llama/Meta-Llama-3-8B --num-gpus 8 --zero 3 --bf16 --checkpointing --gpu h100-",
    "bert-large-uncased --num-gpus 2-",
    "bert-large-uncased --num-gpus 2 --zero 2 --fp16 --gpu v100-",
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bert-large-uncased --batch 8 --fp16", MADE_WITH[:2]),
        ("bert-large-uncased --num-gpus 2", MADE_WITH[:2]),
        ("bert-large-uncased --num-gpus 2 --zero 2 --fp16 --gpu v100", MADE_WITH[:2]),
        (f"{LLAMA} --num-gpus 8 --fsdp full_shard --bf16", ["left out", "Tesla T4"]),
        (f"{LLAMA} --num-gpus 8 --zero 3 --bf16 --checkpointing --gpu h100", MADE_WITH[:2]),
        (f"{LLAMA} --lora-r 16 --lora-alpha 32 --bf16 --gpu rtx-4090", MADE_WITH),
        (f"{LLAMA} --lora-r 16 --load-in-4bit --bf16 --checkpointing", [MADE_WITH[2], "bitsandb"]),
        # more samples than what is shipped reaches to
        ("bert-base-uncased --fp16 --checkpointing --seq-len 128 --gpu b200", ["largest batch"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_command_answers_where_nothing_traces(words, said):
    (answer,) = ask_without_tracers([{"words": ["estimate", *words.split()]}])

    assert answer["exit"] == 0, answer["said"]
    assert answer["bytes"] > 1 << 30
    assert all(part in "\n".join(answer["assumptions"]) for part in said)
