import base64
import dataclasses
import gzip
import hashlib
import json
import zlib
from pathlib import Path

import pytest

from memest.app import records, uploads
from memest.app.question import ExplorerQuestion
from memest.app.uploads import (
    MAX_CONFIG_BYTES,
    check_question,
    config_from_link,
    config_to_link,
    keep_config,
    kept_config,
    temporary,
)
from memest.catalog.models import lookup
from memest.errors import ConfigError, MemestError
from memest.estimation.calibration_files import read_calibration
from memest.estimation.gpu_target import calibration_folders
from memest.files.folders import data_folder
from support.app_page import Open, command, metrics, texts, verdict


def tiny() -> bytes:
    entry = lookup("prajjwal1/bert-tiny")
    assert entry is not None
    return json.dumps(entry.config()).encode()


def test_an_uploaded_config_is_kept_and_can_be_named() -> None:
    copy = keep_config("config.json", tiny())
    check_question(ExplorerQuestion("config.json", upload=copy))
    assert keep_config("other.json", tiny()) == copy
    assert json.loads(kept_config(copy).read_text())["model_type"] == "bert"


@pytest.mark.parametrize("copy", ["bert-0123456789abcdef.json", "../x-0123456789abcdef.json", ""])
def test_a_copy_that_is_not_there_is_no_model(copy: str) -> None:
    with pytest.raises(MemestError):
        check_question(ExplorerQuestion("config.json", upload=copy))


def test_a_small_config_travels_in_a_link() -> None:
    copy = keep_config("config.json", tiny())
    text = config_to_link(copy)
    assert len(text) < 1500
    kept_config(copy).unlink()  # another server
    assert config_from_link("mine.json", text) == copy
    assert json.loads(kept_config(copy).read_text()) == json.loads(tiny())


def test_a_large_config_is_named_in_a_link_and_asked_for_elsewhere() -> None:
    words = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(100)]
    content = json.dumps({**json.loads(tiny()), "id2label": dict(enumerate(words))}).encode()
    copy = keep_config("config.json", content)
    assert config_to_link(copy) == copy
    assert config_from_link("mine.json", copy) == copy
    kept_config(copy).unlink()
    with pytest.raises(MemestError, match="upload it again"):
        config_from_link("mine.json", copy)


@pytest.mark.parametrize("text", ["AAAA", "!", "x" * 1501, ""])
def test_what_is_no_config_in_a_link_gets_a_sentence(text: str) -> None:
    with pytest.raises(MemestError, match=r"mine\.json"):
        config_from_link("mine.json", text)


