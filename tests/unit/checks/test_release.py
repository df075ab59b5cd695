"""What a release needs of the tree before anything is built."""

from __future__ import annotations

import pytest

from support.tools import load_tool

release = load_tool("release")

CHANGELOG = """# Changelog

## Unreleased

- Not out yet.

## 1.2.0 (2026-05-01)

- A thing people notice.

## 1.1.0 (2026-01-01)

- An older one.
"""


def test_the_tag_says_what_the_changelog_says_of_its_version():
    assert release.notes("1.2.0", CHANGELOG) == "- A thing people notice."
    assert release.notes("1.1.0", CHANGELOG) == "- An older one."


@pytest.mark.parametrize(
    ("version", "reason"),
    [("1.3.0", "has no section of 1.3.0"), ("1.2", "has no section of 1.2:")],
)
def test_a_version_that_the_changelog_does_not_know_is_not_released(version, reason):
    with pytest.raises(SystemExit, match=reason):
        release.notes(version, CHANGELOG)


def test_a_version_of_which_nothing_is_said_is_not_released():
    with pytest.raises(SystemExit, match="says nothing"):
        release.notes(
            "1.3.0",
            CHANGELOG.replace("Unreleased", "1.3.0 (2026-11-01)", 1).replace("- Not out yet.", ""),
        )


def test_the_tree_cites_the_version_it_would_release():
    assert release.project()["name"] == "memest-gpu"
    with pytest.raises(SystemExit, match="CITATION"):
        release.checked_versions("999.0.0")
