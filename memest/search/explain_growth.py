"""``memest.explain_growth``: how memory went over a run, beside what a prediction expects of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.catalog.capacity import usable_bytes
from memest.catalog.gpus import REFERENCE_GPU, find_gpu
from memest.config.setup import Setup
from memest.errors import ConfigError, ReplayError
from memest.estimation.breakdown import alive_at_end
from memest.estimation.run import Run
from memest.events import Category, Phase
from memest.readers.memory_log import read_memory_log
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.replay.snapshot import Snapshot, load_content
from memest.replay.survivors import KeptSite, RecordedPasses, passes_of
from memest.report.growth_result import (
    ExpectedCourse,
    GrowingSite,
    GrowthExplanation,
    MemoryPoint,
    Quantity,
)
from memest.search.growth_causes import Evidence, findings_of
from memest.search.growth_trend import FEWEST_POINTS
from memest.search.profile import profile as make_profile
from memest.units import parse_size

if TYPE_CHECKING:
    import torch

__all__ = ["expected_course", "explain_growth", "explanation_of"]

Progress = Callable[[str], None]

_STAYS = (Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.MASTER_WEIGHTS)
_START = 16


def explain_growth(
    record: str | Path | Sequence[MemoryPoint],
    model: str | torch.nn.Module | None = None,
    setup: Setup | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> GrowthExplanation:
    """Explain how the memory of a run went, and why it grew.

    Args:
        record: a file of ``torch.cuda.memory._dump_snapshot`` with some steps of history, a log of
            memory (CSV, JSON lines, a Trainer's state, nvidia-smi), or readings.
        model: what was trained, as for :func:`memest.estimate`: its prediction stands beside the
            readings.
        setup: how it was trained; ``options`` are another way to give it.
        gpu: the card: when it would be full, and whose kernels are predicted.
        gpu_memory: bytes of it, in place of the catalogue's.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: the options that the run was started with.

    Raises:
        ConfigError: the record cannot be read, or options without a model.
        ReplayError: the snapshot is none.
        MemestError: as for :func:`memest.estimate`.
    """
    if model is None and (setup is not None or options):
        names = ", ".join(options) or "a setup"
        raise ConfigError(
            f"{names} without a model: name what was trained, for example memest explain-growth "
            "run.pickle gpt2 --batch 8."
        )
    say = progress or (lambda _: None)
    expected = None
    if model is not None:
        made = make_profile(
            model, setup, trust_remote_code=trust_remote_code, progress=progress, **options
        )
        card = gpu or REFERENCE_GPU
        expected = expected_course(made.run(gpu=card), made.estimate(common=False).model.id, card)
    capacity = _capacity(gpu, gpu_memory)
    if not isinstance(record, (str, Path)):
        return explanation_of(tuple(record), expected=expected, capacity_bytes=capacity)
    say(f"reading {record}")
    if not _is_snapshot(Path(record).expanduser()):
        log = read_memory_log(record)
        return explanation_of(
            log.points,
            source=f"{record}: {', '.join(log.columns.values())}",
            unit=log.unit,
            expected=expected,
            capacity_bytes=capacity,
            notes=log.notes,
        )
    snapshot, content = load_content(Path(record).expanduser())
    say("looking for what stays")
    return _of_recording(_recorded(snapshot, content, record), str(record), expected, capacity)


def explanation_of(
    points: tuple[MemoryPoint, ...],
    *,
    source: str = "readings",
    unit: str = "step",
    expected: ExpectedCourse | None = None,
    capacity_bytes: int | None = None,
    notes: Iterable[str] = (),
    **recorded: Any,
) -> GrowthExplanation:
    """The explanation of a row of readings.

    Args:
        points: in order.
        source: what they were read from, in words.
        unit: what a point is of.
        expected: of a prediction.
        capacity_bytes: what the process can have of the card.
        notes: what the user should know.
        **recorded: what a recording knows besides, as fields of :class:`Evidence`.
    """
    evidence = Evidence(points=points, unit=unit, expected=expected, **recorded)
    training = sum(not point.evaluation for point in points)
    more = []
    if training < FEWEST_POINTS:
        more.append(
            f"{training} readings are too few to tell growth by: {FEWEST_POINTS} are needed, of as "
            f"many {unit}{'e' * (unit == 'pass')}s."
        )
    findings = findings_of(evidence)
    return GrowthExplanation(
        source=source,
        unit=unit,
        points=points,
        findings=findings,
        sites=evidence.sites,
        expected=expected,
        full_at=_full_at(evidence, capacity_bytes),
        notes=(*notes, *more),
    )


def _is_snapshot(path: Path) -> bool:
    """Whether a file is a pickle, or the JSON of a snapshot: logs are text of another kind."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << _START)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    is_pickle = start.startswith(b"\x80") or path.suffix in (".pickle", ".pkl")
    return is_pickle or b'"device_traces"' in start or b'"segments"' in start


def _capacity(gpu: str | None, gpu_memory: int | str | None) -> int | None:
    """What PyTorch can have of the card, bytes; None where none is named."""
    if gpu_memory is not None:
        return parse_size(gpu_memory)
    return None if gpu is None else usable_bytes(find_gpu(gpu))[0]


def _full_at(evidence: Evidence, capacity: int | None) -> int | None:
    """The step at which steady growth has filled the card."""
    if capacity is None:
        return None
    for quantity in (Quantity.DEVICE, Quantity.RESERVED, Quantity.PEAK_ALLOCATED):
        last = next((p for p in reversed(evidence.points) if p.value(quantity) is not None), None)
        trend = evidence.grown(Quantity.ALLOCATED) or evidence.grown(quantity)
        if last is None or trend is None or not trend.step_bytes:
            continue
        left = max(capacity - (last.value(quantity) or 0), 0)
        return last.step + left // trend.step_bytes
    return None


# -- a recording -------------------------------------------------------------------------------


def _recorded(snapshot: Snapshot, content: Any, path: str | Path) -> list[RecordedPasses]:
    """Each device that has a history: the one that keeps the most first, then the longest."""
    devices = [number for number, trace in enumerate(snapshot.traces) if trace]
    if not devices:
        raise ConfigError(
            f"{path} has no history of the allocator: call "
            "torch.cuda.memory._record_memory_history() before the steps, and "
            "torch.cuda.memory._dump_snapshot('run.pickle') after ten of them."
        )
    try:
        found = [passes_of(snapshot, content, number) for number in devices]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(
            f"{path} has frames that are none of torch ({type(error).__name__}: {error}): each "
            "needs filename, line and name."
        ) from error
    return sorted(
        found,
        key=lambda each: (
            -sum(site.bytes for site in each.sites if site.grows),
            -len(snapshot.traces[each.device]),
        ),
    )


def _of_recording(
    devices: Sequence[RecordedPasses],
    source: str,
    expected: ExpectedCourse | None,
    capacity: int | None,
) -> GrowthExplanation:
    recorded, *others = devices
    notes = []
    if others:
        names = ", ".join(f"cuda:{each}" for each in sorted(each.device for each in others))
        notes.append(
            f"only cuda:{recorded.device} is explained, of {names} there is a history too."
        )
    if not recorded.has_frames:
        notes.append(
            "the recording has no frames, by which passes and the code that keeps are told: leave "
            "stacks and context of _record_memory_history() as they are."
        )
    elif not recorded.points:
        notes.append(
            "no pass of a training loop repeats in this recording: it has one step, or a part of "
            "one. What is alive at its end may be needed still; record ten steps to tell."
        )
    before = [MemoryPoint(step=0, allocated_bytes=recorded.before_bytes)] if recorded.points else []
    points = [
        MemoryPoint(
            step=number,
            allocated_bytes=point.allocated_bytes,
            peak_allocated_bytes=point.peak_allocated_bytes,
            reserved_bytes=point.reserved_bytes,
        )
        for number, point in enumerate(recorded.points, 1)
    ]
    return explanation_of(
        # the last pass may not be over
        (*before, *points[:-1]),
        source=f"{source}, cuda:{recorded.device}",
        unit="pass",
        expected=expected,
        capacity_bytes=capacity,
        notes=notes,
        sites=tuple(_site(site) for site in recorded.sites if site.grows),
        states=tuple(
            _site(site)
            for site in recorded.sites
            if not site.grows and site.passes[0] >= 0 and site.passes[-1] < len(points) - 1
        ),
        carried=tuple(
            _site(site)
            for site in recorded.sites
            if not site.grows and site.passes[-1] == len(points) - 1
        ),
        forward_places=recorded.forward_places,
        largest_bytes=tuple(point.largest_bytes for point in recorded.points[:-1]),
        has_sites=recorded.has_frames,
    )


def _site(site: KeptSite) -> GrowingSite:
    return GrowingSite(
        site=site.site,
        line=site.line,
        role=site.role.value,
        places=site.places,
        count=site.count,
        passes=len(site.passes),
        bytes=site.bytes,
        pass_bytes=site.pass_bytes,
    )


# -- a prediction ------------------------------------------------------------------------------


def expected_course(run: Run, model: str, gpu: str) -> ExpectedCourse:
    """What a prediction says of a run's course.

    Args:
        run: what was predicted.
        model: its reference.
        gpu: whose kernels are taken.
    """
    stream = run.stream
    result = replay(
        stream.events,
        stream.sizes,
        parse_alloc_conf(run.setup.alloc_conf),
        curve=True,
        chains=stream.chains,
        streams=stream.on_streams,
    )
    curve = result.allocated_curve
    assert curve is not None

    def before(position: int) -> int:
        return curve[position - 1] if position else 0

    forward = 0
    begins: dict[int, int] = {}
    ends = [*stream.mark_positions[1:], len(stream.events)]
    for mark, start, stop in zip(stream.marks, stream.mark_positions, ends, strict=True):
        if mark.step:
            begins.setdefault(mark.step, start)
        if mark.phase is Phase.FORWARD and stop > start:
            forward = max(forward, curve[stop - 1] - before(start))
    last = max(begins)
    sizes = {category: sum(each) for category, each in alive_at_end(stream).items()}
    return ExpectedCourse(
        model=model,
        gpu=gpu,
        loaded_bytes=before(begins[min(begins)]),
        held_bytes=before(begins[last]) if len(begins) > 1 else curve[-1],
        peak_allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=result.peak_reserved_bytes,
        forward_bytes=forward,
        parameter_bytes=sizes.get(Category.PARAMETERS, 0),
        state_bytes=sum(sizes.get(category, 0) for category in _STAYS),
    )
