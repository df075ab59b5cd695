"""The stream of one rank, and what its optimizer works on.

The stream of one process on whole parameters is rewritten by the wrapper that a setup asks for. A
rank of a pipeline has several stages, each with a wrapper of its own, which sees what its stage
does and what the schedule asks of it: ``torch/distributed/pipelining/stage.py`` of torch 2.13
(``forward_maybe_with_nosync``, ``backward_maybe_with_nosync``, ``perform_reduce_grad``) and
``schedules.py`` (``_PipelineScheduleRuntime._step_microbatches``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from memest.config.installed import installed_version
from memest.config.kinds import LogProbs, Method
from memest.config.parallelism import Fsdp, Prefetch, Strategy
from memest.config.quantization import Format
from memest.config.rollouts import Engine, Rollouts
from memest.config.setup import Dtype, Loop, Precision, Setup
from memest.events import REFERENCE, Category, CueKind, Landmarks, Mark, Phase, Weight
from memest.profiles.stream import Stream
from memest.sharding.ddp import Ddp, StageDdp
from memest.sharding.engine import (
    RankStream,
    Rewriter,
    Wrapper,
    num_elements,
    rewrite,
    weight_bytes,
)
from memest.sharding.fsdp1 import Fsdp1, flat_weights, keeps_whole
from memest.sharding.fsdp2 import Fsdp2, StageFsdp2
from memest.sharding.fsdp_units import (
    check_head_is_gathered,
    loaded_dtype,
    padded_elements,
    sharded_plans,
    stored_dtype,
    units_of,
)
from memest.sharding.reference import (
    REFERENCE_STREAM,
    WithReference,
    reference_landmarks,
    reference_unit,
    reference_weights,
)
from memest.sharding.zero import REDUCE_BUCKET_ELEMENTS, Zero
from memest.sharding.zero3 import Zero3, owned_by_module
from memest.sharding.zero3_fetch import GATHER_STREAM, Fetcher, Limits
from memest.sharding.zero_groups import groups_of, partition_weights
from memest.units import format_size

__all__ = [
    "StageFacts",
    "adam_states_on_host",
    "rank_stream",
    "staged_stream",
    "update_setup",
    "updated_weights",
]


def rank_stream(
    stream: Stream,
    setup: Setup,
    weights: Sequence[Weight],
    landmarks: Landmarks,
    grad_accum: int,
) -> RankStream:
    """What one rank allocates.

    GPUs and batches mostly differ in sizes that no wrapper asks for (workspaces, activations): the
    rank does the same then, and its stream is the last one of this structure with other sizes.

    Args:
        stream: of one process, with cues.
        setup: the run, as it was asked for.
        weights: parameters of the model, as they were traced.
        landmarks: what wrap policies ask of the model.
        grad_accum: micro-steps that are played of each step.
    """
    grounds = replace(setup, batch=1), tuple(weights), landmarks, grad_accum
    last: _Rewritten | None = stream.chains.memo.get(_LAST_RANK)
    if last is not None and last.answers(stream, grounds):
        return last.out.with_sizes_of(stream)
    to = Rewriter(stream)
    out = _rank_stream(stream, to, *grounds)
    stream.chains.memo[_LAST_RANK] = _Rewritten(grounds, to.asked_sizes, out)
    return out


_LAST_RANK = "the last stream of a rank"
_Grounds = tuple[Setup, tuple[Weight, ...], Landmarks, int]


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A stream of a rank, and what it came of beside the structure of the stream before.

    Attributes:
        grounds: setup, weights, landmarks, micro-steps.
        asked_sizes: bytes of the allocations whose size mattered.
        out: the stream.
    """

    grounds: _Grounds
    asked_sizes: Mapping[int, int]
    out: RankStream

    def answers(self, stream: Stream, grounds: _Grounds) -> bool:
        """Whether another stream of the same structure comes out as this one did."""
        return self.grounds == grounds and all(
            stream.sizes[number] == nbytes for number, nbytes in self.asked_sizes.items()
        )


