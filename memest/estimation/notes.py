"""What an estimate says besides its numbers: what was assumed, what to know, what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memest.config.idle_options import idle_options
from memest.config.installed import release, unverified_note
from memest.config.setup import Loop, Setup, ZeroGrad, ZeroGradAt
from memest.config.software import Software
from memest.estimation.assumption import Usual
from memest.estimation.batches import batch_sizes
from memest.estimation.gpu_target import TargetGpu, TargetGpus
from memest.estimation.kernel_notes import bf16_notes
from memest.estimation.left_open import gpu_words
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.estimation.whole_run import generation_notes, length_notes
from memest.events import Category
from memest.profiles.known_profiles import shipped_software
from memest.profiles.stream import Stream
from memest.report.result import Row
from memest.units import format_size

__all__ = [
    "assumed_completions",
    "assumptions_of",
    "host_notes",
    "newer_note",
    "notes_of",
    "notes_of_each",
    "one_of_several",
    "paged_notes",
    "run_notes",
    "scope_note",
]


def scope_note(setup: Setup) -> str:
    """What no answer covers; a communicator is part of one on several GPUs."""
    nccl = "of NCCL, " if setup.distributed.num_gpus == 1 else ""
    return (
        f"not modelled: memory of other processes, {nccl}and of libraries that allocate on their "
        "own."
    )


def one_of_several(setup: Setup) -> list[str]:
    """What to say where samples of a step are counted and there are several GPUs."""
    count = setup.distributed.data_ranks
    if count == 1:
        return []
    text = f"sizes are those of one GPU: with {count}, an optimizer step has {count} times as many"
    return [f"{text} samples."]


def assumed_completions(setup: Setup) -> list[str]:
    """How long completions are taken to be, where a run writes some and nobody says it."""
    return [] if setup.rollouts is None else setup.rollouts.assumed(setup.seq_len)


def assumptions_of(notes: Sequence[str], setup: Setup, targets: TargetGpus) -> list[str]:
    """What was decided in the user's place, in sentences.

    Args:
        notes: what the model's side decided.
        setup: the run.
        targets: the GPUs of the question.
    """
    sentences = [*notes, *assumed_completions(setup)]
    if other := unverified_note():
        sentences.append(other)
    if newer := newer_note(setup.software):
        sentences.append(newer)
    if words := gpu_words(targets):
        sentences.append(words)
    sentences.append(
        Usual(
            f"loop: {setup.loop}, optimizer {setup.optimizer}, {setup.num_steps} steps simulated, "
            f"torch {targets.torch[0]}.{targets.torch[1]}"
        )
    )
    return sentences


def newer_note(software: Software) -> str:
    """What to say where a declared release is newer than the one traced with; empty otherwise.

    Earlier ones are traced with what they did otherwise (``trace/legacy``), and of later ones no
    code is here.

    Args:
        software: as it was declared.
    """
    newer = []
    for package, declared in software.to_dict().items():
        traced = release(package) or shipped_software().get(package, "")
        numbers = tuple(int(part) for part in traced.split(".")[:2] if part.isdigit())
        if numbers and getattr(software, package) > numbers:
            newer.append(f"{package} {declared} by the code of {traced}")
    if not newer:
        return ""
    return f"traced {' and '.join(newer)}: what changed in between is priced where memest knows it"


def _evaluation(setup: Setup, peaks: Peaks) -> Iterator[str]:
    """What there is to know of the evaluation."""
    distributed = setup.distributed
    if distributed.sp > 1:
        yield (
            "evaluation: Ulysses stands aside, so every GPU evaluates whole sequences with all "
            "heads, in batches of its own (accelerate asks DeepSpeed for disable_in_eval)."
        )
    if distributed.tp > 1 and setup.eval_samples is not None:
        yield (
            f"evaluation: the {distributed.tp} GPUs that share layers evaluate the same batch, "
            "and the "
            "Trainer gathers it from each of them: so many copies of the predictions are kept."
        )
    if setup.eval_samples is None:
        yield (
            "evaluation: priced is one that keeps the loss alone. Where compute_metrics is given, "
            "the Trainer keeps predictions on the GPU: --eval-samples says of how many samples."
        )
    elif setup.eval_accumulation_steps is None and peaks.reserved_bytes > 2 * peaks.allocated_bytes:
        yield (
            "evaluation: predictions are concatenated batch by batch, each time into a larger "
            "block, and the allocator keeps the smaller ones until memory runs out: the reserved "
            "peak is what an endless card would show. --eval-accumulation-steps bounds it."
        )


def paged_notes(main: TargetGpu, peaks: Peaks) -> list[str]:
    """What becomes of states in managed memory, where there are any."""
    if not peaks.managed_bytes:
        return []
    size, total = format_size(peaks.managed_bytes), peaks.device_bytes + peaks.managed_bytes
    text = (
        f"{size} of optimizer states are in managed memory, which no counter of torch shows. On a "
        f"GPU with room the device holds them too, {format_size(total)} in all"
    )
    left = "the verdict is about the rest, which cannot move to the host."
    if total > main.usable_bytes:
        shortfall = format_size(total - main.usable_bytes)
        left = (
            f"{main.name} has {shortfall} less than that, so pages move between host and GPU in "
            f"every step, which costs time. {left.capitalize()}"
        )
    return [f"{text}; {left}"]


def notes_of_each(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """The notes of several answers, each once, with who has it where not all do.

    Args:
        notes: by the name of the answer.
    """
    names: dict[str, list[str]] = {}
    for name, own_notes in notes.items():
        for note in own_notes:
            names.setdefault(note, []).append(name)
    out = []
    for note, holders in names.items():
        other_names = [name for name in notes if name not in holders]
        label = "; ".join(holders)
        if len(other_names) == 1 and len(holders) > 1:
            label = f"all but {other_names[0]}"
        out.append(f"{label}: {note}" if other_names else note)
    return out


def run_notes(run: Run) -> list[str]:
    """What there is to know of a run whatever the GPU, in sentences."""
    setup = run.setup
    batches = setup.num_steps * run.program.enough_micro_steps(setup.grad_accum)
    return [
        *run.notes,
        *idle_options(setup, run.gpu.capability),
        *length_notes(setup),
        *generation_notes(setup),
        *run.spread_notes,
        *host_notes(setup, run.short_stream, batches),
    ]


def notes_of(run: Run, main: TargetGpu, rows: tuple[Row, ...], peaks: Peaks) -> list[str]:
    """What there is to know of a run besides its numbers, in sentences.

    Args:
        run: the run.
        main: the GPU.
        rows: the breakdown at the peak.
        peaks: what the run takes there.
    """
    setup = run.setup
    notes = run_notes(run)
    if main.spec.match_note:
        notes.append(main.spec.match_note)
    notes += bf16_notes(run, main)
    notes += peaks.notes
    notes += paged_notes(main, peaks)
    if setup.eval_batch is not None:
        notes += _evaluation(setup, peaks)
    copies = sum(row.bytes for row in rows if row.category is Category.AUTOCAST_COPIES)
    if copies * 20 > sum(row.bytes for row in rows):
        notes.append(
            f"autocast keeps the fp32 weights and adds {format_size(copies)} of half-precision "
            "copies of them at the peak: at small batches that can outweigh what the smaller "
            "activations save."
        )
    if _keeps_old_gradients(setup):
        notes.append(
            "gradients are dropped between forward and backward, so those of a step are alive "
            "during the next one's forward, with and without accumulation."
        )
    elif setup.grad_accum > 1:
        notes.append(
            "gradient accumulation keeps the gradients alive during the next forward, so it is not "
            "free: the peak moves from the first micro-step to the second."
        )
    if setup.loop is Loop.LIGHTNING and setup.checkpointing != "none":
        notes.append(
            "the model is taken to be in training mode: from_pretrained leaves one in eval mode, "
            "in which nothing is recomputed, and Lightning does not call train()."
        )
    notes.append(scope_note(setup))
    return notes


def _keeps_old_gradients(setup: Setup) -> bool:
    """Whether gradients are dropped behind the next step's forward, if they are dropped at all."""
    late = setup.loop is Loop.LIGHTNING or setup.zero_grad_at is ZeroGradAt.BEFORE_BACKWARD
    return late and setup.zero_grad is not ZeroGrad.ZERO


def host_notes(setup: Setup, stream: Stream, num_batches: int) -> list[str]:
    """Host memory of batches that wait, where the setup says how they are loaded."""
    loading = setup.data_loading
    if loading is None:
        return []
    sizes = batch_sizes(stream, num_batches)
    exclusions = "the dataset, and workers' own processes, are not counted"
    if sizes is None:
        return [f"host memory of batches is unknown: the step makes inputs itself; {exclusions}."]
    parts = [
        f"{format_size(nbytes)} {place}"
        for nbytes, place in (
            (loading.pinned_bytes(sizes), "pinned (each tensor rounded up to a power of two)"),
            (loading.shared_bytes(sizes), "in shared memory (/dev/shm)"),
            (loading.pageable_bytes(sizes), "of the batch that is being made"),
        )
        if nbytes
    ]
    count = "1 batch" if loading.num_loaded == 1 else f"{loading.num_loaded} batches"
    size_text = format_size(sum(sizes))
    text = f"host memory of each process: {count} of {size_text} loaded ahead: {', '.join(parts)}"
    return [f"{text}; {exclusions}."]
