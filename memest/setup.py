"""What a training run looks like: the frozen, validated input of an estimate.

The field names are the ones of the command line; every option, reader and report row is made
from the metadata given here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from dataclasses import dataclass
from typing import Any

from memest.distributed import ALONE, Distributed, Strategy
from memest.errors import ConfigError, closest
from memest.software import Software

__all__ = [
    "OPTIMIZERS",
    "Attention",
    "Dtype",
    "Loop",
    "Precision",
    "SdpaBackend",
    "Setup",
    "Software",
    "Task",
    "ZeroGrad",
    "ZeroGradAt",
    "choose",
]

FP16_REFUSED = (
    "--fp16 with float16 weights cannot train: the gradient scaler refuses fp16 gradients. Use "
    "--dtype float32 (autocast), or --master-weights without --fp16 for half weights with fp32 "
    "copies."
)
MAX_BATCH = 1 << 20
MAX_SEQ_LEN = 1 << 24
MAX_IMAGE_SIZE = 1 << 14
MAX_GRAD_ACCUM = 1 << 16


class Precision(enum.StrEnum):
    """What autocast does; the dtype of the weights is a matter of its own."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Dtype(enum.StrEnum):
    """The dtype of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Attention(enum.StrEnum):
    """The attention implementation that transformers is asked for."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"


