"""Speed of the explorer's What-if page, each figure beside the library's own answer.

    python benchmarks/bench_explorer.py [--rounds N]

Every interaction is a whole run of the page on the server (Streamlit's AppTest): inputs, estimate,
largest batch, charts, tables. Each value is new to the answer cache; the profile is warm. The
library answers the same questions in the same process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

MODEL, GPU = "bert-large-uncased", "rtx-4090"


def taken(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor, which other work on the machine changes less."""
    start, worked = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - worked


def changes() -> Iterator[tuple[str, str, Any]]:
    """Name, widget, value: none of them asks for a trace once the profile is warm."""
    for round_ in range(100):
        yield "batch", "batch", 9 + round_
        yield "grad accum", "grad_accum", 2 + round_


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MEMEST_CACHE": folder, "MEMEST_HOME": folder}
        from streamlit.testing.v1 import AppTest

        import memest

        app = AppTest.from_string("from memest.app.main import run\nrun()", default_timeout=300)
        app.query_params["gpu"] = GPU
        print(f"first page: {taken(app.run)[0]:.2f} s")
        library = memest.profile(MODEL)
        library.estimate(batch=8, gpu=GPU)
        found: dict[str, list[tuple[float, ...]]] = {}
        asked: dict[str, Any] = {}
        stream = changes()
        for _ in range(2 * rounds):
            name, key, value = next(stream)
            asked[key] = value
            app.number_input(key=key).set_value(value)
            page = taken(app.run)
            assert not app.exception
            own = taken(lambda: library.estimate(gpu=GPU, **asked))
            found.setdefault(name, []).append((*page, own[1]))
        for name, pairs in found.items():
            clock, page, own = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"change of {name}: {clock:.3f} s on the clock; of the processor {page:.3f} s, "
                f"library {own:.3f} s: {page / own:.1f}x"
            )


if __name__ == "__main__":
    main()
