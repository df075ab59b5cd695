"""``memest`` alone: a dialogue on a terminal, the usage anywhere else."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import time

import pytest

from memest.cli import dialogue, main
from support.paths import RUN_CONFIGURATIONS

ENTER = ""


@pytest.fixture
def answered(monkeypatch, capsys):
    """What the answers stand for, and what was said; the machine has no GPU."""
    monkeypatch.setattr(dialogue, "_usual_card", lambda: "rtx-4090")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def ask(*lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return dialogue.ask_question(), capsys.readouterr().err

    return ask


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ([ENTER] * 4, "estimate bert-large-uncased --batch 8 --gpu rtx-4090"),
        (["gpt2", "t4", "lora", "2"], "estimate gpt2 --batch 2 --peft lora --fp16 --gpu t4"),
        (["gpt2", " T4 ", "QLoRA", " 2 "], "estimate gpt2 --batch 2 --qlora --fp16 --gpu T4"),
        (["gpt2", "a100", "lora", "2"], "estimate gpt2 --batch 2 --peft lora --bf16 --gpu a100"),
        (["gpt2", "none", "qlora", "2"], "estimate gpt2 --batch 2 --qlora --bf16"),
        (["gpt2", "24GiB", ENTER, ENTER], "estimate gpt2 --batch 8 --gpu 24GiB"),
        (["gpt2", "none", "full", "1"], "estimate gpt2 --batch 1"),
        (["gpt2?n_layer=4", "none", "full", "1"], "estimate gpt2?n_layer=4 --batch 1"),
    ],
)
def test_the_command_it_stands_for(answered, lines, command):
    words, said = answered(*lines)
    assert words == command.split()
    assert said.rstrip().endswith(f"memest {command}".replace("gpt2?n_layer=4", "'gpt2?n_layer=4'"))


def test_what_cannot_be_is_asked_again(answered):
    words, said = answered(
        "no-such-model", "./nowhere/config.json", "gpt2", "rtx 4091", "2gb?", "0GiB", "t4",
        "lorra", "lora", "many", "0", "4",
    )  # fmt: skip
    assert words == "estimate gpt2 --batch 4 --peft lora --fp16 --gpu t4".split()
    problems = re.findall(r"memest: .*", said)
    wanted = [
        "'no-such-model'", "./nowhere/config.json does not exist", "'rtx 4091'; nearest names: rtx",
        "2gb?", "--gpu '0GiB' leaves no memory", "Did you mean 'lora'?",
        "--batch 'many' is not a whole number", "--batch 0 is out of range",
    ]  # fmt: skip
    assert len(problems) == len(wanted)
    for problem, words_of_it in zip(problems, wanted, strict=True):
        assert words_of_it in problem
    assert said.count("Method (full, lora, qlora) [full]:") == 2


def test_a_configuration_says_the_rest(answered):
    path = str(RUN_CONFIGURATIONS / "axolotl_qlora.yaml")
    words, said = answered(path, "t4")
    assert words == ["estimate", path, "--gpu", "t4"]
    assert "Method" not in said


def test_it_is_asked_and_run(monkeypatch, here):
    monkeypatch.setattr(main, "on_terminal", lambda: True)
    answers = "\nt4\n\n\n"  # what is answered from the profiles that come with the package
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    done = here()
    assert done.returncode == 0
    assert "memest estimate bert-large-uncased --batch 8 --gpu t4\n" in done.stderr
    plain = here("estimate", "bert-large-uncased", "--batch", "8", "--gpu", "t4")
    assert done.stdout.endswith(plain.stdout)
    assert done.stdout.removesuffix(plain.stdout).strip() == ""


def test_the_end_of_the_input_ends_it(monkeypatch, here):
    monkeypatch.setattr(main, "on_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("gpt2\n"))
    done = here()
    assert done.returncode == 130
    assert done.stderr.endswith("\nmemest: interrupted.\n")


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_without_a_terminal_it_is_the_usage(monkeypatch, here, stream):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class NoTerminal(Terminal):
        def isatty(self):
            return False

    streams = {"stdin": Terminal, "stdout": Terminal, "stderr": Terminal, stream: NoTerminal}
    for name, kind in streams.items():
        monkeypatch.setattr(sys, name, kind())
    assert not dialogue.on_terminal()
    monkeypatch.undo()
    done = here()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: memest COMMAND ...\n")
    assert done.stdout == here("--help").stdout


def read_all(terminal):
    """What is there to read until nothing comes for a second."""
    said = b""
    try:
        while select.select([terminal], [], [], 1)[0] and (more := os.read(terminal, 4096)):
            said += more
    except OSError:  # the other end is closed
        pass
    return said


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals on Windows")
@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["ctrl-c", "ctrl-d"])
def test_keys_end_it_on_a_terminal(key, home):
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "memest"], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    said, end = b"", time.monotonic() + 60
    try:
        while b"]: " not in said and time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                said += os.read(ours, 4096)
        while b"interrupted" not in said and time.monotonic() < end:
            # once more where it came before anybody listened: input() swallows what comes first
            os.write(ours, key.encode())
            said += read_all(ours)
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(ours)
    assert b"Model (" in said
    assert b"Traceback" not in said
    assert b"\nmemest: interrupted." in said
