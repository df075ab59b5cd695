"""What is said of a run on a GPU: fits, by releasing cache, tight, cannot say, does not fit."""

from __future__ import annotations

import dataclasses

import pytest

import memest
from memest.cli.answering import exit_code, within
from memest.cli.main import run
from memest.estimation.gpu_target import target_gpus
from memest.estimation.run_facts import Peaks
from memest.estimation.verdict import verdict_for
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.report.result import Verdict
from memest.report.tables import advice_sentence
from memest.report.words import gpu_sentence, verdict_sentence
from memest.units import GIB, MIB

QUESTION = {"batch": 8, "fp16": True}
BERT = "bert-large-uncased"
DPO = "run.yaml:stage: dpo: a reference model"


@pytest.fixture(scope="module")
def fitting():
    return memest.estimate(BERT, **QUESTION, gpu="a100-80gb", unpriced=[DPO])


def test_what_is_not_priced_makes_no_run_fit(fitting):
    plain = memest.estimate(BERT, **QUESTION, gpu="a100-80gb")
    assert plain.verdict is Verdict.FITS
    assert fitting.verdict is Verdict.CANNOT_SAY
    assert fitting.peak == plain.peak
    assert DPO in verdict_sentence(fitting)
    assert fitting.to_dict()["verdict_reason"] == f"not priced: {DPO}"
    assert fitting.safe_batch == 0 < fitting.max_batch == plain.max_batch


def test_what_is_over_the_card_already_does_not_fit():
    answer = memest.estimate(BERT, **QUESTION, gpu_memory="6GiB", unpriced=[DPO], max_batch=False)
    assert answer.verdict is Verdict.DOES_NOT_FIT


def test_an_estimate_without_a_gpu_says_it_first():
    answer = memest.estimate(BERT, **QUESTION, unpriced=[DPO])
    assert verdict_sentence(answer).endswith(f"and more for what is not priced: {DPO}.")
    assert {fit.verdict for fit in answer.common_gpus} <= {
        Verdict.CANNOT_SAY, Verdict.DOES_NOT_FIT,
    }  # fmt: skip


def test_a_budget_is_no_promise_either(fitting):
    assert within(fitting, 80 * GIB) is Verdict.CANNOT_SAY
    assert within(fitting, GIB) is Verdict.DOES_NOT_FIT


def test_a_budget_has_its_unit_and_the_worst_is_said_first(capsys):
    words = ["fits", BERT, "--batch", "8", "--fp16"]
    assert run([*words, "--fail-over", "12"]) == 2
    assert "is 12 bytes, and no run takes so little" in capsys.readouterr().err
    assert run([*words, "--gpu", "a100-80gb", "--fail-over", "6GiB"]) == 4
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Does not fit: {BERT} takes more than the 6.00 GiB allowed")
    assert second.startswith("Fits: ")


def test_advice_and_largest_batch_follow():
    advice = memest.advise(BERT, effective_batch=8, gpu="a100-80gb", fp16=True, unpriced=[DPO])
    assert advice.verdict is Verdict.CANNOT_SAY
    assert advice.plans[0].verdict is Verdict.FITS  # of what is priced
    largest = memest.max_batch(BERT, gpu="t4", fp16=True, unpriced=[DPO])
    assert largest.answers[0].safe == 0
    assert f"not priced, so nothing is safe: {DPO}" in largest.notes


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["fits"], 0),
        (["fits", "tight"], 3),
        (["fits by releasing cache", "fits"], 3),
        (["tight", "cannot say"], 7),
        (["cannot say", "does not fit", "tight"], 4),
    ],
)
def test_the_worst_verdict_is_the_exit_code(verdicts, code):
    assert exit_code(*map(Verdict, verdicts)) == code


# -- by hand: ten blocks that leave ten holes, and what does not fit into them ------------------

EVENTS = [*range(10), *(~n for n in range(10)), *range(10, 20)]
SIZES = [30 * MIB] * 10 + [36 * MIB] * 10


def judged(usable, conf="", slack=0, label="aten.mm.default", **setup):
    """The verdict on a run that reserves 660 MiB of which 360 MiB are ever allocated."""
    options = parse_alloc_conf(conf)
    result = replay(EVENTS, SIZES, options)
    target = dataclasses.replace(
        target_gpus(memest.Setup(), gpu="t4").main, usable_bytes=usable * MIB
    )
    reserved = result.peak_reserved_bytes
    peaks = Peaks(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved,
        low_bytes=reserved,
        high_bytes=reserved + slack * MIB,
        level=None,
        basis="",
        process_low_bytes=0,
        process_expected_bytes=0,
        slack_bytes=slack * MIB,
    )
    stream = type("S", (), {
        "events": EVENTS, "sizes": SIZES, "chains": None, "on_streams": b"", "empty_cache_at": (),
        "labels": [0] * len(SIZES), "label_names": [label],
    })()  # fmt: skip
    return verdict_for(target, memest.Setup(**setup), peaks, stream, result, options)


def test_cached_memory_that_is_given_back_is_no_close_call():
    fit = judged(400)
    assert fit.verdict is Verdict.RELEASES_CACHE
    assert "360 MiB allocated, 660 MiB reserved" in fit.reason
    assert "expandable_segments:True would make it fit" in fit.reason
    assert "Fits by releasing cache" in gpu_sentence(fit, "it")


def test_no_segments_are_offered_that_are_there():
    assert judged(400, "expandable_segments:True").verdict is Verdict.FITS


