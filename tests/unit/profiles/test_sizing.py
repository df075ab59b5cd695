"""Rules for sizes say what the model says when it is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.models import lookup
from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.errors import MemestError
from memest.estimation.profiler import Profiler
from memest.profiles.cache import Store
from memest.profiles.sizing import SizeAnswer, Sizing, asked_sizes, milliseconds
from support.tools import load_tool

reduced = load_tool("coverage").reduced_config


def profiler_of(model):
    config = reduced(lookup(model).config())
    source = ModelSource(kind="file", id=model, config=config, provenance="a test")
    return Profiler(source=source, stores=(Store(None),))


GPU = traits(find_gpu("a100"))
MODELS = (
    "prajjwal1/bert-tiny", "distilroberta-base", "distilgpt2", "facebook/opt-125m",
    "HuggingFaceTB/SmolLM-135M", "facebook/xglm-564M", "Salesforce/codet5-small",
    "facebook/bart-base", "google/pegasus-xsum", "facebook/m2m100_418M",
    "allenai/longformer-base-4096", "google/bigbird-roberta-base", "xlnet/xlnet-base-cased",
    "openai/clip-vit-base-patch16", "openai/whisper-tiny.en", "facebook/blenderbot-400M-distill",
    "facebook/deit-tiny-patch16-224", "state-spaces/mamba-130m-hf",
)  # fmt: skip
LENGTHS = (1, 2, 7, 33, 64, 77, 100, 127, 128, 129, 255, 256, 257, 447, 448, 449, 511, 512, 513,
           1000, 1023, 1024, 1025, 2048, 4000, 4096, 9000)  # fmt: skip


def said(ask):
    try:
        answer = ask()
    except MemestError as error:
        return type(error), str(error)
    return dict(answer.batch_sizes), answer.notes


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.rpartition("/")[2])
def test_a_rule_says_what_the_model_says(model):
    profiler = profiler_of(model)
    base = Setup()
    profile = profiler.profile_of(base)
    setups = [replace(base, seq_len=n) for n in LENGTHS]
    setups += [replace(base, target_len=n) for n in LENGTHS[::3]]
    setups += [replace(base, seq_len=n, target_len=m) for n in LENGTHS[::4] for m in LENGTHS[::5]]
    by_rule = 0
    profiler.assumptions(base)
    meta_model = profiler.meta_model(profiler.question(base, GPU))

    for setup in setups:
        found = profile.sizing.find(asked_sizes(setup))
        if found is None:
            continue
        by_rule += 1
        assert said(lambda found=found: found) == said(lambda s=setup: meta_model.answer(s)), setup

    assert by_rule >= 5 or not profile.sizing.rules


@pytest.mark.parametrize("model", ["prajjwal1/bert-tiny", "Salesforce/codet5-small"])
def test_most_lengths_need_no_model(model, monkeypatch):
    profiler = profiler_of(model)
    profiler.assumptions(Setup())
    profiler.profile_of(Setup()).meta_models.clear()
    monkeypatch.setattr(
        "memest.trace.meta_model.build", lambda *_, **__: pytest.fail("built again")
    )

    for length in (1, 7, 100, 511, 512):
        assert profiler.resolve(Setup(seq_len=length)).seq_len == length


def lengths(**sizes):
    return tuple(sizes.items())


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    cap=st.integers(1, 4096),
    asked=st.lists(st.integers(1, 8192), min_size=3, max_size=8, unique=True),
)
def test_a_cap_among_the_answers_is_no_rule(cap, asked):
    def model(n):
        return SizeAnswer({"seq_len": min(n, cap)}, (f"takes {min(n, cap)} of {n}",))

    sizing = Sizing()
    learnt = sizing.learn({lengths(seq_len=n): model(n) for n in asked}, {})

    for n in asked:
        assert sizing.find(lengths(seq_len=n)) == model(n)
    if all(n <= cap for n in asked):
        assert learnt
    elif learnt and any(n < cap for n in asked):
        assert len({min(n, cap) for n in asked}) == 1 or all(n <= cap for n in asked)
    outside = max(asked) + 1
    assert sizing.find(lengths(seq_len=outside)) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), tokens=st.integers(0, 300))
def test_numbers_in_the_notes_follow_the_sizes(data, tokens):
    def model(n, m):
        note = f"{n} tokens {{and}} a target of {m}: {n + tokens} with 2 of the image"
        return SizeAnswer({"seq_len": n + tokens, "target_len": m}, (note,))

    asked = [(16, 3), (400, 77), (1000, 8), (33, 500), (700, 230)]
    sizing = Sizing()
    assert sizing.learn({lengths(seq_len=n, target_len=m): model(n, m) for n, m in asked}, {})

    n, m = data.draw(st.integers(16, 1000)), data.draw(st.integers(3, 500))
    assert sizing.find(lengths(seq_len=n, target_len=m)) == model(n, m)
    assert sizing.find(lengths(seq_len=n)) is None
    assert sizing.find(lengths(target_len=m)) is None


def test_answers_of_another_kind_make_no_rule():
    sizing = Sizing()
    answers = {lengths(seq_len=n): SizeAnswer({"seq_len": n}, ()) for n in (1, 50, 99)}
    answers[lengths(seq_len=200)] = SizeAnswer({"seq_len": 200}, ("longer than most",))

    assert not sizing.learn(answers, {})
    assert sizing.find(lengths(seq_len=200)).notes == ("longer than most",)
    assert sizing.find(lengths(seq_len=100)) is None


@pytest.mark.parametrize(
    ("seconds", "whole"), [(1.0, 1000), (0.001, 1), (1.32, 1320), (1.0005, None), (1e-9, None)]
)
def test_milliseconds(seconds, whole):
    assert milliseconds(seconds) == whole


def test_what_an_image_takes_goes_by_its_area() -> None:
    sizing = Sizing()
    answers = {
        (("image_size", side),): SizeAnswer(
            {"seq_len": 512, "image_size": side}, (f"{(side // 28) ** 2} of its 512 tokens",)
        )
        for side in (448, 560, 672)
    }
    assert sizing.learn(answers, {"image_size": 112})
    found = sizing.rules[0].answer((560,))
    assert found is not None
    assert found.notes == ("400 of its 512 tokens",)
