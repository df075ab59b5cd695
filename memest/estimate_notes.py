"""What an estimate says besides its numbers: what was assumed, what to know, what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memest.cards import Card, Cards
from memest.epochs import length_notes
from memest.events import Category
from memest.found import Found
from memest.generated import generation_notes
from memest.installed import unverified
from memest.loaded import host_notes
from memest.needs import Needs
from memest.result import Row
from memest.setup import Attention, Loop, Setup
from memest.units import format_size

__all__ = [
    "assumed",
    "not_modelled",
    "noted",
    "notes_of_each",
    "one_of_several",
    "paged_notes",
    "run_notes",
]


def not_modelled(setup: Setup) -> str:
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
    said = f"sizes are those of one GPU: with {count}, an optimizer step has {count} times as many"
    return [f"{said} samples."]


def assumed(said: Sequence[str], setup: Setup, cards: Cards) -> list[str]:
    """What was decided in the user's place, in sentences.

    Args:
        said: what the model's side decided.
        setup: the run.
        cards: the GPUs of the question.
    """
    main = cards.main
    out = list(said)
    if other := unverified():
        out.append(other)
    if not cards.named or main.name != main.spec.name:
        out.append(f"kernels and workspaces as on {main.spec.name} (name a GPU with --gpu)")
    if not cards.named and setup.attn_implementation is Attention.FLASH_ATTENTION_2:
        out.append("GPUs before compute capability 8.0 are left out: FlashAttention 2 needs it")
    out.append(
        f"loop: {setup.loop}, optimizer {setup.optim}, {setup.num_steps} steps simulated, "
        f"torch {cards.torch[0]}.{cards.torch[1]}"
    )
    return out


def _evaluation(setup: Setup, needs: Needs) -> Iterator[str]:
    """What there is to know of the evaluation."""
    spread = setup.distributed
    if spread.sp > 1:
        yield (
            "evaluation: Ulysses stands aside, so every GPU evaluates whole sequences with all "
            "heads, in batches of its own (accelerate asks DeepSpeed for disable_in_eval)."
        )
    if spread.tp > 1 and setup.eval_samples is not None:
        yield (
            f"evaluation: the {spread.tp} GPUs that share layers evaluate the same batch, and the "
            "Trainer gathers it from each of them: so many copies of the predictions are kept."
        )
    if setup.eval_samples is None:
        yield (
            "evaluation: the loss alone is kept. Where compute_metrics is given, the Trainer keeps "
            "predictions on the GPU: --eval-samples says of how many samples."
        )
    elif setup.eval_accumulation_steps is None and needs.reserved_bytes > 2 * needs.allocated_bytes:
        yield (
            "evaluation: predictions are concatenated batch by batch, each time into a larger "
            "block, and the allocator keeps the smaller ones until memory runs out: the reserved "
            "peak is what an endless card would show. --eval-accumulation-steps bounds it."
        )


def paged_notes(main: Card, needs: Needs) -> list[str]:
    """What becomes of states in managed memory, where there are any."""
    if not needs.managed_bytes:
        return []
    size, both = format_size(needs.managed_bytes), needs.device_bytes + needs.managed_bytes
    said = (
        f"{size} of optimizer states are in managed memory, which no counter of torch shows. On a "
        f"GPU with room the device holds them too, {format_size(both)} in all"
    )
    left = "the verdict is about the rest, which cannot move to the host."
    if both > main.usable_bytes:
        short = format_size(both - main.usable_bytes)
        left = (
            f"{main.name} has {short} less than that, so pages move between host and GPU in every "
            f"step, which costs time. {left.capitalize()}"
        )
    return [f"{said}; {left}"]


def notes_of_each(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """The notes of several answers, each once, with who has it where not all do.

    Args:
        notes: by the name of the answer.
    """
    names: dict[str, list[str]] = {}
    for name, own in notes.items():
        for note in own:
            names.setdefault(note, []).append(name)
    out = []
    for note, having in names.items():
        others = [name for name in notes if name not in having]
        who = "; ".join(having)
        if len(others) == 1 and len(having) > 1:
            who = f"all but {others[0]}"
        out.append(f"{who}: {note}" if others else note)
    return out


def run_notes(found: Found) -> list[str]:
    """What there is to know of a run whatever the GPU, in sentences."""
    setup = found.setup
    batches = setup.num_steps * found.program.enough(setup.grad_accum)
    return [
        *found.notes, *length_notes(setup), *generation_notes(setup), *found.spread_notes,
        *host_notes(setup, found.short_stream, batches),
    ]  # fmt: skip


def noted(found: Found, main: Card, rows: tuple[Row, ...], needs: Needs) -> list[str]:
    """What there is to know of a run besides its numbers, in sentences.

    Args:
        found: the run.
        main: the GPU.
        rows: the breakdown at the peak.
        needs: what the run takes there.
    """
    setup = found.setup
    notes = run_notes(found)
    if main.spec.match_note:
        notes.append(main.spec.match_note)
    if needs.corrected is not None:
        notes += needs.corrected.notes
    notes += paged_notes(main, needs)
    if setup.eval_batch is not None:
        notes += _evaluation(setup, needs)
    if setup.tf32:
        notes.append("tf32 changes the speed of matmuls, not the memory.")
    copies = sum(row.bytes for row in rows if row.category is Category.AUTOCAST_COPIES)
    if copies * 20 > sum(row.bytes for row in rows):
        notes.append(
            f"autocast keeps the fp32 weights and adds {format_size(copies)} of half-precision "
            "copies of them at the peak: at small batches that can outweigh what the smaller "
            "activations save."
        )
    version = setup.software.transformers
    if (
        version
        and version < (4, 54)
        and setup.loop is Loop.TRAINER
        and (setup.optim == "adamw_torch_fused")
    ):
        usual = "adamw_hf" if version < (4, 36) else "adamw_torch"
        notes.append(
            f"the Trainer of transformers {version[0]}.{version[1]} took --optim {usual} unless "
            "told otherwise; this is priced with adamw_torch_fused."
        )
    if setup.grad_accum > 1:
        notes.append(
            "gradient accumulation keeps the gradients alive during the next forward, so it is not "
            "free: the peak moves from the first micro-step to the second."
        )
    notes.append(not_modelled(setup))
    return notes
