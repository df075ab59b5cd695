"""Threads trace one after the other; what needs no trace waits for none."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memest
from memest.trace import isolation

SMALL = "prajjwal1/bert-tiny?intermediate_size=384"  # no profile of it comes with the package
SAME = {"seq_len": 32, "max_batch": False}


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Forgets what was traced."""

    def forget() -> None:
        folders = (tmp_path / f"cache-{number}" for number in itertools.count())
        monkeypatch.setenv("MEMEST_CACHE", str(next(f for f in folders if not f.exists())))

    forget()
    return forget


@pytest.mark.slow
def test_threads_that_trace_at_once_get_what_each_gets_alone(
    empty_store: Callable[[], None],
) -> None:
    asked: list[dict[str, Any]] = [
        {"batch": 3, "precision": "fp16"}, {"batch": 5, "checkpointing": "full"},
        {"batch": 2, "precision": "bf16"}, {"batch": 4, "optim": "sgd"},
    ]  # fmt: skip
    alone = [memest.estimate(SMALL, **SAME, **options).to_json() for options in asked]
    together: dict[int, str] = {}
    empty_store()

    def ask(place: int) -> None:
        together[place] = memest.estimate(SMALL, **SAME, **asked[place]).to_json()

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[place] for place in range(len(asked))] == alone


@pytest.mark.slow
def test_an_answer_from_a_family_does_not_wait_for_a_trace() -> None:
    model = memest.profile(SMALL, seq_len=32)
    for batch in (2, 7):  # the second question grows a family
        model.estimate(batch=batch, gpu="t4", max_batch=False)
    answered, asked = threading.Event(), threading.Event()
    with isolation.TURN:  # somebody traces
        thread = threading.Thread(
            target=lambda: (model.estimate(batch=11, gpu="t4", max_batch=False), answered.set())
        )
        thread.start()
        assert answered.wait(60)
        other = threading.Thread(
            target=lambda: (memest.estimate(SMALL, batch=9, fp16=True, **SAME), asked.set())
        )
        other.start()
        assert not asked.wait(1.5)
    assert asked.wait(120)
