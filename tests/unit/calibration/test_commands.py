"""``memest calibrate`` from end to end: measure on the CPU, keep, hand on, fit, apply, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from memest.calibration.case import Case
from memest.calibration.running.runner import Progress
from memest.cli.calibrate_run import _progress_lines
from memest.cli.main import run
from memest.config.setup import Setup
from support.paths import ROOT

SMALL = {"seq_len": 16, "dtype": "float32"}
CAMPAIGN = [
    {"model": ["prajjwal1/bert-tiny"], "setup": {"batch": [2, 6], "loop": "plain", **SMALL}},
    {"model": "gpt2?n_layer=2&n_embd=96&n_head=4", "setup": {"batch": 2, "bf16": True, **SMALL}},
    {"model": "gpt2?n_layer=1&n_embd=96&n_head=4", "setup": {"batch": 2, "loop": "plain", **SMALL}},
    {"model": "prajjwal1/bert-tiny", "setup": {"batch": 2, "fp16": True, **SMALL}},
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A store in which a campaign was measured, and what the command said."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "mine.json").write_text(json.dumps(CAMPAIGN))
    done = subprocess.run(
        [sys.executable, "-m", "memest", "calibrate", "run", "--campaign", folder / "mine.json",
         "--device", "cpu", "--store", folder / "runs.db"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return folder, done


@pytest.fixture
def store(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path / "home"))
    shutil.copy(measured[0] / "runs.db", tmp_path / "runs.db")
    return tmp_path / "runs.db"


@pytest.mark.slow
def test_run_says_what_became_of_every_case(measured):
    folder, done = measured
    assert done.returncode == 1, "one case failed"
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("1/5 bert-tiny-b2-s16-float32-plain-")
    assert all(": ok, allocated " in line for line in lines[:4])
    assert "failed (start: fp16 autocast is not measured on a CPU" in lines[4]
    assert done.stdout.splitlines()[0].startswith("cpu, torch 2.")
    assert "4 measured, 1 failed" in done.stdout
    assert str(folder / "runs.db") in done.stdout


def test_cases_that_were_measured_before_are_one_line(capsys):
    def told(*skipped):
        output = SimpleNamespace(silent=False, progress=lambda: nullcontext(None))
        case = Case(model="some", setup=Setup())
        with _progress_lines(output) as tell:
            for number, over in enumerate(skipped, start=1):
                tell(Progress(number, len(skipped), case, skipped=over))
        return capsys.readouterr().err.splitlines()

    assert told(True, True, False, True) == [
        "2/4 cases: 2 measured before, or being measured",
        "4/4 cases: 1 measured before, or being measured",
    ]
    assert told(True, True) == ["2/2 cases: 2 measured before, or being measured"]
    assert told(False, False) == []


@pytest.mark.slow
def test_show(store, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # as into a pipe: a line for each run
    assert run(["calibrate", "show", "--store", str(store)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6
    assert "5 runs in" in err
    assert run(["calibrate", "show", "--store", str(store), "--status", "failed", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (failed,) = document["measurements"]
    assert failed["failure"]["phase"] == "start"
    assert run(["calibrate", "show", "--store", str(store), "--status", "okay"]) == 2
    assert "Did you mean 'ok'" in capsys.readouterr().err


@pytest.mark.slow
def test_export_import_merge_lose_nothing(store, tmp_path, capsys):
    records, other, third = (tmp_path / n for n in ("runs.jsonl.gz", "other.db", "third.db"))
    assert run(["calibrate", "export", "--store", str(store), "--out", str(records)]) == 0
    assert run(["calibrate", "import", str(records), "--store", str(other)]) == 0
    assert run(["calibrate", "merge", str(other), str(store), "--store", str(third)]) == 0
    out = capsys.readouterr().out
    assert "runs.jsonl.gz: 5 new" in out
    assert "runs.db: 0 new, 5 there already" in out

    texts = []
    for path in (store, third):
        assert run(["calibrate", "export", "--store", str(path)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    for line in texts[0].splitlines():
        record = json.loads(line)
        assert {"id", "model", "task", "setup", "gpu", "metric", "measured_bytes", "source",
                "software", "notes"} <= set(record)  # fmt: skip


@pytest.mark.slow
def test_fit_and_apply(store, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    assert run(["calibrate", "fit", "--store", str(store), "--out", str(profile)]) == 0
    out, err = capsys.readouterr()
    assert "cpu: 4 runs of 3 models" in out
    assert str(profile) in err
    document = json.loads(profile.read_text())
    assert document["provenance"]["statuses"] == {"failed": 1, "ok": 4}
    assert document["validation"]["allocated_error"] < 0.003

    words = ["estimate", "prajjwal1/bert-tiny", "--batch", "4", "--json"]
    assert run([*words, "--gpu", "rtx-3090", "--calibration", str(profile)]) == 0
    applied = json.loads(capsys.readouterr().out)
    assert applied["calibration"]["gpus"] == ["cpu"]
    assert any("measured on a CPU: it corrects tensors only" in note for note in applied["notes"])
    assert run([*words, "--gpu", "rtx-3090", "--profile", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["calibration"] is None
    assert applied["interval"]["level"] is None


@pytest.mark.slow
def test_a_profile_goes_where_estimates_find_it(store, tmp_path, capsys):
    assert run(["calibrate", "fit", "--store", str(store)]) == 0
    assert (tmp_path / "home" / "profiles" / "cpu.json").is_file()


@pytest.mark.slow
def test_report(store, tmp_path, capsys):
    page, text = tmp_path / "deep" / "report.html", tmp_path / "report.md"
    words = ["calibrate", "report", "--store", str(store), "--out", str(page), "--out", str(text)]
    assert run(words) == 0
    assert "<svg" in page.read_text()
    assert "fp16 autocast is not measured on a CPU" in text.read_text()
    assert run(["calibrate", "report", "--store", str(store)]) == 0
    assert capsys.readouterr().out == text.read_text()
    assert run([*words, "--out", "report.pdf"]) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "--campaign", "quik"], 2, "Did you mean 'quick'"),
        (["run", "--campaign", "smoke", "--only", "["], 2, "not a regular expression"),
        (["run", "--campaign", "smoke", "--only", "resnet"], 2, "matches no case"),
        (["run", "--campaign", "smoke", "--device", "cuda:x"], 2, "cuda, cuda:1 or cpu"),
        (["run", "--campaign", "smoke", "--device", "tpu"], 2, "cuda, cuda:1 or cpu"),
        (["run", "--ray"], 2, "memest calibrate merge"),
        (["fit", "--gpu", "h100"], 2, "no run was measured on it"),
        (["fit", "--from", "none.jsonl", "--store", "x"], 2, "drop one"),
        (["fit", "--from", "none.jsonl"], 2, "cannot be read"),
        (["merge", "none.db"], 2, "no store at"),
        (["verify", "--device", "cpu"], 2, "cannot be capped"),
        (["rnu"], 2, "rnu"),
    ],
)
def test_slips_are_explained(store, monkeypatch, capsys, words, code, said):
    monkeypatch.setenv("MEMEST_STORE", str(store))
    assert run(["calibrate", *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_without_a_store_it_is_said_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMEST_STORE", str(tmp_path / "none.db"))
    for command in ("show", "fit", "report", "export"):
        assert run(["calibrate", command]) == 2
        assert "`memest calibrate run` makes one" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


def test_a_bare_checkout_measures_where_nothing_is_installed(tmp_path):
    """The packages are there, memest is not: as on a machine that has torch and no way to pip."""
    site = next(p for p in sys.path if p.endswith("site-packages"))
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    environment = {**os.environ, "PYTHONPATH": site, "MEMEST_COMMIT": "0123456789ab"}
    # .pth files, and with them editable installs, count in site folders alone
    found = subprocess.run(
        [base, "-c", "import memest"], env=environment, capture_output=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    if found.returncode == 0:
        pytest.skip("memest is installed as a package here, not from its checkout")
    (tmp_path / "one.json").write_text(json.dumps(CAMPAIGN[2:3]))

    done = subprocess.run(
        [base, ROOT / "calibration", "run", "--campaign", tmp_path / "one.json", "--device", "cpu",
         "--store", tmp_path / "runs.db"],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "1 measured" in done.stdout


def test_help_needs_none_of_the_heavy_packages():
    code = (
        "import sys\nfrom memest.cli.main import run\nrun(['calibrate', 'run', '--help'])\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
