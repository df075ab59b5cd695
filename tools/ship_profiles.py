"""Make the step profiles that come with the package: data/step_profiles/.

    python tools/ship_profiles.py            # everything; two models at a time
    python tools/ship_profiles.py gpt2       # one model, the others stay as they are

What is stored depends on the releases that trace; they are written to ``software.json`` beside it.
Run it again whenever a trace comes out otherwise (a test compares), or an operator gets its first
workspace rule: profiles that saw it are not believed any more. What is shipped is what
:func:`questions` names, and the same test asks all of it where none of these packages is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.cache import Store
from memest.profiles.known_profiles import shipped_folder

LARGE = ("meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.1")
DECODERS = ("gpt2", "t5-base")
ENCODERS = ("bert-large-uncased", "bert-base-uncased", "roberta-base")
IMAGES = ("google/vit-base-patch16-224",)
MODELS = (*LARGE, *ENCODERS, *DECODERS, *IMAGES)
"""All that are shipped; what takes longest comes first."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")

# a card for each choice of attention kernels that torch makes; the last two have no bfloat16
NEW, OLD = ("a100-80gb", "h100"), ("t4", "v100")
_LORA = {"lora_r": 16}
_NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True,
}  # fmt: skip
# as the paper and docs/fine-tuning.md have it, and as README does: by the defaults of transformers
_QLORA = {**_LORA, **_NF4, "lora_target_modules": "all-linear", "lora_dropout": 0.05}
_BARE_QLORA = {**_LORA, "load_in_4bit": True}
_SHARDINGS: tuple[dict[str, Any], ...] = ({"fsdp": "full_shard"}, {"zero": 2}, {"zero": 3})
_LAYERS = {
    "bert-base-uncased": "BertLayer",
    "bert-large-uncased": "BertLayer",
    "roberta-base": "RobertaLayer",
    "google/vit-base-patch16-224": "ViTLayer",
}
"""What to wrap under FSDP where accelerate stops at the classes that a model names itself."""
_RANKS = (2, 4, 8)
_NODES = (16, 32, 64)
_OPTIMIZERS = ("adamw_torch", "sgd", "adafactor")
_NO_PRECISION: dict[str, Any] = {}
_FP16, _BF16 = {"fp16": True}, {"bf16": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run that is answered at any batch and length.

    Attributes:
        options: of the run, without sizes.
        gpus: whose kernels run.
        single: answered for a batch of 1 too, whose operators are others.
    """

    options: Mapping[str, Any]
    gpus: tuple[str, ...]
    single: bool = True


def sizes_of(model: str) -> dict[str, int]:
    """Where families of a model are grown: its batches reach to twice this one."""
    if model in IMAGES:
        return {"batch": 1024}
    batch = 1024 if model in ENCODERS else 128 if model in LARGE else 256
    return {"batch": batch, "seq_len": 512}


def questions(model: str) -> Iterator[Question]:
    """What is shipped of one model: what people ask first, as far as size and time allow.

    One GPU in the usual precisions, with and without checkpointing, by several optimizers; the same
    under DDP, FSDP2, ZeRO-2 and ZeRO-3; recipes of LoRA and QLoRA where text is modelled.
    Cards without bfloat16 are asked of where their memory or their precision is what people use.
    """
    yield from _alone(model)
    yield from _on_several_gpus(model)
    if model not in IMAGES:
        yield from _with_adapters(model)


def _runs(model: str) -> Iterator[dict[str, Any]]:
    precisions = (_NO_PRECISION, _BF16) if model in LARGE else (_NO_PRECISION, _FP16, _BF16)
    for precision, checkpointing in product(precisions, ("none", "full")):
        yield {**precision, "checkpointing": checkpointing}


def _alone(model: str) -> Iterator[Question]:
    for run in _runs(model):
        wasted = run["checkpointing"] == "full" and (model in LARGE or "bf16" in run)
        yield Question(options=run, gpus=NEW if wasted else (*NEW, *OLD))
        for optim in _OPTIMIZERS:
            yield Question(options={**run, "optim": optim}, gpus=NEW[:1], single=False)


def _on_several_gpus(model: str) -> Iterator[Question]:
    for run in _runs(model):
        gpus = NEW if model in LARGE or "bf16" in run else (*NEW, *OLD)
        yield Question(options={**run, "num_gpus": 2}, gpus=gpus, single=False)
        for how in _SHARDINGS:
            if "fsdp" in how and model in _LAYERS:
                how = {**how, "fsdp_wrap": [_LAYERS[model]]}
            # with checkpointing in bfloat16, or where the traces are those of one GPU
            partitioned = how.get("zero") == 3
            apart = "fp16" in run or (partitioned and "bf16" not in run)
            if run["checkpointing"] == "full" and apart:
                continue
            single = model in LARGE and "bf16" in run
            yield Question(options={**run, **how, "num_gpus": 2}, gpus=gpus, single=single)
            # the same traces with other shards, or other updates
            others = [{"num_gpus": ranks} for ranks in (*_RANKS[1:], *_NODES)]
            others += [{"num_gpus": ranks, "optim": "adamw_torch"} for ranks in _RANKS]
            for other in others:
                yield Question(options={**run, **how, **other}, gpus=NEW[:1], single=False)


def _with_adapters(model: str) -> Iterator[Question]:
    both = ("none", "full")
    recipes = [(_LORA, NEW, both)]
    # peft trains the classifier of an encoder as a whole, and quantised weights cannot train
    if model not in ENCODERS:
        recipes += [(_BARE_QLORA, NEW[:1], both), (_QLORA, NEW[:1], both[1:])]
    for recipe, gpus, checkpointings in recipes:
        single = model not in ENCODERS
        for checkpointing in checkpointings:
            run = {**_BF16, **recipe, "checkpointing": checkpointing}
            yield Question(options=run, gpus=gpus, single=single)
        # with checkpointing DDP has the traces of one GPU
        yield Question(options={**run, "num_gpus": 2}, gpus=gpus, single=single)


def ship(model: str, folder: Path) -> str:
    """Trace everything that is shipped of one model.

    Args:
        model: its name.
        folder: to write to.

    Returns:
        What to say of it.

    Raises:
        MemestError: a question that cannot be answered.
    """
    start, num_questions = time.perf_counter(), 0
    tracer = Profiler(
        source=resolve_model(model), stores=(Store(folder, shipped=True, writable=True),)
    )
    sizes = sizes_of(model)
    for question in questions(model):
        # what the model makes of a question that names no length
        tracer.resolve(setup_from_options(**question.options))
        for gpu in question.gpus:
            for batch in (sizes["batch"], 1) if question.single else (sizes["batch"],):
                setup = setup_from_options(**{**sizes, **question.options, "batch": batch})
                steps_run(tracer, setup, traits(find_gpu(gpu)), tuple(sizes))
                num_questions += 1
    seconds = time.perf_counter() - start
    size = _bytes(folder)
    return (
        f"{model}: {num_questions} questions, {tracer.traces_made} traces, {seconds:.0f} s, "
        f"{size / 1e6:.2f} MB"
    )


def put(model: str, folder: Path, out: Path) -> None:
    """Move what was made of a model to where all is, in place of what was there of it."""
    for entry in Store(out, shipped=True).entries():
        if entry.key.get("model") == model:
            shutil.rmtree(out / entry.digest)
    for place in folder.iterdir():
        # updates belong to weights, and models may share them
        shutil.copytree(place, out / place.name, dirs_exist_ok=True)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def make(models: Sequence[str], out: Path, jobs: int) -> None:
    """Make some models anew, each whole or not at all."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        running = {}
        for number, model in enumerate(models):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            running[pool.submit(ship, model, folder)] = model, folder
        for number, future in enumerate(as_completed(running), start=1):
            print(f"{number}/{len(running)} {future.result()}", flush=True)
            put(*running[future], out)


def main() -> None:
    """Make them all, or those of some models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all that are shipped, if none is named")
    parser.add_argument("--out", type=Path, default=shipped_folder())
    parser.add_argument("--jobs", type=int, default=2, help="models made at a time")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.models} - {*MODELS}):
        parser.error(f"{', '.join(unknown)}: not shipped; {', '.join(MODELS)} are")
    out, software_path = arguments.out, arguments.out / "software.json"
    software = {name: version(name).partition("+")[0] for name in PACKAGES}
    if not arguments.models:
        shutil.rmtree(out, ignore_errors=True)
    elif software_path.exists() and json.loads(software_path.read_text()) != software:
        parser.error(
            f"the other models were made with {software_path.read_text().split()}: make all"
        )
    out.mkdir(parents=True, exist_ok=True)
    software_path.write_text(json.dumps(software, indent=2) + "\n")
    make(arguments.models or MODELS, out, arguments.jobs)
    print(f"{_bytes(out) / 1e6:.2f} MB in {out}")


if __name__ == "__main__":
    main()
