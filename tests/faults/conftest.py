"""Faults of the world around a process: what the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from asking import QUESTION


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
def warm(tmp_path_factory, cli):
    """A cache that knows the question, and its answer as a document."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("warm") / "cache"
    done = cli("estimate", *QUESTION, "--json", env={"MEMEST_CACHE": str(folder)})
    assert (done.returncode, done.stderr) == (0, b"")
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
