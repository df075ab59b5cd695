"""What is suggested for a word that is none: what is near, and nothing where nothing is."""

import pytest

from memest.catalog.spec import list_gpus
from memest.cli.argv import closest_flags
from memest.cli.commands import build
from memest.errors import closest
from support.commands import check_refused

COMMANDS = list(build().commands)
GPUS = [text for spec in list_gpus() for text in (*spec.aliases, spec.name)]


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("--bacth-size", "--batch-size"),
        ("--optimm", "--optim"),
        ("--bf61", "--bf16"),
        ("--chekpointing", "--checkpointing"),
        ("--gradient-ckpt", "--gradient-checkpointing"),
        ("--grad_checkpoint", "--gradient-checkpointing"),
        ("--gradient-accum", "--gradient-accumulation-steps"),
        ("--memory", "--gpu-memory"),
        ("--device", "--device-context"),
        ("--rank", "--lora-rank"),
        ("--lora", "--lora-r"),
        ("--zero3", "--zero"),
        ("--4bit", "--load-in-4bit"),
    ],
)
def test_a_slip_or_a_part_of_a_flag(word, first):
    assert closest_flags(word)[0] == first


@pytest.mark.parametrize(
    "word",
    """--foo --xyz --verbose --epochs --learning-rate --lr --warmup-ratio --logging-steps
    --save-steps --num-train-epochs --report-to --output-dir --lr-scheduler-type --push-to-hub
    --hidden-size --vocab-size --context-length --layers --help-me --do-train --ctx""".split(),
)
def test_another_word_is_not_near_a_flag(word):
    assert closest_flags(word) == []


@pytest.mark.parametrize(
    ("word", "names", "found"),
    [
        ("estimte", COMMANDS, ["estimate"]),
        ("batch", COMMANDS, ["max-batch"]),
        ("oom", COMMANDS, ["explain-oom"]),
        ("gpu", COMMANDS, ["gpus"]),
        ("check", COMMANDS, []),
        ("predict", COMMANDS, []),
        ("gpt2", COMMANDS, []),
        ("train", COMMANDS, []),
        ("t44", GPUS, ["t4"]),
        ("banana", GPUS, []),
        ("nothing", GPUS, []),
        ("cse", ["none", "cce"], ["cce"]),
        ("Backward", ["no_prefetch", "backward_pre"], ["backward_pre"]),
        ("adamw8bit", ["adam", "adamw_8bit"], ["adamw_8bit"]),
        ("FULL-SHARD", ["full_shard", "no_shard"], ["full_shard"]),
        ("", ["a", "b"], []),
        ("-", ["a", "b"], []),
    ],
)
def test_names(word, names, found):
    assert closest(word, names) == found


def test_the_nearest_comes_first_and_three_are_enough():
    assert closest("model", ["models", "remodel", "naming-model", "model", "model-arg"]) == [
        "model"
    ]
    assert closest("lora", ["qlora", "lora-r", "lora-alpha", "lora-rank"]) == [
        "lora-r", "lora-rank", "lora-alpha",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate gpt2 --output x", ["Did you mean --out "]),
        ("estimate gpt2 --jsno", ["Did you mean --json?"]),
        ("gpus --jsno", ["Did you mean --json?"]),
        ("calibrate rnu", ["'rnu'", "Did you mean run?", "memest calibrate --help"]),
        ("estimte gpt2", ["'estimte'", "Did you mean estimate?", "memest estimate MODEL"]),
        ("estimate gpt2 --learning_rate 1e-4", ["--learning-rate", "changes no memory"]),
        ("estimate --model-name-or-path gpt2", ["memest estimate MODEL"]),
    ],
)
def test_what_is_said(here, line, words):
    check_refused(here(*line.split()), 2, *words)


@pytest.mark.parametrize(
    "line", ["banana", "estimate gpt2 --banana", "gpus --banana", "calibrate banana", "--banana"]
)
def test_nothing_is_suggested_for_a_banana(here, line):
    done = here(*line.split())
    check_refused(done, 2, "banana")
    assert "Did you mean" not in done.stderr