def _rank_stream(
    stream: Stream,
    to: Rewriter,
    setup: Setup,
    weights: Sequence[Weight],
    landmarks: Landmarks,
    grad_accum: int,
) -> RankStream:
    distributed = setup.distributed
    common: dict[str, Any] = {"to": to, "weights": weights, "last_micro_step": grad_accum}
    if distributed.strategy is Strategy.DDP:
        wrapper: Wrapper = Ddp(**common, **_ddp_options(setup))
    elif distributed.strategy is Strategy.FSDP:
        wrapper = _fsdp(dict(common), setup, landmarks)
    else:
        wrapper = _zero(dict(common), setup, landmarks)
    if setup.has_reference_model and isinstance(wrapper, (Fsdp2, Zero3)):
        asked = {**common, "weights": reference_weights(weights), "kept_as": Category.REFERENCE}
        if isinstance(wrapper, Fsdp2):
            reference: Fsdp2 | Zero | Zero3 = _fsdp2_reference(asked, wrapper, setup)
        else:
            reference = _zero(asked, setup, reference_landmarks(landmarks), root=REFERENCE)
        both = [one.fetcher for one in (wrapper, reference) if isinstance(one, Zero3)]
        synced = both if setup.sync_ref_model else ()
        wrapper = WithReference(to=to, trained=wrapper, reference=reference, synced=synced)
    out = rewrite(stream, to, wrapper)
    if out.host_bytes:
        what = wrapper.on_host
        states = adam_states_on_host(weights, setup, landmarks)
        if distributed.strategy is Strategy.FSDP:
            # DeepSpeed's wrappers count them
            what += ", and Adam's states" if states else "; the optimizer's states come on top"
        size = format_size(out.host_bytes + states)
        out.notes = (*out.notes, f"host memory of each process: {size} of {what}.")
    return out


def _ddp_options(setup: Setup) -> dict[str, Any]:
    """What a setup says of DDP."""
    distributed = setup.distributed
    return {
        "bucket_cap_mb": distributed.ddp_bucket_cap_mb,
        "find_unused": setup.finds_unused_parameters,
        "as_views": distributed.ddp_gradient_as_bucket_view,
        "skips_sync": _skips_sync(setup),
    }


def _fsdp(common: dict[str, Any], setup: Setup, landmarks: Landmarks) -> Fsdp1 | Fsdp2:
    distributed, weights = setup.distributed, common["weights"]
    units = units_of(setup, weights, landmarks)
    check_head_is_gathered(setup, units, weights, landmarks)
    plans, notes = sharded_plans(units, weights, setup)
    on_device = setup.quantization is not None and not distributed.fsdp_cpu_ram_efficient_loading
    common |= {
        "leaves_out": not on_device,
        "notes": notes,
        "stored_dtypes": [stored_dtype(weight, setup) for weight in weights],
        "plans": plans,
        "ranks": distributed.shard_ranks,
        "on_device": on_device,
        "replicated": distributed.num_copies > 1,
        "offloads": distributed.fsdp_offload,
        "skips_sync": _skips_sync(setup),
    }
    if distributed.fsdp_version == 1:
        # accelerate's plugin prefetches nothing unless told to, torch's class does
        usual = Prefetch.BACKWARD_PRE if setup.loop is Loop.PLAIN else Prefetch.NO_PREFETCH
        rank: Fsdp1 | Fsdp2 = Fsdp1(
            **common,
            use_orig_params=setup.keeps_parameters,
            full_shard=distributed.fsdp is Fsdp.FULL_SHARD,
            prefetch=distributed.fsdp_backward_prefetch or usual,
            keeps_whole=keeps_whole(setup),
            reentrant=setup.recomputes_reentrantly,
            reduces_in_full=setup.log_probs is LogProbs.VERL,
        )
    else:
        reduce_dtype = "float32" if distributed.fsdp_mixed_precision else ""
        # verl hands weights out behind the step, which the engine's rule has
        hands_out = setup.method.generates and setup.log_probs is not LogProbs.VERL
        writer = (setup.rollouts or Rollouts()).engine if hands_out else None
        rank = Fsdp2(
            **common,
            tensor_ranks=distributed.tp,
            reduce_dtype=reduce_dtype,
            torch=_torch_of(setup),
            writer=writer,
        )
    if _skips_sync(setup) and setup.grad_accum > 1:
        rank.notes.append(
            f"accumulation under FSDP{distributed.fsdp_version}: until the last micro-batch of a "
            "step, every GPU keeps the gradients whole (no_sync)."
        )
    return rank


