"""The tools of ``memest mcp``, asked without a client: what they take, answer and refuse."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from memest.cli.main import run
from memest.cli.mcp import TOOLS, answer
from memest.config import packages
from memest.config.own_code import NO_OWN_CODE
from memest.errors import ConfigError, MemestError
from support.paths import ROOT

LOG = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.74 GiB of "
    "which 2.12 MiB is free. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 120.00 "
    "MiB is reserved by PyTorch but unallocated."
)
GROWING = ROOT / "tests/support/memory.csv"
QUESTIONS = {
    "estimate": (
        {"model": "gpt2", "batch": 8, "gpu": ["t4", "l4"], "options": {"fp16": True}},
        "estimate gpt2 --batch 8 --gpu t4 --gpu l4 --fp16",
    ),
    "fits": (
        {"model": "gpt2", "batch": 4, "seq_len": 256, "fail_over": "12GiB",
         "options": {"gradient_checkpointing": True, "optim": "sgd"}},
        "fits gpt2 --batch 4 --seq-len 256 --fail-over 12GiB --checkpointing --optim sgd",
    ),
    "max_batch": (
        {"model": "gpt2", "gpu": "t4", "effective_batch": 64, "options": {"fp16": True}},
        "max-batch gpt2 --gpu t4 --effective-batch 64 --fp16",
    ),
    "advise": (
        {"model": "gpt2", "gpu": "t4", "effective_batch": 16, "any_precision": True},
        "advise gpt2 --gpu t4 --effective-batch 16 --any-precision",
    ),
    "explain_oom": ({"log": LOG}, f"explain-oom '{LOG}'"),
    "explain_growth": ({"record": str(GROWING)}, f"explain-growth '{GROWING}'"),
}  # fmt: skip
"""By tool: arguments, and the command of the same question."""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def printed(capsys, line):
    import shlex

    run([*shlex.split(line), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow(but=("fits", "explain_oom", "explain_growth"))
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_tool_answers_what_the_command_prints(name, capsys):
    arguments, line = QUESTIONS[name]

    kept = answer(name, {**arguments, "detail": "full"})

    assert capsys.readouterr().out == ""
    assert kept.documents == [printed(capsys, line)]
    assert kept.notes == []


BERT = {"model": "bert-large-uncased", "gpu": "t4", "options": {"fp16": True}}


def test_a_brief_answer_has_what_decides_and_says_how_to_get_the_rest():
    (short,), (full,) = (
        answer("estimate", {**BERT, "detail": detail}).documents for detail in ("brief", "full")
    )

    assert answer("estimate", BERT).documents == [short]
    assert len(json.dumps(short)) < 2500 < 40_000 < len(json.dumps(full))
    for same in ("verdict", "peak_at", "max_batch", "safe_batch", "assumptions", "notes"):
        assert short[same] == full[same]
    assert short["peak"] == {
        name: full["peak"][name] for name in ("allocated_bytes", "reserved_bytes", "device_bytes")
    }
    assert short["interval"].items() <= full["interval"].items()
    assert {"low_bytes", "high_bytes"} <= short["interval"].keys()
    assert short["gpu"]["headroom_bytes"] == full["gpu"]["headroom_bytes"]
    sizes = [row["bytes"] for row in short["breakdown"]]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sum(sizes) == short["peak"]["allocated_bytes"]
    assert short["setup"]["precision"] == "fp16"
    assert "channels_last" not in short["setup"]
    assert "layers, timeline" in short["left_out"]
    assert "detail full" in short["left_out"]


@pytest.mark.slow
def test_every_tool_is_brief_unless_all_is_asked_for():
    many = {"model": "bert-large-uncased", "gpu": ["t4", "rtx-4090", "l4"]}
    (fit,) = answer("fits", many).documents
    assert len(json.dumps(fit)) < 3500
    assert [limit["verdict"] for limit in fit["limits"]] == ["fits"] * 3
    assert "gpu" not in fit
    (largest,) = answer("max_batch", BERT).documents
    assert len(json.dumps(largest)) < 1500
    assert largest["answers"][0]["largest"] > largest["answers"][0]["safe"] > 8
    (plans,) = answer("advise", {**BERT, "effective_batch": 64}).documents
    assert len(json.dumps(plans)) < 3000
    assert all(plan["arguments"] and "steps" not in plan for plan in plans["plans"])


def test_every_tool_has_a_question_here():
    assert list(QUESTIONS) == [tool.name for tool in TOOLS]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "args.json"
    arguments = {
        "per_device_train_batch_size": 2, "bf16": True, "output_dir": "out",
        "model_name_or_path": "gpt2", "an_unknown_key": 1,
    }  # fmt: skip
    file.write_text(json.dumps(arguments))
    return str(file)


@pytest.mark.parametrize("place", ["model", "config"])
def test_a_configuration_is_read_and_options_come_before_it(place, config):
    (read,) = answer("fits", {place: config, "gpu": "l4"}).documents
    assert (read["setup"]["precision"], read["setup"]["batch"]) == ("bf16", 2)

    changed = {place: config, "gpu": "l4", "options": {"bf16": False, "batch": 1}}
    (read,) = answer("fits", changed).documents
    assert (read["setup"]["precision"], read["setup"]["batch"]) == ("fp32", 1)


@pytest.mark.slow
def test_what_a_document_has_no_place_for_comes_with_it(config):
    kept = answer("advise", {"config": config, "gpu": "l4", "effective_batch": 8})
    assert any("args.json" in note for note in kept.notes)
    assert any("an_unknown_key" in note for note in kept.notes)


ASKED = {"model": "gpt2", "gpu": "t4"}
REFUSED = {
    "no such input": ("fits", {"modle": "gpt2"}, ("modle", "Did you mean 'model'?")),
    "an option beside": ("fits", {**ASKED, "fp16": True}, ('{"options": {"fp16": ...}}',)),
    "no such option": ("fits", {**ASKED, "options": {"bf17": True}}, ("'bf17'", "bf16")),
    "what only the command line has": (
        "estimate", {**ASKED, "options": {"out": "run.html"}}, ("'out' is not an option",)),
    "named twice": (
        "fits", {**ASKED, "batch": 4, "options": {"per_device_train_batch_size": 4}},
        ("batch is named twice",)),
    "null": ("fits", {**ASKED, "options": {"fp16": None}}, ("fp16 is null",)),
    "an object for a list": (
        "fits", {**ASKED, "options": {"freeze": {"a": 1}}}, ("is an object",)),
    "no whole number": ("fits", {**ASKED, "batch": "many"}, ("batch 'many' is no integer",)),
    "true for a number": ("fits", {**ASKED, "batch": True}, ("batch True is no integer",)),
    "true for a number of the options": (
        "fits", {**ASKED, "options": {"grad_accum": True}}, ("--grad-accum", "whole number")),
    "no word for true": ("fits", {**ASKED, "options": {"fp16": "maybe"}}, ("maybe",)),
    "options that are none": ("fits", {**ASKED, "options": "fp16"}, ("options 'fp16'",)),
    "nothing named": ("fits", {"gpu": "t4"}, ("Name a model",)),
    "no GPU": ("fits", {"model": "gpt2"}, ("--gpu",)),
    "no such GPU": ("fits", {"model": "gpt2", "gpu": "t5"}, ("t5",)),
    "no effective batch": ("advise", ASKED, ("advise needs effective_batch",)),
    "an effective batch of none": ("advise", {**ASKED, "effective_batch": 0}, ("0",)),
    "no such detail": ("fits", {**ASKED, "detail": "all"}, ("'all'", "brief", "full")),
    "standard input": ("explain_oom", {"log": "-"}, ("standard input",)),
    "no log": ("explain_oom", {"log": "nowhere.log"}, ("nowhere.log",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(case, capsys):
    name, arguments, words = REFUSED[case]
    with pytest.raises(MemestError) as refusal:
        answer(name, arguments)
    for word in words:
        assert word in str(refusal.value)
    assert capsys.readouterr().out == ""


def test_clients_that_send_objects_as_text_are_understood():
    sent = {"model": "gpt2", "gpu": "t4", "batch": "2", "options": '{"fp16": true}'}
    meant = {"model": "gpt2", "gpu": "t4", "batch": 2, "options": {"fp16": True}}
    assert answer("fits", sent).documents == answer("fits", meant).documents


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": "marker:build"},
        {"model": "gpt2", "options": {"step": "marker:step", "dtype": "float16"}},
    ],
    ids=["a factory", "a step"],
)
def test_code_that_a_question_names_is_not_run(arguments, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "marker.py").write_text("open('was_run', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NO_OWN_CODE, "This server: memest mcp --run-code.")

    with pytest.raises(ConfigError, match=r"marker:\w+ names code.*memest mcp --run-code"):
        answer("estimate", arguments)
    assert not (tmp_path / "was_run").exists()


def test_code_of_a_repository_is_not_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    told = {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModel": "code.Net"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "code.py").write_text("open('was_run', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NO_OWN_CODE, "This server: memest mcp --run-code.")

    with pytest.raises(ConfigError, match=r"trust-remote-code.*names code"):
        answer("fits", {"model": ".", "gpu": "t4", "options": {"trust_remote_code": True}})
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_input_is_a_parameter_of_the_command_and_described(tool):
    schema = tool.schema()
    parameters = inspect.signature(tool.command).parameters

    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() - {"options", "detail"} <= parameters.keys()
    assert {*tool.inputs, "model", "gpu", "batch", "seq_len", "options"} <= schema[
        "properties"
    ].keys()
    assert all(each["description"] for each in schema["properties"].values())
    assert set(tool.required) <= schema["properties"].keys()


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(packages, "is_there", lambda name: False)
    assert run(["mcp"]) == 6
    assert "pip install 'memest-gpu[mcp]'" in capsys.readouterr().err


def test_an_older_package_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(packages, "is_there", lambda name: True)
    monkeypatch.setattr(packages, "installed_version", lambda name: (1, 9))
    assert run(["mcp"]) == 6
    assert "mcp 1.9 is older" in capsys.readouterr().err


def test_nothing_else_loads_the_package():
    code = "import memest.cli.commands, sys; sys.exit('mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fits_says_of_each_limit_what_a_caller_needs():
    options = {"model": "gpt2", "batch": 4, "gpu": ["t4", "gtx-1050"], "fail_over": "9GiB"}
    (document,) = answer("fits", options).documents

    card, small, budget = document["limits"]
    assert [each["of"] for each in document["limits"]] == [
        "Tesla T4", "NVIDIA GeForce GTX 1050", "--fail-over",
    ]  # fmt: skip
    for limit in document["limits"]:
        low, high = limit["required_low_bytes"], limit["required_high_bytes"]
        assert low < limit["required_bytes"] < high
        assert limit["margin_bytes"] == limit["free_bytes"] - limit["required_bytes"]
        assert limit["safe_margin_bytes"] == limit["free_bytes"] - high
    assert card["sentence"].startswith("Fits: gpt2 needs")
    assert card["verdict"] == document["verdict"] == budget["verdict"] == "fits"
    assert small["verdict"] == "does not fit"
    assert small["margin_bytes"] < 0
    assert document["exit_code"] == 4
