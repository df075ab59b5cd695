"""A DeepSpeed configuration read as options: what of it changes memory, and what is left to others.

``auto`` means what ``HfTrainerDeepSpeedConfig`` of transformers 5.23 makes of it: batch, precision
and clipping are the run's own; ``reduce_bucket_size`` is the square of the model's hidden size,
which is filled in where the model is known (:func:`with_hidden_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memest.distributed import Distributed
from memest.errors import ConfigError, closest
from memest.files import read_json

__all__ = ["DeepSpeedFile", "read_deepspeed", "with_hidden_size"]

AUTO = "auto"
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_SAME_MEMORY = frozenset(
    """allgather_partitions allgather_bucket_size elastic_checkpoint load_from_fp32_weights
    legacy_stage1 ignore_unused_parameters log_trace_cache_warnings sub_group_size
    stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save""".split()
)
"""Keys of ``zero_optimization`` that say nothing of the memory of stages 1 and 2."""
_ONLY_AS_USUAL = {
    "contiguous_gradients": True, "reduce_scatter": True, "round_robin_gradients": False,
    "use_multi_rank_bucket_allreduce": True, "parameter_alignment": False, "mics_shard_size": -1,
    "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
}  # fmt: skip
"""Keys whose other values are not modelled."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """What a configuration says.

    Attributes:
        options: options of an estimate, by keyword.
        settings: of ZeRO.
    """

    options: dict[str, Any]
    settings: dict[str, Any]


def read_deepspeed(value: Any) -> DeepSpeedFile:
    """Read a configuration.

    Args:
        value: a path, or the document itself.

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
    stage = zero.get("stage", 0)
    options["zero"] = stage
    settings: dict[str, Any] = {}
    for key, found in zero.items():
        if key == "stage" or key in _SAME_MEMORY:
            continue
        if key in _ONLY_AS_USUAL:
            if found != _ONLY_AS_USUAL[key]:
                raise ConfigError(
                    f"{name}: {key} {found!r} is not modelled, and memest does not guess. "
                    f"DeepSpeed's default is {_ONLY_AS_USUAL[key]!r}."
                )
        elif key == "offload_optimizer":
            options["offload_optimizer"] = _offloads(name, key, found)
        elif key == "offload_param":
            options["offload_param"] = _offloads(name, key, found)
        elif key == "overlap_comm":
            settings[key] = _switch(name, key, found)
        elif key == "reduce_bucket_size":
            settings[key] = _elements(name, key, found)
        else:
            known = [*_SAME_MEMORY, *_ONLY_AS_USUAL, "overlap_comm", "reduce_bucket_size"]
            near = closest(str(key), known)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name}: zero_optimization.{key} is not known to memest.{hint}")
    return DeepSpeedFile({k: v for k, v in options.items() if v is not None}, settings)


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
    dtypes = document.get("data_types", {})
    accumulates = dtypes.get("grad_accum_dtype") if isinstance(dtypes, Mapping) else None
    if accumulates is not None:
        raise ConfigError(
            f"{name}: data_types.grad_accum_dtype {accumulates!r} is not modelled: leave it out, "
            "and gradients are accumulated in the dtype of the model."
        )
    return options


def _offloads(name: str, key: str, value: Any) -> bool | None:
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    if device in (None, "none"):
        return None
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


def _elements(name: str, key: str, value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ConfigError(f"{name}: {key} {value!r} is not a whole number, nor auto.")
    if value < 1:
        raise ConfigError(f"{name}: {key} {value} is out of range: it must be 1 or more.")
    return int(value)


def with_hidden_size(spread: Distributed, config: Any) -> Distributed:
    """The same with ``auto`` filled in.

    Source: ``HfTrainerDeepSpeedConfig.trainer_config_finalize``: the hidden size of the config, the
    largest of several, or that of its text part.

    Args:
        spread: of a setup.
        config: of the model, as a mapping or an object; None where there is none.

    Raises:
        ConfigError: the model names no hidden size.
    """
    if spread.zero_setting("reduce_bucket_size", 0) != AUTO:
        return spread
    size = _hidden_size(config)
    if size is None:
        raise ConfigError(
            "--deepspeed: reduce_bucket_size is auto, which is the square of the model's hidden "
            "size, and the model's config names none: write a number."
        )
    settings = {**dict(spread.zero_settings), "reduce_bucket_size": size * size}
    return replace(spread, zero_settings=tuple(sorted(settings.items())))


def _hidden_size(config: Any) -> int | None:
    def value(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if config is None:
        return None
    for name in _HIDDEN:
        if isinstance(found := value(name), int):
            return found
    several = value("hidden_sizes")
    if isinstance(several, (list, tuple)) and several:
        return int(max(several))
    return _hidden_size(value("text_config"))
