"""Answers for several sessions at once."""

import threading
from collections.abc import Callable

import pytest

from memest.app import answers
from memest.app.question import ExplorerQuestion

pytest.importorskip("transformers")

# a model for each test: the explorer keeps its profile, and that its store
MODEL = "prajjwal1/bert-tiny?intermediate_size=640"
OTHER = "prajjwal1/bert-tiny?intermediate_size=768"


def started(work: Callable[[], object]) -> threading.Event:
    """Do something in a thread; returns what is set when it is done."""
    done = threading.Event()
    threading.Thread(target=lambda: (work(), done.set()), daemon=True).start()
    return done


@pytest.mark.slow
def test_a_warm_question_does_not_wait_for_a_trace_of_the_same_model() -> None:
    for batch in (2, 7):  # the second grows a family
        answers.estimate(
            ExplorerQuestion.of(MODEL, {"batch": batch, "seq_len": 32, "gpu": ("t4",)})
        )
    warm = ExplorerQuestion.of(MODEL, {"batch": 11, "seq_len": 32, "gpu": ("t4",)})
    cold = ExplorerQuestion.of(
        MODEL, {"batch": 2, "seq_len": 32, "gpu": ("t4",), "precision": "fp16"}
    )
    lock = answers._lock(MODEL)
    with lock:  # another session traces this model
        assert started(lambda: answers.estimate(warm)).wait(120)
        waiting = started(lambda: answers.estimate(cold))
        assert not waiting.wait(3)
    assert waiting.wait(120)


def test_an_answer_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    question = ExplorerQuestion.of(OTHER, {"batch": 3, "seq_len": 32})
    first = answers.estimate(question)
    monkeypatch.setattr(answers, "_estimate", lambda *_, **__: pytest.fail("made again"))
    assert answers.estimate(question).to_json() == first.to_json()


def test_what_options_imply_is_shown_and_can_be_chosen_away() -> None:
    question = ExplorerQuestion.of("gpt2", {"qlora": True})
    assert dict(question.options)["checkpointing"] == "full"
    without = question.with_options(checkpointing="none")
    assert dict(without.options)["checkpointing"] == without.setup.checkpointing == "none"
    assert ExplorerQuestion.from_short(without.short()).setup == without.setup
    preference = ExplorerQuestion.of("gpt2", {"method": "dpo"})
    assert dict(preference.options)["dtype"] == "float32"
    assert preference.with_options(dtype="auto").setup.dtype == "auto"


def test_what_others_imply_goes_with_them() -> None:
    plain = ExplorerQuestion.of("gpt2", {"batch": 2})
    assert plain.with_options(method="dpo").with_options(method="supervised") == plain
    assert plain.with_method("QLoRA").with_method("Full") == plain
    one = plain.with_options(method="dpo").with_method("QLoRA")
    assert one == plain.with_method("QLoRA").with_options(method="dpo")  # whichever comes first
    assert "dtype" not in dict(one.options)
    asked_for = plain.with_options(checkpointing="full").with_method("QLoRA").with_method("Full")
    assert dict(asked_for.options)["checkpointing"] == "full"
    link = plain.with_method("QLoRA").with_options(checkpointing="none")
    assert link.given["checkpointing"] == "none"
    assert ExplorerQuestion.of("gpt2", link.given) == link


@pytest.mark.slow
def test_a_change_frees_what_was_told() -> None:
    options = {"method": "dpo", "batch": 64, "seq_len": 128, "gpu_memory": "1GiB"}
    question = ExplorerQuestion.of("gpt2?n_layer=2&n_embd=128&n_head=2", options)
    found = answers.suggestions(question, {"quick": True}).changes
    assert found
    before = answers.estimate(question).peak.device_bytes
    for change in found:
        changed = answers.estimate(question.with_options(**dict(change.options)))
        assert before - changed.peak.device_bytes == change.gain_bytes, change.arguments
