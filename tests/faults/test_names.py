"""Names of folders and files: any that a file system takes, and those of another one."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

CONFIG = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 500,
    "max_position_embeddings": 128,
}  # fmt: skip
NAMES = {
    "größe-ß".encode(): "größe-ß",
    "日本語 🦙 👨‍👩‍👧".encode(): "日本語 🦙 👨‍👩‍👧",
    b"two new\nlines": "two new\\nlines",
    b"esc\x1b[31mred": "esc\\x1b[31mred",
    b"no \xff\xfe text": "no \\udcff\\udcfe text",
    b"C:\\models\\bert": "C:\\models\\bert",
    b"a,b;c\"q'[bold]": "a,b;c\"q'[bold]",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    pytest.importorskip("transformers")
    return {"MEMEST_CACHE": str(tmp_path_factory.mktemp("names"))}


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("name", list(NAMES), ids=[str(i) for i in range(len(NAMES))])
def test_a_model_folder_of_any_name(name, tmp_path, cache, cli, here):
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out.csv"
    words = ("--batch", "2", "--seq-len", "32")
    here("estimate", b"./" + name, *words, "-q", cwd=tmp_path, env=cache)  # needs torch, once

    done = cli("estimate", b"./" + name, *words, cwd=tmp_path, env=cache)
    assert (done.returncode, done.stderr) == (0, b"")
    first = done.stdout.decode().splitlines()[0]
    assert first.startswith(f"./{NAMES[name]} needs ")
    assert "\x1b" not in done.stdout.decode()

    done = cli("estimate", b"./" + name, *words, "--json", "--out", "page.html", cwd=tmp_path,
               env=cache)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["model"]["id"] == f"./{NAMES[name]}"
    assert "\x1b" not in (tmp_path / "page.html").read_text(encoding="utf-8")

    if b"\xff" in name or b"\n" in name:
        done = cli(
            "estimate", b"./" + name, *words, "-q", "--out", str(out), cwd=tmp_path, env=cache
        )
        assert done.returncode == 0
        assert len(list(csv.reader(io.StringIO(out.read_text(encoding="utf-8"))))) > 3
    missing = cli("estimate", b"./" + name + b"/nothing", cwd=tmp_path, env=cache)
    (line,) = missing.stderr.decode().splitlines()
    assert "\x1b" not in line


@pytest.mark.parametrize(
    "path", ["C:\\models\\bert", "\\\\server\\share\\bert", "D:\\x\\config.json"]
)
def test_a_model_of_windows(path, cli):
    done = cli("estimate", path)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert path in line
    assert "a path of Windows" in line


def test_an_export_to_a_path_of_windows(cli, tmp_path):
    done = cli("estimate", "gpt2", "--out", "C:\\reports\\out.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "path of Windows" in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []
