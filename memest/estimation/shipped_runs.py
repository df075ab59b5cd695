"""The runs of a model that come with the package, and what a question would have to be to be one.

Without torch these alone are answered: whoever asks another is told what to change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from memest.catalog.mirrors import original_of_copy
from memest.catalog.models import lookup
from memest.catalog.resolve import ModelSource, resolve_model
from memest.config.option_table import OPTIONS
from memest.config.options import find_option
from memest.config.quantization import own_quantization
from memest.config.setup import Precision, Setup, Task
from memest.errors import MemestError
from memest.profiles.axes import key_of, sizes_of, structure_of
from memest.profiles.cache import Document
from memest.profiles.document import domain_from_json, family_from_json
from memest.profiles.family import FamilyDomain
from memest.profiles.known_profiles import shipped_folder, takes_kernels
from memest.profiles.packs import Packs
from memest.workspaces.operator_call import GpuTraits

__all__ = ["is_shipped", "nearest_run", "shipped_words", "what_counts"]

_OF_ITS_FILE = ("_name_or_path", "transformers_version")
_OF_TEXTS = ("bos_token_id", "eos_token_id")
"""Which tokens begin and end a text: instruct and base models differ in it. The code of models that
only read on from what they have never asks; of some others the forward does (CLIP, BART)."""
_FAR = {"adapter": 8, "quantization": 4, "precision": 2}
"""By how much a part of a setup counts where it differs; others count once."""
_MOST_CHANGES = 3
"""Changes of a run beyond which it is another one."""
_OF_THE_LOOP = ("grad_accum", "num_steps")
"""Parts that follow from others."""
_RANK, _QLORA = "--lora-r 16", "--qlora"
_SHARDS = "--num-gpus N --zero 2 (or --fsdp full_shard)"
_NF4 = {"quant_type": "nf4", "double_quant": True}


def what_counts(config: Mapping[str, Any] | None, auto_class: str | None) -> dict[str, Any]:
    """A configuration without what no trace depends on: models that are alike share theirs."""
    reads_on = auto_class == "AutoModelForCausalLM"
    left_out = (*_OF_ITS_FILE, *_OF_TEXTS) if reads_on else _OF_ITS_FILE
    return {name: v for name, v in (config or {}).items() if name not in left_out}


@cache
def _shipped_by_config() -> dict[str, str]:
    """A model that is shipped, by what counts of its configuration."""
    found: dict[str, str] = {}
    for name in Packs(shipped_folder()).models:
        entry = lookup(name)
        if entry is not None:
            found[_digest(entry.config(), entry.auto_class)] = name
    return found


def _digest(config: Mapping[str, Any] | None, auto_class: str | None) -> str:
    return json.dumps([auto_class, what_counts(config, auto_class)], sort_keys=True)


def is_shipped(config: Mapping[str, Any] | None, auto_class: str | None) -> bool:
    """Whether runs of a model come with the package.

    Args:
        config: of the model.
        auto_class: the class of transformers that builds it.
    """
    return _digest(config, auto_class) in _shipped_by_config()


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that comes with the package.

    Attributes:
        setup: its part of a key.
        task: of the head that the model gets where none is named.
        families: of its steps.
    """

    setup: Mapping[str, Any]
    task: str
    families: tuple[Document, ...] = ()

    def on(self, gpu: GpuTraits | None, request: Setup) -> _Run:
        """The same with the families alone whose attention kernels a GPU takes."""
        if gpu is None:
            return self
        kept = []
        for document in self.families:
            family = family_from_json(document.content)
            if takes_kernels(family, family.points[-1], gpu, request):
                kept.append(document)
        return replace(self, families=tuple(kept))

    def nearest_sizes(self, request: Setup) -> tuple[str, str]:
        """What of the sizes that were asked for is answered nowhere near, and what is.

        Both are empty where there are no sizes.
        """
        domains = [domain_from_json(document.about) for document in self.families]
        boxes = [_Box.of(domain, domains) for domain in domains]
        asked = sizes_of(request)
        if not boxes:
            return "", ""
        box = min(boxes, key=lambda box: (len(list(box.outside(asked))), -box.volume))
        alone = all(box.holds(other) for other in boxes)
        return " and ".join(box.outside(asked)), f"{box}" if alone else f"among others {box}"

    def covers(self, request: Setup) -> bool:
        """Whether the sizes that were asked for are among them, as far as all are named."""
        asked = sizes_of(request)
        domains = [domain_from_json(document.about) for document in self.families]
        return any(
            domain.names != set(asked) or domain.point_of(asked) is not None for domain in domains
        )


