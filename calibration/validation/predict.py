"""What memest says about a case record, beside what was measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from memest.calibration.validation.records import CaseRecord
from memest.catalog.resolve import resolve_model
from memest.config.inputs import NO_INPUTS, module_inputs_of
from memest.config.options import setup_from_options
from memest.config.setup import Precision, Setup, Software
from memest.errors import ConfigError, MemestError
from memest.estimation.breakdown import moment
from memest.estimation.gpu_target import NO_CALIBRATION, TargetGpu, target_gpu
from memest.estimation.peaks import peaks_of
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.estimation.whole_run import resolve_run
from memest.events import Chains, Phase
from memest.files.code_digest import made_with
from memest.profiles.stream import Stream
from memest.replay.conf import AllocatorConf, parse_alloc_conf
from memest.replay.replay import Replay, replay

__all__ = ["Predictor", "RecordOutcome"]

_NOT_VERSIONS = ("driver",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOutcome:
    """A record and what was predicted for it.

    Attributes:
        record: the record.
        predicted_bytes: to be compared with the measured figure, of the same counter; None where
            nothing could be predicted.
        low_bytes: the lower end where the record's lengths are a range, None where it is a number.
        bound_bytes: what an estimate promises that this counter does not exceed; None for what is
            read after a forward pass.
        floor_bytes: the lower end of that range, None likewise.
        context_bytes: of context and kernels in the prediction; 0 for other counters.
        context_read: whether the context was read on that very GPU.
        limit_bytes: what the allocator could have, None where nobody knows.
        runs_out: whether the run goes out of memory in that limit; None without a limit, or where
            it is too close to be said.
        retries: how often the allocator gives its cache back in that limit.
        where: phase, step and operator of the allocated peak, in words.
        slack_bytes: how much more libraries might take that pick their own workspace.
        fragmentation_bytes: reserved less allocated at their peaks.
        family: kind of model, as its config calls it.
        precision: of the run.
        optimizer: of the run.
        failure: why nothing could be predicted, empty where something was.
        made_with: memest's version and a digest of the code and the tables that predicted it;
            empty where it was not recorded.
    """

    record: CaseRecord
    predicted_bytes: int | None = None
    low_bytes: int | None = None
    bound_bytes: int | None = None
    floor_bytes: int | None = None
    context_bytes: int = 0
    context_read: bool = False
    limit_bytes: int | None = None
    runs_out: bool | None = None
    retries: int = 0
    where: str = ""
    slack_bytes: int = 0
    fragmentation_bytes: int = 0
    family: str = ""
    precision: str = ""
    optimizer: str = ""
    failure: str = ""
    made_with: str = ""

    @property
    def stale(self) -> bool:
        """Whether other code predicted it than is installed, or nobody recorded which."""
        return self.made_with != made_with()

    @property
    def error(self) -> float | None:
        """Signed error, 0.01 for one percent too high; None where there is no number to be hit.

        None where nothing was predicted, where the run failed (what it reached is no peak), and
        where lengths are a range. A prediction that the printed figure was rounded from is right.
        """
        measured = self.record.measured_bytes
        if self.predicted_bytes is None or not measured or self.record.oom or self.low_bytes:
            return None
        if 2 * abs(self.predicted_bytes - measured) <= self.record.rounding_bytes:
            return 0.0
        return self.predicted_bytes / measured - 1

    @property
    def scored(self) -> bool:
        """Whether there is a number to be hit by what is known: a device peak needs its context."""
        return self.error is not None and (self.record.metric != "device" or self.context_read)

    @property
    def inside(self) -> bool | None:
        """Whether the figure lies in the range told; None where none was told or the run failed."""
        measured = self.record.measured_bytes
        if measured is None or self.record.oom or self.predicted_bytes is None:
            return None
        if self.low_bytes is not None:
            return self.low_bytes <= measured <= self.predicted_bytes
        if self.bound_bytes is None or self.floor_bytes is None:
            return None
        return self.floor_bytes <= measured <= self.bound_bytes


class Predictor:
    """Predicts records, without any calibration or with the one that is named.

    Args:
        profile: file of a calibration; left out, none is taken, also where one would be
            found: it may have been fitted to these very records.
        progress: called with one line for each longer thing done.
        trust_code: import and run the modules that records name; a record is data, so without
            this such a record has no prediction.
    """

    def __init__(
        self,
        profile: str | None = None,
        progress: Callable[[str], None] | None = None,
        *,
        trust_code: bool = False,
    ) -> None:
        self._trusts_code = trust_code
        self._profile = profile or NO_CALIBRATION
        self._progress = progress
        self._profilers: dict[Any, Profiler] = {}

    def predict(self, record: CaseRecord) -> RecordOutcome:
        """One record; what goes wrong with it is told in the outcome."""
        try:
            with _modules_of(record.code):
                if record.lengths is not None:
                    shortest, longest = record.lengths
                    low = self._predict(record, seq_len=shortest)
                    return replace(
                        self._predict(record, seq_len=longest), low_bytes=low.predicted_bytes
                    )
                return self._predict(record)
        except MemestError as error:
            reason = " ".join(str(error).split())
            return RecordOutcome(record=record, failure=reason, **_facts(record, None))

    def setup_of(self, record: CaseRecord, **changes: Any) -> Setup:
        """The training setup of a record, with the software it ran on.

        Raises:
            ConfigError: an option of it cannot be.
        """
        versions = {k: v for k, v in record.software.items() if k not in _NOT_VERSIONS}
        entries = [f"{k}={v}" for k, v in versions.items() if k in Software.__dataclass_fields__]
        return setup_from_options(
            **{**record.setup, "software": Software.parse(",".join(entries)), **changes}
        )

    def card_of(self, record: CaseRecord, setup: Setup, *, with_context: bool) -> TargetGpu:
        """The record's GPU.

        Args:
            record: the record.
            setup: of it.
            with_context: with the context that was read on it, where there is one.
        """
        torch = setup.software.torch or (2, 0)
        context = record.context_bytes if with_context else None
        return target_gpu(record.gpu, setup, torch, context, None, self._profile)

    def _predict(self, record: CaseRecord, **changes: Any) -> RecordOutcome:
        setup = self.setup_of(record, **changes)
        target = self.card_of(record, setup, with_context=True)
        run = resolve_run(self._tracer(record), setup, target.traits)
        stream = run.stream
        if record.metric == "forward":
            stream = _forward_only(stream)
        conf = parse_alloc_conf(setup.alloc_conf)
        result = replay(
            stream.events, stream.sizes, conf, chains=stream.chains, streams=stream.on_streams
        )
        at = moment(stream, result)
        needs = peaks_of(target, run, stream, result)
        table_peaks = peaks_of(self.card_of(record, setup, with_context=False), run, stream, result)
        peaks = {
            "allocated": needs.allocated_bytes,
            "reserved": needs.reserved_bytes,
            "device": needs.device_bytes,
            "forward": result.final_allocated_bytes,
        }
        slack = stream.workspace_slack_bytes
        ranges = needs.ranges
        assert ranges is not None  # of whole runs there always are
        bounds: dict[str, tuple[int, int]] = {
            "allocated": (ranges.allocated.low_bytes, ranges.allocated.high_bytes),
            "reserved": (ranges.reserved.low_bytes, ranges.reserved.high_bytes),
            "device": (table_peaks.low_bytes, table_peaks.high_bytes),
        }
        floor, bound = bounds.get(record.metric, (None, None))
        in_segments = record.metric in ("reserved", "device")
        peak, limit = peaks[record.metric], record.limit_bytes
        exact = limit is not None or record.context_bytes is not None
        if limit is None and in_segments:
            limit = target.usable_bytes - needs.process_expected_bytes
        margins = (
            (0, slack)
            if exact
            else (
                table_peaks.device_bytes - table_peaks.low_bytes,
                table_peaks.high_bytes - table_peaks.device_bytes,
            )
        )
        runs_out, retries = None, 0
        if limit is not None:
            runs_out, limited_replay = _in_limit(stream, result, conf, limit, margins)
            retries = limited_replay.num_alloc_retries
            if not limited_replay.num_ooms and in_segments:
                peak += limited_replay.peak_reserved_bytes - result.peak_reserved_bytes
        return RecordOutcome(
            record=record,
            predicted_bytes=peak,
            bound_bytes=bound,
            floor_bytes=floor,
            context_bytes=needs.process_expected_bytes if record.metric == "device" else 0,
            context_read=record.context_bytes is not None,
            limit_bytes=limit,
            runs_out=runs_out,
            retries=retries,
            where=f"{at.phase} {at.step}, {at.op.removeprefix('aten.').partition('.')[0]}",
            slack_bytes=slack,
            fragmentation_bytes=result.peak_reserved_bytes - result.peak_allocated_bytes,
            **_facts(record, run),
        )

    def _tracer(self, record: CaseRecord) -> Profiler:
        if record.named_code and not self._trusts_code:
            raise ConfigError(
                f"the record names code, {', '.join(record.named_code)}, and records are data: it "
                "is not run. If you trust it: memest validate --trust-code."
            )
        key = record.model, record.inputs, record.loss, record.step, repr(record.model_args)
        if key not in self._profilers:
            self._profilers.clear()  # a model's records stand together; traces of all would not fit
            module_inputs = NO_INPUTS
            if record.inputs or record.model_args or (record.loss or record.step) is not None:
                module_inputs = module_inputs_of(
                    list(record.inputs) or None,
                    record.loss,
                    record.step,
                    None,
                    dict(record.model_args),
                )
            self._profilers[key] = Profiler(
                source=resolve_model(record.model),
                module_inputs=module_inputs,
                progress=self._progress,
            )
        return self._profilers[key]


@contextmanager
def _modules_of(folder: str) -> Iterator[None]:
    """Modules of a folder can be imported, after all others."""
    added = bool(folder) and folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def _forward_only(stream: Stream) -> Stream:
    """A run up to its first backward: what is alive at its end is what a script reads there."""
    end = next(
        position
        for position, mark in zip(stream.mark_positions, stream.marks, strict=True)
        if mark.phase is Phase.BACKWARD
    )
    out = replace(stream)
    out.events = stream.events[:end]
    out.chains = Chains()
    return out


def _in_limit(
    stream: Stream, free: Replay, conf: AllocatorConf, limit: int, margins: tuple[int, int]
) -> tuple[bool | None, Replay]:
    """Whether a run goes out of memory in a limit, and its replay there.

    Args:
        stream: of the run.
        free: its replay without a limit.
        conf: of the allocator.
        limit: bytes that the allocator can have.
        margins: bytes by which the limit may be larger, and smaller.

    Returns:
        None for the first where both may happen.
    """

    def replay_within(most: int) -> Replay:
        if free.peak_reserved_bytes <= most:
            return free
        return replay(
            stream.events,
            stream.sizes,
            conf,
            limit_bytes=most,
            chains=stream.chains,
            streams=stream.on_streams,
        )

    result = replay_within(limit)
    runs_out = bool(result.num_ooms)
    other = replay_within(limit + margins[0] if runs_out else max(limit - margins[1], 0))
    return (runs_out if bool(other.num_ooms) == runs_out else None), result


def _facts(record: CaseRecord, run: Run | None) -> dict[str, Any]:
    """What outcomes are grouped by."""
    if run is not None:
        setup = run.setup
        precision = setup.precision.value
        dtype = setup.loaded_dtype.value
        if setup.precision is Precision.FP32 and dtype not in ("auto", "float32"):
            precision = f"{dtype} weights"
        return {
            "family": run.family,
            "precision": precision,
            "optimizer": setup.optimizer,
            "made_with": made_with(),
        }
    return {
        "made_with": made_with(),
        "family": "",
        "precision": str(record.setup.get("precision", "")),
        "optimizer": str(record.setup.get("optim", "")),
    }
