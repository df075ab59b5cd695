import json
from pathlib import Path

import pytest

import memest
from memest.app.main import PAGES
from memest.app.published import outcomes
from memest.app.views import how_it_works
from memest.calibration.fitting.example import example_pairs
from memest.calibration.fitting.fit import fit_calibration
from memest.events import Category, Phase
from memest.files.code_digest import made_with
from memest.units import format_size
from support.app_page import Open, metrics, texts, verdict


@pytest.mark.slow(
    but=(
        "accuracy",
        "calibration",
        "how-it-works",
    )
)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens(open_page: Open, page: str) -> None:
    app = open_page(page)
    assert not app.error
    assert app.markdown


@pytest.mark.parametrize(
    "page", [name for name in PAGES if name not in ("accuracy", "calibration")]
)
def test_every_page_says_what_is_wrong_in_a_sentence(open_page: Open, page: str) -> None:
    app = open_page(page, model="no-such-model-anywhere")
    assert "no-such-model-anywhere" in app.error[0].value


@pytest.mark.slow
def test_the_fit_map_says_what_fits(open_page: Open) -> None:
    app = open_page("fit-map", batches="8,64", seq_lens="128,512", gpu=["t4", "a100-40gb"])
    assert "8 points of bert-large-uncased on 2 GPUs" in texts(app)
    frontier = app.dataframe[-1].value
    answer = memest.max_batch("bert-large-uncased", gpu=["t4", "a100-40gb"], seq_len=512)
    assert list(frontier["largest batch"])[-2:] == [a.largest for a in answer.answers]


@pytest.mark.slow
def test_the_fit_map_shows_another_measure(open_page: Open) -> None:
    app = open_page("fit-map", batches="8", seq_lens="128", metric="headroom")
    assert app.button_group(key="metric").value == "headroom"
    app.select_slider(key="range batches").set_range(8, 32).run()
    assert app.query_params["batches"] == "8,16,32"
    assert "3 points" in texts(app)
    assert "NVIDIA GeForce" not in texts(app)  # one name of a card on the page


@pytest.mark.parametrize(
    ("batches", "seq_lens", "said"),
    [("64:1", "128", "runs backwards"), ("8", "long", "Length 'long'")],
)
def test_a_range_of_a_link_that_cannot_be_is_said_once(
    open_page: Open, batches: str, seq_lens: str, said: str
) -> None:
    app = open_page("fit-map", model="bert-large-uncased", batches=batches, seq_lens=seq_lens)
    (error,) = app.error
    assert said in error.value


def test_the_fit_map_needs_a_gpu(open_page: Open) -> None:
    assert "Name a GPU" in open_page("fit-map", gpu="").info[0].value


@pytest.mark.slow
def test_compare_shows_what_each_row_buys(open_page: Open) -> None:
    app = open_page("compare", vs="fp16; batch=4 checkpointing=full")
    table = app.dataframe[-1].value
    assert list(table["scenario"]) == ["base", "fp16", "batch=4 checkpointing=full"]
    found = memest.compare(
        "bert-large-uncased", ["fp16", "batch=4 checkpointing=full"], gpu="rtx-4090"
    )
    largest = [(s.estimate.max_batch, s.estimate.safe_batch) for s in found.scenarios]
    assert list(table["largest batch"]) == [f"{most}, {safe} safe" for most, safe in largest]
    app.text_input(key="vs").set_value("bach=4").run()
    assert "bach" in app.error[0].value
    app.text_input(key="vs").set_value("").run()
    assert "Add a scenario" in app.info[0].value


@pytest.mark.slow
def test_advise_ranks_plans(open_page: Open) -> None:
    app = open_page("advise", effective_batch="32", gpu=["t4", "l4"])
    # the precision that is shown is kept, as if it were named
    found = memest.advise("bert-large-uncased", gpu="t4", effective_batch=32, precision="fp32")
    assert len(app.dataframe[0].value) == len(found.plans)
    assert "first that is named" in texts(app)
    assert verdict(app) == "Fits"
    size = format_size(found.plans[0].estimate.peak.device_bytes)
    assert texts(app).count(size) == 1  # why it is the plan; the verdict does not say it again
    assert "--effective-batch 32" in app.code[-1].value
    app.toggle(key="any_precision").set_value(True).run()
    assert not app.exception
    assert "--any-precision" in app.code[-1].value


