import json

import pytest

import memest
from memest.app.question import ExplorerQuestion
from memest.units import format_delta, format_size
from support.app_page import Open, metrics, texts

MODEL = "bert-large-uncased"
SMALL = "prajjwal1/bert-tiny"
"""For questions that no shipped profile answers."""


def test_the_first_page_answers_at_once_with_verdict_headroom_and_peaks(open_page: Open) -> None:
    app = open_page()
    answer = memest.estimate(MODEL, gpu="rtx-4090")
    assert metrics(app) == {
        "Allocated": format_size(answer.peak.allocated_bytes),
        "Reserved": format_size(answer.peak.reserved_bytes),
        "Device": format_size(answer.peak.device_bytes),
    }
    words = texts(app)
    assert "Fits" in app.markdown[0].value
    assert "headroom +" in app.markdown[1].value
    assert f"**Largest batch:** {answer.max_batch}" in words
    assert "memest estimate bert-large-uncased --gpu rtx-4090" in words


@pytest.mark.slow
def test_a_link_brings_its_inputs(open_page: Open) -> None:
    app = open_page(
        model="gpt2", batch="4", seq_len="256", precision="fp16", gpu=["v100", "t4"],
        checkpointing="full", optim="sgd", grad_accum="2", padded="true",
    )  # fmt: skip
    assert app.code[0].value == (
        "memest estimate gpt2 --batch 4 --seq-len 256 --grad-accum 2 --padded --precision fp16 "
        "--optim sgd --checkpointing full --gpu v100 --gpu t4"
    )
    answer = memest.estimate(
        "gpt2", batch=4, seq_len=256, fp16=True, gpu=["v100", "t4"], checkpointing=True,
        optim="sgd", grad_accum=2, padded=True,
    )  # fmt: skip
    assert metrics(app)["Device"] == format_size(answer.peak.device_bytes)


def test_values_that_cannot_be_are_dropped_from_a_link(open_page: Open) -> None:
    app = open_page(batch="-3", precision="fp8")
    assert app.number_input(key="batch").value == 8
    assert not app.error


def test_the_verdict_changes_with_the_batch(open_page: Open) -> None:
    app = open_page()
    assert "Fits" in app.markdown[0].value
    app.number_input(key="batch").set_value(64).run()
    assert not app.exception
    assert "Does not fit" in app.markdown[0].value
    assert "headroom -" in app.markdown[1].value
    assert "--batch 64" in app.code[0].value


def test_what_makes_it_fit_is_one_click_away(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu=["t4"], precision="fp16", batch="64")
    assert "Does not fit" in app.markdown[0].value
    options = {"batch": 64, "precision": "fp16", "gpu": "t4"}
    found = memest.suggest(MODEL, **options)
    buttons = {b.key: b for b in app.button if str(b.key).startswith("apply ")}
    assert list(buttons) == [f"apply {change.arguments}" for change in found.changes]
    gains = [format_delta(-change.gain_bytes) for change in found.changes]
    assert all(gain in texts(app) for gain in gains)

    buttons["apply --checkpointing full"].click().run()
    assert not app.exception
    assert "Fits" in app.markdown[0].value
    assert "--checkpointing full" in app.code[0].value


@pytest.mark.slow
def test_each_input_reaches_the_question(open_page: Open) -> None:
    app = open_page(model=SMALL)
    app.selectbox(key="optim").set_value("sgd_momentum").run()
    app.selectbox(key="dtype").set_value("bfloat16").run()
    app.selectbox(key="attn_implementation").set_value("eager").run()
    app.selectbox(key="checkpointing").set_value("full").run()
    app.number_input(key="grad_accum").set_value(2).run()
    app.number_input(key="seq_len").set_value(128).run()
    app.multiselect(key="gpu").set_value(["l4"]).run()
    assert not app.exception
    assert app.code[0].value == (
        f"memest estimate {SMALL} --seq-len 128 --grad-accum 2 --dtype bfloat16 --optim "
        "sgd_momentum --checkpointing full --attn-implementation eager --gpu l4"
    )


@pytest.mark.slow(
    but=(
        "tf32-toggle-True---tf32",
        "gpu_memory-text_input-20GiB---gpu-memory 20GiB",
        "device_context-text_input-600MiB---device-context 600MiB",
    )
)
@pytest.mark.parametrize(
    ("key", "kind", "value", "flag"),
    [
        ("num_labels", "number_input", 5, "--num-labels 5"),
        ("num_steps", "number_input", 2, "--steps 2"),
        ("max_grad_norm", "number_input", 0.5, "--max-grad-norm 0.5"),
        ("tf32", "toggle", True, "--tf32"),
        ("padded", "toggle", True, "--padded"),
        ("software", "text_input", "torch=2.6", "--software torch=2.6"),
        ("alloc_conf", "text_input", "expandable_segments:True", "--alloc-conf"),
        ("gpu_memory", "text_input", "20GiB", "--gpu-memory 20GiB"),
        ("device_context", "text_input", "600MiB", "--device-context 600MiB"),
        ("task", "selectbox", "sequence-classification", "--task sequence-classification"),
        ("zero_grad", "segmented_control", "zero", "--zero-grad zero"),
        ("use_cache", "segmented_control", "no", "--no-use-cache"),
    ],
)
def test_every_kind_of_further_option_works(
    open_page: Open, key: str, kind: str, value: object, flag: str
) -> None:
    app = open_page(model=SMALL)
    if kind == "segmented_control":
        kind = "button_group"
    getattr(app, kind)(key=key).set_value(value).run()
    assert not app.exception
    assert not app.error
    assert flag in app.code[0].value


