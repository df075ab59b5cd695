"""Packages that are there and cannot be imported: which one is to blame, and what to type."""

from __future__ import annotations

import importlib
import sys

import pytest

import memest
from memest.config import packages
from memest.errors import MissingDependencyError

BUILDS = {"torch": "cpu", "torchvision": "cu130"}


@pytest.fixture
def vision(tmp_path, monkeypatch):
    """A torchvision whose operators are not there, as one of another build has it."""
    own = tmp_path / "torchvision"
    own.mkdir()
    (own / "version.py").write_text("__version__ = '0.28.0+cu130'\ngit_version = 'abc'\n")
    (own / "__init__.py").write_text("import torch\ntorch.ops.torchvision.nms.default\n")
    meta = tmp_path / "torchvision-0.28.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (meta / "top_level.txt").write_text("torchvision\n")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "build_of", BUILDS.get)


def test_the_package_that_failed_is_blamed_and_not_the_one_that_imported_it(vision):
    pytest.importorskip("torch")
    with pytest.raises(AttributeError) as caught:
        importlib.import_module("torchvision")
    wrapped = ModuleNotFoundError("Could not import module 'LlamaConfig'")
    wrapped.__cause__ = caught.value

    broken = packages.broken_import(wrapped)
    assert isinstance(broken, MissingDependencyError)
    assert "torchvision is installed and cannot be imported (AttributeError:" in str(broken)
    assert "torchvision is built for cu130, and the installed torch for cpu" in str(broken)
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert f"pip uninstall -y torchvision; pip install {index} torchvision" in str(broken)


def test_a_model_by_name_says_it_too(vision):
    pytest.importorskip("torch")
    with pytest.raises(MissingDependencyError, match="torchvision is built for cu130"):
        memest.estimate("torchvision/resnet18", gpu="t4")


def test_errors_of_other_kinds_blame_no_package():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert packages.broken_import(caught.value) is None
    assert packages.broken_import(ModuleNotFoundError("no x", name="x")) is None


@pytest.mark.parametrize(
    ("builds", "words"),
    [(BUILDS, True), ({"torch": "cpu", "torchvision": "cpu"}, False), ({"torch": "cpu"}, False)],
    ids=str,
)
def test_a_build_for_another_torch(monkeypatch, builds, words):
    monkeypatch.setattr(packages, "is_there", lambda _: True)
    monkeypatch.setattr(packages, "build_of", lambda name: builds.get(name, ""))
    assert bool(packages.other_build("torchvision")) is words
