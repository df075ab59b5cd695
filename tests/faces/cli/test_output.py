"""What the commands write, and where: run in this process with estimates built by hand."""

import io
import json
import sys
import time

import pytest

import memest.estimation.estimate
from memest.cli import console
from memest.cli.console import Output
from memest.cli.main import run
from memest.config.installed import DISTRIBUTION
from memest.config.setup import Setup
from memest.errors import DeviceError, MissingDependencyError, TraceError


@pytest.fixture
def answer(monkeypatch, samples):
    """Let memest.estimate answer with a sample; gives the calls made."""
    calls = []

    def use(name):
        def estimate(model, **options):
            calls.append((model, options))
            if isinstance(name, BaseException):
                raise name
            return samples[name]

        monkeypatch.setattr(memest.estimation.estimate, "estimate", estimate)
        return calls

    return use


def test_default_report(answer, capsys, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer("fits")
    assert run(["estimate", "bert-large-uncased", "--gpu", "rtx-4090"]) == 0
    out, err = capsys.readouterr()
    golden("report_fits_80.txt", out)
    assert err == ""


def test_depth(answer, capsys, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    answer("fits")
    assert run(["estimate", "m", "--by=layer", "--depth", "5"]) == 0
    golden("by_layer_depth_5.txt", capsys.readouterr().out)


def test_ascii(answer, capsys):
    answer("accum")
    assert run(["estimate", "m", "--ascii"]) == 0
    assert capsys.readouterr().out.isascii()


def test_json_is_one_document(answer, capsys, samples):
    answer("fits")
    assert run(["estimate", "m", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == samples["fits"].to_dict()
    assert err == ""


@pytest.mark.parametrize("name", ["fits", "tight"])
def test_quiet_is_the_sentence_of_each_gpu(answer, capsys, samples, name):
    answer(name)
    assert run(["estimate", "m", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [fit.name for fit in samples[name].named_gpus]
    assert [each in line for each, line in zip(names, lines, strict=True)] == [True] * len(names)


@pytest.mark.parametrize(
    ("name", "code", "first"),
    [("fits", 0, "Fits: "), ("tight", 3, "Tight: "), ("does_not_fit", 4, "Does not fit: ")],
)
def test_fits(answer, capsys, samples, name, code, first):
    calls = answer(name)
    assert run(["fits", "m", "--gpu", "x"]) == code
    assert capsys.readouterr().out.startswith(first)
    assert calls[0][1]["max_batch"] is False
    assert run(["fits", "m", "--gpu", "x", "--quiet"]) == code
    out, err = capsys.readouterr()
    assert out.startswith(first)
    assert out.count("\n") == len(samples[name].named_gpus)
    assert err == ""
    assert run(["fits", "m", "--gpu", "x", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_estimate_never_uses_the_codes_of_fits(answer, capsys):
    answer("does_not_fit")
    assert run(["estimate", "m", "--gpu", "x"]) == 0


def test_options_arrive(answer):
    calls = answer("fits")
    line = (
        "estimate m --per_device_train_batch_size 4 --bf16 True --gradient_checkpointing "
        "--gradient_accumulation_steps=2 --no-use-cache --freeze a --freeze b --gpu h100 "
        "--gpu a100 --device-context 600MiB --max-grad-norm 0 --steps 2 --trust-remote-code"
    )
    assert run(line.split()) == 0
    model, options = calls[0]
    assert model == "m"
    call = (
        "gpu", "device_context", "trust_remote_code", "max_batch", "alternatives", "progress",
    )  # fmt: skip
    arguments = {name: options.pop(name) for name in call}
    assert arguments["gpu"] == ["h100", "a100"]
    assert arguments["device_context"] == "600MiB"
    assert arguments["trust_remote_code"] is True
    assert memest.config.options.setup_from_options(**options) == Setup(
        batch=4, precision="bf16", checkpointing="full", grad_accum=2, use_cache=False,
        freeze=("a", "b"), max_grad_norm=0.0, num_steps=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TraceError("the step\n  cannot be traced"), 1, "the step cannot be traced"),
        (DeviceError("no GPU"), 1, "no GPU"),
        (MissingDependencyError("needs torch"), 6, "needs torch"),
        (ModuleNotFoundError("No module named 'foo'", name="foo.bar"), 6, "the package foo is not"),
        (ModuleNotFoundError("No module", name="memest.gone"), 1, "This is a bug in memest"),
        (OSError(28, "No space left on device", "/cache/x"), 1, "no space left on the device /ca"),
        (PermissionError(13, "Permission denied", "/cache"), 1, "/cache: Permission denied"),
        (MemoryError(), 1, "own memory ran out"),
        (RecursionError("deep"), 1, "unexpected RecursionError: deep"),
        (KeyError("x"), 1, "This is a bug in memest: please report"),
    ],
)
def test_errors_become_a_paragraph(answer, capsys, error, code, words):
    answer(error)
    assert run(["estimate", "m"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memest: ")
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert run(["estimate", "m", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_interrupted(answer, capsys):
    answer(KeyboardInterrupt())
    assert run(["estimate", "m"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_warnings_of_libraries_stay_away(monkeypatch, capsys, samples):
    def estimate(model, **options):
        import logging
        import warnings

        warnings.warn("noise", stacklevel=1)
        logging.getLogger("transformers").warning("noise")
        return samples["fits"]

    monkeypatch.setattr(memest.estimation.estimate, "estimate", estimate)
    assert run(["estimate", "m", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_progress_is_for_terminals(answer, capsys, monkeypatch):
    calls = answer("fits")
    assert run(["estimate", "m"]) == 0
    assert calls[-1][1]["progress"] is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(["estimate", "m"]) == 0
    assert callable(calls[-1][1]["progress"])
    assert run(["estimate", "m", "--json"]) == 0
    assert calls[-1][1]["progress"] is None


def test_what_is_said_first_is_shown_although_nothing_follows(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(console, "_SHOW_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Output().progress() as show:
        show("importing torch")
        for _ in range(500):
            if "importing torch" in terminal.getvalue():
                break
            time.sleep(0.01)
    assert "importing torch" in terminal.getvalue()


def test_what_is_over_soon_is_not_shown(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(console, "_SHOW_AFTER_SECONDS", 60)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Output().progress() as show:
        show("importing torch")
    assert terminal.getvalue() == ""


def test_models(capsys):
    assert run(["models", "bert-large-uncased"]) == 0
    text = capsys.readouterr().out
    assert "336,226,108" in text
    assert "source" in text
    assert run(["models", "qwen3 8b", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "Qwen/Qwen3-8B" in {model["id"] for model in document["models"]}
    assert run(["models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 500


def test_gpus(capsys):
    assert run(["gpus", "h100"]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3" in text
    assert "source" in text
    assert run(["gpus", "hopper", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {gpu["architecture"] for gpu in document["gpus"]} == {"Hopper"}
    assert all(gpu["usable_bytes"] > 0 for gpu in document["gpus"])
    assert run(["gpus"]) == 0
    assert "rtx-4090" in capsys.readouterr().out


def test_env_shows_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for more in ([], ["--json"]):
        assert run(["env", *more]) == 0
        out = capsys.readouterr().out
        assert "hf_verysecret" not in out
        assert "HF_TOKEN" in out
        assert "HF_HUB_OFFLINE" in out
    facts = json.loads(out)
    assert facts["packages"][DISTRIBUTION]
    assert set(facts) >= {"python", "packages", "gpus", "paths", "variables"}


def test_env_with_gpus(capsys, monkeypatch):
    from memest.catalog import nvml
    from memest.catalog.nvml import LocalGpu

    gpu = LocalGpu(
        index=0, name="NVIDIA A10G", uuid="GPU-1", total_bytes=24 << 30, used_bytes=1 << 30,
        free_bytes=23 << 30, reserved_bytes=None, driver="550.54", compute_capability=(8, 6),
        mig=True, processes=(),
    )  # fmt: skip
    monkeypatch.setattr(nvml, "local_gpus", lambda: (gpu,))
    assert run(["env"]) == 0
    assert "NVIDIA A10G, 24.00 GiB, 1.00 GiB in use, driver 550.54, MIG" in capsys.readouterr().out
    assert run(["gpus", "--local"]) == 0
    assert "read from GPU 0 of this machine" in capsys.readouterr().out
