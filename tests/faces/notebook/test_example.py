"""The notebooks of the examples run from their first cell to their last."""

from __future__ import annotations

import os

import pytest

from support.paths import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("transformers")

NOTEBOOKS = {
    "memory": (ROOT / "examples/memory.ipynb", {"text/html", "image/png"}),
    "colab": (ROOT / "examples/colab.ipynb", {"text/html"}),
}
"""By name: the file, and what it shows."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_shows_what_it_promises(name, monkeypatch, tmp_path):
    path, shown = NOTEBOOKS[name]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )  # fmt: skip
    client.execute(env=dict(os.environ))

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = set()
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            if name == "colab":  # traces, for which libraries are loaded that may warn
                assert "Traceback" not in output.get("text", ""), output
            else:
                assert output.get("name") != "stderr", output
            kinds |= set(output.get("data", ()))
    assert shown <= kinds
    assert all(cell.source.strip() for cell in cells)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_kept_without_outputs(name):
    notebook = nbformat.read(NOTEBOOKS[name][0], as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_one_for_colab_installs_before_it_imports():
    cells = nbformat.read(NOTEBOOKS["colab"][0], as_version=4).cells
    first, second, *_ = (cell.source for cell in cells if cell.cell_type == "code")
    assert "%pip install" in first
    assert "import memest" in second
