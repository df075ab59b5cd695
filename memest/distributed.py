"""How a training run is spread over GPUs: the part of a setup that several processes add."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError, closest
from memest.kinds import choose, whole
from memest.parallel import (
    Rotate,
    Schedule,
    StagePart,
    check_shape,
    read_rotate,
    read_schedule,
    read_split,
)

__all__ = ["ALONE", "MAX_GPUS", "Distributed", "Fsdp", "Prefetch", "Strategy"]

MAX_GPUS = 1 << 16
_OF_TRACES = ("stage", "in_half", "adapters_in_full")
"""What nobody asks for: it says which part of a run is traced, and how."""


class Strategy(enum.StrEnum):
    """Who wraps the model."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO = "zero"


class Fsdp(enum.StrEnum):
    """What ``fully_shard`` does with parameters that a forward has gathered."""

    NONE = "none"
    FULL_SHARD = "full_shard"
    """They are given back after each unit's forward (``reshard_after_forward=True``)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """They stay until its backward (``reshard_after_forward=False``)."""
    NO_SHARD = "no_shard"
    """Nothing is cut: FSDP1's ``ShardingStrategy.NO_SHARD``, flat parameters that are whole."""


class Prefetch(enum.StrEnum):
    """When FSDP1 gathers the unit that autograd comes to next (``BackwardPrefetch``)."""

    NO_PREFETCH = "no_prefetch"
    """When autograd is there."""
    BACKWARD_PRE = "backward_pre"
    """Before the backward of the unit in front of it."""
    BACKWARD_POST = "backward_post"
    """Behind it, when its own parameters are given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Several GPUs, one process each.

    Attributes:
        num_gpus: processes of the run; all of them share parameters, gradients or states.
        nccl_memory: what the communicator takes on the device, in bytes; None = a range.
        ddp_bucket_cap_mb: size of DDP's gradient buckets, MiB; None = 25, the first one 1.
        ddp_find_unused_parameters: None = as the loop has it.
        ddp_gradient_as_bucket_view: gradients are views of the buckets.
        fsdp: FSDP2 (``fully_shard``), and what it does after a forward.
        fsdp_wrap: classes of modules that become units; empty = those the model says may not be
            split.
        fsdp_shard_size: GPUs that share one copy of the model, the copies being replicas of each
            other (hybrid sharding); None = all.
        fsdp_offload: shards, gradients and optimizer states are kept in host memory.
        fsdp_version: 2 = ``fully_shard``, 1 = ``FullyShardedDataParallel`` with flat parameters.
        fsdp_use_orig_params: FSDP1 leaves the optimizer the parameters, not the flat ones; None =
            as the loop has it.
        fsdp_backward_prefetch: of FSDP1; None = as the loop has it.
        fsdp_cpu_ram_efficient_loading: of FSDP1: the model waits in host memory until it is cut,
            quantised weights too.
        zero: stage of DeepSpeed ZeRO; 0 = no DeepSpeed.
        zero_settings: of ``zero_optimization`` and what else of a DeepSpeed file matters, as
            (key, value) pairs; empty = DeepSpeed's defaults.
        offload_optimizer: ZeRO keeps optimizer states and master weights in host memory.
        offload_param: ZeRO-3 keeps parameters in host memory.
        tp: GPUs that share every sharded layer, each with a part of its weights.
        tp_sequence_parallel: between the sharded layers each of these GPUs has a part of the
            tokens.
        tp_loss_parallel: there, each has the logits of a part of the vocabulary.
        cp: GPUs that share every sequence, each with a part of its tokens.
        cp_rotate: how keys and values come to the other GPUs of a sequence.
        sp: GPUs that share every sequence by DeepSpeed's Ulysses: each has a part of its tokens,
            and of its heads in attention.
        ep: GPUs that share the experts, each with some of them whole; 1 = all have all of them.
        pp: stages of the pipeline that run at a time, one GPU each; 1 = no pipeline.
        pp_schedule: who runs what when; None = 1F1B where there is a pipeline.
        pp_stages_per_gpu: stages that each GPU has; None = as the schedule wants, one or two.
        pp_microbatches: micro-batches that a step of the schedule takes; None = one for each GPU of
            the pipeline.
        pp_split: layers of each stage; empty = as even as can be.
        pp_return_outputs: the schedule keeps what the last stage returns, and joins it.
        stage: the part of the model that is traced; None = all of it. For traces only.
        in_half: the library made the weights half-precision ones after adapters had been put in,
            or gathers them so: no parameter computes in float32. For traces only.
        adapters_in_full: when adapters in half precision show themselves as float32 ones to what is
            around them: ``always``, in the ``first`` forward, or never. For traces only.
    """

    num_gpus: int = 1
    nccl_memory: int | None = None
    ddp_bucket_cap_mb: float | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_gradient_as_bucket_view: bool = False
    fsdp: Fsdp = Fsdp.NONE
    fsdp_wrap: tuple[str, ...] = ()
    fsdp_shard_size: int | None = None
    fsdp_offload: bool = False
    fsdp_version: int = 2
    fsdp_use_orig_params: bool | None = None
    fsdp_backward_prefetch: Prefetch | None = None
    fsdp_cpu_ram_efficient_loading: bool = False
    zero: int = 0
    zero_settings: tuple[tuple[str, Any], ...] = ()
    offload_optimizer: bool = False
    offload_param: bool = False
    tp: int = 1
    tp_sequence_parallel: bool = False
    tp_loss_parallel: bool = True
    cp: int = 1
    cp_rotate: Rotate = Rotate.ALLGATHER
    sp: int = 1
    ep: int = 1
    pp: int = 1
    pp_schedule: Schedule | None = None
    pp_stages_per_gpu: int | None = None
    pp_microbatches: int | None = None
    pp_split: tuple[int, ...] = ()
    pp_return_outputs: bool = True
    stage: StagePart | None = None
    in_half: bool = False
    adapters_in_full: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "pp_schedule", read_schedule(self.pp_schedule))
        put(self, "cp_rotate", read_rotate(self.cp_rotate))
        put(self, "pp_split", read_split(self.pp_split))
        put(self, "fsdp", _fsdp(self.fsdp))
        put(self, "fsdp_wrap", tuple(self.fsdp_wrap))
        if isinstance(self.zero_settings, Mapping):
            put(self, "zero_settings", tuple(sorted(self.zero_settings.items())))
        put(self, "zero_settings", tuple((str(k), v) for k, v in self.zero_settings))
        whole("--num-gpus", self.num_gpus, 1, MAX_GPUS)
        check_shape(self)
        whole("--zero", self.zero, 0, 3)
        whole("--fsdp-version", self.fsdp_version, 1, 2)
        if self.fsdp_backward_prefetch is not None:
            mode = choose("--fsdp-backward-prefetch", self.fsdp_backward_prefetch, Prefetch)
            put(self, "fsdp_backward_prefetch", mode)
        cap = self.ddp_bucket_cap_mb
        if cap is not None and not 0 < cap < math.inf:
            raise ConfigError(f"--ddp-bucket-cap-mb {cap:g} is out of range: it must be above 0.")
        if self.nccl_memory is not None and self.nccl_memory < 0:
            raise ConfigError(f"--nccl-memory {self.nccl_memory} must not be negative.")
        self._check_together()
        size = self.fsdp_shard_size
        if size is not None:
            whole("--fsdp-shard-size", size, 2, MAX_GPUS)
            if self.num_gpus % size:
                raise ConfigError(
                    f"--fsdp-shard-size {size} does not divide the {self.num_gpus} GPUs of "
                    "--num-gpus: every copy of the model has as many."
                )

    def _check_together(self) -> None:
        """What belongs to one strategy has no meaning under another.

        Raises:
            ConfigError: an option that the run would ignore.
        """
        if self.zero and self.fsdp is not Fsdp.NONE:
            raise ConfigError(
                f"--zero {self.zero} and --fsdp {self.fsdp} exclude each other: DeepSpeed and FSDP "
                "both shard the model. Drop one of them."
            )
        if self.fsdp is Fsdp.NO_SHARD and self.fsdp_version == 2:
            raise ConfigError(
                "--fsdp no_shard is FSDP1's: add --fsdp-version 1. fully_shard always shards; "
                "whole copies are DDP, which is what --num-gpus alone means."
            )
        for flag, given, needs, holds in (
            ("--offload-optimizer", self.offload_optimizer, "--zero 1, 2 or 3", self.zero > 0),
            ("--offload-param", self.offload_param, "--zero 3", self.zero == 3),
            ("--deepspeed", self.zero_settings, "a stage in the file, or --zero", self.zero > 0),
            ("--fsdp-offload", self.fsdp_offload, "--fsdp full_shard", self.fsdp != Fsdp.NONE),
            ("--fsdp-wrap", self.fsdp_wrap, "--fsdp full_shard", self.fsdp != Fsdp.NONE),
            ("--fsdp-version", self.fsdp_version == 1, "--fsdp full_shard", self.fsdp != Fsdp.NONE),
            (
                "--fsdp-backward-prefetch",
                self.fsdp_backward_prefetch is not None,
                "--fsdp-version 1",
                self.fsdp_version == 1,
            ),
            (
                "--fsdp-use-orig-params",
                self.fsdp_use_orig_params is not None,
                "--fsdp-version 1",
                self.fsdp_version == 1,
            ),
            (
                "--fsdp-cpu-ram-efficient-loading",
                self.fsdp_cpu_ram_efficient_loading,
                "--fsdp-version 1",
                self.fsdp_version == 1,
            ),
            (
                "--fsdp-shard-size",
                self.fsdp_shard_size,
                "--fsdp full_shard of --fsdp-version 2",
                self.fsdp != Fsdp.NONE and self.fsdp_version == 2,
            ),
        ):
            if given and not holds:
                raise ConfigError(f"{flag} has no meaning without {needs}.")
        ddp = {
            "--ddp-bucket-cap-mb": self.ddp_bucket_cap_mb is not None,
            "--ddp-find-unused-parameters": self.ddp_find_unused_parameters is not None,
            "--ddp-gradient-as-bucket-view": self.ddp_gradient_as_bucket_view,
        }
        if self.strategy is not Strategy.DDP:
            wrong = [flag for flag, given in ddp.items() if given]
            if wrong:
                other = {
                    Strategy.NONE: "one GPU has no DDP: add --num-gpus",
                    Strategy.FSDP: f"--fsdp {self.fsdp} takes the place of DDP",
                    Strategy.ZERO: f"--zero {self.zero} takes the place of DDP",
                }[self.strategy]
                raise ConfigError(f"{wrong[0]} has no effect here: {other}.")
        if self.nccl_memory is not None and self.num_gpus == 1:
            raise ConfigError("--nccl-memory has no effect on one GPU: add --num-gpus.")

    @property
    def strategy(self) -> Strategy:
        """Who wraps the model."""
        if self.zero:
            return Strategy.ZERO
        if self.fsdp is not Fsdp.NONE:
            return Strategy.FSDP
        return Strategy.DDP if self.data_ranks > 1 else Strategy.NONE

    @property
    def data_ranks(self) -> int:
        """GPUs that see batches of their own and hold the same part of the model."""
        return self.num_gpus // (self.tp * self.sequence_ranks * self.pp)

    @property
    def sequence_ranks(self) -> int:
        """GPUs that share every sequence, in one way or the other."""
        return self.cp * self.sp

    @property
    def sequence_pieces(self) -> int:
        """Equal pieces in which a sequence is dealt out.

        Ring attention gives each of its GPUs one of the head and one of the tail; Ulysses, and
        sequence parallelism beside tensor parallelism, one.
        """
        if self.tp_sequence_parallel:
            return self.tp
        return 2 * self.cp if self.cp > 1 else self.sp

    @property
    def shares_model(self) -> bool:
        """Whether each rank has a part of the layers or of the experts: that part is traced."""
        return self.tp > 1 or self.ep > 1

    @property
    def expert_shard_ranks(self) -> int:
        """GPUs that have the same experts, which FSDP shards between them (``efsdp_size``)."""
        return self.num_gpus // (self.ep * self.pp)

    @property
    def pipeline_schedule(self) -> Schedule:
        """The schedule of a pipeline."""
        return self.pp_schedule or Schedule.ONE_F_ONE_B

    @property
    def stages_per_gpu(self) -> int:
        """Stages of a pipeline that each GPU has."""
        if self.pp_stages_per_gpu is not None:
            return self.pp_stages_per_gpu
        return 2 if self.pipeline_schedule.several_stages else 1

    @property
    def microbatches(self) -> int:
        """Micro-batches of a pipeline's step."""
        return self.pp if self.pp_microbatches is None else self.pp_microbatches

    @property
    def updates_on_device(self) -> bool:
        """Whether clipping and optimizer work in the GPU's memory."""
        return not (self.fsdp_offload or self.offload_optimizer)

    @property
    def shard_ranks(self) -> int:
        """GPUs that share one copy of what is sharded: those of a sequence among them.

        ``dp_shard_cp`` of accelerate's ``ParallelismConfig``, ``seq_data_parallel_group`` of
        DeepSpeed's engine.
        """
        if self.fsdp_shard_size is not None:
            return self.fsdp_shard_size
        return self.data_ranks * self.sequence_ranks

    @property
    def num_copies(self) -> int:
        """Copies of the model, each sharded (hybrid sharding); 1 without."""
        return self.data_ranks * self.sequence_ranks // self.shard_ranks

    def zero_setting(self, key: str, default: Any) -> Any:
        """A value of DeepSpeed's configuration."""
        return dict(self.zero_settings).get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in the order of the fields."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_TRACES:
                continue
            if isinstance(value, enum.StrEnum):
                value = value.value
            elif field.name == "zero_settings":
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            out[field.name] = value
        return out