def _fsdp2_reference(common: dict[str, Any], trained: Fsdp2, setup: Setup) -> Fsdp2:
    """TRL's reference model beside the one that is trained: of one unit, and not cast before."""
    weights = common["weights"]
    unit = reference_unit(len(weights), reshards=setup.distributed.fsdp is Fsdp.FULL_SHARD)
    whole = format_size(sum(map(weight_bytes, weights)))
    own = setup.ref_dtype is not Dtype.AUTO
    trained.notes.append(
        "the reference model is one FSDP unit, as TRL wraps it: whenever it is asked, all of its "
        f"weights are gathered at once, and lie there twice ({whole} each)."
    )
    return Fsdp2(
        **common,
        stored_dtypes=[setup.ref_dtype if own else loaded_dtype(w, setup) for w in weights],
        plans=(unit,),
        ranks=trained.ranks,
        replicated=trained.replicated,
        offloads=trained.offloads,
        skips_sync=trained.skips_sync,
        gather_stream=REFERENCE_STREAM,
        torch=trained.torch,
    )


def _torch_of(setup: Setup) -> tuple[int, int]:
    """The release that trains; without one, that of the other sources here."""
    return setup.software.torch or installed_version("torch") or (2, 13)


def _zero(
    common: dict[str, Any], setup: Setup, landmarks: Landmarks, *, root: str = ""
) -> Zero | Zero3:
    """A rank of DeepSpeed's, of the model, or of stage 3 around another whose path is ``root``."""
    distributed, weights = setup.distributed, common["weights"]
    # of stage 3, unlike the others, overlap is the default
    overlaps = distributed.zero_setting("overlap_comm", distributed.zero == 3)
    common |= {
        "groups": groups_of(weights, setup),
        "ranks": distributed.num_gpus,
        "bucket_elements": distributed.zero_setting("reduce_bucket_size", REDUCE_BUCKET_ELEMENTS),
        "overlaps": overlaps,
        "offloads_optimizer": distributed.offload_optimizer,
    }
    if distributed.zero != 3:
        sends_full = distributed.sp > 1
        return Zero(**common, leaves_out=False, stage=distributed.zero, sends_full=sends_full)
    # TRL makes the reference's engine before the Trainer fills in what the file left open, and
    # beside the file: DeepSpeed takes its own defaults
    left_open = distributed.zero_auto if root else ()
    limits: dict[str, Any] = {
        limit.name: limit.default
        if f"stage3_{limit.name}" in left_open
        else distributed.zero_setting(f"stage3_{limit.name}", limit.default)
        for limit in fields(Limits)
    }
    fetcher = Fetcher(
        to=common["to"],
        weights=weights,
        owned_weights=owned_by_module(weights, common["to"].out.module_names, landmarks),
        ranks=distributed.num_gpus,
        limits=Limits(**limits),
        overlaps=overlaps,
        from_host=distributed.offload_param,
        stream=REFERENCE_STREAM if root else GATHER_STREAM,
    )
    # the engine's dtype, whatever peft made of the parameters
    engine = "float32"
    if setup.computes_in_half:
        engine = "float16" if setup.precision is Precision.FP16 else "bfloat16"
    writes = setup.method.generates and not root
    writer = (setup.rollouts or Rollouts()).engine if writes else None
    adapted = writes and writer is not Engine.MODEL and setup.adapter is not None
    adapters = next((w.dtype for w in weights if w.trains), "") if adapted else ""
    rank = Zero3(
        **common,
        writer=writer,
        merged=adapters,
        leaves_out=not setup.partitions_whole_model,
        fetcher=fetcher,
        contiguous=distributed.zero_setting("contiguous_gradients", True),
        offloads_params=distributed.offload_param,
        scaled=setup.precision is Precision.FP16,
        wire_dtype="float32" if distributed.sp > 1 else engine,
        kept_dtype=engine,
        root=root,
    )
    if setup.is_built_in_full:
        rank.notes.append(_FULL)
    if setup.partitions_whole_model:
        rank.notes.append(_WHOLE)
        four = setup.quantization is not None and setup.quantization.format is Format.BNB_4BIT
        if four and setup.optimizer != "none" and not setup.recomputes_reentrantly:
            rank.notes.append(_KEPT_BY_GRAPH)
    elif setup.loop is Loop.PLAIN and setup.has_linear_of_stage_3:
        rank.notes.append(_UNDER_INIT)
    return rank


