"""The strip of cards: which are in it, and which it calls the smallest that fits; fast."""

import pytest

pytest.importorskip("streamlit")

from memest.app.views.what_if import _strip
from memest.catalog.gpus import find_gpu
from memest.report.result import GpuFit, Verdict


def fit(name: str, usable: int, verdict: Verdict = Verdict.FITS) -> GpuFit:
    return GpuFit(
        name=find_gpu(name).name,
        usable_bytes=usable,
        verdict=verdict,
        headroom_bytes=usable - 1,
        device_bytes=1,
    )


COMMON = (fit("rtx-3060", 12), fit("t4", 16))


def test_the_card_that_was_asked_about_is_in_it() -> None:
    drawn = _strip((fit("gtx-1650", 4),), COMMON, [])
    assert "Smallest card that fits: GTX 1650" in drawn
    assert drawn.count("mm-asked") == 1


def test_a_common_card_that_was_asked_about_has_the_verdict_of_the_answer() -> None:
    drawn = _strip((fit("t4", 16, Verdict.TIGHT),), COMMON, [find_gpu("l4"), find_gpu("t4")])
    assert "≈ T4" in drawn
    assert drawn.count("T4</span>") == 1
    assert "Smallest card of those looked at that fits: RTX 3060" in drawn
    assert "… L4" in drawn
