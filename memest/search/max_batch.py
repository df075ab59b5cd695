"""``memest.max_batch``: the largest batch, sequence length or image size that a GPU takes.

Sizes are tried by replays, see :class:`memest.estimation.verdict.LargestSizeSearch`. Batches are
answered by formulas after a few traces. Of lengths the same holds for those whose remainders by 128
agree, so multiples of 128 are searched first and the lengths between two of them by bisection, with
a trace for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memest.catalog.gpu_counts import split_gpu_count
from memest.config.idle_options import (
    refuse_stopped,
    smallest_batch,
    smallest_micro_batch,
)
from memest.config.life import refuse_host_memory
from memest.config.options import (
    argument,
    merge_options,
    no_gpu,
    read_effective_batch,
    samples_of_each,
    split_inputs,
)
from memest.config.setup import MAX_BATCH, MAX_GRAD_ACCUM, MAX_IMAGE_SIZE, Setup, choose
from memest.errors import ConfigError, MemestError
from memest.estimation.gpu_target import TargetGpu, target_gpus
from memest.estimation.notes import (
    assumed_completions,
    notes_of_each,
    one_of_several,
    scope_note,
)
from memest.estimation.profiler import Profiler
from memest.estimation.verdict import SizeTrial
from memest.profiles.axes import last_holding
from memest.report.max_batch_result import (
    CurveEnd,
    EffectiveBatch,
    Largest,
    MaxBatch,
    Multiple,
    SizeAxis,
)
from memest.report.result import Verdict
from memest.search.size_trials import SizeTrials, with_size
from memest.sharding.nccl import communicators

if TYPE_CHECKING:
    import torch

    from memest.workspaces.operator_call import GpuTraits

__all__ = ["max_batch"]

Progress = Callable[[str], None]

_STEPS = {SizeAxis.BATCH: 1, SizeAxis.SEQ_LEN: 128, SizeAxis.IMAGE_SIZE: 32}
_ROUND = {SizeAxis.BATCH: (8,), SizeAxis.SEQ_LEN: (64, 128), SizeAxis.IMAGE_SIZE: ()}
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
    calibration: str | None = None,
    of: SizeAxis | str = SizeAxis.BATCH,
    effective_batch: int | str | None = None,
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
        calibration: as for :func:`memest.estimate`.
        of: ``batch``, ``seq-len`` or ``image-size``.
        effective_batch: samples of an optimizer step, on all GPUs, that accumulation shall reach.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``, and
            ``inputs``, ``loss``, ``step_fn``, ``dims`` and ``model_args`` of a module of one's
            own, as for :func:`memest.estimate`.

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
    calibration = argument("calibration", calibration, options)
    gpu, options = split_gpu_count(gpu, setup, options)
    module_inputs, options = split_inputs(options)
    axis: SizeAxis = choose("--of", of, SizeAxis)
    setup = merge_options(setup, options)
    refuse_host_memory(setup.life, "max-batch")
    if not gpu and gpu_memory is None:
        raise no_gpu("max-batch")
    samples = None if effective_batch is None else _samples(effective_batch, axis, setup)
    targets = target_gpus(
        setup,
        gpu=gpu,
        gpu_memory=gpu_memory,
        device_context=device_context,
        calibration=calibration,
    ).named_gpus
    profiler = Profiler.of(
        model,
        module_inputs=module_inputs,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    setup = profiler.with_own_parts(setup, options)
    search = _size_search(profiler, setup, axis, targets[0].traits)
    answers, notes = zip(*(search.on(target, samples) for target in targets), strict=True)
    of_runs = notes_of_each(dict(zip((card.name for card in targets), notes, strict=True)))
    typical_setup = with_size(search.request, axis, max(answers[0].largest, search.smallest))
    resolved_setup = profiler.resolve(typical_setup)
    return MaxBatch(
        model=profiler.name,
        of=axis,
        step=1 if axis is SizeAxis.SEQ_LEN else search.step,
        setup=resolved_setup,
        effective_batch=samples,
        answers=answers,
        assumptions=(
            *profiler.assumptions(typical_setup),
            *assumed_completions(resolved_setup),
            *_ranges(targets, setup),
        ),
        notes=tuple(_notes(targets, axis, search, setup, of_runs)),
    )


def _samples(effective_batch: int | str, of: SizeAxis, setup: Setup) -> int:
    """The effective batch, where one can be asked for."""
    samples = read_effective_batch(effective_batch)
    if of is not SizeAxis.BATCH:
        raise ConfigError(
            f"--effective-batch is reached by micro-batches, and --of {of} keeps the batch: drop "
            "one of the two."
        )
    if setup.grad_accum != 1:
        raise ConfigError(
            f"--effective-batch finds the number of micro-steps, and --grad-accum "
            f"{setup.grad_accum} gives it: drop one of the two."
        )
    samples_of_each(samples, setup)
    return samples


def _ranges(targets: Sequence[TargetGpu], setup: Setup) -> list[str]:
    return list(
        dict.fromkeys(
            f"safe: at the upper end of the range of the device peak, {_basis(target, setup)}"
            for target in targets
        )
    )


def _basis(target: TargetGpu, setup: Setup) -> str:
    basis = target.context.basis
    if target.calibration is not None:
        gpus = ", ".join(target.calibration.calibration.provenance.gpus)
        basis = f"calibrated on runs of {gpus}"
    capability = target.spec.compute_capability
    group = communicators(setup.distributed, capability if isinstance(capability, tuple) else None)
    return basis if group is None else f"{basis}; {group.basis}"


def _notes(
    targets: Sequence[TargetGpu],
    of: SizeAxis,
    search: _SizeSearch,
    setup: Setup,
    of_runs: Sequence[str],
) -> list[str]:
    notes = [target.spec.match_note for target in targets if target.spec.match_note]
    if of is SizeAxis.IMAGE_SIZE:
        notes.append(f"image sizes that are multiples of {search.step} were looked at.")
    if of is SizeAxis.BATCH and search.step > 1:
        notes.append(
            f"batches that are multiples of {search.step} were looked at: TRL stops where "
            f"--num-generations ({setup.completions_of_a_prompt} completions of a prompt) does not "
            "divide what all GPUs write at once (--batch x --steps-per-generation or "
            "--grad-accum, of each GPU)."
        )
    notes += of_runs
    notes += one_of_several(setup)
    notes.append(scope_note(setup))
    return notes


# -- the search -----------------------------------------------------------------------------------


def _size_search(profiler: Profiler, request: Setup, of: SizeAxis, gpu: GpuTraits) -> _SizeSearch:
    """What there is to know of a model before the search on a GPU."""
    field = of.field
    # lengths that leave no room for what is generated behind them are found by asking
    resolved_setup = profiler.resolve(replace(request, generation=None), gpu)
    start = getattr(resolved_setup, field)
    distributed = request.distributed
    pieces = distributed.sequence_pieces
    if of is SizeAxis.SEQ_LEN and pieces > 1:
        flag = f"--cp {distributed.cp}" if distributed.cp > 1 else f"--sp {distributed.sp}"
        if distributed.tp_sequence_parallel:
            flag = f"--tp {distributed.tp} --tp-sequence-parallel"
        raise ConfigError(
            f"--of seq-len looks at all lengths, and {flag} takes multiples "
            f"of {pieces} alone: name them, as in memest sweep --over "
            f"seq_len={64 * pieces},{128 * pieces},{256 * pieces}."
        )
    if of is SizeAxis.SEQ_LEN and request.batching is not None:
        raise ConfigError(
            "--of seq-len looks for one length, and --lengths and --dataset say those of the "
            "samples: drop them, or look for the largest batch (--of batch). How they are cut "
            "varies in memest sweep --over seq-len=512,1024."
        )
    if of is SizeAxis.BATCH:
        unit = resolved_setup.batch_step
        most = MAX_BATCH // unit * unit
        request = replace(request, batch=start)
        smallest = smallest_batch(resolved_setup)
        return _SizeSearch(profiler, request, of, unit, smallest, start, most, CurveEnd.SEARCH)
    refuse_stopped(request)
    if start is None:
        start = 128
    _check_has_effect(profiler, with_size(request, of, start), of, start)

    def takes(size: int) -> bool:
        try:
            same: bool = getattr(profiler.resolve(with_size(request, of, size)), field) == size
        except MemestError:
            return False
        return same

    step, end = _STEPS[of], CurveEnd.MODEL
    highest = profiler.limit(request, field)
    if highest is None:
        ceiling = _LONGEST if of is SizeAxis.SEQ_LEN else MAX_IMAGE_SIZE
        highest = (
            ceiling if takes(ceiling) else last_holding(lambda k: takes(k * step), ceiling // step)
        )
        highest, end = (
            (ceiling, CurveEnd.SEARCH) if highest == ceiling else (highest * step, CurveEnd.MODEL)
        )
    if highest < step:
        step = 1
    smallest = 1 if of is SizeAxis.SEQ_LEN else step
    return _SizeSearch(profiler, request, of, step, smallest, start, highest, end)


def _check_has_effect(profiler: Profiler, request: Setup, of: SizeAxis, size: int) -> None:
    """Refuse to vary what the model's inputs do not have."""
    for assumption in profiler.assumptions(request):
        if assumption.startswith(f"--{of} ") and "has no effect" in assumption:
            raise ConfigError(
                f"--of {of}: the model's inputs have no such size (--{of} {size} has no effect on "
                "them). Look for the largest batch, --of batch."
            )


