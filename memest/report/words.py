"""The sentences of a report: the same words on the terminal, in a notebook and in ``fits``."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from memest.catalog.spec import list_gpus
from memest.config.compilation import fused_loss_words
from memest.config.idle_options import smallest_batch
from memest.config.kinds import LogProbs, Method
from memest.config.parallelism import Distributed, Strategy
from memest.config.rollouts import Engine, Rollouts
from memest.config.setup import MAX_BATCH, Dtype, Loop, Precision, Setup
from memest.events import Phase
from memest.report.layers import STEP_PHASES
from memest.report.result import (
    NOT_MODELLED,
    Estimate,
    GpuFit,
    Interval,
    Origin,
    PeakMoment,
    Verdict,
)
from memest.units import format_size

__all__ = [
    "batch_count",
    "batch_sentence",
    "budget_sentence",
    "each_gpu",
    "format_count",
    "gpu_sentence",
    "interval_text",
    "moment_text",
    "peak_ranges_text",
    "place_text",
    "process_words",
    "range_text",
    "render_origins",
    "setup_items",
    "short_name",
    "trainer_words",
    "verdict_sentence",
    "verdict_sentences",
    "why_sentence",
]

_PHASES = {
    Phase.LOAD: "while the model is loaded",
    Phase.BATCH: "while the batch is moved to the GPU",
    Phase.SCORING: "while completions are scored",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.CLIP: "while gradients are clipped",
    Phase.OPTIMIZER: "in the optimizer step",
    Phase.ZERO_GRAD: "in zero_grad",
    Phase.EVALUATION: "in the evaluation",
    Phase.GENERATION: "in the generation",
    Phase.SAVE: "while a checkpoint is saved",
    Phase.RESUME: "while a checkpoint is resumed from",
}

_WIDEST_VALUE = 60
_LOOPS = {
    Loop.TRAINER: "transformers' Trainer",
    Loop.ACCELERATE: "accelerate loop",
    Loop.LIGHTNING: "Lightning's Trainer",
    Loop.PLAIN: "plain PyTorch loop",
}


def format_count(count: int) -> str:
    """Write a number of parameters for people.

    Example:
        >>> format_count(336_226_108)
        '336.2 million'
        >>> format_count(8_030_261_248)
        '8.03 billion'
        >>> format_count(1_500)
        '1,500'
    """
    if count >= 10**12:
        return f"{count / 10**12:.2f} trillion"
    if count >= 10**9:
        return f"{count / 10**9:.2f} billion"
    return f"{count / 10**6:.1f} million" if count >= 10**6 else f"{count:,}"


def range_text(between: Interval | GpuFit) -> str:
    """A range of a peak; empty where it is not known."""
    low, high = between.low_bytes, between.high_bytes
    return f"{format_size(low)} to {format_size(high)}" if high else ""


def interval_text(estimate: Estimate) -> str:
    """The range of the device peak, with its level where one is claimed."""
    between, level = range_text(estimate.interval), estimate.interval.level
    return between if level is None else f"{between} ({level:.0%} interval)"


def peak_ranges_text(estimate: Estimate) -> str:
    """The ranges of the allocator's peaks, with the share of runs that lie in each.

    That of the device peak stands in the first sentence; here where it claims a share too.
    """
    ranges = {"allocated": estimate.ranges.allocated, "reserved": estimate.ranges.reserved}
    if estimate.interval.level is not None:
        ranges["device"] = estimate.interval
    words = [f"{name} {range_text(interval)}" for name, interval in ranges.items()]
    levels = {interval.level for interval in ranges.values()}
    level = levels.pop() if len(levels) == 1 else None
    who = "range" if level is None else f"{level:.0%} of runs alike"
    return f"{who}: {', '.join(words)}"


def gpu_sentence(fit: GpuFit, model: str, *, between: str = "", each: str = "") -> str:
    """Whether a run fits on one GPU, or on each of several, in one sentence.

    Args:
        fit: the GPU and its verdict.
        model: name of the model.
        between: range of the device peak, empty if not known for this GPU.
        each: what :func:`each_gpu` says of the run.
    """
    need, have = format_size(fit.device_bytes), format_size(fit.usable_bytes)
    within = f"{f' ({between})' if between else ''}{each}"
    if fit.verdict is Verdict.FITS:
        spare, comma = format_size(fit.headroom_bytes), "," if each else ""
        return (
            f"Fits: {model} needs {need}{within}{comma} of the {have} of {fit.name}, "
            f"{spare} to spare."
        )
    if fit.verdict is Verdict.TIGHT:
        why = f", {fit.reason}" if fit.reason else ""
        return f"Tight: {model} needs about {need}{within} and {fit.name} has {have}{why}."
    if fit.verdict is Verdict.RELEASES_CACHE:
        takes = "would take" if fit.headroom_bytes < 0 else "needs"
        return (
            f"Fits by releasing cache: {model} {takes} {need}{within} and {fit.name} has "
            f"{have}; {fit.reason}."
        )
    if fit.verdict is Verdict.CANNOT_SAY:
        return (
            f"Cannot say: what is priced of {model} needs {need}{within} of the {have} of "
            f"{fit.name}; {fit.reason}."
        )
    short = f", {format_size(-fit.headroom_bytes)} too little" if fit.headroom_bytes < 0 else ""
    why = f"; {fit.reason}" if fit.reason else ""
    return f"Does not fit: {model} needs {need}{within} and {fit.name} has {have}{short}{why}."


def each_gpu(setup: Setup) -> str:
    """What the figures are of, where there are several GPUs; empty for one."""
    distributed = setup.distributed
    which = "each" if distributed.pp == 1 else "the fullest"
    return f" on {which} of {distributed.num_gpus} GPUs" if distributed.num_gpus > 1 else ""


def verdict_sentence(estimate: Estimate) -> str:
    """The answer in one sentence."""
    between = range_text(estimate.interval)
    if estimate.gpu is not None:
        each = each_gpu(estimate.setup)
        return gpu_sentence(estimate.gpu, estimate.model.id, between=between, each=each)
    need, each = format_size(estimate.peak.device_bytes), each_gpu(estimate.setup)
    sentence = f"{estimate.model.id} needs {need} of GPU memory{each} to train ({between})"
    return f"{sentence}{_unpriced_words(estimate)}."


def verdict_sentences(estimate: Estimate) -> list[str]:
    """The answer for each GPU that is named, and that for host memory where it was asked for."""
    each = each_gpu(estimate.setup)
    sentences = [
        verdict_sentence(estimate),
        *(
            gpu_sentence(fit, estimate.model.id, between=range_text(fit), each=each)
            for fit in estimate.named_gpus[1:]
        ),
    ]
    if estimate.life is not None and estimate.life.is_wanted:
        sentences.append(estimate.life.sentence)
    return sentences


def _unpriced_words(estimate: Estimate) -> str:
    unpriced = "; ".join(estimate.setup.unpriced)
    more = f", and more for what is not priced: {unpriced}" if unpriced else ""
    overpriced = "; ".join(estimate.setup.overpriced)
    less = f", and less, as not all that is priced is taken: {overpriced}" if overpriced else ""
    return more + less


def budget_sentence(estimate: Estimate, budget: int, verdict: Verdict) -> str:
    """Whether a run keeps to the memory it may take."""
    keeps = {
        Verdict.FITS: "keeps to",
        Verdict.TIGHT: "may take more than",
        Verdict.CANNOT_SAY: "may take more than",
        Verdict.DOES_NOT_FIT: "takes more than",
    }[verdict]
    need = format_size(estimate.peak.device_bytes)
    return (
        f"{verdict.value.capitalize()}: {estimate.model.id} {keeps} the {format_size(budget)} "
        f"allowed (--fail-over): it needs {need} ({range_text(estimate.interval)})"
        f"{each_gpu(estimate.setup)}{_unpriced_words(estimate)}."
    )


def batch_count(largest: int) -> str:
    """A largest batch as a number, "or more" where the search ended before the memory did."""
    return f"{largest:,} or more" if largest >= MAX_BATCH else f"{largest:,}"


def batch_sentence(estimate: Estimate) -> str:
    """The largest batch that runs on the named GPU; empty if it was not looked for."""
    largest, safe = estimate.max_batch, estimate.safe_batch
    if estimate.gpu is None or largest is None:
        return ""
    if largest == 0 and estimate.setup.overpriced:
        return "none for what is priced"
    if largest == 0:
        return f"none: not even a batch of {smallest_batch(estimate.setup)} fits"
    if largest >= MAX_BATCH:
        # where the search ended, not where the memory did
        most_text = batch_count(largest)
        certain = safe is None or safe == largest
        return most_text if certain else f"{most_text} expected, {safe or 'none'} is safe"
    if safe is None or safe == largest:
        return f"{largest}"
    if safe == 0 and estimate.setup.unpriced:
        return f"{largest} for what is priced, none is safe"
    if safe == 0:
        return f"{largest} expected, none is safe at the upper end of the range"
    return f"{largest} expected, {safe} is safe at the upper end of the range"


def moment_text(estimate: Estimate, *, operator: bool = True) -> str:
    """When and where the allocated peak is reached, and by which operator."""
    at = estimate.peak_at if operator else replace(estimate.peak_at, op="")
    return place_text(at, estimate.setup.grad_accum)


def why_sentence(estimate: Estimate) -> str:
    """When the run is fullest, and with what."""
    largest = max(estimate.breakdown, key=lambda row: row.bytes, default=None)
    sentence = f"Fullest {moment_text(estimate, operator=False)}"
    if largest is not None and estimate.peak.allocated_bytes:
        share = largest.bytes / estimate.peak.allocated_bytes
        sentence += f"; {share:.0%} of what is allocated is {largest.category.value} then"
        if estimate.has_many_logits:
            sentence += f", and {format_size(estimate.logits_bytes)} of it all are logits"
    return f"{sentence}."


def place_text(at: PeakMoment, grad_accum: int) -> str:
    """A moment of a run: phase, step, module and operator."""
    words = _PHASES[at.phase]
    if at.step:
        words += f" of step {at.step}"
        if grad_accum > 1 and at.phase not in STEP_PHASES and at.micro_step:
            words += f", micro-step {at.micro_step}"
    if at.module:
        words += f", in {at.module}"
    if at.op:
        words += f", at {at.op}"
    return words


_TRAINERS = {
    LogProbs.FUSED: "TRL",
    LogProbs.LOGITS: "TRL 1.6 to 1.13, with all logits",
    LogProbs.FLOAT32: "LLaMA-Factory, with all logits in float32",
    LogProbs.TORCHTUNE: "torchtune, with all logits in float32",
    LogProbs.SWIFT: "ms-swift, with all logits",
    LogProbs.VERL: "verl, with all logits",
}
"""Whose code has log-probabilities from there."""
_FUSED_SINCE = dict.fromkeys((Method.DPO, Method.IPO, Method.KTO), "1.15")
"""Releases of TRL before made all logits; a run on them has to say it."""


def trainer_words(setup: Setup) -> str:
    """Whose step a preference method's was taken to be, where releases differ much; else empty."""
    if setup.log_probs is not LogProbs.FUSED or setup.method not in _FUSED_SINCE:
        return ""
    return (
        f"as TRL {_FUSED_SINCE[setup.method]} and later train, without all logits; with an earlier "
        "release add --log-probs logits"
    )


