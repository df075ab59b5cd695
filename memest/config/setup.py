"""What a training run looks like: the frozen, validated input of an estimate.

Its options are declared in :mod:`memest.config.training_options`, what excludes what is said in
:mod:`memest.config.compatibility`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memest.config.adapter import Adapter, read_adapter
from memest.config.compatibility import FP16_REFUSAL, check
from memest.config.compilation import read_backend, read_fused_loss, read_mode
from memest.config.data_loading import read_data_loading
from memest.config.kinds import (
    Attention,
    Dtype,
    Loop,
    Method,
    ModelPart,
    Precision,
    SdpaBackend,
    Task,
    ZeroGrad,
    ZeroGradAt,
    check_whole_number,
    choose,
    read_method,
)
from memest.config.life import read_life
from memest.config.optimizers import find_optimizer
from memest.config.option import check_pattern, plain_values, settle
from memest.config.quantization import Quantization, read_quantization
from memest.config.release_defaults import release_default
from memest.config.rollouts import Rollouts, read_rollouts
from memest.config.software import Software
from memest.config.training_options import (
    MAX_BATCH,
    MAX_GRAD_ACCUM,
    MAX_IMAGE_SIZE,
    OPTIMIZERS,
)
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError, not_legal

__all__ = [
    "FP16_REFUSAL",
    "MAX_BATCH",
    "MAX_GRAD_ACCUM",
    "MAX_IMAGE_SIZE",
    "OPTIMIZERS",
    "Adapter",
    "Attention",
    "Dtype",
    "Loop",
    "Precision",
    "Quantization",
    "SdpaBackend",
    "Setup",
    "Software",
    "Task",
    "ZeroGrad",
    "ZeroGradAt",
    "choose",
    "read_casts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(TrainingRun):
    """One training configuration: options with their values in the types of their fields.

    docs/options.md says what each of the fields is.
    """

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if self.batching is not None:
            check_whole_number("--batch", self.batch, 1, MAX_BATCH)
            set_field(self, "seq_len", self.batching.worst(self.batch))
            set_field(self, "padded", self.batching.has_padding(self.batch))
        # the Trainer and accelerate have no pipelines: their schedules run in a script's own loop
        if self.distributed.pp > 1 and self.loop != Loop.LIGHTNING:  # which is refused
            set_field(self, "loop", Loop.PLAIN)
        set_field(self, "dtype", _dtype_name(self.dtype))
        set_field(self, "method", read_method(self.method))
        if self.method.generates:
            rollouts = read_rollouts(self.rollouts) or Rollouts()
            if not self.method.writes_pairs:  # whose beta keeps no reference, nor does without one
                rollouts = rollouts.with_beta(0.05 if self.method is Method.RLOO else 0.0)
            set_field(self, "rollouts", rollouts)
        elif self.rollouts is not None:
            raise ConfigError(
                f"Rollouts belong to methods that generate, and --method {self.method} does not: "
                "write --method grpo, rloo or online-dpo."
            )
        settle(self)
        if self.method is Method.REWARD and self.task is Task.AUTO:
            set_field(self, "task", self.task_of_method)
            if not self.values_tokens:
                # RewardTrainer: AutoModelForSequenceClassification with num_labels=1
                set_field(self, "num_labels", self.num_labels or 1)
        if self.audio_seconds is not None and not 0 < self.audio_seconds <= 36_000:
            raise ConfigError(
                f"--audio-seconds {self.audio_seconds} is out of range: it must be above 0 and at "
                "most 36,000."
            )
        set_field(self, "optim", find_optimizer(self.optim))
        set_field(self, "optim_args", str(self.optim_args or "").replace(" ", ""))
        if not isinstance(self.optim_target_modules, str):
            set_field(self, "optim_target_modules", tuple(self.optim_target_modules))
        set_field(self, "checkpointing", _checkpointing(self.checkpointing))
        set_field(self, "freeze", tuple(self.freeze))
        set_field(self, "frozen_parts", _frozen_parts(self.frozen_parts))
        set_field(self, "unpriced", tuple(self.unpriced))
        set_field(self, "overpriced", tuple(self.overpriced))
        set_field(self, "cast_weights", tuple(self.cast_weights))
        for flag, patterns in (
            ("--freeze", self.freeze),
            ("--cast-weights", [n.removeprefix("?") for n, _ in read_casts(self.cast_weights)]),
        ):
            for pattern in patterns:
                check_pattern(flag, pattern)
        if self.adapter is not None:
            self._settle_adapter(read_adapter(self.adapter))
        if self.quantization is not None:
            set_field(self, "quantization", read_quantization(self.quantization))
        if self.quantization is not None and self.prepare_kbit is not None:
            base = replace(self.quantization, prepare=self.prepare_kbit)
            set_field(self, "quantization", base)
            set_field(self, "prepare_kbit", None)
        set_field(self, "data_loading", read_data_loading(self.data_loading))
        set_field(self, "life", read_life(self.life))
        set_field(self, "fused_loss", read_fused_loss(self.fused_loss))
        if self.torch_compile_mode or self.torch_compile_backend:
            set_field(self, "torch_compile", True)
        set_field(self, "torch_compile_mode", read_mode(self.torch_compile_mode))
        set_field(self, "torch_compile_backend", read_backend(self.torch_compile_backend))
        check(self)

    def _settle_adapter(self, adapter: Adapter) -> None:
        """The dtype of adapters: where nobody says, TRL's trainer does, or the release of peft."""
        if adapter.autocast_adapter_dtype is None:
            casts = release_default("autocast_adapter_dtype", self.software).value == "true"
            if self.must_reenter and self.quantization is None:  # adapters of TRL's under ZeRO-3
                casts = False
            adapter = replace(adapter, autocast_adapter_dtype=casts)
        object.__setattr__(self, "adapter", adapter)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in the order of the fields."""
        values = plain_values(self)
        distributed: dict[str, Any] = values.pop("distributed")
        values |= {"optim": self.optimizer, "dtype": self.loaded_dtype.value}
        for name in ("unpriced", "overpriced", "rollouts"):
            if not values[name]:
                del values[name]
        if self.prepare_kbit is None:
            del values["prepare_kbit"]
        if self.life is None or not self.life.is_asked:
            del values["life"]
        return values | distributed


def _dtype_name(value: Any) -> Any:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
    text = str(value).removeprefix("torch.")
    return names.get(text, value if isinstance(value, Dtype) else text)


def read_casts(casts: Iterable[str]) -> list[tuple[str, Dtype]]:
    """``NAMES=DTYPE`` as the names, ``trainable`` or a regular expression, and the dtype.

    An expression with ``?`` in front may match nothing, which begins no regular expression.

    Raises:
        ConfigError: there is no dtype behind the names.
    """
    out = []
    for cast in casts:
        names, _, dtype = str(cast).rpartition("=")
        if not names or dtype not in _CAST_DTYPES:
            raise ConfigError(
                f"--cast-weights {cast!r} says no dtype: write trainable=float32, or a regular "
                f"expression for the names, norm=float32. Legal: {', '.join(_CAST_DTYPES)}."
            )
        out.append((names, Dtype(dtype)))
    return out


_CAST_DTYPES = (Dtype.FLOAT32.value, Dtype.BFLOAT16.value, Dtype.FLOAT16.value)


def _frozen_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """Parts in their one order.

    Raises:
        ConfigError: there is no such part.
    """
    legal = [part.value for part in ModelPart]
    for part in parts:
        if part not in legal:
            raise not_legal(f"--frozen-parts {part!r}", part, legal)
    return tuple(part for part in legal if part in parts)


def _checkpointing(value: Any) -> str:
    if value is True:
        return "full"
    if value is False or value is None:
        return "none"
    text = str(value).strip().lower()
    if text in ("none", "full", "selective"):
        return text
    match = re.fullmatch(r"every_n:(\d+)", text.replace("-", "_"))
    if match and int(match.group(1)) >= 1:
        return f"every_n:{int(match.group(1))}"
    raise ConfigError(
        f"--checkpointing {value!r} is not known. Legal: none, full, every_n:K with K at least 1, "
        "for example every_n:2, selective."
    )
