"""The trace of a pipeline stage, taken apart into what can be played again: its pieces.

``trace.stages`` writes such traces, ``sharding.pipeline`` plays them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memest.events import ALLOC, CueKind, SeamKind, Trace
from memest.profiles.pieces import JoinedTraces, Span

__all__ = [
    "PIECE_END",
    "REGION_END",
    "STAGE_END",
    "StagePieces",
    "piece_seam",
    "with_places",
]

PIECE_END = 9
REGION_END = 1000
"""Index of the seam at which the region of a step ends."""
STAGE_END = 1001
"""Index of the seam behind it."""
_PLACES = {"F": (0, 1), "B": (1, PIECE_END)}
"""Of the seams around a piece of work."""


def piece_seam(number: int, place: int) -> int:
    """Index of the seam before a piece.

    Args:
        number: of the micro-batch in the trace, from 0.
        place: 0 forward, 1 backward, ``PIECE_END`` behind it.
    """
    return 10 * number + place


@dataclass(slots=True)
class StagePieces:
    """What a stage's trace holds, in numbers of a joined trace.

    Attributes:
        trace: of the stage, alone.
        event: of its first event in the joined trace.
        allocation: of its first allocation there.
    """

    trace: Trace
    event: int
    allocation: int
    _at: dict[int, int] = field(default_factory=dict)
    _cues: dict[tuple[CueKind, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = {s.index: s.position for s in self.trace.seams if s.kind is SeamKind.PIECE}
        for cue in self.trace.cues:
            if cue.kind >= CueKind.STAGE_INPUT and cue.allocation >= 0:
                self._cues[cue.kind, cue.index] = cue.allocation + self.allocation

    @property
    def load(self) -> Span:
        """The weights of the stage."""
        stop = next(s.position for s in self.trace.seams if s.kind is SeamKind.OPTIMIZER_MADE)
        return self._joint_span((0, stop))

    def piece(self, work: str, number: int) -> Span:
        """Work on one of the traced micro-batches."""
        start, end = (self._at[piece_seam(number, place)] for place in _PLACES[work])
        return self._joint_span((start, end))

    def output_position(self, number: int) -> int:
        """Where the output of a micro-batch is there, and its loss is not."""
        return self.event + next(
            cue.position
            for cue in self.trace.cues
            if cue.kind is CueKind.STAGE_OUTPUT and cue.index == number
        )

    @property
    def region_end(self) -> Span:
        """What the end of an autocast region lets go of."""
        return self._joint_span((self._at[REGION_END], self._at[STAGE_END]))

    @property
    def casts_again(self) -> int:
        """The traced micro-batch that is first in a region and finds gradients there."""
        return 2 if piece_seam(2, 0) in self._at else 1

    def allocation_of(self, kind: CueKind, number: int) -> int | None:
        """What a cue names; None where there is none."""
        return self._cues.get((kind, number))

    @property
    def gradients(self) -> list[int]:
        """What the first micro-batch leaves in ``.grad``, in the order of the parameters."""
        return [a for (kind, _), a in sorted(self._cues.items()) if kind is CueKind.KEPT_GRADIENT]

    def allocations(self, span: Span, joined_trace: Trace) -> list[int]:
        """The allocations that a piece makes."""
        return [v >> 2 for v in joined_trace.events[slice(*span)] if v & 3 == ALLOC]

    def _joint_span(self, span: Span) -> Span:
        return span[0] + self.event, span[1] + self.event


def with_places(joined_traces: JoinedTraces) -> tuple[Trace, list[int]]:
    """The joined trace with places in a table for sizes, and the table."""
    places: dict[int, int] = {}
    numbered_trace = replace(joined_traces.trace)
    numbered_trace.sizes = [
        places.setdefault(size, len(places)) for size in joined_traces.trace.sizes
    ]
    return numbered_trace, list(places)
