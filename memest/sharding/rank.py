"""The stream of one rank, from the stream of one process on whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memest.distributed import Fsdp, Prefetch, Strategy
from memest.events import Landmarks, Weight
from memest.quantization import Format
from memest.setup import Loop, Precision, Setup
from memest.sharding.ddp import Ddp
from memest.sharding.flat import keeps_whole
from memest.sharding.fsdp import Fsdp2
from memest.sharding.fsdp1 import Fsdp1
from memest.sharding.quantised import sharded_plans
from memest.sharding.rewrite import RankStream, Rewriter, Wrapper, rewrite
from memest.sharding.shards import stored_dtype
from memest.sharding.units import check_head_is_gathered, units_of
from memest.sharding.zero import REDUCE_BUCKET_ELEMENTS, Zero
from memest.sharding.zero3 import Zero3, owned_by_module
from memest.sharding.zero3_fetch import Fetcher, Limits
from memest.sharding.zero_groups import groups_of, sub_groups_of
from memest.steps.stream import Stream
from memest.units import format_size

__all__ = ["rank_stream"]


def rank_stream(
    stream: Stream, setup: Setup, weights: Sequence[Weight], landmarks: Landmarks,
    grad_accum: int,
) -> RankStream:  # fmt: skip
    """What one rank allocates.

    Args:
        stream: of one process, with cues.
        setup: the run, as it was asked for.
        weights: parameters of the model, as they were traced.
        landmarks: what wrap policies ask of the model.
        grad_accum: micro-steps that are played of each step.
    """
    to = Rewriter(stream)
    spread = setup.distributed
    if spread.strategy is Strategy.DDP:
        wrapper: Wrapper = Ddp(
            to=to, weights=weights, bucket_cap_mb=spread.ddp_bucket_cap_mb,
            find_unused=setup.finds_unused_parameters, as_views=spread.ddp_gradient_as_bucket_view,
            skips_sync=skips_sync(setup), last_micro_step=grad_accum,
        )  # fmt: skip
    elif spread.strategy is Strategy.FSDP:
        wrapper = _fsdp2(to, setup, weights, landmarks, grad_accum)
    elif spread.zero == 3:
        wrapper = _zero3(to, setup, weights, landmarks, grad_accum)
    else:
        wrapper = _zero(to, setup, weights, grad_accum)
    out = rewrite(stream, to, wrapper)
    if out.host_bytes:
        said = f"host memory of each process: {format_size(out.host_bytes)} of {wrapper.on_host}."
        out.notes = (*out.notes, said)
    return out


def _fsdp2(
    to: Rewriter, setup: Setup, weights: Sequence[Weight], landmarks: Landmarks, grad_accum: int
) -> Fsdp2:
    spread = setup.distributed
    units = units_of(setup, weights, landmarks)
    check_head_is_gathered(setup, units, weights, landmarks)
    plans, notes = sharded_plans(units, weights, setup)
    common: dict[str, Any] = {
        "to": to, "weights": weights, "notes": notes,
        "stored": [stored_dtype(weight, setup) for weight in weights],
        "plans": plans, "ranks": spread.shard_ranks,
        "on_device": setup.quantization is not None
        and not spread.fsdp_cpu_ram_efficient_loading,
        "replicated": spread.num_copies > 1, "offloads": spread.fsdp_offload,
        "skips_sync": skips_sync(setup), "last_micro_step": grad_accum,
        "tensor_ranks": spread.tp,
    }  # fmt: skip
    if spread.fsdp_version == 1:
        # accelerate's plugin prefetches nothing unless told to, torch's class does
        usual = Prefetch.BACKWARD_PRE if setup.loop is Loop.PLAIN else Prefetch.NO_PREFETCH
        wrapper: Fsdp2 = Fsdp1(
            **common, original=setup.keeps_parameters,
            full_shard=spread.fsdp is Fsdp.FULL_SHARD,
            prefetch=spread.fsdp_backward_prefetch or usual,
            whole=keeps_whole(setup), reentrant=setup.recomputes_reentrantly,
        )  # fmt: skip
    else:
        wrapper = Fsdp2(**common)
    if skips_sync(setup) and setup.grad_accum > 1:
        wrapper.notes.append(
            f"accumulation under FSDP{spread.fsdp_version}: until the last micro-batch of a step, "
            "every GPU keeps the gradients whole (no_sync)."
        )
    return wrapper


def _zero(to: Rewriter, setup: Setup, weights: Sequence[Weight], grad_accum: int) -> Zero:
    spread = setup.distributed
    return Zero(
        to=to, weights=weights, stage=spread.zero, groups=groups_of(weights, setup),
        ranks=spread.num_gpus,
        bucket_elements=spread.zero_setting("reduce_bucket_size", REDUCE_BUCKET_ELEMENTS),
        overlaps=spread.zero_setting("overlap_comm", False),
        offloads=spread.offload_optimizer, last_micro_step=grad_accum, sends_full=spread.sp > 1,
    )  # fmt: skip


_LIMITS = {
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "max_live": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence": "stage3_model_persistence_threshold",
}


def _zero3(
    to: Rewriter, setup: Setup, weights: Sequence[Weight], landmarks: Landmarks, grad_accum: int
) -> Zero3:
    spread = setup.distributed
    usual = Limits()
    limits = Limits(**{
        name: spread.zero_setting(key, getattr(usual, name)) for name, key in _LIMITS.items()
    })  # fmt: skip
    # of stage 3, unlike the others, it is the default
    overlaps = spread.zero_setting("overlap_comm", True)
    fetcher = Fetcher(
        to=to, weights=weights, owned=owned_by_module(weights, to.out.module_names, landmarks),
        ranks=spread.num_gpus, limits=limits, overlaps=overlaps, from_host=spread.offload_param,
    )  # fmt: skip
    groups = sub_groups_of(weights, setup)
    # the engine's dtype, whatever peft made of the parameters
    engine = "float32"
    if setup.computes_in_half:
        engine = "float16" if setup.precision is Precision.FP16 else "bfloat16"
    made = Zero3(
        to=to, weights=weights, fetcher=fetcher, groups=groups,
        bucket_elements=spread.zero_setting("reduce_bucket_size", REDUCE_BUCKET_ELEMENTS),
        contiguous=spread.zero_setting("contiguous_gradients", True), overlaps=overlaps,
        offloads_optimizer=spread.offload_optimizer, offloads_params=spread.offload_param,
        scaled=setup.precision is Precision.FP16,
        last_micro_step=grad_accum, wire="float32" if spread.sp > 1 else engine, kept=engine,
    )  # fmt: skip
    if setup.is_built_in_full:
        made.notes.append(_FULL)
    if setup.partitions_whole_model:
        made.whole = True
        made.notes.append(_WHOLE)
        four = setup.quantization is not None and setup.quantization.format is Format.BNB_4BIT
        if four and setup.optim != "none" and not setup.recomputes_reentrantly:
            made.notes.append(_HELD)
    elif setup.loop is Loop.PLAIN and setup.has_linear_of_stage_3:
        made.notes.append(
            "ZeRO-3: the model is taken to be built under deepspeed.zero.Init. Where it is whole "
            "when deepspeed.initialize gets it, loading takes more than is told, and releases of "
            "DeepSpeed before 0.19.4 leave F.linear alone: gathered weights of linear layers stay "
            'until the backward, which "memory_efficient_linear": false in its file says.'
        )
    return made


_FULL = (
    "ZeRO-3 without --bf16 or --fp16: zero.Init makes float32 weights, whatever dtype the "
    "checkpoint has."
)
_WHOLE = (
    "ZeRO-3 of a quantised base: transformers loads the whole model on every GPU, where DeepSpeed "
    "partitions it; scales stay whole."
)
_HELD = (
    "ZeRO-3 of 4-bit weights: bitsandbytes keeps a view of what was gathered for a forward as long "
    "as its graph lives, so at the end of the forward every GPU has them whole; recomputation "
    "changes that with --checkpointing full --use-reentrant, whose forward makes no graph."
)


def skips_sync(setup: Setup) -> bool:
    """Whether all micro-steps but the last run without communication.

    ``Accelerator.accumulate`` and ``Trainer._run_epoch`` do; a tutorial's loop does not.
    """
    return setup.loop is not Loop.PLAIN
