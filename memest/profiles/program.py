"""A family of micro-steps and the updates that go with it, ready to be run for any sizes."""

from __future__ import annotations

from dataclasses import replace

from memest.events import Trace
from memest.profiles.family import Family, Point
from memest.profiles.pieces import MAX_REPEATS, Pieces, splice
from memest.profiles.stream import Course, Shape, Stream, lay_out, shape_of, slack_of
from memest.workspaces.operator_call import GpuTraits, OpCall, Workspace
from memest.workspaces.registry import workspaces_of

__all__ = ["Program"]

_MAX_COURSES = 32


class Program:
    """Composes streams of one structure; what only depends on the structure is kept.

    Args:
        micro_steps: the family of the micro-steps.
        updates: the family of clipping and optimizer, of no axes; None where no optimizer runs.

    Raises:
        TraceError: the steps cannot be composed.
    """

    def __init__(self, micro_steps: Family, updates: Family | None) -> None:
        self.micro_steps = micro_steps
        self._updates = updates
        self._own = len(micro_steps.table.formulas)
        self.trace = splice(
            micro_steps.skeleton, None if updates is None else updates.skeleton, self._own
        )
        self.pieces = Pieces(self.trace)
        self._later = [] if updates is None else updates.numbers_at(())
        self._later_calls = [] if updates is None else updates.calls_at(self._later)
        self._last: tuple[Point, list[int], list[OpCall]] | None = None
        self._last_stream: tuple[tuple[object, ...], Stream] | None = None
        self._courses: dict[tuple[int, int, Shape, bool], Course] = {}

    def stream(
        self, point: Point, gpu: GpuTraits, *, num_steps: int, grad_accum: int, cues: bool = False
    ) -> Stream:
        """The stream of a run.

        Args:
            point: sizes that the family covers.
            gpu: decides workspaces.
            num_steps: optimizer steps.
            grad_accum: micro-steps of each.
            cues: say where wrappers of the model act.
        """
        key = point, gpu, num_steps, grad_accum, cues
        if self._last_stream is not None and self._last_stream[0] == key:
            return self._last_stream[1]  # many accumulations come down to one
        numbers, call_workspaces = self.numbers_at(point, gpu)
        course = self.course(shape_of(call_workspaces), num_steps, grad_accum, cues=cues)
        table = [*numbers, *(w.nbytes for workspaces in call_workspaces for w in workspaces)]
        sizes = list(map(table.__getitem__, course.places))
        stream = Stream.of(course, sizes, slack_of(call_workspaces))
        self._last_stream = key, stream
        return stream

    def numbers_at(
        self, point: Point, gpu: GpuTraits
    ) -> tuple[list[int], list[tuple[Workspace, ...]]]:
        """The sizes of all places of the trace, and the workspaces of all its calls."""
        last = self._last
        if last is None or last[0] != point:
            numbers = self.micro_steps.numbers_at(point)
            calls = [*self.micro_steps.calls_at(numbers), *self._later_calls]
            # the same point is asked for many GPUs
            last = self._last = point, [*numbers, *self._later], calls
        return last[1], [workspaces_of(call, gpu) for call in last[2]]

    def full_course(self, point: Point, gpu: GpuTraits, num_steps: int, grad_accum: int) -> Course:
        """The course with every workspace, those that need no bytes at this point included."""
        _, call_workspaces = self.numbers_at(point, gpu)
        shape = tuple(
            tuple(replace(w, nbytes=1, high_nbytes=None) for w in workspaces)
            for workspaces in call_workspaces
        )
        return self.course(shape, num_steps, grad_accum)

    def trace_at(self, point: Point) -> Trace:
        """Micro-steps and updates as one concrete trace, in their order."""
        updates = None if self._updates is None else self._updates.at(())
        return splice(self.micro_steps.at(point), updates)

    def enough_micro_steps(self, grad_accum: int) -> int:
        """As many micro-steps as have the peaks of ``grad_accum`` of them, or nearly.

        Further ones are copies of those that are played, or much like them (``MAX_REPEATS``),
        unless all their batches are fetched first.
        """
        if self.pieces.prefetches:
            return grad_accum
        return min(grad_accum, MAX_REPEATS + 1)

    def course(
        self, shape: Shape, num_steps: int, grad_accum: int, *, cues: bool = False
    ) -> Course:
        """The course for these workspaces, laid out once."""
        key = num_steps, grad_accum, shape, cues
        course = self._courses.get(key)
        if course is None:
            course = lay_out(
                self.trace,
                shape,
                self._own + len(self._later),
                num_steps=num_steps,
                grad_accum=grad_accum,
                pieces=self.pieces,
                cues=cues,
            )
            if len(self._courses) >= _MAX_COURSES:
                self._courses.pop(next(iter(self._courses)))
            self._courses[key] = course
        return course
