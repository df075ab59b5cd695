"""The answer at a glance: the verdict, a bar of memory that fills the card, the three peaks."""

from __future__ import annotations

from html import escape

from memest.app.theme import VERDICT_INKS
from memest.report.memory_bar import VERDICT_WORDS, BarSegment, MemoryBar, memory_bar
from memest.report.result import Estimate, Verdict
from memest.report.words import each_gpu, short_name, why_sentence
from memest.units import format_delta, format_size

__all__ = ["STYLE", "hero", "small_bar", "verdict_line", "verdict_words"]

_PEAKS = (
    ("allocated", "allocated_bytes", "tensors (max_memory_allocated)"),
    ("reserved", "reserved_bytes", "and PyTorch's cache (max_memory_reserved)"),
    ("device", "device_bytes", "and CUDA's own (nvidia-smi)"),
)
STYLE = """
.mm-verdict {display:flex; align-items:baseline; gap:.6rem; flex-wrap:wrap; margin:0 0 .45rem}
.mm-verdict b {font-size:1.65rem; line-height:1.2; font-weight:700}
.mm-verdict span {font-size:1rem; opacity:.85}
[data-stale=true] .mm-verdict::after {content:"· answers the question before"}
.mm-bar {position:relative; display:flex; height:4.1rem; border-radius:.45rem; overflow:hidden;
  background:rgba(128,138,150,.16); border:1px solid rgba(128,138,150,.55)}
.mm-seg, .mm-free {display:flex; flex-direction:column; min-width:0;
  justify-content:center; overflow:hidden; white-space:nowrap; font-size:.8rem; line-height:1.25;
  padding:0 .4rem; box-sizing:border-box}
.mm-seg div:first-child {white-space:normal}
.mm-seg {flex:none; box-shadow:inset -1px 0 0 rgba(255,255,255,.55); padding:0}
.mm-seg, .mm-seg div {background:var(--part)}
.mm-seg div {padding:0 .4rem; overflow:hidden; text-overflow:ellipsis; position:relative;
  z-index:1; width:fit-content; max-width:100%; box-sizing:border-box; border-radius:.2rem}
.mm-seg div+div, .mm-free div+div {font-weight:600}
.mm-free {flex:none; align-items:center; border-right:1px solid rgba(128,138,150,.55)}
.mm-range {position:absolute; top:0; bottom:0; min-width:2px; opacity:.8;
  border-left:1px solid #333; border-right:1px solid #333;
  background:repeating-linear-gradient(135deg, rgba(20,20,20,.65) 0 2px,
  rgba(255,255,255,.65) 2px 5px)}
.mm-edge {position:absolute; top:0; bottom:0; border-left:3px solid #cf222e}
.mm-edge, i.mm-over {
  background:repeating-linear-gradient(45deg, rgba(207,34,46,.28) 0 6px, transparent 6px 12px)}
.mm-beyond {position:absolute; top:0; bottom:0; right:0; background:light-dark(#fff, #11161d)}
.mm-scale i {display:inline-block; width:1.5em; height:.8em; margin-right:.4em; opacity:1;
  position:static; vertical-align:-.05em}
i.mm-over {border-left:3px solid #cf222e}
.mm-scale {display:flex; justify-content:space-between; gap:.1rem 1rem; font-size:.8rem;
  opacity:.85; margin:.25rem 0 0; flex-wrap:wrap}
.mm-parts {display:flex; flex-wrap:wrap; gap:.1rem .9rem; font-size:.8rem; margin:.2rem 0 0}
.mm-wide {display:none}
.mm-parts i {display:inline-block; width:.7em; height:.7em; margin-right:.35em; border-radius:2px;
  box-sizing:border-box; border:1px solid rgba(128,138,150,.6)}
.mm-why {margin:.4rem 0 0 !important; font-size:.95rem}
.mm-peaks {display:grid; grid-template-columns:1fr; gap:.42rem; margin:0 !important;
  padding:0 !important}
.mm-peaks dt {font-size:.8rem; opacity:.85; margin:0}
.mm-peaks dd {margin:0; font-size:1.05rem; font-weight:600; line-height:1.2}
.mm-peaks small {white-space:nowrap; font-weight:400; font-size:.8rem; opacity:.85}
.mm-strip {display:flex; flex-wrap:wrap; gap:.3rem .35rem; align-items:center; font-size:.82rem}
.mm-strip b {margin-right:.5rem; font-weight:600}
.mm-card {padding:.12rem .5rem; border-radius:.8rem; border:1px solid; white-space:nowrap}
.mm-fits {color:light-dark(#0b6b2d, #4cc26a); background:rgba(27,127,55,.1)}
.mm-tight {color:light-dark(#7a4f00, #e3b341); background:rgba(154,103,0,.1)}
.mm-no {color:light-dark(#b3161f, #ff7b72); background:rgba(207,34,46,.08)}
.mm-asked {font-weight:700; box-shadow:0 0 0 1px}
.mm-unseen {color:light-dark(#57606a, #9aa4af); border-style:dashed}
.mm-strip small {font-size:.78rem; opacity:.85; margin-left:.3rem}
.mm-small .mm-bar {height:1.9rem} .mm-small .mm-bar div div {display:none}
.mm-small .mm-wide {display:inline}
.mm-cards {display:grid; grid-template-columns:repeat(auto-fit, minmax(16.5rem, 1fr)); gap:.8rem}
.mm-cards > section {border:1px solid rgba(128,138,150,.45); border-radius:.6rem;
  padding:.8rem 1rem; overflow-wrap:anywhere}
.mm-cards h3 {font-size:1rem; font-weight:700; margin:0; padding:0}
.mm-cards p {margin:.15rem 0 .5rem; font-size:.95rem}
.mm-cards table {width:100%; font-size:.85rem; border-collapse:collapse; margin:.6rem 0 0}
.mm-cards td {padding:.1rem 0; border:0} .mm-cards td+td {text-align:right; font-weight:600}
.mm-cards ul {margin:.6rem 0 0; padding-left:1.1rem; font-size:.85rem}
.mm-hero {container:hero / inline-size}
@container hero (max-width: 52rem) {.mm-wide {display:inline} .mm-bar {height:2.4rem}
  .mm-bar div div {display:none}}
@media (max-width: 640px) {
  .mm-peaks {grid-template-columns:repeat(3, 1fr)} .mm-peaks dt span {display:none}}
"""
"""Style sheet of what is made here."""


