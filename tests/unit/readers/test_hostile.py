"""Files that want more than to be read: they are refused, or are plain data like any other."""

import json
import os
import pickle

import pytest

import memest
from memest.errors import ConfigError
from memest.readers.documents import MAX_BYTES, read_document


def laughs(levels, width=9):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        below = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} [{below}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("laughs.yaml", laughs(9), "aliases counted"),
        ("many.yaml", laughs(20), "YAML aliases"),
        ("loop.yaml", "a: &a [*a]\n", "nested more than"),
        ("deep.yaml", "a: " + "[" * 200 + "]" * 200, "nested more than"),
        ("deeper.yaml", "a: " + "[" * 50_000, "nested more than"),
        ("deep.json", "[" * 100_000, "deep"),
        ("deep2.json", '{"a": ' + "[" * 200 + "]" * 200 + "}", "nested more than"),
        ("deep.toml", "a = " + "[" * 3000 + "]" * 3000, "deep"),
        ("tag.yaml", "a: !!python/object/apply:os.system ['touch mark']\n", "makes no objects"),
        ("tag2.yaml", "a: !custom 1\n", "YAML tag"),
        ("wide.json", json.dumps({"a": [0] * 200_000}), "values"),
        ("big.yaml", "# " + "x" * MAX_BYTES + "\n", "larger than"),
        ("list.yaml", "- 1\n", "holds a list"),
        ("empty.yaml", "", "holds nothing"),
        ("text.yaml", "hello\n", "holds text"),
        ("wrong.yaml", "a: [1\nb: 2\n", "not YAML in line"),
        ("wrong.json", "{", "not JSON"),
        ("wrong.toml", "a =", "not TOML"),
        ("keys.yaml", "{a: 1}: 2\n", "YAML"),
        ("date.yaml", "a: 2001-99-99\n", "YAML"),
        ("nul.yaml", "a: \x00\n", "YAML"),
        ("name.txt", "a: 1\n", "says no format"),
        ("pod.yaml", "apiVersion: batch/v1\nkind: Job\n", "the command that it starts"),
        ("compose.yaml", "services: {train: {image: x}}\n", "the command that it starts"),
        ("wrong.py", "def f(:\n", "not Python"),
        ("deep.py", "x = " + "(" * 5000 + ")" * 5000, "not Python"),
    ],
)
def test_a_hostile_file_is_refused(write, tmp_path, name, text, words):
    write(name, text)
    with pytest.raises(ConfigError) as error:
        memest.read_config(name)
    assert words in str(error.value)
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "mark").exists()


