"""``memest.advise``: the fastest ways to train a model on a GPU with a given effective batch.

Every combination of checkpointing, precision, optimizer and attention that may be used is asked
for its largest micro-batch, by bisection; what is missing from the effective batch is accumulated.
So the card is filled with the micro-batch first and accumulation makes up the rest, as
transformers' guide to training on one GPU recommends, and what else a plan does is done because it
costs less time than it saves or because nothing fits without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.gpu_counts import split_gpu_count
from memest.catalog.gpus import gpu_names
from memest.config.life import refuse_host_memory
from memest.config.options import (
    argument,
    find_option,
    is_harmless,
    no_gpu,
    read_effective_batch,
    samples_of_each,
)
from memest.config.rollouts import Engine
from memest.config.setup import Precision, Setup
from memest.errors import ConfigError, MemestError, MissingDependencyError
from memest.estimation.gpu_target import Place
from memest.estimation.kernel_notes import Emulated
from memest.report.findings import Advice, Plan, PlanEngine
from memest.report.result import Verdict
from memest.search.combos import (
    SAME_TRAINING,
    Candidate,
    Combo,
    Finder,
    Freedom,
    asleep,
    combos,
    lighter,
    sharded,
    without_logits,
)
from memest.search.cost import NOT_TIMED, Probe
from memest.search.plan_words import (
    arguments_of,
    changed_training,
    own_arguments_of,
    steps_of,
    trainer_of,
)
from memest.search.profile import profile as make_profile
from memest.search.suggest import suggestions_of

if TYPE_CHECKING:
    import torch

__all__ = ["advise", "names_precision"]

Progress = Callable[[str], None]

WORTH = 1.05
"""A plan further from the training asked for, or with more samples, must be faster by this to be
shown beside one that is not."""
_DECIDED = ("batch", "grad_accum")


def advise(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    effective_batch: int | str,
    gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    calibration: str | None = None,
    any_precision: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Advice:
    """Rank the ways to train a model on one GPU with an effective batch.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration; ``options`` are another way to give it. Micro-batch and
            accumulation are what is looked for.
        effective_batch: samples of one optimizer step, on all GPUs; where micro-batches do not
            divide it, the nearest above is taken and said.
        gpu: name of the GPU, or ``local``.
        gpu_memory: memory PyTorch can have, for a GPU that the catalogue does not know.
        device_context: as for :func:`memest.estimate`.
        calibration: as for :func:`memest.estimate`.
        any_precision: any autocast precision that the GPU has may be used where it is faster.
            Otherwise one that is named is kept unless nothing fits with it, and where none is,
            bf16 is tried besides fp32, or fp16 on a GPU without bf16.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: what all plans share; ``inputs``, ``loss``, ``step_fn``, ``dims`` and
            ``model_args`` of a module of one's own among them, as for :func:`memest.estimate`.

    Returns:
        The plans, best first; none where nothing fits, and then the closest one. Where none surely
        fits that trains as asked, what would fit with adapters or on more GPUs.

    Raises:
        ConfigError: no GPU, an impossible effective batch, or an option that is to be found.
        MemestError: as for :func:`memest.estimate`.
    """
    samples = read_effective_batch(effective_batch)
    gpu, options = split_gpu_count(gpu, setup, options)
    gpus = gpu_names(gpu)
    place = Place(
        gpu=gpus,
        gpu_memory=gpu_memory,
        device_context=device_context,
        calibration=argument("calibration", calibration, options),
    )
    if not gpus and gpu_memory is None:
        raise no_gpu("advise")
    if len(gpus) > 1:
        raise ConfigError(
            f"memest advise plans for one GPU, not {len(gpus)}: ask once for each of "
            f"{', '.join(gpus)}."
        )
    for name, value in options.items():
        if not is_harmless(name, value) and find_option(name).name in _DECIDED:
            raise ConfigError(
                f"{name} is what memest advise looks for: give --effective-batch, the samples of "
                "one optimizer step, in its place."
            )
    profile = make_profile(
        model,
        setup,
        trust_remote_code=trust_remote_code,
        progress=progress,
        **options,
    )
    refuse_host_memory(profile.setup.life, "advise")
    if profile.setup.distributed.pp > 1:
        raise ConfigError(
            f"memest advise orders plans by their time, which is {NOT_TIMED}: ask "
            "memest max-batch, or memest compare."
        )
    # plans are looked for among what is priced; what is not weighs on all of them alike
    named = profile.setup
    profile.setup = replace(named, unpriced=(), overpriced=())
    of_each = samples_of_each(samples, profile.setup)
    finder = Finder(Probe(profile, place, vary=("batch",)), of_each)
    freedom = Freedom.ANY if any_precision else Freedom.KEPT
    if not any_precision and setup is None and not names_precision(profile.setup, options):
        freedom = Freedom.OPEN
    advice = _Search(finder, freedom).advice()
    if not any(plan.verdict is Verdict.FITS and not plan.changes_training for plan in advice.plans):
        profile.setup = replace(profile.setup, batch=of_each, grad_accum=1)
        otherwise = suggestions_of(profile, place, same_method=False)
        advice = replace(advice, otherwise=otherwise)
    return replace(advice, unpriced=named.unpriced, overpriced=named.overpriced)


def names_precision(setup: Setup, options: Mapping[str, Any]) -> bool:
    """Whether options, or a file among them, say which autocast runs."""
    named = {
        find_option(name).field
        for name, value in options.items()
        if not is_harmless(name, value) and value not in (None, False)
    }
    return setup.precision is not Precision.FP32 or "precision" in named


class _Search:
    """Widens the choice step by step, as long as there is something to gain."""

    def __init__(self, finder: Finder, freedom: Freedom) -> None:
        self._finder = finder
        self._probe = finder.probe
        self._request = finder.probe.profile.setup
        self._freedom = freedom
        self._notes: dict[str, None] = {}
        self._left_out: dict[str, list[str]] = {}
        """What was refused, by the reason."""
        self._refusal: MemestError | None = None

    def advice(self) -> Advice:
        """All plans, ranked."""
        combinations, others = combos(self._probe, self._freedom)
        candidates = self._try(combinations)
        if not _fits(candidates) and self._has_many_logits(candidates):
            candidates += self._try_until_one(without_logits(self._request, combinations))
        if not _fits([c for c in candidates if c.engine_share is None]):
            candidates += self._try(asleep(self._request, combinations))
        if not _fits(candidates):
            shards = sharded(self._request, combinations)
            candidates += (made := self._try(shards))
            combinations = shards if made else combinations
        if others and not _fits(candidates):
            candidates += self._try(others)
            combinations = [*combinations, *others]
        if not self._is_whole(candidates):
            candidates += self._try(lighter(combinations))
        if not candidates and self._refusal is not None:
            raise self._refusal
        fitting = [c for c in candidates if c.verdict is not Verdict.DOES_NOT_FIT]
        best = [c for c in fitting if not any(self._beats(d, c) for d in fitting)]
        best.sort(key=self._rank)
        closest = None if best else max(candidates, key=lambda c: c.headroom_bytes)
        fastest = self._seconds(best[0] if closest is None else closest)
        plans = tuple(self._plan(c, fastest, candidates) for c in best)
        miss = None if closest is None else self._plan(closest, fastest, candidates)
        return self._answer(plans, miss)

    def _try(self, combinations: Sequence[Combo]) -> list[Candidate]:
        """What each combination offers; those that a model or software refuses are noted."""
        candidates: list[Candidate] = []
        for combo in combinations:
            if combo.checkpointing != "none" and self._is_whole(candidates, combo):
                continue  # the whole batch fits without recomputing
            if self._is_whole(candidates) and not self._is_as_requested(combo):
                continue  # nor is another implementation of the same needed
            try:
                candidates += self._finder.candidates(combo)
            except MemestError as error:
                # what is not installed may be missing for some of them alone
                asked = combo == combinations[0] and not (combo.fsdp or combo.loss)
                if asked and not isinstance(error, MissingDependencyError):
                    raise
                self._refusal = self._refusal or error
                self._left_out.setdefault(str(error), []).append(combo.words())
        return candidates

    def _try_until_one(self, combinations: Sequence[Combo]) -> list[Candidate]:
        """What the first combination offers that neither the model nor software refuses."""
        for combo in combinations:
            with suppress(MemestError):
                return self._finder.candidates(combo)
        return []

    def _has_many_logits(self, candidates: Sequence[Candidate]) -> bool:
        """Whether logits are a large part of what comes closest."""
        if not candidates:
            return False
        return max(candidates, key=lambda c: c.headroom_bytes).estimate.has_many_logits

    def _is_as_requested(self, combo: Combo) -> bool:
        """Whether optimizer and attention are those asked for."""
        request = self._request
        return (combo.optim, combo.attention) == (request.optimizer, request.attn_implementation)

    def _is_whole(self, candidates: Sequence[Candidate], combo: Combo | None = None) -> bool:
        """Whether the whole effective batch surely fits at once, without checkpointing."""
        return any(
            c.verdict is Verdict.FITS
            and c.grad_accum == 1
            and c.combo.checkpointing == "none"
            and c.engine_share is None
            and (combo is None or replace(combo, checkpointing="none") == c.combo)
            for c in candidates
        )

    def _beats(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a plan leaves no reason for another one.

        It is as certain, as close to what was asked for and to the effective batch, and as fast.
        Being nearer or more certain settles it then; else, of plans that surely fit the other
        one must have the larger micro-batch to be of interest, of tight ones it must take less
        memory.
        """
        if candidate is other:
            return False
        distance, its_distance = self._distance(candidate), self._distance(other)
        certain, its_certain = (c.verdict is Verdict.FITS for c in (candidate, other))
        if distance > its_distance or certain < its_certain or candidate.samples > other.samples:
            return False
        nearer = (distance, candidate.samples) < (its_distance, other.samples)
        patience = WORTH if nearer else 1.0
        if distance == its_distance and candidate.combo.engine_sleeps != other.combo.engine_sleeps:
            return False  # less of an engine, or one that wakes up: which is faster is not known
        if self._seconds(candidate) > patience * self._seconds(other):
            return False
        if nearer or certain > its_certain:
            return True
        if certain:
            return candidate.batch >= other.batch
        return candidate.headroom_bytes >= other.headroom_bytes

    def _distance(self, candidate: Candidate) -> int:
        """How far a plan is from what was asked for: shares, the engine, precision, optimizer."""
        request = self._request
        free = self._freedom is not Freedom.KEPT
        precise = free or candidate.combo.precision is request.precision
        same = candidate.combo.optim in (request.optimizer, SAME_TRAINING.get(request.optimizer))
        combo = candidate.combo
        share = candidate.engine_share is not None or combo.engine_sleeps or combo.fsdp != ""
        return (1 if share else 0) + (0 if precise else 2) + (0 if same else 4)

    def _rank(self, candidate: Candidate) -> tuple[bool, int, float, int]:
        return (
            candidate.verdict is not Verdict.FITS,
            self._distance(candidate),
            self._seconds(candidate),
            -candidate.batch,
        )

    def _seconds(self, candidate: Candidate) -> float:
        return self._probe.seconds_per_sample(**candidate.changes())

    def _plan(self, candidate: Candidate, fastest: float, candidates: Sequence[Candidate]) -> Plan:
        return Plan(
            batch=candidate.batch,
            grad_accum=candidate.grad_accum,
            estimate=candidate.estimate,
            relative_time=None if self._probe.untimed() else self._seconds(candidate) / fastest,
            changes_training=changed_training(candidate, self._finder, self._freedom),
            steps=steps_of(candidate, self._finder, candidates, self._freedom),
            written_for=trainer_of(candidate),
            arguments=arguments_of(candidate),
            own_arguments=own_arguments_of(candidate),
            engine=self._engine(candidate),
        )

    def _engine(self, candidate: Candidate) -> PlanEngine | None:
        asked = self._request.rollouts
        if asked is None or asked.engine is not Engine.VLLM:
            return None
        return PlanEngine(
            share=candidate.engine_share or asked.engine_share,
            asked_share=asked.engine_share,
            largest_share=candidate.largest_engine_share,
        )

    def _answer(self, plans: tuple[Plan, ...], closest: Plan | None) -> Advice:
        best_plan = plans[0] if plans else closest
        assert best_plan is not None
        estimate = best_plan.estimate
        assert estimate.gpu is not None
        for reason, refused in self._left_out.items():
            self._notes[f"left out {'; '.join(refused)}: {reason}"] = None
        samples = self._finder.samples * estimate.setup.distributed.data_ranks
        if any(plan.effective_batch != samples for plan in plans):
            self._notes[
                f"where {samples} samples cannot be cut into micro-batches of one size without "
                "waste, the nearest number above is taken."
            ] = None
        if any(plan.changes_training for plan in plans):
            self._notes[
                "plans that change the training may converge differently: memory and time are the "
                "smaller part of that decision."
            ] = None
        if any(
            plan.estimate.setup.distributed.fsdp is not self._request.distributed.fsdp
            for plan in plans
        ):
            self._notes[
                "plans that shard gather weights in every micro-step, which the time does not "
                "count: of two of them, the one with fewer accumulated gathers less."
            ] = None
        for note in estimate.notes:
            if isinstance(note, Emulated):
                self._notes[note] = None
        if self._probe.untimed() and len(plans) > 1:
            self._notes[
                "plans are in the order of what their training takes alone: completions are "
                "written alike in all of them, though slower where vLLM has a smaller cache or "
                "sleeps between."
            ] = None
        match = self._probe.spec.match_note
        if match:
            self._notes[match] = None
        return Advice(
            model=estimate.model.id,
            gpu=estimate.gpu.name,
            usable_bytes=estimate.gpu.usable_bytes,
            effective_batch=samples,
            plans=plans,
            closest=closest,
            time_basis=self._probe.time_basis(estimate.setup),
            notes=tuple(self._notes),
        )


def _fits(candidates: Sequence[Candidate]) -> bool:
    return any(candidate.verdict is Verdict.FITS for candidate in candidates)
