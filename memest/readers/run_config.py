"""A run as its files and its command describe it: one value for each option, with its origin.

Precedence: flag > command > file > a framework's default. Where several files speak at one level,
the framework's own rule decides, and without one it is an error:

- training arguments come before accelerate's file (``TrainingArguments.__post_init__`` writes the
  environment that accelerate reads);
- DeepSpeed's batch, accumulation, clipping and precision must be those of the training arguments,
  or ``auto``: the Trainer stops where they differ (``HfTrainerDeepSpeedConfig.fill_match``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from memest.catalog.changes import with_changes
from memest.catalog.resolve import names_factory
from memest.config.option import Kind
from memest.config.option_table import OPTIONS, OWN_MODULE_NAMES
from memest.config.options import find_option, setup_from_options
from memest.config.setup import Setup
from memest.errors import ConfigError, UnfitGpuError
from memest.readers.effects import OPTIONS_OF_4BIT, OPTIONS_OF_LORA, values_that_act
from memest.readers.formats import TRAINER_FRAMEWORKS
from memest.readers.values import (
    CHANGES,
    COPIES,
    FACTORY_SAYS_IT,
    LENGTH,
    LOSS,
    NOT_HERE,
    PIXELS,
    UNKNOWN,
    DocumentReading,
    Either,
    Level,
    ReadValue,
    Remark,
    Spread,
    names_of,
    plain,
)
from memest.readers.with_model import fitted, length_remarks, once_said, open_cap, opened_by
from memest.report.result import NOT_MODELLED, Origin

__all__ = ["RunConfig", "settle"]

_MAX_NAMES = 12
"""Unknown keys that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What configurations and flags come to; :func:`memest.estimate` takes it for the model.

    Attributes:
        model: reference of the model, None where nothing names one.
        values: one for each option that anybody named, in the order of the options.
        ignored: keys that do not matter for memory, with why.
        not_modelled: what matters, or may, and is left out of an estimate; what of it may take more
            than is priced stands in the option ``unpriced`` too, what takes less in ``overpriced``.
        sources: files and commands with their formats.
        readings: what was read, as it was.
        named_options: options that were named to memest itself, by keyword; ``model`` among them.
        setup: the setup that the values make.
        image_cap: the most pixels of an image, which the model makes a size of; None for no cap.
    """

    model: str | None
    values: tuple[ReadValue, ...]
    ignored: tuple[Remark, ...]
    not_modelled: tuple[Remark, ...]
    sources: tuple[str, ...]
    setup: Setup
    image_cap: ReadValue | None = None
    readings: tuple[DocumentReading, ...] = field(default=(), repr=False)
    named_options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for :func:`memest.estimate` and its relatives, without the model."""
        return {each.option: each.value for each in self.values if each.option != "model"}

    @property
    def named_origins(self) -> tuple[Origin, ...]:
        """One row for each option that was named, the model among them."""
        return tuple(
            Origin(
                each.option,
                self.setup.optimizer if each.option == "optim" else plain(each.value),
                each.origin,
            )
            for each in self.values
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What an answer should say: what is not modelled, and what nobody knows."""
        notes = [f"not modelled: {remark}" for remark in self.not_modelled]
        unknown = [remark.key for remark in self.ignored if remark.why == UNKNOWN]
        if unknown:
            more = f" and {len(unknown) - _MAX_NAMES} more" if len(unknown) > _MAX_NAMES else ""
            names = ", ".join(unknown[:_MAX_NAMES])
            notes.append(f"not known, and taken to be without effect: {names}{more}")
        return tuple(notes)

    @contextmanager
    def telling_origins(self) -> Iterator[None]:
        """Within it, what is refused once the model is known says which line or key asked for it.

        Raises:
            ConfigError: as it was raised, with the places.
        """
        try:
            yield
        except UnfitGpuError as error:
            raise UnfitGpuError(_with_origins(str(error), self.values), error.why) from error
        except ConfigError as error:
            raise ConfigError(_with_origins(str(error), self.values)) from error

    @property
    def model_problem(self) -> str:
        """Why there is no model: nothing names one, or what does cannot be told."""
        for remark in self.not_modelled:
            if remark.why.endswith("; MODEL says it"):
                return f"{remark.key} {remark.why.partition(';')[0]}"
            if NOT_HERE in remark.why:
                return f"{remark.key} {NOT_HERE}, and its arguments name no model"
        return f"{', '.join(self.sources)} names no model"

    @property
    def model_words(self) -> str:
        """What to type for a model that is a module of a script's own; else ``MODEL ...``."""
        for remark in self.not_modelled:
            if remark.why.endswith(FACTORY_SAYS_IT):
                return remark.why.removesuffix(FACTORY_SAYS_IT).rpartition("; ")[2]
        return "MODEL ..."

    @property
    def sources_note(self) -> str:
        """What was read, and how many of its keys do not matter; empty where nothing was."""
        if not self.sources:
            return ""
        read = f"read: {', '.join(dict.fromkeys(self.sources))}"
        count = len(self.ignored)
        ignored_keys = "1 key was ignored" if count == 1 else f"{count} keys were ignored"
        return read + (f"; {ignored_keys} (memest estimate --explain lists them)" if count else "")

    def with_options(self, model: str | None = None, /, **options: Any) -> RunConfig:
        """The same with a model or options named besides, which come before all else.

        Raises:
            ConfigError: an option that is none, or a value that cannot be.
        """
        before = dict(self.named_options)
        named_model = before.pop("model", None)
        return settle(
            self.readings, _over(before, options), model=named_model if model is None else model
        )

    def with_model(self, setup: Setup | None, options: Mapping[str, Any]) -> RunConfig:
        """The same with options named besides, ready to be asked about.

        Args:
            setup: must be None: a configuration brings its own.
            options: as for :func:`memest.estimate`.

        Raises:
            ConfigError: a setup besides, no model, or an option that is none.
        """
        if setup is not None:
            raise ConfigError("Give either a Setup or a configuration that was read, not both.")
        run = self.with_options(**options) if options else self
        if run.model is None:
            raise ConfigError(
                f"{run.model_problem}: give it, memest.read_config(..., model='...')."
            )
        return run.fitted()

    def fitted(self) -> RunConfig:
        """The same, with guesses that the model takes."""
        cap = self.image_cap
        is_read = bool(self.readings)
        parts = fitted(
            str(self.model), self.values, self.not_modelled, self.setup, cap, sees=is_read
        )
        values, not_modelled, setup = parts
        return replace(self, values=values, not_modelled=not_modelled, setup=setup)


def settle(
    readings: Sequence[DocumentReading],
    flags: Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
) -> RunConfig:
    """One value for each option.

    Args:
        readings: of files and commands.
        flags: options that were named to memest itself; inputs and a loss of a module of one's own
            settle what is open of them, and are no values.
        model: likewise.

    Raises:
        ConfigError: two places contradict each other, or a value cannot be.
    """
    own_parts = {name for name in OWN_MODULE_NAMES if (flags or {}).get(name) is not None}
    values = [each for reading in readings for each in reading.values]
    flag_values = _flags(
        {n: v for n, v in (flags or {}).items() if n not in OWN_MODULE_NAMES},
        {str(each.value) for each in values if each.option == "precision"},
    )
    if model is not None:
        flag_values.append(ReadValue("model", model, "MODEL", Level.FLAG))
    values = _without_overridden(values, flag_values)
    values = _of_stage(values, flag_values)
    changes = {
        name: new for each in values if each.option == CHANGES for name, new in each.value.items()
    }
    values = [each for each in values if each.option != CHANGES]
    _check_deepspeed(values, {each.option for each in flag_values})
    by_option: dict[str, list[ReadValue]] = {}
    for each in (*values, *flag_values):
        by_option.setdefault(each.option, []).append(each)
    value_by_option = {option: _choose(option, each) for option, each in by_option.items()}
    if changes and "model" in value_by_option:
        entry = value_by_option["model"]
        new_name = with_changes(str(entry.value), changes)
        value_by_option["model"] = replace(entry, value=new_name)
    _samples(readings, value_by_option)
    image_cap = value_by_option.pop(PIXELS, None)
    copies = _share_out(value_by_option)
    acting, remarks = values_that_act(value_by_option)
    if "method" in acting and "dtype" not in acting:  # TRL's own default is for models by name
        acting["dtype"] = ReadValue("dtype", "auto", "as it is loaded", Level.DEFAULT)
    setup, reasons = _setup(acting)
    for option in reasons:
        remarks.append(Remark(acting.pop(option).origin, reasons[option]))
    ignored = [remark for reading in readings for remark in reading.ignored]
    not_modelled = [remark for reading in readings for remark in reading.not_modelled]
    ignored += [remark for remark in remarks if not remark.why.startswith("not priced")]
    not_modelled += [remark for remark in remarks if remark.why.startswith("not priced")]
    if image_cap is not None and image_cap.level is not Level.DEFAULT:
        not_modelled.append(open_cap(image_cap))
    if "seq_len" in acting or "inputs" in own_parts:
        not_modelled = [remark for remark in not_modelled if not remark.key.endswith(LENGTH)]
    not_modelled = list(length_remarks(not_modelled, None, setup))
    if setup.distributed.num_gpus == 1:
        not_modelled = [each for each in not_modelled if not isinstance(each.why, Spread)]
    settled = tuple(
        f"{flag} says it"
        for each in flag_values
        if each.option != "model"
        for flag in find_option(each.option).flags
    )
    if "model" in acting:
        settled = (*settled, "; MODEL says it")
    if model is not None and names_factory(model):
        settled = (*settled, FACTORY_SAYS_IT)
    if own_parts & {"loss", "step_fn"}:
        not_modelled = [each for each in not_modelled if not each.key.endswith(f" {LOSS}")]
    if "num_gpus" in acting and acting["num_gpus"].level is not Level.DEFAULT:
        settled = (*settled, "--num-gpus says it")
    if "zero" in acting or "zero_settings" in acting:
        settled = (*settled, "--zero says it")
    not_modelled = list(once_said(not_modelled, settled))
    sharded = acting.get("fsdp") or acting.get("zero")
    if sharded and "num_gpus" not in acting:
        not_modelled.append(
            Remark("number of GPUs", Either("nothing names it: 1 is taken; --num-gpus says it"))
        )
    not_modelled = list(dict.fromkeys((*not_modelled, *copies)))
    for name, remarks in opened_by(not_modelled).items():
        if remarks:
            words = tuple(dict.fromkeys((*getattr(setup, name), *map(str, remarks))))
            added: dict[str, Any] = {name: words}
            setup = replace(setup, **added)
            acting[name] = ReadValue(name, words, NOT_MODELLED, Level.FILE)
    named_model = acting.get("model")
    return RunConfig(
        model=None if named_model is None else str(named_model.value),
        values=tuple(acting[name] for name in sorted(acting, key=_place_in_table)),
        ignored=tuple(dict.fromkeys(ignored)),
        not_modelled=tuple(not_modelled),
        sources=tuple(f"{reading.source} ({reading.format})" for reading in readings),
        setup=setup,
        image_cap=image_cap,
        readings=tuple(readings),
        named_options=tuple(
            {**(flags or {}), **({} if model is None else {"model": model})}.items()
        ),
    )


def _over(before: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Options with later ones over them; the two words for a precision take each other's place."""
    fields = {find_option(name).name for name, value in later.items() if value is not None}
    words = {"fp16", "bf16", "precision"}
    replaced_names = fields | (words if fields & words else set())
    earlier = {
        name: value
        for name, value in before.items()
        if find_option(name).name not in replaced_names
    }
    return {**earlier, **{name: value for name, value in later.items() if value is not None}}


def _place_in_table(option: str) -> int:
    names = [each.name for each in OPTIONS]
    return -1 if option == "model" else names.index(option)


def _flags(flags: Mapping[str, Any], precisions: Set[str]) -> list[ReadValue]:
    """Flags as values; those that stand for another one are rewritten.

    Args:
        flags: by keyword. One that switches an autocast off takes back what files say of it; where
            they are silent a method's own is bf16.
        precisions: that files name.
    """
    out: list[ReadValue] = []
    switched_off: list[ReadValue] = []
    for name, value in flags.items():
        if value is None:
            continue
        option = find_option(name)
        origin = option.flags[0]
        keyword = option.name
        if keyword in ("fp16", "bf16"):
            if not value:
                if keyword in (precisions or {"bf16"}):
                    switched_off = [ReadValue("precision", "fp32", origin, Level.FLAG)]
                continue
            before = [each for each in out if each.option == "precision"]
            if before and before[0].value != keyword:
                raise ConfigError(
                    f"{before[0].origin} and {origin} exclude each other: autocast has one dtype."
                )
            keyword, value = "precision", keyword
        if keyword == "trust_remote_code":
            continue
        out.append(ReadValue(keyword, value, origin, Level.FLAG))
    return out if any(each.option == "precision" for each in out) else [*out, *switched_off]


_FSDP_OPTIONS = (
    "fsdp",
    "fsdp_wrap",
    "fsdp_offload",
    "fsdp_shard_size",
    "fsdp_wrap_ends",
    "fsdp_mixed_precision",
)
_ZERO_OPTIONS = ("zero", "offload_optimizer", "offload_param")
_OVERRIDES: dict[str, tuple[str, ...]] = {
    "load_in_4bit": ("load_in_8bit", "quantization"),
    "load_in_8bit": ("load_in_4bit", "quantization", *OPTIONS_OF_4BIT),
    "quantization": ("load_in_4bit", "load_in_8bit", *OPTIONS_OF_4BIT),
    "adapter": ("peft", "num_virtual_tokens", *OPTIONS_OF_LORA),
    "peft": ("adapter",),
    "fsdp": ("zero_settings", *_ZERO_OPTIONS),
    "zero": _FSDP_OPTIONS,
    "zero_settings": (*_FSDP_OPTIONS, *_ZERO_OPTIONS),
    "optim": ("optim_args", "optim_target_modules"),
    "gradient_checkpointing_kwargs": ("use_reentrant",),
}
"""What a flag takes back of files, being another way to say it."""


def _without_overridden(
    values: Iterable[ReadValue], flag_values: Iterable[ReadValue]
) -> list[ReadValue]:
    flags = {each.option for each in flag_values}
    overridden_options = {option for flag in flags for option in _OVERRIDES.get(flag, ())} - flags
    return [each for each in values if each.option not in overridden_options]


def _of_stage(values: list[ReadValue], flag_values: list[ReadValue]) -> list[ReadValue]:
    """Values without those that count under ZeRO-3 alone, or without those that they replace."""
    stages = [each for each in (*values, *flag_values) if each.option == "zero"]
    if not stages or str(_choose("zero", stages).value) != "3":
        return [each for each in values if not each.stage_3]
    forced = {each.option for each in values if each.stage_3}
    return [each for each in values if each.stage_3 or each.option not in forced]


def _same(first: Any, second: Any) -> bool:
    return first == second or _text(first) == _text(second)


def _text(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, (list, tuple)):
        return ",".join(str(each) for each in value)
    return str(value).strip().lower()


def _check_deepspeed(values: Sequence[ReadValue], flags: set[str]) -> None:
    """What DeepSpeed's configuration says of the run must be what the Trainer has, if it is one."""
    loops = [entry for entry in values if entry.option == "loop"]
    own_loop = bool(loops) and max(loops, key=lambda each: each.level).value != "trainer"
    for entry in values:
        if not entry.checked or entry.option in flags or own_loop:
            continue
        trainers = [
            other
            for other in values
            if other.option == entry.option and other.by in TRAINER_FRAMEWORKS and not other.checked
        ]
        if not trainers:
            continue
        best = max(reversed(trainers), key=lambda other: other.level)
        if not _same(best.value, entry.value):
            flag = find_option(entry.option).flags[0]
            raise ConfigError(
                f"{flag}: {entry.origin} says {entry.value}, and {best.origin} says {best.value}. "
                "The Trainer stops where its arguments and DeepSpeed's configuration differ: "
                "write auto there, or the same."
            )


def _choose(option: str, values: Sequence[ReadValue]) -> ReadValue:
    """The value that counts."""
    level = max(entry.level for entry in values)
    top = [entry for entry in values if entry.level is level]
    if level is Level.DEFAULT:
        return next((entry for entry in reversed(top) if entry.by != "accelerate"), top[-1])
    trainers = [entry for entry in top if entry.by in TRAINER_FRAMEWORKS]
    top = trainers or top
    last = top[-1]
    for entry in top:
        apart = entry.origin.partition(":")[0] != last.origin.partition(":")[0]
        if apart and not _same(entry.value, last.value):
            label = "the model" if option == "model" else find_option(option).flags[0]
            raise ConfigError(
                f"{label}: {entry.origin} says {entry.value!r}, and {last.origin} says "
                f"{last.value!r}. Drop one, or say it on memest's own command line, which comes "
                "first."
            )
    return last


def _samples(readings: Sequence[DocumentReading], values: dict[str, ReadValue]) -> None:
    """Samples of an optimizer step: what they imply, or whether they can be."""
    for reading in readings:
        if reading.samples_per_step is None:
            continue
        total, origin = reading.samples_per_step.samples, reading.samples_per_step.origin
        numbers = {
            name: int(str(values[name].value))
            for name in ("batch", "grad_accum", "num_gpus")
            if name in values and str(values[name].value).isdigit()
        }
        gpus = numbers.get("num_gpus", 1)
        if not reading.samples_per_step.is_exact:
            if values["grad_accum"].level is Level.DEFAULT:
                share = max(1, -(-total // (numbers.get("batch", 1) * gpus)))
                values["grad_accum"] = ReadValue("grad_accum", share, origin, Level.DEFAULT)
            continue
        if len(numbers) == 3:
            product = numbers["batch"] * numbers["grad_accum"] * gpus
            by_flag = any(values[name].level is Level.FLAG for name in numbers)
            if product != total and not by_flag:
                raise ConfigError(
                    f"{origin} says {total}, and batch {numbers['batch']} x accumulation "
                    f"{numbers['grad_accum']} x {gpus} GPUs are {product}: DeepSpeed stops there. "
                    "Write auto."
                )
            continue
        if "num_gpus" not in numbers:
            continue
        for missing, other in (("grad_accum", "batch"), ("batch", "grad_accum")):
            if missing not in numbers and other in numbers:
                share, rest = divmod(total, numbers[other] * gpus)
                if rest == 0 and share:
                    values[missing] = ReadValue(missing, share, origin, Level.FILE, "DeepSpeed")
                break


def _share_out(values: dict[str, ReadValue]) -> list[Remark]:
    """How many GPUs share one of several copies; what cannot be told of it.

    Copies, layers and stages are shared by GPUs of their own, sequences by those of the shards
    (``ParallelDims`` of torchtitan and torchtune).
    """
    entry = values.pop(COPIES, None)
    if entry is None or "fsdp" not in values or "fsdp_shard_size" in values:
        return []
    others = int(entry.value)
    gpus = int(str(values["num_gpus"].value)) if "num_gpus" in values else 0
    for name in ("tp", "pp"):
        others *= int(str(values[name].value)) if name in values else 1
    shard, rest = divmod(gpus, others)
    if rest or shard == 1:
        gpus_text = f"{gpus} GPUs" if gpus > 1 else "1 GPU"
        raise ConfigError(
            f"{entry.origin} {entry.value} and {gpus_text}: no whole number of GPUs, two or more, "
            "is left to share a copy."
        )
    if not shard:
        why = f"{entry.value} copies: of how many GPUs each is unknown; --num-gpus says it"
        return [Remark(entry.origin, why)]
    values["fsdp_shard_size"] = replace(entry, option="fsdp_shard_size", value=shard)
    return []


_EVALUATION_OPTIONS = ("eval_batch", "eval_samples", "eval_accumulation_steps")
_COMPILE_OPTIONS = ("torch_compile", "torch_compile_mode", "torch_compile_backend")
_SEQUENCE_OPTIONS = ("tp_sequence_parallel", "tp_loss_parallel")
_SHARING_OPTIONS = (_COMPILE_OPTIONS, ("ep",), _SEQUENCE_OPTIONS)
"""Those without which a run may take much more than it does."""
_EXPENDABLE_OPTIONS = (
    (("neftune_noise_alpha",), ("--neftune-noise-alpha",)),
    (_EVALUATION_OPTIONS, ("--eval", "evaluation")),
    (_COMPILE_OPTIONS, ("--torch-compile",)),
    (("ep",), ("--ep",)),
    (_SEQUENCE_OPTIONS, ("--tp-sequence-parallel",)),
)
"""Options of files that are left out and reported where they cannot be priced, with the words by
which a refusal is about them."""


def _setup(values: Mapping[str, ReadValue]) -> tuple[Setup, dict[str, str]]:
    """The setup, and values of files that it cannot have, with why."""
    options = {name: each.value for name, each in values.items() if name != "model"}
    _check_kinds(values)
    try:
        return setup_from_options(**options), {}
    except ConfigError as error:
        for group, marks in _EXPENDABLE_OPTIONS:
            names = [name for name in group if name in values]
            concerns_group = any(mark in str(error) for mark in marks)
            if (
                names
                and concerns_group
                and all(values[name].level is not Level.FLAG for name in names)
            ):
                fewer = {name: each for name, each in values.items() if name not in names}
                setup, reasons = _setup(fewer)
                reason = f"not priced: {str(error).partition(', and memest does not guess')[0]}"
                remark = Either(reason) if group in _SHARING_OPTIONS else reason
                return setup, reasons | dict.fromkeys(names, remark)
        raise ConfigError(_with_origins(str(error), values.values())) from None


def _check_kinds(values: Mapping[str, ReadValue]) -> None:
    """A value of a wrong kind is refused by its key, not by a flag that nobody wrote."""
    for name, each in values.items():
        if name == "model" or each.level is Level.FLAG:
            continue
        option, value = find_option(name), each.value
        nested = isinstance(value, Mapping) and name not in (
            "zero_settings",
            "adapter",
            "quantization",
        )
        listed = isinstance(value, (list, tuple)) and option.kind is not Kind.LIST
        listed = listed and name != "optim_target_modules"
        if nested or listed:
            raise ConfigError(f"{each.origin} {value!r} is not what {option.flags[0]} takes.")
        if option.kind is Kind.LIST or name == "optim_target_modules":
            names_of(value, each.origin)


def _with_origins(message: str, values: Iterable[ReadValue]) -> str:
    """A message with the places that the options it names come from, and the model."""
    origins = []
    for each in values:
        if each.level is Level.FLAG:
            continue
        if each.option == "model":
            if f"{each.value} " in message:
                origins.append(f"{each.value} is loaded by {each.origin}")
            continue
        flags = [flag for flag in find_option(each.option).flags if f"{flag} " in f"{message} "]
        if each.option == "precision" and f"--{each.value}" in message:
            flags.append(f"--{each.value}")
        if flags:
            origins.append(f"{flags[0]} is {each.origin}")
    return message + (f" ({'; '.join(origins)}.)" if origins else "")
