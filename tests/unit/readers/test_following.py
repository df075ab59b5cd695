"""Every statement and expression of a script is followed: what stands in one is seen, and once."""

from __future__ import annotations

import ast

import pytest

import memest
from memest.readers.scripts.follow import Follower

LOAD = "AutoModelForSequenceClassification.from_pretrained('{}')"
SCRIPT = """\
import sys
import torch
from transformers import AutoModelForSequenceClassification
{before}
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased").cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters())
{after}
for batch in torch.utils.data.DataLoader(data, batch_size={batch}):
{body}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FORWARD = "loss = model(**batch).loss"


def read(write, *, before="", after="", batch="8", body=(FORWARD,)):
    lines = "\n".join(f"    {line}" for line in body)
    text = SCRIPT.format(before=before, after=after, batch=batch, body=lines)
    return memest.read_config(write("loop.py", text), seq_len=8)


LARGE = LOAD.format("bert-large-uncased")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"after": "match sys.platform:\n    case 'linux':\n"
          "        x = torch.zeros(100000, 1000, device='cuda')"}, "torch.zeros"),
        ({"body": ["assert model(**batch).loss", FORWARD]}, "2 forwards"),
        ({"body": ["while model(**batch).loss > 1:\n        batch = next(more)", FORWARD]},
         "a forward in a loop of its own"),
        ({"after": f"def made():\n    yield {LARGE}\nlist(made())"}, "further model"),
        ({"body": ["tot['x'] += model(**batch, output_hidden_states=True).loss", FORWARD]},
         "every layer's output"),
        ({"after": "class H: pass\nt = H()\nt.hist = []",
          "body": ["out = model(**batch)", "t.hist += [out.logits]", "loss = out.loss"]}, "kept"),
        ({"after": f"models = [*others, {LARGE}]"}, "further model"),
        ({"after": f"models = {{sys.x: 1, 'a': {LARGE}}}"}, "further model"),
        ({"after": f"x = 0 < 1 < {LARGE}"}, "further model"),
        ({"after": f"x = others or {LARGE}"}, "further model"),
        ({"after": f'x = f"{{sys.x}} {{{LARGE}}}"'}, "further model"),
    ],
)  # fmt: skip
def test_what_stands_in_it_is_seen(write, part, words):
    assert words in " ".join(read(write, **part).setup.unpriced)
    assert not read(write).setup.unpriced


@pytest.mark.parametrize(
    "part",
    [
        {"after": "optimizer = optimizer or torch.optim.AdamW(model.parameters())"},
        {"body": ["if (out := model(**batch)).loss > 100:\n        continue", "loss = out.loss"]},
        {"after": "model = None or model"},
        {"before": "class Run:\n    @torch.no_grad()\n    def look(self, batch):\n"
         "        return model(**batch)\nrun = Run()", "body": ["run.look(batch)", FORWARD]},
    ],
)  # fmt: skip
def test_it_is_seen_once(write, part):
    assert not read(write, **part).setup.unpriced


PARSED = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--bs', type=int, default=2)\n"
    "args = p.parse_args()\n"
)


@pytest.mark.parametrize(
    ("before", "batch", "expected"),
    [
        (f"{PARSED}args.bs *= 64", "args.bs", 128),
        ("cfg = {'bs': 2}\ncfg['bs'] *= 64", "cfg['bs']", 128),
        ("size = 2\ndef grow():\n    global size\n    size = 512\ngrow()", "size", 512),
        (("def outer():\n    n = 2\n    def inner():\n        nonlocal n\n        n = 5\n"
         "    inner()\n    return n\nsize = outer()"), "size", 5),
        (("class C:\n    @staticmethod\n    def size(of): return of\n"
         "    def both(self): return self.size(3)"), "C().both()", 3),
        ("class C:\n    @classmethod\n    def size(cls, /, of=4): return of", "C.size()", 4),
        (("class C:\n    def __init__(self): self.n = 6\n    @property\n"
         "    def size(self): return self.n"), "C().size", 6),
    ],
)  # fmt: skip
def test_values_are_those_of_python(write, before, batch, expected):
    assert read(write, before=before, batch=batch).options["batch"] == expected


@pytest.mark.parametrize(
    "before",
    [
        "size = 2\nmatch sys.platform:\n    case 'linux':\n        size = 64",
        (
            "size = 2\ndef grow():\n    global size\n    size = 512\n"
            "def main():\n    if sys.x:\n        grow()\nmain()"
        ),
    ],
)
def test_what_may_be_another_value_is_left_open(write, before):
    run = read(write, before=before, batch="size")

    assert "batch" in " ".join(run.setup.unpriced)


def test_statements_that_hold_others_are_all_known():
    def holds_statements(kind):
        return {"body", "cases", "handlers"} & {*kind._fields}

    kinds = [kind for kind in vars(ast).values() if isinstance(kind, type)]
    nodes = [kind for kind in kinds if issubclass(kind, ast.stmt)]
    names = {kind.__name__.lower() for kind in nodes if holds_statements(kind)}
    assert {name for name in names if not hasattr(Follower, f"_do_{name}")} == set()
    assert "match" in names
