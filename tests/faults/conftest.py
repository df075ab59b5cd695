"""Faults of the world around a process: what the tests of this folder share."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from memest.cli.main import run as run_here
from support.asking import QUESTION


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def cli(home):
    """Run the real command line in a process of its own."""

    def run(*arguments, env=None, without=(), **more):
        dropped = ("MEMEST_", "HF_", "COLUMNS", "NO_COLOR", *without)
        plain = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        plain |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "MEMEST_HOME": str(home)}
        plain |= {} if env is None else env
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.run(
            [*more.pop("program", (sys.executable, "-m", "memest")), *arguments],
            env=plain, timeout=300, check=False, **(streams | more),
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def here(home):
    """The same in this process, which has torch: where it is not the process that is looked at."""

    def run(*arguments, env=None, without=(), cwd=None):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        with (
            pytest.MonkeyPatch.context() as changed,
            contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]),
        ):  # fmt: skip
            for name in list(os.environ):
                if name.startswith(("MEMEST_", "COLUMNS", "NO_COLOR", *without)):
                    changed.delenv(name)
            for name, value in {"MEMEST_HOME": str(home), **(env or {})}.items():
                changed.setenv(name, value)
            if cwd is not None:
                changed.chdir(cwd)
            code = run_here([os.fsdecode(word) for word in arguments])
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue() for stream in streams)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


@pytest.fixture(scope="session")
def warm(tmp_path_factory, cli, here):
    """A cache that knows the question, and its answer as a document."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("warm") / "cache"
    env = {"MEMEST_CACHE": str(folder)}
    done = cli("estimate", *QUESTION, "--json", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    # what else is asked of it: a process that has to trace spends most of its time on imports
    for words in ("estimate", *QUESTION, "--gpu", "t4"), ("compare", *QUESTION, "--vs", "batch=8"):
        assert here(*words, env=env).returncode == 0
    return folder, done.stdout


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
