"""From keywords, in anybody's spelling, to a training setup. Torch-free.

The options themselves are declared in :mod:`memest.option_table`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
from collections.abc import Mapping
from typing import Any

from memest.data_loading_table import merge_data_loading
from memest.deepspeed_file import read_deepspeed
from memest.distributed import ALONE, Distributed
from memest.errors import ConfigError, closest
from memest.finetune_options import merge_adapter, merge_quantization
from memest.generation_options import merge_generation
from memest.length_options import merge_lengths
from memest.option import Kind, Option, Panel
from memest.option_table import OPTIONS
from memest.setup import MAX_BATCH, Setup, Software
from memest.setup_rules import check_built_dtype
from memest.units import parse_size

__all__ = [
    "OPTIONS",
    "Kind",
    "Option",
    "Panel",
    "find_option",
    "given_setup",
    "no_gpu",
    "read_bool",
    "read_effective_batch",
    "read_size",
    "read_whole",
    "setup_from_options",
]

HARMLESS = frozenset(
    """adam_beta1 adam_beta2 adam_epsilon
    disable_tqdm do_eval do_train eval_steps hub_model_id learning_rate
    load_best_model_at_end logging_dir logging_steps logging_strategy lr lr_scheduler_type max_steps
    num_train_epochs output_dir overwrite_output_dir push_to_hub report_to run_name save_steps
    save_strategy save_total_limit seed warmup_ratio warmup_steps""".split()
)
"""Training arguments that no tensor depends on: taken from Python and passed over."""

_EVAL_BATCH = 8
"""``per_device_eval_batch_size`` of ``TrainingArguments``."""
_PRECISION_WORDS = {"no": "fp32", "none": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SPREAD = tuple(field.name for field in dataclasses.fields(Distributed))
_TRUE = frozenset({"true", "yes", "on", "1", "t", "y"})
_FALSE = frozenset({"false", "no", "off", "0", "f", "n"})


@functools.cache
def _by_keyword() -> dict[str, Option]:
    return {keyword: option for option in OPTIONS for keyword in option.keywords}


def find_option(name: str) -> Option:
    """The option of a Python keyword, by any of its names.

    Raises:
        ConfigError: for an unknown name; the message has the closest legal ones.
    """
    known = _by_keyword()
    if name in known:
        return known[name]
    near = closest(name, known)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"{name!r} is not an option of an estimate.{hint} `memest estimate --help` lists them all."
    )


def read_bool(option: str, value: Any) -> bool:
    """True or False, as Python or as the words that configuration files use."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{option} {value!r} is neither true nor false.")


def read_whole(option: str, value: Any) -> int:
    """A whole number, as Python, NumPy or text has it."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            # a count out of a NumPy array is a count
            return int(value) if isinstance(value, str) else operator.index(value)
    raise ConfigError(f"{option} {value!r} is not a whole number.")


def read_size(name: str, value: int | str) -> int:
    """The bytes of an option that is a size, by its keyword.

    Raises:
        ConfigError: not a size, or one that leaves no memory.
    """
    flag = find_option(name).flags[0]
    try:
        size = parse_size(value if isinstance(value, int) else str(value))
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{flag}: {error}") from None
    if name == "gpu_memory" and size <= 0:
        raise ConfigError(f"{flag} {value} leaves no memory: write for example {flag} 24GiB.")
    if size < 0:
        raise ConfigError(f"{flag} {value} must not be negative.")
    return size


def _coerce(option: Option, value: Any) -> Any:
    """The value in the type its field has; ranges and choices are Setup's business."""
    shown = option.flags[0]
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        return read_bool(shown, value)
    if option.kind is Kind.WHOLE:
        return read_whole(shown, value)
    if option.kind is Kind.NUMBER:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{shown} {value!r} is not a number.") from None
    if option.kind is Kind.LIST:
        return (value,) if isinstance(value, str) else tuple(value)
    if option.name == "software":
        return _software(value)
    if option.name == "precision":
        return _PRECISION_WORDS.get(str(value).strip().lower(), value)
    if option.name == "alloc_conf":
        return str(value)
    if option.name == "optim_target_modules":
        return _target_modules(value)
    if option.name == "nccl_memory":
        return read_size("nccl_memory", value)
    return value