def hero(answer: Estimate, pinned: Estimate | None = None) -> tuple[str, str]:
    """The hero as HTML: the bar with the verdict, and the peaks to stand beside it.

    Args:
        answer: of the question.
        pinned: an answer to tell the difference from.
    """
    bar = memory_bar(answer)
    reason = f'<p class="mm-why">{escape(why_sentence(answer))}</p>'
    main = (_verdict(answer), _bar(bar), _scale(bar, answer), _parts(bar), reason)
    return f'<div class="mm-hero">{"".join(main)}</div>', _peaks(answer, pinned)


def small_bar(answer: Estimate, least_bytes: int) -> str:
    """The bar alone, with its parts below it, to stand beside others.

    Args:
        answer: to show.
        least_bytes: what the width of all of them stands for.
    """
    bar = memory_bar(answer, least_bytes)
    return f'<div class="mm-small">{_bar(bar)}{_parts(bar, with_free=False)}</div>'


def verdict_words(verdict: Verdict) -> str:
    """The verdict in its colour."""
    ink = VERDICT_INKS[verdict.value]
    return f'<b style="color:{ink}">{escape(VERDICT_WORDS[verdict])}</b>'


def verdict_line(verdict: Verdict, words: str) -> str:
    """The verdict, the largest on its page, and words beside it."""
    return f'<div class="mm-verdict">{verdict_words(verdict)}<span>{escape(words)}</span></div>'


def _verdict(answer: Estimate) -> str:
    gpu, each = answer.gpu, each_gpu(answer.setup)
    if gpu is None:
        place = f"this is what it needs{each}"
    else:
        place = f"on {short_name(gpu.name)}{each.replace(' on', ',', 1)}"
        if gpu.reason:
            place += f": {gpu.reason}"
    return (
        f'<div class="mm-verdict">{verdict_words(answer.verdict)}<span>{escape(place)}</span></div>'
    )


_NARROW = 0.1
"""Segments below this share of the bar have their names below it, as all of a narrow bar's do."""


def _segment(bar: MemoryBar, segment: BarSegment) -> str:
    inside = ""
    if bar.share(segment.bytes) >= _NARROW:
        inside = f"<div>{escape(segment.name)}</div><div>{format_size(segment.bytes)}</div>"
    return (
        f'<div class="mm-seg" style="width:{bar.share(segment.bytes):.4%};'
        f'--part:{segment.colour};color:{segment.ink}" title="{escape(segment.words)}">'
        f"{inside}</div>"
    )