def _method(setup: Setup) -> str:
    """What is trained for, and what stands beside the model."""
    critic = setup.rollouts is not None and setup.rollouts.critic
    name = "PPO" if critic else setup.method.upper().replace("-", " ")
    trainer = _TRAINERS[setup.log_probs]
    if setup.log_probs is LogProbs.FUSED and setup.method in _FUSED_SINCE:
        trainer = f"TRL {_FUSED_SINCE[setup.method]} and later"
    # one number a sequence has no logits of words
    is_reward = setup.method is Method.REWARD and not setup.values_tokens
    words = f"{name} by {trainer.split(',')[0] if is_reward else trainer}"
    if setup.rollouts is not None:
        two = "two " if setup.method.writes_pairs else ""
        beside = " and a critic in turn" if critic else ""
        words = f"{words}{beside}, {two}{_rollouts(setup.rollouts, setup.seq_len)}"
    if setup.precompute_ref_log_probs:
        return f"{words}, reference computed before"
    if not setup.has_reference:
        return words
    if setup.adapter is not None:
        return f"{words}, reference without the adapters"
    as_model = setup.ref_dtype is Dtype.AUTO or setup.distributed.zero  # DeepSpeed casts both
    dtype = "" if as_model else f"{setup.ref_dtype} "
    if not setup.has_reference_model:
        return f"{words}, reference on the host"
    follows = " that follows" if setup.sync_ref_model else ""
    return f"{words}, with a {dtype}reference model{follows}"


