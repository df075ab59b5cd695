"""Questions to a step profile at random points, compared with traces made there."""

from __future__ import annotations

import dataclasses
import os
import random

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.models import lookup
from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.errors import MemestError
from memest.estimation.breakdown import alive_at_peak, breakdown, layers, moment, timeline
from memest.estimation.whole_run import steps_run
from memest.profiles.cache import Store
from memest.replay.replay import replay
from support.tools import load_tool

GPUS = {name: traits(find_gpu(name)) for name in ("a100", "t4", "h100", "v100")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of the catalogue, and sizes that are apt to make it do something else."""

    id: str
    changes: tuple[tuple[str, object], ...] = ()
    lengths: tuple[int, ...] = (7, 33, 100, 127, 129, 256)
    longest: int = 512
    sizes: tuple[str, ...] = ("batch", "seq_len")
    whole: bool = False  # as published, not with two layers
    grows: bool = True  # whether there is a family of batches
    points: int = 5  # fewer where traces are long
    options: tuple[tuple[str, object], ...] = ()

    def source(self):
        config = lookup(self.id).config()
        if not self.whole:
            config = load_tool("coverage").reduced_config(config)
        config.update(self.changes)
        return ModelSource(kind="file", id=self.id, config=config, provenance="a test")


FAR = 1100
OPTIONS = {
    "precision": ["bf16", "fp16"],
    "checkpointing": ["full", "every_n:2"],
    "attn_implementation": ["eager", "sdpa"],
    "loop": ["plain", "accelerate"],
    "zero_grad": ["zero", "none"],
    "padded": [True],
    "freeze": [("embed",)],
}
RUN = {
    "grad_accum": [1, 2, 3, 5],
    "optim": ["adamw_torch", "sgd", "adamw_torch_loop", "adafactor", "none"],
    "max_grad_norm": [0.0, 0.5],
    "num_steps": [1, 2, 4],
}
ROUNDS = int(os.environ.get("MEMEST_TEST_ROUNDS", "1"))
NOWHERE = (Store(None),)


def some(rng, choices, share):
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < share}


def questions(case, number):
    """Options, and points of which most could be answered by families."""
    rng = random.Random(f"{case.id} {number}")
    options = some(rng, OPTIONS, 0.3)
    first = rng.choice(case.lengths)
    lengths = list(range(first, case.longest + 1, 128)) or [first]
    target, side = rng.choice([None, 33, 100]), rng.choice([None, None, 160, 200])
    gpus = rng.sample(sorted(GPUS), 2)
    points = []
    for index in range(case.points):
        sizes = {"batch": rng.choice([1, 2, 3, 4, 8, *(rng.randint(2, 70) for _ in range(5))])}
        if "seq_len" in case.sizes:
            sizes["seq_len"] = rng.choice(lengths)
            if index == case.points - 1:
                sizes["seq_len"] = rng.choice([n for n in case.lengths if n <= case.longest])
        if "target_len" in case.sizes and target is not None:
            sizes["target_len"] = rng.choice([sizes["seq_len"], target])
        if "image_size" in case.sizes and side is not None:
            sizes["image_size"] = side + 32 * rng.randint(0, 1)
        if "audio_seconds" in case.sizes:
            sizes["audio_seconds"] = rng.choice([1.0, 1.0, 1.32, 1.64, 1.0005])
        points.append((sizes | some(rng, RUN, 0.4), rng.choice(gpus)))
    return options, points


def contents_of(tracer, run):
    """Everything an answer consists of."""
    stream = run.stream
    result = replay(stream.events, stream.sizes, curve=True, chains=stream.chains)
    alive = alive_at_peak(stream, result)
    return {
        "setup": run.setup,
        "events": list(stream.events),
        "sizes": stream.sizes,
        "categories": bytes(stream.categories),
        "modules": [stream.module_names[module] for module in stream.modules],
        "labels": [stream.label_names[label] for label in stream.labels],
        "marks": (stream.marks, stream.mark_positions),
        "slack": stream.workspace_slack_bytes,
        "peaks": (result.peak_allocated_bytes, result.peak_reserved_bytes),
        "breakdown": breakdown(stream, result, alive),
        "layers": layers(stream, alive),
        "moment": moment(stream, result),
        "timeline": timeline(stream, result),
        "facts": tracer.facts(run),
        "notes": run.notes,
    }


def answer(profiler, ask, *args):
    """What is told, and whether it is from formulas, at a point that was never traced."""
    try:
        run = ask(*args)
        family = run.program.micro_steps
        return contents_of(profiler, run), bool(family.axes) and run.point not in family.points
    except MemestError as error:
        return {"error": (type(error), str(error))}, False


def compare(case, profiler, options, points):
    """How many of the answers were from formulas."""
    vary = ("batch", *(size for size in case.sizes if size == "seq_len"))
    from_formulas = 0
    for number, (point, gpu) in enumerate(points):
        setup = Setup(**options, **point)
        axes = vary if number == 0 else ()
        contents, by_formula = answer(profiler, steps_run, profiler, setup, GPUS[gpu], axes)
        direct, _ = answer(profiler, profiler.trace, setup, GPUS[gpu])
        differ = [key for key in direct if contents.get(key) != direct[key]]
        assert not differ, f"{case.id} {options} {point} on {gpu}: {differ}"
        assert contents.keys() == direct.keys()
        from_formulas += by_formula
    return from_formulas
