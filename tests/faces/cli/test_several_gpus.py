"""What every face says of a run on several GPUs: whose memory the figures are."""

from __future__ import annotations

import pytest

import memest
from memest.cli.main import run

QUESTION = ["gpt2", "--num-gpus", "4", "--batch", "2", "--seq-len", "64"]
EACH = "on each of 4 GPUs"


@pytest.mark.parametrize("more", [[], ["--gpu", "t4"], ["--quiet"]], ids=str)
def test_the_first_sentence_of_a_report(capsys, more):
    """With a card and without one, and in the sentence alone."""
    assert run(["estimate", *QUESTION, *more]) == 0
    assert EACH in " ".join(capsys.readouterr().out.split()).partition(". ")[0]


def test_a_budget_and_a_sweep(capsys):
    """What is held against a budget, and what a table is of."""
    assert run(["fits", *QUESTION, "--fail-over", "40GiB"]) == 0
    assert EACH in capsys.readouterr().out
    assert run(["sweep", *QUESTION, "--over", "precision=fp16,bf16", "--quiet"]) == 0
    assert "of GPU memory on each GPU." in capsys.readouterr().out


def test_the_explorer():
    """Beside the verdict, with a card and without one."""
    hero = pytest.importorskip("memest.app.hero").hero
    options = {"num_gpus": 4, "batch": 2, "seq_len": 64}
    assert f"this is what it needs {EACH}" in hero(memest.estimate("gpt2", **options))[0]
    assert "on T4, each of 4 GPUs" in hero(memest.estimate("gpt2", gpu="t4", **options))[0]
