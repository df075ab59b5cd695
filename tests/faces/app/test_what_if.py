import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import memest
from memest.app import answers, asking, waiting
from memest.app.hero import hero as hero_html
from memest.app.link import read_question
from memest.app.presets import DEFAULT_QUESTION, PRESETS
from memest.app.question import ExplorerQuestion
from memest.app.trust import trust_words
from memest.app.views import what_if
from memest.errors import MemestError
from memest.report.result import Verdict
from memest.units import format_delta, format_size
from support.app_page import Open, command, hero, set_option, texts, verdict

MODEL = "bert-large-uncased"
SMALL = "prajjwal1/bert-tiny"
"""For questions that no shipped profile answers."""


ALONG = "Take it along"


def peaks(answer: memest.Estimate) -> list[str]:
    sizes = (answer.peak.allocated_bytes, answer.peak.reserved_bytes, answer.peak.device_bytes)
    return [format_size(size) for size in sizes]


def test_a_first_visit_sees_a_question_its_verdict_and_the_three_peaks(open_page: Open) -> None:
    app = open_page()
    question = DEFAULT_QUESTION
    answer = memest.estimate(question.model, question.setup, **question.place)
    assert verdict(app) == "Fits"
    assert all(size in hero(app) for size in peaks(answer))
    assert f"free {format_size(answer.gpu.headroom_bytes)}" in " ".join(hero(app).split())
    assert "Will it fit?" in hero(app)
    assert "Published runs on one GPU, of adapters: median error" in hero(app)
    assert "Smallest card of those looked at that fits" in hero(app)
    assert "… V100-16GB" in hero(app)
    assert "… not looked at" in hero(app)
    assert not app.dataframe[0].value.empty
    assert app.query_params["model"] == question.model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"fsdp": "full_shard", "num_gpus": 2},
            "known, 1.9% of 23 asked by a description",
        ),
        ({"method": "dpo"}, "No published run of this kind (a preference method)"),
        ({"torch_compile": True}, "No published run of this kind (compiled)"),
        ({"fp16": True, "bf16": True}, "Published runs on one GPU: median"),
    ],
)
def test_no_accuracy_is_claimed_for_a_kind_that_nobody_measured(
    options: dict[str, object], said: str
) -> None:
    assert said in trust_words(ExplorerQuestion.of("gpt2", options))


@pytest.mark.parametrize("name", PRESETS)
def test_each_example_is_answered_without_a_trace(open_page: Open, name: str) -> None:
    question = PRESETS[name]
    model = memest.profile(question.model)
    with model.known_alone():
        answer = model.estimate(question.setup, **question.place)
    assert answer.verdict.value == "fits"
    app = open_page()
    app.button_group(key="preset").set_value(name).run()
    assert not app.exception
    assert all(size in hero(app) for size in peaks(answer))
    assert app.query_params["model"] == question.model


def test_a_link_brings_its_inputs(open_page: Open) -> None:
    app = open_page(
        model="gpt2", batch="4", seq_len="256", precision="fp16", gpu=["v100", "t4"],
        checkpointing="full", optim="sgd", grad_accum="2", padded="true", tab=ALONG,
    )  # fmt: skip
    assert command(app) == (
        "memest estimate gpt2 --batch 4 --seq-len 256 --grad-accum 2 --padded --precision fp16 "
        "--optim sgd --checkpointing full --gpu v100 --gpu t4"
    )
    answer = memest.estimate(
        "gpt2", batch=4, seq_len=256, fp16=True, gpu=["v100", "t4"], checkpointing=True,
        optim="sgd", grad_accum=2, padded=True,
    )  # fmt: skip
    assert peaks(answer)[2] in hero(app)
    chips = {str(button.key) for button in app.button if str(button.key).startswith("drop ")}
    assert chips == {"drop padded", "drop gpu"}


def test_a_link_without_a_model_asks_about_the_one_that_it_always_did(open_page: Open) -> None:
    app = open_page(batch="4")
    assert app.selectbox(key="model").value == MODEL
    assert app.selectbox(key="gpu").value == "rtx-4090"