def _rollouts(rollouts: Rollouts, seq_len: int | None) -> str:
    """Who writes what is learnt from."""
    tokens = "" if seq_len is None else f" of {rollouts.completion_of(seq_len):,} tokens"
    engine = {
        Engine.MODEL: "the model itself",
        Engine.VLLM: f"vLLM with {rollouts.engine_share:g} of the GPU",
        Engine.SERVER: "vLLM elsewhere",
    }[rollouts.engine]
    sleeps = ", which sleeps else" if rollouts.engine_sleeps else ""
    return f"completions{tokens} by {engine}{sleeps}"


def _optimizer(setup: Setup) -> str:
    words = setup.optimizer
    if setup.optim_args:
        words += f" ({setup.optim_args})"
    if setup.optim_in_backward:
        words += " in backward"
    if setup.weight_decay:
        words += f", weight decay {setup.weight_decay:g}"
    return words


def process_words(setup: Setup) -> str:
    """What of the device's memory is not the allocator's."""
    several = setup.distributed.num_gpus > 1
    return "CUDA context, kernels and NCCL" if several else "CUDA context and kernels"


def _parallelism_items(setup: Setup) -> list[str]:
    """How the run is shared among GPUs."""
    distributed = setup.distributed
    if distributed.strategy is Strategy.NONE and distributed.pp > 1:
        tensor_items = [f"tensor parallel over {distributed.tp}"] if distributed.tp > 1 else []
        return [*_of_pipeline(distributed), *tensor_items]
    if distributed.strategy is Strategy.NONE and distributed.tp > 1:
        return [f"each of {distributed.num_gpus} GPUs", *_sharing_items(distributed)]
    if distributed.strategy is Strategy.NONE:
        return []
    names = {
        Strategy.DDP: "DDP",
        Strategy.FSDP: f"FSDP{distributed.fsdp_version} {distributed.fsdp.value}",
        Strategy.ZERO: f"ZeRO-{distributed.zero}",
    }
    items = [f"each of {distributed.num_gpus} GPUs" if distributed.num_gpus > 1 else "one GPU"]
    if distributed.pp > 1:
        items = _of_pipeline(distributed)
    items.append(names[distributed.strategy])
    items += _sharing_items(distributed)
    if distributed.cp > 1:
        part = "" if setup.seq_len is None else f", {setup.seq_len // distributed.cp} tokens each"
        items.append(f"sequences shared by {distributed.cp}{part}")
    if distributed.sp > 1:
        part = "" if setup.seq_len is None else f", {setup.seq_len // distributed.sp} tokens each"
        items.append(f"sequences and heads shared by {distributed.sp}{part}")
    if distributed.num_copies > 1:
        items.append(f"{distributed.num_copies} copies of {distributed.shard_ranks} shards")
    if distributed.fsdp_offload:
        items.append("offloaded to host memory")
    offloads = [
        what
        for what, on in (
            ("optimizer", distributed.offload_optimizer),
            ("parameters", distributed.offload_param),
        )
        if on
    ]
    if offloads:
        items.append(f"{' and '.join(offloads)} offloaded")
    return items


