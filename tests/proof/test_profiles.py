"""What formulas answer is what a trace of its own answers, at any point, on any GPU.

Every model is asked at many points through one tracer, which grows families as it goes, and at the
same points by a trace made for that point alone. Equal means equal: every event, size, label,
module and category of the run, its peaks, and all that is told about it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.assemble import alive_at_peak, breakdown, layers, moment, timeline
from memest.errors import MemestError
from memest.hardware.catalogue import find_gpu, traits
from memest.models.catalogue import lookup
from memest.models.resolve import ModelSource
from memest.replay.replay import replay
from memest.setup import Setup
from memest.store import Store
from memest.tracing import Tracer

GPUS = {name: traits(find_gpu(name)) for name in ("a100", "t4", "h100", "v100")}


def _reduced():
    path = Path(__file__).parents[2] / "tools" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_tool", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reduced


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
    points: int = 8  # fewer where traces are long
    options: tuple[tuple[str, object], ...] = ()

    def source(self):
        config = lookup(self.id).config()
        if not self.whole:
            config = _reduced()(config)
        config.update(self.changes)
        return ModelSource(kind="file", id=self.id, config=config, provenance="a test")


WINDOW = (("sliding_window", 300),)
AROUND = (299, 300, 301, 44, 45, 428)
FAR = 1100
CASES = (
    Case("prajjwal1/bert-tiny", whole=True),
    Case("distilroberta-base"),
    Case("distilbert-base-cased"),
    Case("albert-base-v2"),
    Case("google/electra-small-discriminator"),
    Case("microsoft/deberta-v3-xsmall", points=4),
    Case("answerdotai/ModernBERT-base", (("local_attention", 200),), AROUND, FAR),
    Case("distilgpt2", whole=True, longest=1024),
    Case("facebook/opt-125m", longest=1024),
    Case("bigscience/bloom-560m"),
    Case("EleutherAI/pythia-14m", whole=True, longest=1024),
    Case("HuggingFaceTB/SmolLM-135M", longest=2048),
    Case("intfloat/e5-mistral-7b-instruct", WINDOW, AROUND, FAR),
    Case("Qwen/Qwen1.5-0.5B", longest=1500),
    Case("google/gemma-2-2b", WINDOW, AROUND, FAR),
    Case("google/gemma-3-270m", WINDOW, AROUND, FAR, points=4),
    Case("microsoft/phi-1", longest=1500),
    Case("mistralai/Mixtral-8x7B-Instruct-v0.1", longest=1024),
    Case("ibm-granite/granite-3.0-1b-a400m-base"),
    Case("openai/gpt-oss-20b", (("sliding_window", 300),), AROUND, FAR),
    Case("facebook/xglm-564M", lengths=(7, 33, 100, 126, 127), longest=2048),
    Case("google/bigbird-roberta-base", lengths=(64, 100, 127), longest=1100),
    Case("state-spaces/mamba-130m-hf", longest=1024),
    Case("AntonV/mamba2-130m-hf", lengths=(33, 128), longest=512, points=4),
    Case("Salesforce/codet5-small", sizes=("batch", "seq_len", "target_len")),
    Case("facebook/bart-base", sizes=("batch", "seq_len", "target_len")),
    Case("facebook/deit-tiny-patch16-224", sizes=("batch", "image_size")),
    Case("facebook/dinov3-vits16-pretrain-lvd1689m", sizes=("batch", "image_size")),
    Case("microsoft/swin-tiny-patch4-window7-224", sizes=("batch", "image_size")),
    Case("facebook/convnext-tiny-224", sizes=("batch", "image_size")),
    Case("microsoft/resnet-18", sizes=("batch", "image_size")),
    Case("nvidia/segformer-b0-finetuned-ade-512-512", sizes=("batch", "image_size")),
    Case("openai/clip-vit-base-patch16", lengths=(7, 33, 77), longest=77),
    Case("openai/whisper-tiny.en", lengths=(7, 33, 100), longest=440),
    Case("facebook/wav2vec2-base-960h", sizes=("batch", "audio_seconds"), grows=False),
)

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


def told(tracer, found):
    """Everything an answer consists of."""
    stream = found.stream
    result = replay(stream.events, stream.sizes, curve=True, chains=stream.chains)
    alive = alive_at_peak(stream, result)
    return {
        "setup": found.setup,
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
        "facts": tracer.facts(found),
        "notes": found.notes,
    }


def answer(tracer, ask, *args):
    """What is told, and whether it is from formulas, at a point that was never traced."""
    try:
        found = ask(*args)
        family = found.program.micro_steps
        return told(tracer, found), bool(family.axes) and found.point not in family.points
    except MemestError as error:
        return {"error": (type(error), str(error))}, False


def compare(case, tracer, options, points):
    """How many of the answers were from formulas."""
    vary = ("batch", *(size for size in case.sizes if size == "seq_len"))
    from_formulas = 0
    for number, (point, gpu) in enumerate(points):
        setup = Setup(**options, **point)
        found, by_formula = answer(
            tracer, tracer.find, setup, GPUS[gpu], vary if number == 0 else ()
        )
        direct, _ = answer(tracer, tracer.trace, setup, GPUS[gpu])
        differ = [key for key in direct if found.get(key) != direct[key]]
        assert not differ, f"{case.id} {options} {point} on {gpu}: {differ}"
        assert found.keys() == direct.keys()
        from_formulas += by_formula
    return from_formulas


@functools.cache
def tracer_of(case):
    """One tracer for all questions about a model, so that families are grown and used."""
    return Tracer(source=case.source(), stores=NOWHERE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id.rpartition("/")[2])
@settings(
    max_examples=ROUNDS, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(number=st.integers(0, 1 << 32))
def test_a_profile_answers_as_a_trace_does(case, number):
    tracer = tracer_of(case)

    compare(case, tracer, *questions(case, number))

    # and some that nothing but a family can answer without a trace
    sizes = {"seq_len": case.lengths[0]} if "seq_len" in case.sizes else {}
    points = [({"batch": batch, **sizes}, "a100") for batch in (8, 6, 4)]
    assert bool(compare(case, tracer, {}, points)) is case.grows


@pytest.mark.parametrize("loop", ["trainer", "plain"])
def test_one_tracer_is_not_confused_by_the_order_of_questions(loop):
    """Growing at a long length must not change what was or will be told of a short one."""
    source = Case("facebook/xglm-564M").source()
    setup = Setup(batch=4, loop=loop)
    fresh = Tracer(source=source, stores=NOWHERE)
    short = dataclasses.replace(setup, seq_len=161)
    long = dataclasses.replace(setup, seq_len=2049 - 8)

    before = told(fresh, fresh.trace(short, GPUS["a100"]))
    fresh.trace(long, GPUS["a100"])

    assert told(fresh, fresh.trace(short, GPUS["a100"])) == before


def test_what_the_library_caches_is_made_in_every_trace():
    source = Case("facebook/dinov3-vits16-pretrain-lvd1689m").source()
    tracer = Tracer(source=source, stores=NOWHERE)

    first = told(tracer, tracer.trace(Setup(batch=2), GPUS["a100"]))

    assert told(tracer, tracer.trace(Setup(batch=2), GPUS["a100"])) == first
