"""Make the step profiles that come with the package: data/step_profiles/.

    python tools/ship_profiles.py --scratch DIR    # everything, about 80 minutes on two cores
    python tools/ship_profiles.py gpt2             # one model, the others stay as they are
    python tools/ship_profiles.py --add            # only what is asked besides what is there

What was traced stays in the scratch folder, so that a run that was stopped can be taken up again.
It depends on the releases that trace; they are written to ``software.json``. Run it again whenever
a trace comes out otherwise (a test compares), or an operator gets its first workspace rule:
profiles that saw it are not believed any more. What is shipped is what :func:`questions` names of
the models in ``shipped_models.txt`` beside this file; others that are alike have theirs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.models import CatalogueEntry, lookup
from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.estimation.profiler import Profiler
from memest.profiles.axes import Sizes, windows
from memest.profiles.cache import Store
from memest.profiles.known_profiles import shipped_folder
from memest.profiles.packs import Packs, write_packs

LIST = Path(__file__).with_name("shipped_models.txt")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")

# a card for each choice of attention kernels that torch makes; the last has no bfloat16
NEW, OLD = ("a100-80gb", "h100"), ("t4",)
VARY = ("batch", "seq_len", "target_len", "lora_r")
"""The sizes in which questions differ: a family answers for all of them."""
_SMALL = 580_000_000
"""Parameters below which all precisions are asked of all cards."""
_ON_T4 = 10_000_000_000
_ALONE = 30_000_000_000
"""Parameters above which nobody trains all of them on one GPU."""
_TINY = 500_000_000
_LONGEST, _SHORT = 8192, 512
_STEP = 128
_MASK = 1 << 28
"""Elements of masks, which windows have computed for real."""
_RANKS = (2, 4, 8, 16, 32, 64)
_OPTIMIZERS = ("adamw_torch", "sgd", "adafactor", "adamw_bnb_8bit")
_OF_ADAPTERS = ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
_LORA_RANKS = (8, 16, 32, 64)
_TARGETS: tuple[dict[str, Any], ...] = (
    {},
    {"lora_target": "all-linear"},
    # the same layers by name, as scripts have them
    {"lora_target": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()},
)
_RECIPES = frozenset(
    """meta-llama/Llama-3.1-8B meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B Qwen/Qwen3-8B
    Qwen/Qwen3-4B Qwen/Qwen2.5-7B mistralai/Mistral-7B-v0.1""".split()
)
"""Models that recipes for LoRA and QLoRA are written for, small enough for one card."""
_CHECKPOINTING = ("none", "full")
_BF16 = {"bf16": True}
_NO_TARGETS = frozenset(
    "clip dinov2 distilbert gpt_oss granite mixtral modernbert olmo2 olmo3 phi3 "
    "qwen3_moe resnet siglip smollm3 vit whisper".split()
)
"""Architectures whose modules have to be named for adapters: peft knows or takes no usual ones."""
_NOT_CHECKPOINTED = frozenset(("resnet",))
_NOT_FSDP = frozenset(("clip", "siglip"))
"""Architectures that FSDP2 refuses as accelerate wraps them."""
_LAYERS = {
    "bert": "BertLayer",
    "deberta-v2": "DebertaV2Layer",
    "dinov2": "Dinov2Layer",
    "modernbert": "ModernBertEncoderLayer",
    "roberta": "RobertaLayer",
    "vit": "ViTLayer",
    "xlm-roberta": "XLMRobertaLayer",
}
"""What to wrap under FSDP where accelerate stops at the classes that a model names itself."""
_DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run that is answered at any batch, length and rank.

    Attributes:
        options: of the run, without sizes.
        gpus: whose kernels run.
        single: answered for a batch of 1 too, whose operators are others.
        updates: asked for its updates alone; its steps are those of another question.
    """

    options: Mapping[str, Any]
    gpus: tuple[str, ...] = NEW
    single: bool = False
    updates: bool = False


def models() -> list[str]:
    """All that are shipped; what is asked most comes first."""
    lines = (line.partition("#")[0].split() for line in LIST.read_text().splitlines())
    return [name for line in lines for name in line]


def questions(entry: CatalogueEntry) -> Iterator[Question]:
    """What is shipped of one model: of what people ask first what the model takes."""
    dtype = str(entry.config().get("torch_dtype", entry.config().get("dtype")))
    has_halves = dtype in ("float16", "bfloat16")
    for question in _asked_first(entry):
        options = question.options
        if "lora_r" in options and entry.model_type in _NO_TARGETS:
            continue
        if options["checkpointing"] == "full" and entry.model_type in _NOT_CHECKPOINTED:
            continue
        if "fsdp" in options and entry.model_type in _NOT_FSDP:
            continue
        # a gradient scaler refuses gradients of float16, and has no kernel for those of bfloat16
        if has_halves and options.get("fp16") and not {"zero", "lora_r"} & {*options}:
            if (entry.parameters or 0) >= _SMALL:
                continue
            question = replace(question, options={**options, "dtype": "float32"})
        yield question


