"""How a training run is spread over GPUs: every option of it is a field, declared here.

Checked, and with its values in their types, it is a
:class:`memest.config.parallelism.Distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memest.config.kinds import Fsdp, Prefetch, Rotate, Schedule, Strategy
from memest.config.option import Kind, Panel, legal_values, option

__all__ = ["ParallelOptions", "StagePart"]

_MAX_GPUS = 1 << 16
_MAX_DEGREE = 1 << 12
_MAX_MICROBATCHES = 1 << 12


@dataclass(frozen=True, slots=True)
class StagePart:
    """The layers of a model that one stage of a pipeline has.

    Attributes:
        start: its first layer.
        stop: the layer behind its last.
        first: it has what comes before the layers.
        last: it has what comes after them, and the loss.
    """

    start: int
    stop: int
    first: bool
    last: bool

    @property
    def words(self) -> str:
        """For people, and for keys."""
        layers = f"layers {self.start} to {self.stop - 1}"
        if self.stop == self.start + 1:
            layers = f"layer {self.start}"
        if self.stop == self.start:
            layers = "no layers"
        parts = ["embeddings"] * self.first + [layers] + ["head"] * self.last
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """What is asked of several GPUs, one process each, and what follows from it.

    Attributes:
        stage: the part of the model that is traced; None = all of it. For traces only.
        in_half: the library made the weights half-precision ones after adapters had been put in,
            or gathers them so: no parameter computes in float32. For traces only.
        adapters_in_full: when adapters in half precision show themselves as float32 ones to what is
            around them: ``always``, in the ``first`` forward, or never. For traces only.
        gathers_head: the dtype in which the loss itself gathers a head's shards, ``own`` for that
            of the weight; "" where it does not. For traces only.
        scores_completions: forwards that score completions come before a step, and leave behind
            what its forward gathers ahead, or has gathered already. For traces only.
        zero_auto: the settings of ``zero_settings`` that DeepSpeed's file left open, and the
            model's hidden size filled in.
    """

    num_gpus: int = option(
        1,
        "GPUs of the run, one process each: DDP, unless --fsdp or --zero says otherwise.",
        "--num-gpus --num-processes world_size nproc_per_node",
        short="GPUs: DDP, unless --fsdp or --zero is named.",
        between=(1, _MAX_GPUS),
    )
    nccl_memory: int | None = option(
        None,
        "What the communicator takes on each GPU; left out, a range: it depends on the links.",
        "SIZE",
        kind=Kind.TEXT,
    )
    ddp_bucket_cap_mb: float | None = option(
        None,
        "Size of DDP's gradient buckets, MiB; left out, 25 and a first one of 1.",
        "MIB bucket_cap_mb",
    )
    ddp_find_unused_parameters: bool | None = option(
        None,
        "DDP looks for parameters that were not used, and copies the outputs; left out, as the "
        "loop does: the Trainer, unless layers are recomputed.",
        "find_unused_parameters",
    )
    ddp_gradient_as_bucket_view: bool = option(
        False, "Gradients are views of DDP's buckets.", "gradient_as_bucket_view"
    )
    fsdp: Fsdp = option(
        Fsdp.NONE,
        f"FSDP2 (fully_shard): {legal_values(Fsdp)}; full_shard gives parameters back after each "
        "unit's forward, shard_grad_op keeps them until its backward, no_shard (FSDP1) cuts "
        "nothing.",
        "MODE",
        panel=Panel.FSDP,
        short="FSDP: full_shard, shard_grad_op or no_shard.",
    )
    fsdp_wrap: tuple[str, ...] = option(
        (),
        "Class of the modules that become FSDP units; left out, those the model names as not to be "
        "split. Repeatable.",
        "--fsdp-wrap --fsdp-transformer-layer-cls-to-wrap CLASS transformer_layer_cls_to_wrap",
    )
    fsdp_wrap_ends: bool = option(
        False,
        "The embeddings are an FSDP2 unit, and the last norm with the head another, in a script's "
        "loop; accelerate and the Trainer make them so in any case.",
    )
    fsdp_mixed_precision: bool = option(
        False,
        "FSDP2 computes in bfloat16 by itself, in place of autocast, and reduces gradients in "
        "float32 (MixedPrecisionPolicy, --bf16): in a script's loop, or where transformers shards "
        "the model as it loads (--tp). FSDP1 does beside autocast, and reduces in half precision "
        "(MixedPrecision; verl's in float32); accelerate's FSDP does so unasked.",
    )
    fsdp_shard_size: int | None = option(
        None,
        "GPUs that share one copy of the model, the copies being replicas (hybrid sharding); left "
        "out, all.",
        between=(2, _MAX_GPUS),
    )
    fsdp_offload: bool = option(
        False,
        "FSDP keeps shards, gradients and optimizer states in host memory.",
        "fsdp_offload_params",
    )
    fsdp_version: int = option(
        2,
        "2 is fully_shard, 1 is FullyShardedDataParallel: flat parameters for each unit.",
        between=(1, 2),
    )
    fsdp_use_orig_params: bool | None = option(
        None,
        "FSDP1 leaves the optimizer the parameters instead of the flat ones; left out, as the loop "
        "does: the Trainer.",
    )
    fsdp_backward_prefetch: Prefetch | None = option(
        None,
        f"When FSDP1 gathers what autograd comes to next: {legal_values(Prefetch)}; left out, as "
        "the loop does: a script backward_pre, accelerate and the Trainer not at all.",
        "MODE",
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        False,
        "The first process alone loads the model, which waits in host memory until FSDP cuts it; "
        "under FSDP1 a quantised one is else whole on each GPU before.",
    )
    zero: int = option(
        0,
        "Stage of DeepSpeed ZeRO, 1 to 3; 0 is no DeepSpeed.",
        "--zero --zero-stage STAGE",
        panel=Panel.ZERO,
        short="DeepSpeed ZeRO, stage 1 to 3.",
        between=(0, 3),
    )
    zero_settings: tuple[tuple[str, Any], ...] = option(
        (),
        "A DeepSpeed configuration, a file or the JSON itself: its stage, buckets and offloading; "
        "`auto` as the Trainer fills it in.",
        "--deepspeed --deepspeed-config FILE deepspeed_config_file",
    )
    offload_optimizer: bool = option(
        False, "ZeRO keeps optimizer states and master weights in host memory."
    )
    offload_param: bool = option(False, "ZeRO-3 keeps parameters in host memory.")
    tp: int = option(
        1,
        "Tensor parallelism by transformers' plan of the model: GPUs that share its layers. "
        "--num-gpus is a multiple of it.",
        "--tp --tensor-parallel-degree tp_size tensor_model_parallel_size",
        panel=Panel.SHARED_LAYERS,
        between=(1, _MAX_DEGREE),
    )
    tp_sequence_parallel: bool = option(
        False,
        "Sequence parallelism beside --tp, by torch's parallel styles in a script's loop: between "
        "the sharded layers each of these GPUs has a part of the tokens. --seq-len is a multiple "
        "of --tp.",
        "sequence_parallel enable_sequence_parallel",
        kind=Kind.EITHER,
    )
    tp_loss_parallel: bool = option(
        True,
        "Under --tp-sequence-parallel each GPU keeps the logits of its part of the vocabulary, and "
        "the loss is computed on them (loss_parallel); otherwise they are gathered. On unless told "
        "otherwise.",
        "loss_parallel",
        kind=Kind.EITHER,
    )
    cp: int = option(
        1,
        "Context parallelism: GPUs that share every sequence by torch's ring attention, under "
        "--fsdp. --num-gpus is a multiple of it, --seq-len of twice as much.",
        "--cp --context-parallel-degree cp_size context_parallel_size",
        between=(1, _MAX_DEGREE),
    )
    cp_rotate: Rotate = option(
        Rotate.ALLGATHER,
        f"How keys and values come to the GPUs of a sequence: {legal_values(Rotate)}.",
        "HOW cp_comm_strategy",
    )
    sp: int = option(
        1,
        "Ulysses sequence parallelism by DeepSpeed: GPUs that share every sequence, and in "
        "attention the heads, under --zero. --num-gpus and --seq-len are multiples of it.",
        "--sp --sequence-parallel-size sp_size",
        between=(1, _MAX_DEGREE),
    )
    ep: int = option(
        1,
        "Expert parallelism by transformers' plan of a mixture of experts: GPUs that share the "
        "experts, each with some of them whole; beside --tp of the same number, or --fsdp "
        "full_shard.",
        "--ep --expert-parallel-degree ep_size expert_model_parallel_size",
        between=(1, _MAX_DEGREE),
    )
    pp: int = option(
        1,
        "Pipeline: GPUs that the layers are split over. --num-gpus is a multiple of it.",
        "--pp --pipeline-parallel-degree pipeline_model_parallel_size pp_size",
        panel=Panel.PIPELINE,
        between=(1, _MAX_DEGREE),
    )
    pp_schedule: Schedule | None = option(
        None,
        f"Who of the pipeline runs what when: {legal_values(Schedule)}; left out, 1f1b.",
        "--pp-schedule --pipeline-parallel-schedule NAME",
    )
    pp_stages_per_gpu: int | None = option(
        None,
        "Stages that each GPU has; left out, two where the schedule takes several, else one.",
        "V",
        between=(1, 64),
    )
    pp_microbatches: int | None = option(
        None,
        "Micro-batches of --batch samples that a step of the schedule takes; left out, as many as "
        "the pipeline has GPUs.",
        "M n_microbatches",
        between=(1, _MAX_MICROBATCHES),
    )
    pp_split: tuple[int, ...] = option(
        (), "Layers of each stage, with commas between; left out, as even as can be.", "LIST"
    )
    pp_return_outputs: bool = option(
        True,
        "The schedule keeps what the last stage returns for all micro-batches, and joins it, as "
        "its step() does unless told return_outputs=False.",
        kind=Kind.EITHER,
    )
    stage: StagePart | None = None
    in_half: bool = False
    adapters_in_full: str = ""
    gathers_head: str = ""
    scores_completions: bool = False
    zero_auto: tuple[str, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """Who wraps the model."""
        if self.zero:
            return Strategy.ZERO
        if self.fsdp is not Fsdp.NONE:
            return Strategy.FSDP
        return Strategy.DDP if self.data_ranks > 1 else Strategy.NONE

    @property
    def flattens(self) -> bool:
        """Whether FSDP1 makes one flat parameter of those of a unit, and views of it of them."""
        return self.strategy is Strategy.FSDP and self.fsdp_version == 1

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