def test_values_that_cannot_be_are_named_and_left_out(open_page: Open) -> None:
    app = open_page(batch="-3", precision="fp8", grad_accum="2")
    assert app.number_input(key="batch").value == 8
    assert app.number_input(key="grad_accum").value == 2
    said = " ".join(warning.value for warning in app.warning)
    assert "batch=-3 of the link was left out" in said
    assert "it must be 1 to" in said
    assert "fp32" in said
    app.number_input(key="batch").set_value(4).run()
    assert not app.warning


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": "8", "tp": "8"},
        {"pp": "2", "num_gpus": "2", "pp_microbatches": "4"},
        {"fsdp": "full_shard", "fsdp_version": "1", "num_gpus": "2"},
        {"zero": "3", "num_gpus": "4", "offload_optimizer": "true"},
    ],
)
def test_options_that_need_each_other_come_back_from_a_link(options: dict[str, str]) -> None:
    params = {"model": [MODEL], "gpu": ["h100"]} | {n: [value] for n, value in options.items()}
    question, said = read_question(params)
    assert not said
    assert options.keys() <= dict(question.options).keys()


def test_what_needs_an_option_that_is_not_there_is_left_out_alone() -> None:
    question, said = read_question({"tp": ["8"], "batch": ["4"], "zero": ["9"]})
    assert dict(question.options) == {"batch": 4, "gpu": ("rtx-4090",)}
    assert [text.partition(" ")[0] for text in said] == ["tp=8", "zero=9"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"fp16": "true", "bf16": "true"}, "exclude each other"),
        ({"fp16": "true", "precision": "bf16"}, "contradict each other"),
        ({"bach": "64"}, "bach of the link was left out"),
        ({"batch": "4", "per_device_train_batch_size": "64"}, "batch is named twice"),
        ({"gpu": "8xh100", "num_gpus": "4"}, "gpu=8xh100 of the link was left out"),
    ],
)
def test_a_link_that_says_two_things_is_not_understood_as_one(
    open_page: Open, inputs: dict[str, str], said: str
) -> None:
    app = open_page(model=MODEL, **inputs)
    assert said in texts(app)


@pytest.mark.parametrize(
    ("page", "inputs", "said"),
    [
        ("what-if", {"tab": "Timelin"}, "Did you mean 'Timeline'? Legal: Parts, Timeline"),
        ("calibration", {"do": "Dance"}, "do=Dance of the link was left out"),
        ("accuracy", {"by": "colour"}, "by=colour of the link was left out"),
        ("accuracy", {"by": "family", "only": "no-such"}, "only=no-such of the link was left out"),
        ("advise", {"gpu": "t4", "effective_batch": "many"}, "'many' is not a whole number"),
        ("advise", {"gpu": "t4", "effective_batch": "0"}, "effective_batch must be 1 or more"),
        ("what-if", {"tab": "Timeline", "all_steps": "perhaps"}, "all_steps=perhaps of the link"),
    ],
)
def test_what_a_link_chooses_on_a_page_and_is_not_there_is_named(
    open_page: Open, page: str, inputs: dict[str, str], said: str
) -> None:
    app = open_page(page, model=MODEL, **inputs)
    assert said in " ".join(texts(app).split())
    app.run()
    assert texts(app).count("of the link was left out") == 1


def test_a_choice_is_no_longer_named_when_another_is_made(open_page: Open) -> None:
    app = open_page(model=MODEL, tab="none")
    assert app.warning
    app.button_group(key="tab").set_value("Assumptions").run()
    app.number_input(key="batch").set_value(4).run()
    assert not app.warning
    assert app.button_group(key="tab").value == "Assumptions"


def test_a_number_of_gpus_goes_to_its_own_input(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu="2xt4")
    assert app.selectbox(key="gpu").value == "t4"
    assert app.number_input(key="num_gpus").value == 2
    typed = ExplorerQuestion.of(MODEL, {"num_gpus": 2}).with_gpu("4 x RTX 4090")
    assert dict(typed.options) == {"num_gpus": 4, "gpu": ("rtx-4090",)}
    assert typed.with_gpu("").gpus == ()
    assert typed.with_gpu("zebra").gpus == ("zebra",)


