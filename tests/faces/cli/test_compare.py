"""``memest compare`` as text, as JSON and as a command."""

import dataclasses
import json
import re

import pytest

from memest.events import Category, Phase
from memest.report.findings import Comparison, Scenario
from memest.report.result import Peak, PeakMoment, Row
from memest.report.tables import change_sentence
from memest.report.terminal import render
from memest.search.reasons import explain
from memest.units import MIB, format_delta

TINY = ("prajjwal1/bert-tiny", "--batch", "2", "--seq-len", "32")


def changed(estimate, *, at=None, **rows):
    """The estimate with some rows set, in MiB, and its peaks moved accordingly."""
    new = {Category[name.upper()]: size * MIB for name, size in rows.items()}
    found = {row.category: row.bytes for row in estimate.breakdown} | new
    breakdown = tuple(Row(category=c, bytes=found[c]) for c in Category if found.get(c))
    delta = sum(row.bytes for row in breakdown) - estimate.peak.allocated_bytes
    peak = estimate.peak
    return dataclasses.replace(
        estimate,
        breakdown=breakdown,
        peak=Peak(
            allocated_bytes=peak.allocated_bytes + delta,
            reserved_bytes=peak.reserved_bytes + delta,
            device_bytes=peak.device_bytes + delta,
        ),
        peak_at=at or estimate.peak_at,
    )


def scenario(name, estimate, first=None, time=1.0):
    return Scenario(
        name=name, model=estimate.model.id, changes=(), estimate=estimate,
        reasons=None if first is None else explain(first, estimate), relative_time=time,
        flops=10**12, launches=2000,
    )  # fmt: skip


@pytest.fixture
def comparison(samples):
    first = samples["fits"]
    moved = PeakMoment(
        phase=Phase.BACKWARD, step=2, micro_step=2, module="bert.pooler", op="aten.mm"
    )
    saving = dataclasses.replace(
        changed(first, activations=2000, temporaries=100), max_batch=60, safe_batch=58
    )
    return Comparison(
        scenarios=(
            scenario("base", first),
            scenario("checkpointing=full", saving, first, 1.31),
            scenario("grad-accum=4 batch=2", changed(first, gradients=2600, at=moved), first, 1.1),
            scenario("optim=sgd", changed(first, optimizer_states=0), first, 0.98),
            scenario("same", first, first),
        ),
        time_basis="an estimate without a measurement",
        notes=("scenarios differ in samples per optimizer step: time is compared by sample.",),
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_golden(comparison, golden, width):
    golden(f"compare_{width}.txt", render(comparison, width=width))


def test_golden_ascii(comparison, golden):
    text = render(comparison, ascii_only=True)
    assert text.isascii()
    golden("compare_ascii.txt", text)


@pytest.mark.parametrize("width", [40, 60, 80, 104, 200])
def test_no_line_is_wider_than_the_terminal(comparison, width):
    text = render(comparison, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_verdicts_that_differ_are_said_in_a_sentence(samples):
    fits, not_fit, tight = (samples[name] for name in ("fits", "does_not_fit", "tight"))
    base = scenario("base", fits)
    assert "does not fit, where the base fits" in change_sentence(scenario("x", not_fit), base)
    other = scenario("gpt2", tight)
    assert "fits, where gpt2 is tight" in change_sentence(scenario("x", fits), other)


def test_every_difference_is_shown(comparison):
    text = render(comparison, width=104)
    for one in comparison.scenarios[1:]:
        for row in one.reasons.rows:
            assert re.search(
                rf"{row.category.value}.*{re.escape(format_delta(row.delta_bytes))}", text
            )


def test_a_sentence_says_what_changed(comparison):
    first, saving, *_, same = comparison.scenarios
    sentence = change_sentence(saving, first)
    assert sentence.startswith("checkpointing=full: -")
    assert "1.31 times the time of a sample (estimated)" in sentence
    assert sentence.endswith("fits as before, largest batch 60 against 21.")
    assert "the same on the device" in change_sentence(same, first)


@pytest.mark.slow
def test_the_command(cli):
    done = cli("compare", *TINY, "--vs", "optim=sgd", "--vs", "batch=8", "--gpu", "t4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("optim=sgd: -")
    assert "Why" in done.stdout
    assert "largest batch" in done.stdout


def test_json_is_one_document(cli):
    done = cli("compare", *TINY, "--vs", "optim=sgd", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [s["name"] for s in document["scenarios"]] == ["base", "optim=sgd"]


@pytest.mark.slow
def test_quiet_is_a_sentence_a_column(cli):
    done = cli("compare", *TINY, "--vs", "optim=sgd", "--vs", "fp16", "--quiet", "--ascii")
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout.isascii()
