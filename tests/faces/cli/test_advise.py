"""``memest advise`` as text, as JSON and as a command."""

import dataclasses
import json

import pytest

from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.report.findings import Advice, Plan, PlanStep
from memest.report.result import Verdict
from memest.report.suggestions import Suggestion, Suggestions
from memest.report.tables import advice_sentence
from memest.report.terminal import render
from memest.units import GIB

TINY = ("prajjwal1/bert-tiny", "--seq-len", "32")


def plan(estimate, *, batch, grad_accum=1, time=1.0, changes=(), **setup):
    return Plan(
        batch=batch,
        grad_accum=grad_accum,
        estimate=dataclasses.replace(
            estimate, setup=Setup(batch=batch, grad_accum=grad_accum, **setup)
        ),
        relative_time=time,
        changes_training=changes,
        steps=(
            PlanStep(
                option="micro-batch", value=str(batch),
                why="fills the card: it needs 12.60 GiB of 23.65 GiB; one accumulation step less "
                "means 32, which needs 25.10 GiB, 1.45 GiB more than there is",
            ),
            PlanStep(option="accumulation", value=str(grad_accum), why="2 x 16 = 32 samples"),
            PlanStep(option="checkpointing", value="none", why="recomputing would only cost time"),
        ),
        written_for="TrainingArguments",
        arguments=(f"--per_device_train_batch_size={batch}", "--optim=adamw_torch_fused"),
        own_arguments=("--attn_implementation=sdpa",) * (batch == 1),
    )  # fmt: skip


def advice(plans=(), closest=None, otherwise=None):
    return Advice(
        model="bert-large-uncased", gpu="NVIDIA GeForce RTX 4090", usable_bytes=25_393_364_992,
        effective_batch=32, plans=tuple(plans), closest=closest,
        otherwise=otherwise, time_basis="an estimate without a measurement",
        notes=("a note of some length.",),
    )  # fmt: skip


@pytest.fixture
def several(samples):
    changes = ("sgd in place of adamw_torch_fused",)
    return advice(
        [
            plan(samples["fits"], batch=16, grad_accum=2),
            plan(samples["fits"], batch=32, time=1.3, checkpointing="full"),
            plan(samples["fits"], batch=32, time=0.9, optim="sgd", changes=changes),
            plan(samples["tight"], batch=32, time=0.95),
        ]
    )


@pytest.fixture
def none(samples):
    change = Suggestion(
        words="LoRA of rank 16, checkpointing", options=(("lora_r", 16),), arguments="--lora-r 16",
        verdict=Verdict.FITS, device_bytes=GIB, gain_bytes=30 * GIB, relative_time=None,
        changes_training="trains adapters only",
    )  # fmt: skip
    otherwise = Suggestions(
        model="m", gpu="Tesla T4", usable_bytes=15 * GIB, verdict=Verdict.DOES_NOT_FIT,
        device_bytes=31 * GIB, changes=(change,), closest=None, time_basis="an estimate",
    )  # fmt: skip
    closest = plan(samples["does_not_fit"], batch=1, grad_accum=32)
    return advice(closest=closest, otherwise=otherwise)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", ["several", "none"])
def test_golden(request, golden, name, width):
    answer = request.getfixturevalue(name)
    golden(f"advise_{name}_{width}.txt", render(answer, width=width))


def test_golden_ascii(several, golden):
    text = render(several, ascii_only=True)
    assert text.isascii()
    golden("advise_ascii.txt", text)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
@pytest.mark.parametrize("name", ["several", "none"])
def test_no_line_is_wider_than_the_terminal(request, name, width):
    text = render(request.getfixturevalue(name), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_sentences(several, none, samples):
    assert advice_sentence(several).startswith("Fits: bert-large-uncased with 32 samples a step")
    assert "micro-batch 16 x 2 accumulated" in advice_sentence(several)
    assert none.verdict is Verdict.DOES_NOT_FIT
    assert none.miss_bytes > 0
    assert "misses by" in advice_sentence(none)
    assert advice_sentence(none).endswith("checkpointing (trains adapters only): fits.")
    tight = advice([plan(samples["tight"], batch=32)])
    assert advice_sentence(tight).startswith("Tight: ")
    assert "may take up to" in advice_sentence(tight)


def test_the_first_sentence_says_when_the_best_plan_changes_the_training(several, samples):
    sgd = plan(samples["fits"], batch=32, changes=("sgd in place of adamw_torch_fused",))
    assert advice_sentence(advice([sgd])).endswith(
        "; nothing surely fits as asked, so this changes the training: sgd in place of "
        "adamw_torch_fused."
    )
    assert any(each.changes_training for each in several.plans)
    assert "changes the training" not in advice_sentence(several)


def test_the_first_sentence_says_that_figures_are_of_each_gpu(samples):
    ranks = Distributed(num_gpus=4)
    fits = plan(samples["fits"], batch=32, distributed=ranks)
    assert advice_sentence(advice([fits])).endswith(" of 23.65 GiB on each of 4 GPUs.")
    none = plan(samples["does_not_fit"], batch=1, distributed=ranks)
    assert advice_sentence(advice(closest=none)).endswith(" on each of 4 GPUs.")


@pytest.mark.slow
def test_the_command(cli):
    done = cli("advise", *TINY, "--gpu", "t4", "--effective-batch", "16")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("Fits: prajjwal1/bert-tiny with 16 samples a step on Tesla T4")
    assert "--per_device_train_batch_size=16" in done.stdout


def test_json_is_one_document(cli):
    done = cli("advise", *TINY, "--gpu", "t4", "-n", "16", "--json")
    document = json.loads(done.stdout)
    assert document["plans"][0]["batch"] == 16


@pytest.mark.slow
def test_nothing_fits_is_exit_code_4(cli):
    done = cli("advise", *TINY, "--gpu-memory", "130MiB", "-n", "2", "--quiet", "--optim", "sgd")
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("Does not fit: ")


@pytest.mark.slow
def test_only_tight_plans_are_exit_code_3(cli):
    done = cli("advise", *TINY, "--gpu-memory", "620MiB", "-n", "1", "--quiet", "--optim", "sgd")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("Tight: ")
