"""PEFT's comparison of its methods: what is kept of it, and the page that is made of that."""

from __future__ import annotations

import pytest

from memest.profiles.stream import Stream
from memest.units import MIB
from support.tools import load_tool


@pytest.fixture(scope="module")
def tool():
    return load_tool("adapters_published")


def _row(tool, name, mib, **changes):
    return {
        "id": name, "model": "meta-llama/Llama-3.2-3B", "max_reserved_bytes": mib * MIB,
        "mean_allocated_bytes": mib * MIB, "trained_parameters": 8, **changes,
    }  # fmt: skip


def _outcome(name, mib, **changes):
    return {
        "id": name, "seq_len": 512, "predicted_bytes": [n * MIB for n in (mib - 9, mib, mib + 30)],
        "bound_bytes": 2 * mib * MIB, "settled_len": 99, "settled_bytes": (mib - 1) * MIB,
        "trained_parameters": 8, "evaluation_bytes": 5 * MIB, **changes,
    }  # fmt: skip


def test_differences_to_the_reference_are_scored(tool):
    rows = [
        _row(tool, tool.REFERENCE, 100), _row(tool, "a", 130), _row(tool, "b", 90),
        _row(tool, "c", 500), _row(tool, "d", 100),
    ]  # fmt: skip
    outcomes = {
        tool.REFERENCE: _outcome(tool.REFERENCE, 101),
        "a": _outcome("a", 141),
        "b": _outcome("b", 31),
        "c": _outcome("c", 900, trained_parameters=9),
        "d": {"id": "d", "seq_len": 512, "failure": "it cannot be."},
    }
    text = "\n".join(tool.table(rows, outcomes))

    assert "median 35 MiB off over 2 rows" in text  # 10 and 60
    assert "**missed**" in text
    assert "1 of 2 are above their measurement" in text
    assert "median 35.0 MiB off, at texts of 99 tokens" in text
    assert "| a | 30 | 10 | 30 | 40 | 10 | 152 | 5 |  |" in text
    assert "8 numbers trained, 9 here; not scored" in text
    assert text.endswith("Not predicted: d (it cannot be).")


def test_the_cache_is_given_back_in_front_of_every_step_but_the_first(tool):
    from memest.events import Mark, Phase

    stream = Stream(
        mark_positions=[0, 3, 5, 8, 9],
        marks=[Mark(Phase.LOAD, 0, 0), Mark(Phase.BATCH, 1, 1), Mark(Phase.FORWARD, 1, 1),
               Mark(Phase.BATCH, 2, 1), Mark(Phase.FORWARD, 2, 1)],
    )  # fmt: skip

    assert tool.empties(stream) == (8,)
    assert tool.empties(stream, (3,)) == ()


def test_the_difference_is_the_median_of_lengths_around(tool):
    rows = [_row(tool, tool.REFERENCE, 100), _row(tool, "a", 130)]
    odd = _outcome("a", 0, predicted_bytes=[(101 - 9 + 40) * MIB, 900 * MIB, (131 + 20) * MIB])
    outcomes = {tool.REFERENCE: _outcome(tool.REFERENCE, 101), "a": odd}

    assert "median 10 MiB off over 1 rows" in "\n".join(tool.table(rows, outcomes))


def test_what_is_kept_is_of_every_row_and_stands_on_the_page(tool):
    rows, outcomes = tool.read_rows(), tool._kept()

    assert {row["id"] for row in rows} == set(outcomes)
    assert "\n".join(tool.table(rows, outcomes)) in tool.PAGE.read_text(encoding="utf-8")
