"""The README shows what the tool prints, and its commands are the ones that are run."""

from __future__ import annotations

import importlib.util
import re
import tomllib

import pytest

from support.paths import ROOT
from support.tools import load_tool

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shown_output_is_the_real_one():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("readme_output", ROOT / "tools/readme_output.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    assert ROOT / "README.md" in tool.PAGES
    for page in tool.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tool.with_output(text) == text, (
            f"{page.name} has drifted: run python tools/readme_output.py"
        )


def test_both_commands_are_one_line_and_set_everything_up():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]

    assert len(commands) == 2
    assert commands[0].endswith("memest estimate bert-large-uncased --batch 8 --fp16")
    assert " -e . " in commands[0]  # no torch: what is asked comes with the package
    assert "-m pytest" in commands[1]
    assert all("-c constraints.txt" in command for command in commands)


EXAMPLES = [
    path for path in sorted([*ROOT.glob("examples/*"), *ROOT.glob("examples/*/*")])
    if path.is_file() and path.suffix != ".pyc"
]  # fmt: skip
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/cli").glob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *(path for path in EXAMPLES if path.suffix == ".md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_wheel_is_called_what_is_built():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    built = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"
    named = {
        name
        for page in (*PAGES, *EXAMPLES)
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"[\w.-]+\.whl", page.read_text(encoding="utf-8"))
    }
    assert named == {built}


@pytest.mark.slow("what_if_page-what-if")
@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("options_page", "options"),
        ("workspaces_page", "workspaces"),
        ("what_if_page", "what-if"),
    ],
)
def test_generated_pages_have_not_drifted(name, page):
    text = load_tool(name).page()

    assert (ROOT / f"docs/{page}.md").read_text(encoding="utf-8") == text, (
        f"docs/{page}.md has drifted: run python tools/{name}.py"
    )


def test_the_pages_of_the_commands_have_not_drifted():
    pages = load_tool("cli_page").pages()
    there = {path.name: path for path in (ROOT / "docs/cli").iterdir()}

    assert set(there) == set(pages)
    for name, text in pages.items():
        drifted = there[name].read_text(encoding="utf-8") != text
        assert not drifted, f"docs/cli/{name} has drifted: run python tools/cli_page.py"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+)", index))
    files = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    files |= {"cli/README.md"}  # which has its own, and is generated

    assert linked == files | {"../examples/README.md"}


def test_every_example_is_on_its_page():
    import re

    folder = ROOT / "examples"
    linked = set(re.findall(r"\]\(([^)#]+)", (folder / "README.md").read_text(encoding="utf-8")))
    files = {path.relative_to(folder).as_posix() for path in EXAMPLES} - {"README.md"}

    assert {name for name in linked if not name.startswith("../")} == files


def test_the_site_and_the_index_have_the_same_parts():
    import re

    yaml = pytest.importorskip("yaml")
    parts = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"][1:]

    def first(entry):
        while not isinstance(entry, str):
            entry = entry[0] if isinstance(entry, list) else next(iter(entry.values()))
        return entry

    site = {title: list(map(first, pages)) for part in parts for title, pages in part.items()}
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8").partition("\nExamples")[0]
    sections = [text.partition("\n") for text in re.split(r"^## ", index, flags=re.MULTILINE)[1:]]
    assert {
        title: re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", rows, re.MULTILINE)
        for title, _, rows in sections
    } == site
