"""A DeepSpeed configuration read as options: what of it changes memory, and what is left to others.

``auto`` means what ``HfTrainerDeepSpeedConfig`` of transformers 5.23 makes of it: batch, precision
and clipping are the run's own; ``reduce_bucket_size`` is the square of the model's hidden size,
which is filled in where the model is known (:func:`with_hidden_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memest.config.parallelism import Distributed
from memest.errors import ConfigError, hint
from memest.files.texts import read_json

__all__ = [
    "HALF_PRECISION_KEYS",
    "ON_SAVE",
    "DeepSpeedFile",
    "own_key",
    "read_deepspeed",
    "with_hidden_size",
]

AUTO = "auto"
_HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_IRRELEVANT_KEYS = frozenset(
    """allgather_partitions allgather_bucket_size elastic_checkpoint load_from_fp32_weights
    legacy_stage1 ignore_unused_parameters log_trace_cache_warnings""".split()
)
"""Keys of ``zero_optimization`` that say nothing of memory."""
ON_SAVE = "stage3_gather_16bit_weights_on_model_save"
"""What stage 3 does when the Trainer saves a model: no matter of a step (memest.config.life)."""
_STAGE_3_KEYS = frozenset(
    """sub_group_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold""".split()
)
"""Keys in elements that only stage 3 looks at."""
_AUTO_RULES: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""What ``auto`` is, by the hidden size."""
_ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Fields of ``DeepSpeedZeroConfig`` by their own names, which it takes as well."""
_DEFAULT_ONLY = {
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "round_robin_gradients": False,
    "use_multi_rank_bucket_allreduce": True,
    "parameter_alignment": False,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
}
"""Keys whose other values are not modelled."""
_REASONS = {
    "zero_hpz_partition_size": "ZeRO++ keeps a second partition on each node",
    **dict.fromkeys(
        (each for each in _DEFAULT_ONLY if each.startswith("zero_quantized")),
        "ZeRO++ quantises with kernels that need a GPU to be built",
    ),
}
"""What to say of some of them."""
HALF_PRECISION_KEYS = (
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
    "fp16_master_weights_and_grads",
)
"""Keys of ``bf16`` and ``fp16`` that change in which precision DeepSpeed keeps what it updates."""
_SEQUENCE_DTYPE_KEY = "seq_parallel_communication_data_type"
_OFFLOAD_KEYS = ("offload_optimizer", "offload_param")
_EVERY_STAGE_KEYS = ("overlap_comm", "reduce_bucket_size")
_STAGE_3_SWITCHES = {"contiguous_gradients", "memory_efficient_linear"}
"""Keys that stage 3 may have otherwise."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """What a configuration says.

    Attributes:
        options: options of an estimate, by keyword.
        settings: of ZeRO.
    """

    options: dict[str, Any]
    settings: dict[str, Any]


def read_deepspeed(value: Any, *, shares_sequences: bool = True) -> DeepSpeedFile:
    """Read a configuration.

    Args:
        value: a path, or the document itself, also as JSON.
        shares_sequences: the run has Ulysses' groups, for which some keys are.

    Raises:
        ConfigError: no such file, no JSON, or something that is not modelled.
    """
    name, document = ("the DeepSpeed configuration", value)
    if not isinstance(value, Mapping):
        name, document = f"--deepspeed {value}", _load(value)
    zero = document.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigError(f"{name}: zero_optimization is no object.")
    options = _run_options(name, document)
    if shares_sequences:
        _check_sequence_wire(name, document)
    stage = zero.get("stage", 0)
    options["zero"] = stage
    settings: dict[str, Any] = {}
    for spelling, setting in zero.items():
        key = own_key(spelling)
        if key == "stage" or key in _IRRELEVANT_KEYS:
            continue
        if key == ON_SAVE:
            gathers = setting != AUTO and _switch(name, key, setting)
            options[key] = True if gathers and stage == 3 else None
        elif key in _STAGE_3_KEYS:
            settings[key] = _elements(name, key, setting, least=0, auto=key in _AUTO_RULES)
        elif key in _STAGE_3_SWITCHES and stage == 3:
            settings[key] = _switch(name, key, setting)
        elif key == "memory_efficient_linear":
            _switch(name, key, setting)  # of stage 3 alone
        elif key in _DEFAULT_ONLY:
            if setting != _DEFAULT_ONLY[key]:
                why = f" ({_REASONS[key]})" if key in _REASONS else ""
                raise ConfigError(
                    f"{name}: {key} {setting!r} is not modelled{why}, and memest does not guess. "
                    f"DeepSpeed's default is {_DEFAULT_ONLY[key]!r}."
                )
        elif key in _OFFLOAD_KEYS:
            options[key] = _offloads(name, key, setting, stage)
        elif key == "overlap_comm":
            settings[key] = _switch(name, key, setting)
        elif key == "reduce_bucket_size":
            settings[key] = _elements(name, key, setting)
        else:
            legal_keys = (
                *_IRRELEVANT_KEYS,
                ON_SAVE,
                *_DEFAULT_ONLY,
                *_STAGE_3_KEYS,
                *_OFFLOAD_KEYS,
                *_EVERY_STAGE_KEYS,
            )
            suggestion = hint(key, legal_keys)
            raise ConfigError(
                f"{name}: zero_optimization.{key} is not known to memest.{suggestion}"
            )
    return DeepSpeedFile({k: v for k, v in options.items() if v is not None}, settings)


def own_key(spelling: str) -> str:
    """The name that a key of ``zero_optimization`` goes by, which has another one as well."""
    return _ALIASES.get(spelling, spelling)


def _load(path: Any) -> Mapping[str, Any]:
    try:
        document = read_json(path)
    except OSError as error:
        raise ConfigError(f"--deepspeed {path}: {error.strerror or error}.") from None
    except ValueError as error:
        raise ConfigError(f"--deepspeed {path} is no JSON: {error}.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--deepspeed {path} holds no JSON object.")
    return document


def _run_options(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of the run itself; ``auto`` and what is left out say nothing."""
    options: dict[str, Any] = {}
    for key, keyword in (
        ("train_micro_batch_size_per_gpu", "batch"),
        ("gradient_accumulation_steps", "grad_accum"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        value = document.get(key, AUTO)
        if value != AUTO:
            options[keyword] = value
    for precision in ("bf16", "fp16"):
        part = document.get(precision, {})
        enabled = part.get("enabled", AUTO) if isinstance(part, Mapping) else part
        if enabled is True:
            options["precision"] = precision
            for key in HALF_PRECISION_KEYS if isinstance(part, Mapping) else ():
                if part.get(key):
                    raise ConfigError(
                        f"{name}: {precision}.{key} is not modelled (master weights, gradients or "
                        "states in half precision), and memest does not guess. Leave it out for "
                        "DeepSpeed's default, float32."
                    )
    autocast = document.get("torch_autocast", {})
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        raise ConfigError(
            f"{name}: torch_autocast (autocast inside the engine) is not modelled, and memest does "
            "not guess. Leave it out, or ask for --bf16 without it."
        )
    dtypes = document.get("data_types", {})
    wire = document.get("communication_data_type")
    if wire is not None:
        raise ConfigError(
            f"{name}: communication_data_type {wire!r} is not modelled: leave it out, and "
            "gradients are reduced in the dtype of the model."
        )
    accumulates = dtypes.get("grad_accum_dtype") if isinstance(dtypes, Mapping) else None
    if accumulates is not None:
        raise ConfigError(
            f"{name}: data_types.grad_accum_dtype {accumulates!r} is not modelled: leave it out, "
            "and gradients are accumulated in the dtype of the model."
        )
    return options


def _check_sequence_wire(name: str, document: Mapping[str, Any]) -> None:
    """In which dtype gradients of shared sequences are reduced."""
    dtype = document.get(_SEQUENCE_DTYPE_KEY, "fp32")
    if str(dtype).lower() != "fp32":
        raise ConfigError(
            f"{name}: {_SEQUENCE_DTYPE_KEY} {dtype!r} is not modelled: leave it out, and gradients "
            "of shared sequences are reduced in fp32, DeepSpeed's default."
        )


def _offloads(name: str, key: str, value: Any, stage: Any) -> bool | None:
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    if device in (None, "none"):
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'{name}: {key} {value!r} is no mapping: write {{"device": "cpu"}}, as DeepSpeed does.'
        )
    if device == "nvme" and stage == 3:
        raise ConfigError(
            f"{name}: {key}.device 'nvme' is not modelled: on the GPU it takes what 'cpu' takes, "
            "but the pinned buffers of its swapper are not known to memest. Ask for cpu to see the "
            "GPU's part."
        )
    if device == "cpu":
        ratio = value.get("ratio", 1.0)
        if ratio != 1.0:
            raise ConfigError(f"{name}: {key}.ratio {ratio} is not modelled: only 1.0 is.")
        return True
    raise ConfigError(f"{name}: {key}.device {device!r} is not modelled. Legal: none, cpu.")


def _switch(name: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {key} {value!r} is neither true nor false.")
    return value


def _elements(name: str, key: str, value: Any, *, least: int = 1, auto: bool = True) -> int | str:
    if value == AUTO and auto:
        return AUTO
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        nor = ", nor auto" if auto else ""
        raise ConfigError(f"{name}: {key} {value!r} is not a whole number{nor}.")
    if value < least:
        raise ConfigError(f"{name}: {key} {value} is out of range: it must be {least} or more.")
    return int(value)


def with_hidden_size(distributed: Distributed, config: Any) -> Distributed:
    """The same with ``auto`` filled in.

    Source: ``HfTrainerDeepSpeedConfig.trainer_config_finalize``: the hidden size of the config, the
    largest of several, or that of its text part.

    Args:
        distributed: of a setup.
        config: of the model, as a mapping or an object; None where there is none.

    Raises:
        ConfigError: the model names no hidden size.
    """
    settings = dict(distributed.zero_settings)
    open_ones = [key for key in _AUTO_RULES if settings.get(key) == AUTO]
    if not open_ones:
        return distributed
    size = _hidden_size(config)
    if size is None:
        raise ConfigError(
            f"--deepspeed: {open_ones[0]} is auto, which follows the model's hidden size, and the "
            "model's config names none: write a number."
        )
    settings |= {key: _AUTO_RULES[key](size) for key in open_ones}
    filled_in = tuple(sorted(settings.items()))
    return replace(distributed, zero_settings=filled_in, zero_auto=tuple(open_ones))


def _hidden_size(config: Any) -> int | None:
    def value(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if config is None:
        return None
    for name in _HIDDEN_SIZE_KEYS:
        if isinstance(size := value(name), int):
            return size
    sizes = value("hidden_sizes")
    if isinstance(sizes, (list, tuple)) and sizes:
        return int(max(sizes))
    return _hidden_size(value("text_config"))
