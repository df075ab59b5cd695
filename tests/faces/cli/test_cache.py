"""``memest cache``: empty, filled, damaged, foreign and stubborn folders."""

import json
import os

import pytest

from memest.cli.cache import contents
from memest.cli.main import run
from memest.profiles.cache import Store, digest_of

SETUPS = {
    "bert-base-uncased": {},
    "gpt2": {"precision": "fp16", "checkpointing": "every_n:2", "attn_implementation": "eager"},
    "t5-small": {"loop": "plain", "freeze": ("shared",), "software": "torch=2.0"},
}


def key_of(model, **changes):
    from memest.config.options import setup_from_options

    setup = setup_from_options(**changes).to_dict() | {"grad_accum": 2, "num_steps": 2}
    return {"model": model, "torch": "2.13.0", "transformers": "5.23.0", "setup": setup}


def fill(folder):
    store = Store(folder)
    for number, (model, changes) in enumerate(SETUPS.items()):
        key = key_of(model, **changes)
        digest = digest_of(key)
        for name in ("model", "steps-batch-1")[: number + 1]:
            store.write(digest, name, {"some": "content"}, key)
        stamp(folder / digest, 1_790_000_000 + number * 86_400)
    for optimizer in ("adamw_torch", "sgd"):
        key = {"weights": "00ff", "setup": {"optim": optimizer}}
        store.write(digest_of(key), "updates", {"some": "content"}, key)
        stamp(folder / digest_of(key), 1_789_000_000)


def stamp(place, seconds):
    for file in place.iterdir():
        os.utime(file, (seconds, seconds))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "kept"
    monkeypatch.setenv("MEMEST_CACHE", str(place))
    monkeypatch.delenv("MEMEST_CACHE_LIMIT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    return place


def ask(capsys, *words):
    code = run(["cache", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_nothing_is_kept(folder, capsys):
    assert ask(capsys) == (0, f"{folder}: empty, of 512 MiB.\n", "")
    assert not folder.exists()
    document = json.loads(ask(capsys, "--json")[1])
    assert (document["total_bytes"], document["profiles"]) == (0, [])
    assert ask(capsys, "--clear")[:2] == (0, f"{folder}: nothing to clear.\n")


def test_the_path_alone(folder, capsys):
    assert ask(capsys, "--path") == (0, f"{folder}\n", "")
    assert json.loads(ask(capsys, "--path", "--json")[1]) == {
        "schema_version": 1,
        "path": str(folder),
    }


def test_golden(folder, capsys, golden, monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    fill(folder)
    code, out, err = ask(capsys)
    assert (code, err) == (0, "")
    golden("cache.txt", out.replace(str(folder), "FOLDER"))


def test_a_filled_folder(folder, capsys):
    fill(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    document = json.loads(ask(capsys, "--json")[1])
    assert set(document) == {
        "schema_version", "path", "problem", "total_bytes", "limit_bytes", "profiles", "optimizers",
        "unknown", "other_files",
    }  # fmt: skip
    assert [one["model"] for one in document["profiles"]] == [*SETUPS][::-1]
    by_model = {one["model"]: one for one in document["profiles"]}
    assert by_model["bert-base-uncased"]["setup"] == {}
    assert by_model["gpt2"]["setup"] == {
        "precision": "fp16", "checkpointing": "every_n:2", "attn_implementation": "eager"
    }  # fmt: skip
    assert by_model["gpt2"]["documents"] == 2
    assert document["optimizers"]["entries"] == document["optimizers"]["documents"] == 2
    files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert document["total_bytes"] == files
    # a look is no use: what goes first stays the same
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_clear(folder, capsys):
    fill(folder)
    (folder / "notes.txt").write_text("mine")
    size = contents(folder).total_bytes
    code, out, _ = ask(capsys, "--clear", "--json")
    assert code == 0
    assert json.loads(out)["freed_bytes"] == size
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_what_cannot_be_removed_is_said(folder, capsys, monkeypatch):
    fill(folder)
    monkeypatch.setattr("memest.profiles.cache._remove", lambda *_: None)
    code, out, err = ask(capsys, "--clear")
    assert code == 1
    assert out == f"{folder}: nothing to clear.\n"
    assert "could not be removed" in err


def test_a_damaged_entry(folder, capsys):
    fill(folder)
    damaged = folder / digest_of(key_of("gpt2", **SETUPS["gpt2"])) / "key.json.gz"
    damaged.write_bytes(b"\x1f\x8bnonsense")
    code, out, err = ask(capsys)
    assert (code, err) == (0, "")
    assert "unreadable entries" in out
    assert "gpt2" not in out
    assert damaged.exists()
    assert json.loads(ask(capsys, "--json")[1])["unknown"]["entries"] == 1


@pytest.mark.slow("key0")
@pytest.mark.parametrize(
    "key", [{"model": "m", "setup": 3}, {"model": 3}, {"model": "m", "setup": {"freeze": 7}}, {}]
)
def test_keys_of_other_versions(folder, capsys, key):
    Store(folder).write("0" * 32, "model", 1, key)
    assert ask(capsys)[0] == 0
    assert ask(capsys, "--json")[0] == 0


def test_a_foreign_folder(folder, capsys):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (folder / ("f" * 32)).mkdir()
    code, out, err = ask(capsys)
    assert (code, out) == (0, f"{folder}: empty, of 512 MiB.\n")
    assert "2 other files" in err
    assert ask(capsys, "--clear")[0] == 0
    assert (folder / "thesis.tex").exists()


def test_a_file_in_place_of_the_folder(folder, capsys):
    folder.write_text("a file")
    code, out, _ = ask(capsys)
    assert code == 0
    assert "it is a file, not a folder" in out
    assert ask(capsys, "--clear")[0] == 0
    assert folder.read_text() == "a file"


def test_a_folder_that_cannot_be_read(folder, capsys, monkeypatch):
    folder.mkdir()

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    code, out, _ = ask(capsys)
    assert code == 0
    assert "it cannot be read: Permission denied" in out


def test_wrong_usage(folder, capsys, monkeypatch):
    assert ask(capsys, "--clear", "--path")[0] == 2
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", "plenty")
    code, out, err = ask(capsys)
    assert (code, out) == (2, "")
    assert "MEMEST_CACHE_LIMIT" in err
    assert ask(capsys, "--path")[0] == 0


def test_env_shows_the_folder(folder, capsys):
    fill(folder)
    assert run(["env", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["cache"]
    assert kept == {
        "path": str(folder), "entries": 5, "bytes": contents(folder).total_bytes
    }  # fmt: skip
