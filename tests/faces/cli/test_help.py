"""Helps on screens of any width, pages on topics, examples, and completion in a real bash."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from memest.cli.argv import DECIDED, ESTIMATING, REFUSED, normalise, with_launch
from memest.cli.commands import build
from memest.cli.examples import EXAMPLES
from memest.cli.help import help_page
from memest.cli.help_pages import _RARE
from memest.cli.topics import TOPICS, find_topic
from memest.config.option import Panel
from memest.config.option_table import OPTIONS
from memest.errors import ConfigError
from support.commands import check_refused

ROOT = build()
WIDTHS = [40, 80, 120]
FLAG = re.compile(r"^  (--[\w-]+)", re.MULTILINE)


@pytest.fixture
def on_screen(here, monkeypatch):
    """Run a command on a screen of a width."""

    def run(width, *words):
        monkeypatch.setenv("COLUMNS", str(width))
        return here(*words)

    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("short", "estimate --help"),
        ("group", "estimate --help peft"),
        ("contents", "help"),
        ("topic", "help tight"),
    ],
)
def test_golden_helps(on_screen, golden, name, line, width):
    done = on_screen(width, *line.split())
    assert (done.returncode, done.stderr) == (0, "")
    golden(f"help_{name}_{width}.txt", done.stdout)


@pytest.mark.parametrize("width", WIDTHS)
def test_golden_error_of_a_wrong_option(on_screen, golden, width):
    done = on_screen(width, "estimate", "gpt2", "--bacth-size", "8")
    check_refused(done, 2, "--batch-size")
    golden("help_wrong_option.txt", done.stderr)  # one paragraph, which the terminal breaks


def groups_of(text):
    """The words that a short help offers behind --help."""
    listed = " ".join(text.partition("--help GROUP")[2].partition("memest help")[0].split())
    return listed.partition(":")[2].rstrip(". ").replace(" ", "").split(",")


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_nothing_is_too_wide(on_screen, width):
    texts = [on_screen(width, name, "--help").stdout for name in ROOT.commands]
    texts += [on_screen(width, name, "--help", "all").stdout for name in ESTIMATING]
    texts += [on_screen(width, "estimate", "--help", x).stdout for x in groups_of(texts[0])]
    texts += [on_screen(width, "help", topic).stdout for topic in TOPICS]
    texts += [on_screen(width, *words).stdout for words in (["--help"], ["help"], [])]
    for text in texts:
        assert text
        assert "…" not in text
        too_wide = [line for line in text.splitlines() if len(line) > width]
        assert [line for line in too_wide if len(line.split()) > 1] == []  # a path is one word


@pytest.mark.parametrize("width", [0, 1, 20, 1000])
def test_any_screen_has_a_help(on_screen, width):
    for words in (["estimate", "--help"], ["estimate", "--help", "all"], ["help"], ["gpus", "-h"]):
        done = on_screen(width, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "memest" in done.stdout


@pytest.mark.parametrize("command", ESTIMATING)
def test_the_short_help_fits_on_a_screen(on_screen, command):
    text = on_screen(80, command, "--help").stdout
    lines = text.splitlines()
    assert len(lines) <= 60
    run = lines[lines.index("The run:") + 1 :]
    run = run[: run.index("")]
    left_out = (*DECIDED.get(command, ()), *REFUSED.get(command, ()))
    common = [x for x in OPTIONS if x.short is not None and x.name not in left_out]
    assert len(run) == len(common) + 1  # --config
    assert all(line.startswith("  --") for line in run), "one line each"
    # on a terminal of 80 columns, examples stand in one line or with their purpose below
    shown = [line for line in lines if line.startswith("  memest ") and line[9:13] != "help"]
    assert len(shown) >= 3


@pytest.mark.parametrize("command", ESTIMATING)
def test_no_help_names_what_its_command_refuses(on_screen, command):
    text = on_screen(100, command, "--help", "all").stdout
    assert ("--host-memory" in text) is (command not in ("max-batch", "compare", "advise"))


@pytest.mark.parametrize("command", ESTIMATING)
def test_the_groups_hold_every_option(on_screen, command):
    every = FLAG.findall(on_screen(100, command, "--help", "all").stdout)
    words = groups_of(on_screen(100, command, "--help").stdout)
    found = [
        flag
        for word in words
        for flag in FLAG.findall(
            on_screen(100, command, "--help", word).stdout.partition("More:")[0]
        )
    ]
    assert found == every
    refused = REFUSED.get(command, ())
    assert set(found) >= {option.flags[0] for option in OPTIONS if option.name not in refused}


def test_a_heading_has_words_of_its_own():
    words = [word for panel in Panel for word in panel.words]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("estimate --help quantization", "Quantised base (bitsandbytes):"),
        ("estimate --help Quantisation", "Quantised base (bitsandbytes):"),
        ("estimate --help=fsdp", "FSDP:"),
        ("estimate -h zero", "DeepSpeed ZeRO:"),
        ("estimate gpt2 --batch 8 --help fsdp", "FSDP:"),
        ("estimate --help lora_r", "Adapters (peft):"),
        ("estimate --help gradient-accumulation-steps", "Batch:"),
        ("estimate --help explain", "Output:"),
        ("sweep --help grid", "Grid:"),
        ("fits --help gpu", "GPU:"),
        ("explain-oom --help peft", "Adapters (peft):"),
    ],
)
def test_a_group_is_asked_for(on_screen, line, heading):
    done = on_screen(80, *line.split())
    assert done.returncode == 0
    assert done.stdout.split("\n\n")[1].startswith(f"{heading}\n")


@pytest.mark.parametrize(
    "line",
    [
        "estimate gpt2 --help",
        "estimate --help --batch 8",
        "estimate --help --batch 8 gpt2",
        "estimate -h",
        "estimate --help -- torchrun train.py",
        "help estimate",
    ],
)
def test_without_a_group_it_is_the_short_one(on_screen, line):
    assert on_screen(80, *line.split()).stdout == on_screen(80, "estimate", "--help").stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate --help peftt", ["--help peftt", "Did you mean 'peft'?", "Legal: ", "fsdp"]),
        ("estimate --help banana", ["--help banana names no group", "Legal: ", " all."]),
    ],
)
def test_another_group_is_refused(here, line, words):
    done = here(*line.split())
    check_refused(done, 2, *words)
    assert ("Did you mean" in done.stderr) == ("banana" not in line)


def test_what_stands_in_the_long_help_alone_is_there():
    names = {each.name for command in ROOT.commands.values() for each in command.params}
    assert names >= _RARE


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(ROOT.commands)
    assert all(len(EXAMPLES[command]) >= 3 for command in ESTIMATING)


@pytest.mark.slow("memest explain-oom slurm-123.out")
@pytest.mark.parametrize(
    "line", [line for examples in EXAMPLES.values() for line, _ in examples], ids=lambda line: line
)
def test_every_example_is_a_command_line_that_parses(line):
    words = shlex.split(line)
    for end in ("&&", ">", "<"):
        words = words[: words.index(end)] if end in words else words
    assert words[0] == "memest"
    command, rest = ROOT.commands[words[1]], normalise(with_launch(words[1:]))[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    # parsed as Typer parses it, and not run
    assert command.make_context(words[1], rest).params


def test_pages_are_found_by_near_names():
    with pytest.raises(ConfigError, match="Did you mean estimate"):
        help_page(ROOT, "estimat")
    with pytest.raises(ConfigError, match="Did you mean tight"):
        help_page(ROOT, "tigth")
    with pytest.raises(ConfigError, match=r"topic 'banana'\. `memest help`"):
        help_page(ROOT, "banana")
    contents = help_page(ROOT, None)
    assert all(f"\n  {name} " in contents for name in (*ROOT.commands, *TOPICS))


def test_each_word_leads_to_one_page():
    words = [word for name, topic in TOPICS.items() for word in (name, *topic.also.split())]
    assert len(set(words)) == len(words)
    assert not set(words) & set(ROOT.commands)
    for name, topic in TOPICS.items():
        assert {find_topic(word) for word in (name, *topic.also.split())} == {name}


@pytest.mark.parametrize(
    ("word", "topic"),
    [
        ("dpo", "preferences"),
        ("grpo", "rollouts"),
        ("rollouts", "rollouts"),
        ("growth", "growth"),
        ("colab", "naming-gpus"),
        ("pipelines", "diffusers"),
        ("vlm", "images"),
    ],
)
def test_what_people_call_things(word, topic):
    assert find_topic(word) == topic


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_one_screen(on_screen, topic):
    done = on_screen(80, "help", topic)
    assert done.stdout.startswith(f"{topic}: ")
    assert len(done.stdout.splitlines()) <= 25


@pytest.mark.parametrize("topic", TOPICS)
def test_what_a_topic_says_to_type_is_there(topic):
    known = {flag for option in OPTIONS for flag in option.flags}
    known |= {x for each in ROOT.commands.values() for option in each.params for x in option.opts}
    text = TOPICS[topic].text
    own = re.sub(r" -- [^.]*", "", text)  # what follows is another command
    assert set(re.findall(r"--[a-z][\w-]*", own)) <= known | {"--help"}
    for page in re.findall(r"memest help ([a-z][\w-]+)", text):
        assert find_topic(page)


def test_the_help_of_a_command_ends_with_examples(cli):
    done = cli("gpus", "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert cli("help", "gpus").stdout == done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(cli, shell):
    done = cli("completion", shell)
    assert done.returncode == 0
    assert "_MEMEST_COMPLETE" in done.stdout


def test_another_shell_is_refused(cli):
    done = cli("completion", "bsh")
    assert done.returncode == 2
    assert "Did you mean 'bash'?" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("memest exp", ["explain-oom", "explain-growth"]),
        ("memest estimate gpt2 --gradient-acc", []),
        ("memest estimate gpt2 --snap", ["--snapshot"]),
        ("memest fits gpt2 --gpu a100-", ["a100-40gb", "a100-80gb"]),
    ],
)
def test_bash_completes(cli, tmp_path, typed, wanted):
    program = tmp_path / "memest"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memest "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "completion.bash"
    script.write_text(cli("completion", "bash").stdout)
    lines = [
        f"source {shlex.quote(str(script))}",
        f"COMP_WORDS=({typed})",
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))",
        "$(complete -p memest | sed 's/.*-F \\([^ ]*\\) .*/\\1/') memest",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True,
        check=False, timeout=120, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    found = done.stdout.split()
    assert set(wanted) <= set(found), done.stderr
    assert all(word.startswith(typed.split()[-1]) for word in found)
