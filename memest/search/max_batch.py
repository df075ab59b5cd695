"""``memest.max_batch``: the largest batch, sequence length or image size that a GPU takes.

Sizes are tried by replays, see :class:`memest.fit.Search`. Batches are answered by formulas after
a few traces. Of lengths the same holds for those whose remainders by 128 agree, so multiples of
128 are searched first and the lengths between two of them by bisection, with a trace for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memest.cards import Card, cards_of
from memest.errors import ConfigError, MemestError
from memest.estimate_notes import not_modelled, notes_of_each, one_of_several
from memest.feed import feed_of
from memest.fit import Tried
from memest.limits import EffectiveBatch, End, Largest, MaxBatch, Multiple, Of
from memest.options import given_setup, no_gpu, read_effective_batch
from memest.result import Verdict
from memest.search.ground import Ground, with_size
from memest.setup import MAX_BATCH, MAX_GRAD_ACCUM, MAX_IMAGE_SIZE, Setup, choose
from memest.sharding.nccl import communicators
from memest.sizes import last
from memest.tracing import Tracer

if TYPE_CHECKING:
    import torch

__all__ = ["max_batch"]

Progress = Callable[[str], None]

_STEPS = {Of.BATCH: 1, Of.SEQ_LEN: 128, Of.IMAGE_SIZE: 32}
_ROUND = {Of.BATCH: (8,), Of.SEQ_LEN: (64, 128), Of.IMAGE_SIZE: ()}
_LONGEST = 1 << 20
"""Where the search for a length ends if the model sets no limit."""
_PRICED_STEPS = 4096
"""Micro-steps that are simulated at most: further ones repeat those before."""
_ATTEMPTS = 8
"""Ways to an effective batch that are tried, of each kind."""


def max_batch(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    profile: str | None = None,
    of: Of | str = Of.BATCH,
    effective_batch: int | str | None = None,
    inputs: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    step_fn: Callable[..., Any] | str | None = None,
    dims: Mapping[str, int] | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> MaxBatch:
    """Look for the largest batch that fits, or the longest samples at the batch that is given.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration; ``options`` are another way to give it. The size that
            is looked for is where the search begins.
        gpu: name of a GPU, ``local``, or several: one answer each.
        gpu_memory: bytes the GPU has, in place of the catalogue's figure.
        device_context: as for :func:`memest.estimate`.
        profile: calibration profile, as for :func:`memest.estimate`.
        of: ``batch``, ``seq-len`` or ``image-size``.
        effective_batch: samples of an optimizer step that shall be reached by accumulation.
        inputs: as for :func:`memest.estimate`.
        loss: as for :func:`memest.estimate`.
        step_fn: as for :func:`memest.estimate`.
        dims: as for :func:`memest.estimate`.
        model_args: as for :func:`memest.estimate`.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.

    Returns:
        For each GPU the largest size that runs with the CUDA context expected, the largest that
        surely fits at the upper end of its range, and memory over sizes.

    Raises:
        ConfigError: no GPU, or options that contradict each other.
        MemestError: as for :func:`memest.estimate`.

    Example:
        >>> import memest
        >>> answer = memest.max_batch("prajjwal1/bert-tiny", gpu="t4", seq_len=128, of="seq-len")
        >>> answer.largest, answer.answers[0].end.value
        (512, 'model')
    """
    wanted: Of = choose("--of", of, Of)
    setup = given_setup(setup, options)
    if not gpu and gpu_memory is None:
        raise no_gpu("max-batch")
    samples = None if effective_batch is None else _samples(effective_batch, wanted, setup)
    cards = cards_of(setup, gpu, gpu_memory, device_context, profile).named
    tracer = Tracer.of(
        model, feed=feed_of(inputs, loss, step_fn, dims, model_args),
        trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    setup = tracer.with_own_batch(setup, options)
    hunt = _hunt(tracer, setup, wanted)
    answers, notes = zip(*(hunt.on(card, samples) for card in cards), strict=True)
    of_runs = notes_of_each(dict(zip((card.name for card in cards), notes, strict=True)))
    typical = with_size(hunt.asked, wanted, max(answers[0].largest, hunt.smallest))
    return MaxBatch(
        model=tracer.name,
        of=wanted,
        step=1 if wanted is not Of.IMAGE_SIZE else hunt.step,
        setup=tracer.resolve(typical),
        effective_batch=samples,
        answers=answers,
        assumptions=(*tracer.assumptions(typical), *_ranges(cards, setup)),
        notes=tuple(_notes(cards, wanted, hunt, setup, of_runs)),
    )


def _samples(effective_batch: int | str, of: Of, setup: Setup) -> int:
    """The effective batch, where one can be asked for."""
    wanted = read_effective_batch(effective_batch)
    if of is not Of.BATCH:
        raise ConfigError(
            f"--effective-batch is reached by micro-batches, and --of {of} keeps the batch: drop "
            "one of the two."
        )
    if setup.grad_accum != 1:
        raise ConfigError(
            f"--effective-batch finds the number of micro-steps, and --grad-accum "
            f"{setup.grad_accum} gives it: drop one of the two."
        )
    return wanted


def _ranges(cards: Sequence[Card], setup: Setup) -> list[str]:
    return list(
        dict.fromkeys(
            f"safe: at the upper end of the range of the device peak, {_basis(card, setup)}"
            for card in cards
        )
    )


def _basis(card: Card, setup: Setup) -> str:
    basis = card.context.basis
    if card.calibration is not None:
        gpus = ", ".join(card.calibration.profile.provenance.gpus)
        basis = f"calibrated on runs of {gpus}"
    capability = card.spec.compute_capability
    group = communicators(setup.distributed, capability if isinstance(capability, tuple) else None)
    return basis if group is None else f"{basis}; {group.basis}"


def _notes(
    cards: Sequence[Card], of: Of, hunt: _Hunt, setup: Setup, of_runs: Sequence[str]
) -> list[str]:
    notes = [card.spec.match_note for card in cards if card.spec.match_note]
    if of is Of.IMAGE_SIZE:
        notes.append(f"image sizes that are multiples of {hunt.step} were looked at.")
    notes += of_runs
    notes += one_of_several(setup)
    notes.append(not_modelled(setup))
    return notes


# -- the search -----------------------------------------------------------------------------------


def _hunt(tracer: Tracer, asked: Setup, of: Of) -> _Hunt:
    """What there is to know of a model before the search on a GPU."""
    field = of.field
    resolved = tracer.resolve(asked)
    start = getattr(resolved, field)
    spread = asked.distributed
    pieces = spread.sequence_pieces
    if of is Of.SEQ_LEN and pieces > 1:
        flag = f"--cp {spread.cp}" if spread.cp > 1 else f"--sp {spread.sp}"
        if spread.tp_sequence_parallel:
            flag = f"--tp {spread.tp} --tp-sequence-parallel"
        raise ConfigError(
            f"--of seq-len looks at all lengths, and {flag} takes multiples "
            f"of {pieces} alone: name them, as in memest sweep --over "
            f"seq_len={64 * pieces},{128 * pieces},{256 * pieces}."
        )
    if of is Of.BATCH:
        return _Hunt(tracer, replace(asked, batch=start), of, 1, start, MAX_BATCH, End.SEARCH)
    if start is None:
        start = 128
    _check_has_effect(tracer, with_size(asked, of, start), of, start)

    def takes(size: int) -> bool:
        try:
            taken: bool = getattr(tracer.resolve(with_size(asked, of, size)), field) == size
        except MemestError:
            return False
        return taken

    step, end = _STEPS[of], End.MODEL
    highest = tracer.limit(asked, field)
    if highest is None:
        ceiling = _LONGEST if of is Of.SEQ_LEN else MAX_IMAGE_SIZE
        highest = ceiling if takes(ceiling) else last(lambda k: takes(k * step), ceiling // step)
        highest, end = (ceiling, End.SEARCH) if highest == ceiling else (highest * step, End.MODEL)
    if highest < step:
        step = 1
    return _Hunt(tracer, asked, of, step, start, highest, end)


def _check_has_effect(tracer: Tracer, asked: Setup, of: Of, size: int) -> None:
    """Refuse to vary what the model's inputs do not have."""
    for said in tracer.assumptions(asked):
        if said.startswith(f"--{of} ") and "has no effect" in said:
            raise ConfigError(
                f"--of {of}: the model's inputs have no such size (--{of} {size} has no effect on "
                "them). Look for the largest batch, --of batch."
            )