class SdpaBackend(enum.StrEnum):
    """The kernel behind scaled_dot_product_attention; ``auto`` follows PyTorch's own choice."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


class Loop(enum.StrEnum):
    """Whose training loop runs: it decides what is still referenced when."""

    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    PLAIN = "plain"


class ZeroGrad(enum.StrEnum):
    """What zero_grad does: ``none`` drops the gradients, ``zero`` keeps them allocated."""

    AUTO = "auto"
    NONE = "none"
    ZERO = "zero"


class ZeroGradAt(enum.StrEnum):
    """Where a script calls zero_grad: old gradients are alive until then."""

    AFTER_STEP = "after-step"
    BEFORE_FORWARD = "before-forward"
    BEFORE_BACKWARD = "before-backward"


class Task(enum.StrEnum):
    """Which head the model gets."""

    AUTO = "auto"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    IMAGE_CLASSIFICATION = "image-classification"
    IMAGE_SEGMENTATION = "image-segmentation"
    MASKED_IMAGE_MODELING = "masked-image-modeling"
    AUDIO_CLASSIFICATION = "audio-classification"
    CTC = "ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    CONTRASTIVE = "contrastive"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    BASE = "base"


OPTIMIZERS: dict[str, str] = {
    "adamw_torch_fused": "torch AdamW, fused kernel: the Trainer's default since torch 2.8",
    "adamw_torch": "torch AdamW, implementation as torch chooses on CUDA: foreach since 2.0",
    "adamw_torch_foreach": "torch AdamW, foreach",
    "adamw_torch_loop": "torch AdamW, one parameter after the other",
    "adamw_hf": "the AdamW that transformers had until 4.x, one parameter after the other",
    "adam": "torch Adam, foreach",
    "adam_fused": "torch Adam, fused kernel",
    "adam_loop": "torch Adam, one parameter after the other",
    "sgd": "torch SGD, no momentum, foreach",
    "sgd_momentum": "torch SGD, momentum 0.9, foreach",
    "sgd_loop": "torch SGD, no momentum, one parameter after the other",
    "sgd_momentum_loop": "torch SGD, momentum 0.9, one parameter after the other",
    "rmsprop": "torch RMSprop, foreach",
    "rmsprop_loop": "torch RMSprop, one parameter after the other",
    "adagrad": "torch Adagrad, foreach",
    "adagrad_loop": "torch Adagrad, one parameter after the other",
    "adadelta": "torch Adadelta, foreach",
    "adamax": "torch Adamax, foreach",
    "nadam": "torch NAdam, foreach",
    "radam": "torch RAdam, foreach",
    "adafactor": "Adafactor of transformers as the Trainer makes it: no first moment",
    "adafactor_torch": "torch Adafactor, one parameter after the other",
    "none": "no optimizer step: forward and backward only",
}
"""Optimizer names that are modelled, and what each one is."""

NOT_YET_MODELLED = frozenset(
    """adamw_bnb_8bit adamw_8bit paged_adamw_8bit paged_adamw_32bit paged_adamw ademamix
    ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit lion lion_32bit lion_8bit paged_lion
    paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw
    galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise
    galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam schedule_free_adamw
    schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw adamw_anyprecision
    adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused adamw_torch_4bit adamw_torch_8bit
    muon adam_mini""".split()
)
"""Names that people use and memest cannot price yet: refused by name, never guessed."""

OPTIMIZER_ALIASES = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch_foreach",
    "adamw_loop": "adamw_torch_loop",
    "adamw_anyprecision": "adamw_anyprecision",
}


def choose(option: str, value: Any, kind: type[enum.StrEnum]) -> Any:
    """Turn text into a member of ``kind``; the error lists what is legal, closest first."""
    if isinstance(value, kind):
        return value
    text = str(value).strip().lower().replace("_", "-")
    for member in kind:
        if member.value.replace("_", "-") == text:
            return member
    names = [member.value for member in kind]
    near = closest(str(value), names)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{option} {value!r} is not known.{hint} Legal: {', '.join(names)}.")


def _whole(option: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option} {value!r} is not a whole number.")
    if not low <= value <= high:
        raise ConfigError(f"{option} {value} is out of range: it must be {low} to {high:,}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training configuration on one GPU.

    Attributes:
        batch: samples of one micro-batch on one GPU.
        seq_len: tokens of a sample; None = 512, capped by the model.
        target_len: tokens of the target of an encoder-decoder; None = like ``seq_len``.
        image_size: pixels of a side; None = as the model's config says.
        audio_seconds: length of a clip for speech models; None = 5 s, or the model's fixed window.
        task: which head; ``auto`` = what people train this kind of model for.
        num_labels: classes of a classification head; None = the config's own.
        grad_accum: micro-batches of one optimizer step.
        checkpointing: ``none``, ``full`` or ``every_n:K``.
        use_reentrant: variant of activation checkpointing; None = as the software does.
        precision: autocast.
        dtype: dtype of the weights; ``auto`` = the config's own, float32 where it names none.
        master_weights: half weights and gradients with an fp32 master copy and fp32 states.
        tf32: TensorFloat-32 matmuls; changes speed, not memory, and is recorded as such.
        optim: name of the optimizer, a key of :data:`OPTIMIZERS`.
        max_grad_norm: gradient clipping; 0 = none. None = 1.0 under the Trainer, else 0.
        zero_grad: what happens to gradients after the step; ``auto`` follows torch's version.
        zero_grad_at: where a script calls zero_grad; the Trainer does after the step.
        attn_implementation: as transformers names it.
        sdpa_backend: forces the kernel behind sdpa.
        freeze: patterns of parameter names that do not train.
        padded: batches with padding: masks cannot be dropped.
        use_cache: whether the model returns its key/value cache in training; None = as the loop
            does: the Trainer switches it off, other loops keep the config's value.
        alloc_conf: value of PYTORCH_CUDA_ALLOC_CONF.
        loop: whose training loop.
        software: versions that will train.
        num_steps: optimizer steps that are simulated.
        distributed: how the run is spread over GPUs.
    """

    batch: int = 8
    seq_len: int | None = None
    target_len: int | None = None
    image_size: int | None = None
    audio_seconds: float | None = None
    task: Task = Task.AUTO
    num_labels: int | None = None
    grad_accum: int = 1
    checkpointing: str = "none"
    use_reentrant: bool | None = None
    precision: Precision = Precision.FP32
    dtype: Dtype = Dtype.AUTO
    master_weights: bool = False
    tf32: bool = False
    optim: str = "adamw_torch_fused"
    max_grad_norm: float | None = None
    zero_grad: ZeroGrad = ZeroGrad.AUTO
    zero_grad_at: ZeroGradAt = ZeroGradAt.AFTER_STEP
    attn_implementation: Attention = Attention.AUTO
    sdpa_backend: SdpaBackend = SdpaBackend.AUTO
    freeze: tuple[str, ...] = ()
    padded: bool = False
    use_cache: bool | None = None
    alloc_conf: str = ""
    loop: Loop = Loop.TRAINER
    software: Software = dataclasses.field(default_factory=Software)
    num_steps: int = 3
    distributed: Distributed = ALONE

    def __post_init__(self) -> None:
        put = object.__setattr__
        _whole("--batch", self.batch, 1, MAX_BATCH)
        for name, option, high in (
            ("seq_len", "--seq-len", MAX_SEQ_LEN),
            ("target_len", "--target-len", MAX_SEQ_LEN),
            ("image_size", "--image-size", MAX_IMAGE_SIZE),
            ("num_labels", "--num-labels", 1 << 24),
        ):
            if getattr(self, name) is not None:
                _whole(option, getattr(self, name), 1, high)
        if self.audio_seconds is not None and not 0 < self.audio_seconds <= 36_000:
            raise ConfigError(
                f"--audio-seconds {self.audio_seconds} is out of range: it must be above 0 and at "
                "most 36,000."
            )
        _whole("--grad-accum", self.grad_accum, 1, MAX_GRAD_ACCUM)
        _whole("--steps", self.num_steps, 1, 1000)
        put(self, "precision", choose("--precision", self.precision, Precision))
        put(self, "dtype", choose("--dtype", _dtype_name(self.dtype), Dtype))
        put(self, "zero_grad", choose("--zero-grad", self.zero_grad, ZeroGrad))
        put(self, "zero_grad_at", choose("--zero-grad-at", self.zero_grad_at, ZeroGradAt))
        put(self, "loop", choose("--loop", self.loop, Loop))
        if self.loop is Loop.TRAINER and self.zero_grad_at is not ZeroGradAt.AFTER_STEP:
            raise ConfigError(
                f"--zero-grad-at {self.zero_grad_at} is a matter of scripts: the Trainer drops "
                "gradients after the step. Add --loop plain or --loop accelerate."
            )
        put(self, "task", choose("--task", self.task, Task))
        put(
            self,
            "attn_implementation",
            choose("--attn-implementation", self.attn_implementation, Attention),
        )
        put(self, "sdpa_backend", choose("--sdpa-backend", self.sdpa_backend, SdpaBackend))
        put(self, "optim", _optimizer(self.optim))
        put(self, "checkpointing", _checkpointing(self.checkpointing))
        put(self, "freeze", tuple(self.freeze))
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"--freeze {pattern!r} is not a regular expression: {error}."
                ) from None
        if self.max_grad_norm is not None and not 0 <= self.max_grad_norm < math.inf:
            raise ConfigError(
                f"--max-grad-norm {self.max_grad_norm} is out of range: it must be a finite "
                "number, 0 or more."
            )
        if (
            self.precision is Precision.FP16
            and self.dtype is Dtype.FLOAT16
            and (not self.master_weights and self.loop is not Loop.PLAIN)
        ):
            raise ConfigError(FP16_REFUSED)
        if self.master_weights and self.precision is not Precision.FP32:
            raise ConfigError(
                f"--master-weights and --{self.precision} exclude each other: master weights "
                "belong to half-precision weights without autocast. Drop one of them."
            )
        if self.master_weights and self.dtype is Dtype.FLOAT32:
            raise ConfigError(
                "--master-weights needs half-precision weights: add --dtype bfloat16 or --dtype "
                "float16."
            )
        if self.sdpa_backend is not SdpaBackend.AUTO and self.attn_implementation not in (
            Attention.AUTO,
            Attention.SDPA,
        ):
            raise ConfigError(
                f"--sdpa-backend {self.sdpa_backend} has no meaning with --attn-implementation "
                f"{self.attn_implementation}: use --attn-implementation sdpa."
            )

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether DDP looks for parameters that a forward did not use.

        Source: ``Trainer._build_accelerator_args`` of transformers 5.23: everywhere but with
        activation checkpointing; elsewhere DDP's own default, which is not to.
        """
        asked = self.distributed.ddp_find_unused_parameters
        if self.distributed.strategy is not Strategy.DDP:
            return False
        if asked is not None:
            return asked
        return self.loop is Loop.TRAINER and self.checkpointing == "none"

    @property
    def computes_in_half(self) -> bool:
        """Whether FSDP or DeepSpeed hold half-precision copies of parameters to compute with.

        In place of autocast: accelerate gives ``fully_shard`` a ``MixedPrecisionPolicy``, and
        DeepSpeed's engine converts the model. A script's own FSDP2 has autocast, as it says.
        """
        if self.precision is Precision.FP32:
            return False
        if self.distributed.strategy is Strategy.FSDP:
            return self.loop is not Loop.PLAIN
        return self.distributed.strategy is Strategy.ZERO

    @property
    def checkpoint_every(self) -> int:
        """Every how many layers a checkpoint is made; 0 = no checkpointing."""
        if self.checkpointing == "none":
            return 0
        return int(self.checkpointing.partition(":")[2] or 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in the order of the fields."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Distributed):
                out.update(value.to_dict())
                continue
            if isinstance(value, Software):
                value = value.to_dict()
            elif isinstance(value, enum.StrEnum):
                value = value.value
            elif isinstance(value, tuple):
                value = list(value)
            out[field.name] = value
        return out


def _dtype_name(value: Any) -> Any:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
    text = str(value).removeprefix("torch.")
    return names.get(text, value if isinstance(value, Dtype) else text)


def _optimizer(name: Any) -> str:
    text = OPTIMIZER_ALIASES.get(str(name), str(name))
    if text in OPTIMIZERS:
        return text
    if text in NOT_YET_MODELLED:
        raise ConfigError(
            f"--optim {text} is not modelled yet, and memest does not guess. Modelled: "
            f"{', '.join(OPTIMIZERS)}."
        )
    near = closest(text, OPTIMIZERS)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--optim {name!r} is not known.{hint} Legal: {', '.join(OPTIMIZERS)}.")


def _checkpointing(value: Any) -> str:
    if value is True:
        return "full"
    if value is False or value is None:
        return "none"
    text = str(value).strip().lower()
    if text in ("none", "full"):
        return text
    match = re.fullmatch(r"every_n:(\d+)", text.replace("-", "_"))
    if match and int(match.group(1)) >= 1:
        return f"every_n:{int(match.group(1))}"
    raise ConfigError(
        f"--checkpointing {value!r} is not known. Legal: none, full, every_n:K with K at least 1, "
        "for example every_n:2."
    )
