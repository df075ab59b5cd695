"""The Python of every page, block after block, and its other examples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.paths import RUN_CONFIGURATIONS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.blocks import PAGES, ROOT, blocks, name_of

READERS = RUN_CONFIGURATIONS
WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def given(page: str, folder: Path) -> dict[str, object]:
    """What the text around a page's code takes for granted: names, and files in the folder."""
    import memest

    names: dict[str, object] = {"__name__": "page", "memest": memest}
    if page == "README.md":
        x = torch.zeros(4, 8)
        names |= {"my_module": torch.nn.Linear(8, 8), "x": x, "y": x}
    if page == "docs/configs.md":
        arguments = json.loads((READERS / "training_args.json").read_text(encoding="utf-8"))
        (folder / "args.yaml").write_text(json.dumps({"model_name_or_path": "gpt2", **arguments}))
        shutil.copy(READERS / "accelerate_ddp.yaml", folder / "accelerate.yaml")
    if page == "docs/growth.md":
        shutil.copy(ROOT / "tests/support/memory.csv", folder)
    if page == "docs/lengths.md":
        names["dataset"] = [{"input_ids": [1] * length} for length in (3, 5)]
    if page == "docs/out-of-memory.md":
        names["text"] = "CUDA out of memory. Tried to allocate 2.00 MiB"
    if page == "docs/validation.md":
        (record,) = blocks(ROOT / page, "json")
        (folder / "measurements.jsonl").write_text(json.dumps(json.loads(record)) + "\n")
    return names


@pytest.mark.slow("docs/configs.md", "docs/in-training.md", "docs/what-if.md", "docs/validation.md")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMEST_STORE", str(tmp_path / "store.db"))
    names = given(name_of(page), tmp_path)
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page}, block {number}", "exec"), names)


def test_the_campaign_of_the_calibration_page_is_read(tmp_path):
    from memest.calibration.campaign import read_campaign

    (text,) = blocks(ROOT / "docs/calibration.md", "toml")
    (tmp_path / "mine.toml").write_text(text)

    assert len(read_campaign(str(tmp_path / "mine.toml")).cases) == 6


def test_blocks_are_of_languages_that_are_run_or_shown():
    """A block in a language that no test looks at would go unread."""
    import re

    for page in PAGES:
        fences = re.findall(r"^```(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences) <= {"sh", "bash", "python", "toml", "json", "text"}, page
