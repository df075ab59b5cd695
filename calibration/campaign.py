"""Campaigns: lists of cases to measure, built in or read from a file.

Every case of the built-in ones is there for a mechanism: what a loop keeps, what a precision
copies, which kernels attention takes, what an optimizer holds, where the allocator rounds. Models
are of several families and fit on a card of 16 GB but for those that say so; the order puts what
tells most first, so a campaign that is cut short is still worth something.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.calibration.case import Case, case_from_dict
from memest.errors import ConfigError, closest
from memest.units import MIB

__all__ = ["CAMPAIGNS", "Campaign", "read_campaign"]

MAX_CASES = 20_000
_MAX_BYTES = 16 * MIB

BERT = "bert-large-uncased"
BERT_BASE = "bert-base-uncased"
GPT2 = "gpt2"
LLAMA_1B = "meta-llama/Llama-3.2-1B"
LLAMA_8B = "meta-llama/Llama-3.1-8B?num_hidden_layers=4"
QWEN = "Qwen/Qwen2-0.5B"
T5 = "google-t5/t5-base"
VIT = "google/vit-base-patch16-224"
RESNET = "microsoft/resnet-50"
WAV2VEC = "facebook/wav2vec2-base-960h"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1?num_hidden_layers=1"

FAMILIES = (
    "distilbert-base-uncased",
    "microsoft/deberta-v3-base",
    "answerdotai/ModernBERT-base",
    "albert-base-v2",
    "EleutherAI/pythia-410m",
    "bigscience/bloom-560m",
    "facebook/bart-base",
    "microsoft/swin-tiny-patch4-window7-224",
    "facebook/convnext-tiny-224",
    "openai/whisper-base",
    "HuggingFaceTB/SmolLM2-360M",
    "Qwen/Qwen3-0.6B",
    "google/gemma-3-270m",
)
"""One model each: a range holds for models that were not measured only if many were."""

Part = Mapping[str, Any]
"""Some options of a setup."""

FP32: Part = {"dtype": "float32"}
FP16: Part = {"dtype": "float32", "fp16": True}
BF16: Part = {"dtype": "float32", "bf16": True}
HALF: Part = {"dtype": "bfloat16"}
CKPT: Part = {"checkpointing": "full"}
EAGER: Part = {"attn_implementation": "eager"}
SDPA: Part = {"attn_implementation": "sdpa"}
PLAIN: Part = {"loop": "plain"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Cases to measure, and what they are for."""

    name: str
    cases: tuple[Case, ...]
    about: str = ""


def _case(
    model: str,
    batch: int,
    seq: int | None = None,
    *parts: Part,
    events: bool = False,
    **setup: Any,
) -> dict[str, Any]:
    options: dict[str, Any] = {"batch": batch, **FP32}
    if seq is not None:
        options["seq_len"] = seq
    for part in (*parts, setup):
        options |= part
    return {"model": model, "setup": options, "record_events": events}


def _smoke() -> Iterator[dict[str, Any]]:
    """A minute: small models, one of each loop."""
    tiny = "prajjwal1/bert-tiny"
    yield _case(tiny, 4, 64, PLAIN)
    yield _case(tiny, 4, 64, BF16)
    yield _case(tiny, 2, 64, {"loop": "accelerate"}, grad_accum=2)
    yield _case("gpt2?n_layer=2", 2, 64, PLAIN, CKPT)


def _check() -> Iterator[dict[str, Any]]:
    """Two minutes on a CPU: one small model of each kind, to see whether traces still hold."""
    yield _case("prajjwal1/bert-tiny", 4, 64, PLAIN)
    yield _case("prajjwal1/bert-tiny", 4, 64, BF16)
    yield _case("prajjwal1/bert-tiny", 2, 64, {"loop": "accelerate"}, grad_accum=2)
    yield _case("gpt2?n_layer=2", 2, 64, PLAIN, CKPT)
    yield _case(
        "HuggingFaceTB/SmolLM2-135M?num_hidden_layers=2&vocab_size=1000", 2, 64, PLAIN, HALF
    )
    yield _case("t5-small?num_layers=2&num_decoder_layers=2", 2, 64, PLAIN, optim="adafactor")
    yield _case("google/vit-base-patch16-224?num_hidden_layers=2", 2, None, PLAIN, BF16)
    yield _case("facebook/convnextv2-atto-1k-224", 2, None, PLAIN, optim="sgd")


