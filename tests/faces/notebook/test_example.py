"""The notebook of the docs runs from its first cell to its last."""

from __future__ import annotations

import os

import pytest

from support.paths import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("transformers")

NOTEBOOK = ROOT / "docs/examples/memory.ipynb"


@pytest.mark.slow
def test_it_runs_and_shows_what_it_promises(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
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
            assert output.get("name") != "stderr", output
            kinds |= set(output.get("data", ()))
    assert {"text/html", "image/png"} <= kinds
    assert all(cell.source.strip() for cell in cells)


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