def _asked_first(entry: CatalogueEntry) -> Iterator[Question]:
    """What people ask first, as far as size and time allow.

    One GPU in the usual precisions, with and without checkpointing, by several optimizers; the same
    under DDP, FSDP2, ZeRO-2 and ZeRO-3; LoRA where text is modelled, and QLoRA where it is read on.
    Cards without bfloat16 are asked of where their memory or their precision is what people use.
    """
    num_parameters = entry.parameters or 0
    is_small = num_parameters < _SMALL
    is_large = num_parameters > _ALONE
    if not is_large:
        for precision, checkpointing in product(("bf16", "fp16", ""), _CHECKPOINTING):
            run = {"checkpointing": checkpointing} | ({precision: True} if precision else {})
            gpus = (*NEW, *OLD) if is_small and precision != "bf16" else NEW
            single = precision == "bf16" or (is_small and checkpointing == "none")
            yield Question(options=run, gpus=gpus, single=single)
            for optim in _OPTIMIZERS if checkpointing == "none" else ():
                yield Question(options={**run, "optim": optim}, gpus=NEW[:1], updates=True)
    # FSDP2 has the steps of ZeRO-2, and DDP those of one GPU; what is too large for one is
    # checkpointed
    for checkpointing in _CHECKPOINTING[not is_small :]:
        run = {**_BF16, "checkpointing": checkpointing}
        if not is_large:
            yield Question(options={**run, "num_gpus": 2})
        for how in ({"zero": 2}, {"zero": 3}):
            single = not is_small
            yield Question(options={**run, **how, "num_gpus": 2}, single=single)
            for number in _RANKS if checkpointing == "full" else ():
                more = {**run, **how, "num_gpus": number}
                yield Question(options=more, gpus=NEW[:1], updates=True)
                if number == 8:
                    more = {**more, "optim": "adamw_torch"}
                    yield Question(options=more, gpus=NEW[:1], updates=True)
        for number in _RANKS if checkpointing == "full" else ():
            more = {**run, "fsdp": "full_shard", "num_gpus": number}
            if entry.model_type in _LAYERS:
                more["fsdp_wrap"] = [_LAYERS[entry.model_type]]
            yield Question(options=more, gpus=NEW[:1], updates=True)
    if is_small:
        for precision in ({"fp16": True}, {}):
            run = {**precision, "checkpointing": "none", "num_gpus": 2}
            yield Question(options=run, gpus=(*NEW, *OLD))
        for how in ({"zero": 2}, {"zero": 3}):
            run = {"fp16": True, "checkpointing": "none", **how, "num_gpus": 2}
            yield Question(options=run, gpus=(NEW[0], *OLD))
    for checkpointing in _CHECKPOINTING[is_large:]:
        run = {**_BF16, "checkpointing": checkpointing}
        single = checkpointing == "full"
        yield Question(options={**run, "lora_r": 16}, single=single)
        if single:
            more = {**run, "lora_r": 16, "optim": "adamw_torch"}
            yield Question(options=more, gpus=NEW[:1], updates=True)
        if entry.auto_class == "AutoModelForCausalLM" and checkpointing == "full":
            for four_bits in ("qlora", "load_in_4bit"):
                yield Question(options={**run, four_bits: True, "lora_r": 16}, single=True)
    if entry.id in _RECIPES:
        yield from _recipes()
    if entry.auto_class == "AutoModelForCausalLM" and num_parameters < _ON_T4:
        run = {"fp16": True, "checkpointing": "full", "qlora": True, "lora_r": 16}
        yield Question(options=run, gpus=OLD, single=True)


def _recipes() -> Iterator[Question]:
    """QLoRA and LoRA as recipes have them: all linear layers, a dropout, optimizers of 8 bits."""
    run = {**_BF16, "checkpointing": "full"}
    for four_bits in ({"qlora": True}, {}):
        for targets, dropout in product(_TARGETS, (0.0, 0.05)):
            if not targets and not dropout:
                continue
            more = {**run, **four_bits, **targets, "lora_r": 16, "lora_dropout": dropout}
            yield Question(options=more, single=True)
    for rank, optim, targets in product(_LORA_RANKS, _OF_ADAPTERS, _TARGETS[:2]):
        more = {**run, "qlora": True, **targets, "lora_r": rank, "optim": optim}
        yield Question(options=more, gpus=NEW[:1], updates=True)


