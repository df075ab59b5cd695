"""Cases: questions that need no trace any more, in this process."""

from __future__ import annotations

import json
from typing import Any

from speed.case import Bench, Case, Work

BERT, SEVEN_B = "bert-large-uncased", "mistralai/Mistral-7B-v0.1"
GPU = "rtx-4090"


def asking(profile: Any, question: Any) -> Work:
    """Work that must not trace: the question is asked once before, for what is loaded late."""
    question()

    def work() -> None:
        before = profile.traces_made
        question()
        assert profile.traces_made == before, "a trace was made: the case measures something else"

    return work


def estimate(bench: Bench) -> Work:
    profile = bench.profile(BERT, batch=8, fp16=True)

    def five() -> None:
        for _ in range(5):
            profile.estimate(batch=next(bench.fresh), gpu=GPU, max_batch=False)

    return asking(profile, five)


def largest_batch(bench: Bench) -> Work:
    """The search under the card's limit; a new profile each time: it keeps its replays."""
    import memest

    bench.profile(BERT, batch=8, fp16=True).estimate(gpu=GPU)

    def work() -> None:
        profile = memest.profile(BERT, batch=8, fp16=True)
        assert profile.estimate(batch=next(bench.fresh), gpu=GPU, max_batch=True).max_batch
        assert profile.traces_made == 0, "a trace was made: the case measures something else"

    return work


def grid(batches: range, lengths: range, accumulations: tuple[int, ...]) -> list[dict[str, int]]:
    return [
        {"batch": batch, "seq_len": length, "grad_accum": accum}
        for batch in batches
        for length in lengths
        for accum in accumulations
    ]


def sweep(bench: Bench) -> Work:
    """Ten batches by ten lengths, none of them asked about before."""
    import memest

    def work() -> None:
        base = 2 + next(bench.fresh)
        grid = {"batch": range(base, base + 10), "seq_len": range(64, 704, 64)}
        result = memest.sweep("gpt2", {name: list(axis) for name, axis in grid.items()}, gpu=GPU)
        assert len(result.points) == 100

    work()
    return work


def seven_b(bench: Bench) -> Any:
    profile = bench.profile(SEVEN_B, batch=2, seq_len=1024, loop="accelerate")
    profile.spot(gpu="h100", vary=("batch", "seq_len"))
    return profile


ALL = grid(range(2, 12), range(128, 1408, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))


def allocated_peaks(bench: Bench) -> Work:
    profile = seven_b(bench)
    return asking(profile, lambda: profile.allocated(ALL, gpu="h100"))


def all_peaks(bench: Bench) -> Work:
    import memest

    seven_b(bench)

    def work() -> None:
        profile = memest.profile(SEVEN_B, batch=2, seq_len=1024, loop="accelerate")
        for point in ALL:
            profile.spot(gpu="h100", **point)

    return work


def layers(count: int) -> Any:
    """How cost grows with a model: the same BERT with few layers and with many."""

    def prepare(bench: Bench) -> Work:
        path = bench.folder / f"{count}-layers.json"
        config = {
            "model_type": "bert", "hidden_size": 1024, "num_attention_heads": 16,
            "num_hidden_layers": count, "intermediate_size": 4096, "vocab_size": 30522,
        }  # fmt: skip
        path.write_text(json.dumps(config))
        profile = bench.profile(str(path), batch=8, task="masked-lm")
        profile.spot(gpu="a100", vary=("batch",))
        return asking(profile, lambda: profile.spot(batch=next(bench.fresh), gpu="a100"))

    return prepare


CASES = (
    Case("estimate", "an estimate of bert-large at another batch", "python-1", estimate, units=5),
    Case("largest-batch", "the largest batch of bert-large on a card, estimate included",
         "python-1", largest_batch),
    Case("sweep", "a grid of gpt2, batch by length, 100 points, for one point",
         "python-1", sweep, units=100),
    Case("allocated", "the allocated peak of a 7B model, 1,000 points, for one point",
         "python-1", allocated_peaks, units=1000),
    Case("all-peaks", "all three peaks of a 7B model, 1,000 points, for one point",
         "python-1", all_peaks, units=1000, long=True),
    Case("layers-12", "the peaks of a 12-layer BERT at another batch",
         "python-1", layers(12), long=True),
    Case("layers-96", "the peaks of a 96-layer BERT at another batch",
         "python-1", layers(96), long=True),
)  # fmt: skip
