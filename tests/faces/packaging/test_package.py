"""What is shipped, and that it is what the tests test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

import memest
from memest.config.installed import DISTRIBUTION
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _is_editable():
    notes = [
        found.read_text("direct_url.json")
        for found in distributions(name=PROJECT["project"]["name"])
    ]
    return any(json.loads(said).get("dir_info", {}).get("editable") for said in notes if said)


def test_the_package_under_test_is_the_installed_one():
    if _is_editable():
        pytest.skip("installed as editable: the tree is what is installed")
    command = [sys.executable, "-c", "import memest; print(memest.__file__)"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for file in (memest.__file__, printed.stdout.strip()):
        assert not Path(file).is_relative_to(ROOT / "memest"), file


def _python(*words, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_a_clone_seen_from_above_does_not_hide_the_package(tmp_path):
    (tmp_path / "memest").mkdir()
    assert "estimate" in _python("-c", "import memest; print(memest.estimate)", cwd=tmp_path)


def test_a_tree_that_is_not_installed_is_whole():
    # -S: nothing that is installed is seen, so the tree is what "import memest" takes
    code = (
        "import memest.calibration; from memest.files.folders import data_folder as f; print(f())"
    )
    assert Path(_python("-S", "-c", code, cwd=ROOT).strip()) == ROOT / "data"


def test_every_package_folder_is_named():
    named = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {"memest": ROOT / "memest"} | {
        f"memest.{name}": ROOT / name for name in ("app", "calibration", "data")
    }
    found = {
        ".".join((package, *path.parent.relative_to(folder).parts))
        for package, folder in folders.items()
        for path in folder.rglob("__init__.py")
    }
    assert found == named


def test_every_data_file_is_installed():
    from memest.files.folders import data_folder

    tracked = subprocess.run(
        ["git", "ls-files", "data"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("no git checkout")
    folder = data_folder()
    for name in tracked:
        if name.startswith("data/measurements/"):
            continue  # what calibrations were made of stays with the source
        if Path(name).suffix in (".json", ".csv", ".gz"):
            assert (folder / Path(name).relative_to("data")).is_file(), name


def test_one_command_runs_it_without_installing():
    # pipx run and uvx start the script of the package's own name
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert set(PROJECT["project"]["scripts"]) == {"memest", DISTRIBUTION}
    assert set(PROJECT["project"]["scripts"].values()) == {"memest.cli.main:run"}


def test_no_page_or_message_tells_to_install_another_project():
    told = r"memest\[[a-z]|(pip install|pipx run|uvx)( +-[^ ]+)* +[\"']?memest([^-_a-z]|$)"
    here = f":!{Path(__file__).relative_to(ROOT)}"
    lines = subprocess.run(
        ["git", "grep", "-nE", told, "--", ":!CHANGELOG.md", here],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if lines.returncode > 1:
        pytest.skip("no git checkout")
    assert lines.stdout == ""


def test_what_people_cite_is_what_is_released():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert cited["version"] == PROJECT["project"]["version"]
    assert cited["license"] == PROJECT["project"]["license"]
    # what version 1.2.0 of the format requires
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(cited)
    assert all("name" in author or "family-names" in author for author in cited["authors"])
    assert cited["type"] in ("software", "dataset")
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert re.search(r"Version 2\.0", licence)


def test_constraints_cover_what_the_tests_install():
    wanted = PROJECT["project"]["optional-dependencies"]["test"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    names = {re.split(r"[\[>=<]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names - {"memest-gpu"} <= pinned
