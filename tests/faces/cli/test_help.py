"""Manual pages, examples below every help, and completion in a real bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from memest.cli.argv import normalise, with_launch
from memest.cli.commands import build
from memest.cli.help import EXAMPLES, TOPICS, help_page
from memest.errors import ConfigError

ROOT = build()


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(ROOT.commands)
    assert not set(TOPICS) & set(ROOT.commands)


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
    for topic in TOPICS:
        assert help_page(ROOT, topic).startswith(f"NAME\n    {topic} - ")
    contents = help_page(ROOT, None)
    assert all(f"    {name} " in contents for name in (*ROOT.commands, *TOPICS))


def test_the_help_of_a_command_ends_with_examples(cli):
    done = cli("fits", "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert cli("help", "fits").stdout == done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(cli, shell):
    done = cli("completion", shell)
    assert done.returncode == 0
    assert "_MEMEST_COMPLETE" in done.stdout


def test_another_shell_is_refused(cli):
    done = cli("completion", "bsh")
    assert done.returncode == 2
    assert "Did you mean bash?" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("memest exp", ["explain-oom"]),
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