def _merge_distributed(given: dict[str, Any], base: Setup | None) -> None:
    """Gather what says how the run is spread over GPUs."""
    spread = {name: given.pop(name) for name in _SPREAD if name in given}
    if spread:
        kept = ALONE if base is None else base.distributed
        given["distributed"] = dataclasses.replace(kept, **spread)


def _merge_deepspeed(given: dict[str, Any], base: Setup | None) -> None:
    """Read a DeepSpeed file; what it says must not contradict what else was given.

    As the Trainer does, which stops where its arguments and the file differ.
    """
    value = given.get("zero_settings")
    if value is None or (isinstance(value, Mapping) and "zero_optimization" not in value):
        return
    pieces = given.get("sp", 1 if base is None else base.distributed.sp)
    found = read_deepspeed(value, shares_sequences=pieces != 1)
    given["zero_settings"] = found.settings
    for name, said in found.options.items():
        if name in given and str(given[name]) != str(said):
            raise ConfigError(
                f"{find_option(name).flags[0]} {given[name]} and the DeepSpeed configuration's "
                f"{said} contradict each other: drop one, or write auto in the file."
            )
        given[name] = said


def _software(value: Any) -> Software:
    if isinstance(value, Software):
        return value
    if isinstance(value, Mapping):
        value = ",".join(f"{name}={version}" for name, version in value.items())
    return Software.parse(str(value))


def _target_modules(value: Any) -> str | tuple[str, ...]:
    """One pattern, or several names: a JSON list on the command line."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--optim-target-modules {value!r} is not valid JSON ({error.msg}): write for "
                'example \'["attn", "mlp"]\''
            ) from None
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ConfigError(
            f"--optim-target-modules {value!r} is neither a pattern nor a list of names."
        )
    return tuple(value)


def _merge_precision(given: dict[str, Any]) -> None:
    """Replace the switches fp16 and bf16 by the field they stand for."""
    wanted = {name for name in ("fp16", "bf16") if given.pop(name, False)}
    if len(wanted) == 2:
        raise ConfigError(
            "--fp16 and --bf16 exclude each other: autocast has one dtype. Drop one of them."
        )
    for name in wanted:
        if str(given.get("precision", name)) != name:
            raise ConfigError(
                f"--{name} and --precision {given['precision']} contradict each other: drop one."
            )
        given["precision"] = name


def _merge_kwargs(given: dict[str, Any]) -> None:
    """Read ``gradient_checkpointing_kwargs``."""
    value = given.pop("gradient_checkpointing_kwargs", None)
    if value is None:
        return
    shown = "--checkpointing-kwargs"
    if not isinstance(value, Mapping):
        try:
            value = json.loads(str(value))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{shown} {value!r} is not valid JSON ({error.msg} in column {error.colno}): write "
                "for example '{\"use_reentrant\": false}'"
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(f'{shown} takes a JSON object, for example {{"use_reentrant": true}}')
    if "use_reentrant" in value and value["use_reentrant"] is not None:
        given.setdefault("use_reentrant", read_bool("use_reentrant", value["use_reentrant"]))
    every = value.get("every_n_layers")
    if every is not None and given.get("checkpointing", True) in (True, "full"):
        given["checkpointing"] = f"every_n:{every}"


def _merge_segments(given: dict[str, Any]) -> None:
    """Write the switch expandable_segments into the allocator's configuration."""
    if not given.pop("expandable_segments", False):
        return
    conf = given.get("alloc_conf", "")
    found = [item for item in conf.split(",") if item.strip().startswith("expandable_segments")]
    if any(item.partition(":")[2].strip().lower() == "false" for item in found):
        raise ConfigError(
            f"--expandable-segments and --alloc-conf {conf} contradict each other: drop one."
        )
    if not found:
        given["alloc_conf"] = ",".join(filter(None, (conf, "expandable_segments:True")))