@pytest.mark.slow
def test_the_json_is_what_the_command_line_prints(
    open_page: Open, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memest.cli.main import run

    offered: dict[str, object] = {}

    def record(self: object, label: str, data: object, *_: object, **__: object) -> bool:
        offered[label] = data
        return False

    monkeypatch.setattr("streamlit.delta_generator.DeltaGenerator.download_button", record)
    question = ExplorerQuestion.of(
        MODEL, {"batch": 4, "precision": "fp16", "gpu": ("rtx-3090", "t4")}
    )
    open_page(batch="4", precision="fp16", gpu=["rtx-3090", "t4"])
    assert run([*question.words("estimate")[1:], "--json"]) == 0
    assert capsys.readouterr().out == offered["JSON"]
    answer = json.loads(str(offered["JSON"]))
    assert answer["setup"]["batch"] == 4
    rows = str(offered["CSV"]).splitlines()[1:]
    assert sum(int(row.rpartition(",")[2]) for row in rows) == answer["peak"]["device_bytes"]
    picture = offered["PNG"]
    assert callable(picture)
    assert picture().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"model": "no-such-model-anywhere"}, "no-such-model"),
        ({"model": "os:system"}, "names Python code"),
        ({"model": "/etc/passwd"}, "opens no file of this machine"),
        ({"adapter": "/etc/passwd"}, "reads no files of this machine"),
        ({"quantization": "~/.netrc"}, "reads no files of this machine"),
        ({"pin": "gpt2 peft-config=/etc/passwd"}, "reads no files of this machine"),
        ({"pin": "gpt2 '"}, "cannot be read as a scenario"),
        ({"gpu": "rtx-9999"}, "no GPU is called"),
        ({"checkpointing": "every_n:0"}, "every_n:0"),
        ({"software": "torch=banana"}, "torch"),
        ({"alloc_conf": "nonsense"}, "nonsense"),
        ({"precision": "fp16", "dtype": "float16"}, "cannot train"),
        ({"gpu_memory": "lots"}, "not a size"),
    ],
)
def test_an_error_is_its_sentence(open_page: Open, inputs: dict[str, str], said: str) -> None:
    app = open_page(**inputs)
    assert len(app.error) >= 1
    assert said in texts(app)
    assert "Traceback" not in texts(app)
    assert "Unexpected" not in texts(app)


def test_a_file_of_the_machine_is_not_read_for_a_link(open_page: Open, tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "config.json"
    path.write_text('{"model_type": "bert"}')
    app = open_page(model=str(path))
    assert "upload its config.json" in app.error[0].value


def test_pinning_shows_every_change_as_a_difference_with_its_reason(open_page: Open) -> None:
    app = open_page()
    assert all(not metric.delta for metric in app.metric)
    app.button(key="pin_now").click().run()
    assert app.text_input(key="pin").value == "bert-large-uncased gpu=rtx-4090"
    app.number_input(key="batch").set_value(16).run()
    assert not app.exception
    assert all(metric.delta.startswith("+") for metric in app.metric[:3])
    assert "Against the pinned scenario" in texts(app)
    assert "activations" in texts(app)
    app.button(key="unpin").click().run()
    assert all(not metric.delta for metric in app.metric)


@pytest.mark.slow
def test_a_pinned_scenario_comes_with_the_link(open_page: Open) -> None:
    app = open_page(pin="bert-large-uncased batch=4 fp16", batch="8")
    assert all(metric.delta for metric in app.metric[:3])
    app = open_page(pin="bert-large-uncased bach=4")
    assert "bach" in app.error[0].value


def test_without_a_gpu_the_common_ones_are_shown(open_page: Open) -> None:
    app = open_page(gpu="")
    assert "No gpu named" in app.markdown[0].value
    assert "headroom" in app.dataframe[0].value
    assert len(app.dataframe[0].value) > 10


def test_the_breakdown_adds_up_to_the_device_peak(open_page: Open) -> None:
    app = open_page()
    table = app.dataframe[1].value
    *parts, total = list(table["bytes"])
    assert sum(parts) == total


@pytest.mark.parametrize(
    "question",
    [
        ExplorerQuestion.of("gpt2", {"batch": 4, "precision": "fp16", "gpu": ("t4",)}),
        ExplorerQuestion.of(
            "a/b", {"use_cache": False, "padded": True, "software": "torch=2.6,cuda=12.4"}
        ),
        ExplorerQuestion.of("gpt2?n_layer=4", {"max_grad_norm": 0.5, "freeze": ("a b",)}),
        ExplorerQuestion("gpt2"),
    ],
)
def test_a_question_survives_its_short_text(question: ExplorerQuestion) -> None:
    again = ExplorerQuestion.from_short(question.short())
    assert again.model == question.model
    assert again.setup == question.setup
    assert again.gpus == question.gpus


@pytest.mark.slow
def test_the_snippet_is_python_that_answers() -> None:
    question = ExplorerQuestion.of(MODEL, {"batch": 4, "precision": "bf16", "gpu": ("a100-40gb",)})
    space: dict[str, object] = {}
    exec(compile(question.snippet().replace("print(answer)\n", ""), "snippet", "exec"), space)
    answer = space["answer"]
    assert isinstance(answer, memest.Estimate)
    assert answer.to_json() == memest.estimate(MODEL, question.setup, gpu="a100-40gb").to_json()
