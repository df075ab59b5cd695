"""Families of the training steps of one model, traced where none answers yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memest.config.parallelism import ONE_GPU
from memest.errors import MemestError, MissingDependencyError
from memest.estimation.question import Question
from memest.estimation.tracer import Tracer
from memest.events import Trace
from memest.profiles.axes import Sizes, greatest_length
from memest.profiles.family import Family, Point, single_trace_family
from memest.profiles.family_search import (
    LONG_TRACE,
    SMALL_BATCHES,
    FamilySearch,
    answers_for,
    goes_by_sample,
    place_by_sample,
)
from memest.profiles.fold import Fold
from memest.profiles.known_profiles import (
    KnownProfiles,
    StepProfile,
    asks_for_gpu,
    each_size_alone,
)
from memest.profiles.transcript import Stack

__all__ = ["FamilyTraces"]

_MAX_FAMILIES = 32


class FamilyTraces:
    """What answers for the steps of one model.

    Args:
        tracer: of the model.
        known_profiles: where families are kept.
    """

    def __init__(self, tracer: Tracer, known_profiles: KnownProfiles) -> None:
        self._tracer = tracer
        self._known_profiles = known_profiles
        self._deep_families: dict[int, tuple[Family, Family]] = {}

    def of(self, question: Question) -> tuple[Family, Point]:
        """The family that answers for the sizes of a question, and the point.

        Traced where there is none; grown for the sizes that will vary.

        Raises:
            MemestError: the steps cannot be traced.
        """
        family, point = self.shallow(question)
        return self._unfolded(family), point

    def _unfolded(self, family: Family) -> Family:
        """A family in the depth of the model, made once."""
        if family.fold is None:
            return family
        entry = self._deep_families.get(id(family))
        if entry is None:
            if len(self._deep_families) >= _MAX_FAMILIES:
                self._deep_families.pop(next(iter(self._deep_families)))
            entry = self._deep_families[id(family)] = family, family.unfolded()
        return entry[1]

    def shallow(self, question: Question) -> tuple[Family, Point]:
        """The same as it was traced, of few layers where the others follow from them."""
        if each_size_alone(question.setup):
            # nothing else follows from a trace for these sizes: Liger's loss goes in chunks whose
            # number jumps with the batch, and its Python asks for the GPU's properties besides, as
            # Inductor does to split and to fuse
            profile = question.profile
            if asks_for_gpu(question.setup):
                profile = self._known_profiles.of_gpu(profile, question.gpu)
            return self._known(profile, question) or self._first(profile, question)
        profile = question.profile
        known_family = self._known(profile, question)
        family = known_family or self._first(profile, question)
        vary, sizes = question.vary, question.sizes
        if vary is None or (known_family and answers_for(known_family[0], vary, sizes)):
            return family
        cheap = family[0].fold is not None and len(family[0].skeleton.events) <= LONG_TRACE
        if not known_family and vary and cheap:
            # few layers cost little: the next question is mostly about another length or rank
            question = replace(question, vary=tuple(dict.fromkeys((*vary, "seq_len", "lora_r"))))
        return self._grow(question, family)

    def _known(self, profile: StepProfile, question: Question) -> tuple[Family, Point] | None:
        """The family that answers already."""
        cues = question.setup.distributed != ONE_GPU
        return self._known_profiles.find(profile, question.sizes, question.gpu, cues=cues)

    def _first(self, profile: StepProfile, question: Question) -> tuple[Family, Point]:
        """A family of one trace."""
        self._known_profiles.read_families(profile, lambda _: True)
        folded = self._tracer.folded(question, profile.families)
        family = single_trace_family(
            folded.trace, question.sizes, folded.fold, folded.whole_because
        )
        self._known_profiles.keep_family(profile, family)
        return family, ()

    def _grow(self, question: Question, family: tuple[Family, Point]) -> tuple[Family, Point]:
        """A family around the sizes of a question, where one is to be had, else what is there."""
        profile, setup = question.profile, question.setup
        fold = family[0].fold
        self._known_profiles.read_families(profile, lambda _: True)

        def trace_at(sizes: Sizes) -> Trace:
            return self._tracer.steps(question.at_sizes(sizes), *_layers_of(fold))

        def follows(family: Family) -> bool:
            """Whether layers are as alike at both ends of a family as they are here."""
            if family.fold is None:
                return True
            ends = {min(family.points), max(family.points)}
            return all(
                self._tracer.follows(question.at_sizes(family.domain.sizes_at(end)), family, end)
                for end in ends
            )

        search = FamilySearch(
            families=profile.families,
            sizes=question.sizes,
            vary=question.vary or (),
            barren_places=profile.barren_places,
            thresholds=self._tracer.thresholds,
            length_multiple=setup.distributed.sequence_pieces,
            limit_of=lambda axis: greatest_length(profile.sizing, setup, axis),
            trace_at=trace_at,
            goes_by_sample=lambda: self._goes_by_sample(question, fold),
        )
        try:
            for new_family in search.around(*family):
                if new_family is None:
                    self._known_profiles.save_model(profile)  # it is not looked for there again
                    continue
                if not follows(new_family):
                    break
                self._known_profiles.keep_family(profile, new_family)
                point = new_family.point_of(question.sizes)
                if point is not None:
                    return new_family, point
        except MissingDependencyError:
            pass  # what is asked has its answer; more is not to be had here
        return family

    def goes_by_sample(self, first: Question, smaller: Callable[[], Question]) -> bool:
        """Whether a model does part of its work sample by sample, so that no two batches are alike.

        Args:
            first: names the first batch that is asked for.
            smaller: gives the same question at a batch of ``SMALL_BATCHES[0]``.
        """
        if each_size_alone(first.setup):
            return False  # no two batches are alike for another reason, and each is short
        family, _ = self.shallow(first)
        if "batch" in family.axes:
            return False
        places = first.profile.barren_places
        for goes in (True, False):
            if place_by_sample(first.sizes, goes) in places:
                return goes
        known_family = self._known(first.profile, smaller())
        if known_family is None and len(family.skeleton.events) <= LONG_TRACE:
            known_family = self.shallow(smaller())
        if known_family is not None and "batch" in known_family[0].axes:
            return False
        goes = self._goes_by_sample(first, family.fold)
        places.add(place_by_sample(first.sizes, goes))
        self._known_profiles.save_model(first.profile)
        return goes

    def _goes_by_sample(self, question: Question, fold: Fold | None) -> bool:
        """The same, seen at two small batches."""
        num_events = []
        for batch in SMALL_BATCHES:
            smaller = question.at_sizes({**question.sizes, "batch": batch})
            try:
                beginning = self._tracer.beginning(smaller, *_layers_of(fold))
            except MissingDependencyError:
                raise  # that says nothing about the model
            except (MemestError, MemoryError, OverflowError):
                return False
            num_events.append(len(beginning.events))
        return goes_by_sample(num_events)


def _layers_of(fold: Fold | None) -> tuple[Sequence[Stack], Sequence[int]]:
    """The layers that a fold was found with; all of them without."""
    return ((), ()) if fold is None else (fold.stacks, fold.periods)
