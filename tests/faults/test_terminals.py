"""Terminals: none, tiny, huge; streams that are closed; encodings without the characters."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from support.asking import QUESTION

COMMANDS = {
    "report": ("estimate", *QUESTION, "--gpu", "t4"),
    "layers": ("estimate", *QUESTION, "--by", "layer"),
    "compare": ("compare", *QUESTION, "--vs", "batch=8"),
    "gpus": ("gpus",),
    "help": ("estimate", "--help"),
}
DRESS = ("\x1b[", "\x1b]")


@pytest.mark.parametrize("columns", ["1", "20", "40", "400"])
@pytest.mark.parametrize("name", ["report", "gpus"])
def test_any_width_shows_every_figure(name, columns, warm, cli):
    env = {"MEMEST_CACHE": str(warm[0]), "COLUMNS": columns}
    done = cli(*COMMANDS[name], env=env)

    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert not any(code in text for code in DRESS)
    if name == "report" and columns != "1":
        peak = json.loads(warm[1])["peak"]["reserved_bytes"]
        assert f"{round(peak / 2**20):,}" in text.replace("\n", "")


def on_terminal(columns, words, **env):
    """What a command writes on a terminal of so many columns, and its exit code."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "memest", *words],
        stdin=secondary, stdout=secondary, stderr=secondary,
        env=clean | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"} | env,
    )  # fmt: skip
    os.close(secondary)
    found = b""
    while True:
        try:
            piece = os.read(primary, 65536)
        except OSError:  # the last one who wrote is gone
            break
        if not piece:
            break
        found += piece
    os.close(primary)
    return found.decode(), process.wait(timeout=60)


@pytest.mark.slow("compare")
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_terminal_of_ten_columns(name, warm):
    text, code = on_terminal(10, COMMANDS[name], MEMEST_CACHE=str(warm[0]))
    assert code == 0
    assert "Traceback" not in text
    assert "bug in memest" not in text
    assert text.strip()


@pytest.mark.slow
def test_colours_are_for_terminals_that_want_them(warm):
    cache = {"MEMEST_CACHE": str(warm[0])}
    dressed, _ = on_terminal(100, COMMANDS["report"], **cache)
    assert DRESS[0] in dressed
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        text, code = on_terminal(100, COMMANDS["report"], **{variable: value}, **cache)
        assert code == 0
        assert not any(code in text for code in DRESS), variable


@pytest.mark.parametrize("shape", [("--json",), ("-q",), ()], ids=["json", "sentence", "report"])
def test_stdout_that_is_closed(shape, warm, cli):
    done = cli("estimate", *QUESTION, *shape, env={"MEMEST_CACHE": str(warm[0])},
               preexec_fn=lambda: os.close(1), stdout=None)  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("memest: stdout is closed")


def test_a_file_never_becomes_stdout(warm, cli, tmp_path):
    """With stdout and stderr closed, the next file that is opened would get their numbers."""
    path = tmp_path / "out.json"

    def close_all():
        for number in range(3):
            os.close(number)

    cli("estimate", *QUESTION, "--out", str(path), env={"MEMEST_CACHE": str(warm[0])},
        preexec_fn=close_all, stdout=None, stderr=None)  # fmt: skip
    assert path.read_bytes() == warm[1]


def test_stderr_that_is_closed(warm, cli):
    env = {"MEMEST_CACHE": str(warm[0])}
    done = cli(
        "estimate", *QUESTION, "--json", env=env, preexec_fn=lambda: os.close(2), stderr=None
    )
    assert (done.returncode, done.stdout) == (0, warm[1])
    done = cli("estimate", "./nowhere", env=env, preexec_fn=lambda: os.close(2), stderr=None)
    assert (done.returncode, done.stdout) == (cli("estimate", "./nowhere").returncode, b"")


def test_a_reader_that_has_enough(warm):
    """``memest models | true``: no word on stderr, and the code of a broken pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memest", "models", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=["C", "C without UTF-8", "ascii", "latin-1"],
)
def test_encodings_without_the_characters(env, warm, cli):
    done = cli(*COMMANDS["report"], env={"MEMEST_CACHE": str(warm[0])} | env)
    assert (done.returncode, done.stderr) == (0, b"")
    if env != {"LC_ALL": "C"}:  # which Python takes for UTF-8
        assert done.stdout.isascii()
