"""The answer to a question: a program, the point to run it at, and the stream that comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from memest.config.parallelism import Strategy
from memest.config.setup import Setup
from memest.events import Category, Phase, Trace, Weight
from memest.profiles.axes import eval_batches
from memest.profiles.evaluation import with_evaluation
from memest.profiles.family import Point
from memest.profiles.model_card import ModelCard
from memest.profiles.program import Program
from memest.profiles.stream import Stream
from memest.profiles.transient import with_transient
from memest.workspaces.operator_call import GpuTraits

__all__ = ["Run"]

_EXTRA_STEPS = 1
"""The prompt is a step that makes no token of its own: its token comes with the next."""


@dataclass(frozen=True, slots=True)
class Run:
    """A question that is answered: a program and the point to run it at.

    Attributes:
        setup: with the sizes that are taken.
        gpu: whose kernels run.
        program: micro-steps and updates.
        point: of the program's family.
        card: the model.
        family: ``model_type`` of its configuration, else its class.
        evaluation: the first batches of the evaluation that follows the last step; None without.
        generation: the first steps of the generation that follows; None without.
        new_tokens: of that generation, as many as it has steps.
        around: phases around the steps that put something on the GPU, with its bytes beyond what is
            there behind the last step.
    """

    setup: Setup
    gpu: GpuTraits
    program: Program
    point: Point
    card: ModelCard
    family: str
    evaluation: Trace | None = None
    generation: Trace | None = None
    new_tokens: int = 0
    around: tuple[tuple[Phase, int], ...] = ()

    @property
    def stream(self) -> Stream:
        """The stream of the whole run."""
        return self._stream(self.setup.grad_accum)

    @property
    def short_stream(self) -> Stream:
        """A stream with the same peaks, no longer than it must be."""
        return self._stream(self.program.enough_micro_steps(self.setup.grad_accum))

    def _stream(self, grad_accum: int) -> Stream:
        is_spread = self._is_spread
        stream = self.program.stream(
            self.point,
            self.gpu,
            num_steps=self.setup.num_steps,
            grad_accum=grad_accum,
            cues=is_spread,
        )
        stream = self.with_tails(stream)
        if not is_spread:
            return self.with_around(stream)
        from memest.sharding.rank import rank_stream

        landmarks = self.program.trace.landmarks
        out = rank_stream(stream, self.setup, self.weights, landmarks, grad_accum)
        return self.with_around(out)

    def before_writing(self, stream: Stream) -> Stream:
        """Of a stream of the run, the one at whose end an engine on the GPU writes."""
        return stream

    def with_around(self, stream: Stream) -> Stream:
        """A run with what saving and resuming put on the GPU for a moment, at its end."""
        for phase, nbytes in self.around:
            label = f"{phase.value}: tensors that are gathered or read"
            stream = with_transient(stream, phase, nbytes, label, Category.TEMPORARIES)
        return stream

    def with_tails(self, stream: Stream) -> Stream:
        """A run with the evaluation and the generation that follow its last step."""
        setup, is_spread = self.setup, self._is_spread
        tails = [(self.evaluation, eval_batches(setup))]
        if self.new_tokens:
            tails.append((self.generation, self.new_tokens + _EXTRA_STEPS))
        for tail, batches in tails:
            if tail is not None:
                _, numbers = self.program.numbers_at(self.point, self.gpu)
                stream = with_evaluation(
                    stream,
                    tail,
                    self.gpu,
                    tuple(numbers),
                    batches=batches,
                    step=setup.num_steps,
                    cues=is_spread,
                )
        return stream

    @property
    def _is_spread(self) -> bool:
        return self.setup.distributed.strategy is not Strategy.NONE

    @property
    def is_program_alone(self) -> bool:
        """Whether the stream is that of the program: what its formulas say holds for the run."""
        tails = (self.evaluation, self.generation)
        is_alone = tails == (None, None) and not self.around
        return type(self) is Run and is_alone and not self._is_spread

    @property
    def spread_notes(self) -> list[str]:
        """What there is to say of several GPUs."""
        if not self._is_spread:
            return []
        from memest.sharding.engine import RankStream

        stream = self.short_stream
        assert isinstance(stream, RankStream)
        return list(stream.notes)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The parameters of the model."""
        family = self.program.micro_steps
        return family.weights_at(family.numbers_at(self.point))

    @property
    def notes(self) -> list[str]:
        """What the trace has to say."""
        if self.evaluation is None:
            return list(self.program.trace.notes)
        return list(dict.fromkeys((*self.program.trace.notes, *self.evaluation.notes)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of the model, see :attr:`memest.events.Trace.counts`."""
        family = self.program.micro_steps
        numbers = family.numbers_at(self.point)
        return tuple(numbers[place] for place in family.skeleton.counts)
