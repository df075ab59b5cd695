"""What commands print with ``--json`` is what docs/schemas says, and nothing else is."""

from __future__ import annotations

import copy
import json
import pickle

import jsonschema
import pytest

from memest.calibration.running.runner import Summary
from memest.calibration.running.verify import Expectation, Trial, VerifyOutcome
from memest.calibration.store import MeasurementStore
from memest.catalog.nvml import LocalGpu
from memest.cli import calibrate_fit, selftest
from memest.cli.main import run
from support.case_records import record
from support.paths import ROOT, SHARED
from support.simulated_runs import ended_run, environment, simulate
from support.tools import load_tool

FOLDER = ROOT / "docs" / "schemas"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 14.58 GiB of which 1.20 GiB is free. Process 12 has 13.30 GiB memory in use. Of "
    "the allocated memory 12.00 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch "
    "but unallocated."
)
GPT2 = ("gpt2", "--batch", "4", "--seq-len", "128")
LOG = str(ROOT / "tests/support/memory.csv")
BUDGET = ("--fail-over", "12GiB")
ASKED = {
    "estimate, no GPU": ("estimate", *GPT2),
    "estimate, a GPU": ("estimate", *GPT2, "--gpu", "t4", "--gpu", "a100"),
    "estimate, from a command": (
        "estimate",
        "--launch",
        "train.py --model_name_or_path gpt2 --bf16",
    ),
    "fits": ("fits", *GPT2, "--gpu", "t4", *BUDGET),
    "fits, nothing but a budget": ("fits", *GPT2, *BUDGET),
    "max-batch": ("max-batch", "gpt2", "--seq-len", "128", "--gpu", "t4", "-n", "64"),
    "compare": ("compare", *GPT2, "--vs", "batch=2 grad-accum=2"),
    "advise": ("advise", "gpt2", "--seq-len", "128", "--gpu", "t4", "-n", "16"),
    "sweep": ("sweep", "gpt2", "--seq-len", "128", "--over", "batch=1,2", "--gpu", "t4"),
    "sweep, a point without an answer": ("sweep", "gpt2", "--over", "seq-len=128,2000"),
    "stages": ("stages", *GPT2, "--num-gpus", "2"),
    "explain-oom": ("explain-oom", OOM),
    "explain-oom, a model": ("explain-oom", OOM, *GPT2),
    "explain-growth": ("explain-growth", LOG),
    "explain-growth, a model": ("explain-growth", LOG, *GPT2),
    "read": ("read", "--launch", "torchrun --nproc_per_node 4 train.py --bf16 --fp8_x 1"),
    "models": ("models", "bert"),
    "gpus": ("gpus",),
    "cache": ("cache",),
    "cache, path": ("cache", "--path"),
    "cache, cleared": ("cache", "--clear"),
    "env": ("env",),
}
"""Command lines that have an answer; the first word is the command."""
FREE = {
    "value", "values", "options", "setup", "zero_settings", "variables", "packages", "paths",
    "case", "without_figure", "groups", "factors", "raw_parts", "skipped", "verified", "seen",
    "statuses", "versions",
}  # fmt: skip
"""Keys below which anything may stand: values of options, and names that users or files give."""


def schema_of(command):
    return json.loads((FOLDER / f"{command}.json").read_text(encoding="utf-8"))


