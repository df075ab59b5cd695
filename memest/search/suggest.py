"""``memest.suggest``: the few changes that make a run fit, each with its gain and its cost.

Single changes come first, then those that go together with small micro-batches and checkpointing.
What trains the same is preferred to what does not, the faster to the slower, and no two are of one
kind. A run that fits with room is told its largest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from memest.catalog.gpu_counts import split_gpu_count
from memest.config.idle_options import smallest_micro_batch
from memest.config.installed import release
from memest.config.options import argument, no_gpu
from memest.config.parallelism import Strategy
from memest.config.setup import Precision, Setup
from memest.config.spelling import command_words
from memest.errors import MemestError, NotKnownError
from memest.estimation.gpu_target import Place
from memest.events import Category, Phase
from memest.report.result import Estimate, Spot, Verdict
from memest.report.suggestions import Suggestion, Suggestions
from memest.search.changes import (
    ALL_LINEAR,
    NOTHING,
    Change,
    batches_of,
    cut_from_host,
    lean_of,
    more_gpus,
    other_implementations,
    other_optimizers,
    sleeping_engine,
    smaller_evaluations,
    with_adapters,
    with_checkpointing,
)
from memest.search.combos import LOSSES, losses, other_precisions
from memest.search.cost import Probe
from memest.search.profile import Profile
from memest.search.profile import profile as make_profile

if TYPE_CHECKING:
    import torch

__all__ = ["effort_for", "suggest", "suggestions_of"]

Progress = Callable[[str], None]


def suggest(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    calibration: str | None = None,
    count: int = 3,
    quick: bool = False,
    brief: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Suggestions:
    """What to change so that a run fits a GPU, or what to do with the room that it leaves.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration; ``options`` are another way to give it.
        gpu: name of the GPU, or ``local``.
        gpu_memory: memory PyTorch can have, for a GPU that the catalogue does not know.
        device_context: as for :func:`memest.estimate`.
        calibration: as for :func:`memest.estimate`.
        count: changes, at most.
        quick: look at changes that need a new trace only where no other makes it fit.
        brief: leave out smaller micro-batches, other optimizers and more GPUs, as is wise for
            models whose every change is traced anew.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: of the run, as for :func:`memest.estimate`.

    Returns:
        The changes, best first; none where nothing makes it fit, and then the closest one.

    Raises:
        ConfigError: no GPU, or options that cannot be.
        MemestError: as for :func:`memest.estimate`.

    Example:
        >>> import memest
        >>> found = memest.suggest("bert-large-uncased", batch=24, fp16=True, gpu="t4")
        >>> found.changes[0].words
        'micro-batches of 12, 2 a step'
    """
    if not gpu and gpu_memory is None:
        raise no_gpu("suggest")
    gpu, options = split_gpu_count(gpu, setup, options)
    place = Place(
        gpu=[gpu] if gpu else [],
        gpu_memory=gpu_memory,
        device_context=device_context,
        calibration=argument("calibration", calibration, options),
    )
    profile = make_profile(
        model, setup, trust_remote_code=trust_remote_code, progress=progress, **options
    )
    return suggestions_of(profile, place, count, quick=quick, brief=brief)


def effort_for(answer: Estimate) -> Mapping[str, Any] | None:
    """How thoroughly to look for changes beside an answer that is out.

    Args:
        answer: to the question, its largest batch looked for.

    Returns:
        Arguments of :func:`suggest`; None where each change would be compiled, which takes minutes.
    """
    if answer.gpu is None or answer.max_batch is not None or release("torch") is None:
        return {"quick": True}
    if answer.setup.torch_compile:
        return None
    # the largest batch was not looked for: each change is traced anew
    return {"quick": True, "brief": True, "count": 1}


def suggestions_of(
    profile: Profile,
    place: Place,
    count: int = 3,
    *,
    quick: bool = False,
    brief: bool = False,
    same_method: bool = True,
) -> Suggestions:
    """The same for a profile that is there.

    Args:
        profile: the model under the run's setup.
        place: the one GPU that it is to fit.
        count: changes, at most.
        quick: look at changes that need a new trace only where no other makes it fit.
        brief: leave out smaller micro-batches, other optimizers and more GPUs, as is wise for
            models whose every change is traced anew.
        same_method: look at changes that train the same weights, too; False for those who have.
    """
    search = _Search(profile, place, brief=brief, same_method=same_method)
    base = search.base
    assert base.gpu is not None
    found = None
    if quick:
        search.look_at_losses()
        with suppress(NotKnownError), profile.known_alone():
            found = search.changes(count)
    # what fits has one change at most, which needs no trace or was refused above
    helps = found is not None and search.helps(found[0], count)
    if found is None or not (helps or base.verdict is Verdict.FITS):
        found = search.changes(count)
    changes, closest = found
    return Suggestions(
        model=base.model.id,
        gpu=base.gpu.name,
        usable_bytes=base.gpu.usable_bytes,
        verdict=base.verdict,
        device_bytes=base.peak.device_bytes,
        changes=changes,
        closest=closest,
        time_basis=search.probe.time_basis(base.setup),
    )


class _Search:
    """Tries changes of one run."""

    def __init__(
        self, profile: Profile, place: Place, *, brief: bool, same_method: bool = True
    ) -> None:
        self._profile = profile
        self._is_brief = brief
        self._keeps_method = same_method
        self._place = place
        self.probe = Probe(profile, place, vary=("batch",))
        self.base = self.probe.estimate()
        self._room = self.base.gpu.usable_bytes if self.base.gpu else 0
        # nothing surely fits that does more than is priced
        self._looked_at: dict[Change, Suggestion] = {}
        self._best = {Verdict.FITS, *([Verdict.CANNOT_SAY] if self.base.setup.unpriced else ())}

    def changes(self, count: int) -> tuple[tuple[Suggestion, ...], Suggestion | None]:
        """Those that were found, and the closest where none of them makes the run fit."""
        if self.base.verdict is Verdict.FITS:
            larger = self._larger_batch()
            return ((larger,) if larger is not None else ()), None
        if self.base.verdict is Verdict.CANNOT_SAY and self.base.setup.unpriced:
            return (), None  # what is not priced may still not fit, whatever else changes
        tried: list[tuple[Change, Suggestion]] = []
        for ways in self._kinds():
            found = {change.kind for change, made in tried if made.verdict in self._best}
            if len(found) >= count:
                break
            for change in ways:
                if any(change.includes(made) for _, made in tried if made.verdict in self._best):
                    continue  # a part of it does
                made = self._look(change)
                if made is None:
                    continue
                tried.append((change, made))
                if made.verdict in self._best:
                    break
        useful = [each for each in tried if self._is_better(each[1].verdict)]
        best: dict[str, Suggestion] = {}
        for change, made in sorted(useful, key=_rank):
            best.setdefault(change.kind, made)
        if best:
            return tuple(best.values())[:count], None
        if self.base.verdict is not Verdict.DOES_NOT_FIT:
            return (), None
        rest = [made for _, made in tried if made.gain_bytes > 0]
        return (), min(rest, key=lambda made: made.device_bytes, default=None)

    def helps(self, changes: Sequence[Suggestion], count: int) -> bool:
        """Whether nobody need look on: as many fit as were asked for, or one that trains the same.

        More GPUs, or another optimizer, are known at once and no reason to keep quiet about
        adapters, which cost a trace.
        """
        fitting = [made for made in changes if made.verdict is Verdict.FITS]
        return len(fitting) >= count or any(not made.changes_training for made in fitting)

    def _is_better(self, verdict: Verdict) -> bool:
        """Whether a verdict is one to hope for: a run that is tight already must surely fit."""
        if self.base.verdict is Verdict.DOES_NOT_FIT:
            return verdict is not Verdict.DOES_NOT_FIT
        return verdict in self._best

    # -- what is tried

    def _kinds(self) -> Iterator[Iterator[Change]]:
        """For each kind the ways to it, of which the first that fits is taken."""
        setup = self.base.setup
        lean = lean_of(setup)
        if self.base.peak_at.phase is Phase.EVALUATION:
            for ways in smaller_evaluations(setup):
                yield iter((*ways, *(lean.then(change) for change in ways if lean.options)))
        if self._keeps_method:
            yield from self._of_same_method(setup, lean)
        # beside a base of 4 bits and shards recomputing comes first, as people train so
        for change in self._adapters(setup):
            leaner = lean.then(change)
            yield self._leaner(setup, leaner if "qlora" in change.options else change, leaner)
        if self._is_brief:
            return
        yield (lean.then(change) for change in cut_from_host(setup))
        yield (lean.then(change) for change in more_gpus(setup))

    def _of_same_method(self, setup: Setup, lean: Change) -> Iterator[Iterator[Change]]:
        """Those of them that train the weights that were asked for, on the GPUs there are."""
        if self._can_fit(with_states=True):
            for change in (*other_implementations(setup), *sleeping_engine(setup)):
                yield iter((change,))
            yield self._losses()
            yield self._smaller_batches(setup, NOTHING)
            if lean.options:
                ways = chain((lean,), self._smaller_batches(setup, lean))
                yield chain(with_checkpointing(setup), ways)
            yield self._precisions(setup)
        if self._can_fit(with_states=False) and not self._is_brief:
            for change in other_optimizers(setup):
                yield self._leaner(setup, change, lean_of(setup, optimizer=False).then(change))

    def _can_fit(self, *, with_states: bool) -> bool:
        """Whether what is there at the end of a step fits, whatever is done about the rest."""
        model, setup = self.base.model, self.base.setup
        trained = model.parameter_bytes * model.trainable_parameters // max(model.parameters, 1)
        if setup.steps_in_backward:
            trained = 0  # gradients go one by one
        states = sum(
            row.bytes
            for row in self.base.breakdown
            if row.category is Category.OPTIMIZER_STATES and with_states
        )
        distributed = setup.distributed
        shared = distributed.shares_model or distributed.strategy is not Strategy.NONE
        return shared or model.parameter_bytes + trained + states <= self._room

    def _leaner(self, setup: Setup, change: Change, leaner: Change) -> Iterator[Change]:
        """A change, the same in less memory, and that in smaller micro-batches."""
        yield change
        if leaner != change:
            yield leaner
        yield from self._smaller_batches(setup, leaner)

    def _smaller_batches(self, setup: Setup, first: Change) -> Iterator[Change]:
        """The largest micro-batch that fits and divides what a step has, if there is one."""
        if self._is_brief:
            return
        smallest = smallest_micro_batch(setup, setup.batch * setup.grad_accum)
        for batch in range(setup.batch - 1, smallest - 1, -1):
            if setup.batch % batch == 0:
                yield first.then(batches_of(setup, batch))

    def _adapters(self, setup: Setup) -> list[Change]:
        """Adapters as peft knows them for the model; where it knows none, on all linear layers."""
        changes = list(with_adapters(setup))
        if changes and setup.adapter is None and self._look(changes[0]) is None:
            return [change.then(ALL_LINEAR) for change in changes]
        return changes

    def _losses(self) -> Iterator[Change]:
        """Losses without all logits, where logits are a large part of what the run takes."""
        setup = self.base.setup
        if self.base.has_many_logits:
            for words in losses(setup):
                yield Change("loss", words, LOSSES[words])

    def look_at_losses(self) -> None:
        """Try them where the run would fit without its logits, which is worth a trace."""
        if self.base.verdict is Verdict.FITS:
            return
        if self.base.peak.device_bytes - self.base.logits_bytes <= self._room:
            for change in self._losses():
                if self._look(change) is not None:
                    return

    def _precisions(self, setup: Setup) -> Iterator[Change]:
        if setup.precision is Precision.FP32:
            for precision in other_precisions(self.probe, setup):
                name = precision.value
                training = f"{name} in place of {setup.precision.value}"
                change = Change("precision", f"{name} autocast", {name: True}, 1, training)
                yield change
                yield from self._smaller_batches(setup, change)

    def _larger_batch(self) -> Suggestion | None:
        """The largest batch that surely fits, where it is larger."""
        estimate = self.probe.estimate(max_batch=True, batch=self.base.setup.batch)
        batch = estimate.safe_batch or 0
        if batch <= self.base.setup.batch:
            return None
        return self._made(
            Change("batch", f"batches of {batch}", {"batch": batch}, 1, "a larger batch")
        )

    # -- what it comes to

    def _look(self, change: Change) -> Suggestion | None:
        """What was made of a change; what was not is asked again, it may be known by then."""
        made = self._looked_at.get(change) or self._made(change)
        if made is not None:
            self._looked_at[change] = made
        return made

    def _made(self, change: Change) -> Suggestion | None:
        """The run with a change; None where the model, or what is installed, rules it out."""
        try:
            setup = self._profile.setup_for(**change.options)
            spot = self._profile.spot(setup, vary=("batch",), **self._place)
        except MemestError:
            return None
        return Suggestion(
            words=change.words,
            options=tuple(change.options.items()),
            arguments=" ".join(command_words("estimate", "MODEL", change.options)[3:]),
            verdict=spot.verdict,
            device_bytes=spot.peak.device_bytes,
            gain_bytes=self.base.peak.device_bytes - spot.peak.device_bytes,
            relative_time=self._relative_time(change.options, spot),
            changes_training=change.training,
        )

    def _relative_time(self, options: dict[str, Any], spot: Spot) -> float | None:
        changed, given = spot.setup.distributed, self.base.setup.distributed
        if changed.num_gpus != given.num_gpus or changed.fsdp_offload != given.fsdp_offload:
            return None  # nor is copying from host memory timed
        if self.probe.untimed():
            return None
        return self.probe.seconds_per_sample(**options) / self.probe.seconds_per_sample()


def _rank(each: tuple[Change, Suggestion]) -> tuple[bool, int, float, int]:
    change, made = each
    time = made.relative_time or 1.0
    return made.verdict is not Verdict.FITS, change.distance, time, -made.gain_bytes