_FULL = (
    "ZeRO-3 without --bf16 or --fp16: zero.Init makes float32 weights, whatever dtype the "
    "checkpoint has."
)
_WHOLE = (
    "ZeRO-3 of a quantised base: transformers loads the whole model on every GPU, where DeepSpeed "
    "partitions it; scales stay whole."
)
_UNDER_INIT = (
    "ZeRO-3: the model is taken to be built under deepspeed.zero.Init. Where it is whole "
    "when deepspeed.initialize gets it, loading takes more than is told, and releases of "
    "DeepSpeed before 0.19.4 leave F.linear alone: gathered weights of linear layers stay "
    'until the backward, which "memory_efficient_linear": false in its file says.'
)
_KEPT_BY_GRAPH = (
    "ZeRO-3 of 4-bit weights: bitsandbytes keeps a view of what was gathered for a forward as long "
    "as its graph lives, so at the end of the forward every GPU has them whole; recomputation "
    "changes that with --checkpointing full --use-reentrant, whose forward makes no graph."
)


def _skips_sync(setup: Setup) -> bool:
    """Whether all micro-steps but the last run without communication.

    ``Accelerator.accumulate`` and ``Trainer._run_epoch`` do; a tutorial's loop does not, nor does
    the former with a model that transformers has sharded, which has no ``no_sync``.
    """
    if setup.is_sharded_at_load:
        return setup.loop is Loop.TRAINER
    return setup.loop is not Loop.PLAIN


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a wrapper asks of a stage.

    Attributes:
        weights: its parameters, as they were traced.
        landmarks: of the model.
    """

    weights: tuple[Weight, ...]
    landmarks: Landmarks


def staged_stream(stream: RankStream, setup: Setup, stages: Mapping[int, StageFacts]) -> RankStream:
    """What a rank of a pipeline allocates where its stages are wrapped.

    Args:
        stream: of the rank with stages as they are, with cues.
        setup: the run.
        stages: of the rank, by their number.
    """
    to = Rewriter(stream)
    script = replace(setup, loop=Loop.PLAIN)  # no library's loop has a pipeline
    wrapper = _Stages(to=to, stages={n: _stage(to, script, s) for n, s in stages.items()})
    out = rewrite(stream, to, wrapper)
    out.rank = stream.rank
    return out


def _stage(to: Rewriter, setup: Setup, stage: StageFacts) -> StageDdp | StageFsdp2:
    distributed, weights = setup.distributed, stage.weights
    if distributed.strategy is Strategy.DDP:
        return StageDdp(to=to, weights=weights, last_micro_step=0, **_ddp_options(setup))
    return StageFsdp2(
        to=to,
        weights=weights,
        last_micro_step=0,
        stored_dtypes=[stored_dtype(weight, setup) for weight in weights],
        plans=units_of(setup, weights, stage.landmarks),
        ranks=distributed.shard_ranks,
        skips_sync=True,
        tensor_ranks=distributed.tp,
        torch=_torch_of(setup),
    )


@dataclass(slots=True, kw_only=True)
class _Stages(Wrapper):
    """The wrappers of a rank's stages; what happens is the matter of the one that is at work.

    Attributes:
        stages: by the number of the stage.
    """

    stages: Mapping[int, StageDdp | StageFsdp2]
    _at_work: int = -1

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        stage = self.stages.get(self._at_work)
        return stage is None or stage.allocates(number)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`; each knows its own."""
        keeps = [stage.frees(number) for stage in self.stages.values()]
        return all(keeps)

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        for stage in self.stages.values():
            stage.begins(mark)
        if mark.phase is Phase.FORWARD:
            self.stages[self._at_work].enter_stage()

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.STAGE_WORK:
            self._at_work = index
        stage = index if kind >= CueKind.STAGE_WORK else self._at_work
        self.stages[stage].cue(kind, index, number)


