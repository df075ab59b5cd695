"""verl's own functions beside the step that is priced: what was recorded of release 0.9.1.

``tools/record_verl.py`` runs them on the CPU; verl itself is not installed here.
"""

from __future__ import annotations

import json

import pytest

from memest.trace.losses.verl import value_step, verl_step
from support.tools import load_tool

tool = load_tool("record_verl")
RECORDED = json.loads(tool.RECORDED.read_text(encoding="utf-8"))


def _ours(name):
    case = tool.CASES[name]
    ours = value_step if case.get("values") else verl_step

    def step(model, batch):
        return ours(model, None, batch)

    return tool.summary(tool.run(step, case))


@pytest.mark.parametrize("name", [n for n in tool.CASES if n.startswith("one")])
def test_a_step_of_one_sequence_allocates_what_verl_s_does(name):
    assert len(RECORDED[name]["births"]) > 40
    assert _ours(name)["births"] == RECORDED[name]["births"]


@pytest.mark.parametrize("name", tool.CASES)
def test_what_lives_through_each_phase_is_what_lives_in_verl_s(name):
    """Of several sequences what is cut out one by one there, of 4,400 bytes here, is joined."""
    several = 0 if name.startswith("one") else 4 * 4400
    pairs = zip(_ours(name)["phases"], RECORDED[name]["phases"], strict=True)

    for (phase, alive, peak), (same, their_alive, their_peak) in pairs:
        assert phase == same
        assert abs(alive - their_alive) <= 2048 + several, phase
        assert abs(peak - their_peak) <= 2048 + several, phase
