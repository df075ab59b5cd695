"""How large a run can be, on a terminal: a sentence, then memory over sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.report.max_batch_result import (
    CurveEnd,
    CurvePoint,
    EffectiveBatch,
    Largest,
    MaxBatch,
    SizeAxis,
)
from memest.report.result import Verdict
from memest.report.suggestions import Suggestions
from memest.report.tables import suggestion_parts
from memest.report.terminal import (
    ASCII,
    VERDICT_STYLES,
    Glyphs,
    Grid,
    Page,
    bullets,
    room_for_bar,
    section,
)
from memest.report.words import each_gpu, setup_items
from memest.units import format_delta, format_size

__all__ = ["effective_sentence", "limit_sentence", "max_batch_parts"]

_LONGEST_BAR = 36
_MOST_ROWS = 18
_NAMES = {
    SizeAxis.BATCH: ("batch", "a batch of {}"),
    SizeAxis.SEQ_LEN: ("sequence length", "a sequence length of {}"),
    SizeAxis.IMAGE_SIZE: ("image size", "an image size of {}"),
}


def limit_sentence(result: MaxBatch, answer: Largest) -> str:
    """The answer for one GPU, or for each of several, in one sentence.

    Args:
        result: what was looked for.
        answer: one of its answers.
    """
    name, phrase = _NAMES[result.of]
    model, each = result.model, each_gpu(result.setup)
    usable = f"{format_size(answer.usable_bytes)} usable"
    if answer.largest == 0:
        smallest_point = answer.at(result.smallest)
        need = (
            ""
            if smallest_point is None
            else f": it needs {format_size(smallest_point.device_bytes)}{each}"
        )
        smallest = phrase.format(result.smallest)
        return f"Not even {smallest} of {model} runs on {answer.gpu} ({usable}){need}."
    gpu_text = f"{answer.gpu} ({usable}{each})"
    size, end = f"{answer.largest:,}", ""
    if answer.end is CurveEnd.SEARCH:
        size, end = f"at least {size}", ", where the search ends"
    elif answer.end is CurveEnd.MODEL:
        end = ", the most the model takes"
    total = _total_words(result, answer.safe)
    if answer.safe == answer.largest:
        joint = ";" if answer.end is CurveEnd.GPU else ", and"
        size += total
        return f"The largest {name} of {model} on {gpu_text} is {size}{end}{joint} it is safe."
    more = (
        f"{'up to ' if answer.end is CurveEnd.GPU else ''}{size}{end}{',' if end else ''} may run"
    )
    if answer.safe == 0:
        return f"No {name} of {model} is safe on {gpu_text}; {more}."
    safe = f"{answer.safe:,}{total}"
    return f"The largest safe {name} of {model} on {gpu_text} is {safe}; {more}."


def _total_words(result: MaxBatch, batch: int) -> str:
    """What GPUs with batches of their own have together; empty for anything else."""
    ranks = result.setup.distributed.data_ranks
    if result.of is not SizeAxis.BATCH or ranks == 1:
        return ""
    return f" ({batch * ranks:,} on all GPUs)"


def effective_sentence(effective: EffectiveBatch, samples: int) -> str:
    """How an effective batch is reached, in one sentence."""
    need = f"{format_size(effective.device_bytes)}, {effective.verdict.value}"
    each = f" on each of {effective.num_gpus} GPUs" if effective.num_gpus > 1 else ""
    if effective.num_micro_steps == 1:
        return f"{samples:,} samples a step: one batch of {effective.micro_batch:,}{each} ({need})."
    steps = f"{effective.num_micro_steps:,} micro-steps of {effective.micro_batch:,}{each}"
    if effective.samples == samples:
        return f"{samples:,} samples a step: {steps} ({need})."
    return f"{samples:,} samples a step, rounded up to {effective.samples:,}: {steps} ({need})."


def max_batch_parts(
    result: MaxBatch, page: Page, *, tips: Callable[[], Suggestions | None] | None = None
) -> Iterator[RenderableType]:
    """A sentence for each GPU, then memory over sizes.

    Args:
        result: what to show.
        page: where it is written.
        tips: looks for what would make the smallest size fit, when the answer is out already.
    """
    glyphs = page.glyphs
    for answer in result.answers:
        yield Text(limit_sentence(result, answer), style="bold")
    items = _setup_words(result, glyphs)
    yield Text(f" {glyphs.dot} ".join(items), style="dim")
    if tips is not None and (found := tips()) is not None:
        yield Padding(Group(*suggestion_parts(found, page)), (1, 0, 0, 0))
    if len(result.answers) == 1:
        answer = result.answers[0]
        remarks = _remarks(result, answer)
        if remarks:
            yield Padding(Group(*map(Text, remarks)), (1, 0, 0, 0))
        yield Padding(_curve(result, answer, page), (1, 0, 0, 0))
    else:
        yield Padding(_gpus(result, glyphs), (1, 0, 0, 0))
    for title, sentences in (("Assumed", result.assumptions), ("Notes", result.notes)):
        if sentences:
            yield section(title, bullets(sentences, page))


def _setup_words(result: MaxBatch, glyphs: Glyphs) -> list[str]:
    """The setup without the size that was looked for."""
    first, *rest = setup_items(result.setup, times=glyphs.times)
    searched_size = {
        SizeAxis.BATCH: f"batch {result.setup.batch}",
        SizeAxis.SEQ_LEN: f"{result.setup.seq_len} tokens",
        SizeAxis.IMAGE_SIZE: f"{result.setup.image_size} px",
    }[result.of]
    sizes = [size for size in first.split(f" {glyphs.times} ") if size != searched_size]
    target_item = f"target {result.setup.target_len} tokens"
    first_item = f" {glyphs.times} ".join(sizes)
    return [item for item in (first_item, *rest) if item and item != target_item]


def _remarks(result: MaxBatch, answer: Largest) -> list[str]:
    """What there is to say of one answer after its sentence."""
    sentences = _beyond_safe(answer)
    for multiple in answer.multiples:
        if multiple.largest == answer.largest and multiple.safe == answer.safe:
            continue
        safe = "none" if multiple.safe == 0 else f"{multiple.safe:,}"
        more_words = "safe too" if multiple.safe == multiple.largest else f"{safe} is safe"
        sentences.append(
            f"The largest multiple of {multiple.of}: {multiple.largest:,}, {more_words}."
        )
    if answer.unsteady:
        first, last = answer.unsteady[0], answer.unsteady[-1]
        sizes_text = f"{first:,} does" if first == last else f"some from {first:,} to {last:,} do"
        sentences.append(
            f"Not every size below {answer.largest:,} runs ({sizes_text} not): memory does not "
            "grow evenly with the size."
        )
    if result.effective_batch is not None:
        samples = result.effective_batch
        sentences += [effective_sentence(effective, samples) for effective in answer.effective]
        if not answer.effective:
            sentences.append(f"{samples:,} samples a step: no micro-batch fits.")
    return sentences


def _beyond_safe(answer: Largest) -> list[str]:
    """When the largest size runs, and what those above it would take."""
    point = answer.at(answer.largest)
    if point is None or answer.safe == answer.largest:
        return []
    if point.verdict is Verdict.RELEASES_CACHE:
        return [f"{answer.largest:,} runs, if need be by releasing cache, which is slower."]
    how = " by releasing cache" if point.headroom_bytes < 0 else ""
    words = f"{answer.largest:,} runs{how} if context and kernels take what is expected"
    tight = (p.size for p in answer.curve if p.size > point.size and p.verdict is Verdict.TIGHT)
    above = next(tight, None)
    return [f"{words}." if above is None else f"{words}, {above:,} only if they take less."]


def _rows(answer: Largest, smallest: int) -> list[CurvePoint]:
    """The points that are shown: around the answers all, of the others as many as there is room."""
    if len(answer.curve) <= _MOST_ROWS:
        return list(answer.curve)
    sizes = [point.size for point in answer.curve]
    key_sizes = {answer.safe, answer.largest, smallest}
    key_sizes |= {
        sizes[i + 1] for i, n in enumerate(sizes[:-1]) if n in (answer.safe, answer.largest)
    }
    key_sizes.add(sizes[-1])
    num_others = max(_MOST_ROWS - len(key_sizes), 1)
    other_sizes = [size for size in sizes if size not in key_sizes]
    # round sizes first: people know their way among them
    other_sizes.sort(key=lambda size: -(size & -size))
    shown_sizes = key_sizes | set(other_sizes[:num_others])
    return [point for point in answer.curve if point.size in shown_sizes]


def _curve(result: MaxBatch, answer: Largest, page: Page) -> Grid:
    rows = _rows(answer, result.smallest)
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
    bar_column = 4
    if page.narrow:
        # what the verdict is about has precedence
        bar_column = 3
        del sides[1]
        for line in (head, *cells):
            del line[1]
    bar_width = room_for_bar(page, (head, *cells), _LONGEST_BAR)
    scale_bytes = max([answer.usable_bytes, *(point.device_bytes for point in rows)])
    limit = min(round(answer.usable_bytes * bar_width / scale_bytes), bar_width - 1)
    if bar_width:
        label = format_size(answer.usable_bytes)
        head.insert(bar_column, f"{label:>{limit + 1}}" if len(label) <= limit + 1 else label)
        sides.insert(bar_column, "left")
    table = Grid(*sides, head=head, folds=True)
    for line, point in zip(cells, rows, strict=True):
        texts = [Text(cell) for cell in line]
        if point.size in (answer.largest, answer.safe):
            texts[0].stylize("bold")
        texts[-1].stylize(VERDICT_STYLES[point.verdict])
        if bar_width:
            texts.insert(
                bar_column, _bar(point.device_bytes, scale_bytes, bar_width, limit, page.glyphs)
            )
        table.add_row(*texts)
    return table


def _bar(size: int, scale_bytes: int, bar_width: int, limit: int, glyphs: Glyphs) -> Text:
    """A bar with the line of the card's memory through it."""
    mark = "|" if glyphs is ASCII else "│"
    cells = glyphs.bar(size, scale_bytes, bar_width).ljust(limit + 1)
    bar = Text(cells[:limit], style="cyan")
    bar.append(mark, style="bold")
    return bar.append(cells[limit + 1 :].rstrip(), style="red")


