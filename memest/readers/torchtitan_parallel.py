"""Parallel parts of torchtitan's settings: shards, copies, tensor, context, expert, pipeline ranks.

Source: ``ParallelismConfig`` and ``distributed/parallel_dims.py``, ``pipeline_parallel.py``.
"""

from __future__ import annotations

from typing import Any

from memest.readers.mapping import DocumentKeys, KeyTable, by_key
from memest.readers.values import COPIES, Bounded, Either, KeyOrigin, Level, Saving

__all__ = ["parallel_table"]

_DEGREES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
}
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
}
_PIPELINE_KEYS = """pipeline_parallel_schedule pipeline_parallel_schedule_csv num_pp_microbatches
    pipeline_parallel_microbatch_size pipeline_parallel_microbatches module_fqns_per_model_part
    pipeline_parallel_split_points pipeline_parallel_layers_per_stage
    pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
    pipeline_parallel_expert_parallel_overlap""".split()
_TENSOR_KEYS = (
    "enable_sequence_parallel",
    "disable_loss_parallel",
    "enable_async_tensor_parallel",
)
_EXPERT_KEYS = """expert_parallel_comm_backend expert_tensor_parallel_degree
    hybridep_non_blocking_expert_capacity_factor""".split()
_CONTEXT_KEYS = """context_parallel_rotate_method context_parallel_load_balancer
    context_parallel_ptrr_mask_key""".split()


def parallel_table(*, offload: bool, mixed: bool, batch: int | None) -> KeyTable:
    """What becomes of ``[parallelism]``.

    Args:
        offload: parameters lie in host memory between their uses.
        mixed: FSDP computes in half precision.
        batch: samples that a rank takes at once.
    """

    def read(part: DocumentKeys) -> None:
        _parallel(part, offload=offload, mixed=mixed)
        _pipeline(part, batch)

    return KeyTable(
        readers=(read,),
        ignored_keys=by_key({"how ranks keep account of what they hold": "spmd_backend"}),
        unmodelled_keys={
            "enable_compiled_autograd": Either("the backward is compiled"),
            "enable_fsdp_symm_mem": "buffers in symmetric memory",
            "full_dtensor": Either("weights are distributed tensors on every axis"),
        },
    )


def _parallel(part: DocumentKeys, *, offload: bool, mixed: bool) -> None:
    shard = part.whole("data_parallel_shard_degree")
    copies = part.whole("data_parallel_replicate_degree") or 1
    degrees = {key: part.whole(key) or 1 for key in _DEGREES}
    reshard = part.scalar("fsdp_reshard_after_forward")
    world: Any = None
    if shard is not None and shard > 0:
        world = shard * copies
        for key, degree in degrees.items():
            # ranks that share experts are among those that share data and layers (ParallelDims)
            world *= 1 if key == "expert_parallel_degree" else degree
        if world > 1:
            part.set("num_gpus", world, "data_parallel_shard_degree")
    else:
        part.miss_default(
            "data_parallel_shard_degree -1", Either("all GPUs there are: --num-gpus says it")
        )
        if copies > 1:
            part.set(COPIES, copies, "data_parallel_replicate_degree")
    context_degree = degrees["context_parallel_degree"]
    # the mesh of the parameters is dp_shard x cp
    sharded = shard is None or shard != 1 or context_degree > 1
    if sharded:
        # "default" keeps what a pipeline's micro-batches gathered (apply_fsdp)
        staged = reshard in (None, "default") and degrees["pipeline_parallel_degree"] > 1
        mode = "shard_grad_op" if reshard == "never" or staged else "full_shard"
        key = "fsdp_reshard_after_forward" if reshard else "data_parallel_shard_degree"
        # ParallelDims: one rank shards nothing
        origin = KeyOrigin(part.where(key), Level.DEFAULT)
        part.set_at("fsdp", mode, origin, several_gpus=True)
        if copies > 1 and shard is not None and shard > 1:
            part.set("fsdp_shard_size", shard * context_degree, "data_parallel_shard_degree")
        if offload:
            part.set("fsdp_offload", True, "data_parallel_shard_degree")
    _loop(part, degrees, sharded=sharded, mixed=mixed)
    for key, keyword in _DEGREES.items():
        if degrees[key] > 1:
            part.offer(keyword, degrees[key], key, f"{key} {degrees[key]}: this parallelism")
    if degrees["tensor_parallel_degree"] == 1:
        part.pass_over(_TENSOR_KEYS, "no tensor parallelism")
    else:
        _sequence(part, degrees, sharded=sharded, mixed=mixed)
    _contexts(part, context_degree)
    _experts(part, degrees["expert_parallel_degree"])


def _loop(part: DocumentKeys, degrees: dict[str, int], *, sharded: bool, mixed: bool) -> None:
    """A script whose FSDP2 has units at the ends and a policy, as ``apply_fsdp`` makes them.

    Where layers are not shared, accelerate's FSDP2 stands for it, whose units are the same.
    """
    of_layers = all((degree > 1) == (_DEGREES[key] == "tp") for key, degree in degrees.items())
    if not (sharded and of_layers):
        part.default("loop", "accelerate" if sharded and mixed else "plain")
        return
    part.default("loop", "plain")
    part.default("fsdp_wrap_ends", True, "its apply_fsdp")
    if mixed:
        part.default("fsdp_mixed_precision", True, "its apply_fsdp")