def _quick() -> Iterator[dict[str, Any]]:
    """The guide's model in every precision, and one case of each other kind."""
    for precision in (FP32, FP16, BF16, HALF):
        yield _case(BERT, 8, 512, precision)
    yield _case(BERT, 8, 512, FP16, CKPT)
    yield _case(BERT, 8, 512, FP32, EAGER, PLAIN)
    yield _case(BERT, 8, 512, FP16, EAGER, CKPT)
    yield _case(BERT, 1, 512, grad_accum=4)
    yield _case(BERT, 4, 512, optim="adafactor")
    yield _case(BERT, 4, 512, PLAIN, optim="sgd")
    for precision in (FP32, BF16, HALF):
        yield _case(GPT2, 8, 1024, precision, PLAIN)
    yield _case(GPT2, 4, 512, BF16, {"loop": "accelerate"}, grad_accum=2)
    for precision in (BF16, HALF):
        yield _case(LLAMA_1B, 1, 1024, precision, PLAIN)
    yield _case(LLAMA_1B, 2, 2048, HALF, CKPT)
    yield _case(QWEN, 1, 1024, BF16)
    yield _case(T5, 8, 256, BF16)
    yield _case(VIT, 32, None, BF16)
    yield _case(RESNET, 32)
    yield _case(RESNET, 32, None, BF16, PLAIN)
    yield _case(WAV2VEC, 4)
    yield _case(BERT_BASE, 32, 128, FP32)
    yield _case(BERT_BASE, 64, 128, FP16)


def _recorded_cases() -> Iterator[dict[str, Any]]:
    """Cases whose allocator history is kept, for a comparison event by event."""
    for part in (
        (FP32,),
        (FP16,),
        (BF16,),
        (FP32, EAGER),
        (FP16, EAGER),
        (FP32, CKPT),
        (FP16, EAGER, CKPT),
    ):
        yield _case(BERT, 8, 512, PLAIN, SDPA, *part, events=True)
    yield _case(BERT, 8, 512, FP16, events=True)
    yield _case(BERT, 1, 512, PLAIN, grad_accum=4, events=True)
    yield _case(BERT, 4, 512, PLAIN, optim="adamw_torch_foreach", events=True)
    yield _case(GPT2, 8, 1024, PLAIN, BF16, events=True)
    yield _case(LLAMA_1B, 2, 2048, PLAIN, BF16, events=True)
    yield _case(LLAMA_8B, 1, 4096, PLAIN, HALF, events=True)
    yield _case(T5, 8, 512, PLAIN, BF16, events=True)
    yield _case(VIT, 32, None, PLAIN, BF16, events=True)
    yield _case(RESNET, 32, None, PLAIN, events=True)
    yield _case(MIXTRAL, 1, 1024, PLAIN, HALF, events=True)


def _standard() -> Iterator[dict[str, Any]]:
    """Every mechanism on several models: what a fit needs."""
    yield from _quick()
    for model in FAMILIES:
        yield _case(model, 4, None, BF16)
    yield from _recorded_cases()
    for optim in (
        "adamw_torch_foreach",
        "adamw_torch_loop",
        "adafactor",
        "sgd",
        "sgd_momentum",
        "rmsprop",
        "adagrad",
    ):
        yield _case(BERT, 4, 512, PLAIN, optim=optim)
    for batch, seq in ((1, 128), (2, 128), (3, 200), (16, 512), (32, 512), (64, 128), (7, 333)):
        for precision in (FP32, BF16, HALF):
            yield _case(BERT, batch, seq, PLAIN, precision)
    yield _case(BERT, 8, 512, EAGER, grad_accum=8)
    yield _case(BERT, 8, 512, EAGER, CKPT, grad_accum=8)
    yield _case(BERT, 120, 512, PLAIN, EAGER, CKPT)
    decoders = (
        (GPT2, 8, 1024),
        ("gpt2-medium", 4, 1024),
        ("facebook/opt-125m", 38, 128),
        (QWEN, 2, 2048),
        (LLAMA_1B, 2, 2048),
        ("FacebookAI/roberta-base", 16, 512),
        (BERT_BASE, 32, 128),
    )
    for model, batch, seq in decoders:
        yield _case(model, batch, seq, PLAIN)
        yield _case(model, batch, seq, PLAIN, HALF)
        yield _case(model, batch, seq, PLAIN, FP16, EAGER)
        yield _case(model, batch, seq, PLAIN, BF16, CKPT)
        yield _case(model, batch, seq, BF16, grad_accum=2)
        yield _case(model, batch, seq, PLAIN, BF16, optim="adamw_torch_foreach")
    for seq in (512, 4096, 8192):
        yield _case(LLAMA_8B, 1, seq, PLAIN, HALF)
        yield _case(LLAMA_8B, 1, seq, PLAIN, HALF, CKPT)
        yield _case(LLAMA_8B, 2, seq, PLAIN, BF16)
    for part in ((FP32,), (BF16,), (HALF, CKPT)):
        yield _case(T5, 8, 512, PLAIN, *part)
        yield _case(VIT, 32, None, PLAIN, *part)
        yield _case(WAV2VEC, 4, None, PLAIN, *part[:1])
    for precision in (FP32, FP16):  # weights of half precision refuse images of single
        yield _case(RESNET, 32, None, PLAIN, precision)
    yield _case(MIXTRAL, 1, 1024, PLAIN, HALF)


