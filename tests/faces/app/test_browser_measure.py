"""A campaign and a fit in a real browser: how far they are, and their end by a click."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("playwright.sync_api")
pytest.importorskip("accelerate")

from memest.calibration.measurement import Status
from memest.calibration.store import MeasurementStore
from support.app_browser import BROWSER, PATIENCE_MS, opened_browser, reads, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here"),
]
DATA = Path(__file__).parents[3] / "data"
ON_A_CPU = f"""
from pathlib import Path

from memest.app import records
from memest.app.main import run
from memest.app.views import measure

measure.measuring_devices = lambda: {{"cpu": "processor"}}
records.data_folder = lambda: Path({str(DATA)!r})
run()
"""
"""The explorer, for which a device that every machine has stands in for a card.

Its records are those of the checkout: they do not come with the wheel."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def explorer(home: Path) -> Iterator[str]:
    script = home / "explorer.py"
    script.write_text(ON_A_CPU)
    with served(home, script) as url:
        yield url


@pytest.fixture
def page() -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser.new_page(viewport={"width": 1280, "height": 900})


def measuring(home: Path) -> list[str]:
    """What runs besides the server itself: the campaign, the parent of its workers, a worker."""
    mark = f"MEMEST_HOME={home}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                inherits = mark in (process / "environ").read_bytes().split(b"\0")
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # it has ended, or is not ours
            if inherits and (b"calibrate run" in words or b"--nursery" in words):
                found.append(words.decode(errors="replace"))  # one that ends may show any bytes
    return found


def statuses(home: Path) -> list[Status]:
    with MeasurementStore(home / "calibration.db", create=False) as store:
        assert store.running() == 0
        return [measurement.status for measurement in store.measurements()]


def click(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click(timeout=PATIENCE_MS)


def test_a_campaign_shows_how_far_it_is_and_is_stopped_by_a_click(
    explorer: str, page: Any, home: Path
) -> None:
    page.goto(f"{explorer}/calibration?do=Measure&campaign=smoke")
    click(page, "Measure")
    reads(page, "smoke: 1 of 4 cases")  # the page goes on by itself
    assert float(page.get_by_role("progressbar").get_attribute("aria-valuenow")) == 25
    assert len(measuring(home)) >= 2
    click(page, "Stop")
    reads(page, "smoke was stopped after")
    assert not measuring(home)
    kept = statuses(home)
    assert kept[0] is Status.OK
    assert set(kept[1:]) <= {Status.OK, Status.INTERRUPTED}
    done = kept.count(Status.OK)

    click(page, "Measure")
    reads(page, f"{done}/4 cases: {done} measured before")  # counted at once, and not run again
    reads(page, "smoke is over: 4 of 4 cases")
    assert statuses(home).count(Status.OK) == 4
    assert not measuring(home)

    click(page, "Measure")
    reads(page, "4/4 cases: 4 measured before")
    reads(page, "smoke is over: 4 of 4 cases")
    page.get_by_role("button", name="Fit a profile to it").wait_for(timeout=PATIENCE_MS)


def test_a_fit_shows_how_far_it_is_and_is_stopped_by_a_click(explorer: str, page: Any) -> None:
    page.goto(f"{explorer}/calibration?do=Fit+a+profile&fit_from=nvidia-h200-torch-2.11.jsonl.gz")
    click(page, "Fit a profile")
    reads(page, "predicting ")
    page.get_by_role("progressbar").wait_for(timeout=PATIENCE_MS)
    click(page, "Stop")
    reads(page, "The fit was stopped, and changed nothing")
    assert page.get_by_role("button", name="Keep").count() == 0
    click(page, "Fit a profile")  # and goes on from what was predicted
    reads(page, "predicting ")
    click(page, "Stop")
    reads(page, "The fit was stopped, and changed nothing")
