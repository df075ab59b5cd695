"""The sizes of a batch: between a setup's fields and the axes of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from memest.config.parallelism import ONE_GPU, Distributed, Fsdp, Strategy
from memest.config.setup import Dtype, Loop, Precision, Setup
from memest.errors import ConfigError, MemestError
from memest.profiles.sizing import Sizing, asked_sizes, milliseconds

__all__ = [
    "UNLIMITED",
    "Sizes",
    "eval_batches",
    "gathering_ranks",
    "greatest_length",
    "key_of",
    "last_holding",
    "learn_lengths",
    "resized",
    "sizes_of",
    "sizes_text",
    "structure_of",
    "traced_setup",
    "windows",
]

Sizes = Mapping[str, int]

_OF_UPDATES = ("optim_args", "optim_target_modules", "optim_in_backward", "weight_decay")
_ALWAYS_NAMED = frozenset(
    """batch seq_len target_len image_size audio_seconds task num_labels grad_accum checkpointing
    use_reentrant precision dtype master_weights tf32 optim max_grad_norm zero_grad zero_grad_at
    attn_implementation sdpa_backend freeze padded use_cache alloc_conf loop software
    num_steps""".split()
)
"""Options that keys name in any case; all others, which came later, only where they are given."""
_ALIKE = 4

UNLIMITED = 1 << 17
"""A model that takes so many tokens is taken to have no limit."""


_CLONES = Distributed(num_gpus=2, ddp_find_unused_parameters=True)
"""Stands for every DDP that looks for unused parameters: it copies the outputs of the model."""


_PARTITIONED = Distributed(zero=3)
"""Stands for every run whose parameters DeepSpeed partitions: linear layers are of its own."""

_FLAT = Distributed(num_gpus=2, fsdp=Fsdp.FULL_SHARD, fsdp_version=1)
"""Stands for every FSDP1 in autocast, which keeps no copies of views of flat parameters."""

_ON_ONE_GPU: dict[str, Any] = {
    "in_half": False,
    "adapters_in_full": "",
    "gathers_head": "",
    "scores_completions": False,
}
"""What one GPU of several has done to its weights, and nothing else."""

_BUILT_IN_LINEAR = replace(_PARTITIONED, zero_settings=(("memory_efficient_linear", False),))
"""Stands for those whose linear layers are not."""


def _sequence(distributed: Distributed) -> Distributed:
    """The GPUs of one sequence: what they compute does not depend on who else shards."""
    return Distributed(
        num_gpus=distributed.cp,
        cp=distributed.cp,
        cp_rotate=distributed.cp_rotate,
        fsdp=Fsdp.FULL_SHARD,
    )


def _heads(distributed: Distributed, base: Distributed) -> Distributed:
    """The GPUs of one sequence under DeepSpeed, whatever its stages 1 and 2 partition."""
    return replace(base, num_gpus=distributed.sp, sp=distributed.sp, zero=base.zero or 1)


def traced_setup(request: Setup) -> Setup:
    """The setup whose steps are traced: what a rank computes, on whole parameters.

    Sharding is a matter of what comes after the trace, with four exceptions. Where accelerate or
    DeepSpeed train in half precision, the parameters that the model computes with are half ones,
    without autocast (``MixedPrecisionPolicy`` in ``set_mixed_precision`` of accelerate;
    ``DeepSpeedEngine._cast_module_mixed_precision``; in autocast all the same under FSDP1),
    adapters too, which peft makes float32 before; not under stage 3, whose engine casts nothing
    that ``zero.Init`` built, which it did not where the base is quantised; what it builds is
    float32 where nothing computes in half precision (``_set_dtype``). And DDP that looks for unused
    parameters copies the model's outputs (``_DDPSink``). And autocast keeps its copies of leaves
    alone (``cached_cast``), which views of FSDP1's flat parameters are not. And ``zero.Init``
    replaces ``F.linear``, where ``memory_efficient_linear`` does not keep it from that.
    """
    distributed = _CLONES if request.finds_unused_parameters else ONE_GPU
    autocasts = request.precision is not Precision.FP32 and not request.computes_in_half
    if autocasts and request.distributed.flattens:
        distributed = _FLAT
    if request.partitions_parameters:
        distributed = _PARTITIONED if request.has_linear_of_stage_3 else _BUILT_IN_LINEAR
    elif request.distributed.stage is not None:
        distributed = replace(_sharing_model(request.distributed), stage=request.distributed.stage)
    elif request.distributed.shares_model:
        distributed = _sharing_model(request.distributed, at_load=request.is_sharded_at_load)
    elif request.distributed.cp > 1:
        distributed = _sequence(request.distributed)
    if request.distributed.sp > 1:
        distributed = _heads(request.distributed, distributed)
    if request.head_is_gathered_by_loss:
        in_full = request.computes_in_half and request.loaded_dtype is Dtype.FLOAT32
        in_full = in_full and request.quantization is None
        distributed = replace(distributed, gathers_head="float32" if in_full else "own")
    if request.method.generates and (
        request.distributed.strategy is Strategy.FSDP or request.distributed.zero == 3
    ):
        distributed = replace(distributed, scores_completions=True)
    precision, dtype = request.precision, request.dtype
    if request.computes_in_half:
        half = Dtype.BFLOAT16 if request.precision is Precision.BF16 else Dtype.FLOAT16
        by_policy = request.distributed.fsdp_mixed_precision
        if by_policy or (request.adapter is not None and not request.is_built_in_parts):
            distributed = replace(distributed, in_half=True, adapters_in_full=_in_full(request))
        if request.autocasts_halves and request.precision is Precision.FP16:
            distributed = replace(distributed, in_half=True)
        precision = request.precision if request.autocasts_halves else Precision.FP32
        # shards keep the dtype that was loaded, which the weights that are cast tell
        dtype = request.dtype if by_policy else half
    elif request.is_built_in_full:
        dtype = Dtype.FLOAT32
    return replace(request, distributed=distributed, precision=precision, dtype=dtype)


def _in_full(request: Setup) -> str:
    """When peft finds float32 adapters, which FSDP1 makes half ones only while each runs.

    ``LoraLayer.forward`` makes its input what the adapter is, and outside of its unit the adapter
    is the float32 shard (``_use_sharded_views`` with ``use_orig_params``), or what was put in
    before the first forward, and a half one since (``_use_unsharded_views``). Layers of 4 bits do
    not ask in autocast.
    """
    if not request.autocasts_halves or request.adapter is None or request.quantization is not None:
        return ""
    if not request.distributed.flattens:  # adapters are gathered with the layer that asks them
        return ""
    if request.keeps_parameters:
        return "always"
    return "first" if request.adapter.autocast_adapter_dtype else ""


def _sharing_model(distributed: Distributed, *, at_load: bool = False) -> Distributed:
    """Ranks that share layers or experts; who shards the rest does not count, but by own units."""
    sharded = distributed.fsdp if distributed.ep > 1 or at_load else Fsdp.NONE
    return Distributed(
        num_gpus=max(distributed.tp, distributed.ep),
        tp=distributed.tp,
        ep=distributed.ep,
        fsdp=sharded,
        tp_sequence_parallel=distributed.tp_sequence_parallel,
        tp_loss_parallel=distributed.tp_loss_parallel,
    )


def structure_of(request: Setup, *, live: bool = False) -> Setup:
    """The part of a setup that changes the traces of micro-steps.

    Args:
        request: the whole.
        live: the model is a module that is there, whose layers may be bitsandbytes' already.
    """
    update_fields: dict[str, Any] = {}
    accumulates = not (request.loop is Loop.PLAIN and request.grad_accum == 1)
    if request.steps_in_backward:
        # the updates are part of the micro-steps
        update_fields = {name: getattr(request, name) for name in _OF_UPDATES}
        update_fields["optim"] = request.optimizer
        accumulates = accumulates and request.may_accumulate
    updates_apart = replace(request.software, bitsandbytes=None)
    untraced_fields: dict[str, Any] = {
        each.name: each.default for each in fields(Setup) if not each.metadata.get("traced", True)
    }
    structure = replace(
        traced_setup(request),
        **untraced_fields,
        batch=1,
        grad_accum=2 if accumulates else 1,
        optim="none" if request.optimizer == "none" else "adamw_torch_fused",
        num_steps=2,
        adapter=None if request.adapter is None else request.adapter.unsized,
        rollouts=None if request.rollouts is None else request.rollouts.as_traced,
        software=request.software if request.quantization or live else updates_apart,
    )
    return replace(structure, **update_fields)


def key_of(structure: Setup) -> dict[str, Any]:
    """A structure as it is written into the keys of stored profiles.

    Options that came later are left out where they are not given: profiles from before there were
    any stay valid.
    """
    unset: tuple[Any, ...] = (None, "", [], False)
    usual = Setup().to_dict()
    distributed_names = {field.name for field in fields(Distributed)}
    out = {
        name: value
        for name, value in structure.to_dict().items()
        if name not in distributed_names
        and (name in _ALWAYS_NAMED or value not in (*unset, usual.get(name)))
    }
    if structure.prepare_kbit is not None:
        out["prepare_kbit"] = structure.prepare_kbit
    if structure.distributed.in_half:
        out["in_half"] = True
    if structure.distributed.adapters_in_full:
        out["adapters_in_full"] = structure.distributed.adapters_in_full
    if structure.partitions_parameters:
        out["partitioned"] = True
        if not structure.has_linear_of_stage_3:
            out["linear"] = "built-in"
    elif structure.distributed.shares_model:
        out["tp"] = structure.distributed.tp
        if structure.distributed.tp_sequence_parallel:
            out["tp_sequence"] = "loss" if structure.distributed.tp_loss_parallel else "logits"
        if structure.distributed.ep > 1:
            out["ep"] = structure.distributed.ep
        if structure.distributed.fsdp is not Fsdp.NONE or structure.distributed.ep > 1:
            out["fsdp"] = structure.distributed.fsdp.value
    elif structure.distributed.cp > 1:
        out["cp"] = [structure.distributed.cp, structure.distributed.cp_rotate.value]
    elif structure.distributed.sp > 1:
        pass  # stages 1 and 2 change nothing else
    elif structure.distributed.flattens:
        out["flattened"] = True
    elif replace(structure.distributed, **_ON_ONE_GPU) != ONE_GPU:
        out["clones_outputs"] = True
    if structure.distributed.scores_completions:
        out["scores_completions"] = True
    if structure.distributed.gathers_head:
        out["gathers_head"] = structure.distributed.gathers_head
    if structure.distributed.sp > 1:
        out["sp"] = structure.distributed.sp
    return out


def eval_batches(setup: Setup) -> int:
    """How many batches of an evaluation decide its peak.

    Predictions pile up over as many as the samples make, which several GPUs share, or until they
    go to the host. Without predictions all batches from the third on are alike.
    """
    if setup.eval_batch is None or setup.eval_samples is None:
        return _ALIKE
    batches = -(-setup.eval_samples // (setup.eval_batch * _evaluating_ranks(setup.distributed)))
    return min(batches, setup.eval_accumulation_steps or batches)


def gathering_ranks(distributed: Distributed) -> int | None:
    """How many processes gather what they predict; None where there are no others.

    All of them do, those that share a model or a sequence too: ``gather_for_metrics`` of accelerate
    1.15 knows no other group. With one GPU under FSDP or DeepSpeed there is a process group of one,
    which gathers as well.
    """
    alone = distributed.strategy is Strategy.NONE and distributed.num_gpus == 1
    return None if alone else distributed.num_gpus


def _evaluating_ranks(distributed: Distributed) -> int:
    """How many GPUs evaluate batches of their own.

    ``prepare_data_loader`` of accelerate 1.15: those of ``--tp`` and ``--cp`` get the same batch;
    under DeepSpeed no mesh tells the evaluation's loader of Ulysses, so those of ``--sp`` do not.
    """
    return distributed.data_ranks * distributed.sp


def sizes_of(setup: Setup) -> dict[str, int]:
    """The sizes of a batch, audio in milliseconds where they are whole, and the rank of LoRA."""
    sizes = {"batch": setup.batch}
    for name in ("seq_len", "target_len", "image_size"):
        value = getattr(setup, name)
        if value is not None:
            sizes[name] = value
    if setup.adapter is not None and setup.adapter.rank is not None:
        sizes["lora_r"] = setup.adapter.rank
    if setup.audio_seconds is not None:
        whole = milliseconds(setup.audio_seconds)
        if whole is not None:
            sizes["audio_ms"] = whole
        else:
            # a fraction of a millisecond is a size of its own
            numerator, denominator = setup.audio_seconds.as_integer_ratio()
            sizes["audio_numerator"], sizes["audio_denominator"] = numerator, denominator
    return sizes


def resized(setup: Setup, sizes: Sizes) -> Setup:
    """A setup with other sizes, as :func:`sizes_of` has them."""
    changes: dict[str, Any] = {
        name: size
        for name, size in sizes.items()
        if not name.startswith("audio") and name != "lora_r"
    }
    if "audio_ms" in sizes:
        changes["audio_seconds"] = sizes["audio_ms"] / 1000
    if "lora_r" in sizes and setup.adapter is not None:
        changes["adapter"] = setup.adapter.at_rank(sizes["lora_r"])
    return replace(setup, **changes)


def sizes_text(sizes: Sizes) -> str:
    """The sizes for people to read."""
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def learn_lengths(sizing: Sizing, request: Setup, meta_model: Any) -> None:
    """Ask a model for some lengths, to know its answer for all.

    Args:
        sizing: what is known of its sizes; filled in.
        request: nothing is asked where it names sizes of another kind.
        meta_model: the model.
    """
    # what a model takes does not depend on who shares it
    base = replace(request, seq_len=None, target_len=None, distributed=ONE_GPU)
    if {name for name, _ in asked_sizes(request)} - {"seq_len", "target_len"}:
        return
    for names in (("seq_len",), ("target_len",), ("seq_len", "target_len")):
        limits = {name: _highest_length(meta_model, base, name) for name in names}
        if 0 in limits.values():
            continue
        answers = {}
        for lengths in _sample_lengths(limits):
            setup = replace(base, **lengths)
            try:
                answers[asked_sizes(setup)] = meta_model.answer(setup)
            except MemestError:
                continue
        if len(answers) >= 3:
            sizing.learn(answers, {})


def greatest_length(sizing: Sizing, setup: Setup, axis: str) -> int | None:
    """The greatest length in tokens that a model takes.

    Args:
        sizing: what is known of its sizes.
        setup: whose own length is taken, whatever the model names.
        axis: ``seq_len`` or ``target_len``.

    Returns:
        None where the model names none, and of sizes of another kind.
    """
    if axis not in ("seq_len", "target_len"):
        return None
    rules = [rule for rule in sizing.rules if axis in rule.names]
    limit = max((rule.highs[rule.names.index(axis)] for rule in rules), default=None)
    return None if limit is None or limit >= UNLIMITED else max(limit, getattr(setup, axis))


def _highest_length(run: Any, base: Setup, name: str) -> int:
    """The greatest length the model takes, by bisection; 0 where it takes none of this kind."""

    def takes(length: int) -> bool:
        try:
            sizes: Any = {name: length}
            answer = run.answer(replace(base, **sizes))
        except (ConfigError, ValueError):
            return False
        return bool(answer.batch_sizes.get(name) == length)

    if not takes(16):
        return 0
    return UNLIMITED if takes(UNLIMITED) else last_holding(takes, UNLIMITED - 1, 16)


def last_holding(holds: Callable[[int], bool], highest: int, low: int = 0) -> int:
    """The largest number up to ``highest`` for which something holds, by halves; ``low`` if none.

    Args:
        holds: true up to some number, then false.
        highest: where to end.
        low: a number for which it holds, or 0.
    """
    high = highest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _sample_lengths(highest: Mapping[str, int]) -> list[dict[str, Any]]:
    """Lengths to ask a model about: both ends, and primes between."""
    out: list[dict[str, Any]] = []
    for a, b in ((1, 1), (7, 13), (11, 5), (0, 0), (3, 17), (13, 2)):
        row: dict[str, Any] = {}
        for number, (name, high) in enumerate(highest.items()):
            share = (a, b)[number % 2]
            row[name] = high if share == 0 else min(1 + high * share // 19, high)
        if row not in out:
            out.append(row)
    low: dict[str, Any] = dict.fromkeys(highest, 1)
    return [low, *[row for row in out if row != low]]


_WINDOW = re.compile(r"window|chunk_size|local_attention|original_max_position|max_distance")


def windows(config: Any) -> Iterator[int]:
    """The lengths in a config that bound what attention looks at."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            yield from windows(value)
        elif _WINDOW.search(str(name)):
            values = value if isinstance(value, list) else [value]
            yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))