def test_a_link_does_not_unpack_to_more_than_an_upload_may_have() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b" " * (8 << 20), 9)).decode()
    with pytest.raises(MemestError, match="more than 1 MiB"):
        config_from_link("mine.json", bomb)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x02weights", "is not text"),
        (b"{", "not valid JSON"),
        (b"[1]", "JSON array"),
        (b"{}", "model_type"),
        (b'{"model_type": "never_heard", "auto_map": {"AutoModel": "evil.Evil"}}', "code"),
        (b" " * (MAX_CONFIG_BYTES + 1), "at most"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_upload_gets_a_sentence(content: bytes, said: str) -> None:
    with pytest.raises(MemestError, match=said):
        keep_config("config.json", content)


def test_code_of_an_upload_is_never_named() -> None:
    config = {**json.loads(tiny()), "auto_map": {"AutoModel": "evil.Evil"}}
    kept = kept_config(keep_config("config.json", json.dumps(config).encode())).read_text()
    assert "auto_map" not in kept


@pytest.mark.parametrize("name", ["../../escape.json", "/etc/cron.d/x", "a/b.json"])
def test_a_name_does_not_leave_its_folder(name: str) -> None:
    with temporary(name, b"{}", MAX_CONFIG_BYTES) as path:
        assert path.parent.name.startswith("memest-upload-")


@pytest.mark.parametrize("ref", ["os:system", "pkg.mod:build", "gpt2:x?n_layer=2"])
def test_a_link_names_no_code(ref: str) -> None:
    with pytest.raises(ConfigError, match="names Python code"):
        check_question(ExplorerQuestion(ref))


def test_a_link_names_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(tiny())
    with pytest.raises(ConfigError, match="upload"):
        check_question(ExplorerQuestion(str(path)))
    with pytest.raises(ConfigError, match="upload"):
        check_question(ExplorerQuestion(str(tmp_path)))
    with pytest.raises(ConfigError, match="upload"):
        check_question(ExplorerQuestion(str(tmp_path / "none.json")))


@pytest.mark.slow
def test_the_widget_takes_an_upload_over(open_page: Open) -> None:
    pytest.importorskip("transformers")
    app = open_page(model="prajjwal1/bert-tiny", batch="2", seq_len="32", tab="Take it along")
    app.file_uploader(key="config_file").set_value(("mine.json", tiny(), "application/json"))
    app.run()
    assert not app.exception
    assert not app.error
    assert app.selectbox(key="model").value == "mine.json"
    assert verdict(app) == "Fits"
    assert "memest estimate mine.json --batch 2" in command(app)
    everything = texts(app) + str({name: app.query_params[name] for name in app.query_params})
    assert str(uploads.user_folder()) not in everything

    app.button(key="pin_now").click().run()
    app.number_input(key="batch").set_value(4).run()
    assert not app.error
    assert "Against the pinned scenario" in texts(app)
    link = {name: app.query_params[name] for name in app.query_params}
    for copy in (uploads.user_folder() / "uploaded_configs").iterdir():
        copy.unlink()
    link.pop("pin")
    other = open_page(**link)
    assert not other.error
    assert other.selectbox(key="model").value == "mine.json"
    assert verdict(other) == "Fits"


@pytest.mark.slow
def test_the_widget_says_what_is_wrong_with_an_upload(open_page: Open) -> None:
    app = open_page()
    app.file_uploader(key="config_file").set_value(("config.json", b"{", "application/json"))
    app.run()
    assert not app.exception
    assert "not valid JSON" in app.error[0].value
    assert app.selectbox(key="model").value == "meta-llama/Llama-3.1-8B"


@pytest.mark.slow
def test_a_profile_is_shown_part_by_part(open_page: Open) -> None:
    from memest.estimation.calibration import (
        Band,
        Calibration,
        CrossValidation,
        MeasuredOn,
        ProcessPart,
        Provenance,
    )
    from memest.estimation.calibration_files import write_calibration

    gpu = "NVIDIA GeForce RTX 4090"
    profile = Calibration(
        tensors="every part", factors={"activations": 1.02, "parameters": 1.0}, other_factor=1.01,
        process_model="constant",
        process=(
            ProcessPart(gpu=gpu, constant_bytes=500 << 20, low_bytes=-1, high_bytes=1, cases=40),
        ),
        band=Band(
            metric="device", scale="proportional", low=-0.01, high=0.01, level=0.9, cases=40,
            draws=30,
        ),
        measured=MeasuredOn(allocated_bytes=20 << 30, kernels=200),
        validation=CrossValidation(
            cases=40, models=8, folds=8, raw_error=0.02, error=0.004, coverage=0.925
        ),
        provenance=Provenance(gpus=(gpu,), first="2026-01-01", last="2026-01-02"),
    )  # fmt: skip
    folder = calibration_folders()[0]
    folder.mkdir(parents=True)
    write_calibration(profile, folder / "rtx-4090.json")
    app = open_page("calibration", do="Profiles")
    assert metrics(app)["Runs"] == "40"
    assert metrics(app)["Inside their range"] == "92%"
    assert "× 1.0200" in list(app.table[0].value["factor"])
    assert "500 MiB" in list(app.table[1].value["offset"])
    assert "context and kernels, RTX 4090" in list(app.table[1].value["what"])
    app = open_page(tab="Calibration")
    assert "calibrated on 40 runs of 8 models" in texts(app)
    assert "92% of the runs of models left out of the fit" in texts(app)
    badge = app.button(key="calibrated")
    assert badge.label.startswith("Calibrated on RTX 4090: ")
    story = open_page("calibration")
    assert "What it does to this question" in texts(story)
    assert metrics(story)["Inside their range"] == "92%"
    assert "before the calibration corrects" in texts(open_page(tab="Timeline"))
    assert "as the calibration corrects it" in texts(open_page("how-it-works"))
    tables = [frame.value for frame in app.dataframe if "raw" in frame.value]
    factors = dict(zip(tables[0]["part"], tables[0]["correction"], strict=True))
    assert factors["activations"] == "× 1.0200"
    (folder / "zbroken.json").write_text("{")
    assert metrics(open_page("calibration", do="Profiles"))["Runs"] == "40"
    app = open_page("calibration", do="Profiles", calibration_profile="zbroken.json")
    assert "zbroken.json" in texts(app)
    assert len(app.error) == 1
    assert "Traceback" not in texts(app)
    pages = (app, open_page("calibration", do="Profiles"), open_page(tab="Calibration"))
    assert not any(str(folder) in texts(page) for page in pages), "a page tells no path"


def test_an_export_is_read_and_said_what_is_wrong_with_it(open_page: Open) -> None:
    app = open_page("calibration", do="Fit a profile")
    records = app.file_uploader(key="records")
    records.set_value(("campaign.jsonl", b"nonsense\n", "application/json"))
    app.run()
    assert not app.exception
    assert app.error or app.warning


@pytest.mark.slow
def test_an_import_is_fitted_with_what_it_found_on_the_page(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    from memest.calibration.exchange import export_records
    from support.simulated_runs import simulate

    pairs = tuple(simulate())
    lines = "\n".join(export_records([pair.measurement for pair in pairs])).encode()
    monkeypatch.setattr("memest.app.views.calibration.pairs_of", lambda *_: pairs)
    app = open_page("calibration", do="Fit a profile")
    app.file_uploader(key="records").set_value(("campaign.jsonl", lines, "application/json"))
    app.run()
    assert f"{len(pairs)} runs were read" in texts(app)
    app.button(key="fit_now").click().run()
    assert not app.exception
    assert not app.error
    assert int(metrics(app)["Runs"]) > 0
    assert len(app.get("vega_lite_chart")) == 1  # each run around 1.0
    app.text_input(key="keep_as").set_value("mine").run()
    app.button(key="keep").click().run()
    assert not app.error
    kept = calibration_folders()[0] / "mine.json"
    assert kept.name in app.success[0].value.replace("\\", "")
    first = kept.read_text()
    app.button(key="keep").click().run()
    assert "is there already" in app.error[0].value
    assert kept.read_text() == first
    app.text_input(key="keep_as").set_value("../mine").run()
    app.button(key="keep").click().run()
    assert "no name of a file" in app.error[0].value
    other = "\n".join(lines.decode().splitlines()[:6]).encode()
    app.file_uploader(key="records").set_value(("other.jsonl", other, "application/json")).run()
    assert "2 runs were read" in texts(app)
    assert "keep" not in [button.key for button in app.button]  # what was fitted is another file's
    app.file_uploader(key="records").set_value(("none.jsonl", b"", "application/json")).run()
    assert "holds no run" in texts(app)


@pytest.mark.parametrize("where", ["options", "scenario"])
def test_a_link_names_no_profile_but_this_machines(where: str, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.json"
    path.write_text("{}")
    text = f"profile={path}"
    question = (
        ExplorerQuestion("gpt2", (("calibration", str(path)),)) if where == "options" else None
    )
    with pytest.raises(ConfigError, match="no calibration that the explorer knows") as raised:
        check_question(question or ExplorerQuestion("gpt2"), () if question else (text,))
    assert str(calibration_folders()[0]) not in str(raised.value)
    kept = calibration_folders()[0] / "own.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    check_question(
        ExplorerQuestion("gpt2", (("calibration", str(kept)),)), (f"profile={kept}", "profile=none")
    )


def test_a_link_does_not_run_code_of_a_repository() -> None:
    with pytest.raises(ConfigError, match="runs no code"):
        check_question(ExplorerQuestion.from_short("gpt2 trust-remote-code"))
    with pytest.raises(ConfigError, match="runs no code"):
        check_question(ExplorerQuestion("gpt2"), ("fp16 trust-remote-code",))


def test_an_export_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * (4 << 20)))
    monkeypatch.setattr(records, "MOST_TEXT", 1 << 20)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ConfigError, match="larger than 1 MiB when unpacked"):
        records.measurements(path)


