"""Packed profiles are what was packed, and what is damaged is not there."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from memest.profiles.cache import Store, digest_of
from memest.profiles.packs import Packs, write_packs

KEYS = [{"model": name, "setup": {"batch": 1}} for name in ("one", "two")]
ONE, TWO = map(digest_of, KEYS)


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """Two models of an architecture, and what both of them share."""
    models = []
    for digest, key in ((ONE, KEYS[0]), (TWO, KEYS[1])):
        store = Store(tmp_path / digest, shipped=True, writable=True)
        store.write(digest, "steps-few-x", [digest] * 3, key, about={"axes": ["batch"]})
        store.write(digest, "steps-y", {"tab": "a\tb\n"}, key, about=None)
        store.write(digest_of("updates"), "updates", ["shared"], {"weights": "w"})
        models.append(("bert", str(key["model"]), store))
    write_packs(folder := tmp_path / "packs", models)
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()


def test_what_was_packed_is_there(packs: Path) -> None:
    store = Packs(packs)
    assert sorted(file.name for file in packs.iterdir()) == ["bert.xz", "index.json"]
    assert store.models == ("one", "two")
    for digest in (ONE, TWO):
        first, second = store.read(digest, "steps")
        assert (first.name, first.about, first.content) == (
            "steps-few-x", {"axes": ["batch"]}, [digest] * 3,
        )  # fmt: skip
        assert (second.about, second.content) == (None, {"tab": "a\tb\n"})
        assert [document.name for document in store.read(digest, "steps-few")] == ["steps-few-x"]
    (updates,) = store.read(digest_of("updates"), "updates")
    assert updates.content == ["shared"]
    assert not list(store.read(digest_of("another"), ""))
    by_digest = {entry.digest: entry for entry in store.entries()}
    assert by_digest[ONE].key == KEYS[0]
    assert by_digest[ONE].documents == ("steps-few-x", "steps-y")
    assert len(by_digest) == 3


def test_a_model_is_packed_anew_in_its_place(packs: Path, tmp_path: Path) -> None:
    before = list(Packs(packs).read(TWO, "steps"))
    store = Store(tmp_path / "anew", shipped=True, writable=True)
    store.write(ONE, "steps-z", ["anew"], KEYS[0])
    write_packs(packs, [("bert", "one", store)])
    assert [document.content for document in Packs(packs).read(ONE, "steps")] == [["anew"]]
    assert list(Packs(packs).read(TWO, "steps")) == before


def test_anybody_can_look_into_them(packs: Path) -> None:
    lines = lzma.decompress((packs / "bert.xz").read_bytes()).splitlines()
    assert {line.split(b"\t")[0].decode() for line in lines} == {ONE, TWO, digest_of("updates")}
    assert all(json.loads(line.split(b"\t", 3)[3]) is not None for line in lines)


@pytest.mark.parametrize("file", ["bert.xz", "index.json"])
@pytest.mark.parametrize("left", [0, 40])
def test_what_is_damaged_is_not_there(packs: Path, file: str, left: int) -> None:
    path = packs / file
    path.write_bytes(path.read_bytes()[:left])
    assert not list(Packs(packs).read(TWO, ""))


def test_nothing_is_there_where_no_folder_is(tmp_path: Path) -> None:
    store = Packs(tmp_path / "nowhere")
    assert store.entries() == []
    assert not list(store.read(ONE, ""))
