"""From keywords, in anybody's spelling, to a training setup. Torch-free.

The options themselves are declared in :mod:`memest.config.option_table`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from memest.config.compatibility import check_built_dtype
from memest.config.idle_options import smallest_batch, why_stopped
from memest.config.inputs import ModuleInputs, module_inputs_of
from memest.config.meant import what_says
from memest.config.merging import merge_all, read_bool
from memest.config.option import Kind, Option, Panel
from memest.config.option_table import OPTIONS
from memest.config.setup import MAX_BATCH, Setup, Software
from memest.errors import ConfigError, closest
from memest.units import MIB, parse_size

__all__ = [
    "HARMLESS_ARGUMENTS",
    "OPTIONS",
    "Kind",
    "Option",
    "Panel",
    "argument",
    "find_option",
    "is_harmless",
    "merge_options",
    "no_gpu",
    "read_bool",
    "read_effective_batch",
    "read_size",
    "read_whole",
    "samples_of_each",
    "setup_from_options",
    "split_inputs",
]

HARMLESS_ARGUMENTS = frozenset(
    """accelerator_config adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices
    batch_eval_metrics dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context ddp_backend ddp_timeout debug disable_tqdm do_eval do_predict
    do_train enable_jit_checkpoint epochs eval_delay eval_do_concat_batches eval_on_start eval_steps
    eval_use_gather_object full_determinism greater_is_better hub_always_push
    hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second label_names learning_rate length_column_name load_best_model_at_end
    local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
    logging_nan_inf_filter logging_steps logging_strategy lr lr_scheduler_kwargs lr_scheduler_type
    max_steps metric_for_best_model num_epochs num_train_epochs output_dir overwrite_output_dir
    past_index project push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node
    save_only_model save_safetensors save_steps save_strategy save_total_limit seed
    skip_memory_metrics sortish_sampler trackio_space_id train_sampling_strategy warmup_ratio
    warmup_steps""".split()
)
"""Training arguments that no tensor depends on: taken from Python and passed over."""
_OFF = frozenset(
    """auto_find_batch_size bf16_full_eval fp16_full_eval label_smoothing_factor no_cuda use_cpu
    use_mps_device""".split()
)
"""Those that say nothing while they are off, as ``TrainingArguments(...).to_dict()`` has them."""

_PRECISION_WORDS = {"no": "fp32", "none": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@functools.cache
def _by_keyword() -> dict[str, Option]:
    return {keyword: option for option in OPTIONS for keyword in option.keywords}


def find_option(name: str) -> Option:
    """The option of a Python keyword, by any of its names.

    Raises:
        ConfigError: for an unknown name; the message has the closest legal ones.
    """
    by_keyword = _by_keyword()
    if name in by_keyword:
        return by_keyword[name]
    if says := what_says(name):
        raise ConfigError(f"{name!r} is not an option of an estimate. What says it: {says}.")
    matches = closest(name, by_keyword)
    hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
    raise ConfigError(
        f"{name!r} is not an option of an estimate.{hint} `memest estimate --help all` lists "
        "them all."
    )


def is_harmless(name: str, value: Any) -> bool:
    """Whether a training argument says nothing of memory: none does, or it is switched off."""
    return name in HARMLESS_ARGUMENTS or (name in _OFF and not value)


def read_whole(option: str, value: Any) -> int:
    """A whole number, as Python, NumPy or text has it."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            # a count out of a NumPy array is a count
            return int(value) if isinstance(value, str) else operator.index(value)
    problem = f"{option} {value!r} is not a whole number:"
    if re.fullmatch(r"\d+([,:]x?\d+)+", str(value)):
        axis = f"--over {option.lstrip('-')}={value}"
        raise ConfigError(f"{problem} several are an axis of memest sweep, {axis}.")
    if option == "--seq-len" and re.fullmatch(r"\d+\s*(?:-|\.\.+|to)\s*\d+", str(value)):
        raise ConfigError(f"{problem} lengths that differ are a file's, --lengths FILE.")
    raise ConfigError(f"{problem} write for example {option} {_digits(option, value)}.")


def _digits(option: str, value: Any) -> int:
    """A whole number to propose for what is none: 4096 for ``4k``, as lengths are counted."""
    thousands = re.fullmatch(r"\s*(\d{1,6})\s*[kK]i?\s*", str(value))
    if thousands is None:
        return 512 if option.endswith("-len") else 8
    return int(thousands[1]) * 1024


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
    if name in _TOO_SMALL and 0 < size < MIB:
        what, example = _TOO_SMALL[name]
        raise ConfigError(
            f"{flag} {value} is {size} bytes, and no {what}: write for example {flag} {example}."
        )
    return size


_TOO_SMALL = {
    "gpu_memory": ("GPU has so little", "24GiB"),
    "device_context": ("context is so small", "450MiB"),
}