def adam_states_on_host(weights: Sequence[Weight], setup: Setup, landmarks: Landmarks) -> int:
    """Bytes of Adam's states that FSDP's offloading leaves on the host of a process.

    0 of other optimizers, of what is not offloaded, and of DeepSpeed, whose wrappers count them.

    Args:
        weights: as they were traced.
        setup: the run.
        landmarks: of the model.
    """
    offloads = setup.distributed.fsdp_offload and setup.optimizer.startswith("adam")
    if setup.distributed.strategy is not Strategy.FSDP or not offloads:
        return 0
    own_weights = updated_weights(weights, setup, landmarks)
    return _ADAM_STATES * sum(weight_bytes(w) for w in own_weights if w.trains)


_ADAM_STATES = 2


def updated_weights(
    weights: Sequence[Weight], setup: Setup, landmarks: Landmarks
) -> tuple[Weight, ...]:
    """The weights as the optimizer of rank 0 sees them, which holds the most of all ranks.

    Args:
        weights: as they were traced.
        setup: the run.
        landmarks: of the model: FSDP1 has the units that they make.
    """
    if setup.distributed.strategy is Strategy.ZERO:
        return partition_weights(weights, setup)
    if setup.distributed.strategy is not Strategy.FSDP:
        return tuple(weights)
    if setup.distributed.fsdp_version == 1:
        return flat_weights(weights, setup, landmarks)
    distributed = setup.distributed
    experts = [names for names, _, of_experts in landmarks.units if of_experts]
    inside = tuple(f"{name}." for names in experts for name in names)
    return tuple(
        _shard(
            weight,
            setup,
            distributed.expert_shard_ranks
            if weight.name.startswith(inside)
            else distributed.shard_ranks,
        )
        for weight in weights
    )


def _shard(weight: Weight, setup: Setup, ranks: int) -> Weight:
    padded_elements(weight, ranks)
    first, *rest = weight.shape
    shape = (min(-(-first // ranks), first), *rest)
    stride = tuple(num_elements(shape[place + 1 :]) for place in range(len(shape)))
    return replace(weight, shape=shape, stride=stride, dtype=stored_dtype(weight, setup))


def update_setup(setup: Setup) -> Setup:
    """The setup whose updates are traced: DeepSpeed scales and clips by itself, in place."""
    if setup.distributed.strategy is not Strategy.ZERO:
        return setup
    return replace(
        setup,
        max_grad_norm=0.0,
        loop=Loop.PLAIN,
        master_weights=False,
        precision=Precision.FP32,
        # an evaluation and a method are the Trainer's, and no matter of an update
        method=Method.SUPERVISED,
        log_probs=LogProbs.FUSED,
        ref_dtype=Dtype.AUTO,
        precompute_ref_log_probs=False,
        sync_ref_model=False,
        rollouts=None,
        eval_batch=None,
        eval_samples=None,
        eval_accumulation_steps=None,
    )