def _bar(bar: MemoryBar) -> str:
    inside = "".join(_segment(bar, segment) for segment in bar.segments)
    free, usable = bar.free_bytes, bar.usable_bytes
    if free is not None and free > 0:
        room = (
            f"<div>free</div><div>{format_size(free)}</div>" if bar.share(free) >= _NARROW else ""
        )
        inside += (
            f'<div class="mm-free" style="width:{bar.share(free):.4%}" '
            f'title="free: {format_size(free)}">{room}</div>'
        )
    left, width = bar.share(bar.low_bytes), bar.share(bar.high_bytes - bar.low_bytes)
    span = f"{format_size(bar.low_bytes)} to {format_size(bar.high_bytes)}"
    inside += (
        f'<div class="mm-range" style="left:{left:.4%};width:{width:.4%}" '
        f'title="range of the device peak: {span}"></div>'
    )
    if usable is not None and usable < bar.high_bytes:
        left, width = bar.share(usable), bar.share(bar.high_bytes - usable)
        inside += f'<div class="mm-edge" style="left:{left:.4%};width:{width:.4%}"></div>'
    if usable is not None and (end := bar.share(max(usable, bar.high_bytes))) < 1:
        # there is no such memory: the width is that of the bars beside this one
        inside += f'<div class="mm-beyond" style="left:{end:.4%}"></div>'
    words = ", ".join(segment.words for segment in bar.segments)
    return f'<div class="mm-bar" role="img" aria-label="Memory: {escape(words)}">{inside}</div>'


def _scale(bar: MemoryBar, answer: Estimate) -> str:
    """The range, and what the card has, below the bar."""
    span = f"range {format_size(bar.low_bytes)} to {format_size(bar.high_bytes)}"
    left = [f'<span><i class="mm-range"></i>{span}</span>']
    if answer.gpu is not None:
        free = bar.free_bytes or 0
        over = answer.gpu.usable_bytes < bar.high_bytes
        mark = '<i class="mm-over"></i>' if over else ""
        if free < 0:
            words = "too little" if answer.verdict is Verdict.DOES_NOT_FIT else "above it expected"
            left.append(f"<span>{mark}<b>{format_size(-free)} {words}</b></span>")
        elif over:
            left.append(f"<span>{mark}more than the card has</span>")
        name = short_name(answer.gpu.name)
        usable = format_size(answer.gpu.usable_bytes)
        left.append(f"<span>{escape(name)} has {usable} for PyTorch</span>")
    return f'<div class="mm-scale">{"".join(left)}</div>'


def _parts(bar: MemoryBar, *, with_free: bool = True) -> str:
    """Names and sizes of what is too narrow for them: some segments, or all of a narrow bar."""
    rows = [
        (segment.colour, segment.name, segment.bytes, bar.share(segment.bytes) >= _NARROW)
        for segment in bar.segments
    ]
    if with_free and bar.free_bytes is not None and bar.free_bytes > 0:
        rows.append(("transparent", "free", bar.free_bytes, bar.share(bar.free_bytes) >= _NARROW))
    inside = "".join(
        f'<span class="{"mm-wide" if wide else ""}"><i style="background:{colour}"></i>'
        f"{escape(name)} {format_size(size)}</span>"
        for colour, name, size, wide in rows
    )
    return f'<div class="mm-parts" aria-hidden="true">{inside}</div>'


def _peaks(answer: Estimate, pinned: Estimate | None) -> str:
    rows = []
    for name, field, words in _PEAKS:
        size = getattr(answer.peak, field)
        change = ""
        if pinned is not None:
            change = f" <small>{format_delta(size - getattr(pinned.peak, field))}</small>"
        rows.append(
            f"<div><dt><b>{name}</b><span>: {words}</span></dt>"
            f"<dd>{format_size(size)}{change}</dd></div>"
        )
    if answer.peak.managed_bytes:
        paged = format_size(answer.peak.managed_bytes)
        rows.append(
            f"<div><dt><b>paged</b><span>: optimizer states in managed memory, which no counter "
            f"sees</span></dt><dd>{paged}</dd></div>"
        )
    return f'<dl class="mm-peaks">{"".join(rows)}</dl>'