def _merge_evaluation(given: dict[str, Any]) -> None:
    """``eval_strategy`` of the Trainer: with ``no`` the other options of evaluations do nothing."""
    if given.pop("prediction_loss_only", False):
        given.pop("eval_samples", None)
    value = given.pop("eval_strategy", None)
    if value is None:
        return
    strategy = str(value).strip().lower().rpartition(".")[2]
    if strategy not in ("no", "steps", "epoch"):
        raise ConfigError(f"--eval-strategy {value!r} is not known. Legal: no, steps, epoch.")
    if strategy != "no":
        given.setdefault("eval_batch", _EVAL_BATCH)
        return
    for name in ("eval_batch", "eval_samples", "eval_accumulation_steps"):
        given.pop(name, None)


def given_setup(setup: Setup | None, options: Mapping[str, Any]) -> Setup:
    """The setup of a question that takes either a whole one or options.

    Raises:
        ConfigError: both were given, or an option is wrong.
    """
    if setup is None:
        return setup_from_options(**options)
    if options:
        raise ConfigError("Give either a Setup or options, not both: use dataclasses.replace.")
    return setup


def read_effective_batch(value: Any) -> int:
    """The samples of one optimizer step.

    Raises:
        ConfigError: not a whole number, or one that no run has.
    """
    wanted = read_whole("--effective-batch", value)
    if not 1 <= wanted <= MAX_BATCH:
        raise ConfigError(
            f"--effective-batch {wanted} is out of range: it must be 1 to {MAX_BATCH:,}."
        )
    return wanted


def no_gpu(command: str) -> ConfigError:
    """What to say where a command needs a GPU and none is named."""
    return ConfigError(
        f"memest {command} needs a GPU: name one, for example --gpu rtx-4090 (`memest gpus` lists "
        "them) or --gpu local, or give its memory, --gpu-memory 24GiB."
    )


def setup_from_options(base: Setup | None = None, /, **options: Any) -> Setup:
    """Build a :class:`~memest.setup.Setup` from keywords.

    Args:
        base: the setup that the options change, the defaults if None.
        options: fields of Setup, the short forms ``fp16``, ``bf16`` and ``expandable_segments``,
            or the names that transformers' ``TrainingArguments`` and its relatives use. None
            means not given. Training arguments without a say in memory (``learning_rate``, ...)
            are passed over.

    Raises:
        ConfigError: for an unknown name, an impossible value or a contradiction.

    Example:
        >>> setup_from_options(per_device_train_batch_size=4, bf16=True).precision.value
        'bf16'
    """
    given: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for name, value in options.items():
        if value is None or name in HARMLESS:
            continue
        option = find_option(name)
        if not option.field:
            raise ConfigError(
                f"{name!r} is an argument of memest.estimate, not of the training setup."
            )
        value = _coerce(option, value)
        if option.name in given and given[option.name] != value:
            raise ConfigError(
                f"{spelt[option.name]} and {name} are the same option, given as "
                f"{given[option.name]} and {value}: drop one."
            )
        given[option.name], spelt[option.name] = value, name
    _merge_precision(given)
    _merge_deepspeed(given, base)
    _merge_kwargs(given)
    merge_adapter(given, base)
    merge_quantization(given, base)
    merge_lengths(given, base)
    merge_generation(given, base)
    merge_data_loading(given, None if base is None else base.data_loading)
    if base is not None and given.get("expandable_segments"):
        given.setdefault("alloc_conf", base.alloc_conf)
    _merge_segments(given)
    _merge_evaluation(given)
    _merge_distributed(given, base)
    setup = Setup(**given) if base is None else dataclasses.replace(base, **given)
    check_built_dtype(setup)
    return setup