def stretches_of(entry: CatalogueEntry, profiler: Profiler, request: Setup) -> list[list[Sizes]]:
    """Where families of a model are grown: stretches of lengths, which its windows divide.

    Of each stretch the longest, and two that leave other remainders: what holds for these holds for
    all lengths of the stretch.
    """
    batch = 1024 if (entry.parameters or 0) < _TINY else 256
    if profiler.resolve(request).seq_len is None:
        return [[{"batch": batch}]]
    limit = min(profiler.limit(request, "seq_len") or _LONGEST, _LONGEST)
    edges = sorted({edge for edge in windows(entry.config()) if 2 * _STEP <= edge <= limit})
    if limit > _SHORT:
        batch = 128
    has_windows = any(edge < limit for edge in edges)
    stretches: list[list[Sizes]] = []
    for low, high in zip((0, *edges), (*(edge - 1 for edge in edges), limit), strict=True):
        longest = high // _STEP * _STEP
        steps = (longest - low) // _STEP
        if steps < 2:
            if longest >= max(low, _STEP):  # a window as long as the longest
                stretches.append([{"batch": batch, "seq_len": longest}])
            continue
        lengths = (longest, low + steps // 4 * _STEP + 41, low + steps // 2 * _STEP + 98)
        most = max(min(batch, _MASK // longest**2 if has_windows else batch), 2)
        batches = (most, max(most // 5, 2), max(most // 3, 2))
        stretches.append(
            [
                {"batch": size, "seq_len": length}
                for size, length in zip(batches, lengths, strict=True)
                if length <= longest
            ]
        )
    return stretches or [[{"batch": batch}]]


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
    source, entry = resolve_model(model), entry_of(model)
    profiler = Profiler(source=source, stores=(Store(folder, shipped=True, writable=True),))
    for question in questions(entry):
        num_questions += _ask_all(profiler, entry, question)
    seconds = time.perf_counter() - start
    return f"{model}: {num_questions} questions, {profiler.traces_made} traces, {seconds:.0f} s"


def _ask_all(profiler: Profiler, entry: CatalogueEntry, question: Question) -> int:
    """Ask at all sizes; returns how often that was."""
    asked = 0
    request = setup_from_options(**question.options)
    stretches = stretches_of(entry, profiler, request)
    for gpu, batch in product(question.gpus, (None, 1) if question.single else (None,)):
        for stretch in stretches[:1] if question.updates else stretches:
            # kernels of old cards pad lengths: no three of them hold for all
            lengths = stretch[:1] if question.updates or gpu in OLD else stretch
            asked += 1
            _ask(profiler, question, gpu, lengths, batch)
    return asked


def _ask(
    profiler: Profiler, question: Question, gpu: str, stretch: list[Sizes], batch: int | None
) -> None:
    """Ask for one stretch of lengths, so that the last answer is for all of them."""
    for number, sizes in enumerate(stretch):
        is_last = number == len(stretch) - 1
        more = {} if batch is None else {"batch": batch}
        request = setup_from_options(**{**sizes, **question.options, **more})
        vary = VARY if is_last or number == 0 else None
        one = profiler.question(request, traits(find_gpu(gpu)), vary)
        if is_last:
            profiler.run(one)  # with its updates
        else:
            profiler.families.shallow(one)


def entry_of(model: str) -> CatalogueEntry:
    """What the catalogue says of a model."""
    entry = lookup(model)
    assert entry is not None, model
    return entry


def make(names: Iterable[str], out: Path, scratch: Path, jobs: int, *, add: bool) -> None:
    """Make some models anew, or add to them; each whole or not at all."""
    tasks = []
    for name in names:
        folder = scratch / name.replace("/", "--")
        if not (folder / _DONE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if add:
                Packs(out).unpack(name, Store(folder))
        tasks.append((name, folder))
    # processes do not live long: they keep what they traced
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        for number, (name, folder, told) in enumerate(pool.imap_unordered(_make_one, tasks), 1):
            print(f"{number}/{len(tasks)} {told}", flush=True)
            store = Store(folder, shipped=True)
            write_packs(out, [(entry_of(name).model_type, name, store)])


def _make_one(task: tuple[str, Path]) -> tuple[str, Path, str]:
    name, folder = task
    done = folder / _DONE
    if not done.exists():
        done.write_text(ship(name, folder))
    return name, folder, done.read_text()


def main() -> None:
    """Make them all, or those of some models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all that are shipped, if none is named")
    parser.add_argument("--out", type=Path, default=shipped_folder())
    parser.add_argument("--scratch", type=Path, help="what was traced, to be taken up again")
    parser.add_argument("--add", action="store_true", help="keep what is there, trace the rest")
    parser.add_argument("--jobs", type=int, default=2, help="models made at a time")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.models} - {*models()}):
        parser.error(f"{', '.join(unknown)}: not in {LIST.name}")
    out, software_path = arguments.out, arguments.out / "software.json"
    software = {name: version(name).partition("+")[0] for name in PACKAGES}
    if not (arguments.models or arguments.add):
        shutil.rmtree(out, ignore_errors=True)
    elif software_path.exists() and json.loads(software_path.read_text()) != software:
        parser.error(
            f"the other models were made with {software_path.read_text().split()}: make all"
        )
    out.mkdir(parents=True, exist_ok=True)
    software_path.write_text(json.dumps(software, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = arguments.scratch or Path(temporary)
        names = arguments.models or models()
        make(names, out, scratch, arguments.jobs, add=arguments.add)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{len(Packs(out).models)} models, {size / 1e6:.2f} MB in {out}")


if __name__ == "__main__":
    main()