def test_figures_are_of_each_of_several_gpus() -> None:
    question = PRESETS["Qwen3-8B full, 8 x H100, FSDP2"]
    answer = memest.estimate(question.model, question.setup, **question.place)
    assert "<span>on H100 80GB, each of 8 GPUs</span>" in hero_html(answer)[0]
    nowhere = replace(answer, gpu=None, verdict=Verdict.UNKNOWN)
    assert "<span>this is what it needs on each of 8 GPUs</span>" in hero_html(nowhere)[0]
    alone = replace(nowhere, setup=DEFAULT_QUESTION.setup)
    assert "<span>this is what it needs</span>" in hero_html(alone)[0]


def test_what_others_add_to_a_link_is_passed_over(open_page: Open) -> None:
    app = open_page(model=MODEL, utm_source="x", embed="true")
    assert not app.warning


def test_what_no_input_shows_is_a_chip(open_page: Open) -> None:
    app = open_page(model=MODEL, image_size="224", dataloader_num_workers="0")
    chips = {str(button.key) for button in app.button if str(button.key).startswith("drop ")}
    assert chips == {"drop image_size", "drop dataloader_num_workers"}
    app.selectbox(key="option").set_value("dataloader_num_workers").run()
    assert not app.exception


def test_the_verdict_changes_with_the_batch_and_back_with_the_url(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu="rtx-4090", tab=ALONG)
    assert verdict(app) == "Fits"
    before = {name: app.query_params[name] for name in app.query_params}
    app.number_input(key="batch").set_value(64).run()
    assert not app.exception
    assert verdict(app) == "Does not fit"
    assert "too little" in hero(app)
    assert "--batch 64" in command(app)
    assert app.query_params["batch"] == "64"
    app.query_params.clear()
    app.query_params.update(before)  # what the browser's Back does
    app.run()
    assert app.number_input(key="batch").value == 8
    assert verdict(app) == "Fits"


def test_what_makes_it_fit_is_one_click_away(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu=["t4"], precision="fp16", batch="64", tab=ALONG)
    assert verdict(app) == "Does not fit"
    options = {"batch": 64, "precision": "fp16", "gpu": "t4"}
    found = memest.suggest(MODEL, quick=True, **options)
    buttons = {b.key: b for b in app.button if str(b.key).startswith("apply ")}
    assert list(buttons) == [f"apply {change.arguments}" for change in found.changes]
    gains = [format_delta(-change.gain_bytes) for change in found.changes]
    assert all(gain in texts(app) for gain in gains)

    buttons["apply --checkpointing full"].click().run()
    assert not app.exception
    assert verdict(app) == "Fits"
    assert "--checkpointing full" in command(app)


@pytest.mark.slow
def test_what_makes_it_fit_is_looked_for_briefly_where_each_change_is_traced(
    open_page: Open,
) -> None:
    options = {"method": "grpo", "batch": 8, "seq_len": 128, "gpu_memory": "1GiB"}
    model = "EleutherAI/pythia-14m"
    app = open_page(model=model, gpu="none", **{name: str(each) for name, each in options.items()})
    assert not app.error
    found = memest.suggest(model, quick=True, brief=True, count=1, **options)
    buttons = [button.key for button in app.button if str(button.key).startswith("apply ")]
    assert buttons == [f"apply {change.arguments}" for change in found.changes]
    assert len(buttons) == 1


def test_the_method_is_one_choice_and_its_options_are_chips(open_page: Open) -> None:
    app = open_page(model="meta-llama/Llama-3.1-8B", precision="bf16", checkpointing="full")
    app.button_group(key="method").set_value("QLoRA").run()
    assert {name: app.query_params[name] for name in ("lora_r", "qlora")} == {
        "lora_r": "16", "qlora": "true",
    }  # fmt: skip
    app.button(key="drop qlora").click().run()
    assert app.button_group(key="method").value == "LoRA"
    app.button_group(key="method").set_value("Full").run()
    assert not [button for button in app.button if str(button.key).startswith("drop ")]
    assert not app.exception


