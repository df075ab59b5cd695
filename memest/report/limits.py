"""How large a run can be, on a terminal: a sentence, then memory over sizes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.limits import CurvePoint, EffectiveBatch, End, Largest, MaxBatch, Of
from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.text import NARROW, VERDICT_STYLES, wide_enough
from memest.report.words import setup_items
from memest.units import format_delta, format_size

__all__ = ["effective_sentence", "limit_sentence", "print_limits", "render_limits"]

_SHORTEST_BAR, _LONGEST_BAR = 8, 36
_MOST_ROWS = 18
_NAMES = {
    Of.BATCH: ("batch", "a batch of {}"),
    Of.SEQ_LEN: ("sequence length", "a sequence length of {}"),
    Of.IMAGE_SIZE: ("image size", "an image size of {}"),
}


def limit_sentence(answer: Largest, model: str, of: Of, smallest: int = 1) -> str:
    """The answer for one GPU in one sentence.

    Args:
        answer: for the GPU.
        model: name of the model.
        of: what was looked for.
        smallest: size that was looked at.
    """
    name, one = _NAMES[of]
    where = f"{answer.gpu} ({format_size(answer.usable_bytes)} usable)"
    if answer.largest == 0:
        least = answer.at(smallest)
        need = "" if least is None else f": it needs {format_size(least.device_bytes)}"
        return f"Not even {one.format(smallest)} of {model} runs on {where}{need}."
    said = f"{answer.largest:,}"
    if answer.end is End.SEARCH:
        said = f"at least {said}, where the search ends"
    elif answer.end is End.MODEL:
        said += ", the most the model takes"
    first = f"The largest {name} of {model} on {where} is {said}"
    if answer.safe == answer.largest:
        return f"{first}{';' if answer.end is End.GPU else ', and'} it is safe."
    safe = "none" if answer.safe == 0 else f"{answer.safe:,}"
    return f"{first}; {safe} is safe."


def effective_sentence(way: EffectiveBatch, asked: int) -> str:
    """How an effective batch is reached, in one sentence."""
    need = f"{format_size(way.device_bytes)}, {way.verdict.value}"
    if way.num_micro_steps == 1:
        return f"{asked:,} samples a step: one batch of {way.micro_batch:,} ({need})."
    steps = f"{way.num_micro_steps:,} micro-steps of {way.micro_batch:,}"
    if way.samples == asked:
        return f"{asked:,} samples a step: {steps} ({need})."
    return f"{asked:,} samples a step, rounded up to {way.samples:,}: {steps} ({need})."


def render_limits(result: MaxBatch, *, width: int = 80, ascii_only: bool = False) -> str:
    """The result as plain text, lines without blanks at their ends."""
    # no environment: COLUMNS or FORCE_COLOR must not change what str() gives
    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={}
    )
    print_limits(result, out, ascii_only=ascii_only)
    assert isinstance(out.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in out.file.getvalue().splitlines())


def print_limits(result: MaxBatch, console: Console, *, ascii_only: bool = False) -> None:
    """Write the result to a console, as :func:`render_limits` does."""
    glyphs = ASCII if ascii_only else UNICODE
    width = wide_enough(console.width)
    for part in _parts(result, glyphs, width):
        console.print(part, width=width, highlight=False, markup=False)


def _parts(result: MaxBatch, glyphs: Glyphs, width: int) -> Iterator[RenderableType]:
    for answer in result.answers:
        yield Text(limit_sentence(answer, result.model, result.of, result.step), style="bold")
    items = _setup_words(result, glyphs)
    yield Text(f" {glyphs.dot} ".join(items), style="dim")
    if len(result.answers) == 1:
        answer = result.answers[0]
        said = _besides(result, answer)
        if said:
            yield Padding(Group(*map(Text, said)), (1, 0, 0, 0))
        yield Padding(_curve(result, answer, glyphs, width), (1, 0, 0, 0))
    else:
        yield Padding(_gpus(result, glyphs), (1, 0, 0, 0))
    for title, sentences in (("Assumed", result.assumptions), ("Notes", result.notes)):
        if sentences:
            listed = Table.grid(padding=(0, 1, 0, 0))
            for sentence in sentences:
                listed.add_row(glyphs.bullet, Text(sentence))
            body = Padding(listed, (0, 0, 0, 2))
            yield Padding(Group(Text(title, style="bold"), body), (1, 0, 0, 0))


def _setup_words(result: MaxBatch, glyphs: Glyphs) -> list[str]:
    """The setup without the size that was looked for."""
    first, *rest = setup_items(result.setup, times=glyphs.times)
    gone = {
        Of.BATCH: f"batch {result.setup.batch}",
        Of.SEQ_LEN: f"{result.setup.seq_len} tokens",
        Of.IMAGE_SIZE: f"{result.setup.image_size} px",
    }[result.of]
    sizes = [size for size in first.split(f" {glyphs.times} ") if size != gone]
    same = f"target {result.setup.target_len} tokens"
    joined = f" {glyphs.times} ".join(sizes)
    return [item for item in (joined, *rest) if item and item != same]


def _besides(result: MaxBatch, answer: Largest) -> list[str]:
    """What there is to say of one answer after its sentence."""
    said = []
    for multiple in answer.multiples:
        if multiple.largest == answer.largest and multiple.safe == answer.safe:
            continue
        safe = "none" if multiple.safe == 0 else f"{multiple.safe:,}"
        more = "safe too" if multiple.safe == multiple.largest else f"{safe} is safe"
        said.append(f"The largest multiple of {multiple.of}: {multiple.largest:,}, {more}.")
    if answer.unsteady:
        first, last = answer.unsteady[0], answer.unsteady[-1]
        between = f"{first:,} does" if first == last else f"some from {first:,} to {last:,} do"
        said.append(
            f"Not every size below {answer.largest:,} runs ({between} not): memory does not grow "
            "evenly with the size."
        )
    if result.effective_batch is not None:
        asked = result.effective_batch
        said += [effective_sentence(way, asked) for way in answer.effective]
        if not answer.effective:
            said.append(f"{asked:,} samples a step: no micro-batch fits.")
    return said


def _rows(answer: Largest, smallest: int) -> list[CurvePoint]:
    """The points that are shown: around the answers all, of the others as many as there is room."""
    if len(answer.curve) <= _MOST_ROWS:
        return list(answer.curve)
    sizes = [point.size for point in answer.curve]
    near = {answer.safe, answer.largest, smallest}
    near |= {sizes[i + 1] for i, n in enumerate(sizes[:-1]) if n in (answer.safe, answer.largest)}
    near.add(sizes[-1])
    room = max(_MOST_ROWS - len(near), 1)
    rest = [size for size in sizes if size not in near]
    # round sizes first: people know their way among them
    rest.sort(key=lambda size: -(size & -size))
    shown = near | set(rest[:room])
    return [point for point in answer.curve if point.size in shown]


def _curve(result: MaxBatch, answer: Largest, glyphs: Glyphs, width: int) -> Table:
    rows = _rows(answer, result.step)
    head = [result.of.value, "allocated", "reserved", "device", "headroom", "verdict"]
    cells = [
        [
            f"{point.size:,}",
            format_size(point.allocated_bytes),
            format_size(point.reserved_bytes),
            format_size(point.device_bytes),
            format_delta(point.headroom_bytes),
            point.verdict.value,
        ]
        for point in rows
    ]
    sides: list[JustifyMethod] = ["right", "right", "right", "right", "right", "left"]
    at = 4
    if width < NARROW:
        # what the verdict is about has precedence
        at = 3
        del sides[1]
        for line in (head, *cells):
            del line[1]
    taken = sum(max(len(line[i]) for line in (head, *cells)) + 2 for i in range(len(head)))
    room = min(_LONGEST_BAR, width - taken - 2)
    with_bar = width >= NARROW and room >= _SHORTEST_BAR
    whole = max([answer.usable_bytes, *(point.device_bytes for point in rows)])
    limit = min(round(answer.usable_bytes * room / whole), room - 1) if with_bar else 0
    if with_bar:
        label = format_size(answer.usable_bytes)
        head.insert(at, f"{label:>{limit + 1}}" if len(label) <= limit + 1 else label)
        sides.insert(at, "left")
    out = Table.grid(padding=(0, 2, 0, 0))
    for side in sides:
        out.add_column(justify=side, overflow="fold")
    out.add_row(*(Text(title, style="dim") for title in head))
    for line, point in zip(cells, rows, strict=True):
        shown = [Text(cell) for cell in line]
        if point.size in (answer.largest, answer.safe):
            shown[0].stylize("bold")
        shown[-1].stylize(VERDICT_STYLES[point.verdict])
        if with_bar:
            shown.insert(at, _bar(point.device_bytes, whole, room, limit, glyphs))
        out.add_row(*shown)
    return out


def _bar(size: int, whole: int, room: int, limit: int, glyphs: Glyphs) -> Text:
    """A bar with the line of the card's memory through it."""
    mark = "|" if glyphs is ASCII else "│"
    cells = glyphs.bar(size, whole, room).ljust(limit + 1)
    bar = Text(cells[:limit], style="cyan")
    bar.append(mark, style="bold")
    return bar.append(cells[limit + 1 :].rstrip(), style="red")


