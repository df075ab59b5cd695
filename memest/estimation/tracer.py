"""Traces of one model: it is built once on the meta device, and its steps are run there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memest.config.inputs import NO_INPUTS, ModuleInputs
from memest.config.installed import release
from memest.config.optimizers import facts_of
from memest.config.packages import TORCH, broken_import
from memest.config.setup import Setup
from memest.errors import MemestError, ModelLoadError, NotKnownError
from memest.estimation.early import refuse_early, say_import
from memest.estimation.question import Question
from memest.estimation.shipped_runs import what_counts
from memest.events import Trace
from memest.profiles.axes import Sizes, key_of, sizes_text, traced_setup, windows
from memest.profiles.document import FORMAT
from memest.profiles.family import Family, Point, alike
from memest.profiles.family_search import LONG_TRACE
from memest.profiles.fold import Fold, begins_with, unfold
from memest.profiles.fold_search import (
    Depths,
    FoldPlan,
    NoFoldError,
    depths_to_trace,
    learn,
    plans_for,
    search_pays,
)
from memest.profiles.known_profiles import StepProfile
from memest.profiles.transcript import Stack

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource
    from memest.workspaces.operator_call import GpuTraits

__all__ = ["KNOWN_ALONE", "FoldedTrace", "Progress", "Tracer"]

Progress = Callable[[str], None]

_OF_FEW_LAYERS, _OF_ALL_LAYERS = 12, 5
"""How many traces a first question mostly costs, with its largest batch."""
_ASKED_FOR = "--trace-whole asks for them"
_CALLED_OTHERWISE = "some are called otherwise than others"
_TAKES_LONGER = "at this size it takes longer to see how they repeat"


@dataclass(frozen=True, slots=True)
class FoldedTrace:
    """Training steps that were traced.

    Attributes:
        trace: of few layers, or of all.
        fold: how the former becomes the latter.
        whole_because: why all layers were traced, where others repeat; empty where none do.
    """

    trace: Trace
    fold: Fold | None = None
    whole_because: str = ""


def _known_reason(families: Sequence[Family], sizes: Sizes) -> str:
    """Why all layers were traced at another batch or rank; empty if they were not.

    What keeps its layers from being folded there keeps them here.
    """

    def class_of(sizes: Mapping[str, int]) -> dict[str, int]:
        rest = {name: size for name, size in sizes.items() if name not in ("batch", "lora_r")}
        return {**rest, "alone": sizes.get("batch") == 1}  # whose operators are others

    reasons = (
        family.whole_because
        for family in families
        if family.fold is None
        and family.whole_because != _ASKED_FOR
        and any(
            class_of(family.domain.sizes_at(point)) == class_of(sizes) for point in family.points
        )
    )
    return next(filter(None, reasons), "")


def _known_fold(
    families: Sequence[Family], stacks: Sequence[Stack], kept: Sequence[int], shallow: Trace
) -> Fold | None:
    """The fold of a family whose steps are like these."""
    for family in families:
        fold = family.fold
        if fold is not None and fold.is_of(stacks, kept) and alike(family.skeleton, shallow):
            return fold
    return None


def _built_for(request: Setup) -> tuple[int | None, int | None]:
    """Image size and rank, for each of which a model is built."""
    return request.image_size, None if request.adapter is None else request.adapter.rank


KNOWN_ALONE = "MEMEST_KNOWN_ALONE"
"""The environment variable that, not empty, refuses whatever needs a trace."""


class Tracer:
    """Makes the traces of one model. Torch is loaded when the first one has to be made, not before.

    Args:
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        module_inputs: what a module of one's own is fed.
        progress: told what is being done.

    Attributes:
        traces_made: how many times training steps were traced.
        refuses: whether whatever takes a while is refused.
    """

    def __init__(
        self,
        source: ModelSource | None = None,
        module: Any = None,
        module_inputs: ModuleInputs = NO_INPUTS,
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.module = module
        self.module_inputs = module_inputs
        self._progress = progress
        self.traces_made = 0
        self.refuses = bool(os.environ.get(KNOWN_ALONE))
        self._seconds: list[float] = []

    @property
    def config(self) -> Any:
        """The configuration of the model; None where it has none."""
        if self.source is not None:
            return self.source.config
        return getattr(self.module, "config", None)

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the model's configuration; None where it has none."""
        if self.source is None:
            return getattr(self.config, "model_type", None)
        return (self.config or {}).get("model_type")

    @property
    def thresholds(self) -> list[int]:
        """Lengths at which the configuration says that something changes."""
        config = None if self.source is None else self.source.config
        return sorted(set(windows(config or {})))

    @property
    def is_reproducible(self) -> bool:
        """Whether everything that the traces depend on can be written down, and they be kept."""
        source = self.source
        if source is None or source.kind == "factory" or source.trust_remote_code:
            return False
        return self.module_inputs == NO_INPUTS

    def key(self, structure: Setup) -> dict[str, Any]:
        """What the traces of a structure depend on; empty where it cannot be written down."""
        source = self.source
        if not self.is_reproducible or source is None:
            return {}
        key = {
            "format": FORMAT,
            "model": source.id,
            "config": what_counts(source.config, source.auto_class),
            "auto_class": source.auto_class,
            "setup": key_of(structure),
        }
        if source.library is not None:
            key["built_by"] = [*source.library, release(source.library[0]), source.arguments]
        package = facts_of(structure.optimizer).package
        if package:  # it steps in backward, and is part of the trace
            key["library"] = [package, release(package.replace("-", "_"))]
        if structure.use_liger_kernel or structure.fused_loss:
            key["kernels"] = [release("liger_kernel"), release("cut_cross_entropy")]
        return key

    def meta_model(self, profile: StepProfile, request: Setup, gpu: GpuTraits | None = None) -> Any:
        """The model on the meta device (:class:`memest.trace.meta_model.MetaModel`), built once.

        Args:
            profile: what is known of its steps.
            request: as the user gave it.
            gpu: that it is asked for, where that is known.

        Raises:
            MemestError: the model cannot be built, or what builds it is not installed.
        """
        built_for = _built_for(request)
        meta_model = profile.meta_models.get(built_for)
        if meta_model is not None:
            return meta_model
        refuse_early(self.source, request, self.module_inputs, gpu)
        building = f"{self._name}: building it on the meta device, without its weights"
        self._check_allowed(building)
        say_import(self.say)
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise TORCH.missing() from error
        from memest.trace.meta_model import build

        self.say(building)
        inputs = self.module_inputs
        try:
            meta_model = build(
                traced_setup(request),
                self.source,
                self.module,
                inputs.inputs,
                inputs.loss,
                step_fn=inputs.step_fn,
                dims=inputs.dims,
                model_args=inputs.model_args,
            )
        except (ImportError, ModelLoadError) as error:
            if (broken := broken_import(error)) is not None:
                raise broken from error
            raise
        profile.meta_models[built_for] = meta_model
        return meta_model

    def steps(
        self, question: Question, stacks: Sequence[Stack] = (), periods: Sequence[int] = ()
    ) -> Trace:
        """The training steps of a question.

        Args:
            question: names sizes and GPU.
            stacks: of the model, those that have fewer periods of layers.
            periods: that they have.

        Raises:
            MemestError: the steps cannot be traced.
        """
        meta_model = self.meta_model(question.profile, question.request, question.gpu)
        from memest.trace.session import trace_built

        self._say_trace(question, stacks, periods)
        self.traces_made += 1
        began = time.monotonic()
        setup = traced_setup(question.setup)
        trace = trace_built(meta_model, setup, question.gpu, stacks=stacks, periods=periods)
        self._seconds.append(time.monotonic() - began)
        return trace

    def _say_trace(
        self, question: Question, stacks: Sequence[Stack], periods: Sequence[int]
    ) -> None:
        """Which trace is made, of how many, and how long they take."""
        number = self.traces_made + 1
        of_all = max(number, _OF_FEW_LAYERS if stacks else _OF_ALL_LAYERS)
        depths = [
            f"{stack.depth_at(count)} of {stack.depth}"
            for stack, count in zip(stacks, periods, strict=True)
        ]
        layers = f"{' and '.join(depths)} layers, " if depths else ""
        left = ""
        if self._seconds:
            seconds = (of_all - number + 1) * max(self._seconds[-3:])
            left = f", about {max(round(seconds), 1)} s left"
        self.say(
            f"{self._name}, for the first time: trace {number} of about {of_all} "
            f"({layers}{sizes_text(question.sizes)}){left}"
        )

    @property
    def _name(self) -> str:
        return self.source.id if self.source is not None else type(self.module).__name__

    def folded(self, question: Question, known_families: Sequence[Family]) -> FoldedTrace:
        """The training steps, of few layers where the others follow from them.

        Args:
            question: names sizes and GPU.
            known_families: of the same model; steps that are like theirs follow as they do.

        Raises:
            MemestError: the steps cannot be traced.
        """
        if question.request.trace_whole:
            return FoldedTrace(self.steps(question), whole_because=_ASKED_FOR)
        if why := _known_reason(known_families, question.sizes):
            return FoldedTrace(self.steps(question), whole_because=why)
        meta_model = self.meta_model(question.profile, question.request, question.gpu)
        if question.setup.torch_compile:
            why = "a compiled graph is one for all of them, and scheduled as one"
            return FoldedTrace(self.steps(question), whole_because=why)
        why, found = "too few are alike", {}
        try:
            found = self._stacks(question, meta_model)
        except MemestError:
            raise
        except Exception:  # noqa: BLE001 - attributes of code that nobody knows may do anything
            why = "what they are made of cannot be read"
        stacks = tuple(found)
        traces: dict[tuple[int, ...], Trace] = {}
        costs = list(found.values())
        plans = plans_for(stacks, costs)
        known_folds = [family.fold for family in known_families if family.fold is not None]
        kept_before = {fold.kept for fold in known_folds}
        for plan in sorted(plans, key=lambda each: each.kept not in kept_before):
            chosen = tuple(stacks[number] for number in plan.stacks)

            def trace_at(depths: Depths, plan: FoldPlan = plan, chosen: Any = chosen) -> Trace:
                periods = plan.periods(depths)
                if periods not in traces:
                    traces[periods] = self.steps(question, chosen, periods)
                return traces[periods]

            try:
                depths = depths_to_trace(len(chosen))
                # no family is grown of such long ones: what is found would answer for this alone
                is_long = not known_folds and len(trace_at(depths[0]).events) > LONG_TRACE
                if is_long and not search_pays(plan, stacks, costs):
                    why = _TAKES_LONGER
                    break
                shallow = trace_at(plan.shallow)
                fold = _known_fold(known_families, chosen, plan.kept, shallow)
                if fold is None:
                    fold = learn({each: trace_at(each) for each in depths}, chosen, plan.kept)
                if meta_model.own_code:
                    # it may do anything with a layer by its number, and in any of its steps
                    whole = self.steps(question)
                    if unfold(shallow, fold) != whole:
                        return FoldedTrace(whole, whole_because=_CALLED_OTHERWISE)
                elif plan.kept not in kept_before:
                    self._check_beginning(question, shallow, fold)
                return FoldedTrace(shallow, fold)
            except NoFoldError as error:
                why = str(error)
            except MemestError:
                why = "the model does not run with fewer"
        return FoldedTrace(self.steps(question), whole_because=why)

    def _stacks(self, question: Question, meta_model: Any) -> dict[Stack, int]:
        """The layers of a model that repeat: what GPUs and sizes do not change, read once."""
        stacks, built_for = question.profile.stacks, _built_for(question.request)
        if built_for not in stacks:
            from memest.trace.session import stacks_of

            stacks[built_for] = stacks_of(meta_model, traced_setup(question.setup))
        return stacks[built_for]

    def follows(self, question: Question, family: Family, point: Point) -> bool:
        """Whether what a folded family says of a point is what the whole model does there.

        Asked of code that nobody knows alone: what it does with a layer may depend on sizes.
        """
        if not self.meta_model(question.profile, question.request, question.gpu).own_code:
            return True
        return family.unfolded().at(point) == self.steps(question)

    def beginning(
        self, question: Question, stacks: Sequence[Stack] = (), periods: Sequence[int] = ()
    ) -> Trace:
        """Loading and the first forward alone; as :meth:`steps`."""
        meta_model = self.meta_model(question.profile, question.request, question.gpu)
        from memest.trace.session import trace_beginning

        layers = "few layers" if stacks else "all layers"
        self.say(f"{self._name}: running {layers} once ({sizes_text(question.sizes)})")
        setup = traced_setup(question.setup)
        return trace_beginning(meta_model, setup, question.gpu, stacks=stacks, periods=periods)

    def _check_beginning(self, question: Question, shallow: Trace, fold: Fold) -> None:
        """See that the model does with every layer what was worked out: run all of them once.

        Raises:
            NoFoldError: a layer does something else, by its number or by what it is given.
        """
        beginning = self.beginning(question)
        if not begins_with(unfold(shallow, fold, num_events=len(beginning.events)), beginning):
            raise NoFoldError(_CALLED_OTHERWISE)

    def evaluation(self, question: Question, *, generates: bool, ranks: int | None) -> Trace:
        """The first batches of an evaluation, or the first steps of a generation."""
        meta_model = self.meta_model(question.profile, question.request, question.gpu)
        from memest.trace.session import evaluate_built

        self.say(f"tracing an evaluation at {sizes_text(question.sizes)}")
        setup = traced_setup(question.setup)
        return evaluate_built(meta_model, setup, question.gpu, generates=generates, ranks=ranks)

    def _check_allowed(self, text: str) -> None:
        if self.refuses:
            raise NotKnownError(f"{text} is needed, and only what is known was asked for.")

    def say(self, text: str) -> None:
        """Tell of something that takes a while.

        Raises:
            NotKnownError: it is refused.
        """
        self._check_allowed(text)
        if self._progress is not None:
            self._progress(text)