def _contexts(part: DocumentKeys, degree: int) -> None:
    if degree == 1:
        part.pass_over(_CONTEXT_KEYS, "no context parallelism")
        return
    rotate = part.scalar("context_parallel_rotate_method")
    if rotate is not None:
        part.offer("cp_rotate", rotate, "context_parallel_rotate_method", "how keys rotate")
    balancer = "context_parallel_load_balancer"
    if balancer in part.document and part.take(balancer) != "headtail":
        part.miss(balancer, f"{part.document[balancer]}: priced is torch's headtail")
    elif balancer in part.document:
        part.ignore(balancer, "priced as it is")
    part.pass_over(_CONTEXT_KEYS, "for masks of flex attention")


def _experts(part: DocumentKeys, degree: int) -> None:
    inside = part.whole("expert_tensor_parallel_degree")
    if inside not in (None, 1):
        remark = f"{inside}: experts are sharded inside, not only shared"
        part.miss("expert_tensor_parallel_degree", Either(remark))
    elif inside == 1:
        part.ignore("expert_tensor_parallel_degree", "off")
    if degree == 1:
        part.pass_over(_EXPERT_KEYS[::2], "no expert parallelism")
    backend = part.scalar("expert_parallel_comm_backend")
    if backend not in (None, "standard"):
        part.miss("expert_parallel_comm_backend", f"{backend}: buffers of its own")
    elif backend is not None:
        part.ignore("expert_parallel_comm_backend", "priced as it is")
    factor = "hybridep_non_blocking_expert_capacity_factor"
    if part.take(factor) is not None:
        part.miss(factor, "room for a fixed number of tokens at every expert")


def _pipeline(part: DocumentKeys, batch: int | None) -> None:
    """Micro-batches and stages; a rank's batch is cut into micro-batches of one sample each."""
    if part.value_of("pp") is None:
        part.pass_over(_PIPELINE_KEYS, "no pipeline")
        return
    key = "num_pp_microbatches"
    pieces = part.whole(key)
    if pieces is None and batch is not None:
        key = "pipeline_parallel_microbatch_size"
        size = part.whole(key)
        origin = KeyOrigin(f"{part.where(key)} (1 unless named)", Level.FILE)
        if size is not None:
            origin = KeyOrigin(part.origin(key).origin, Level.FILE)
        part.set_at("batch", max(1, size or 1), origin)
        part.set_at("pp_microbatches", max(1, batch // max(1, size or 1)), origin)
    elif pieces is not None:
        part.set_at("pp_microbatches", pieces, KeyOrigin(part.origin(key).origin, Level.FILE))
    name = part.scalar("pipeline_parallel_schedule")
    if name is not None:
        word = _SCHEDULES.get(str(name).lower())
        if word is None:
            part.miss("pipeline_parallel_schedule", Either(f"{name}: priced is 1f1b"))
        else:
            part.set("pp_schedule", word, "pipeline_parallel_schedule")
    for key in ("pipeline_parallel_schedule_csv", "pipeline_parallel_microbatches"):
        if part.take(key):
            part.miss(key, Either(f"a schedule of its own: {part.document[key]}"))
    stages = [name for name in _PIPELINE_KEYS[5:9] if part.take(name)]
    for key in stages or ():
        part.miss(key, "layers of each stage: as even as can be; --pp-split says it")
    if not stages:
        part.miss_default(
            "layers of each stage",
            "one less on the first and on the last, in releases since June 2025: as even as can "
            "be; --pp-split says it",
        )
    part.pass_over(_PIPELINE_KEYS, "with the schedule")


def _sequence(part: DocumentKeys, degrees: dict[str, int], *, sharded: bool, mixed: bool) -> None:
    """What torchtitan does beside tensor parallelism unasked: sequence and loss parallelism.

    Source: ``apply_tp`` of ``models/llama3/infra/parallelize.py`` and ``ParallelismConfig``, which
    had ``disable_loss_parallel`` until June 2026 and has ``enable_sequence_parallel`` since March;
    ``maybe_enable_amp`` of ``distributed/utils.py``.
    """
    on, no_loss = part.switch("enable_sequence_parallel"), part.switch("disable_loss_parallel")
    if part.switch("enable_async_tensor_parallel"):
        part.miss(
            "enable_async_tensor_parallel", "collectives in pieces among matmuls: priced without"
        )
    if mixed and not sharded:
        part.miss_default(
            "mixed precision beside tensor parallelism",
            Bounded("FSDP2's own, or none in releases before April 2026: autocast is priced"),
        )
    others = [
        key for key in ("expert_parallel_degree", "pipeline_parallel_degree") if degrees[key] > 1
    ]
    if on is False:
        part.miss(
            "enable_sequence_parallel",
            Saving("priced by transformers' plan, which gathers logits"),
        )
    elif others:
        remark = Saving(f"not modelled beside {others[0]}: activations are priced whole")
        if on:
            part.miss("enable_sequence_parallel", remark)
        else:
            part.miss_default("sequence parallelism", remark)
    else:
        if on:
            part.set("tp_sequence_parallel", True, "enable_sequence_parallel")
        else:
            part.default("tp_sequence_parallel", True, "beside tensor parallelism")
        if no_loss:
            part.set("tp_loss_parallel", False, "disable_loss_parallel")
        return
    if no_loss is not None:
        part.ignore("disable_loss_parallel", "logits are gathered in any case")
