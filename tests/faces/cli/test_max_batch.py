"""``memest max-batch``: reports made by hand, and the command in processes of its own."""

import json
from dataclasses import replace

import pytest

from memest.cli.answering import exit_code, find_tips
from memest.cli.console import Output
from memest.config.parallelism import Distributed
from memest.config.setup import MAX_BATCH, Setup
from memest.errors import ConfigError
from memest.report.max_batch_result import (
    CurveEnd,
    CurvePoint,
    EffectiveBatch,
    Largest,
    MaxBatch,
    Multiple,
    SizeAxis,
)
from memest.report.max_batch_table import limit_sentence
from memest.report.result import Verdict
from memest.report.suggestions import Suggestion, Suggestions
from memest.report.terminal import render
from memest.report.words import batch_sentence
from memest.units import GIB, MIB
from support.commands import check_refused

TINY = "prajjwal1/bert-tiny"


def largest(gpu="NVIDIA GeForce RTX 3090", usable=25_447_170_048, top=37, safe=36, **more):
    sizes = sorted({8, 16, 24, 32, 40, top, safe, top + 1} - {0})
    curve = tuple(
        CurvePoint(
            size=size, allocated_bytes=4 * GIB + size * 530 * MIB,
            reserved_bytes=4 * GIB + size * 540 * MIB,
            device_bytes=4 * GIB + size * 540 * MIB + 575 * MIB,
            headroom_bytes=usable - (4 * GIB + size * 540 * MIB + 575 * MIB),
            verdict=Verdict.FITS if size <= safe
            else Verdict.TIGHT if size <= top else Verdict.DOES_NOT_FIT,
        )
        for size in sizes
    )  # fmt: skip
    values = {
        "gpu": gpu, "usable_bytes": usable, "largest": top, "safe": safe, "end": CurveEnd.GPU,
        "curve": curve, "multiples": (Multiple(of=8, largest=top // 8 * 8, safe=safe // 8 * 8),),
    }  # fmt: skip
    return Largest(**(values | more))


def result(*answers, **more):
    values = {
        "model": "bert-large-uncased", "of": SizeAxis.BATCH, "step": 1,
        "setup": Setup(batch=37, seq_len=512, precision="fp16"), "effective_batch": None,
        "answers": answers, "assumptions": ("sequence length 512 (not given)",),
        "notes": ("not modelled: memory of other processes.",),
    }  # fmt: skip
    return MaxBatch(**(values | more))


WAYS = (
    EffectiveBatch(micro_batch=1, num_micro_steps=67, device_bytes=6 * GIB, verdict=Verdict.FITS),
    EffectiveBatch(micro_batch=34, num_micro_steps=2, device_bytes=22 * GIB, verdict=Verdict.FITS),
)
ONE = result(largest(effective=WAYS, unsteady=(33, 35)), effective_batch=67)
SEVERAL = result(
    largest(effective=WAYS[1:]),
    largest("Tesla T4", 15_826_288_640, 19, 18),
    largest("NVIDIA A2", 2 * GIB, 0, 0, multiples=()),
    effective_batch=68,
)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", ["one", "several"])
def test_golden(golden, name, width):
    text = render({"one": ONE, "several": SEVERAL}[name], width=width)
    assert max(map(len, text.splitlines())) <= width
    golden(f"max_batch_{name}_{width}.txt", text)


def test_what_would_make_the_smallest_fit_is_told():
    """Between the answer and memory over sizes, and looked for when the first is out."""
    change = Suggestion(
        words="QLoRA", options=(("qlora", True),), arguments="--qlora", verdict=Verdict.FITS,
        device_bytes=GIB, gain_bytes=GIB, relative_time=None,
        changes_training="trains adapters only",
    )  # fmt: skip
    found = Suggestions(
        model="m", gpu="T4", usable_bytes=GIB, verdict=Verdict.DOES_NOT_FIT, device_bytes=2 * GIB,
        changes=(change,), closest=None, time_basis="an estimate",
    )  # fmt: skip
    text = render(result(largest()), width=80, tips=lambda: found)
    assert "What makes it fit on T4" in text
    assert text.index("QLoRA (trains adapters only)") < text.index("allocated")


def test_tips_are_for_the_card_that_is_worst_and_the_smallest_of_those(monkeypatch):
    fits, t4, a2 = SEVERAL.answers
    misses = [replace(card, curve=card.curve[-1:]) for card in (t4, a2)]
    asked = []

    def suggest(model, *, progress, gpu, **options):
        asked.append(gpu)
        raise ConfigError("nothing")

    monkeypatch.setattr("memest.search.suggest.suggest", suggest)
    options = {"gpu": ["rtx-3090", "t4", "a2"], "batch": 1}
    for cards in ([fits, *misses], [fits, misses[0], t4], [fits, t4, t4]):
        assert find_tips(TINY, options, Output(quiet=True), cards, {}) is None
    assert asked == ["a2", "t4"]


def test_golden_ascii(golden):
    text = render(ONE, width=100, ascii_only=True)
    assert text.isascii()
    golden("max_batch_ascii.txt", text)


def test_the_line_is_the_memory_of_the_card():
    rows = render(result(largest()), width=100).splitlines()
    places = {line.index("│") for line in rows if "│" in line}
    assert len(places) == 1


def limit_of(answer, **more):
    return limit_sentence(result(answer, model="m", **more), answer)


class TestSentences:
    def test_verdicts(self):
        said = limit_of(largest())
        assert said == (
            "The largest safe batch of m on NVIDIA GeForce RTX 3090 (23.70 GiB usable) is 36; up "
            "to 37 may run."
        )
        assert limit_of(largest(safe=37)).endswith(" is 37; it is safe.")
        assert limit_of(largest(safe=0)) == (
            "No batch of m is safe on NVIDIA GeForce RTX 3090 (23.70 GiB usable); up to 37 may run."
        )

    def test_other_ends(self):
        model = largest(top=512, safe=512, end=CurveEnd.MODEL)
        assert limit_of(model, of=SizeAxis.SEQ_LEN).endswith(
            "is 512, the most the model takes, and it is safe."
        )
        search = largest(top=MAX_BATCH, safe=9, end=CurveEnd.SEARCH)
        assert limit_of(search).endswith(
            " is 9; at least 1,048,576, where the search ends, may run."
        )

    def test_none(self):
        none = largest("NVIDIA A2", 2 * GIB, 0, 0)
        assert limit_of(none) == (
            "Not even a batch of 1 of m runs on NVIDIA A2 (2.00 GiB usable): it needs 5.09 GiB."
        )

    def test_several_gpus(self):
        ranks = Distributed(num_gpus=4)
        each = {"setup": Setup(batch=37, seq_len=512, distributed=ranks)}
        assert limit_of(largest(), **each) == (
            "The largest safe batch of m on NVIDIA GeForce RTX 3090 (23.70 GiB usable on each of 4 "
            "GPUs) is 36 (144 on all GPUs); up to 37 may run."
        )
        assert limit_of(largest(safe=37), **each).endswith(" is 37 (148 on all GPUs); it is safe.")
        assert limit_of(largest(), of=SizeAxis.SEQ_LEN, **each).endswith(
            " on each of 4 GPUs) is 36; up to 37 may run."
        )
        none = largest("NVIDIA A2", 2 * GIB, 0, 0)
        assert limit_of(none, **each).endswith(": it needs 5.09 GiB on each of 4 GPUs.")

    def test_an_estimate_does_not_take_the_end_of_its_search_for_the_answer(self, samples, replace):
        fits = samples["fits"]
        most = replace(fits, max_batch=MAX_BATCH, safe_batch=MAX_BATCH)
        assert batch_sentence(most) == "1,048,576 or more"
        assert batch_sentence(replace(most, safe_batch=7)) == (
            "1,048,576 or more expected, 7 is safe"
        )


@pytest.fixture(scope="module")
def asked():
    import memest

    return memest.max_batch(TINY, gpu=["t4", "rtx-3090"], gpu_memory="1GiB", seq_len=32,
                            effective_batch=4096)  # fmt: skip


LINE = ("max-batch", TINY, "--gpu", "t4", "--gpu", "rtx-3090", "--gpu-memory", "1GiB", "--seq-len",
        "32", "-n", "4096")  # fmt: skip


@pytest.mark.slow
def test_json_is_what_python_answers(cli, asked):
    done = cli(*LINE, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == asked.to_dict()
    assert done.stderr == ""


@pytest.mark.slow
def test_quiet_is_the_number(cli, asked):
    done = cli(*LINE, "--quiet")
    assert done.stdout == "".join(f"{one.safe}\n" for one in asked.answers)
    assert done.stderr == ""


@pytest.mark.slow
def test_the_table(cli, asked):
    done = cli(*LINE)
    assert done.stdout == render(asked, width=100)
    plain = cli(*LINE, "--ascii", "--no-color").stdout
    assert plain == render(asked, width=100, ascii_only=True)


def test_lengths(cli):
    done = cli("max-batch", TINY, "--of", "seq_len", "--gpu", "t4", "--batch", "2", "-q")
    assert (done.returncode, done.stdout) == (0, "512\n")


def test_not_even_one(cli):
    line = ("max-batch", TINY, "--gpu", "t4", "--gpu-memory", "180MiB", "--seq-len", "32")
    done = cli(*line, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (4, "0\n", "")
    told = "(trains adapters only)"
    assert told in cli(*line).stdout
    assert told not in cli(*line, "--no-tips").stdout
    assert told not in cli(*line, "--of", "seq-len").stdout  # nobody trains on one token


@pytest.mark.parametrize(
    ("memory", "more", "code"),
    [("1GiB", (), 0), ("1GiB", ("--unpriced", "what else it does"), 7), ("180MiB", (), 4)],
)
def test_the_exit_code_is_that_of_fits(cli, memory, more, code):
    words = (TINY, "--gpu", "t4", "--gpu-memory", memory, "--seq-len", "32", *more, "-q")
    assert cli("max-batch", *words).returncode == cli("fits", *words, "-b", "1").returncode == code


def test_the_code_of_a_search_is_that_of_the_best_size():
    assert largest().verdict is Verdict.FITS
    tight = largest(safe=0)
    assert tight.verdict is Verdict.TIGHT
    assert exit_code(largest().verdict, tight.verdict) == 3


def test_a_length_that_the_model_does_not_take(here):
    check_refused(here("max-batch", TINY, "--gpu", "t4", "--seq-len", "513"), 2, "512")