def _gpus(result: MaxBatch, glyphs: Glyphs) -> Grid:
    """One row a GPU."""
    numbers = sorted({multiple.of for answer in result.answers for multiple in answer.multiples})
    head = ["", "usable", "largest", "safe", *(f"multiple of {number}" for number in numbers)]
    sides: list[JustifyMethod] = ["left"]
    sides += ["right"] * (len(head) - 1)
    if result.effective_batch is not None:
        head.append(f"{result.effective_batch:,} a step")
        sides.append("left")
    table = Grid(*sides, head=head, folds=True)
    for answer in result.answers:
        by_number = {multiple.of: multiple.largest for multiple in answer.multiples}
        least_words = "at least " if answer.end is CurveEnd.SEARCH else ""
        line = [
            Text(answer.gpu),
            Text(format_size(answer.usable_bytes)),
            Text(f"{least_words}{answer.largest:,}", style="bold"),
            Text(f"{answer.safe:,}"),
            *(Text(f"{by_number.get(number, 0):,}") for number in numbers),
        ]
        if result.effective_batch is not None:
            line.append(Text(_effective_text(answer.effective, glyphs)))
        table.add_row(*line)
    return table


def _effective_text(batches: Sequence[EffectiveBatch], glyphs: Glyphs) -> str:
    texts = [f"{batch.num_micro_steps:,} {glyphs.times} {batch.micro_batch:,}" for batch in batches]
    return " or ".join(texts) if texts else "no micro-batch fits"