@dataclass(frozen=True, slots=True)
class _Hunt:
    """A search that can be made on any GPU.

    Attributes:
        tracer: of the model.
        asked: the setup whose size is looked for.
        of: the size.
        step: multiples of it are cheap to ask for.
        start: where to begin.
        highest: where to end.
        end: why there.
    """

    tracer: Tracer
    asked: Setup
    of: Of
    step: int
    start: int
    highest: int
    end: End

    @property
    def smallest(self) -> int:
        """The smallest size that is looked at."""
        return self.step if self.of is Of.IMAGE_SIZE else 1

    def on(self, card: Card, samples: int | None) -> tuple[Largest, list[str]]:
        """The answer for a GPU, and what there is to know of the run at that size.

        Args:
            card: the GPU.
            samples: the effective batch that was asked for, None if there is none.
        """
        say = self.tracer.progress
        if say is not None:
            say(f"looking for the largest {self.of} on {card.name}")
        ground = Ground(self.tracer, self.asked, self.of, self.step, card)
        largest, safe = self._largest(ground)
        tried = ground.tried
        if self.of is Of.BATCH:
            largest, safe = self._climbed(ground, largest, safe)
            ground.look_below(largest, safe)
        multiples = tuple(
            Multiple(
                of=number,
                largest=ground.multiple(number, largest, lambda tried: tried.runs),
                safe=ground.multiple(number, safe, lambda tried: tried.fits),
            )
            for number in _ROUND[self.of]
            if largest >= number
        )
        effective = () if samples is None else tuple(self._effective(card, samples, largest, safe))
        answer = Largest(
            gpu=card.name,
            usable_bytes=card.usable_bytes,
            largest=largest,
            safe=safe,
            end=End.GPU if largest < self.highest else self.end,
            curve=ground.curve(tried, largest, safe, self.highest),
            multiples=multiples,
            unsteady=ground.failed_below(largest),
            effective=effective,
        )
        return answer, ground.notes(max(largest, self.smallest))

    def _largest(self, ground: Ground) -> tuple[int, int]:
        """(the largest that runs, the largest that surely fits)."""
        step, search = self.step, ground.coarse(self.highest // self.step)
        runs, fits = (k * step for k in search.largest(max(self.start // step, 1)))
        if step == 1 or self.of is Of.IMAGE_SIZE:
            return runs, fits

        def exact(low: int, holds: Callable[[Tried], bool], highest: int) -> int:
            top = min(low + step - 1, highest)
            return last(lambda size: holds(ground.at(size)), top, low)

        runs = exact(runs, lambda tried: tried.runs, self.highest)
        return runs, exact(fits, lambda tried: tried.fits, runs)

    def _climbed(self, ground: Ground, largest: int, safe: int) -> tuple[int, int]:
        """The same, where sizes just above do not run but larger ones next to them do.

        Where blocks hardly fit, memory does not grow evenly with the size, and where the search
        ends would depend on where it began.
        """
        largest = ground.climb(largest, lambda tried: tried.runs, self.highest)
        return largest, ground.climb(safe, lambda tried: tried.fits, largest)

    # -- an effective batch

    def _effective(
        self, card: Card, samples: int, largest: int, safe: int
    ) -> Iterable[EffectiveBatch]:
        """Ways to reach an effective batch: in equal micro-batches, and rounded up."""
        if (safe or largest) >= samples:
            # nothing to accumulate
            yield self._way(card, samples, 1)
            return
        # gradients that are kept between micro-steps leave less for a micro-batch
        asked = replace(self.asked, grad_accum=2)
        hunt = replace(self, asked=asked, start=max(safe or largest, 1), highest=samples)
        runs, fits = hunt._largest(Ground(self.tracer, asked, self.of, 1, card))
        most = fits or runs
        sizes = [n for n in range(most, 0, -1) if samples % n == 0]
        exact = self._first(card, ((n, samples // n) for n in sizes), surely=fits > 0)
        if exact is not None:
            yield exact
        fewest = range(-(-samples // most), samples + 1) if most else range(0)
        rounded = self._first(
            card, ((-(-samples // k), k) for k in fewest[:_ATTEMPTS]), surely=fits > 0
        )
        if rounded is not None and (
            exact is None or rounded.num_micro_steps < exact.num_micro_steps
        ):
            yield rounded

    def _first(
        self, card: Card, ways: Iterable[tuple[int, int]], *, surely: bool
    ) -> EffectiveBatch | None:
        """The first (micro-batch, micro-steps) that fits: each further step may take a little."""
        legal = ((size, steps) for size, steps in ways if steps <= MAX_GRAD_ACCUM)
        for size, steps in itertools.islice(legal, _ATTEMPTS):
            way = self._way(card, size, steps)
            if way.verdict is Verdict.FITS or (
                not surely and way.verdict is not Verdict.DOES_NOT_FIT
            ):
                return way
        return None

    def _way(self, card: Card, micro_batch: int, num_micro_steps: int) -> EffectiveBatch:
        asked = replace(self.asked, grad_accum=min(num_micro_steps, _PRICED_STEPS))
        point = Ground(self.tracer, asked, self.of, 1, card).point(micro_batch)
        return EffectiveBatch(
            micro_batch=micro_batch, num_micro_steps=num_micro_steps,
            device_bytes=point.device_bytes, verdict=point.verdict,
        )  # fmt: skip
