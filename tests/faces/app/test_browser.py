"""The explorer in a real browser: inputs, verdict, a shared link, a download."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memest

pytest.importorskip("streamlit")

from memest.app.main import PAGES
from memest.units import format_size
from support.app_browser import (
    BROWSER,
    PATIENCE_MS,
    opened_browser,
    reads,
    rests,
    served,
    type_batch,
)

playwright_api = pytest.importorskip("playwright.sync_api")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("explorer")) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


def stands(page: Any) -> None:
    """Wait for the first input of a page; one whose socket was lost is loaded once more.

    What such a page showed is printed.
    """
    first = page.get_by_test_id("stMainBlockContainer").get_by_role("radio").first
    try:
        first.wait_for(timeout=PATIENCE_MS)
    except playwright_api.TimeoutError:
        print(page.url, page.inner_text("body"))  # noqa: T201 - shown where it fails after all
        page.reload()
        first.wait_for(timeout=PATIENCE_MS)


def url_has(page: Any, text: str) -> None:
    page.wait_for_function("text => location.search.includes(text)", arg=text, timeout=PATIENCE_MS)


def verdict_is(page: Any, text: str) -> None:
    page.locator(".mm-verdict b").get_by_text(text, exact=True).wait_for(timeout=PATIENCE_MS)


def is_drawn(page: Any) -> None:
    """Wait until no run is under way, and each kind of input is loaded."""
    page.wait_for_function(
        "() => !document.querySelector("
        "'[data-testid=stStatusWidget], [data-testid=stSkeleton], [data-stale=true]')",
        timeout=PATIENCE_MS,
    )


def device_peak(page: Any) -> str:
    return str(page.locator(".mm-peaks dd").last.inner_text())


def test_a_person_changes_a_run_shares_it_and_takes_it_along(
    explorer: str, browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=rtx-4090")
    verdict_is(page, "Fits")
    asked = memest.estimate("bert-large-uncased", gpu="rtx-4090")
    assert device_peak(page) == format_size(asked.peak.device_bytes)

    type_batch(page, 64)
    verdict_is(page, "Does not fit")
    url_has(page, "batch=64")

    page.get_by_role("radio", name="fp16", exact=True).click()
    url_has(page, "precision=fp16")
    type_batch(page, 32)
    url_has(page, "batch=32")
    verdict_is(page, "Fits")
    reads(page, "largest batch:")
    peak, link = device_peak(page), page.url

    other = browser.new_page(viewport={"width": 390, "height": 844})
    other.goto(link)
    reads(other, "largest batch:")
    assert device_peak(other) == peak

    page.get_by_role("radio", name="Take it along").click()
    with page.expect_download(timeout=PATIENCE_MS) as download:
        page.get_by_role("button", name="JSON").click()
    target = tmp_path / "estimate.json"
    download.value.save_as(target)
    command = [
        sys.executable, "-m", "memest", "estimate", "bert-large-uncased", "--batch", "32",
        "--precision", "fp16", "--gpu", "rtx-4090", "--json",
    ]  # fmt: skip
    printed = subprocess.run(
        command, check=True, capture_output=True,
        env={**os.environ, "MEMEST_HOME": str(tmp_path), "MEMEST_CACHE": str(tmp_path / "cache")},
    ).stdout  # fmt: skip
    assert target.read_bytes() == printed
    page.close()
    other.close()


def test_the_first_screen_has_question_verdict_and_cards(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(explorer)
    verdict_is(page, "Fits")
    page.locator(".mm-strip").wait_for(timeout=PATIENCE_MS)
    for words in ("Will it fit?", "Model", "GPU", "Method", "Batch", "Length", "All options"):
        place = page.get_by_text(words, exact=True).first.bounding_box()
        assert place["y"] + place["height"] < 720, words
    strip = page.locator(".mm-strip").bounding_box()
    assert strip["y"] + strip["height"] < 720
    page.close()


def test_a_card_is_found_by_what_people_call_it(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=h100")
    verdict_is(page, "Fits")
    box = page.locator(".st-key-gpu input")
    for typed, slug in (("t4", "t4"), ("4090", "rtx-4090"), ("h200", "h200")):
        rests(page)
        box.click()
        box.fill(typed)
        page.wait_for_timeout(300)
        box.press("Enter")
        url_has(page, f"gpu={slug}")
    page.close()


def test_back_leads_to_the_question_before(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=rtx-4090")
    verdict_is(page, "Fits")
    page.get_by_role("radio", name="bf16").click()
    url_has(page, "precision=bf16")
    type_batch(page, 128)
    verdict_is(page, "Does not fit")
    page.go_back()
    verdict_is(page, "Fits")
    batch = page.get_by_label("Batch", exact=True)
    playwright_api.expect(batch).to_have_value("8", timeout=PATIENCE_MS)  # drawn after the verdict
    assert "precision=bf16" in page.url
    page.close()


def test_one_step_back_leads_to_the_map_whose_cell_was_clicked(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{explorer}/fit-map?model=bert-large-uncased&gpu=t4&metric=allocated&seq_lens=128")
    reads(page, "7 points of bert-large-uncased")
    reads(page, "The largest batch at each length")
    is_drawn(page)
    chart = page.locator(".stVegaLiteChart canvas, .stVegaLiteChart svg").first
    chart.scroll_into_view_if_needed()
    place = chart.bounding_box()
    page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 3)
    verdict_is(page, "Fits")
    url_has(page, "seq_len=128")
    page.go_back()
    reads(page, "7 points of bert-large-uncased")
    assert page.url.startswith(f"{explorer}/fit-map?")
    url_has(page, "metric=allocated")
    page.close()


def test_inputs_stay_when_the_page_changes(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{explorer}/?batch=16&precision=bf16&gpu=t4")
    verdict_is(page, "Does not fit")
    page.get_by_role("link", name="Fit map").click()
    reads(page, "21 points of bert-large-uncased")
    url_has(page, "precision=bf16")
    url_has(page, "gpu=t4")
    page.get_by_role("link", name="Will it fit?").click()
    verdict_is(page, "Does not fit")
    url_has(page, "batch=16")
    page.close()


def test_what_an_error_says_to_do_is_a_click(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=rtx-4090&seq_len=1024")
    reads(page, "Use Length 512 or less.")
    page.get_by_role("button", name="Length 512").click()
    verdict_is(page, "Fits")
    url_has(page, "seq_len=512")
    page.close()


def test_the_pin_travels_with_the_link(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{explorer}/?model=bert-large-uncased")
    verdict_is(page, "Fits")
    page.get_by_role("button", name="Pin this").click()
    url_has(page, "pin=")
    type_batch(page, 9)
    reads(page, "Against the pinned scenario")
    other = browser.new_page(viewport={"width": 1280, "height": 900})
    other.goto(page.url)
    reads(other, "Against the pinned scenario")
    page.close()
    other.close()


EVERY_PAGE = [path for path in PAGES if path != "what-if"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", *EVERY_PAGE])
def test_no_page_is_wider_than_a_phone(explorer: str, browser: Any, path: str, theme: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=theme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{explorer}/{path}")
    stands(page)
    page.wait_for_timeout(1500)
    wide = page.evaluate(
        "() => { const e = document.querySelector('[data-testid=stMain]');"
        " return e.scrollWidth - e.clientWidth; }"
    )
    assert wide <= 0
    assert not errors
    assert page.get_by_test_id("stException").count() == 0
    page.close()


CUT_OFF = """() => [...document.querySelectorAll('.st-key-question, .st-key-tuning')]
  .flatMap(row => [...row.querySelectorAll('.stColumn')])
  .flatMap(column => [...column.querySelectorAll('button, label, input, [role=radio]')]
    .filter(e => e.getBoundingClientRect().right > column.getBoundingClientRect().right + 1)
    .map(e => e.innerText || e.ariaLabel))"""
"""What reaches beyond its column."""


@pytest.mark.parametrize("width", [700, 900])
def test_no_input_is_cut_off_on_a_small_screen(explorer: str, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=rtx-4090")
    verdict_is(page, "Fits")
    page.get_by_label("Length", exact=True).wait_for(timeout=PATIENCE_MS)
    is_drawn(page)
    cut_off = page.evaluate(CUT_OFF)
    assert cut_off == []
    # and would be, if they did not wrap
    page.add_style_tag(
        content=".stHorizontalBlock {flex-wrap:nowrap !important}"
        " .st-key-tuning .stColumn {min-width:0 !important; flex:1 1 5rem !important}"
    )
    assert page.evaluate(CUT_OFF)
    page.close()


HALF_SEEN = """() => [...document.querySelectorAll('.stMetric *, .stButtonGroup *, .st-key-menu')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != 'visible')
  .map(e => e.innerText)"""
"""Figures, choices and links that their place is too narrow for."""


@pytest.mark.parametrize("path", ["fit-map?gpu=t4&batches=8&seq_lens=128", "accuracy"])
def test_no_figure_or_choice_is_cut_off_on_a_tablet(explorer: str, browser: Any, path: str) -> None:
    page = browser.new_page(viewport={"width": 820, "height": 1180})
    page.goto(f"{explorer}/{path}")
    stands(page)
    page.locator(".stMetric, .stVegaLiteChart").first.wait_for(timeout=PATIENCE_MS)
    is_drawn(page)
    assert page.evaluate(HALF_SEEN) == []
    page.close()


SERIOUS = ("serious", "critical")
STATES = (
    "?gpu=t4&batch=64&tab=Timeline",
    "?model=no-such-model&batch=-5&tab=none",
    "?model=bert-large-uncased&gpu=t4&seq_len=1024",
    "calibration?model=bert-large-uncased&gpu=h100",
    "calibration?do=Measure",
    "calibration?do=Fit+a+profile",
)
"""What a page has besides what its path alone shows."""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["", *EVERY_PAGE, *STATES])
def test_axe_finds_nothing_serious(explorer: str, browser: Any, path: str, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=theme)
    page.goto(f"{explorer}/{path}")
    stands(page)
    is_drawn(page)
    found = Axe().run(page).response
    assert found["testEngine"]["name"] == "axe-core"
    assert page.evaluate("() => matchMedia('(prefers-color-scheme: dark)').matches") == (
        theme == "dark"
    )
    bad = [
        f"{rule['id']}: {node['html'][:200]}"
        for rule in found["violations"]
        if rule["impact"] in SERIOUS
        for node in rule["nodes"]
    ]
    assert not bad
    page.close()


def test_axe_finds_what_is_wrong(explorer: str, browser: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page()
    page.goto(explorer)
    verdict_is(page, "Fits")
    page.evaluate("() => { document.querySelector('.mm-bar').removeAttribute('aria-label') }")
    impacts = {rule["id"]: rule["impact"] for rule in Axe().run(page).response["violations"]}
    assert impacts["role-img-alt"] in SERIOUS
    page.close()


@pytest.mark.parametrize("path", ["", *(path for path in EVERY_PAGE if path != "accuracy")])
def test_five_tabs_lead_to_the_model(explorer: str, browser: Any, path: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/{path}")
    page.get_by_label("Length", exact=True).wait_for(timeout=PATIENCE_MS)
    page.get_by_role("link", name="How it works").wait_for(timeout=PATIENCE_MS)
    is_drawn(page)  # while a page is worked out, Streamlit has a button more, to stop it
    names = []
    for _ in range(5):
        page.keyboard.press("Tab")
        names.append(page.evaluate("() => document.activeElement.getAttribute('aria-label') || ''"))
    assert "Model" in names, names
    page.close()


def test_the_verdict_before_stays_while_a_model_is_traced(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=rtx-4090")
    verdict_is(page, "Fits")
    is_drawn(page)
    before = device_peak(page)
    box = page.locator(".st-key-model input")
    box.click()
    model = "meta-llama/Llama-3.1-8B?intermediate_size=13952"
    box.fill(model)
    page.get_by_role("option").filter(has_text=model).wait_for(timeout=PATIENCE_MS)
    box.press("Enter")
    # what was seen while it was worked out
    page.wait_for_function(
        "() => document.querySelector('.stExpander')?.innerText.includes('only the first time')"
        " && document.querySelector('[data-stale=true] .mm-verdict')",
        timeout=PATIENCE_MS,
        polling=20,
    )
    words = page.evaluate(
        "() => getComputedStyle(document.querySelector('.mm-verdict'), '::after').content"
    )
    assert "the question before" in words
    assert device_peak(page) == before
    assert box.input_value() == model
    assert page.locator("[data-stale=true] .st-key-model").count() == 0, "the question is not stale"
    page.wait_for_function(
        "before => [...document.querySelectorAll('.mm-peaks dd')].at(-1)?.innerText !== before",
        arg=before,
        timeout=PATIENCE_MS,
    )
    page.close()


def test_the_question_is_reached_with_the_keyboard(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/fit-map?model=bert-large-uncased&gpu=t4&batches=8&seq_lens=128")
    # a kind of input is loaded when it is first drawn, which can be after the answer
    page.get_by_label("Batch", exact=True).wait_for(timeout=PATIENCE_MS)
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=t4&batch=8")
    verdict_is(page, "Fits")
    page.get_by_label("Batch", exact=True).focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("16")
    page.keyboard.press("Enter")
    url_has(page, "batch=16")
    precision = page.get_by_role("radio", name="fp32")
    precision.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    url_has(page, "precision=")
    parts = page.get_by_role("radio", name="Parts")
    parts.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    url_has(page, "tab=")
    page.close()


def test_charts_say_what_they_show(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{explorer}/?gpu=t4&tab=Timeline")
    bar = page.locator(".mm-bar[role=img]")
    bar.wait_for(timeout=PATIENCE_MS)
    assert "activations" in bar.get_attribute("aria-label")
    words = "Memory by category at the highest moment"
    chart = page.locator(f".stVegaLiteChart[aria-label^='{words}']")
    chart.first.wait_for(state="attached", timeout=PATIENCE_MS)
    page.close()


def test_the_picture_and_the_parts_are_taken_along(
    explorer: str, browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{explorer}/?gpu=t4&tab=Take+it+along")
    verdict_is(page, "Fits")
    for name, start in (("PNG", b"\x89PNG"), ("CSV", b"part,bytes\n")):
        with page.expect_download(timeout=PATIENCE_MS) as download:
            page.get_by_role("button", name=name, exact=True).click()
        target = tmp_path / name
        download.value.save_as(target)
        assert target.read_bytes().startswith(start)
    page.close()


def test_the_links_to_the_pages_are_a_landmark_that_says_which_is_open(
    explorer: str, browser: Any
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{explorer}/?model=bert-large-uncased&gpu=t4")
    verdict_is(page, "Fits")
    menu = page.get_by_role("navigation", name="Pages")
    links = {
        title: menu.get_by_role("link", name=title, exact=True) for title, *_ in PAGES.values()
    }
    for link in links.values():
        link.wait_for(timeout=PATIENCE_MS)
    assert menu.get_by_role("link").count() == len(links)

    def is_current(title: str) -> None:
        menu.locator("[aria-current=page]").filter(has_text=title).wait_for(timeout=PATIENCE_MS)
        assert menu.locator("[aria-current]").count() == 1

    is_current("Will it fit?")
    links["Compare"].focus()
    page.keyboard.press("Enter")
    is_current("Compare")
    assert page.url.startswith(f"{explorer}/compare?")
    url_has(page, "gpu=t4")
    page.go_back()
    is_current("Will it fit?")
    # as a tab of its own, too
    assert links["Fit map"].evaluate("link => link.href") == f"{explorer}/fit-map"
    page.close()


def test_a_phone_shows_which_page_is_open(explorer: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{explorer}/calibration")
    link = page.get_by_role("link", name="Calibration", exact=True)
    link.wait_for(timeout=PATIENCE_MS)
    is_drawn(page)
    box = link.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.close()