def _fsdp(value: Any) -> Fsdp:
    """The mode, also in the words of ``TrainingArguments.fsdp`` ("full_shard auto_wrap")."""
    if isinstance(value, Fsdp):
        return value
    if isinstance(value, bool):
        return Fsdp.FULL_SHARD if value else Fsdp.NONE
    words = [w for w in str(value).lower().replace("-", "_").replace(",", " ").split() if w]
    modes = [word for word in words if word != "auto_wrap"]
    if modes in ([], ["no"]):
        return Fsdp.FULL_SHARD if words else Fsdp.NONE
    if len(modes) == 1:
        for mode in Fsdp:
            if modes[0] == mode.value:
                return mode
    legal = ", ".join(mode.value for mode in Fsdp)
    near = closest(modes[0], [mode.value for mode in Fsdp])
    hint = f" Did you mean {near[0]!r}?" if near else ""
    extra = " For offloading write --fsdp-offload." if "offload" in modes else ""
    if any(mode.startswith("hybrid_shard") for mode in modes):
        extra = " Hybrid sharding is --fsdp full_shard --fsdp-shard-size GPUS_OF_A_COPY."
        hint = ""
    raise ConfigError(f"--fsdp {value!r} is not known.{hint}{extra} Legal: {legal}.")


ALONE = Distributed()
"""One GPU, one process."""