def _coerce(option: Option, value: Any) -> Any:
    """The value in the type its field has; ranges and choices are Setup's business."""
    flag = option.flags[0]
    if isinstance(value, Enum):  # as TrainingArguments hold their own
        value = value.value
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        return read_bool(flag, value)
    if option.kind is Kind.WHOLE:
        return read_whole(flag, value)
    if option.kind is Kind.NUMBER:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{flag} {value!r} is not a number.") from None
    if option.kind is Kind.LIST:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, Iterable) or not all(isinstance(each, str) for each in values):
            raise ConfigError(f"{flag} {value!r} is neither a text nor several.")
        return tuple(values)
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
        except ValueError as error:  # a number of thousands of digits is another one
            raise ConfigError(
                f"--optim-target-modules {value!r} is not valid JSON ({error}): write for "
                'example \'["attn", "mlp"]\''
            ) from None
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ConfigError(
            f"--optim-target-modules {value!r} is neither a pattern nor a list of names."
        )
    return tuple(value)


def argument(name: str, value: Any, options: dict[str, Any]) -> Any:
    """An argument that is no part of a setup, by any of its names.

    Args:
        name: its own.
        value: given by that; None if it was not.
        options: what else was given; another name of the argument is taken out.

    Raises:
        ConfigError: two names, with different values.
    """
    for keyword in find_option(name).keywords:
        other = options.pop(keyword, None)
        if value is not None and other not in (None, value):
            raise ConfigError(
                f"{name} and {keyword} are the same option, given as {value} and {other}: drop one."
            )
        value = other if value is None else value
    return value


def split_inputs(options: Mapping[str, Any]) -> tuple[ModuleInputs, dict[str, Any]]:
    """Options of an estimate as what a module of one's own is fed, and the others.

    Raises:
        ConfigError: inputs that cannot be.
    """
    rest = dict(options)
    names = ("inputs", "loss", "step_fn", "dims", "model_args")
    return module_inputs_of(*(argument(name, None, rest) for name in names)), rest


def merge_options(setup: Setup | None, options: Mapping[str, Any]) -> Setup:
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
    samples = read_whole("--effective-batch", value)
    if not 1 <= samples <= MAX_BATCH:
        raise ConfigError(
            f"--effective-batch {samples} is out of range: it must be 1 to {MAX_BATCH:,}."
        )
    return samples


def samples_of_each(samples: int, setup: Setup) -> int:
    """What one GPU has of the samples of an optimizer step, which those with own batches share.

    Raises:
        ConfigError: they do not come to the same number, or to one at which the trainer stops.
    """
    ranks = setup.distributed.data_ranks
    if samples % ranks:
        above = -(-samples // ranks) * ranks
        near = [str(number) for number in (above - ranks, above) if number]
        raise ConfigError(
            f"--effective-batch {samples} is shared by {ranks} GPUs, which have the same number "
            f"each: give a multiple, for example {' or '.join(near)}."
        )
    of_each, number = samples // ranks, setup.completions_of_a_prompt
    fixed = setup.rollouts is not None and setup.rollouts.steps_per_generation is not None
    unit = setup.batch_unit * ranks if fixed else number
    if samples % unit:
        raise ConfigError(
            f"--effective-batch {samples} leaves completions of a prompt apart, of which {number} "
            f"are compared, and TRL stops: give a multiple of {math.lcm(unit, ranks)}, or "
            "--num-generations as the run has it."
        )
    at_once = dataclasses.replace(setup, batch=of_each, grad_accum=1)
    why, _ = why_stopped(at_once)
    if why:
        raise ConfigError(
            f"--effective-batch {samples}: {why}. Write --effective-batch "
            f"{smallest_batch(at_once) * ranks}."
        )
    return of_each


def no_gpu(command: str) -> ConfigError:
    """What to say where a command needs a GPU and none is named."""
    return ConfigError(
        f"memest {command} needs a GPU: name one, for example --gpu rtx-4090 (`memest gpus` lists "
        "them) or --gpu local, or give its memory, --gpu-memory 24GiB."
    )


def setup_from_options(base: Setup | None = None, /, **options: Any) -> Setup:
    """Build a :class:`~memest.config.setup.Setup` from keywords.

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
    values: dict[str, Any] = {}
    keyword_of: dict[str, str] = {}
    for name, value in options.items():
        if value is None or is_harmless(name, value):
            continue
        option = find_option(name)
        if not option.field:
            raise ConfigError(
                f"{name!r} is an argument of memest.estimate, not of the training setup."
            )
        value = _coerce(option, value)
        if option.name in values and values[option.name] != value:
            raise ConfigError(
                f"{keyword_of[option.name]} and {name} are the same option, given as "
                f"{values[option.name]} and {value}: drop one."
            )
        values[option.name], keyword_of[option.name] = value, name
    merge_all(values, base)
    setup = Setup(**values) if base is None else dataclasses.replace(base, **values)
    check_built_dtype(setup)
    return setup
