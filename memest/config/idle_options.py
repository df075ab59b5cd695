"""Options that were given and change nothing, or not what their name says: one table of them.

What cannot be beside what is refused (:mod:`memest.config.pairs`); sizes that a model's inputs do
not have are said where its batch is planned.

Sources: ``Trainer.__init__`` ("Using fsdp only works in distributed training.") and
``evaluation_loop`` of transformers 5.23; ``_init_core_state`` of torch 2.13, where FSDP1 takes
``NO_SHARD`` for one rank; ``is_tf32_supported`` of ``torch.cuda``; ``GRPOConfig.__post_init__`` and
``KTOTrainer.__init__`` of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from memest.config.kinds import Fsdp, LogProbs, Loop, Method, Strategy, Task
from memest.config.life import Life, LifePart
from memest.config.quantization import Format, Quantization
from memest.config.training_options import MAX_BATCH, MAX_GRAD_ACCUM
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = [
    "IdleNote",
    "idle_options",
    "refuse_stopped",
    "smallest_batch",
    "smallest_micro_batch",
    "why_stopped",
]

_WITH_LABELS = (
    Task.AUTO,
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.IMAGE_CLASSIFICATION,
    Task.IMAGE_SEGMENTATION,
    Task.AUDIO_CLASSIFICATION,
)
"""Heads whose size the number of labels may decide."""
_TF32_SINCE = (8, 0)

Capability = tuple[int, int]


def _life(setup: TrainingRun) -> Life:
    return setup.life or Life()


def _gathers(setup: TrainingRun) -> bool:
    return _life(setup).stage3_gather_16bit_weights_on_model_save


class IdleNote(str):
    """What is said of such an option; an answer in one sentence tells it too."""

    __slots__ = ()


class Idle(NamedTuple):
    """An option that does nothing under a condition, or not what one expects of it.

    Attributes:
        applies: whether a setup, its sizes and task as the model has them, has it on a GPU of a
            compute capability.
        text: what to say; ``{s}`` is the setup.
        instead: what to write, where the trainer refuses it before its first step, whatever the
            GPU; empty where the run goes on.
    """

    applies: Callable[[TrainingRun, Capability], object]
    text: str
    instead: str = ""


_ROWS = (
    Idle(
        lambda s, _: s.use_reentrant is not None and s.checkpointing == "none",
        "--use-reentrant has no effect: nothing is recomputed without --checkpointing",
    ),
    Idle(
        lambda s, _: s.must_reenter and s.use_reentrant is False and s.checkpointing != "none",
        "--no-use-reentrant has no effect: TRL's trainers recompute reentrantly where adapters "
        "train under ZeRO-3, whatever they are told",
    ),
    Idle(
        lambda s, _: s.num_labels is not None and s.task not in _WITH_LABELS,
        "--num-labels {s.num_labels} has no effect: a {s.task} head has no labels to count",
    ),
    Idle(
        lambda s, _: s.optimizer == "none" and s.weight_decay is not None,
        "--weight-decay {s.weight_decay:g} has no effect: there is no optimizer (--optim none)",
    ),
    Idle(
        lambda s, _: s.optimizer == "none" and s.max_grad_norm,
        "--max-grad-norm {s.max_grad_norm:g} has no effect: without an optimizer (--optim none) "
        "no step follows that gradients would be clipped for",
    ),
    Idle(
        lambda s, _: s.completions_at_once % s.completions_of_a_prompt,
        "{s.completions_at_once} completions at once are no multiple of the "
        "{s.completions_of_a_prompt} of each prompt that {s.method} compares, and TRL stops",
        instead="Write a --batch that {s.batch_step} divides, or change --grad-accum, "
        "--steps-per-generation, --num-gpus or --num-generations",
    ),
    Idle(
        lambda s, _: s.log_probs is LogProbs.VERL and s.distributed.strategy is not Strategy.FSDP,
        "--log-probs verl without --fsdp: verl's actor is sharded by FSDP, on one GPU too",
        instead="Write --fsdp full_shard --fsdp-mixed-precision beside it",
    ),
    Idle(
        # TRL's own; and a loss that needs no divergence is overpriced (apo_zero_unpaired)
        lambda s, _: (
            s.method is Method.KTO
            and s.batch == 1
            and s.log_probs in (LogProbs.FUSED, LogProbs.LOGITS)
            and not s.overpriced
        ),
        "--batch 1 with --method kto: TRL stops, because its divergence is that of an answer and "
        "another one of the batch",
        instead="Write --batch 2",
    ),
    Idle(
        # swift/pipelines/train/kto.py of ms-swift 4.6
        lambda s, _: (
            s.method is Method.KTO
            and s.log_probs is LogProbs.SWIFT
            and s.batch * s.grad_accum * s.distributed.num_gpus == 1
            and not s.overpriced
        ),
        "--batch 1 with --method kto: ms-swift stops, because a step of one answer has no other to "
        "be compared with",
        instead="Write --batch 2 or --grad-accum 2",
    ),
    Idle(
        lambda s, _: s.steps_in_backward and s.max_grad_norm,
        "--max-grad-norm {s.max_grad_norm:g} has no effect: an optimizer that steps in backward "
        "leaves no gradients to clip",
    ),
    Idle(
        lambda s, _: (
            s.quantization is not None
            and s.quantization.format is Format.BNB_4BIT
            and s.quantization.threshold != Quantization(format=Format.BNB_4BIT).threshold
        ),
        "--llm-int8-threshold {s.quantization.threshold:g} has no effect: it is LLM.int8's, and "
        "this base has 4 bits",
    ),
    Idle(
        lambda s, _: s.eval_accumulation_steps is not None and s.eval_samples is None,
        "--eval-accumulation-steps {s.eval_accumulation_steps} moves losses alone to the host: "
        "predictions are kept where --eval-samples says of how many samples",
    ),
    Idle(
        lambda s, _: s.padded and s.seq_len is None and s.audio_seconds is None,
        "--padded has no effect: a batch of this model has no attention mask",
    ),
    Idle(
        lambda s, _: s.channels_last and s.seq_len is not None and s.image_size is None,
        "--channels-last has no effect: a model of text has no convolutions over images",
    ),
    Idle(
        lambda s, gpu: s.tf32 and gpu >= _TF32_SINCE,
        "--tf32 changes the speed of matmuls, not the memory",
    ),
    Idle(
        lambda s, gpu: s.tf32 and gpu < _TF32_SINCE,
        "--tf32 has no effect on this GPU: TF32 came with compute capability 8.0",
    ),
    Idle(
        lambda s, _: s.distributed.num_gpus == 1 and s.distributed.zero,
        "--zero {s.distributed.zero} on one GPU has nobody to share with: nothing is cut, and what "
        "DeepSpeed adds (flat copies, buckets) is there all the same and priced. It pays with "
        "--num-gpus, or with offloading",
    ),
    Idle(
        lambda s, _: (
            s.distributed.num_gpus == 1
            and s.distributed.fsdp is not Fsdp.NONE
            and s.distributed.fsdp_version == 2
        ),
        "--fsdp {s.distributed.fsdp} on one GPU cuts nothing, and every unit is copied into its "
        "buffers all the same, as priced. It pays with --num-gpus, or with offloading; the Trainer "
        "takes it in a distributed launch alone (torchrun, accelerate launch)",
    ),
    Idle(
        lambda s, _: (
            s.distributed.num_gpus == 1
            and s.distributed.fsdp is not Fsdp.NO_SHARD
            and s.distributed.flattens
        ),
        "--fsdp {s.distributed.fsdp} on one GPU is NO_SHARD, which FSDP1 takes there itself: "
        "nothing is cut or gathered. The Trainer takes it in a distributed launch alone (torchrun, "
        "accelerate launch)",
    ),
    Idle(
        lambda s, _: s.distributed.fsdp_cpu_ram_efficient_loading and s.quantization is None,
        "--fsdp-cpu-ram-efficient-loading has no effect on GPUs: a model that is not quantised "
        "waits in host memory anyway",
    ),
    Idle(
        lambda s, _: _life(s).fsdp_state_dict_type and s.distributed.fsdp is Fsdp.NONE,
        "--fsdp-state-dict-type {s.life.fsdp_state_dict_type} has no effect: without --fsdp there "
        "are no shards to write",
    ),
    Idle(
        lambda s, _: (
            _life(s).fsdp_state_dict_type
            and s.distributed.fsdp is not Fsdp.NONE
            and not {LifePart.SAVE, LifePart.RESUME} & set(_life(s).parts)
        ),
        "--fsdp-state-dict-type {s.life.fsdp_state_dict_type} has no effect: nothing is asked "
        "about a checkpoint. Add --with save, --with resume or both",
    ),
    Idle(
        lambda s, _: _gathers(s) and s.distributed.zero != 3,
        "--stage3-gather-16bit-weights-on-model-save has no effect: --zero 3 alone has parts of "
        "weights to gather",
    ),
    Idle(
        lambda s, _: _gathers(s) and s.distributed.zero == 3 and s.loop is not Loop.TRAINER,
        "--stage3-gather-16bit-weights-on-model-save has no effect: the Trainer gathers weights "
        "when it saves, a loop of one's own (--loop {s.loop}) writes parts",
    ),
    Idle(
        lambda s, _: (
            _gathers(s)
            and s.distributed.zero == 3
            and s.loop is Loop.TRAINER
            and LifePart.SAVE not in _life(s).parts
        ),
        "--stage3-gather-16bit-weights-on-model-save has no effect: nothing is asked about saving. "
        "Add --with save",
    ),
    Idle(
        lambda s, _: _life(s).processes_per_node and not _life(s).is_asked,
        "--processes-per-node {s.life.processes_per_node} has no effect: nothing is asked about "
        "host memory. Add --host-memory 64GiB, or --with save",
    ),
    Idle(
        lambda s, _: (
            _life(s).is_asked and (_life(s).processes_per_node or 0) > s.distributed.num_gpus
        ),
        "--processes-per-node {s.life.processes_per_node} is more than the run has: "
        "{s.distributed.num_gpus} of --num-gpus are taken",
    ),
)


def idle_options(setup: TrainingRun, capability: Capability) -> Iterator[IdleNote]:
    """What to say of options without the effect that their names promise, in sentences.

    Args:
        setup: the options, with sizes and task as the model has them.
        capability: of the GPU.
    """
    for row in _ROWS:
        if row.applies(setup, capability):
            instead = f" {row.instead}." if row.instead else ""
            yield IdleNote(f"{row.text}.{instead}".format(s=setup))


def why_stopped(setup: TrainingRun) -> tuple[str, str]:
    """Why a run's trainer stops before the first step, and what to write instead; else empty.

    Where something of a run cannot be told, as in a script, that may be what keeps it going.

    Args:
        setup: the options, as they were asked for.
    """
    if not setup.unpriced and not setup.overpriced:
        for row in _ROWS:
            if row.instead and row.applies(setup, (0, 0)):
                return row.text.format(s=setup), row.instead.format(s=setup)
    return "", ""


def refuse_stopped(setup: TrainingRun) -> None:
    """Refuse a run that its trainer stops before the first step: no memory is a word on it.

    Args:
        setup: the options, as they were asked for.

    Raises:
        ConfigError: such a run.
    """
    why, instead = why_stopped(setup)
    if why:
        raise ConfigError(f"{why}. {instead}.")


def smallest_batch(setup: TrainingRun) -> int:
    """The smallest batch with which the trainer of a run begins, its other options as they are."""
    step = setup.batch_step
    sizes = range(step, MAX_BATCH + 1, step)
    return next((n for n in sizes if not why_stopped(replace(setup, batch=n))[0]), step)


def smallest_micro_batch(setup: TrainingRun, samples: int) -> int:
    """The smallest batch with which the trainer begins, where steps of so many samples add it up.

    Args:
        setup: the other options.
        samples: of an optimizer step, of each GPU.
    """
    unit = setup.batch_unit

    def begins(batch: int) -> bool:
        grad_accum = min(-(-samples // batch), MAX_GRAD_ACCUM)
        return not why_stopped(replace(setup, batch=batch, grad_accum=grad_accum))[0]

    return next(filter(begins, range(unit, samples + 1, unit)), unit)
