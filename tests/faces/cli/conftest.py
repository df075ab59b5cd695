"""The command line in processes of its own, and the golden files of what it shows."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from memest.cli.main import run as run_here
from support.commands import run_command
from support.paths import GOLDEN
from support.sample_estimates import SAMPLES


@pytest.fixture
def golden(request):
    """Compare text with a golden file, or rewrite the file with --update-golden."""

    def compare(name, text):
        path = GOLDEN / name
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run pytest with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare


def _alone(home, more):
    """The environment of a command: this one, without what changes what is shown, and no hub."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("COLUMNS", "NO_COLOR"))}
    return plain | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "COLUMNS": "100"} | (more or {})


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def cli(home):
    """Run the command line in a process of its own, forked from one that has imported torch."""
    return lambda *words: run_command(words, _alone(home, None))


@pytest.fixture(scope="session")
def process(home):
    """Run ``python -m memest``: where imports, streams or the environment are what is proved."""

    def run(*words, env=None, **streams):
        return subprocess.run(
            [sys.executable, "-m", "memest", *words], env=_alone(home, env), text=True,
            timeout=300, check=False,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
        )  # fmt: skip

    return run


@pytest.fixture
def here(monkeypatch, capsys):
    """The same in this process, which has torch: where it is not the process that is looked at."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*args):
        code = run_here(list(args))
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


@pytest.fixture(params=sorted(SAMPLES))
def sample(request):
    """Every estimate built by hand, with its name."""
    return request.param, SAMPLES[request.param]


@pytest.fixture
def samples():
    """The estimates built by hand, by name."""
    return dict(SAMPLES)


@pytest.fixture
def replace():
    return dataclasses.replace