def test_a_pickle_is_never_opened(tmp_path, monkeypatch):
    """training_args.bin is refused by its name, with the way to export it."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "mark"),)

    file = tmp_path / "training_args.bin"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"to_json_string\(\)"):
        memest.read_config(file)
    assert not (tmp_path / "mark").exists()


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.yaml", "/dev/zero", "a\0b.yaml", "~nobody/x.yaml"):
        with pytest.raises(ConfigError):
            memest.read_config(path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="not a file"):
        memest.read_config(tmp_path / "pipe.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match="not text"):
        memest.read_config(tmp_path / "binary.yaml")


def test_only_files_that_the_format_names_are_opened(write, tmp_path, monkeypatch):
    """A path under any other key stays a word."""
    import memest.readers.documents as documents

    seen = []
    real = documents.read_small
    monkeypatch.setattr(documents, "read_small", lambda path, most: seen.append(path.name)
                        or real(path, most))  # fmt: skip
    write("ds.json", '{"zero_optimization": {"stage": 1}}')
    write("secret.json", '{"zero_optimization": {"stage": 2}}')
    name = write(
        "run.yaml",
        "model_name_or_path: ./secret.json\ndataset_name: secret.json\ndeepspeed: ds.json\n"
        "chat_template_path: secret.json\nper_device_train_batch_size: 2\nconfig: secret.json\n",
    )
    assert memest.read_config(name).setup.distributed.zero == 1
    assert seen == ["run.yaml", "ds.json"]


def test_a_file_beside_is_found_from_elsewhere(write, tmp_path, monkeypatch):
    """The framework looks in the working directory; the folder of the file comes second."""
    write("sub/ds.json", '{"zero_optimization": {"stage": 1}}')
    name = write("sub/run.yaml", "per_device_train_batch_size: 2\ndeepspeed: ds.json\n")
    assert memest.read_config(name).setup.distributed.zero == 1
    write("ds.json", '{"zero_optimization": {"stage": 2}}')
    assert memest.read_config(name).setup.distributed.zero == 2


def test_an_alias_is_a_value_like_another(write):
    name = write("run.yaml", "per_device_train_batch_size: &n 4\ngradient_accumulation_steps: *n\n")
    run = memest.read_config(name)
    assert (run.setup.batch, run.setup.grad_accum) == (4, 4)
    assert read_document(name_path(name), name)["gradient_accumulation_steps"] == 4


def name_path(name):
    from pathlib import Path

    return Path(name)


TRAINS = "from transformers import Trainer\nTrainer('gpt2').train()\n"
DOUBLED = "".join(f"a{n + 1} = [a{n}, a{n}]\n" for n in range(200))
CALLS = "".join(f"def f{n}():\n    f{n + 1}(); f{n + 1}()\n" for n in range(40))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deep.py", "(" * 20_000, "not Python"),
        ("minus.py", "-" * 100_000 + "1\n", "not Python"),
        ("dots.py", "a" + ".a" * 100_000 + "\n", "not Python"),
        ("sum.py", "a = " + "1 + " * 20_000 + "1\n", "Python|trains nothing"),
        ("digits.py", "a = " + "9" * 10_000 + "\n", "not Python"),
        ("blocks.py", "".join(" " * n + "if 1:\n" for n in range(200)), "not Python"),
        ("wide.py", "a = [" + "0," * 100_000 + "]\n", "expressions"),
        ("big.py", "# " + "x" * MAX_BYTES + "\n", "larger than"),
        ("old.py", "print 'hello'\n", "Python 2"),
        ("tabs.py", "if 1:\n\ta = 1\n        b = 2\n", "not Python in line 3"),
        ("null.py", "a = 1\0\n", "not Python"),
        ("calls.py", CALLS + "def f40(): pass\nf0()\n", "too long to follow"),
        ("none.ipynb", "", "no notebook"),
        ("list.ipynb", "[]", "has no cells"),
        ("cells.ipynb", '{"cells": 3}', "has no cells"),
        ("deep.ipynb", "[" * 100_000, "deep"),
        ("odd.ipynb", '{"cells": [1, {"cell_type": "code", "source": 7}]}', "trains nothing"),
        ("wrong.ipynb", '{"cells": [{"cell_type": "code", "source": "x = ("}]}', "cell 1, is not"),
        ("json.ipynb", "{'cells': []}", "not JSON"),
    ],
)
def test_hostile_scripts(name, text, words, write):
    with pytest.raises(ConfigError, match=words):
        memest.read_config(write(name, text))


@pytest.mark.parametrize(
    "text",
    [
        "a0 = [1]\n" + DOUBLED + "from x import *\n",
        "a = 'x' * 2 ** 40\nb = 10 ** 10 ** 10\nc = 1 << 10 ** 9\nd = 1 / 0\ne = [1] * 10 ** 9\n",
        "a = 'x'\n" + "a = a + a\n" * 100,
        "def f(n):\n    return f(n) + f(n)\nf(1)\n",
        "class A:\n    def __init__(self):\n        self.a = A()\nA()\n",
        "a = {}\na['a'] = a\nb = {**a}\n",
        "a = []\na.append(a)\n",
        "__import__('os').system('touch mark')\nexec('open(\"mark\", \"w\")')\n",
        "[x for x in iter(int, 1)]\nwhile True:\n    pass\n",
        "from . import a\nfrom .. import b as c\nc.d = 1\nc.d.e[0] = 2\ndel c, zz\n",
        "a, *b = 1, 2, 3\n(c, d), e = f\nglobal g\nlambda *a, k=1, **w: a\n",
        "match 1:\n    case 2:\n        pass\n",
    ],
)
def test_odd_code_is_followed_and_never_runs(text, write, tmp_path):
    run = memest.read_config(write("train.py", text + TRAINS))

    assert run.model == "gpt2"
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("content", "reads"),
    [
        (("\ufeff" + TRAINS).encode(), True),
        (("# größe\r\n" + TRAINS.replace("\n", "\r\n")).encode(), True),
        (("# -*- coding: latin-1 -*-\n# größe\n" + TRAINS).encode("latin-1"), False),
        (TRAINS.encode("utf-16"), False),
        (bytes(range(256)), False),
    ],
)
def test_encodings_of_scripts(content, reads, tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(content)
    if reads:
        assert memest.read_config(path).model == "gpt2"
    else:
        with pytest.raises(ConfigError, match="not text"):
            memest.read_config(path)
