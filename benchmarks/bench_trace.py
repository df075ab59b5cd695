"""Speed of tracing, as ratios within one process.

    python benchmarks/bench_trace.py            # against PyTorch's MemTracker under FakeTensorMode
    python benchmarks/bench_trace.py --large    # a 405B Llama with checkpointing against bert-large

Prints one JSON object: seconds of each, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch

from memest.hardware.catalogue import find_gpu, traits
from memest.models.resolve import resolve_model
from memest.setup import Setup
from memest.trace.session import build, trace_built
from memest.trace.training import TracePlan

BERT = Setup(batch=4, seq_len=512, loop="plain", optim="adamw_torch_loop", num_steps=2)


def best_of(times: int, run: Callable[[], object]) -> float:
    """Shortest wall time of several runs, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def trace_time(name: str, setup: Setup, times: int) -> tuple[float, int]:
    """Seconds of tracing two steps (the model is built before), and the events."""
    gpu = traits(find_gpu("a100"))
    built = build(setup, resolve_model(name), None, None, None)
    whole = TracePlan()  # two steps with their updates, as the tracker runs them
    events = len(trace_built(built, setup, gpu, whole).events)  # warms lazy imports
    return best_of(times, lambda: trace_built(built, setup, gpu, whole)), events


def mem_tracker_time(times: int) -> tuple[float, int]:
    """Seconds of the same two steps under MemTracker, and the peak it reports."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoModelForSequenceClassification, BertConfig

    config = BertConfig(
        **{k: v for k, v in resolve_model("bert-large-uncased").config.items() if k != "model_type"}
    )
    peak = 0

    def run() -> None:
        nonlocal peak
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForSequenceClassification.from_config(config)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                for _ in range(2):
                    ids = torch.ones(4, 512, dtype=torch.int64)
                    labels = torch.zeros(4, dtype=torch.int64)
                    model(input_ids=ids, labels=labels).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
            peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]

    return best_of(times, run), peak


def main() -> None:
    """Run one comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    ours, events = trace_time("bert-large-uncased", BERT, options.times)
    result = {"torch": torch.__version__, "bert_large_s": ours, "bert_large_events": events}
    if options.large:
        setup = Setup(batch=1, seq_len=512, checkpointing="full", num_steps=2)
        seconds, large_events = trace_time("meta-llama/Llama-3.1-405B", setup, 1)
        result |= {
            "llama_405b_s": seconds,
            "llama_405b_events": large_events,
            "ratio_to_bert_large": seconds / ours,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    else:
        theirs, peak = mem_tracker_time(1)
        result |= {
            "mem_tracker_s": theirs,
            "mem_tracker_peak_mib": peak >> 20,
            "times_faster": theirs / ours,
        }
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
