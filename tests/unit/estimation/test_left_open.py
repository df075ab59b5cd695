"""What a question leaves open is told with what it could change, as asking for it tells."""

from __future__ import annotations

import pytest

import memest
from memest.report.result import Verdict
from memest.report.suggestions import Suggestion, Suggestions
from memest.report.terminal import render
from memest.units import GIB

BERT = "bert-large-uncased"
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def open_question():
    return memest.estimate(BERT, batch=8, fp16=True)


def change_of(estimate, words):
    (found,) = [each for each in estimate.left_open if words in each.text]
    return found.change_bytes


@pytest.mark.parametrize(
    ("words", "other"),
    [("sequence length 512", {"seq_len": 256}), ("optimizer adamw", {"optim": "adamw_bnb_8bit"})],
    ids=["length", "optimizer"],
)
def test_what_another_choice_changes_is_what_asking_for_it_tells(open_question, words, other):
    asked = memest.estimate(BERT, batch=8, fp16=True, **other)
    change = asked.peak.device_bytes - open_question.peak.device_bytes
    assert change_of(open_question, words) == change != 0


def test_the_card_that_changes_most_is_named(open_question):
    device = open_question.peak.device_bytes
    changes = [fit.device_bytes - device for fit in open_question.common_gpus]
    assert abs(change_of(open_question, "name a GPU")) == max(map(abs, changes))


def test_what_changes_most_comes_first(open_question):
    changes = [abs(each.change_bytes) for each in open_question.left_open]
    assert changes == sorted(changes, reverse=True)
    assert min(changes) >= open_question.peak.device_bytes // 100


def test_what_is_asked_for_is_not_left_open():
    asked = memest.estimate(
        BERT, batch=8, fp16=True, seq_len=512, optim="adafactor", gpu="t4", max_batch=False
    )
    assert asked.left_open == ()


def test_weights_in_half_precision_are_told_with_what_float32_takes():
    asked = {"batch": 1, "bf16": True, "seq_len": 512, "max_batch": False, "gpu": "a100-80gb"}
    whole = memest.estimate(LLAMA, **asked)
    assert change_of(whole, "bfloat16 weights") == whole.model.parameter_bytes


@pytest.mark.slow
def test_weights_below_adapters_are_the_bases_and_named_ones_are_not_open():
    asked = {"batch": 1, "bf16": True, "seq_len": 512, "max_batch": False, "gpu": "a100-80gb"}
    whole = memest.estimate(LLAMA, **asked)
    adapters = memest.estimate(LLAMA, **asked, lora_r=16)
    assert change_of(adapters, "bfloat16 weights") == whole.model.parameter_bytes
    named = memest.estimate(LLAMA, **asked, dtype="bfloat16")
    assert not [each for each in named.left_open if "weights" in each.text]


def test_a_kernel_is_usual_unless_something_kept_pytorch_from_a_better_one():
    for gpu, usual in (("a100-80gb", True), ("t4", False)):
        estimate = memest.estimate(BERT, batch=8, fp16=True, gpu=gpu, seq_len=512, max_batch=False)
        (kernel,) = [text for text in estimate.assumptions if text.startswith("attention: ")]
        assert (kernel in estimate.usual) is usual
        (loop,) = [text for text in estimate.assumptions if text.startswith("loop: ")]
        assert loop in estimate.usual


def test_the_report_tells_what_is_usual_on_request_alone(open_question):
    assert open_question.usual
    short, long = render(open_question), render(open_question, explain=True)
    for text in open_question.usual:
        start = text[:40]
        assert start not in short
        assert start in long
    for choice in open_question.left_open:
        assert short.count(choice.text[:40]) == 1
    assert "range of the device peak" in long


def test_tips_stand_before_the_peaks(open_question):
    change = Suggestion(
        words="8-bit AdamW", options=(("optim", "adamw_bnb_8bit"),), verdict=Verdict.FITS,
        arguments="--optim adamw_bnb_8bit", device_bytes=GIB, gain_bytes=GIB, relative_time=1.25,
        changes_training="states of 8 bits",
    )  # fmt: skip
    found = Suggestions(
        model=BERT, gpu="Tesla T4", usable_bytes=GIB, verdict=Verdict.DOES_NOT_FIT,
        device_bytes=2 * GIB, changes=(change,), closest=None, time_basis="",
    )  # fmt: skip
    text = render(open_question, tips=lambda: found)
    assert text.index("Fullest") < text.index("What makes it fit") < text.index("\nPeaks")
    assert "1  8-bit AdamW (states of 8 bits)" in text
    assert "fits, -1.00 GiB, 1.25 × time: --optim adamw_bnb_8bit" in text
    assert render(open_question, tips=lambda: None) == render(open_question)
