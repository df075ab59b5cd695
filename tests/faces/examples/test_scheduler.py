"""The examples for schedulers and CI do what they say, in a real bash."""

from __future__ import annotations

import shutil

import pytest

from support.paths import ROOT

EXAMPLES = ROOT / "examples"
MODEL = (
    "bert-large-uncased?num_hidden_layers=2&hidden_size=64&intermediate_size=128"
    "&num_attention_heads=2&vocab_size=1000"
)
WORDS = f"'{MODEL}' --batch 2 --seq-len 32"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")


PROLOG = str(EXAMPLES / "slurm/task_prolog.sh")


def test_the_prolog_says_nothing_where_a_job_says_nothing(bash):
    done = bash(PROLOG, SLURM_JOB_ID="7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_prolog_asks_the_driver_for_the_gpu(bash):
    done = bash(PROLOG, gpu="Tesla T4", SLURM_JOB_ID="7", MEMEST_FITS=WORDS)

    assert done.returncode == 0
    assert done.stdout.startswith("print memest: Fits: bert-large-uncased")
    assert "Tesla T4" in done.stdout
    assert all(line.startswith("print ") for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("cancel", "cancelled"), [("0", False), ("1", True)])
def test_the_prolog_cancels_only_what_asked_for_it(bash, cancel, cancelled):
    words = f"{WORDS} --gpu-memory 100MiB"
    done = bash(PROLOG, SLURM_JOB_ID="7", MEMEST_FITS=words, MEMEST_CANCEL=cancel)

    assert done.returncode == 0  # a node must not be drained
    assert "Does not fit" in done.stdout
    assert (bash.tmp_path / "cancelled").exists() is cancelled
    if cancelled:
        assert (bash.tmp_path / "cancelled").read_text() == "7\n"


def test_the_prolog_survives_what_it_cannot_say(bash):
    for words in ("no/such-model --gpu t4", "gpt2 --batch none --gpu t4"):
        done = bash(PROLOG, SLURM_JOB_ID="7", MEMEST_FITS=words, MEMEST_CANCEL="1")
        assert done.returncode == 0
        assert done.stdout.startswith("print memest: ")
    assert not (bash.tmp_path / "cancelled").exists()
    assert bash(PROLOG, SLURM_PROCID="3", MEMEST_FITS=words).stdout == ""


def test_words_of_a_job_are_never_run(bash):
    words = f"{WORDS} --gpu '$(touch stolen)' ; touch stolen `touch stolen`"
    assert bash(PROLOG, SLURM_JOB_ID="7", MEMEST_FITS=words).returncode == 0
    assert not (bash.tmp_path / "stolen").exists()


SBATCH = str(EXAMPLES / "slurm/train.sbatch")


@pytest.mark.slow
def test_the_job_trains_where_the_run_fits(bash):
    done = bash(SBATCH, SLURM_JOB_ID="7", MODEL=MODEL, TRAIN="echo trains with")

    assert done.returncode == 0, done.stderr
    assert "Fits" in done.stdout
    trained = f"trains with --model_name_or_path {MODEL} --per_device_train_batch_size 8"
    assert trained in done.stdout


@pytest.mark.slow
def test_the_job_does_not_start_where_it_does_not_fit(bash):
    done = bash(SBATCH, MODEL="bert-large-uncased", BATCH="64", GPU="t4", TRAIN="echo trains")

    assert done.returncode == 4
    assert "trains" not in done.stdout
    assert "not started" in done.stderr
    assert "micro-batch" in done.stderr or "batch" in done.stderr


@pytest.mark.slow
def test_the_job_explains_why_memory_ran_out(bash):
    log = bash.tmp_path / "slurm-7.out"
    log.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.22 GiB. GPU 0 has a total "
        "capacity of 79.15 GiB of which 3.71 GiB is free. Of the allocated memory 70.14 GiB is "
        "allocated by PyTorch, and 771.43 MiB is reserved by PyTorch but unallocated.\n"
    )
    done = bash(SBATCH, SLURM_JOB_ID="7", MODEL=MODEL, TRAIN="false")

    assert done.returncode == 1
    assert "does not look like that command" in " ".join(done.stdout.split())


# The GitHub Action


def _action():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / "github-action/action.yml").read_text(encoding="utf-8"))


def _step(bash, **inputs):
    """Run the action's step as a runner does: inputs become its variables."""
    action = _action()
    given = {name: str(about.get("default", "")) for name, about in action["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    step = next(step for step in action["runs"]["steps"] if step["id"] == "fits")
    env = {}
    for name, text in step["env"].items():
        source = text.removeprefix("${{ inputs.").removesuffix(" }}")
        env[name] = given[source]
    script = bash.tmp_path / "step.sh"
    script.write_text(step["run"])
    files = {name: bash.tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = bash("--noprofile", "--norc", "-eo", "pipefail", str(script), **env,
                **{name: str(path) for name, path in files.items()})  # fmt: skip
    return done, {name: path.read_text() if path.exists() else "" for name, path in files.items()}


@pytest.mark.parametrize(
    ("inputs", "code", "verdict"),
    [
        ({"gpu": "t4"}, 0, "fits"),
        ({"fail_over": "22GiB"}, 0, "fits"),
        ({"gpu": "t4", "fail_over": "100MiB"}, 4, "does not fit"),
        ({"fail_over": "620MiB"}, 3, "tight"),
        ({"fail_over": "620MiB", "tight": "pass"}, 0, "tight"),
        ({"gpu": "t4", "options": "--batch 2 --seq-len 32 --unpriced judge"}, 7, "cannot say"),
    ],
)
def test_the_action_ends_as_the_run_does(bash, inputs, code, verdict):
    done, files = _step(bash, **{"model": MODEL, "options": "--batch 2 --seq-len 32"} | inputs)

    assert done.returncode == code, done.stderr
    outputs = dict(line.split("=") for line in files["GITHUB_OUTPUT"].splitlines())
    assert outputs["verdict"] == verdict
    assert int(outputs["device-bytes"]) > 0
    assert f"GPU memory: {verdict}" in files["GITHUB_STEP_SUMMARY"]


def test_the_action_fails_where_memest_cannot_say(bash):
    done, files = _step(bash, model="no/such-model", gpu="t4")

    assert done.returncode == 5
    assert files["GITHUB_OUTPUT"] == ""


def test_inputs_are_never_part_of_the_script(bash):
    done, _ = _step(bash, model="$(touch stolen)", options='"; touch stolen; "', gpu="`id`")

    assert done.returncode != 0
    assert not (bash.tmp_path / "stolen").exists()
    for step in _action()["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_the_action_installs_what_it_is_told(bash):
    """The name alone is another project's on the package index."""
    install = next(step for step in _action()["runs"]["steps"] if step["id"] == "install")
    assert _action()["inputs"]["requirement"]["required"] is True
    assert install["env"] == {"REQUIREMENT": "${{ inputs.requirement }}"}

    bash.tool("python", 'printf "%s\\n" "$@"')
    done = bash("-c", install["run"], REQUIREMENT="./memest-gpu[torch] ; touch stolen")
    assert done.stdout.splitlines()[-1] == "./memest-gpu[torch] ; touch stolen"
    assert not (bash.tmp_path / "stolen").exists()


def test_the_workflow_gives_only_inputs_that_there_are():
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "github-action/workflow.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()

    given, inputs = set(job["steps"][-1]["with"]), _action()["inputs"]
    assert given <= set(inputs)
    assert {name for name, about in inputs.items() if about.get("required")} <= given
