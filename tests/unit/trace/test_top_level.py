"""A script that trains when it is imported is refused before it is."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from memest.errors import ModelLoadError
from memest.trace.model.factories import import_reference

HEAD = "ran = True\nclass Net: pass\n"
TRAINS = {
    "a loop": ("for _ in range(2):\n    loss.backward()\n", 4, "loss.backward"),
    "a trainer": ("teacher = SFTTrainer(1)\nteacher.train()\n", 4, "teacher.train"),
    "a trainer that is made there": ("Trainer(1).train()\n", 3, "Trainer(1).train"),
    "Lightning": ("L.Trainer().fit(Net())\n", 3, "L.Trainer().fit"),
    "a function that is called": ("def main():\n    a.backward()\nmain()\n", 4, "a.backward"),
    "under another condition": ("if True:\n    x.backward()\n", 4, "x.backward"),
    "beside the guard": (
        "if __name__ == '__main__':\n    pass\nelse:\n    x.backward()\n", 6, "x.backward",
    ),
}  # fmt: skip
HARMLESS = {
    "the guard": "if __name__ == '__main__':\n    raise SystemExit\n    trainer.train()\n",
    "a function": "def main():\n    trainer.train()\n",
    "a class": "class Loop:\n    def run(self):\n        self.loss.backward()\n",
    "a mode": "class Model:\n    def train(self): pass\nmodel = Model()\nmodel.train()\n",
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []

    def write(text):
        name = f"top_level_script_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", TRAINS)
def test_what_trains_is_not_imported(script, name):
    text, line, call = TRAINS[name]
    module = script(text)
    with pytest.raises(ModelLoadError) as caught:
        import_reference(f"{module}:Net")
    assert f"to import {module}.py runs its line {line}, {call}(...)" in str(caught.value)
    assert "if __name__ == '__main__':" in str(caught.value)
    assert module not in sys.modules


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_run_is_no_matter(script, name):
    assert import_reference(f"{script(HARMLESS[name])}:Net").__name__ == "Net"