def _of_pipeline(distributed: Distributed) -> list[str]:
    return [
        f"the fullest of {distributed.num_gpus} GPUs",
        f"{distributed.pipeline_schedule} pipeline of {distributed.pp}",
        f"{distributed.microbatches} micro-batches",
    ]


def _sharing_items(distributed: Distributed) -> list[str]:
    """What of the model GPUs share, each with its part."""
    what = "tensor and sequence" if distributed.tp_sequence_parallel else "tensor"
    items = [f"{what} parallel over {distributed.tp}"] * (distributed.tp > 1)
    items += ["whole logits"] * (not distributed.tp_loss_parallel)
    return items + [f"experts shared by {distributed.ep}"] * (distributed.ep > 1)


def setup_items(setup: Setup, *, times: str = "×") -> list[str]:
    """The training setup in short phrases, what matters most first."""
    sizes = [f"batch {setup.batch}"]
    if setup.seq_len is not None:
        sizes.append(f"{setup.seq_len} tokens")
    if setup.image_size is not None:
        sizes.append(f"{setup.image_size} px")
    if setup.audio_seconds is not None:
        sizes.append(f"{setup.audio_seconds:g} s")
    items = [f" {times} ".join(sizes)]
    if setup.target_len is not None and setup.target_len != setup.seq_len:
        items.append(f"target {setup.target_len} tokens")
    if setup.grad_accum > 1:
        items.append(f"{setup.grad_accum} micro-batches a step")
    if setup.distributed.data_ranks > 1:
        items.append(f"{setup.effective_batch:,} samples a step on all GPUs")
    half = "mixed precision" if setup.computes_in_half else "autocast"
    items.append(
        "no autocast" if setup.precision is Precision.FP32 else f"{setup.precision.value} {half}"
    )
    if setup.loaded_dtype is not Dtype.AUTO:
        items.append(f"{setup.loaded_dtype.value} weights")
    if setup.quantization is not None:
        items.append(setup.quantization.words)
    if setup.adapter is not None:
        items.append(setup.adapter.words)
    if setup.master_weights:
        items.append("fp32 master weights")
    items.append("no optimizer" if setup.optimizer == "none" else _optimizer(setup))
    if setup.eval_batch is not None:
        predictions = (
            "" if setup.eval_samples is None else f", {setup.eval_samples:,} predictions kept"
        )
        items.append(f"evaluation in batches of {setup.eval_batch}{predictions}")
    if setup.generation is not None:
        items.append(setup.generation.words)
    items.append(
        "no checkpointing"
        if setup.checkpointing == "none"
        else f"checkpointing {setup.checkpointing}"
    )
    if setup.attn_implementation.value != "auto":
        items.append(f"{setup.attn_implementation.value} attention")
    if setup.channels_last:
        items.append("channels last")
    if setup.use_liger_kernel:
        items.append("Liger kernels")
    if setup.fused_loss:
        items.append(fused_loss_words(setup.fused_loss))
    if not setup.method.is_supervised:
        items.append(_method(setup))
    if setup.neftune_noise_alpha is not None:
        items.append("NEFTune")
    if setup.torch_compile:
        items.append("torch.compile")
    if setup.freeze:
        items.append(f"frozen: {', '.join(setup.freeze)}")
    if setup.frozen_parts:
        items.append(f"parts that do not train: {', '.join(setup.frozen_parts)}")
    if setup.casts:
        items.append(f"dtypes after loading: {', '.join(setup.casts)}")
    items.append(_LOOPS[setup.loop])
    items.extend(_parallelism_items(setup))
    versions = setup.software.to_dict()
    items.extend(f"{name} {version}" for name, version in versions.items())
    return items


