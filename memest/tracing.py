"""Traces on demand: one model, asked for setups and GPUs.

What was traced once is kept, in memory and in the store, and answers everything that follows from
it. Torch is loaded when a trace has to be made, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.attention import check_flash_gpu
from memest.deepspeed_file import with_hidden_size
from memest.distributed import ALONE
from memest.errors import MemestError, MissingDependencyError
from memest.events import Trace
from memest.feed import NOTHING, Feed
from memest.found import Found
from memest.hidden.call import GpuTraits
from memest.installed import release
from memest.optimizer_names import facts_of
from memest.options import HARMLESS, find_option
from memest.reach import place_of, worth_varying
from memest.remainders import across, place_across, traces_around
from memest.replay.conf import AllocatorConf
from memest.replays import Replays
from memest.result import ModelFacts
from memest.setup import Attention, Setup
from memest.shelf import Shelf, Steps, asks_for_gpu, chosen_like
from memest.sizes import (
    UNLIMITED,
    Sizes,
    as_traced,
    fields_of,
    gathering_ranks,
    highest,
    key_of,
    samples,
    sizes_of,
    structure_of,
    windows,
    words,
)
from memest.steps.document import FORMAT
from memest.steps.family import Family, Point, alone
from memest.steps.formula import NoFormulaError
from memest.steps.program import Program
from memest.steps.sizing import Answer, asked_sizes
from memest.store import Store, digest_of
from memest.updates import Updates

if TYPE_CHECKING:
    from memest.models.resolve import ModelSource

__all__ = ["Found", "Tracer"]

Progress = Callable[[str], None]

_MAX_EVALUATIONS = 16


class Tracer:
    """Makes and keeps the traces of one model.

    Args:
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        feed: what a module of one's own is fed.
        progress: told what is being done.
        stores: where traces are kept; the first one is written to.
    """

    def __init__(
        self, *, source: ModelSource | None = None, module: Any = None, feed: Feed = NOTHING,
        progress: Progress | None = None, stores: Sequence[Store] | None = None,
    ) -> None:  # fmt: skip
        self._source = source
        self._module = module
        self._feed = feed
        self.progress = progress
        self._shelf = Shelf(stores)
        self._known: dict[Setup, Steps] = {}
        self._updates = Updates(self._shelf, self._keeps, self._say)
        self._replays: dict[AllocatorConf, Replays] = {}
        self._evaluations: dict[str, Trace] = {}
        self.traces_made = 0

    @classmethod
    def of(
        cls, model: Any, *, feed: Feed = NOTHING, trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> Tracer:  # fmt: skip
        """The tracer of whatever a user calls a model: a name, a path, a factory, a live module.

        Raises:
            MemestError: a name that leads nowhere.
        """
        if not isinstance(model, str):
            return cls(module=model, feed=feed, progress=progress)
        from memest.models.resolve import resolve_model

        source = resolve_model(model, trust_remote_code=trust_remote_code)
        return cls(source=source, feed=feed, progress=progress)

    @property
    def name(self) -> str:
        """How to call the model in results."""
        return self._source.id if self._source is not None else type(self._module).__name__

    # -- questions

    def resolve(self, asked: Setup) -> Setup:
        """The setup with what the model decides filled in: sizes, task, attention.

        Raises:
            MemestError: the model cannot be built, or not for these sizes.
        """
        steps = self._steps(asked)
        answer = self._answer(steps, asked)
        card = steps.cards[asked.image_size]
        return replace(
            asked, **answer.taken, task=card.task, attn_implementation=card.attention,
            checkpointing=card.checkpointing,
            distributed=with_hidden_size(asked.distributed, self._config),
        )  # fmt: skip

    def with_own_batch(self, asked: Setup, options: Mapping[str, Any]) -> Setup:
        """The setup with the batch of the example inputs, where options name none."""
        if any(find_option(name).name == "batch" for name in options if name not in HARMLESS):
            return asked
        if self._feed.inputs is None and (self._source is None or self._source.config is not None):
            return asked
        batch = None
        if asked.batch == Setup().batch:
            steps = self._steps(asked)
            self._answer(steps, asked)
            batch = steps.cards[asked.image_size].batch
        return asked if batch is None else replace(asked, batch=batch)

    @property
    def _config(self) -> Any:
        """The configuration of the model; None where it has none."""
        if self._source is not None:
            return self._source.config
        return getattr(self._module, "config", None)

    def assumptions(self, asked: Setup) -> tuple[str, ...]:
        """What was decided for a setup, in sentences."""
        steps = self._steps(asked)
        answer = self._answer(steps, asked)
        card = steps.cards[asked.image_size]
        source = self._source.notes if self._source is not None else ()
        return (*card.about, *answer.notes, *card.remarks, *source)

    def find(self, asked: Setup, gpu: GpuTraits, vary: Sequence[str] = ()) -> Found:
        """What answers a setup on a GPU.

        Args:
            asked: as the user gave it.
            gpu: whose kernels run.
            vary: sizes (``batch``, ``seq_len``, ...) that further questions will change: worth a
                few more traces now.

        Raises:
            MemestError: the steps cannot be traced.
        """
        return self._found(asked, gpu, vary)

    def find_once(self, asked: Setup, gpu: GpuTraits) -> Found:
        """As :meth:`find`, with one trace at most: for a size near which nobody will ask again."""
        return self._found(asked, gpu, None)

    def _found(self, asked: Setup, gpu: GpuTraits, vary: Sequence[str] | None) -> Found:
        """:meth:`find`; no family is grown where ``vary`` is None."""
        steps, setup = self._steps(asked), self.resolve(asked)
        if setup.attn_implementation is Attention.FLASH_ATTENTION_2:
            check_flash_gpu(gpu.capability)
        sizes = sizes_of(setup)
        if setup.distributed.pp > 1:
            from memest.pipelined import pipelined

            return pipelined(self, steps, asked, setup, gpu, vary)
        if asks_for_gpu(setup):
            family, point = self._of_one_gpu(steps, asked, setup, gpu, sizes)
            program = self._program(steps, asked, family, point, setup, gpu)
            return self._answered(steps, asked, setup, gpu, program, point)
        family, point = self.family(steps, asked, setup, gpu, sizes, vary)
        program = self._program(steps, asked, family, point, setup, gpu)
        return self._answered(steps, asked, setup, gpu, program, point)

    def family(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, sizes: Sizes,
        vary: Sequence[str] | None,
    ) -> tuple[Family, Point]:  # fmt: skip
        """The family that answers for sizes, traced where there is none; grown unless told not to.

        Args:
            steps: of the structure.
            asked: as the user gave it.
            setup: with the sizes that are taken.
            gpu: whose kernels run.
            sizes: of the batch.
            vary: sizes that further questions will change; None grows nothing.
        """
        known = self._shelf.held(steps, sizes, gpu, cues=setup.distributed != ALONE)
        held = known
        if held is None:
            family = alone(self._traced(steps, asked, setup, gpu), sizes)
            self._shelf.keep(steps, family)
            held = family, ()
        if vary is not None and (known is None or not self._varies(held[0], vary, sizes)):
            held = self._extended(steps, asked, setup, gpu, sizes, held, vary)
        return held

    def _of_one_gpu(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, sizes: Sizes
    ) -> tuple[Family, Point]:
        """A trace for these sizes on this GPU alone: nothing else follows from it.

        Liger's loss goes in chunks whose number jumps with the batch, and its Python asks for the
        GPU's properties, as Inductor does to split and to fuse.
        """
        own = self._shelf.of_gpu(steps, gpu)
        known = self._shelf.held(own, sizes, gpu, cues=setup.distributed != ALONE)
        if known is None:
            known = alone(self._traced(steps, asked, setup, gpu), sizes), ()
            self._shelf.keep(own, known[0])
        return known

    def _program(
        self, steps: Steps, asked: Setup, family: Family, point: Point, setup: Setup, gpu: GpuTraits
    ) -> Program:
        """Micro-steps with the updates that go with them."""

        def roles() -> Any:
            model = self._run(steps, asked).model
            from memest.trace.roles import roles_of

            return roles_of(model)

        return self._updates.program(
            family, point, setup, gpu, model=digest_of(steps.key), roles=roles
        )

    def _answered(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, program: Program,
        point: Point,
    ) -> Found:  # fmt: skip
        card = steps.cards[asked.image_size]
        config: Any = self._source.config if self._source is not None else None
        kind = (config or {}).get("model_type")
        if self._module is not None:
            kind = getattr(getattr(self._module, "config", None), "model_type", None)
        evaluation = None
        if setup.eval_batch is not None:
            evaluation = self._evaluation(steps, asked, setup, gpu)
        return Found(setup, gpu, program, point, card, str(kind or card.class_name), evaluation)

    def _evaluation(self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits) -> Trace:
        """The first batches of the evaluation, traced once for each batch and GPU."""
        assert setup.eval_batch is not None
        setup = replace(setup, batch=setup.eval_batch)
        return self._beside(
            steps, asked, setup, gpu, {"predictions": setup.eval_samples is not None}
        )

    def generation(self, setup: Setup, gpu: GpuTraits) -> Trace:
        """The first steps of the generation that a resolved setup names."""
        what = {"generation": repr(setup.generation)}
        return self._beside(self._steps(setup), setup, setup, gpu, what)

    def _beside(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, what: dict[str, Any]
    ) -> Trace:
        """An evaluation or generation, traced once for each batch and GPU."""
        about = {"sizes": sizes_of(setup), **what, "gpu": repr(gpu)}
        ranks = gathering_ranks(setup.distributed)
        if ranks is not None and "generation" not in what:
            about["ranks"] = ranks
        key = digest_of([steps.setup.to_dict(), about])
        known = self._evaluations.get(key) or self._shelf.evaluation(steps, about)
        if known is None:
            run = self._run(steps, asked)
            from memest.trace.session import evaluate_built

            self._say(f"tracing an evaluation at {words(sizes_of(setup))}")
            if len(self._evaluations) >= _MAX_EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations)))
            known = evaluate_built(
                run, as_traced(setup), gpu, generates="generation" in what, ranks=ranks
            )
            self._shelf.keep_evaluation(steps, about, known)
        self._evaluations[key] = known
        return known

    def limit(self, asked: Setup, axis: str) -> int | None:
        """The greatest length that the model takes.

        Args:
            asked: as the user gave it.
            axis: ``seq_len`` or ``target_len``.

        Returns:
            None where the model names none, or where it is not known.
        """
        setup = self.resolve(asked)
        return self._limit(self._steps(asked), setup, axis)

    def trace(self, asked: Setup, gpu: GpuTraits) -> Found:
        """The same by a trace of its own, whatever is known: to compare with."""
        steps, setup = self._steps(asked), self.resolve(asked)
        sizes = sizes_of(setup)
        family = alone(self._traced(steps, asked, setup, gpu), sizes)
        program = self._program(steps, asked, family, (), setup, gpu)
        return self._answered(steps, asked, setup, gpu, program, ())

    def replays(self, conf: AllocatorConf) -> Replays:
        """Where replays of this model's streams are kept."""
        return self._replays.setdefault(conf, Replays(conf))

    def facts(self, found: Found) -> ModelFacts:
        """The model, counted."""
        parameters, trainable, buffers, parameter_bytes = found.counts
        card, source = found.card, self._source
        return ModelFacts(
            id=source.id if source is not None else card.class_name,
            class_name=card.class_name,
            parameters=parameters,
            trainable_parameters=trainable,
            buffers=buffers,
            parameter_bytes=parameter_bytes,
            source=source.provenance if source is not None else "live module",
            task=card.task.value,
        )

    # -- stages of a pipeline

    def stage_steps(self, whole: Steps, stage: Setup, mark: Any) -> Steps:
        """What is known of one stage of a model.

        Args:
            whole: what is known of the model: a stage is cut out of the same one.
            stage: the setup of its traces.
            mark: what tells the stage from others in a key.
        """
        structure = structure_of(stage)
        steps = self._known.get(structure)
        if steps is None:
            key = {**whole.key, "stage": mark} if whole.key else {}
            steps = self._known[structure] = Steps(structure, key)
            if key:
                self._shelf.load(steps)
            steps.cards, steps.runs = whole.cards, whole.runs
        return steps

    def run(self, steps: Steps, asked: Setup) -> Any:
        """The model on the meta device, built once."""
        return self._run(steps, asked)

    @property
    def updates(self) -> Updates:
        """The optimizers that were traced."""
        return self._updates

    def answered(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, program: Program,
        point: Point,
    ) -> Found:  # fmt: skip
        """What a program answers for a setup."""
        return self._answered(steps, asked, setup, gpu, program, point)

    # -- what is known

    def _steps(self, asked: Setup) -> Steps:
        structure = structure_of(asked, live=self._module is not None)
        steps = self._known.get(structure)
        if steps is None:
            steps = self._known[structure] = Steps(structure, self._key(structure))
            if steps.key:
                self._shelf.load(steps)
        return steps

    @property
    def _keeps(self) -> bool:
        """Whether everything that the traces depend on can be written down."""
        source = self._source
        if source is None or source.config is None or source.trust_remote_code:
            return False
        return self._feed == NOTHING

    def _key(self, structure: Setup) -> dict[str, Any]:
        source = self._source
        if not self._keeps or source is None:
            return {}
        key = {
            "format": FORMAT,
            "model": source.id,
            "config": source.config,
            "auto_class": source.auto_class,
            "setup": key_of(structure),
        }
        package = facts_of(structure.optim).package
        if package:  # it steps in backward, and is part of the trace
            key["library"] = [package, release(package.replace("-", "_"))]
        if structure.use_liger_kernel or structure.fused_loss:
            key["kernels"] = [release("liger_kernel"), release("cut_cross_entropy")]
        return key

    @staticmethod
    def _varies(family: Family, vary: Sequence[str], sizes: Sizes) -> bool:
        return all(
            axis in family.axes or (axis == "target_len" and family.tied)
            or (axis == "batch" and sizes["batch"] == 1)
            for axis in vary
            if axis in sizes
        )  # fmt: skip

    # -- answers of the model

    def _answer(self, steps: Steps, asked: Setup) -> Answer:
        wanted = asked_sizes(asked)
        known = steps.sizing.find(wanted)
        if known is not None and asked.image_size in steps.cards:
            return known
        run = self._run(steps, asked)
        answer: Answer = run.answer(asked)
        steps.cards[asked.image_size] = run.card
        steps.sizing.exact[wanted] = answer
        self._learn_lengths(steps, asked, run)
        self._shelf.save_model(steps)
        return answer

    def _learn_lengths(self, steps: Steps, asked: Setup, run: Any) -> None:
        """Ask the model for some lengths, to know its answer for all."""
        given = {name for name, _ in asked_sizes(asked)}
        # what a model takes does not depend on who shares it
        base = replace(asked, seq_len=None, target_len=None, distributed=ALONE)
        if given - {"seq_len", "target_len"}:
            return
        for names in (("seq_len",), ("target_len",), ("seq_len", "target_len")):
            limits = {name: highest(run, base, name) for name in names}
            if 0 in limits.values():
                continue
            answers = {}
            for lengths in samples(limits):
                setup = replace(base, **lengths)
                try:
                    answers[asked_sizes(setup)] = run.answer(setup)
                except MemestError:
                    continue
            if len(answers) >= 3:
                steps.sizing.learn(answers, {})

    def _run(self, steps: Steps, asked: Setup) -> Any:
        """The model, built."""
        run = steps.runs.get(asked.image_size)
        if run is not None:
            return run
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Tracing a model needs torch and transformers: pip install 'memest[torch]'."
            ) from error
        from memest.trace.session import build

        self._say("building the model on the meta device")
        feed = self._feed
        run = build(
            as_traced(asked), self._source, self._module, feed.inputs, feed.loss,
            step_fn=feed.step_fn, dims=feed.dims, model_args=feed.model_args,
        )  # fmt: skip
        steps.runs[asked.image_size] = run
        return run

    # -- traces

    def _traced(self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits) -> Trace:
        run = self._run(steps, asked)
        from memest.trace.session import trace_built

        self._say(f"tracing training steps at {words(sizes_of(setup))}")
        self.traces_made += 1
        return trace_built(run, as_traced(setup), gpu)

    def _extended(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits, sizes: Sizes,
        held: tuple[Family, Point], vary: Sequence[str],
    ) -> tuple[Family, Point]:  # fmt: skip
        """A family around the point where one is wanted and to be had, else what is held."""
        self._shelf.take(steps, lambda _: True)
        near = [f for f in steps.families if chosen_like(f, held[0])]
        axes = worth_varying(near, sizes, vary, own=held[0])
        while axes:
            place = place_of(axes, sizes, held[0])
            grown = self._across(steps, held, near, sizes, axes)
            if grown is None and place not in steps.barren:
                try:
                    grown = self._grown(steps, asked, setup, gpu, held, near, axes)
                except MissingDependencyError:
                    return held  # what is asked has its answer; more is not to be had here
                if grown is None:
                    steps.barren.add(place)
                    self._shelf.save_model(steps)
            if grown is not None:
                self._shelf.keep(steps, grown)
                point = grown.point_of(sizes)
                if point is not None:
                    return grown, point
            # perhaps only the batch is well-behaved
            axes = ("batch",) if len(axes) > 1 and "batch" in axes else ()
        return held

    def _across(
        self, steps: Steps, held: tuple[Family, Point], near: Sequence[Family], sizes: Sizes,
        axes: tuple[str, ...],
    ) -> Family | None:  # fmt: skip
        """The family of what was traced at lengths of several remainders, where there is one."""
        place = place_across(axes, sizes, held[0], self._thresholds)
        if place in steps.barren:
            return None
        tied = _tied(sizes, axes)
        centre = tuple(sizes[axis] for axis in axes)
        traces = traces_around(near, sizes, axes, tied=tied)
        traces[centre] = held[0].at(held[1])
        beside = {*axes, *(("target_len",) if tied else ())}
        fixed = {n: v for n, v in sizes.items() if n not in beside}
        try:
            return across(traces, centre, axes, fixed, self._thresholds, tied=tied)
        except NoFormulaError:
            steps.barren.add(place)
            self._shelf.save_model(steps)
            return None

    def _grown(
        self, steps: Steps, asked: Setup, setup: Setup, gpu: GpuTraits,
        held: tuple[Family, Point], near: Sequence[Family], axes: tuple[str, ...],
    ) -> Family | None:  # fmt: skip
        from memest.growth import grow, range_of

        sizes = sizes_of(setup)
        tied = _tied(sizes, axes)
        tokens = max(sizes.get("seq_len", 256), sizes.get("target_len", 0))
        found = {}
        pieces = setup.distributed.sequence_pieces
        for axis in reversed(axes):  # the batch comes last: how far it goes depends on the others
            limit = self._limit(steps, setup, axis)
            multiple = pieces if axis == "seq_len" else 1
            found[axis] = range_of(axis, sizes[axis], limit, tokens, self._thresholds, multiple)
            if (reached := found[axis]) is not None and axis in ("seq_len", "target_len"):
                tokens = max(tokens, reached.high)
        ranges = {axis: reached for axis in axes if (reached := found[axis]) is not None}
        if not ranges:
            return None
        known = traces_around(near, sizes, tuple(ranges), tied=tied)
        centre = tuple(sizes[axis] for axis in ranges)
        known[centre] = held[0].at(held[1])

        def trace_at(wanted: Sizes) -> Trace:
            resized = replace(setup, **fields_of(wanted))
            own = replace(asked, image_size=resized.image_size) if "image_size" in ranges else asked
            return self._traced(steps, own, resized, gpu)

        return grow(sizes, ranges, known, trace_at, tied=tied)

    @property
    def _thresholds(self) -> list[int]:
        """Lengths at which the config says that something changes."""
        config = None if self._source is None else self._source.config
        return sorted(set(windows(config or {})))

    def _limit(self, steps: Steps, setup: Setup, axis: str) -> int | None:
        """The greatest size the model takes."""
        if axis not in ("seq_len", "target_len"):
            return None
        highs = [
            rule.highs[rule.names.index(axis)] for rule in steps.sizing.rules if axis in rule.names
        ]
        limit = max(highs, default=None)
        return None if limit is None or limit >= UNLIMITED else max(limit, getattr(setup, axis))

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text)


def _tied(sizes: Sizes, axes: Sequence[str]) -> bool:
    """Whether the target is as long as the source, at all sizes of these axes."""
    same = "target_len" in sizes and sizes["target_len"] == sizes.get("seq_len")
    return same and "target_len" not in axes and "seq_len" in axes
