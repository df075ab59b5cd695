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

from memest.adapter import Adapter, read_adapter
from memest.compilation import check_compilation, read_backend, read_fused_loss, read_mode
from memest.context_rules import check_context_parallel
from memest.data_loading import DataLoading, read_data_loading
from memest.distributed import ALONE, Distributed, Strategy
from memest.errors import ConfigError
from memest.generation import Generation
from memest.head_rules import check_read_head
from memest.kinds import (
    Attention,
    Dtype,
    Loop,
    Precision,
    SdpaBackend,
    Task,
    ZeroGrad,
    ZeroGradAt,
    choose,
    whole,
)
from memest.lengths import Batching
from memest.optimizer_names import OPTIMIZER_FACTS, facts_of, find_optimizer
from memest.parallel_checks import check_model_parallel
from memest.quantization import Quantization, read_quantization
from memest.sequence_rules import check_sequence_parallel
from memest.setup_rules import check_adapter, check_evaluation, check_optimizer, check_spread
from memest.software import Software
from memest.ulysses_rules import check_ulysses

__all__ = [
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


OPTIMIZERS = {name: facts.about for name, facts in OPTIMIZER_FACTS.items()}
"""Optimizer names that are modelled, and what each one is."""


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
        optim_args: the Trainer's ``optim_args``: ``name=value`` with commas between.
        optim_target_modules: which linear layers GaLore and APOLLO project: ``all-linear`` or a
            regular expression that the whole name of a module matches, or several names of which
            one is part of it, as in the Trainer.
        optim_in_backward: each parameter is updated, by an optimizer of its own, in backward.
        weight_decay: None = 0 under the Trainer, else the optimizer's own default.
        max_grad_norm: gradient clipping; 0 = none. None = 1.0 under the Trainer, else 0.
        eval_batch: samples of an evaluation batch; given, an evaluation follows the last step.
        eval_samples: samples whose predictions are kept, for metrics; None = the loss alone is.
        eval_accumulation_steps: evaluation batches whose predictions go to the host; None = never.
        generation: a ``generate`` that follows the last step; None = none.
        data_loading: how batches are loaded on the host; None = not asked about.
        zero_grad: what happens to gradients after the step; ``auto`` follows torch's version.
        zero_grad_at: where a script calls zero_grad; the Trainer does after the step.
        del_outputs: a script lets go of outputs and loss before its next batch.
        attn_implementation: as transformers names it.
        sdpa_backend: forces the kernel behind sdpa.
        use_liger_kernel: Liger's kernels are applied to the model, as the Trainer does.
        fused_loss: one of ``FUSED_LOSSES`` in place of head and loss; "" = the model's own.
        torch_compile: the model is compiled by Inductor, as the Trainer has it done.
        torch_compile_mode: a mode of it; "" = default. Given, it switches compilation on, as in
            TrainingArguments.
        torch_compile_backend: likewise; "" = inductor.
        freeze: patterns of parameter names that do not train.
        adapter: what is trained by peft beside a frozen model; None = the model itself.
        quantization: how a frozen base is stored; None = in the dtype of its weights.
        padded: batches with padding: masks cannot be dropped.
        padding_free: the samples of a batch are laid end to end in one row.
        batching: how samples of different lengths become batches: it decides ``seq_len`` (that of
            the largest batch there can be) and ``padded``; None = all have ``seq_len``.
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
    optim_args: str = ""
    optim_target_modules: str | tuple[str, ...] = ()
    optim_in_backward: bool = False
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    eval_batch: int | None = None
    eval_samples: int | None = None
    eval_accumulation_steps: int | None = None
    generation: Generation | None = None
    data_loading: DataLoading | None = None
    zero_grad: ZeroGrad = ZeroGrad.AUTO
    zero_grad_at: ZeroGradAt = ZeroGradAt.AFTER_STEP
    del_outputs: bool = False
    attn_implementation: Attention = Attention.AUTO
    sdpa_backend: SdpaBackend = SdpaBackend.AUTO
    use_liger_kernel: bool = False
    fused_loss: str = ""
    torch_compile: bool = False
    torch_compile_mode: str = ""
    torch_compile_backend: str = ""
    freeze: tuple[str, ...] = ()
    adapter: Adapter | None = None
    quantization: Quantization | None = None
    padded: bool = False
    padding_free: bool = False
    batching: Batching | None = None
    use_cache: bool | None = None
    alloc_conf: str = ""
    loop: Loop = Loop.TRAINER
    software: Software = dataclasses.field(default_factory=Software)
    num_steps: int = 3
    distributed: Distributed = ALONE

    def __post_init__(self) -> None:
        put = object.__setattr__
        whole("--batch", self.batch, 1, MAX_BATCH)
        if self.batching is not None:
            put(self, "seq_len", self.batching.worst(self.batch))
            put(self, "padded", self.batching.has_padding(self.batch))
        for name, option, high in (
            ("seq_len", "--seq-len", MAX_SEQ_LEN),
            ("target_len", "--target-len", MAX_SEQ_LEN),
            ("image_size", "--image-size", MAX_IMAGE_SIZE),
            ("num_labels", "--num-labels", 1 << 24),
            ("eval_batch", "--eval-batch", MAX_BATCH),
            ("eval_samples", "--eval-samples", 1 << 30),
            ("eval_accumulation_steps", "--eval-accumulation-steps", 1 << 30),
        ):
            if getattr(self, name) is not None:
                whole(option, getattr(self, name), 1, high)
        if self.audio_seconds is not None and not 0 < self.audio_seconds <= 36_000:
            raise ConfigError(
                f"--audio-seconds {self.audio_seconds} is out of range: it must be above 0 and at "
                "most 36,000."
            )
        whole("--grad-accum", self.grad_accum, 1, MAX_GRAD_ACCUM)
        whole("--steps", self.num_steps, 1, 1000)
        put(self, "precision", choose("--precision", self.precision, Precision))
        put(self, "dtype", choose("--dtype", _dtype_name(self.dtype), Dtype))
        put(self, "zero_grad", choose("--zero-grad", self.zero_grad, ZeroGrad))
        put(self, "zero_grad_at", choose("--zero-grad-at", self.zero_grad_at, ZeroGradAt))
        # the Trainer and accelerate have no pipelines: their schedules run in a script's own loop
        put(self, "loop", Loop.PLAIN if self.distributed.pp > 1 else self.loop)
        put(self, "loop", choose("--loop", self.loop, Loop))
        if self.loop is Loop.TRAINER and self.zero_grad_at is not ZeroGradAt.AFTER_STEP:
            raise ConfigError(
                f"--zero-grad-at {self.zero_grad_at} is a matter of scripts: the Trainer drops "
                "gradients after the step. Add --loop plain or --loop accelerate."
            )
        if self.loop is Loop.TRAINER and self.del_outputs:
            raise ConfigError(
                "--del-outputs is a matter of scripts: the Trainer's outputs are gone before its "
                "backward. Add --loop plain or --loop accelerate, or leave it out."
            )
        put(self, "task", choose("--task", self.task, Task))
        put(
            self,
            "attn_implementation",
            choose("--attn-implementation", self.attn_implementation, Attention),
        )
        put(self, "sdpa_backend", choose("--sdpa-backend", self.sdpa_backend, SdpaBackend))
        put(self, "optim", find_optimizer(self.optim))
        put(self, "optim_args", str(self.optim_args or "").replace(" ", ""))
        if not isinstance(self.optim_target_modules, str):
            put(self, "optim_target_modules", tuple(self.optim_target_modules))
        check_optimizer(self)
        check_evaluation(self)
        put(self, "checkpointing", _checkpointing(self.checkpointing))
        put(self, "freeze", tuple(self.freeze))
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"--freeze {pattern!r} is not a regular expression: {error}."
                ) from None
        if self.adapter is not None:
            put(self, "adapter", read_adapter(self.adapter))
        put(self, "data_loading", read_data_loading(self.data_loading))
        if self.quantization is not None:
            put(self, "quantization", read_quantization(self.quantization))
        check_adapter(self)
        check_model_parallel(self)
        check_ulysses(self)
        check_context_parallel(self)
        check_sequence_parallel(self)
        check_spread(self)
        put(self, "fused_loss", read_fused_loss(self.fused_loss, self))
        check_read_head(self)
        if self.torch_compile_mode or self.torch_compile_backend:
            put(self, "torch_compile", True)
        put(self, "torch_compile_mode", read_mode(self.torch_compile_mode))
        put(self, "torch_compile_backend", read_backend(self.torch_compile_backend))
        if self.torch_compile:
            check_compilation(
                several_gpus=self.distributed.strategy is not Strategy.NONE,
                liger=self.use_liger_kernel,
                in_backward=self.optim if self.steps_in_backward else "",
                quantised=self.quantization is not None,
                attention=self.attn_implementation.value,
            )
        if self.max_grad_norm is not None and not 0 <= self.max_grad_norm < math.inf:
            raise ConfigError(
                f"--max-grad-norm {self.max_grad_norm} is out of range: it must be a finite "
                "number, 0 or more."
            )
        if (
            self.precision is Precision.FP16
            and self.dtype is Dtype.FLOAT16
            and (not self.master_weights and self.loop is not Loop.PLAIN)
            and not self.distributed.in_half
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
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps in backward, so that gradients never pile up."""
        return self.optim_in_backward or facts_of(self.optim).layerwise

    @property
    def may_accumulate(self) -> bool:
        """Whether more than one micro-batch can make a step."""
        return not self.steps_in_backward or facts_of(self.optim).accumulates

    @property
    def recomputes_reentrantly(self) -> bool:
        """Whether layers are recomputed, and by reentrant checkpoints.

        Transformers passed True until 4.57, False from 5.0 on; a plain older one torch's True.
        """
        if self.checkpointing == "none":
            return False
        if self.use_reentrant is not None:
            return self.use_reentrant
        return (self.software.transformers or (5, 0)) < (5, 0)

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether DDP looks for parameters that a forward did not use.

        Source: ``Trainer._build_accelerator_args`` of transformers 5.23: everywhere but with
        activation checkpointing; elsewhere, and around stages of a pipeline, which are a script's,
        DDP's own default, which is not to.
        """
        asked = self.distributed.ddp_find_unused_parameters
        if self.distributed.strategy is not Strategy.DDP or self.distributed.pp > 1:
            return False
        if asked is not None:
            return asked
        return self.loop is Loop.TRAINER and self.checkpointing == "none"

    @property
    def computes_in_half(self) -> bool:
        """Whether FSDP or DeepSpeed hold half-precision copies of parameters to compute with.

        In place of autocast: accelerate gives ``fully_shard`` a ``MixedPrecisionPolicy``, and
        DeepSpeed's engine converts the model. A script's own FSDP2 has autocast, as it says, and a
        pipeline is always a script's.
        """
        if self.precision is Precision.FP32:
            return False
        if self.distributed.strategy is Strategy.FSDP:
            return self.loop is not Loop.PLAIN and self.distributed.pp == 1
        return self.distributed.strategy is Strategy.ZERO

    @property
    def autocasts_halves(self) -> bool:
        """Whether the model runs in autocast on half-precision copies of its parameters.

        ``Accelerator.prepare_model`` of accelerate 1.15 wraps the forward in autocast, and makes
        float32 of its outputs, before it makes FSDP1 of the model; FSDP2's preparation does not
        come there.
        """
        one = self.distributed.strategy is Strategy.FSDP and self.distributed.fsdp_version == 1
        return self.computes_in_half and one

    @property
    def keeps_parameters(self) -> bool:
        """``use_orig_params`` of FSDP1: the Trainer says yes, accelerate and torch no."""
        asked = self.distributed.fsdp_use_orig_params
        return self.loop is Loop.TRAINER if asked is None else asked

    @property
    def partitions_parameters(self) -> bool:
        """Whether DeepSpeed partitions the parameters themselves (stage 3)."""
        return self.distributed.zero == 3

    @property
    def partitions_whole_model(self) -> bool:
        """Whether stage 3 gets a model that lies whole on every GPU, and partitions it there.

        ``from_pretrained`` leaves ``zero.Init`` out where it quantises (``get_init_context`` of
        transformers 5.23), so ``DeepSpeedZeRoOffload`` finds no parameter of its own.
        """
        return self.partitions_parameters and self.quantization is not None

    @property
    def is_built_in_parts(self) -> bool:
        """Whether stage 3 partitions each parameter as the model is built (``zero.Init``)."""
        return self.partitions_parameters and not self.partitions_whole_model

    @property
    def is_built_in_full(self) -> bool:
        """Whether ``zero.Init`` makes float32 weights, whatever dtype the checkpoint has.

        ``InsertPostInitMethodToModuleSubClasses._set_dtype`` of DeepSpeed 0.19.8 takes half
        precision where the configuration enables it, and constructors cast to what it took. (What
        is traced for a run in half precision has half weights and no precision.)
        """
        in_full = not self.computes_in_half and not self.dtype.is_half
        return self.is_built_in_parts and in_full

    @property
    def has_linear_of_stage_3(self) -> bool:
        """Whether ``zero.Init`` puts a function of its own in place of ``F.linear``."""
        usual = self.distributed.zero_setting("memory_efficient_linear", True)
        return self.partitions_parameters and bool(usual)

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
            if hasattr(value, "to_dict"):
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