def render_origins(
    origins: Sequence[Origin], ignored: Sequence[str], not_modelled: Sequence[str]
) -> str:
    """The table of ``--explain``, and what was left aside, ready for stdout.

    Args:
        origins: of all values; those that are no defaults get a row each, but for what stands
            among the keys below it too.
        ignored: keys with why they do not matter.
        not_modelled: keys with what is missing.
    """
    origins = [each for each in origins if each.source != NOT_MODELLED]
    told = [each for each in origins if each.source != "default"]
    rows = [("option", "value", "origin")]
    rows += [(each.option, _value(each.value), each.source) for each in told]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = ["Values and where they come from"]
    lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if len(told) < len(origins):
        others = len(origins) - len(told)
        lines.append(f"  The other {others} have their defaults: --json names them.")
    for title, remarks in (("Not modelled", not_modelled), ("Ignored", ignored)):
        if remarks:
            lines += ["", title, *(f"  {_printable(remark)}" for remark in remarks)]
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines)


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = _printable(text)
    return text if len(text) <= _WIDEST_VALUE else f"{text[: _WIDEST_VALUE - 3]}..."


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


_MAKER = re.compile(r"\b(NVIDIA|GeForce|Tesla|AMD|Instinct) ")
_SOCKET = re.compile(r"[- ](SXM\d?|HBM\d\w?)\b")


@functools.cache
def short_name(gpu: str) -> str:
    """A GPU's name as people say it: ``RTX 4090``, ``T4``, ``A100-40GB``."""
    short = _MAKER.sub("", gpu)
    shorter = _SOCKET.sub("", short)
    same = [spec for spec in list_gpus() if _SOCKET.sub("", _MAKER.sub("", spec.name)) == shorter]
    return shorter if len(same) < 2 else short