@dataclass(frozen=True, slots=True)
class _SizeSearch:
    """A search that can be made on any GPU.

    Attributes:
        profiler: of the model.
        request: the setup whose size is looked for.
        of: the size.
        step: multiples of it are cheap to ask for; of lengths alone others are looked at.
        smallest: size that is looked at.
        start: where to begin.
        highest: where to end.
        end: why there.
    """

    profiler: Profiler
    request: Setup
    of: SizeAxis
    step: int
    smallest: int
    start: int
    highest: int
    end: CurveEnd

    def on(self, target: TargetGpu, samples: int | None) -> tuple[Largest, list[str]]:
        """The answer for a GPU, and what there is to know of the run at that size.

        Args:
            target: the GPU.
            samples: the effective batch that was asked for, None if there is none.
        """
        say = self.profiler.progress
        if say is not None:
            say(f"looking for the largest {self.of} on {target.name}")
        trials = self._trials(target)
        largest, safe = self._largest(trials)
        tried_sizes = trials.tried_sizes
        if self.of is SizeAxis.BATCH:
            largest, safe = self._climb(trials, largest, safe)
            trials.look_below(largest, safe)
        multiples = tuple(
            Multiple(
                of=number,
                largest=trials.multiple(number, largest, lambda trial: trial.runs),
                safe=trials.multiple(number, safe, lambda trial: trial.fits),
            )
            for number in _ROUND[self.of]
            if largest >= number
        )
        effective = (
            ()
            if samples is None
            else tuple(
                self._effective(target, samples_of_each(samples, self.request), largest, safe)
            )
        )
        answer = Largest(
            gpu=target.name,
            usable_bytes=target.usable_bytes,
            largest=largest,
            safe=safe,
            end=CurveEnd.GPU if largest < self.highest else self.end,
            curve=trials.curve(tried_sizes, largest, safe, self.highest),
            multiples=multiples,
            unsteady=trials.failed_below(largest),
            effective=effective,
        )
        return answer, trials.notes(max(largest, self.smallest))

    def _trials(self, target: TargetGpu) -> SizeTrials:
        return SizeTrials(self.profiler, self.request, self.of, self.step, target, self.smallest)

    def _largest(self, trials: SizeTrials) -> tuple[int, int]:
        """(the largest that runs, the largest that surely fits)."""
        step, search = self.step, trials.coarse_search(self.highest // self.step)
        runs, fits = (k * step for k in search.largest(max(self.start // step, 1)))
        if self.of is not SizeAxis.SEQ_LEN or step == 1:
            return runs, fits

        def exact(low: int, holds: Callable[[SizeTrial], bool], highest: int) -> int:
            top = min(low + step - 1, highest)
            return last_holding(lambda size: holds(trials.at(size)), top, low)

        runs = exact(runs, lambda trial: trial.runs, self.highest)
        return runs, exact(fits, lambda trial: trial.fits, runs)

    def _climb(self, trials: SizeTrials, largest: int, safe: int) -> tuple[int, int]:
        """The same, where sizes just above do not run but larger ones next to them do.

        Where blocks hardly fit, memory does not grow evenly with the size, and where the search
        ends would depend on where it began.
        """
        largest = trials.climb(largest, lambda trial: trial.runs, self.highest)
        return largest, trials.climb(safe, lambda trial: trial.fits, largest)

    # -- an effective batch

    def _effective(
        self, target: TargetGpu, samples: int, largest: int, safe: int
    ) -> Iterable[EffectiveBatch]:
        """Ways for one GPU to its samples: in equal micro-batches, and rounded up."""
        if (safe or largest) >= samples:
            # nothing to accumulate
            yield self._effective_batch(target, samples, 1)
            return
        # gradients that are kept between micro-steps leave less for a micro-batch
        request = replace(self.request, grad_accum=2)
        unit, start = self.request.batch_unit, max(safe or largest, 1)
        search = replace(
            self,
            request=request,
            step=unit,
            smallest=smallest_micro_batch(self.request, samples),
            start=start,
            highest=samples,
        )
        runs, fits = search._largest(search._trials(target))
        largest_size = fits or runs
        sizes = [
            n
            for n in range(largest_size, search.smallest - 1, -1)
            if samples % n == 0 and n % unit == 0
        ]
        exact_batch = self._first_fitting(
            target, ((n, samples // n) for n in sizes), surely=fits > 0
        )
        if exact_batch is not None:
            yield exact_batch
        if self.request.method.generates:
            return  # num_generations divides what is asked for, and not what is above it
        step_counts = range(-(-samples // largest_size), samples + 1) if largest_size else range(0)
        splits = ((-(-samples // k), k) for k in step_counts[:_ATTEMPTS])
        rounded_batch = self._first_fitting(
            target, (split for split in splits if split[0] >= search.smallest), surely=fits > 0
        )
        if rounded_batch is not None and (
            exact_batch is None or rounded_batch.num_micro_steps < exact_batch.num_micro_steps
        ):
            yield rounded_batch

    def _first_fitting(
        self, target: TargetGpu, splits: Iterable[tuple[int, int]], *, surely: bool
    ) -> EffectiveBatch | None:
        """The first (micro-batch, micro-steps) that fits: each further step may take a little."""
        legal = ((size, steps) for size, steps in splits if steps <= MAX_GRAD_ACCUM)
        for size, steps in itertools.islice(legal, _ATTEMPTS):
            effective_batch = self._effective_batch(target, size, steps)
            if effective_batch.verdict is Verdict.FITS or (
                not surely and effective_batch.verdict is not Verdict.DOES_NOT_FIT
            ):
                return effective_batch
        return None

    def _effective_batch(
        self, target: TargetGpu, micro_batch: int, num_micro_steps: int
    ) -> EffectiveBatch:
        request = replace(self.request, grad_accum=min(num_micro_steps, _PRICED_STEPS))
        point = SizeTrials(self.profiler, request, self.of, 1, target).point(micro_batch)
        return EffectiveBatch(
            micro_batch=micro_batch,
            num_micro_steps=num_micro_steps,
            num_gpus=request.distributed.data_ranks,
            device_bytes=point.device_bytes,
            verdict=point.verdict,
        )
