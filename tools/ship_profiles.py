"""Make the step profiles that come with the package: data/step_profiles/.

    python tools/ship_profiles.py            # everything, about half an hour
    python tools/ship_profiles.py gpt2       # one model

What is stored depends on the releases of torch and transformers that trace; they are written to
``software.json`` beside it. Run it again whenever a trace comes out otherwise; a test compares.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from memest.errors import MemestError
from memest.hardware.catalogue import find_gpu, traits
from memest.models.resolve import resolve_model
from memest.options import setup_from_options
from memest.shelf import shipped_folder
from memest.store import Store
from memest.tracing import Tracer

ENCODERS = ("bert-base-uncased", "bert-large-uncased", "roberta-base", "gpt2", "t5-base")
IMAGES = ("google/vit-base-patch16-224",)
LARGE = ("meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.1")
# one GPU for each choice of attention kernels that torch makes
GPUS = ("a100-80gb", "t4", "v100", "h100")


def questions(model: str) -> Iterator[dict[str, Any]]:
    """The setups of one model: usual precisions, with and without checkpointing."""
    precisions = ({}, {"bf16": True}) if model in LARGE else ({}, {"fp16": True}, {"bf16": True})
    for precision, checkpointing in product(precisions, ("none", "full")):
        yield {**precision, "checkpointing": checkpointing}


def ship(model: str, store: Store) -> None:
    """Trace everything that is shipped of one model."""
    started, asked = time.perf_counter(), 0
    sizes = ("batch",) if model in IMAGES else ("batch", "seq_len")
    for options in questions(model):
        tracer = Tracer(source=resolve_model(model), stores=(store,))
        for name, batch in product(GPUS, (8, 1)):
            setup = setup_from_options(batch=batch, **options)
            try:
                tracer.find(setup, traits(find_gpu(name)), sizes)
            except MemestError as error:
                print(f"{model} {options} on {name}: {error}")
            asked += 1
        for optim in ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor"):
            tracer.find(setup_from_options(optim=optim, **options), traits(find_gpu(GPUS[0])))
    seconds = time.perf_counter() - started
    print(f"{model}: {asked} questions, {seconds:.0f} s", flush=True)


def main() -> None:
    """Make them all, or those of some models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all that are shipped, if none is named")
    parser.add_argument("--out", type=Path, default=shipped_folder())
    arguments = parser.parse_args()
    models = arguments.models or [*ENCODERS, *IMAGES, *LARGE]
    if not arguments.models:
        shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    software = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    (arguments.out / "software.json").write_text(json.dumps(software, indent=2) + "\n")
    store = Store(arguments.out, shipped=True, writable=True)
    for model in models:
        ship(model, store)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{size / 1e6:.2f} MB in {arguments.out}")


if __name__ == "__main__":
    main()
