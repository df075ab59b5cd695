"""A trace written out as lists of rows that point at each other.

To compare traces of a model at two depths, what depends on the depth has to be told from what does
not. A row's token says what it is, without any number that counts layers; its pointers say which
rows it is about: a free points at the allocation, an allocation at the module that made it, a
module's path at the number of its layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.events import (
    ALLOC,
    CALL,
    FREE,
    MARK,
    OF_MODULES,
    OF_WEIGHTS,
    WARM_UP,
    Cue,
    Trace,
)

__all__ = ["Listing", "Pointer", "Stack", "Template", "Transcript", "fill_in", "templates_of"]

Pointer = tuple[int, int]
"""A row: number of its listing, position in it."""

Template = tuple[str, int, int]
"""A text with ``\\0`` where it names a layer of a stack, the stack, and the layer's number; without
a layer the text, -1 and 0."""

NO_LAYER = -1


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of a model, of which some repeat with a period.

    Attributes:
        paths: of the module lists that hold the layers, as in a trace.
        period: layers that repeat together.
        before: layers in front of those that repeat.
        behind: layers behind them.
        count: periods that there are.
    """

    paths: tuple[str, ...]
    period: int
    before: int
    behind: int
    count: int

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return self.depth_at(self.count)

    def depth_at(self, periods: int) -> int:
        """How many layers there would be with so many periods."""
        return self.before + self.period * periods + self.behind


@dataclass(slots=True)
class Listing:
    """Rows of one kind in their order.

    Attributes:
        tokens: what each row is; empty where nobody compares.
        pointers: of each row.
    """

    tokens: list[int] = field(default_factory=list)
    pointers: list[tuple[Pointer, ...]] = field(default_factory=list)


def templates_of(stacks: Sequence[Stack]) -> Callable[[str], Template]:
    """What finds the number of a layer in the path of a module."""
    numbers = {path: number for number, stack in enumerate(stacks) for path in stack.paths}
    paths = "|".join(re.escape(path) for path in sorted(numbers, key=len, reverse=True))
    pattern = re.compile(rf"(?:^|(?<=\.))({paths})\.(\d+)(?=\.|$)")
    known: dict[str, Template] = {}

    def template(text: str) -> Template:
        out = known.get(text)
        if out is None:
            found = pattern.search(text)
            if found is None:
                out = text, NO_LAYER, 0
            else:
                gap = text[: found.start(2)] + "\0" + text[found.end(2) :]
                out = gap, numbers[found[1]], int(found[2])
            known[text] = out
        return out

    return template


def fill_in(template: Template, layer: int) -> str:
    """The text of a template for a layer."""
    text, stack, _ = template
    return text if stack == NO_LAYER else text.replace("\0", str(layer), 1)


