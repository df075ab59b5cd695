"""The profiles that come with the package: readable, small, and what a trace would say today.

`-k gpt2` asks of one model alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product

import pytest

from support.paths import TESTS
from support.tools import load_tool

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.models import catalogue
from memest.catalog.resolve import resolve_model
from memest.config.installed import release
from memest.config.options import setup_from_options
from memest.estimation import shipped_runs
from memest.estimation.profiler import Profiler
from memest.estimation.tracer import Tracer
from memest.estimation.whole_run import steps_run
from memest.profiles.axes import structure_of
from memest.profiles.cache import Store
from memest.profiles.document import domain_from_json, family_from_json
from memest.profiles.known_profiles import key_digest, shipped_folder
from memest.profiles.packs import Packs, write_packs

SOFTWARE = json.loads((shipped_folder() / "software.json").read_text())
same_software = pytest.mark.skipif(
    any(release(name) != wanted for name, wanted in SOFTWARE.items()),
    reason="the profiles were traced with other releases",
)
tool = load_tool("ship_profiles")
RELEASES = {name: SOFTWARE[name] for name in ("torch", "transformers")}
PROGRAM = TESTS / "support" / "without_tracers.py"
QLORA = {"bf16": True, "checkpointing": "full", "lora_r": 12, "qlora": True}


def shipped():
    return Packs(shipped_folder())


def test_they_are_few_files_and_small():
    files = [file for file in shipped_folder().iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert len(files) < 60
    assert set(shipped().models) == set(tool.models())


def test_models_that_are_alike_have_the_same():
    """Of the catalogue's names more are answered than were traced."""
    known = {entry.digest for entry in shipped().entries() if "setup" in entry.key}
    # the largest are sharded, and what is made of convolutions does not recompute
    sharded = setup_from_options(bf16=True, zero=2, num_gpus=2, checkpointing="full")
    setups = [structure_of(setup) for setup in (sharded, setup_from_options(bf16=True))]
    answered = []
    for entry in catalogue():
        tracer = Tracer(resolve_model(entry.id))
        keys = [key_digest({**tracer.key(setup), **RELEASES}) for setup in setups]
        answered += [entry.id] * (not known.isdisjoint(keys))
    assert {*tool.models()} <= {*answered}
    assert "meta-llama/Llama-3.3-70B-Instruct" in answered
    assert len(answered) > len(tool.models()) + 20


@pytest.mark.slow
def test_they_are_whole():
    store = shipped()
    names = 0
    for entry in store.entries():
        for document in store.read(entry.digest, "steps"):
            family = family_from_json(document.content)
            assert family.domain == domain_from_json(document.about)
            names += 1
        for document in store.read(entry.digest, "updates"):
            family_from_json(document.content)
            names += 1
        assert entry.key["torch"] == SOFTWARE["torch"]
    assert names > 1000