def test_accuracy_sums_up_published_runs(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        {"id": f"r{n}", "set": "s", "model": model, "family": model, "gpu": gpu, "run": "batch 1",
         "metric": "reserved", "measured_bytes": 1 << 30, "predicted_bytes": predicted,
         "low_bytes": None, "scored": True, "peak_at": "backward", "remark": "", "source": "",
         "error": predicted / (1 << 30) - 1}
        for n, (model, gpu, predicted) in enumerate(
            [("bert", "T4", 1 << 30), ("bert", "V100", 11 << 27), ("gpt2", "V100", 7 << 27)]
        )
    ]  # fmt: skip
    (tmp_path / "outcomes.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    monkeypatch.setenv("MEMEST_REFERENCE", str(tmp_path))
    monkeypatch.setattr("memest.app.published.data_folder", lambda: tmp_path / "none")
    runs[0]["outcome"] = {"made_with": made_with()}
    (tmp_path / "outcomes.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    app = open_page("accuracy")
    assert "2 of 3 predictions were made by another state of memest" in texts(app)
    assert metrics(app)["Runs"] == "3"
    assert metrics(app)["Worst"] == "+37.50%"
    app = open_page("accuracy", by="family", only="gpt2")
    assert metrics(app)["Runs"] == "1"
    assert metrics(app)["Worst"] == "-12.50%"


def test_the_ranges_of_all_readings_count(open_page: Open) -> None:
    told = [run["inside"] for run in outcomes() if run["inside"] is not None]
    assert len(told) > 12
    app = open_page("accuracy", by="set")
    assert metrics(app)["Readings in range"] == f"{sum(told)} of {len(told)}"
    table = next(f.value for f in app.dataframe if "readings in range" in f.value)
    rows = [row.split(" of ") for row in table["readings in range"] if " of " in row]
    assert [sum(map(int, part)) for part in zip(*rows, strict=True)] == [sum(told), len(told)]


@pytest.mark.slow
def test_the_fit_map_of_images_has_their_sizes(open_page: Open) -> None:
    pytest.importorskip("transformers")
    app = open_page("fit-map", model="google/vit-base-patch16-224", gpu="t4", batches="1,2")
    assert app.select_slider(key="range image_sizes").value == (224, 224)
    assert "2 points" in texts(app)


def test_what_a_link_says_is_shown_and_not_drawn(open_page: Open) -> None:
    app = open_page(model="![x](http://192.0.2.1/p.png)")
    said = app.error[0].value
    assert "![" not in said
    assert "[x]" not in said
    assert "![x](http://192.0.2.1/p.png)" in texts(app)


def test_every_phase_and_category_is_explained() -> None:
    assert set(how_it_works._CATEGORIES) == set(Category)
    assert set(how_it_works._PHASES) == set(Phase)


@pytest.mark.slow
def test_how_it_works_walks_through_the_phases(open_page: Open) -> None:
    app = open_page("how-it-works", phase="1 optimizer")
    assert "optimizer makes its states" in texts(app)
    answer = memest.estimate("bert-large-uncased", gpu="rtx-4090")
    assert f"{answer.peak.allocated_bytes:,} bytes" in texts(app)


def test_the_calibration_page_tells_its_story_by_a_simulated_example(open_page: Open) -> None:
    pytest.importorskip("sklearn")
    app = open_page("calibration", model="bert-large-uncased", gpu="t4")
    words = texts(app)
    assert "Predicted → measured → factor" in words
    assert "No profile of T4" in words
    assert "memest calibrate run --campaign standard" in words
    assert "A simulated example" in words
    factors, offsets = (table.value for table in app.table)
    parts = dict(zip(factors["part"], factors["factor"], strict=True))
    assert 1.05 < float(parts["activations"].removeprefix("× ")) < 1.07  # planted: 1.06
    fitted = dict(zip(offsets["what"], offsets["offset"], strict=True))
    context = next(size for what, size in fitted.items() if what.startswith("context"))
    assert 695 <= float(context.removesuffix(" MiB")) <= 705  # planted: 700 MiB


def test_the_example_is_a_real_fit_of_runs_that_say_they_are_simulated() -> None:
    pytest.importorskip("sklearn")
    pairs = example_pairs()
    assert example_pairs() == pairs
    assert {pair.measurement.environment.gpu for pair in pairs} == {"Simulated card"}
    calibration = fit_calibration(pairs)
    assert calibration.band.level == 0.9
    assert calibration.validation.error < calibration.validation.raw_error / 5
    assert calibration.validation.coverage > 0.85
