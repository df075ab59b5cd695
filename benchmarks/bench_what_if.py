"""Speed of what-if questions, each figure beside a reference taken in the same run.

    python benchmarks/bench_what_if.py [warm cold replay points max-batch growth large] [--runs N]

Needs torch and transformers for what has to be traced; a cache folder of its own is used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ESTIMATE = [sys.executable, "-m", "memest", "estimate", "bert-large-uncased", "--batch", "8"]
ESTIMATE += ["--fp16", "--json"]
SEVEN_B = "mistralai/Mistral-7B-v0.1"


def seconds(command: list[str], **env: str) -> float:
    """Wall time of a process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env})
    return time.perf_counter() - start


def paired(first: Callable[[], float], second: Callable[[], float], runs: int) -> str:
    """Medians of runs that alternate, and their ratio."""
    pairs = [(first(), second()) for _ in range(runs)]
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(x / y for x, y in pairs)
    return f"{a:.3f} s against {b:.3f} s: {ratio:.2f}x"


def best(run: Callable[[], object], times: int) -> float:
    """Median milliseconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def warm(runs: int) -> None:
    """The whole process, with a profile in the cache, against importing NumPy."""
    subprocess.run(ESTIMATE, check=True, stdout=subprocess.DEVNULL)
    numpy = [sys.executable, "-c", "import numpy"]
    print("warm estimate --json against import numpy:",
          paired(lambda: seconds(ESTIMATE), lambda: seconds(numpy), runs))  # fmt: skip
    one = [*ESTIMATE, "--gpu", "rtx-3090"]
    subprocess.run(one, check=True, stdout=subprocess.DEVNULL)
    print("the same with a GPU and its largest batch:",
          paired(lambda: seconds(one), lambda: seconds(numpy), runs))  # fmt: skip
    probe = (
        "import sys; from memest.cli.main import run; code = run(sys.argv[1:]);"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules],"
        " file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *ESTIMATE[3:]], check=True, capture_output=True, text=True
    )
    print("heavy modules loaded by it:", done.stderr.strip())


def cold(runs: int) -> None:
    """A first estimate with an empty cache, against importing what it needs and one trace."""
    libraries = [sys.executable, "-c", "import torch, transformers.models.bert.modeling_bert"]

    def first() -> float:
        with tempfile.TemporaryDirectory() as folder:
            # a batch nobody has asked for, on one GPU: nothing that is shipped answers it
            command = [*ESTIMATE[:-2], "--bf16", "--padded", "--json"]
            return seconds(command, MEMEST_CACHE=folder)

    print("cold estimate against importing torch and BERT:",
          paired(first, lambda: seconds(libraries), runs))  # fmt: skip
    from memest.hardware.catalogue import find_gpu, traits
    from memest.models.resolve import resolve_model
    from memest.options import setup_from_options
    from memest.tracing import Tracer

    tracer = Tracer(source=resolve_model("bert-large-uncased"), stores=())
    setup = setup_from_options(batch=8, bf16=True, padded=True)
    gpu = traits(find_gpu("a100"))
    tracer.trace(setup, gpu)
    print(f"one trace of it: {best(lambda: tracer.trace(setup, gpu), runs) / 1e3:.2f} s")


def replays(runs: int) -> None:
    """One replay of three steps of bert-large."""
    import memest
    from memest.replay import replay

    profile = memest.profile("bert-large-uncased", batch=8, fp16=True)
    found = profile.found(gpu="a100")
    stream = found.stream

    memo = stream.chains.memo

    def play(*, first: bool) -> object:
        for key in list(memo):
            # the parting of events by pool stays from one size to the next, placements do not
            if first or isinstance(key, tuple):
                del memo[key]
        return replay(stream.events, stream.sizes, chains=stream.chains, requested=False)

    count = len(stream.events)
    once = best(lambda: play(first=True), runs * 5)
    again = best(lambda: play(first=False), runs * 5)
    print(f"replay of bert-large, {count} events: {again:.1f} ms, the first time {once:.1f} ms")
    print(f"its stream from formulas: {best(lambda: found.stream, runs * 5):.1f} ms")


def points(runs: int) -> None:
    """A thousand what-if points of a model of 7 billion parameters, on one core."""
    import memest

    profile = memest.profile(SEVEN_B, batch=2, seq_len=1024, loop="accelerate")
    profile.spot(gpu="h100", vary=("batch", "seq_len"))
    grid = [
        {"batch": batch, "seq_len": length, "grad_accum": accum}
        for batch in range(2, 12)
        for length in range(128, 1408, 128)
        for accum in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
    start = time.perf_counter()
    for point in grid:
        profile.spot(gpu="h100", **point)
    print(f"{len(grid)} points, all peaks: {time.perf_counter() - start:.1f} s")
    singles = [{**point, "grad_accum": 1} for point in grid[:: len(grid) // 100]]
    taken = best(lambda: [profile.spot(gpu="h100", **p) for p in singles], 1) / len(singles)
    print(f"without accumulation: {taken:.1f} ms each")
    fresh = memest.profile(SEVEN_B, batch=2, seq_len=1024, loop="accelerate")
    start = time.perf_counter()
    fresh.allocated(grid, gpu="h100")
    print(f"{len(grid)} allocated peaks: {time.perf_counter() - start:.2f} s")


def max_batch(runs: int) -> None:
    """The largest batch of bert-large on a card."""
    import memest

    for gpu in ("rtx-3090", "a100-80gb"):
        memest.max_batch("bert-large-uncased", gpu=gpu, fp16=True, batch=8)
        profile = memest.profile("bert-large-uncased", batch=8, fp16=True)
        profile.spot(gpu=gpu)
        taken = best(lambda g=gpu, p=profile: p.estimate(gpu=g, max_batch=True), runs)  # type: ignore[misc]
        alone = best(lambda g=gpu, p=profile: p.estimate(gpu=g), runs)  # type: ignore[misc]
        print(
            f"largest batch on {gpu}: {taken - alone:.0f} ms beyond the estimate's {alone:.0f} ms"
        )


def growth(runs: int) -> None:
    """How cost grows with layers and events."""
    import memest

    print("layers  events of three steps  numbers  stream  replay  document")
    for layers in (6, 12, 24, 48, 96):
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "model_type": "bert", "hidden_size": 1024, "num_attention_heads": 16,
                "num_hidden_layers": layers, "intermediate_size": 4096, "vocab_size": 30522,
            }  # fmt: skip
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            profile = memest.profile(str(path), batch=8, task="masked-lm")
            found = profile.found(gpu="a100")
            stream = found.stream
            from memest.replay import replay
            from memest.steps.document import family_to_json

            def play(stream=stream) -> object:  # type: ignore[no-untyped-def]
                stream.chains.memo.clear()
                return replay(stream.events, stream.sizes, chains=stream.chains, requested=False)

            family = found.program.micro_steps
            size = len(json.dumps(family_to_json(family)))
            print(
                f"{layers:6}  {len(stream.events):21}  {len(family.table.formulas):7}"
                f"  {best(lambda f=found: f.stream, runs):4.1f} ms  {best(play, runs):4.1f} ms"  # type: ignore[misc]
                f"  {size / 1e3:5.0f} kB"
            )


def large(runs: int) -> None:
    """Memory of a process that answers from the profile of a model of 405 billion parameters."""
    command = [sys.executable, "-m", "memest", "estimate", "meta-llama/Llama-3.1-405B", "--json"]
    command += ["--batch", "1", "--seq-len", "4096", "--checkpointing", "--gpu", "h200"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    code = (
        "import resource, sys; from memest.cli.main import run; run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:]], check=True, capture_output=True, text=True
    )
    print(f"405B: {before / 1024:.0f} MiB while tracing, {int(done.stderr) / 1024:.0f} MiB warm")
    print(f"its warm estimate: {statistics.median(seconds(command) for _ in range(runs)):.2f} s")


BENCHMARKS = {
    "warm": warm, "cold": cold, "replay": replays, "points": points, "max-batch": max_batch,
    "growth": growth, "large": large,
}  # fmt: skip


def main() -> None:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMEST_CACHE"] = folder
        for name in arguments.names or BENCHMARKS:
            BENCHMARKS[name](arguments.runs)


if __name__ == "__main__":
    main()
