"""The README shows what the tool prints, and its commands are the ones that are run."""

from __future__ import annotations

import importlib.util

import pytest

from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shown_output_is_the_real_one():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("readme_output", ROOT / "tools/readme_output.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    assert tool.with_output(README, tool.real_output()) == README, (
        "README.md has drifted: run python tools/readme_output.py"
    )


def test_both_commands_are_one_line_and_set_everything_up():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]

    assert len(commands) == 2
    assert commands[0].endswith("memest estimate bert-large-uncased --batch 8 --fp16")
    assert "-m pytest" in commands[1]
    assert all("-c constraints.txt" in command for command in commands)


EXAMPLES = [
    path for path in sorted([*ROOT.glob("examples/*"), *ROOT.glob("examples/*/*")])
    if path.is_file() and path.suffix != ".pyc"
]  # fmt: skip
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")),
    *(path for path in EXAMPLES if path.suffix == ".md"),
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    import re

    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.slow("cli_page-cli", "what_if_page-what-if")
@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("cli_page", "cli"),
        ("options_page", "options"),
        ("workspaces_page", "workspaces"),
        ("what_if_page", "what-if"),
    ],
)
def test_generated_pages_have_not_drifted(name, page):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    assert (ROOT / f"docs/{page}.md").read_text(encoding="utf-8") == tool.page(), (
        f"docs/{page}.md has drifted: run python tools/{name}.py"
    )


def test_every_page_is_in_the_index():
    import re

    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+)", index))
    files = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert linked == files | {"../examples/README.md"}


def test_every_example_is_on_its_page():
    import re

    folder = ROOT / "examples"
    linked = set(re.findall(r"\]\(([^)#]+)", (folder / "README.md").read_text(encoding="utf-8")))
    files = {path.relative_to(folder).as_posix() for path in EXAMPLES} - {"README.md"}

    assert {name for name in linked if not name.startswith("../")} == files