def test_what_is_trained_for_stands_below_the_question(open_page: Open) -> None:
    # of no causal language model: refused without a trace, and the command is shown all the same
    app = open_page(model=SMALL, gpu="t4")
    chosen = app.selectbox(key="trained_for")
    assert chosen.value == "supervised"
    assert "SimPO" in chosen.options
    chosen.set_value("kto").run()
    assert not app.exception
    assert app.query_params["method"] == "kto"
    question = ExplorerQuestion.of(SMALL, {"method": "kto", "gpu": ("t4",)})
    assert command(app) == question.command_line()
    assert question.setup.method == "kto"
    # adapters are another choice, and no chip tells what an input tells
    app.button_group(key="method").set_value("LoRA").run()
    assert app.query_params["method"] == "kto"
    dropped = [b.key for b in app.button if str(b.key).startswith("drop ")]
    assert dropped == ["drop lora_r", "drop dtype"]  # float32, as TRL loads a model by name
    linked = open_page(model=SMALL, gpu="t4", method="simpo")
    assert linked.selectbox(key="trained_for").value == "simpo"
    linked.selectbox(key="trained_for").set_value(None).run()
    assert "method" not in linked.query_params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"), [("grpo", "GRPO"), ("rloo", "RLOO"), ("online-dpo", "Online DPO")]
)
def test_runs_that_write_completions_are_answered(open_page: Open, method: str, name: str) -> None:
    app = open_page(model="EleutherAI/pythia-14m", gpu="t4", batch="8", seq_len="64")
    chosen = app.selectbox(key="trained_for")
    assert name in chosen.options
    chosen.set_value(method).run()
    assert not app.exception
    assert not app.error
    assert app.query_params["method"] == method
    assert f"{name.upper()} by TRL" in texts(app)


