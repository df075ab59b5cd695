"""The score of largest batches beside timm's readings, and the page that shows it."""

from __future__ import annotations

import pytest

from support.paths import ROOT
from support.tools import load_tool

ladder = load_tool("timm_ladder")


def reading(ran, model="net", layout="nchw"):
    return ladder.Reading(model=model, layout=layout, image_size=224, param_millions=1.0, ran=ran)


def test_what_failed_is_the_next_larger_batch_of_the_ladder():
    assert reading(96).failed == 128
    assert reading(1).failed == 2
    assert reading(512).failed is None


@pytest.mark.parametrize(
    ("ran", "largest", "inside"),
    [
        (96, 95, 0),
        (96, 96, 1),
        (96, 127, 1),
        (96, 128, 0),
        (512, 511, 0),
        (512, 512, 1),
    ],
)
def test_inside_is_from_what_ran_to_below_what_failed(ran, largest, inside):
    assert ladder.score([(reading(ran), largest)]).inside == inside


def test_the_mean_place_is_of_rows_with_both_ends():
    result = ladder.score([(reading(96), 104), (reading(256), 352), (reading(512), 512)])
    assert result.place == pytest.approx((0.25 + 0.75) / 2)
    assert (result.rows, result.inside, result.too_low, result.too_high) == (3, 3, 0, 0)


def test_both_rows_of_a_model_are_in_one_half_and_the_draw_is_the_same_again():
    rows = ladder.readings()
    first = ladder.first_half(rows)
    assert len(rows) == 1006
    assert len({row.model for row in rows}) == 2 * len(first) == 504
    assert first == ladder.first_half(reversed(rows))
    assert sum(row.failed is None for row in rows) == 260


def test_the_page_says_what_is_kept():
    text = ladder.summary(ladder.readings(), ladder.kept())
    begin, end = "<!-- begin timm -->", "<!-- end timm -->"
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert page.split(begin)[1].split(end)[0].strip() == text.strip()
