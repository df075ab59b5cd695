"""Does it fit: the verdict for a GPU, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memest.config.idle_options import smallest_batch
from memest.config.setup import MAX_BATCH, Setup
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.peaks import peaks_of
from memest.estimation.profiler import Profiler
from memest.estimation.replay_cache import ReplayCache
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.estimation.whole_run import resolve_run
from memest.profiles.sizing import SIZES
from memest.profiles.stream import Stream, dispensable
from memest.replay.conf import AllocatorConf
from memest.replay.replay import Replay, peak_without, replay
from memest.report.result import GpuFit, Verdict
from memest.units import format_size

__all__ = ["LargestSizeSearch", "SizeTrial", "largest_batch", "verdict_for"]

_MAX_ATTEMPTS = 64
_SECANTS = 8
_LARGE_SLACK = 10
"""A slack, or a cache, above this part of the device peak is large."""
_OF_SAMPLES = tuple(f"--{name.replace('_', '-')} says it" for name in ("batch", *SIZES))
"""Ends of what is open of samples alone: weights and states stay, however small those are."""


def verdict_for(
    target: TargetGpu,
    setup: Setup,
    peaks: Peaks,
    stream: Stream,
    result: Replay,
    conf: AllocatorConf,
) -> GpuFit:
    """The verdict for one GPU.

    With more memory the verdict never gets worse: ``does not fit``, ``tight``, ``fits by releasing
    cache``, ``fits``. ``fits``: the upper end of the range of the device peak is below what the
    GPU has. ``fits by releasing cache``: it is above, and the run completes all the same, even if
    tensors, context and kernels take the most they may, because the allocator gives back what it
    caches. ``does not fit``: the run is out of memory even if they take the least they may, with
    all the retries that the allocator makes. Anything between is ``tight``, however wide the range
    is and whatever makes it so: workspaces that a library picks, CUDA graphs of an engine on the
    same GPU.

    ``cannot say`` is about the question, not the memory: the setup names something that is not
    priced, which leaves ``does not fit`` alone, or is priced and not taken, which takes its place
    (not where that is of samples alone, and weights and states are too much already).

    Args:
        target: the GPU.
        setup: of the run.
        peaks: of the run on it.
        stream: of the run, with this GPU's workspaces.
        result: of its replay.
        conf: of the allocator.
    """
    verdict, reason = _verdict(target, peaks, stream, result, conf)
    if setup.unpriced and verdict is not Verdict.DOES_NOT_FIT:
        verdict, reason = Verdict.CANNOT_SAY, f"not priced: {'; '.join(setup.unpriced)}"
    elif setup.overpriced and verdict is Verdict.DOES_NOT_FIT:
        stays = peaks.process_low_bytes + result.final_allocated_bytes
        of_samples = all(each.endswith(_OF_SAMPLES) for each in setup.overpriced)
        if not of_samples or stays <= target.usable_bytes:
            words = "; ".join(setup.overpriced)
            verdict, reason = Verdict.CANNOT_SAY, f"the run may take less than is priced: {words}"
    return GpuFit(
        name=target.name,
        usable_bytes=target.usable_bytes,
        verdict=verdict,
        headroom_bytes=target.usable_bytes - peaks.device_bytes,
        device_bytes=peaks.device_bytes,
        basis=target.basis,
        reason=reason,
        low_bytes=peaks.low_bytes,
        high_bytes=peaks.high_bytes,
        largest_engine_share=peaks.largest_engine_share,
    )


def _verdict(
    target: TargetGpu, peaks: Peaks, stream: Stream, result: Replay, conf: AllocatorConf
) -> tuple[Verdict, str]:
    """The verdict on what is priced; and why, where the figures do not tell."""
    usable = target.usable_bytes

    def survives(process: int) -> bool:
        return _survives(target, peaks, process, stream, conf, result)

    if peaks.high_bytes <= usable:
        return Verdict.FITS, ""
    if peaks.engine_low_bytes > usable:
        return Verdict.DOES_NOT_FIT, "vLLM's share and what the trainer keeps exceed it"
    ranges = peaks.ranges
    spare = 0 if ranges is None else peaks.allocated_bytes - ranges.allocated.low_bytes
    if not survives(peaks.process_low_bytes - spare):
        return Verdict.DOES_NOT_FIT, _cache_words(peaks)
    # what an engine that sleeps else has while it generates is no cache of the allocator's
    if not peaks.engine_low_bytes and survives(_most_beside(peaks)):
        return Verdict.RELEASES_CACHE, _release_words(target, peaks, stream, conf)
    return Verdict.TIGHT, _tight_words(peaks, usable)


def _most_beside(peaks: Peaks) -> int:
    """What a replay has to leave free for a run that is sure to complete, bytes.

    The most that is not the allocator's, and what tensors and workspaces may take beyond the
    replay's.
    """
    if peaks.ranges is None:
        return peaks.high_bytes - peaks.reserved_bytes
    process = peaks.high_bytes - peaks.ranges.reserved.high_bytes
    tensors = peaks.ranges.allocated.high_bytes - peaks.allocated_bytes
    return process + tensors + peaks.slack_bytes


def _tight_words(peaks: Peaks, usable: int) -> str:
    """Why a run may fit and may not."""
    counted = peaks.high_bytes - peaks.engine_slack_bytes
    if counted <= usable:
        slack = format_size(peaks.engine_slack_bytes)
        return (
            f"vLLM's CUDA graphs may take up to {slack} beside it, and no more than "
            f"{format_size(usable - counted)} is sure to be left for them"
        )
    if peaks.low_bytes > usable:
        return "it may run if the allocator gives back what it caches, and the process takes little"
    if counted - peaks.slack_bytes <= usable and _is_mostly_slack(peaks):
        low, high = format_size(peaks.low_bytes), format_size(peaks.high_bytes)
        return f"anything from {low} to {high}, as the workspaces are that a library picks"
    return "too close to call"


def _is_mostly_slack(peaks: Peaks) -> bool:
    """Whether what libraries may choose is most of the range, and not small beside the peak."""
    slacks = peaks.slack_bytes + peaks.engine_slack_bytes
    rest = peaks.high_bytes - peaks.low_bytes - slacks
    return peaks.slack_bytes > max(rest, peaks.device_bytes // _LARGE_SLACK)


def _cache_words(peaks: Peaks) -> str:
    """That much of the device peak is no reason for a run not to fit; empty where it is little."""
    cached = peaks.reserved_bytes - peaks.allocated_bytes
    if cached <= peaks.device_bytes // _LARGE_SLACK:
        return ""
    return f"{format_size(cached)} of it are cached, and giving those back is not enough"


def _release_words(target: TargetGpu, peaks: Peaks, stream: Stream, conf: AllocatorConf) -> str:
    """How the run completes, and whether segments that grow would spare it that."""
    sizes = f"{format_size(peaks.allocated_bytes)} allocated, {format_size(peaks.reserved_bytes)}"
    words = f"{sizes} reserved: the allocator gives cached memory back on the way, which is slower"
    if peaks.low_bytes <= target.usable_bytes:
        words = (
            "it may take more than there is, and the allocator then gives cached memory back, "
            "which is slower"
        )
    if conf.expandable_segments:
        return words
    growing = replay(
        stream.events,
        stream.sizes,
        replace(conf, expandable_segments=True),
        chains=stream.chains,
        streams=stream.on_streams,
        empty_cache_at=stream.empty_cache_at,
    )
    beside = peaks.high_bytes - peaks.reserved_bytes + peaks.added_bytes
    if growing.peak_reserved_bytes + beside <= target.usable_bytes:
        words += "; expandable_segments:True would make it fit"
    return words


def _survives(
    target: TargetGpu,
    peaks: Peaks,
    process: int,
    stream: Stream,
    conf: AllocatorConf,
    unlimited_replay: Replay,
) -> bool:
    """Whether the run completes in what the process part leaves, retries included.

    Retries are the allocator's, and PyTorch's with other algorithms of convolutions.
    """
    limit = target.usable_bytes - process - peaks.added_bytes
    numbers: frozenset[int] = frozenset()
    if limit <= 0:
        return False
    if unlimited_replay.peak_allocated_bytes > limit:
        numbers = dispensable(stream)
        if peak_without(unlimited_replay, stream.events, numbers) > limit:
            return False
    if unlimited_replay.peak_reserved_bytes <= limit:
        return True
    limited_replay = replay(
        stream.events,
        stream.sizes,
        conf,
        limit_bytes=limit,
        chains=stream.chains,
        streams=stream.on_streams,
        empty_cache_at=stream.empty_cache_at,
        dispensable=numbers or dispensable(stream),
    )
    return limited_replay.num_ooms == 0


@dataclass(slots=True)
class SizeTrial:
    """One size that was looked at on the way to the largest.

    Attributes:
        size: of the batch, or whatever varies.
        peaks: of the run on the GPU.
        runs: whether it completes with the context expected.
        fits: whether it surely fits.
    """

    size: int
    peaks: Peaks
    runs: bool
    fits: bool


class LargestSizeSearch:
    """Looks for the largest size that runs on a GPU, and for the largest that surely fits.

    Args:
        target: the GPU.
        replays: under the configuration of its allocator.
        run_at: the run for a size.
        highest: the largest size that can be asked for.
        lowest: the smallest.
    """

    def __init__(
        self,
        target: TargetGpu,
        replays: ReplayCache,
        run_at: Callable[[int], Run],
        highest: int,
        lowest: int = 1,
    ) -> None:
        self._target = target
        self._replays = replays
        self._run_at = run_at
        self._highest = highest
        self._lowest = lowest
        self.trials: dict[int, SizeTrial] = {}

    def at(self, size: int) -> SizeTrial:
        """What becomes of one size."""
        trial = self.trials.get(size)
        if trial is None:
            target, run = self._target, self._run_at(size)
            stream = run.stream
            result = self._replays.of(stream)
            peaks = peaks_of(target, run, stream, result)
            expected = peaks.process_expected_bytes
            trial = self.trials[size] = SizeTrial(
                size=size,
                peaks=peaks,
                runs=_survives(target, peaks, expected, stream, self._replays.conf, result),
                fits=peaks.high_bytes <= target.usable_bytes and not run.setup.unpriced,
            )
        return trial

    def largest(self, start: int) -> tuple[int, int]:
        """(the largest that runs, the largest that surely fits), 0 where not even the lowest does.

        Args:
            start: where to begin.
        """
        largest = self.largest_running(start)
        if self._run_at(max(largest, self._lowest)).setup.unpriced:
            return largest, 0  # no size surely fits: nothing is to be looked for
        room = self._target.usable_bytes
        return largest, self._last(lambda t: t.fits, (lambda p: p.high_bytes - room,))

    def largest_running(self, start: int) -> int:
        """The largest that runs with the context expected, 0 where not even the lowest does.

        Args:
            start: where to begin.
        """
        self.at(min(max(start, self._lowest), self._highest))
        room = self._target.usable_bytes

        def reserved(peaks: Peaks) -> int:
            return peaks.reserved_bytes + peaks.process_expected_bytes - room

        def allocated(peaks: Peaks) -> int:
            # the allocator gives back what it caches before memory runs out
            return peaks.allocated_bytes + peaks.process_expected_bytes - room

        return self._last(lambda trial: trial.runs, (reserved, allocated))

    def _last(
        self, condition: Callable[[SizeTrial], bool], measures: Sequence[Callable[[Peaks], int]]
    ) -> int:
        """The largest size for which ``condition``, by secants, then by halves.

        Memory grows with the size along a line that is almost straight, so the first guesses come
        from two points; the answer only from sizes next to each other that differ in ``condition``.

        Args:
            condition: holds for small sizes.
            measures: of peaks, which come to 0 about where it ceases to hold.
        """
        holds = {size: condition(trial) for size, trial in self.trials.items()}
        low = max((size for size, held in holds.items() if held), default=self._lowest - 1)
        above = (size for size, held in holds.items() if not held and size > low)
        high = min(above, default=self._highest + 1)
        step, first = 1, True
        for attempt in range(_MAX_ATTEMPTS):
            if high - low <= 1:
                break
            guesses = [self._guess(measure) for measure in measures] if attempt < _SECANTS else []
            size = next((guess for guess in guesses if low < guess < high), 0)
            if not size and guesses and (first or high > self._highest):
                # a guess outside has done its work: the answer is near that end
                size = low + step if guesses[-1] <= low else high - step
                step, first = 2 * step, False
            if not low < size < high:
                size = (low + high) // 2 if high <= self._highest else low * 2
            size = max(min(size, high - 1, self._highest), low + 1)
            if condition(self.at(size)):
                low = size
            else:
                high = size
        return low if low >= self._lowest else 0

    def _guess(self, measure: Callable[[Peaks], int]) -> int:
        """Where the line through the two sizes nearest to 0 of a measure meets it."""
        points = ((trial.size, measure(trial.peaks)) for trial in self.trials.values())
        nearest = sorted(points, key=lambda point: abs(point[1]))[:2]
        (first, value), *others = nearest
        if not others or others[0][1] == value:
            peaks = self.trials[first].peaks
            part = max(peaks.reserved_bytes, 1)
            return max(first * (part - value) // part, 1)
        second, other_value = others[0]
        return max(first - value * (second - first) // (other_value - value), 1)


def largest_batch(
    target: TargetGpu, profiler: Profiler, setup: Setup, conf: AllocatorConf
) -> tuple[int, int]:
    """The largest batch that runs with the expected context, and the largest that surely fits.

    Returns:
        (largest, largest safe); 0 where not even the smallest that its trainer takes does.
    """
    step = setup.batch_step

    def run_at(steps: int) -> Run:
        return resolve_run(profiler, replace(setup, batch=steps * step), target.traits, ("batch",))

    search = LargestSizeSearch(
        target, profiler.replays(conf), run_at, MAX_BATCH // step, smallest_batch(setup) // step
    )
    largest, safe = search.largest(setup.batch // step)
    return largest * step, safe * step
