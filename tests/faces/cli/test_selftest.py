"""``memest selftest``: what it finds, in words and as a document."""

from __future__ import annotations

import json

import pytest

from memest.cli import selftest
from memest.cli.selftest import State, findings
from memest.config.installed import DISTRIBUTION
from memest.errors import DeviceError, MissingDependencyError, NotKnownError

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path / "home"))
    return tmp_path


def found(check):
    (one,) = [each for each in findings(lambda _: None) if each.check == check]
    return one


def test_nothing_fails_here(here, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    done = here("selftest")
    assert done.returncode == 0
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
    assert {state for state, _ in rows} <= {"ok", "warning"}
    text = done.stdout
    assert "8.36 GiB allocated at the peak, as it must be" in text
    assert f"{selftest.TINY_PARAMETERS:,} parameters and their momentum, to the byte" in text
    assert not (place / "cache").exists(), "what it traces is not kept"


def test_an_answer_that_is_another_fails_and_says_what_to_do(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(selftest, "KNOWN_BYTES", 7)
    done = here("selftest")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert "and it must be 7. Do: pip install --force-reinstall" in line


def test_what_does_not_come_with_memest_is_a_warning(monkeypatch):
    def nothing(*_, **__):
        raise NotKnownError("it is needed")

    monkeypatch.setattr("memest.search.profile.Profile.spot", nothing)
    one = found("known answer")
    assert one.state is State.WARNING
    assert "other releases of torch and transformers" in one.found


def test_a_trace_that_breaks_is_told(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("memest.estimation.estimate.answer", broken)
    one = found("own trace")
    assert one.state is State.FAILED
    assert "RuntimeError: no such operator" in one.found


def test_without_torch(here, monkeypatch):
    there = selftest.is_there
    monkeypatch.setattr(selftest, "is_there", lambda name: name != "torch" and there(name))
    done = here("selftest", "--json")
    checks = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0
    for name in ("own trace", "extra torch"):
        assert checks[name]["state"] == "warning"
        assert checks[name]["remedy"].startswith("pip install 'memest-gpu[torch]'")


def test_folders_that_cannot_be_written(place, monkeypatch):
    (place / "file").write_text("")
    for variable, check in (("MEMEST_CACHE", "cache"), ("MEMEST_HOME", "home")):
        monkeypatch.setenv(variable, str(place / "file" / "below"))
        one = found(check)
        assert one.state is State.WARNING
        assert one.remedy == f"set {variable} to a folder that can be written"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (MissingDependencyError("no package"), "pip install 'memest-gpu[gpu]'"),
        (DeviceError("no driver answers"), ""),
    ],
)
def test_a_gpu_that_is_not_seen(error, remedy, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr("memest.catalog.nvml.local_gpus", refuse)
    one = found("GPU")
    assert one.state is State.WARNING
    assert one.remedy.startswith(remedy)


def test_every_extra_that_imports_something_is_looked_for():
    from importlib.metadata import metadata

    extras = set(metadata(DISTRIBUTION).get_all("Provides-Extra"))
    # "hosted" is "app" without torch: what it imports is looked for by "app" and "plot"
    assert {name for name, _, _ in selftest._EXTRAS} == extras - {"all", "test", "optim", "hosted"}