def _full() -> Iterator[dict[str, Any]]:
    """The standard campaign, then products of options over more models and sizes."""
    yield from _standard()
    models = ((BERT, 512), (GPT2, 1024), (QWEN, 1024), (LLAMA_1B, 1024), (T5, 256))
    parts: tuple[tuple[Part, ...], ...] = (
        (FP32,),
        (FP16,),
        (BF16,),
        (HALF,),
        (BF16, CKPT),
        (BF16, EAGER),
    )
    loops: tuple[Part, ...] = ({"loop": "trainer"}, {"loop": "accelerate"}, PLAIN)
    for (model, seq), part, loop, batch in itertools.product(models, parts, loops, (2, 6)):
        yield _case(model, batch, seq, loop, *part)
    for model, seq in models:
        for accum, zero in itertools.product((2, 8), ("none", "zero")):
            yield _case(model, 2, seq, PLAIN, BF16, grad_accum=accum, zero_grad=zero)
        yield _case(model, 2, seq, PLAIN, BF16, alloc_conf="expandable_segments:True")
    for model, part in itertools.product(FAMILIES, ((FP32,), (BF16, CKPT))):
        yield _case(model, 4, None, *part)


CAMPAIGNS = {
    "smoke": _smoke,
    "check": _check,
    "quick": _quick,
    "standard": _standard,
    "full": _full,
}
"""Built-in campaigns, shortest first."""


def read_campaign(name: str) -> Campaign:
    """A campaign by its name, or from a file.

    Args:
        name: of a built-in one, or the path of a file: JSON or TOML with ``cases``, or JSON lines
            with a case each. Lists in a case's setup, its model or its task make one case of every
            combination.

    Raises:
        ConfigError: neither; or the file holds something else.
    """
    if name in CAMPAIGNS:
        make = CAMPAIGNS[name]
        about = (make.__doc__ or "").strip()
        return Campaign(name=name, cases=_unique(make(), name), about=about)
    path = Path(name).expanduser()
    if not path.is_file():
        near = closest(name, CAMPAIGNS)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"--campaign {name!r} is no campaign and no file.{hint} Legal: {', '.join(CAMPAIGNS)}, "
            "or the path of a file with cases (JSON, JSON lines or TOML)."
        )
    entries, about = _from_file(path)
    documents = itertools.chain.from_iterable(
        _combinations(entry, f"{path.name}, case {number}")
        for number, entry in enumerate(entries, start=1)
    )
    cases = _unique(documents, path.name)
    if not cases:
        raise ConfigError(f"{path} has no case: write at least a model and a setup.")
    return Campaign(name=path.stem, cases=cases, about=about)


def _from_file(path: Path) -> tuple[list[Any], str]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES // MIB} MiB: it is no campaign.")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            document: Any = tomllib.loads(text)
        elif path.suffix == ".jsonl":
            document = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            document = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        kind = {".toml": "TOML", ".jsonl": "JSON lines"}.get(path.suffix, "JSON")
        raise ConfigError(f"{path} is not valid {kind}: {error}.") from None
    about = ""
    if isinstance(document, dict):
        about = str(document.get("about", ""))
        document = document.get("cases")
    if not isinstance(document, list):
        raise ConfigError(
            f'{path} has no list of cases: write {{"cases": [{{"model": "gpt2", "setup": '
            '{"batch": [1, 2, 4]}}]}, or the list alone.'
        )
    return document, about


def _combinations(entry: Any, where: str) -> Iterator[dict[str, Any]]:
    """Lists in a case stand for one case of every combination."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is a {type(entry).__name__}, not an object with a model.")
    setup = entry.get("setup", {})
    if not isinstance(setup, Mapping):
        raise ConfigError(f"{where}: setup is a {type(setup).__name__}, not an object.")
    axes: list[tuple[str, str, list[Any]]] = []
    for owner, fields in (("", entry), ("setup", setup)):
        for name, value in fields.items():
            # a list of patterns is one value
            if isinstance(value, list) and name != "freeze":
                axes.append((owner, name, value))
    count = 1
    for _, name, values in axes:
        count *= len(values)
        if not values:
            raise ConfigError(f"{where}: {name} is an empty list.")
    if count > MAX_CASES:
        raise ConfigError(f"{where} stands for {count:,} cases; {MAX_CASES:,} are the most.")
    for combination in itertools.product(*(values for _, _, values in axes)):
        case = {**entry, "setup": dict(setup)}
        for (owner, name, _), value in zip(axes, combination, strict=True):
            (case["setup"] if owner else case)[name] = value
        yield case


def _unique(entries: Iterator[dict[str, Any]], where: str) -> tuple[Case, ...]:
    """Cases in their order, each once; the one that keeps its history stands for both."""
    cases_by_id: dict[str, Case] = {}
    for number, entry in enumerate(entries, start=1):
        case = case_from_dict(entry, where=f"{where}, case {number}")
        if case.processes > 1:
            raise ConfigError(
                f"{where}, case {number} ({case.model}): a campaign runs cases of one process. "
                "Runs of several are measured where they train, by MemestCallback or "
                "memest.measure, whose records go to the same store."
            )
        earlier_case = cases_by_id.get(case.id)
        if earlier_case is None or (case.record_events and not earlier_case.record_events):
            cases_by_id[case.id] = case
        if len(cases_by_id) > MAX_CASES:
            raise ConfigError(f"{where} has more than {MAX_CASES:,} cases.")
    return tuple(cases_by_id.values())