class Transcript:
    """A trace as listings.

    The first listings stand for the layers of the stacks and have no rows of their own; modules,
    weights, classes of modules, units, shared paths and attention choices follow, then the events,
    cut at marks and seams.

    Args:
        trace: any.
        stacks: of the model.
        vocabulary: numbers of tokens, which traces that are compared share; None for no tokens.
    """

    MODULES, WEIGHTS, KINDS, UNITS, SHARED, CHOICES, EVENTS = range(7)

    def __init__(
        self,
        trace: Trace,
        stacks: Sequence[Stack],
        vocabulary: dict[Hashable, int] | None = None,
    ) -> None:
        self.trace = trace
        self._first = len(stacks)
        self._vocabulary = vocabulary
        self.template = templates_of(stacks)
        self.listings = [Listing() for _ in stacks]
        self.module_templates = [self.template(name) for name in trace.module_names]
        self.weight_templates = [self.template(weight.name) for weight in trace.weights]
        self.kind_templates = [self.template(name) for name in trace.landmarks.kinds]
        self._add_tables()
        self.rows: list[tuple[int, int]] = []
        """What each event row is: kind (``SEAM`` and ``CUE`` beside those of events), index."""
        self.first_rows: list[int] = []
        """Of each listing of events, where its rows begin in ``rows``."""
        self._add_events()

    SEAM, CUE = 4, 5

    def listing(self, kind: int) -> int:
        """The number of a listing: one of the constants, or ``EVENTS`` and the segment's number."""
        return self._first + kind

    def _token(self, *parts: Hashable) -> int:
        assert self._vocabulary is not None
        return self._vocabulary.setdefault(parts, len(self._vocabulary))

    def layers(self, *templates: Template) -> tuple[Pointer, ...]:
        """Pointers at the layers that texts name."""
        return tuple((stack, number) for _, stack, number in templates if stack != NO_LAYER)

    def _add_table(self, rows: Sequence[tuple[tuple[Template, ...], tuple[Any, ...]]]) -> None:
        listing = Listing(pointers=[self.layers(*templates) for templates, _ in rows])
        if self._vocabulary is not None:
            listing.tokens = [
                self._token("row", *(t[:2] for t in templates), *more) for templates, more in rows
            ]
        self.listings.append(listing)

    def _add_tables(self) -> None:
        trace, template, landmarks = self.trace, self.template, self.trace.landmarks
        self._add_table([((name,), ()) for name in self.module_templates])
        self._add_table(
            [
                (
                    (name,),
                    (w.shape, w.stride, w.dtype, w.trains, w.decays, w.has_grad, w.kept_dtype),
                )
                for name, w in zip(self.weight_templates, trace.weights, strict=True)
            ]
        )
        kinds = landmarks.kinds.values()
        self._add_table(
            [((name,), (kind,)) for name, kind in zip(self.kind_templates, kinds, strict=True)]
        )
        self._add_table(
            [(tuple(map(template, paths)), (len(paths), *more)) for paths, *more in landmarks.units]
        )
        self._add_table(
            [((template(a), template(b)), ()) for a, b in landmarks.shared_paths.items()]
        )
        self._add_table([((), choice) for choice in trace.attention_choices])

    def _add_events(self) -> None:
        rows = self.rows
        trace = self.trace
        events, cues, seams = trace.events, trace.cues, trace.seams
        # where the others stand among the events: seams first, then cues
        others = sorted(
            [(seam.position, self.SEAM, number) for number, seam in enumerate(seams)]
            + [(cue.position, self.CUE, number) for number, cue in enumerate(cues)]
        )
        last = 0
        for position, kind, number in others:
            rows.extend((v & 3, v >> 2) for v in events[last:position])
            last = position
            rows.append((kind, number))
        rows.extend((v & 3, v >> 2) for v in events[last:])
        cuts = [at for at, (kind, _) in enumerate(rows) if kind in (MARK, self.SEAM)]
        self.first_rows = [0, *(cut for cut in cuts if cut)]
        born: list[Pointer] = [(0, 0)] * len(trace.sizes)
        bounds = zip(self.first_rows, [*self.first_rows[1:], len(rows)], strict=True)
        # all births first: no free comes before, but cues may
        segments = [(rows[a:b], len(self.listings) + n) for n, (a, b) in enumerate(bounds)]
        for segment, number in segments:
            for position, (kind, index) in enumerate(segment):
                if kind == ALLOC:
                    born[index] = number, position
        call_tokens, birth_tokens = self._birth_tokens()
        for segment, _ in segments:
            listing = Listing(pointers=[self._pointers(row, born) for row in segment])
            if self._vocabulary is not None:
                listing.tokens = [
                    self._event_token(row, born, call_tokens, birth_tokens) for row in segment
                ]
            self.listings.append(listing)

    def _birth_tokens(self) -> tuple[list[int], list[int]]:
        if self._vocabulary is None:
            return [], []
        trace, ops = self.trace, self.trace.op_names
        modules = [template[:2] for template in self.module_templates]
        calls = [self._token("call", call) for call in trace.calls]
        births = [
            # what is as large as all weights grows with them
            self._token(
                "birth", 0 if ops[op] == WARM_UP else size, category, ops[op], modules[module]
            )
            for size, category, op, module in zip(
                trace.sizes, trace.categories, trace.ops, trace.modules, strict=True
            )
        ]
        return calls, births

    def _pointers(self, row: tuple[int, int], born: list[Pointer]) -> tuple[Pointer, ...]:
        kind, index = row
        if kind == FREE:
            return (born[index],)
        if kind == ALLOC:
            return ((self._first + self.MODULES, self.trace.modules[index]),)
        if kind == CALL:
            return ((self._first + self.MODULES, self.trace.site_modules[index]),)
        if kind == self.CUE:
            cue = self.trace.cues[index]
            out = self.owner_of(cue)
            return out if cue.allocation < 0 else (*out, born[cue.allocation])
        return ()

    def owner_of(self, cue: Cue) -> tuple[Pointer, ...]:
        """The module or the weight that a cue is about."""
        if cue.kind in OF_MODULES:
            return ((self._first + self.MODULES, cue.index),)
        if cue.kind in OF_WEIGHTS:
            return ((self._first + self.WEIGHTS, cue.index),)
        return ()

    def _event_token(
        self,
        row: tuple[int, int],
        born: list[Pointer],
        call_tokens: list[int],
        birth_tokens: list[int],
    ) -> int:
        kind, index = row
        trace = self.trace
        if kind == ALLOC:
            return birth_tokens[index]
        if kind == FREE:
            return self._token(FREE, birth_tokens[index], born[index][0])
        if kind == CALL:
            module = self.module_templates[trace.site_modules[index]]
            return self._token(CALL, call_tokens[trace.call_of_site[index]], module[:2])
        if kind == MARK:
            return self._token(MARK, trace.marks[index])
        if kind == self.SEAM:
            seam = trace.seams[index]
            return self._token(kind, seam.kind, seam.step, seam.index)
        cue = trace.cues[index]
        about: Any = cue.index
        if cue.kind in OF_MODULES:
            about = self.module_templates[cue.index][:2]
        elif cue.kind in OF_WEIGHTS:
            about = self.weight_templates[cue.index][:2]
        at = birth_tokens[cue.allocation] if cue.allocation >= 0 else None
        return self._token(kind, cue.kind, about, at)
