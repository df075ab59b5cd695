"""Tiers: what is left to ``--full``, and marks that name a case that is not there."""

from __future__ import annotations

import pytest

from support.paths import TESTS

SUITE = """
import pytest

@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_unmarked(name): pass

@pytest.mark.slow
def test_whole(): pass

@pytest.mark.slow("b")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_case(name): pass

@pytest.mark.slow(but=("b",))
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_all_but_one(name): pass

@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_by_parameter(name): pass
"""
FAST = {
    "test_unmarked[a]", "test_unmarked[b]", "test_unmarked[c]", "test_one_case[a]",
    "test_one_case[c]", "test_all_but_one[b]", "test_by_parameter[a]",
}  # fmt: skip
SLOW = {
    "test_whole", "test_one_case[b]", "test_all_but_one[a]", "test_all_but_one[c]",
    "test_by_parameter[b]",
}  # fmt: skip


@pytest.fixture
def suite(pytester, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE", "unused")  # the inner run has a folder of its own
    pytester.makepyfile(test_suite=SUITE)
    pytester.makeconftest((TESTS / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini(
        f"[pytest]\npythonpath = {TESTS}\nmarkers =\n    slow: left to --full\n"
        "addopts = --strict-markers --import-mode=importlib -p no:randomly\n"
    )

    def ran(*arguments):
        found = pytester.runpytest_inprocess("-v", *arguments)
        lines = [line.partition("::")[2].split() for line in found.outlines if "::" in line]
        return found, {words[0] for words in lines if "PASSED" in words}

    return ran


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("test_suite.py",), FAST),
        (("test_suite.py", "--full"), FAST | SLOW),
        (("test_suite.py", "--full", "-m", "slow"), SLOW),
        (("test_suite.py", "-m", "not slow"), FAST),
        (("test_suite.py::test_whole", "test_suite.py::test_one_case"),
         {"test_whole", *(f"test_one_case[{c}]" for c in "abc")}),
    ],
    ids=["fast", "full", "slow", "not slow", "by name"],
)  # fmt: skip
def test_every_test_is_in_one_tier(suite, arguments, expected):
    _, ran = suite(*arguments)
    assert ran == expected


def test_a_case_that_is_not_there_is_told(suite, pytester):
    pytester.makepyfile(test_more=SUITE.replace('slow("b")', 'slow("d")'))
    found, ran = suite("test_more.py")
    assert not ran
    assert "test_more.py::test_one_case: d" in found.stderr.str() + found.stdout.str()


def test_a_suite_that_is_mostly_slow_is_told(suite, pytester):
    # the folder of the conftest is the whole suite
    found, ran = suite(str(pytester.path))
    assert not ran
    assert "tests: 7 of 12 are fast, 80% have to be" in found.stderr.str() + found.stdout.str()
