"""Campaigns and fits of the explorer: how far they are, and their end by hand."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from memest.app import campaign_run
from memest.calibration.measurement import Status
from memest.calibration.store import MeasurementStore, default_store
from memest.errors import ConfigError, DeviceError
from memest.estimation.tracer import KNOWN_ALONE
from support.app_page import Open, texts

PATIENCE = 240.0


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device that every machine has stands in for a card."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr("memest.app.views.measure.measuring_devices", lambda: {"cpu": "processor"})
    campaign_run._runs.clear()
    yield
    campaign_run._end_all(campaign_run._runs())
    campaign_run._runs.clear()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def statuses() -> list[Status]:
    with MeasurementStore(default_store(), create=False) as store:
        assert store.running() == 0
        return [measurement.status for measurement in store.measurements()]


def test_without_a_card_the_page_says_so_and_gives_the_command(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_here() -> dict[str, str]:
        raise DeviceError("no NVIDIA driver answers on this machine (no library): name the card")

    monkeypatch.setattr("memest.app.views.measure.measuring_devices", none_here)
    app = open_page("calibration", do="Measure", campaign="standard")
    assert "There is no NVIDIA GPU" in texts(app)
    assert "runs on: no NVIDIA driver answers on this machine (no library). Nothing" in texts(app)
    assert app.code[0].value == "memest calibrate run --campaign standard"
    assert "measure_now" not in [button.key for button in app.button]


def test_strangers_measure_and_fit_nothing(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOWN_ALONE, "1")
    app = open_page("calibration", do="Measure")
    assert app.button_group(key="do").options == ["What it does", "Profiles"]
    assert "do=Measure of the link was left out" in texts(app)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_a_campaign_is_stopped_and_goes_on_where_it_was(open_page: Open) -> None:
    app = open_page("calibration", do="Measure", campaign="smoke")
    app.button(key="measure_now").click().run()
    run = campaign_run.latest()
    assert run is not None
    assert run.under_way
    assert "0 of 4 cases" in app.get("progress")[0].proto.text
    assert "memest calibrate run --campaign smoke --device cpu" in texts(app)
    with pytest.raises(ConfigError, match="smoke runs on this machine"):
        campaign_run.start("quick", "cpu")
    wait_until(lambda: run.cases_over == 1)
    app.button(key="stop_campaign").click().run()
    wait_until(lambda: not run.under_way)
    assert run.seconds < PATIENCE
    kept = statuses()
    assert kept[0] is Status.OK  # what was measured before is there
    assert kept[1:] in ([], [Status.INTERRUPTED])
    app.run()
    assert "smoke was stopped after 1 of 4 cases" in texts(app)

    app.button(key="measure_now").click().run()
    again = campaign_run.latest()
    assert again is not None
    assert again is not run
    wait_until(lambda: not again.under_way)
    assert statuses().count(Status.OK) == 4
    assert "1/4 cases: 1 measured before, or being measured" in again.lines  # not measured twice
    app.run()
    assert "4 of 4 cases" in app.success[0].value
    app.button(key="fit_it").click().run()
    assert app.selectbox(key="fit_from").value == "this machine's store"
    assert f"{len(statuses())} runs were read" in texts(app)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_a_campaign_ends_with_the_server_even_if_it_hears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = tmp_path / "sitecustomize.py"
    deaf.write_text("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(campaign_run, "_PATIENCE_SECONDS", 1.0)
    run = campaign_run.start("smoke", "cpu")
    wait_until(lambda: run.cases_over == 1)
    campaign_run._end_all([run])
    wait_until(lambda: not run.under_way)
    kept = statuses()
    assert kept[0] is Status.OK
    assert kept[1:] in ([], [Status.INTERRUPTED])


def test_a_campaign_that_cannot_start_says_why(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign_run._runs.clear()
    monkeypatch.setattr("memest.app.views.measure.measuring_devices", lambda: {"cuda:9": "card"})
    store = Path(os.environ["MEMEST_HOME"]) / "calibration.db"
    store.parent.mkdir(parents=True)
    store.write_text("no store\n" * 100)
    app = open_page("calibration", do="Measure")
    app.button(key="measure_now").click().run()
    run = campaign_run.latest()
    assert run is not None
    wait_until(lambda: not run.under_way)
    app.run()
    assert "quick ended with something wrong, after 0 of" in texts(app)
    assert "is not a store of measurements" in texts(app)
    campaign_run._runs.clear()


def test_a_fit_is_stopped(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from memest.app import waiting
    from memest.calibration.exchange import export_records
    from support.simulated_runs import simulate

    pairs = tuple(simulate())[:6]
    by_run = {pair.measurement.run: pair for pair in pairs}
    lines = "\n".join(export_records([pair.measurement for pair in pairs])).encode()
    predicted: list[str] = []
    stops: list[threading.Event] = []

    def slow_pair(measurement):
        stops.append(waiting._listener.stop)
        predicted.append(measurement.run)
        if len(predicted) == 2:  # as the button does it
            stops[0].set()
        return by_run[measurement.run]

    monkeypatch.setattr("memest.app.records.pair", slow_pair)
    app = open_page("calibration", do="Fit a profile")
    app.file_uploader(key="records").set_value(("campaign.jsonl", lines, "application/json"))
    app.run()
    app.button(key="fit_now").click().run()
    assert not app.exception
    assert len(predicted) == 2
    assert "The fit was stopped, and changed nothing" in texts(app)
    assert "profile_json" not in [button.key for button in app.get("download_button")]