@pytest.mark.parametrize(
    "kind", ["/tmp/dropped", "../profiles/owned", "..", "a\\b", "\0", "x" * 5000, "ünïcode"]
)
def test_a_config_is_kept_in_its_folder_whatever_it_calls_itself(kind: str) -> None:
    content = json.dumps({"model_type": kind, "hidden_size": 4}).encode()
    try:
        kept = kept_config(keep_config("../../config.json", content))
    except MemestError:
        return
    assert kept.parent == uploads.user_folder() / "uploaded_configs"
    assert kept.is_file()


def test_a_number_without_end_is_no_config() -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        keep_config("config.json", b'{"model_type": "bert", "x": ' + b"1" * 5000 + b"}")


@pytest.mark.parametrize("ref", ["/dev/zero", "/dev/stdin", "/etc/passwd", "~", "..", "a/b/c"])
def test_nothing_of_this_machine_is_opened_for_a_link(
    ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr("memest.catalog.resolve.read_config", opened)
    with pytest.raises(ConfigError, match="opens no file of this machine"):
        check_question(ExplorerQuestion(ref))


def test_options_that_name_files_take_none_of_a_link(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"secret": 1}')
    for name in ("adapter", "quantization", "zero_settings"):
        with pytest.raises(ConfigError, match="reads no files of this machine"):
            check_question(ExplorerQuestion("gpt2", ((name, str(path)),)))
    check_question(ExplorerQuestion("gpt2", (("quantization", '{"load_in_4bit": true}'),)))
    with pytest.raises(ConfigError, match="reads no files of this machine"):
        check_question(ExplorerQuestion("gpt2"), (f"peft-config={path}",))


def test_other_runs_of_the_same_names_are_other_runs() -> None:
    pytest.importorskip("sklearn")
    from support.simulated_runs import simulate

    some = [pair.measurement for pair in simulate()][:3]
    changed = [dataclasses.replace(one, case=some[0].case) for one in some]
    assert [one.run for one in some] == [one.run for one in changed]
    assert records.content_of(some) != records.content_of(changed)
    assert records.content_of(some) == records.content_of(list(some))


def test_lines_that_are_no_records_do_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x\n" * 5000)
    with pytest.raises(ConfigError, match="more than 1,000 lines that are no records"):
        records.measurements(path)


def test_records_of_the_package_that_are_offered_hold_measurements() -> None:
    if not (data_folder() / "measurements").is_dir():
        pytest.skip("the package comes without them")
    offered = records.sources()
    assert any(name.startswith("nvidia-") for name in offered)
    assert "convolutions-h100-cudnn-9.19.jsonl.gz" not in offered
    for path in offered.values():
        runs, _ = records.measurements(path)
        assert runs, path


def test_no_folder_of_the_server_is_told_of_a_file_without_measurements(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_text('{"gpu": "T4"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^kernels\.jsonl holds no measurement"):
        records.measurements(path)


def test_a_profile_finds_the_runs_that_it_was_fitted_to() -> None:
    if not (data_folder() / "measurements").is_dir():
        pytest.skip("the package comes without them")
    profile = read_calibration(calibration_folders()[1] / "nvidia-hopper-torch-2.11.json")
    runs = records.runs_of(profile.provenance.dataset_sha256)
    assert {run.environment.gpu for run in runs if run.environment} == set(profile.provenance.gpus)
    assert records.runs_of("of others") == ()
