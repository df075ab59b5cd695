"""Folders that cannot be written or are not known, and caches that several releases share."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time

import pytest

from memest.errors import ConfigError
from memest.profiles import cache as stored
from memest.profiles.cache import Store, digest_of
from support.asking import QUESTION


@pytest.fixture
def read_only(tmp_path):
    place = tmp_path / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_read_only_home(read_only, warm, cli, here):
    done = cli(
        "estimate", *QUESTION, "--json", env={"HOME": str(read_only)},
        without=("XDG_CACHE_HOME", "MEMEST_CACHE"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, warm[1])
    (line,) = done.stderr.decode().splitlines()
    assert f"{read_only}/.cache/memest could not be written (Read-only file system)" in line

    quiet = here("estimate", *QUESTION, "-q", env={"MEMEST_CACHE": f"{read_only}/x"})
    assert (quiet.returncode, quiet.stderr) == (0, b"")


@pytest.mark.slow
def test_a_cache_below_a_file(tmp_path, warm, here):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        done = here("estimate", *QUESTION, "--json", env={"MEMEST_CACHE": str(place)})
        assert (done.returncode, done.stdout) == (0, warm[1])
        assert "could not be written" in done.stderr.decode()
    assert (tmp_path / "file").read_text() == "mine"


NOBODY = """
import os, pwd, sys
os.environ.pop("HOME", None)
def unknown(_):
    raise KeyError("getpwuid(): uid not found")
pwd.getpwuid = unknown
from memest.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_user_without_a_home(warm, cli):
    """What containers have that run as a number nobody gave a name to."""

    def ask(*words, **env):
        return cli(*words, program=(sys.executable, "-c", NOBODY), env=env,
                   without=("XDG_CACHE_HOME", "XDG_DATA_HOME"))  # fmt: skip

    done = ask("estimate", *QUESTION, "--json")
    assert (done.returncode, done.stdout) == (0, warm[1])
    for words, said in (
        (("cache",), "MEMEST_CACHE"),
        (("calibrate", "show"), "MEMEST_HOME"),
    ):
        done = ask(*words, MEMEST_HOME="")
        assert done.returncode in (1, 2)
        assert said in done.stderr.decode()
        assert "bug" not in done.stderr.decode()
    done = ask("estimate", *QUESTION, MEMEST_CACHE="~nobody-of-this-name/cache")
    assert done.returncode == 2
    assert "MEMEST_CACHE=~nobody-of-this-name/cache" in done.stderr.decode()
    assert ask("env", "--json").returncode == 0


# -- releases that share a cache ------------------------------------------------------------------


def _of_a_later_release(path):
    head, _, body = gzip.decompress(path.read_bytes()).partition(b"\n")
    document = {**json.loads(head), "version": stored.VERSION + 1, "compression": "none"}
    path.write_bytes(gzip.compress(json.dumps(document).encode() + b"\n" + body))


def test_documents_of_another_form_are_not_read_and_not_dropped(tmp_path):
    store, digest = Store(tmp_path), digest_of("one")
    store.write(digest, "steps", [1], {"model": "m"})
    path = tmp_path / digest / "steps.json.gz"
    _of_a_later_release(path)
    left = path.read_bytes()

    assert list(store.read(digest, "steps")) == []
    assert path.read_bytes() == left
    assert [len(entry.documents) for entry in store.entries()] == [1]


def test_releases_of_another_form_have_places_of_their_own(tmp_path, monkeypatch):
    """Two releases whose tracing code is the same, and whose documents are not."""
    from memest.profiles import known_profiles as shelf

    key = {"model": "m", "setup": {}}
    places = set()
    for name, number in (("VERSION", 1), ("VERSION", 2), ("FORMAT", 5)):
        with monkeypatch.context() as changed:
            changed.setattr(shelf, name, number)
            one = shelf.KnownProfiles([Store(tmp_path)])
            one.write(key, "updates", [name, number])
            places.add(shelf._digest_in(one._own, key))
    assert len(places) == 3
    assert {d.content[0] for place in places for d in Store(tmp_path).read(place, "")
            if d.name == "updates"} == {"VERSION", "FORMAT"}  # fmt: skip


def test_a_store_of_a_later_release_is_refused_and_left(tmp_path):
    import sqlite3

    from memest.calibration.store import MeasurementStore

    path = tmp_path / "runs.db"
    MeasurementStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="later release"):
        MeasurementStore(path)
    assert path.read_bytes() == before


WRITER = """
import sys
from pathlib import Path
from memest.profiles.cache import Store
store, who = Store(Path(sys.argv[1])), sys.argv[2]
for number in range(150):
    store.write("ab" * 16, f"steps-{number % 5}", [who] * 2000, {"model": "m"}, about=who)
"""


def test_processes_that_write_the_same_documents_at_once(tmp_path):
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), who]) for who in "ab"]
    store = Store(tmp_path, writable=False)
    seen = 0
    while any(process.poll() is None for process in running):
        for document in store.read("ab" * 16, "steps"):
            assert document.content == [document.about] * 2000
            seen += 1
        time.sleep(0.01)
    assert [process.wait() for process in running] == [0, 0]
    assert seen
    assert len(list(store.read("ab" * 16, "steps"))) == 5
    assert not list(tmp_path.rglob("*.part"))