def closed(schema):
    """The schema with no further keys: what it does not name is not there today."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: closed(each) for name, each in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        out["additionalProperties"] = False
    return out


def validator(schema):
    whole = closed(schema)
    del whole["type"]  # of the document itself, which is an answer or an error
    return jsonschema.Draft202012Validator(whole)


def spoiled(document, path=()):
    """(path, document) with each key taken out, and with each value of another kind.

    Of lists the first entry stands for all.
    """
    part = document
    for step in path:
        part = part[step]
    steps = list(part) if isinstance(part, dict) else [0] if isinstance(part, list) and part else []
    for step in steps:
        if isinstance(part, dict):
            yield (*path, step), "without", _changed(document, path, step, remove=True)
        wrong = 5 if isinstance(part[step], (dict, list, str)) else {"another": "kind"}
        yield (*path, step), "mistyped", _changed(document, path, step, value=wrong)
        if step not in FREE:
            yield from spoiled(document, (*path, step))


def _changed(document, path, step, *, remove=False, value=None):
    whole = copy.deepcopy(document)
    part = whole
    for each in path:
        part = part[each]
    if remove:
        del part[step]
    else:
        part[step] = value
    return whole


def optional_keys(schema):
    """Keys that some object of a schema has and does not need, or that stand for any name."""
    found = set()
    stack = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            named = each.get("properties")
            if isinstance(named, dict):
                found |= set(named) - set(each.get("required", ()))
            stack += each.values()
        elif isinstance(each, list):
            stack += each
    return found


def check(command, document):
    """A document is of its schema, and would not be with a key less or a value of another kind."""
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    strict = validator(schema)
    strict.validate(document)
    may_miss = optional_keys(schema)
    passed = [
        (path, how)
        for path, how, wrong in spoiled(document)
        if strict.is_valid(wrong)
        and path[-1] not in FREE
        and not (how == "without" and path[-1] in may_miss)
    ]
    assert not passed, f"{command}: these could be anything: {passed}"


def asked(capsys, *words):
    code = run([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path / "home"))


@pytest.mark.slow("stages")
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_of_its_schema(name, capsys):
    words = ASKED[name]
    _, document = asked(capsys, *words)
    assert "error" not in document
    check(words[0], document)


@pytest.mark.parametrize("name", sorted(load_tool("schemas").COMMANDS))
def test_an_error_is_of_the_schema_of_every_command(name, capsys):
    code, document = asked(capsys, *name.split("-", 1) if name.startswith("calibrate-") else [name],
                           "--no-such-option")  # fmt: skip
    assert code == 2
    assert document["error"]["exit_code"] == 2
    assert document["error"]["kind"] == "UsageError"
    check(name, document)


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (("estimate", "gpt2", "--gpu", "no-such-card"), "UnknownGpuError", 5),
        (("estimate", "gpt2", "--batch", "0"), "ConfigError", 2),
        (("replay", "no-such-file.pickle"), None, 2),
    ],
)
def test_errors_name_their_kind(words, kind, code, capsys):
    got, document = asked(capsys, *words)
    assert got == code == document["error"]["exit_code"]
    assert kind in (None, document["error"]["kind"])
    check(words[0], document)


def test_the_files_are_those_of_the_code():
    pages = load_tool("schemas").pages()
    assert {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")} == pages


def test_every_command_with_json_has_a_schema():
    from memest.cli.commands import build

    def with_json(commands, before=""):
        for name, command in commands.items():
            if hasattr(command, "commands"):
                yield from with_json(command.commands, f"{name}-")
            elif any("--json" in parameter.opts for parameter in command.params):
                yield before + name

    assert set(with_json(build().commands)) == set(load_tool("schemas").COMMANDS)


def test_a_card_of_this_machine(capsys, monkeypatch):
    card = LocalGpu(
        index=0, name="Tesla T4", uuid="GPU-1", total_bytes=16 << 30, used_bytes=1 << 20,
        free_bytes=15 << 30, reserved_bytes=None, driver="580.1", compute_capability=(7, 5),
        mig=False, processes=(),
    )  # fmt: skip
    monkeypatch.setattr("memest.catalog.nvml.local_gpus", lambda: [card])
    for words in (("env",), ("gpus", "--local"), ("selftest",)):
        code, document = asked(capsys, *words)
        assert code == 0
        check(words[0], document)


def test_a_replay(capsys, tmp_path):
    path = SHARED / "snapshots" / "small_lm_fp32_fwd_bwd.pickle"
    if path.is_file():
        check("replay", asked(capsys, "replay", str(path))[1])
    predicted = tmp_path / "run.pickle"
    assert run(["estimate", *GPT2, "--snapshot", str(predicted)]) == 0
    capsys.readouterr()
    _, document = asked(capsys, "replay", str(predicted))
    assert document["devices"]
    check("replay", document)
    content = pickle.loads(predicted.read_bytes())
    content["device_traces"] = [[] for _ in content["device_traces"]]
    predicted.write_bytes(pickle.dumps(content))
    code, document = asked(capsys, "replay", str(predicted))
    assert code == 7
    assert document["segments"]
    check("replay", document)


def test_scores(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    lines = [record(), record(id="two", gpu="no such card"), {"id": "three"}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    check("validate", asked(capsys, "validate", str(path))[1])


def test_calibrations(capsys, tmp_path, monkeypatch):
    pairs = simulate(models=4, each=3, factor=1.02)
    runs = [pair.measurement for pair in pairs]
    stores = [tmp_path / "runs.db", tmp_path / "other.db"]
    with MeasurementStore(stores[0], create=True) as store:
        store.add([*runs, ended_run().measurement])
    at = ("--store", str(stores[0]))
    check("calibrate-show", asked(capsys, "calibrate", "show", *at)[1])
    records = tmp_path / "records.jsonl"
    assert run(["calibrate", "export", *at, "--out", str(records)]) == 0
    capsys.readouterr()
    records.write_text(f"{records.read_text()}nothing\n")
    for name, words in (("import", str(records)), ("merge", str(stores[0]))):
        to = ("--store", str(stores[1]))
        code, document = asked(capsys, "calibrate", name, words, *to)
        assert code == (1 if name == "import" else 0)
        check(f"calibrate-{name}", document)
    monkeypatch.setattr(calibrate_fit, "_pairs", lambda *_: pairs)
    out = tmp_path / "calibration.json"
    check("calibrate-fit", asked(capsys, "calibrate", "fit", *at, "--out", str(out))[1])

    words = ("estimate", *GPT2, "--gpu", "t4", "--calibration", str(out))
    _, document = asked(capsys, *words)
    assert document["calibration"]
    check("estimate", document)

    summary = Summary(environment=environment(), measurements=runs[:2])
    monkeypatch.setattr("memest.calibration.running.runner.run_cases", lambda *_, **__: summary)
    check("calibrate-run", asked(capsys, "calibrate", "run", *at)[1])
    trial = Trial(kind="card", case=runs[0].case, memory_bytes=1, expected=Expectation.EITHER)
    outcome = VerifyOutcome(environment=environment(), trials=[(trial, runs[0])])
    monkeypatch.setattr("memest.calibration.running.verify.verify_store", lambda *_, **__: outcome)
    check("calibrate-verify", asked(capsys, "calibrate", "verify", *at)[1])


def test_one_document_alone_stands_on_stdout(capsys, tmp_path, monkeypatch):
    """The answer is out, and its file cannot be written: no second document behind it."""
    monkeypatch.setattr(calibrate_fit, "_pairs", lambda *_: simulate(models=4, each=3))
    with MeasurementStore(tmp_path / "runs.db", create=True) as store:
        store.add([ended_run().measurement])
    (tmp_path / "file").write_text("")
    code, document = asked(
        capsys, "calibrate", "fit", "--store", str(tmp_path / "runs.db"),
        "--out", str(tmp_path / "file" / "calibration.json"),
    )  # fmt: skip
    assert code != 0
    assert "error" not in document


def test_a_failed_check_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(selftest, "KNOWN_BYTES", 1)
    monkeypatch.setattr(selftest, "TINY_PARAMETERS", 1)
    code, document = asked(capsys, "selftest")
    assert code == 1
    assert document["ok"] is False
    states = {each["check"]: each["state"] for each in document["checks"]}
    assert states["known answer"] == states["own trace"] == "failed"
