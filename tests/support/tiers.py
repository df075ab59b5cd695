"""Which tests are left to ``--full``: the mark ``slow``, on a test or on some of its cases.

@pytest.mark.slow                         the whole test
@pytest.mark.slow("gpt2", "t5-base")      these cases of its parameters
@pytest.mark.slow(but=("bert", "gpt2"))   all cases but these, which stand for the others
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from support.paths import TESTS

__all__ = [
    "FAST_AT_LEAST",
    "FAST_OF_FOLDER_AT_LEAST",
    "divide",
    "is_slow",
    "lopsided_folders",
    "misnamed_cases",
]

FAST_AT_LEAST = 0.8
"""Of all tests together."""
FAST_OF_FOLDER_AT_LEAST = 0.5
"""Of every folder of the tests."""


def is_slow(item: pytest.Item) -> bool:
    """Whether a test, or this case of it, is marked as slow."""
    return any(_covers(mark, _case(item)) for mark in item.iter_markers("slow"))


def divide(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the fast tier, and the slow ones, both in their order."""
    slow = [is_slow(item) for item in items]
    return (
        [item for item, left in zip(items, slow, strict=True) if not left],
        [item for item, left in zip(items, slow, strict=True) if left],
    )


def misnamed_cases(items: Iterable[pytest.Item]) -> list[str]:
    """Cases that a mark names and that no test has, as ``FILE::TEST: CASE``.

    Args:
        items: all cases of every test among them.
    """
    marked_cases: dict[str, set[str]] = {}
    there: dict[str, set[str]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        there.setdefault(test, set()).add(_case(item))
        for mark in item.iter_markers("slow"):
            marked_cases.setdefault(test, set()).update(mark.args, mark.kwargs.get("but", ()))
    return [
        f"{test}: {case}"
        for test, cases in marked_cases.items()
        for case in sorted(cases - there[test])
    ]


def lopsided_folders(fast: Sequence[pytest.Item], slow: Sequence[pytest.Item]) -> list[str]:
    """Folders of which too few tests are fast, with how many are; "tests" for all together.

    Args:
        fast: of the whole suite.
        slow: of the whole suite.
    """
    fast_of, slow_of = (Counter(_folder(item) for item in items) for items in (fast, slow))
    shares = {
        folder: (fast_of[folder], fast_of[folder] + slow_of[folder], FAST_OF_FOLDER_AT_LEAST)
        for folder in sorted(fast_of | slow_of)
    }
    shares[TESTS.name] = (len(fast), len(fast) + len(slow), FAST_AT_LEAST)
    return [
        f"{folder}: {few} of {every} are fast, {least:.0%} have to be"
        for folder, (few, every, least) in shares.items() if few < least * every
    ]  # fmt: skip


def _folder(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].rpartition("/")[0]


def _covers(mark: pytest.Mark, case: str) -> bool:
    if "but" in mark.kwargs:
        return case not in mark.kwargs["but"]
    return not mark.args or case in mark.args


def _case(item: pytest.Item) -> str:
    """The name of a test's case among its parameters; "" where it has none."""
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else callspec.id
