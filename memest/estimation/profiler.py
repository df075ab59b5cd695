"""Step profiles on demand: one model, asked for setups and GPUs.

What was traced once is kept, in memory and in the store, and answers everything that follows from
it. A question is answered in a straight line: what the model makes of the setup (:meth:`resolve`),
what is known of its structure, the family that answers for its sizes (:attr:`Profiler.families`),
and the run that comes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.config.compatibility import check_scaled
from memest.config.deepspeed import with_hidden_size
from memest.config.inputs import NO_INPUTS, ModuleInputs, check_own_parts
from memest.config.options import find_option, is_harmless
from memest.config.rollouts import ACTOR
from memest.config.setup import SdpaBackend, Setup, Task
from memest.errors import ConfigError
from memest.estimation.assumption import Usual
from memest.estimation.early import with_own_base
from memest.estimation.evaluation_traces import EvaluationTraces
from memest.estimation.family_traces import FamilyTraces
from memest.estimation.optimizer_traces import OptimizerTraces
from memest.estimation.question import Question
from memest.estimation.replay_cache import ReplayCache
from memest.estimation.run import Run
from memest.estimation.tracer import Progress, Tracer
from memest.events import Trace
from memest.profiles.axes import greatest_length, learn_lengths, structure_of
from memest.profiles.cache import Store
from memest.profiles.family import Family, Point, single_trace_family
from memest.profiles.family_search import SMALL_BATCHES
from memest.profiles.known_profiles import (
    KnownProfiles,
    StepProfile,
    key_digest,
    shipped_releases,
)
from memest.profiles.packs import Packs
from memest.profiles.program import Program
from memest.profiles.sizing import SIZES, SizeAnswer, asked_sizes
from memest.replay.conf import AllocatorConf
from memest.report.result import ModelFacts
from memest.workspaces.gpu_limits import check_backend, check_gpu
from memest.workspaces.operator_call import GpuTraits

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource

__all__ = ["Profiler"]


class Profiler:
    """Makes and keeps the step profiles of one model.

    Args:
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        module_inputs: what a module of one's own is fed.
        progress: told what is being done.
        stores: where traces are kept; the first one is written to.

    Attributes:
        families: of its training steps.
        optimizers: its updates.
        progress: as given.
    """

    def __init__(
        self,
        *,
        source: ModelSource | None = None,
        module: Any = None,
        module_inputs: ModuleInputs = NO_INPUTS,
        progress: Progress | None = None,
        stores: Sequence[Store | Packs] | None = None,
    ) -> None:
        self._tracer = Tracer(source, module, module_inputs, progress)
        self._known_profiles = KnownProfiles(stores)
        self._profiles: dict[Setup, StepProfile] = {}
        self._replays: dict[AllocatorConf, ReplayCache] = {}
        self._critics: dict[str, Profiler] = {}
        self._evaluations = EvaluationTraces(self._tracer, self._known_profiles)
        self.families = FamilyTraces(self._tracer, self._known_profiles)
        self.progress = progress
        self.optimizers = OptimizerTraces(
            self._known_profiles, self._tracer.is_reproducible, self._tracer.say
        )

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        module_inputs: ModuleInputs = NO_INPUTS,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> Profiler:
        """The profiler of whatever a user calls a model: a name, a path, a factory, a live module.

        Raises:
            MemestError: a name that leads nowhere.
        """
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        if not isinstance(model, str):
            return cls(module=model, module_inputs=module_inputs, progress=progress)
        from memest.catalog.resolve import resolve_model

        source = resolve_model(model, trust_remote_code=trust_remote_code)
        return cls(source=source, module_inputs=module_inputs, progress=progress)

    @contextmanager
    def known_alone(self) -> Iterator[None]:
        """Within it, what needs a trace raises :class:`memest.errors.NotKnownError`."""
        before, self._tracer.refuses = self._tracer.refuses, True
        try:
            yield
        finally:
            self._tracer.refuses = before

    def of_critic(self, model: str) -> Profiler:
        """The profiler of the critic beside this model, which may be a model like it.

        Raises:
            ConfigError: this is a module of one's own, which has no other head.
            MemestError: a name that leads nowhere.
        """
        source = self._tracer.source
        if source is None or source.kind in ("factory", "library"):
            raise ConfigError(
                f"--critic {model} beside a module of one's own ({self.name}) is not priced: verl "
                "loads actors and critics by name. Give the actor as a name or a folder."
            )
        if model == ACTOR or model == source.id:
            return self
        if model not in self._critics:
            self._critics[model] = Profiler.of(model, progress=self.progress)
        critic = self._critics[model]
        critic._tracer.refuses = self._tracer.refuses
        return critic

    # -- what the model makes of a setup

    def question(self, request: Setup, gpu: GpuTraits, vary: Sequence[str] | None = ()) -> Question:
        """A setup as a question, with what the model decides filled in.

        Args:
            request: as the user gave it.
            gpu: whose kernels run.
            vary: as :attr:`Question.vary`.

        Raises:
            MemestError: the model cannot be built, or not for these sizes, or not run on this GPU.
        """
        profile = self.profile_of(request)
        setup = self._resolve(profile, request, gpu)
        check_gpu(setup, gpu)
        return Question(request, setup, gpu, profile, None if vary is None else tuple(vary))

    def resolve(self, request: Setup, gpu: GpuTraits | None = None) -> Setup:
        """The setup with what the model decides filled in: sizes, task, attention.

        Args:
            request: as the user gave it.
            gpu: that is asked about, for the words of what is not known.

        Raises:
            MemestError: the model cannot be built, or not for these sizes.
        """
        return self._resolve(self.profile_of(request), request, gpu)

    def _resolve(self, profile: StepProfile, request: Setup, gpu: GpuTraits | None) -> Setup:
        answer = self._sizes(profile, request, gpu)
        card = profile.model_cards[request.image_size]
        batch_sizes: dict[str, Any] = {**dict.fromkeys(SIZES), **answer.batch_sizes}
        setup = replace(
            request,
            **batch_sizes,
            task=card.task,
            attn_implementation=card.attention,
            checkpointing=card.checkpointing,
            distributed=with_hidden_size(request.distributed, self._tracer.config),
        )
        if request.batching is not None and "seq_len" not in answer.batch_sizes:
            raise ConfigError(
                f"--lengths and --dataset say how long texts are, and {card.class_name} for "
                f"{card.task} reads none. Drop them."
            )
        axis, prompt = ("seq_len", setup.seq_len) if setup.target_len is None else ("target_len", 1)
        if setup.generation is not None and prompt is not None:
            limit = greatest_length(profile.sizing, setup, axis)
            setup = replace(setup, generation=setup.generation.behind(prompt, limit))
        return setup

    def with_own_parts(self, request: Setup, options: Mapping[str, Any]) -> Setup:
        """The setup with what the model brings, where options name none.

        That is the batch of the example inputs, and the checkpointing of a base that is quantised
        already and prepared by peft. Without options the setup was given whole.

        Raises:
            ConfigError: a base is to be prepared that nobody quantises.
        """
        named = {find_option(k).name for k, value in options.items() if not is_harmless(k, value)}
        source = self._tracer.source
        config = None if source is None else source.config
        if request.quantization is None:
            settled = not named or "checkpointing" in named
            request = with_own_base(request, config or {}, self.name, settled=settled)
        has_inputs = self._tracer.module_inputs.inputs is not None
        if "batch" in named or not (has_inputs or (source and source.kind == "factory")):
            return request
        batch = None
        if request.batch == Setup().batch:
            profile = self.profile_of(request)
            self._sizes(profile, request)
            batch = profile.model_cards[request.image_size].batch
        return request if batch is None else replace(request, batch=batch)

    def assumptions(self, request: Setup) -> tuple[str, ...]:
        """What was decided for a setup, in sentences."""
        profile = self.profile_of(request)
        answer = self._sizes(profile, request)
        card, source = profile.model_cards[request.image_size], self._tracer.source
        source_notes = source.notes if source is not None else ()
        releases = [f"{name} {number}" for name, number in shipped_releases(profile.key).items()]
        shipping_notes = (
            (Usual(f"traced with {', '.join(releases)}, when memest was made"),) if releases else ()
        )
        return (
            *map(Usual, card.about),
            *answer.notes,
            *card.remarks,
            *source_notes,
            *shipping_notes,
        )

    def limit(self, request: Setup, axis: str) -> int | None:
        """The greatest length that the model takes.

        Args:
            request: as the user gave it.
            axis: ``seq_len`` or ``target_len``.

        Returns:
            None where the model names none, or where it is not known: what is generated behind a
            prompt takes of it.
        """
        if request.generation is not None:
            return None
        return greatest_length(self.profile_of(request).sizing, self.resolve(request), axis)

    # -- runs

    def run(self, question: Question) -> Run:
        """The steps of a question on one GPU, or on GPUs that all do the same.

        Raises:
            MemestError: the steps cannot be traced.
        """
        return self.run_of(question, *self.families.of(question))

    def trace(self, request: Setup, gpu: GpuTraits) -> Run:
        """The same by a trace of its own, whatever is known: to compare with."""
        question = self.question(request, gpu)
        return self.run_of(
            question, single_trace_family(self._tracer.steps(question), question.sizes), ()
        )

    def run_of(
        self, question: Question, family: Family, point: Point, program: Program | None = None
    ) -> Run:
        """What a family answers at a point.

        Args:
            question: that is answered.
            family: of its micro-steps.
            point: of the family.
            program: of the micro-steps; None for one with the updates that go with them.
        """
        setup = question.setup
        check_scaled(setup, {w.dtype for w in family.skeleton.weights if w.trains and w.has_grad})
        if own := family.skeleton.unpriced:
            setup = replace(setup, unpriced=tuple(dict.fromkeys((*setup.unpriced, *own))))
        if setup.sdpa_backend is not SdpaBackend.AUTO:
            choices = family.choices_at(family.numbers_at(point))
            check_backend(setup.sdpa_backend, choices, question.gpu)
        card = question.profile.model_cards[question.request.image_size]
        evaluation = None
        if setup.eval_batch is not None:
            eval_setup = replace(setup, batch=setup.eval_batch)
            key_parts = {"predictions": setup.eval_samples is not None}
            evaluation = self._evaluations.of(replace(question, setup=eval_setup), key_parts)
        return Run(
            setup,
            question.gpu,
            program or self._program(question, family, point),
            point,
            card,
            str(self._tracer.model_type or card.class_name),
            evaluation,
        )

    def generation(self, setup: Setup, gpu: GpuTraits) -> Trace:
        """The first steps of the generation that a resolved setup names."""
        question = Question(setup, setup, gpu, self.profile_of(setup))
        return self._evaluations.of(question, {"generation": repr(setup.generation)})

    def replays(self, conf: AllocatorConf) -> ReplayCache:
        """Where replays of this model's streams are kept."""
        return self._replays.setdefault(conf, ReplayCache(conf))

    def facts(self, run: Run) -> ModelFacts:
        """The model, counted."""
        parameters, trainable, buffers, parameter_bytes = run.counts
        card, source = run.card, self._tracer.source
        return ModelFacts(
            id=source.id if source is not None else card.class_name,
            class_name=card.class_name,
            parameters=parameters,
            trainable_parameters=trainable,
            buffers=buffers,
            parameter_bytes=parameter_bytes,
            source=source.provenance if source is not None else "live module",
            task=card.task.value,
            family=run.family,
        )

    @property
    def config(self) -> Any:
        """The configuration of the model; None where it has none."""
        return self._tracer.config

    @property
    def name(self) -> str:
        """How to call the model in results."""
        source = self._tracer.source
        return source.id if source is not None else type(self._tracer.module).__name__

    @property
    def traces_made(self) -> int:
        """How many times training steps were traced."""
        return self._tracer.traces_made

    # -- what is known

    def profile_of(self, request: Setup) -> StepProfile:
        """What is known of the model under the part of a setup that changes its traces."""
        structure = structure_of(request, live=self._tracer.module is not None)
        profile = self._profiles.get(structure)
        if profile is None:
            profile = self._of_usual_head(structure)
        if profile is None:
            profile = StepProfile(structure, self._tracer.key(structure))
            if profile.key:
                self._known_profiles.load(profile)
        self._profiles[structure] = profile
        return profile

    def _of_usual_head(self, structure: Setup) -> StepProfile | None:
        """What is known where nobody named a task, if that is the one named: one head alike.

        Scripts and configurations name their model's class; what is stored is of no task.
        """
        if structure.task in (Task.AUTO, Task.BASE) or not self._tracer.key(structure):
            return None
        usual = replace(structure, task=Task.AUTO)
        profile = self._profiles.get(usual) or StepProfile(usual, self._tracer.key(usual))
        if usual not in self._profiles:
            self._known_profiles.load(profile)
        tasks = {card.task for card in profile.model_cards.values()}
        if tasks != {structure.task}:
            return None
        return self._profiles.setdefault(usual, profile)

    def stage_profile(self, whole_profile: StepProfile, stage: Setup, mark: Any) -> StepProfile:
        """What is known of one stage of a model.

        Args:
            whole_profile: what is known of the model: a stage is cut out of the same one.
            stage: the setup of its traces.
            mark: what tells the stage from others in a key.
        """
        structure = structure_of(stage)
        profile = self._profiles.get(structure)
        if profile is None:
            key = {**whole_profile.key, "stage": mark} if whole_profile.key else {}
            profile = self._profiles[structure] = StepProfile(structure, key)
            if key:
                self._known_profiles.load(profile)
            profile.model_cards, profile.meta_models = (
                whole_profile.model_cards,
                whole_profile.meta_models,
            )
        return profile

    def meta_model(self, question: Question) -> Any:
        """The model on the meta device, built once."""
        return self._tracer.meta_model(question.profile, question.request, question.gpu)

    def goes_by_sample(self, request: Setup, gpu: GpuTraits) -> bool:
        """Whether a model does part of its work sample by sample, so that no two batches are alike.

        Args:
            request: of the first batch that is asked for.
            gpu: whose kernels run.
        """

        def at(batch: int) -> Question:
            return self.question(replace(request, batch=batch), gpu, ("batch",))

        return self.families.goes_by_sample(at(request.batch), lambda: at(SMALL_BATCHES[0]))

    def _program(self, question: Question, family: Family, point: Point) -> Program:
        """Micro-steps with the updates that go with them."""
        return self.optimizers.program(
            family,
            point,
            question.setup,
            question.gpu,
            digest=key_digest({n: v for n, v in question.profile.key.items() if n != "setup"}),
            model=lambda: self.meta_model(question).model,
        )

    # -- sizes that the model takes

    def _sizes(
        self, profile: StepProfile, request: Setup, gpu: GpuTraits | None = None
    ) -> SizeAnswer:
        check_own_parts(request, self._tracer.module_inputs)
        sizes = asked_sizes(request)
        known_answer = profile.sizing.find(sizes)
        if known_answer is not None and request.image_size in profile.model_cards:
            return known_answer
        meta_model = self._tracer.meta_model(profile, request, gpu)
        answer: SizeAnswer = meta_model.answer(request)
        profile.model_cards[request.image_size] = meta_model.card
        profile.sizing.exact[sizes] = answer
        learn_lengths(profile.sizing, request, meta_model)
        self._known_profiles.save_model(profile)
        return answer
