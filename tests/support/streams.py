"""The stream of a concrete trace, played as it was traced or composed of its pieces."""

from __future__ import annotations

from dataclasses import replace

from memest.events import Chains, Trace
from memest.profiles.pieces import Pieces
from memest.profiles.stream import Course, Player, Stream, lay_out, shape_of, slack_of
from memest.workspaces.operator_call import GpuTraits
from memest.workspaces.registry import workspaces_of


def make_stream(
    trace: Trace, gpu: GpuTraits, *, num_steps: int, grad_accum: int = 1, cues: bool = False
) -> Stream:
    """Traced steps with their updates, and what kernels allocate on this GPU.

    A trace of just these steps is played whole; any other is composed.
    """
    call_workspaces = [workspaces_of(call, gpu) for call in trace.calls]
    shape = shape_of(call_workspaces)
    places: dict[int, int] = {}
    numbered_trace = replace(trace)
    numbered_trace.sizes = [places.setdefault(size, len(places)) for size in trace.sizes]
    if trace.micro_steps == (grad_accum,) * num_steps:
        course = Course(module_names=trace.module_names, label_names=list(trace.op_names))
        player = Player(
            numbered_trace, shape, len(places), course, numbered_trace.cues if cues else ()
        )
        player.play((0, len(trace.events)), None, None)
        course.chains = Chains(player.chains(), course.places)
    else:
        course = lay_out(
            numbered_trace,
            shape,
            len(places),
            num_steps=num_steps,
            grad_accum=grad_accum,
            pieces=Pieces(numbered_trace),
            cues=cues,
        )
    table = [*places, *(w.nbytes for workspaces in call_workspaces for w in workspaces)]
    return Stream.of(course, [table[place] for place in course.places], slack_of(call_workspaces))