def test_tensors_that_do_not_fit_do_not_fit():
    assert judged(350).verdict is Verdict.DOES_NOT_FIT
    why = "300 MiB of it are cached, and giving those back is not enough"
    assert why in gpu_sentence(judged(350), "it")
    assert judged(350, unpriced=[DPO]).verdict is Verdict.DOES_NOT_FIT
    assert judged(400, unpriced=[DPO]).verdict is Verdict.CANNOT_SAY


def test_workspaces_of_convolutions_end_no_run():
    """PyTorch takes another algorithm where cuDNN's workspace does not fit."""
    label = "aten.convolution.default: cuDNN convolution workspace"
    assert judged(350, label=label).verdict is Verdict.RELEASES_CACHE
    assert judged(350, label="aten.sum: reduction scratch").verdict is Verdict.DOES_NOT_FIT


def test_a_range_that_is_a_librarys_choice_is_tight_and_says_so():
    assert judged(700, slack=600).verdict is Verdict.TIGHT
    assert "a library picks" in judged(700, slack=600).reason
    assert "a library picks" in gpu_sentence(judged(700, slack=600), "it")
    assert judged(700, slack=60).verdict is Verdict.RELEASES_CACHE  # whatever the library picks
    assert judged(2000, slack=600).verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("setup", "seen"),
    [
        ({}, ["does not fit", "tight", "fits by releasing cache", "fits"]),
        ({"unpriced": [DPO]}, ["does not fit", "cannot say"]),
        ({"overpriced": [DPO]}, ["cannot say", "tight", "fits by releasing cache", "fits"]),
    ],
)
@pytest.mark.parametrize("slack", [60, 600])
def test_more_memory_never_makes_a_verdict_worse(slack, setup, seen):
    fits = [judged(usable, slack=slack, **setup) for usable in range(300, 1400, 20)]
    verdicts = [fit.verdict for fit in fits]
    assert verdicts == sorted(verdicts, key=lambda verdict: -verdict.rank)
    assert list(dict.fromkeys(verdicts)) == seen
    codes = [exit_code(verdict) for verdict in dict.fromkeys(verdicts)]
    assert codes == [code for code in (4, 7, 3, 3, 0) if code in codes][-len(codes) :]


def test_every_face_has_every_verdict():
    from memest.app.theme import VERDICT_INKS
    from memest.report import html
    from memest.report.heatmap import HeatMark
    from memest.report.terminal import VERDICT_STYLES

    words = {verdict.value for verdict in Verdict}
    assert words == set(VERDICT_INKS)
    assert set(Verdict) == set(VERDICT_STYLES) == set(html.VERDICT_COLOURS)
    assert all(HeatMark.of(verdict) in HeatMark for verdict in Verdict)


FREEZE = "run.yaml:unfrozen_parameters: only these train"


def test_no_length_is_short_enough_for_weights_that_do_not_fit():
    """Weights and states stay, however small the samples are of which nobody says the length."""
    length = "run.py:3 length of samples: nothing names it: 512 tokens are taken; --seq-len says it"
    for size, verdict in (("2GiB", Verdict.DOES_NOT_FIT), ("6GiB", Verdict.CANNOT_SAY)):
        answer = memest.estimate(BERT, **QUESTION, gpu_memory=size, overpriced=[length])
        assert answer.verdict is verdict
    both = memest.estimate(BERT, **QUESTION, gpu_memory="2GiB", overpriced=[length, FREEZE])
    assert both.verdict is Verdict.CANNOT_SAY


def test_what_is_priced_and_not_taken_is_no_reason_not_to_fit():
    answer = memest.estimate(BERT, **QUESTION, gpu_memory="6GiB", overpriced=[FREEZE])
    assert answer.verdict is Verdict.CANNOT_SAY
    assert answer.to_dict()["verdict_reason"] == f"the run may take less than is priced: {FREEZE}"
    assert within(answer, GIB) is Verdict.CANNOT_SAY
    assert within(answer, 80 * GIB) is Verdict.FITS
    assert f"and less, as not all that is priced is taken: {FREEZE}." in verdict_sentence(
        memest.estimate(BERT, **QUESTION, overpriced=[FREEZE])
    )


def test_what_fits_although_it_takes_less_fits():
    answer = memest.estimate(BERT, **QUESTION, gpu="a100-80gb", overpriced=[FREEZE])
    assert answer.verdict is Verdict.FITS
    advice = memest.advise(BERT, effective_batch=8, gpu="a100-80gb", overpriced=[FREEZE])
    assert (advice.verdict, advice.overpriced) == (Verdict.FITS, (FREEZE,))


@pytest.mark.slow
def test_no_plan_among_what_is_priced_is_no_answer_either():
    advice = memest.advise(BERT, effective_batch=8, gpu_memory="1GiB", overpriced=[FREEZE])
    assert (advice.plans, advice.verdict) == ((), Verdict.CANNOT_SAY)
    assert advice_sentence(advice).startswith("Cannot say:")
    result = memest.max_batch(BERT, gpu_memory="1GiB", overpriced=[FREEZE])
    assert any("more may fit" in note for note in result.notes)


def test_why_a_run_does_not_fit_stands_in_its_sentence_where_the_figures_do_not_tell():
    fit = dataclasses.replace(
        judged(400), verdict=Verdict.DOES_NOT_FIT, reason="vLLM's share is too small"
    )

    assert gpu_sentence(fit, "it").endswith("; vLLM's share is too small.")
    assert "; " not in gpu_sentence(dataclasses.replace(fit, reason=""), "it")