@dataclass(frozen=True, slots=True)
class _Box:
    """Sizes that are answered together, each whatever the others are.

    Attributes:
        spans: lowest, highest and step of each size.
        tied: the target is as long as the source.
    """

    spans: Mapping[str, tuple[int, int, int]]
    tied: bool = False

    @classmethod
    def of(cls, domain: FamilyDomain, others: Iterable[FamilyDomain] = ()) -> _Box:
        """That of a family, with the size below it that another family has alone.

        A batch of 1 is mostly a family by itself.
        """
        spans = {name: (size, size, 0) for name, size in domain.fixed_sizes.items()}
        for axis, name in enumerate(domain.axes):
            sizes = [point[axis] for point in domain.points]
            spans[name] = min(sizes), max(sizes), domain.moduli[axis]
        box = cls(spans, domain.tied)
        for other in map(cls.of, others):
            for name, (low, high, step) in spans.items():
                rest = {each: span for each, span in spans.items() if each != name}
                below = other.spans.get(name) == (low - 1, low - 1, 0) and step == 1
                if below and rest == {n: x for n, x in other.spans.items() if n != name}:
                    box = cls({**box.spans, name: (low - 1, high, step)}, domain.tied)
        return box

    @property
    def volume(self) -> int:
        """How many sizes there are."""
        return math.prod((high - low) // (step or 1) + 1 for low, high, step in self.spans.values())

    def holds(self, other: _Box) -> bool:
        """Whether all of another's sizes are among these."""
        return self.tied == other.tied and all(
            name in self.spans
            and self.spans[name][0] <= low
            and high <= self.spans[name][1]
            and not any(
                (size - self.spans[name][0]) % (self.spans[name][2] or 1)
                for size in (low, low + step)
            )
            for name, (low, high, step) in other.spans.items()
        )

    def outside(self, asked: Mapping[str, int]) -> Iterator[str]:
        """Which of the sizes that were asked for are none of these, and why, as it is typed."""
        for name, size in asked.items():
            if name not in self.spans:
                continue
            low, high, step = self.spans[name]
            is_sound = name == "audio_ms"
            flag = "--audio-seconds" if is_sound else find_option(name).flags[0]
            unit = 1000 if is_sound else 1
            words = f"{flag} {size / unit:.15g}"
            if low == high != size:
                yield f"{words} is not {low / unit:.15g}"
            elif size < low:
                yield f"{words} is below {low / unit:.15g}"
            elif size > high:
                yield f"{words} is above {high / unit:.15g}"
            elif step > 1 and (size - low) % step:
                before = size - (size - low) % step
                yield f"{words} is between {before:.15g} and {before + step:.15g}"
        target = asked.get("target_len") if self.tied else None
        if target not in (None, asked.get("seq_len")):
            yield f"--target-len {target} is not the length of the source"

    def __str__(self) -> str:
        names = {
            "batch": "batches",
            "seq_len": "lengths",
            "target_len": "targets",
            "image_size": "images",
            "lora_r": "ranks",
        }
        said = [
            f"{word} of {low:,}"
            if low == high
            else f"{word} from {low:,} to {high:,}" + (f" in steps of {step}" if step > 1 else "")
            for name, word in names.items()
            if name in self.spans
            for low, high, step in [self.spans[name]]
        ]
        return ", ".join([*said, *(["targets as long"] if self.tied else ())])


def _runs_of(model: str) -> Iterator[_Run]:
    for key, task, families in Packs(shipped_folder()).runs(model):
        yield _Run(key["setup"], task, tuple(families))


def nearest_run(source: ModelSource | None, request: Setup, gpu: GpuTraits | None = None) -> str:
    """What to change of a question so that it is answered without torch.

    Args:
        source: where the model comes from; None for a live module.
        request: the run that was asked for.
        gpu: whose kernels run; None for any.

    Returns:
        A sentence; empty of what is no model of the catalogue.
    """
    if source is None or source.config is None:
        return ""
    original = original_of_copy(source.id)
    name, auto_class = source.id, source.auto_class
    config: Mapping[str, Any] = source.config
    if original != source.id and (entry := lookup(original)) is not None:
        try:
            quantization, _ = own_quantization(source.config, request.quantization)
            if quantization is not None and request.precision is Precision.FP16:
                quantization = replace(quantization, compute_dtype="float16")  # as --qlora has it
            request = replace(request, quantization=quantization)
            config, name = resolve_model(original).config or {}, entry.id
        except MemestError:
            return ""
    model = _shipped_by_config().get(_digest(config, auto_class))
    if model is None:
        return f"No run of {name} comes with memest." if source.kind == "catalogue" else ""
    structure = structure_of(request)
    runs = list(_runs_of(model))
    if structure.task.value in {run.task for run in runs}:
        structure = replace(structure, task=Task.AUTO)
    asked = key_of(structure)
    runs.sort(key=lambda run: _distance(asked, run.setup))
    if not runs:
        return ""
    run = next((here for each in runs if (here := each.on(gpu, request)).families), None)
    subject = f"Without torch, {name} is answered"
    if run is None:
        return (
            f"{subject} on other cards alone: no run of it that comes with memest has the "
            f"attention kernels of compute capability {_capability(gpu)}."
        )
    why = ""
    if gpu is not None and run.setup != runs[0].setup:
        subject += f" on a GPU of compute capability {_capability(gpu)}"
        why = "; nearer runs that come with memest are for the attention kernels of other cards"
    changes = list(_changes(request.to_dict(), asked, run.setup))
    if name != source.id:
        changes = [_QLORA, *(each for each in changes if each != _QLORA)]
    if not all(changes) or len(changes) > _MOST_CHANGES:
        return f"{subject} in other ways: `memest models {name}` lists them{why}."
    sizes, outside = "", ""
    if not changes or not run.covers(request):
        outside, answered = run.nearest_sizes(request)
        sizes = f": {outside}; answered are {answered}" if outside else f": {answered}"
    if not changes:
        elsewhere = ", or on another card" if gpu is None and not outside else ""
        return f"{subject} like this at other sizes{elsewhere}{sizes}."
    return f"{subject} {_words(changes)}{sizes}{why}."


def shipped_words(config: Mapping[str, Any] | None, auto_class: str | None) -> tuple[str, ...]:
    """The runs of a model that come with the package, as they are typed.

    Args:
        config: of the model.
        auto_class: the class of transformers that builds it.
    """
    model = _shipped_by_config().get(_digest(config, auto_class))
    found: dict[str, None] = {}
    for run in _runs_of(model) if model is not None else ():
        setup = run.setup
        if setup.get("partitioned"):
            words = ["--bf16", f"--checkpointing {setup['checkpointing']}", "--num-gpus N --zero 3"]
        elif setup.get("dtype") in ("bfloat16", "float16"):
            half = "bf16" if setup["dtype"] == "bfloat16" else "fp16"
            words = [f"--{half}", f"--checkpointing {setup['checkpointing']}", _SHARDS]
        else:
            words = [f"--{setup['precision']}", f"--checkpointing {setup['checkpointing']}"]
            words += _quantization({}, setup["quantization"]) if setup.get("quantization") else ()
            words += ["--lora-r N"] if setup.get("adapter") else ()
        usual = ("--fp32", "--checkpointing none")
        found[" ".join(each for each in words if each not in usual) or "no option"] = None
    return tuple(sorted(found, key=lambda words: (len(words.split()), words)))


def _capability(gpu: GpuTraits | None) -> str:
    return "" if gpu is None else ".".join(map(str, gpu.capability))


def _words(changes: Iterable[str]) -> str:
    added = [each for each in changes if each.startswith("--")]
    others = [each for each in changes if not each.startswith("--")]
    return ", ".join([*([f"with {' '.join(added)}"] if added else []), *others])


def _distance(asked: Mapping[str, Any], shipped: Mapping[str, Any]) -> int:
    """How much differs; parts that are there in one of them alone count most."""
    far = 0
    for name in _differing(asked, shipped):
        ours, theirs = asked.get(name), shipped.get(name)
        both = isinstance(ours, Mapping) and isinstance(theirs, Mapping)
        far += len(_differing(ours, theirs)) if both else _FAR.get(name, 1)
    return far


def _differing(asked: Any, shipped: Any) -> list[str]:
    names = dict.fromkeys((*asked, *shipped))
    differing = [name for name in names if asked.get(name) != shipped.get(name)]
    return [name for name in differing if name not in _OF_THE_LOOP]


def _changes(
    request: Mapping[str, Any], asked: Mapping[str, Any], shipped: Mapping[str, Any]
) -> Iterator[str]:
    """What to add or to leave out, as it is typed; empty for what nobody typed, or can."""
    usual = Setup().to_dict()
    in_other_precision = asked.get("precision") != shipped.get("precision")
    for name in _differing(asked, shipped):
        ours, theirs = asked.get(name), shipped.get(name)
        if name == "quantization":
            if _differing(ours or {}, theirs or {}) != ["compute_dtype"] or not in_other_precision:
                yield from _quantization(ours or {}, theirs or {})
        elif name == "adapter":
            yield from _adapter(ours or {}, theirs or {})
        elif name == "precision" and theirs != usual[name]:
            yield f"--{theirs}" + (f" in place of --{ours}" if ours != usual[name] else "")
        elif theirs in (None, usual.get(name)):
            yield _without(name, "") if request.get(name) != usual.get(name) else ""
        else:
            yield f"{flag} {theirs}" if (flag := _flag(name, "")) else ""


def _quantization(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    if not theirs:
        yield "without a quantised base"
    elif all(theirs.get(name) == value for name, value in _NF4.items()):
        yield _QLORA
    else:
        yield "--load-in-4bit" if not ours else "with --load-in-4bit alone for the base"


def _adapter(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    if not theirs:
        yield "without adapters"
    elif not ours or ours.get("peft_type") != theirs.get("peft_type"):
        yield _RANK
    else:
        yield from (_without("adapter", name) for name in _differing(ours, theirs))


def _without(field: str, key: str) -> str:
    return f"without {flag}" if (flag := _flag(field, key)) else ""


def _flag(field: str, key: str) -> str:
    """How the option of a part of a setup is typed; empty where there is none."""
    for option in OPTIONS:
        if option.field == field and option.key == key and option.flags:
            return option.flags[0]
    return ""