def _gpus(result: MaxBatch, glyphs: Glyphs) -> Table:
    """One row a GPU."""
    numbers = sorted({multiple.of for answer in result.answers for multiple in answer.multiples})
    head = ["", "usable", "largest", "safe", *(f"multiple of {number}" for number in numbers)]
    sides: list[JustifyMethod] = ["left"]
    sides += ["right"] * (len(head) - 1)
    if result.effective_batch is not None:
        head.append(f"{result.effective_batch:,} a step")
        sides.append("left")
    out = Table.grid(padding=(0, 2, 0, 0))
    for side in sides:
        out.add_column(justify=side, overflow="fold")
    out.add_row(*(Text(title, style="dim") for title in head))
    for answer in result.answers:
        by_number = {multiple.of: multiple.largest for multiple in answer.multiples}
        least = "at least " if answer.end is End.SEARCH else ""
        line = [
            Text(answer.gpu),
            Text(format_size(answer.usable_bytes)),
            Text(f"{least}{answer.largest:,}", style="bold"),
            Text(f"{answer.safe:,}"),
            *(Text(f"{by_number.get(number, 0):,}") for number in numbers),
        ]
        if result.effective_batch is not None:
            line.append(Text(_ways(answer.effective, glyphs)))
        out.add_row(*line)
    return out


def _ways(ways: Sequence[EffectiveBatch], glyphs: Glyphs) -> str:
    words = [f"{way.num_micro_steps:,} {glyphs.times} {way.micro_batch:,}" for way in ways]
    return " or ".join(words) if words else "no micro-batch fits"