@pytest.mark.slow
def test_each_input_reaches_the_question(open_page: Open) -> None:
    app = open_page(model=SMALL, tab=ALONG)
    app.selectbox(key="optim").set_value("sgd_momentum").run()
    set_option(app, "dtype", "selectbox", "bfloat16")
    set_option(app, "attn_implementation", "selectbox", "eager")
    app.selectbox(key="checkpointing").set_value("full").run()
    app.number_input(key="grad_accum").set_value(2).run()
    app.number_input(key="seq_len").set_value(128).run()
    app.selectbox(key="gpu").set_value("l4").run()
    assert not app.exception
    assert command(app) == (
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
    app = open_page(model=SMALL, tab=ALONG)
    if kind == "segmented_control":
        kind = "button_group"
    set_option(app, key, kind, value)
    assert not app.exception
    assert not app.error
    assert flag in command(app)


def test_a_range_around_the_memory_of_a_card_is_told_once(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu="rtx-3060", batch="9")
    assert verdict(app) == "Fits by releasing cache"
    setup = memest.Setup(batch=9)
    high = memest.estimate(MODEL, setup, gpu="rtx-3060").interval.high_bytes
    assert hero(app).count(format_size(high)) == 1


def test_an_unknown_model_is_told_in_words_for_a_browser(open_page: Open) -> None:
    app = open_page(model="bert-larje-uncased", gpu="t4")
    (error,) = app.error
    assert "neither a file nor in memest's catalogue" in error.value
    assert "bert-large-uncased" in error.value
    assert "memest models" not in error.value


def test_the_verdict_comes_before_the_inputs_where_these_stand(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def noting(what: str, draw: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: drawn.append(what) or draw(*given)

    monkeypatch.setattr(asking, "_five", noting("inputs", asking._five))
    monkeypatch.setattr(what_if, "hero", noting("verdict", what_if.hero))
    app = open_page()
    assert drawn == ["inputs", "verdict"], "the verdict moves when a page is opened"
    drawn.clear()
    app.number_input(key="batch").set_value(4).run()
    assert drawn == ["verdict", "inputs"]


def test_the_inputs_stand_while_an_answer_is_waited_for_or_refused(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_page()
    seen = []

    def slow(*_: object, **__: object) -> None:
        time.sleep(0.2)
        raise MemestError("no answer")

    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(answers, "estimate", slow)
    monkeypatch.setattr(asking, "_five", lambda *_: seen.append("inputs"))
    show = waiting._show_progress
    monkeypatch.setattr(
        waiting,
        "_show_progress",
        lambda *given, **more: (seen.append("wait"), show(*given, **more)),
    )
    app.number_input(key="batch").set_value(4).run()
    assert seen == ["inputs", "wait"]
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 5.0)
    seen.clear()
    app.run()
    assert seen == ["inputs"]
    assert [error.value for error in app.error] == ["no answer"]


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
    open_page(batch="4", precision="fp16", gpu=["rtx-3090", "t4"], tab=ALONG)
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
        ({"pin": "no-such-model batch=4"}, "This is about the pinned scenario"),
        ({"gpu": "rtx-9999"}, "The field GPU lists all"),
        ({"colour": "red"}, "All options lists them all"),
        ({"checkpointing": "every_n:0"}, "every_n:0"),
        ({"software": "torch=banana"}, "torch"),
        ({"alloc_conf": "nonsense"}, "nonsense"),
        ({"precision": "fp16", "dtype": "float16"}, "cannot train"),
        ({"gpu_memory": "lots"}, "not a size"),
    ],
)
def test_an_error_is_its_sentence(open_page: Open, inputs: dict[str, str], said: str) -> None:
    app = open_page(**inputs)
    assert len(app.error) + len(app.warning) >= 1
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
    app = open_page(model=MODEL, gpu="rtx-4090")
    before = memest.estimate(MODEL, gpu="rtx-4090")
    app.button(key="pin_now").click().run()
    assert app.text_input(key="pin").value == "bert-large-uncased gpu=rtx-4090"
    app.number_input(key="batch").set_value(16).run()
    assert not app.exception
    after = memest.estimate(MODEL, gpu="rtx-4090", batch=16)
    change = format_delta(after.peak.device_bytes - before.peak.device_bytes)
    assert change in hero(app)
    assert "Against the pinned scenario" in texts(app)
    assert "activations" in texts(app)
    assert app.query_params["pin"] == "bert-large-uncased gpu=rtx-4090"
    app.button(key="unpin").click().run()
    assert change not in hero(app)
    assert "pin" not in app.query_params


@pytest.mark.slow
def test_a_shared_link_has_what_the_page_shows(open_page: Open) -> None:
    app = open_page(model=MODEL, gpu="t4", pin=f"{MODEL} batch=2", tab="Assumptions")
    link = next(code.value for code in app.code if "://" in code.value or "?" in code.value)
    assert "pin=" in link
    assert "tab=Assumptions" in link


def test_a_pinned_scenario_comes_with_the_link(open_page: Open) -> None:
    app = open_page(pin="bert-large-uncased batch=4 fp16", batch="8")
    assert "Against the pinned scenario" in texts(app)
    app = open_page(pin="bert-large-uncased bach=4")
    assert "bach" in app.error[0].value


@pytest.mark.parametrize("gpu", ["", "none"])
def test_without_a_gpu_the_common_ones_are_shown(open_page: Open, gpu: str) -> None:
    app = open_page(model=MODEL, gpu=gpu)
    assert "No GPU named" in hero(app)
    assert "Smallest card that fits: RTX 3060" in hero(app)
    assert app.query_params["gpu"] == "none"


def test_the_breakdown_adds_up_to_the_device_peak(open_page: Open) -> None:
    app = open_page()
    table = app.dataframe[0].value
    *parts, total = list(table["share"])
    assert sum(parts) == pytest.approx(total) == 100


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


def test_a_chip_of_what_others_imply_is_taken_away_and_stays_away(open_page: Open) -> None:
    app = open_page(model="gpt2", method="dpo", gpu="t4", tab="Take it along")
    assert "float32" in app.button(key="drop dtype").label
    assert command(app) == "memest estimate gpt2 --method dpo --gpu t4"  # as it was given
    assert "dtype" not in app.query_params
    app.button(key="drop dtype").click().run()
    assert "--dtype auto" in command(app)
    assert app.query_params["dtype"] == "auto"
    app.button(key="drop dtype").click().run()  # implied again
    assert "float32" in app.button(key="drop dtype").label
    app.selectbox(key="trained_for").set_value("supervised").run()
    assert command(app) == "memest estimate gpt2 --gpu t4"
