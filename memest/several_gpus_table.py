"""The options of runs on several GPUs."""

from __future__ import annotations

from typing import Any

from memest.distributed import Distributed, Fsdp, Prefetch
from memest.option import Kind, Option, Panel, legal
from memest.parallel import Rotate, Schedule

__all__ = ["SEVERAL_GPUS"]


def _spread(name: str, flags: str, help_text: str, kind: Kind = Kind.TEXT, **more: Any) -> Option:
    """An option that sets a field of Distributed, with the field's default in its help."""
    default = getattr(Distributed(), name, None)
    if kind in (Kind.WHOLE, Kind.NUMBER, Kind.TEXT) and default not in (None, (), ""):
        help_text += f" Default: {default}."
    values = {"aliases": "", **more}
    values["aliases"] = tuple(values["aliases"].split())
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=Panel.DISTRIBUTED, kind=kind,
        field="distributed", **values,
    )  # fmt: skip


SEVERAL_GPUS: tuple[Option, ...] = (
    _spread(
        "num_gpus",
        "--num-gpus --num-processes",
        "GPUs of the run, one process each: DDP, unless --fsdp or --zero says otherwise.",
        Kind.WHOLE,
        metavar="N",
        aliases="world_size nproc_per_node",
    ),
    _spread(
        "nccl_memory",
        "--nccl-memory",
        "What the communicator takes on each GPU; left out, a range: it depends on the links.",
        metavar="SIZE",
    ),
    _spread(
        "ddp_bucket_cap_mb",
        "--ddp-bucket-cap-mb",
        "Size of DDP's gradient buckets, MiB; left out, 25 and a first one of 1.",
        Kind.NUMBER,
        metavar="MIB",
        aliases="bucket_cap_mb",
    ),
    _spread(
        "ddp_find_unused_parameters",
        "--ddp-find-unused-parameters --no-ddp-find-unused-parameters",
        "DDP looks for parameters that were not used, and copies the outputs; left out, as the "
        "loop does: the Trainer, unless layers are recomputed.",
        Kind.EITHER,
        aliases="find_unused_parameters",
    ),
    _spread(
        "ddp_gradient_as_bucket_view",
        "--ddp-gradient-as-bucket-view",
        "Gradients are views of DDP's buckets.",
        Kind.SWITCH,
        aliases="gradient_as_bucket_view",
    ),
    _spread(
        "fsdp",
        "--fsdp",
        f"FSDP2 (fully_shard): {legal(Fsdp)}; full_shard gives parameters back after each unit's "
        "forward, shard_grad_op keeps them until its backward, no_shard (FSDP1) cuts nothing.",
        metavar="MODE",
    ),
    _spread(
        "fsdp_wrap",
        "--fsdp-wrap --fsdp-transformer-layer-cls-to-wrap",
        "Class of the modules that become FSDP units; left out, those the model names as not to be "
        "split. Repeatable.",
        Kind.LIST,
        metavar="CLASS",
        aliases="transformer_layer_cls_to_wrap",
    ),
    _spread(
        "fsdp_shard_size",
        "--fsdp-shard-size",
        "GPUs that share one copy of the model, the copies being replicas (hybrid sharding); left "
        "out, all.",
        Kind.WHOLE,
        metavar="N",
    ),
    _spread(
        "fsdp_offload",
        "--fsdp-offload",
        "FSDP keeps shards, gradients and optimizer states in host memory.",
        Kind.SWITCH,
        aliases="fsdp_offload_params",
    ),
    _spread(
        "fsdp_version",
        "--fsdp-version",
        "2 is fully_shard, 1 is FullyShardedDataParallel: flat parameters for each unit.",
        Kind.WHOLE,
        metavar="N",
    ),
    _spread(
        "fsdp_use_orig_params",
        "--fsdp-use-orig-params --no-fsdp-use-orig-params",
        "FSDP1 leaves the optimizer the parameters instead of the flat ones; left out, as the loop "
        "does: the Trainer.",
        Kind.EITHER,
    ),
    _spread(
        "fsdp_backward_prefetch",
        "--fsdp-backward-prefetch",
        f"When FSDP1 gathers what autograd comes to next: {legal(Prefetch)}; left out, as the loop "
        "does: a script backward_pre, accelerate and the Trainer not at all.",
        metavar="MODE",
    ),
    _spread(
        "fsdp_cpu_ram_efficient_loading",
        "--fsdp-cpu-ram-efficient-loading",
        "The model waits in host memory until FSDP1 cuts it; a quantised one is else whole on each "
        "GPU before.",
        Kind.SWITCH,
    ),
    _spread(
        "zero",
        "--zero --zero-stage",
        "Stage of DeepSpeed ZeRO, 1 to 3; 0 is no DeepSpeed.",
        Kind.WHOLE,
        metavar="STAGE",
    ),
    _spread(
        "offload_optimizer",
        "--offload-optimizer",
        "ZeRO keeps optimizer states and master weights in host memory.",
        Kind.SWITCH,
    ),
    _spread(
        "offload_param",
        "--offload-param",
        "ZeRO-3 keeps parameters in host memory.",
        Kind.SWITCH,
    ),
    _spread(
        "zero_settings",
        "--deepspeed --deepspeed-config",
        "A DeepSpeed configuration, a file or the JSON itself: its stage, buckets and offloading; "
        "`auto` as the Trainer fills it in.",
        metavar="FILE",
        names_file=True,
        aliases="deepspeed_config_file",
    ),
    _spread(
        "tp",
        "--tp --tensor-parallel-degree",
        "Tensor parallelism by transformers' plan of the model: GPUs that share its layers. "
        "--num-gpus is a multiple of it.",
        Kind.WHOLE,
        metavar="N",
        aliases="tp_size tensor_model_parallel_size",
    ),
    _spread(
        "tp_sequence_parallel",
        "--tp-sequence-parallel --no-tp-sequence-parallel",
        "Sequence parallelism beside --tp, by torch's parallel styles in a script's loop: between "
        "the sharded layers each of these GPUs has a part of the tokens. --seq-len is a multiple "
        "of --tp.",
        Kind.EITHER,
        aliases="sequence_parallel enable_sequence_parallel",
    ),
    _spread(
        "tp_loss_parallel",
        "--tp-loss-parallel --no-tp-loss-parallel",
        "Under --tp-sequence-parallel each GPU keeps the logits of its part of the vocabulary, and "
        "the loss is computed on them (loss_parallel); otherwise they are gathered. On unless told "
        "otherwise.",
        Kind.EITHER,
        aliases="loss_parallel",
    ),
    _spread(
        "cp",
        "--cp --context-parallel-degree",
        "Context parallelism: GPUs that share every sequence by torch's ring attention, under "
        "--fsdp. --num-gpus is a multiple of it, --seq-len of twice as much.",
        Kind.WHOLE,
        metavar="N",
        aliases="cp_size context_parallel_size",
    ),
    _spread(
        "cp_rotate",
        "--cp-rotate",
        f"How keys and values come to the GPUs of a sequence: {legal(Rotate)}.",
        metavar="HOW",
        aliases="cp_comm_strategy",
    ),
    _spread(
        "sp",
        "--sp --sequence-parallel-size",
        "Ulysses sequence parallelism by DeepSpeed: GPUs that share every sequence, and in "
        "attention the heads, under --zero. --num-gpus and --seq-len are multiples of it.",
        Kind.WHOLE,
        metavar="N",
        aliases="sp_size",
    ),
    _spread(
        "ep",
        "--ep --expert-parallel-degree",
        "Expert parallelism by transformers' plan of a mixture of experts: GPUs that share the "
        "experts, each with some of them whole; beside --tp of the same number, or --fsdp "
        "full_shard.",
        Kind.WHOLE,
        metavar="N",
        aliases="ep_size expert_model_parallel_size",
    ),
    _spread(
        "pp",
        "--pp --pipeline-parallel-degree",
        "Pipeline: GPUs that the layers are split over. --num-gpus is a multiple of it.",
        Kind.WHOLE,
        metavar="N",
        aliases="pipeline_model_parallel_size pp_size",
    ),
    _spread(
        "pp_schedule",
        "--pp-schedule --pipeline-parallel-schedule",
        f"Who of the pipeline runs what when: {legal(Schedule)}; left out, 1f1b.",
        metavar="NAME",
    ),
    _spread(
        "pp_microbatches",
        "--pp-microbatches",
        "Micro-batches of --batch samples that a step of the schedule takes; left out, as many as "
        "the pipeline has GPUs.",
        Kind.WHOLE,
        metavar="M",
        aliases="n_microbatches",
    ),
    _spread(
        "pp_stages_per_gpu",
        "--pp-stages-per-gpu",
        "Stages that each GPU has; left out, two where the schedule takes several, else one.",
        Kind.WHOLE,
        metavar="V",
    ),
    _spread(
        "pp_split",
        "--pp-split",
        "Layers of each stage, with commas between; left out, as even as can be.",
        metavar="LIST",
    ),
    _spread(
        "pp_return_outputs",
        "--pp-return-outputs --no-pp-return-outputs",
        "The schedule keeps what the last stage returns for all micro-batches, and joins it, as "
        "its step() does unless told return_outputs=False.",
        Kind.EITHER,
    ),
)