def ask_without_tracers(questions):
    """The answers of a process that has nothing that traces."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input="\n".join(map(json.dumps, questions)),
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


TURNS = {model: number for number, model in enumerate(tool.models())}
THOROUGHLY = (
    "bert-base-uncased", "gpt2", "Qwen/Qwen3-8B", "google/gemma-2-2b", "t5-base",
    "google/vit-base-patch16-224", "meta-llama/Llama-3.1-70B",
)  # fmt: skip


def asked_of(model, every=1):
    """What the tool promises, at sizes that were not traced.

    Args:
        model: its name.
        every: of so many questions one is asked, others of other models.
    """
    for turn, question in enumerate(tool.questions(tool.entry_of(model))):
        if (turn + TURNS[model]) % every:
            continue
        rank = {"lora_r": 24} if "lora_r" in question.options else {}
        sizes = {"batch": 1 if question.single and turn % 2 else 3 + turn % 5}
        gpu = question.gpus[turn % len(question.gpus)]
        yield {"model": model, "gpu": gpu, "options": {**question.options, **rank, **sizes}}


def refused_of(questions, answers):
    return [
        (question, answer["said"])
        for question, answer in zip(questions, answers, strict=True)
        if answer["exit"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", THOROUGHLY)
def test_all_that_is_promised_is_answered_where_nothing_traces(model):
    questions = list(asked_of(model))
    answers = ask_without_tracers(questions)
    assert not refused_of(questions, answers)
    assert len(questions) > 10
    assert all(answer["bytes"] > 1 << 28 for answer in answers)


@pytest.mark.slow
def test_something_of_every_model_is_answered_where_nothing_traces():
    questions = [each for model in tool.models() for each in asked_of(model, every=17)]
    answers = ask_without_tracers(questions)
    assert not refused_of(questions, answers)


@pytest.mark.slow(but=("bert-base-uncased--", "gpt2--", "google/vit-base-patch16-224--"))
@same_software
@pytest.mark.parametrize(
    ("model", "precisions", "gpus"),
    [
        ("bert-base-uncased", ("fp32", "fp16"), ("a100", "t4", "h100")),
        ("gpt2", ("fp32", "fp16"), ("a100", "t4", "h100")),
        ("google/vit-base-patch16-224", ("fp32", "fp16"), ("a100", "t4", "h100")),
        ("meta-llama/Llama-3.2-1B", ("bf16",), ("a100", "rtx-4090", "h100", "b200")),
        (
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            ("bf16",),
            ("a100", "rtx-4090", "h100", "b200"),
        ),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", ("bf16",), ("a100", "rtx-4090", "h100", "b200")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_first_question_is_answered_without_a_trace(model, precisions, gpus):
    tracer = Profiler(source=resolve_model(model), stores=(Store(None), shipped()))
    for precision, gpu, batch in product(precisions, gpus, (1, 2, 7)):
        setup = setup_from_options(batch=batch, precision=precision)
        assert steps_run(tracer, setup, traits(find_gpu(gpu))).stream.sizes
    assert tracer.traces_made == 0


@pytest.mark.slow
@same_software
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bert-base-uncased", {"batch": 5, "seq_len": 255, "fp16": True}),
        ("gpt2", {"batch": 3, "seq_len": 384, "checkpointing": "full"}),
        ("t5-base", {"batch": 1, "seq_len": 128, "bf16": True}),
        ("google/vit-base-patch16-224", {"batch": 19}),
        ("mistralai/Mistral-7B-v0.1", {"batch": 2, "seq_len": 640, "checkpointing": "full"}),
        ("Qwen/Qwen3-0.6B", {"batch": 1, "seq_len": 1000, "bf16": True, "checkpointing": "full"}),
        ("google/gemma-2-2b", {"batch": 2, "seq_len": 5000, "bf16": True}),
        ("microsoft/deberta-v3-small", {"batch": 6, "bf16": True, "seq_len": 384}),
        ("bert-base-uncased", {"batch": 70, "bf16": True, "num_gpus": 2}),
        ("gpt2", {"batch": 3, "bf16": True, "num_gpus": 4, "fsdp": "full_shard"}),
        ("gpt2", {"batch": 9, "fp16": True, "num_gpus": 8, "zero": 3}),
        ("gpt2", {"batch": 3, "bf16": True, "lora_r": 24, "lora_alpha": 8}),
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


def test_what_the_trainer_does_anyway_may_be_named():
    """As every file of training arguments names it."""
    plain = ["estimate", "bert-large-uncased", "--batch", "8", "--fp16"]
    answers = ask_without_tracers(
        [{"words": [*plain, *more.split()]} for more in ("", "--max-grad-norm 1 --optim auto")]
    )
    assert [answer["exit"] for answer in answers] == [0, 0], answers[1]["said"]
    assert answers[0]["bytes"] == answers[1]["bytes"]


CHANGED = re.compile(r"Without torch, (\S+) is answered (?:with ([^,]+))?(.*)\.$")
ALONE = {
    "Qwen/Qwen2.5-7B --qlora --gpu rtx-4090": "--bf16",
    "Qwen/Qwen2.5-3B --lora-r 16 --lora-dropout 0.05 --bf16": "without --lora-dropout",
    "Qwen/Qwen3-8B --bf16 --attn-implementation flash_attention_2": "without --attn-impl",
    "unsloth/Llama-3.2-3B-Instruct-bnb-4bit --lora-r 8 --fp16 --gpu t4":
        "meta-llama/Llama-3.2-3B-Instruct is answered with --qlora.",
    "Qwen/Qwen3-8B --bf16 --tp 4 --num-gpus 4": "`memest models Qwen/Qwen3-8B` lists them",
}  # fmt: skip
"""What is not answered, and what is said of how it would be."""


def test_what_is_not_answered_says_what_would_be():
    answers = ask_without_tracers([{"words": ["estimate", *words.split()]} for words in ALONE])
    again = []
    for (words, said), answer in zip(ALONE.items(), answers, strict=True):
        assert answer["exit"] == 6
        assert said in answer["said"]
        found = CHANGED.search(answer["said"].strip())
        if found and not said.endswith("lists them"):
            left_out = [each.strip().removeprefix("without ") for each in found[3].split(",")]
            kept = words.split()[1:]
            for flag in filter(None, left_out):
                place = kept.index(flag)
                del kept[place : place + 2]
            again.append({"words": ["estimate", found[1], *kept, *(found[2] or "").split()]})
    assert [answer["exit"] for answer in ask_without_tracers(again)] == [0] * 4


def test_what_would_be_answered_is_so_on_the_card_that_was_named():
    run = ["mistralai/Mistral-7B-v0.1", "--qlora", "--seq-len", "2048", "--gpu", "t4"]
    full = ["--checkpointing", "full"]
    questions = [
        ["max-batch", *run],
        ["estimate", *run, *full, "--bf16"],
        ["estimate", *run, *full, "--fp16"],
        ["estimate", *run, *full, "--bf16", "--seq-len", "20000"],
        ["estimate", "gpt2", "--seq-len", "333", "--gpu", "t4"],
        ["estimate", "meta-llama/Llama-3.1-70B", "--gpu", "t4", "--bf16", "--qlora"],
    ]
    first, in_bf16, in_fp16, longer, between, none = ask_without_tracers(
        [{"words": words} for words in questions]
    )
    assert "compute capability 7.5 with --fp16; nearer runs" in first["said"]
    assert "7.5 with --fp16 in place of --bf16; nearer runs" in in_bf16["said"]
    assert in_fp16["exit"] == 0
    assert (
        "in place of --bf16: --seq-len 20000 is above 4095; answered are among others batches "
        "from 1 to 509, lengths from 31 to 4,095" in longer["said"]
    )
    assert (
        "at other sizes: --seq-len 333 is between 256 and 384; answered are among others batches "
        "from 1 to 251, lengths from 128 to 1,024 in steps of 128" in between["said"]
    )
    assert "on other cards alone: no run of it that comes with memest has" in none["said"]


@pytest.mark.parametrize(
    "model", ["gpt2", "BAAI/bge-base-en-v1.5", "google/flan-t5-base", "Qwen/Qwen3-4B"]
)
def test_sizes_that_are_named_are_answered_and_others_told(model):
    """Every corner of what is named is answered; one step beyond is told, as what it is."""
    for run in shipped_runs._runs_of(model):
        domains = [domain_from_json(document.about) for document in run.families]
        for domain in domains:
            box = shipped_runs._Box.of(domain, domains)
            names = list(box.spans)
            for corner in product(*(span[:2] for span in box.spans.values())):
                sizes = dict(zip(names, corner, strict=True))
                if box.tied:
                    sizes["target_len"] = sizes["seq_len"]
                assert any(each.point_of(sizes) is not None for each in domains), (sizes, box)
                assert list(box.outside(sizes)) == []
            beyond = box.spans["batch"][1] + 1
            assert next(iter(box.outside({"batch": beyond}))).startswith(f"--batch {beyond} is ")


@pytest.mark.parametrize("rank", [8, 64])
def test_recipes_are_answered_alone(rank):
    run = [
        "estimate",
        "meta-llama/Llama-3.2-1B",
        "--bf16",
        "--checkpointing",
        "--lora-r",
        str(rank),
    ]
    recipes = (
        ["--qlora", "--lora-target", "all-linear", "--lora-dropout", "0.1"],
        ["--qlora", "--optim", "paged_adamw_8bit"],
        ["--qlora", "--lora-target", "all-linear", "--optim", "paged_adamw_32bit"],
        ["--lora-target", "up_proj,down_proj,gate_proj,q_proj,k_proj,v_proj,o_proj"],
    )
    answers = ask_without_tracers([{"words": [*run, *recipe]} for recipe in recipes])
    assert [answer["exit"] for answer in answers] == [0] * 4


def test_what_is_shipped_packs_to_the_same_bytes(tmp_path):
    store, model = Store(tmp_path / "store"), "microsoft/phi-2"
    shipped().unpack(model, store)
    write_packs(tmp_path, [("phi", model, store)])
    written = (tmp_path / "phi.xz").read_bytes()
    assert written in (shipped_folder() / "phi.xz").read_bytes()


def test_a_task_that_is_the_usual_one_is_answered_as_none_is():
    """As scripts name it, by the class of the model that they load."""
    run = ["estimate", "gpt2", "--batch", "4", "--bf16"]
    unnamed, named, other = ask_without_tracers(
        [
            {"words": [*run, *task]}
            for task in ([], ["--task", "causal-lm"], ["--task", "sequence-classification"])
        ]
    )
    assert unnamed == named
    assert unnamed["exit"] == 0
    assert other["exit"] == 6
    assert "is answered without --task" in other["said"]


def test_a_model_of_the_usual_task_is_one_of_no_task():
    profiler = Profiler(source=resolve_model("prajjwal1/bert-tiny"), stores=())
    gpu = traits(find_gpu("a100"))
    (one, other) = (
        profiler.trace(setup_from_options(batch=2, seq_len=64, **task), gpu)
        for task in ({"task": "sequence-classification"}, {})
    )
    assert list(one.stream.events) == list(other.stream.events)
    assert one.stream.sizes == other.stream.sizes


def test_adapters_of_no_rank_have_that_of_peft():
    run = ["estimate", "Qwen/Qwen2.5-7B", *"--bf16 --checkpointing full".split()]
    named, unnamed = ask_without_tracers(
        [{"words": [*run, "--qlora", *rank]} for rank in (["--lora-r", "8"], [])]
    )
    assert named == unnamed


@pytest.mark.parametrize(
    ("options", "norm", "named"),
    [
        ({}, 1.0, None),
        ({"max_grad_norm": 1.0}, 1.0, None),
        ({"max_grad_norm": 0.5}, 0.5, 0.5),
        ({"max_grad_norm": 0.0}, 0.0, 0.0),
        ({"loop": "plain"}, 0.0, None),
        ({"loop": "plain", "max_grad_norm": 1.0}, 1.0, 1.0),
        ({"optim": "none"}, 0.0, None),
    ],
)
def test_a_norm_tells_updates_apart_where_it_is_not_the_trainers(options, norm, named):
    setup = setup_from_options(**options)
    assert (setup.clip_norm, setup.named_clip_norm) == (norm, named)


LLAMA = "meta-llama/Meta-Llama-3-8B"
MADE_WITH = [f"{name} {SOFTWARE.get(name)}" for name in ("torch", "transformers", "peft")]


@pytest.mark.slow(
    "meta-llama/Meta-Llama-3-8B --num-gpus 8 --fsdp full_shard --bf16 --checkpointing-",
    "meta-llama/Meta-Llama-3-8B --num-gpus 8 --zero 3 --bf16 --checkpointing --gpu h100-",
    "bert-large-uncased --num-gpus 2 --bf16-",
    "bert-large-uncased --num-gpus 2 --zero 2 --fp16 --gpu v100-",
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bert-large-uncased --batch 8 --fp16", MADE_WITH[:2]),
        ("bert-large-uncased --num-gpus 2 --bf16", MADE_WITH[:2]),
        ("bert-large-uncased --num-gpus 2 --zero 2 --fp16 --gpu v100", MADE_WITH[:2]),
        (f"{LLAMA} --num-gpus 8 --fsdp full_shard --bf16 --checkpointing", ["left out", "T4"]),
        (f"{LLAMA} --num-gpus 8 --zero 3 --bf16 --checkpointing --gpu h100", MADE_WITH[:2]),
        (f"{LLAMA} --lora-r 16 --lora-alpha 32 --bf16 --gpu rtx-4090", MADE_WITH),
        (f"{LLAMA} --lora-r 8 --qlora --bf16 --checkpointing", [MADE_WITH[2], "bitsandb"]),
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


def test_the_largest_batch_is_looked_for_where_nothing_traces():
    """Of a batch of 1 too, which has a family of its own."""
    questions = [
        f"{model} --bf16 --checkpointing --batch 1 --seq-len 512 --gpu h100 {more}"
        for model, more in (("Qwen/Qwen3-8B", "--num-gpus 8 --fsdp full_shard"), ("gpt2", ""))
    ]
    answers = ask_without_tracers([{"words": ["estimate", *each.split()]} for each in questions])

    for answer in answers:
        assert answer["exit"] == 0, answer["said"]
        assert not any("largest batch" in each for each in answer["assumptions"])
