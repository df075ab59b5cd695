"""One training run under watch: predicted before its first step, measured while it trains."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memest.calibration.case import Case
from memest.calibration.live.attribution import (
    Attribution,
    MeasuredPeak,
    attribute,
    difference_by_category,
)
from memest.calibration.live.counters import CudaCounters
from memest.calibration.live.curve import MemoryCurve
from memest.calibration.live.records import case_of, model_reference, status_of
from memest.calibration.measurement import (
    Environment,
    Measurement,
    MemoryReading,
    StepReading,
    failure_of,
)
from memest.calibration.recording import history as recording
from memest.calibration.store import MeasurementStore, default_store
from memest.config.inputs import NO_INPUTS, ModuleInputs
from memest.config.setup import Setup, Task
from memest.errors import ConfigError, DoesNotFitError, MemestError
from memest.estimation.estimate import answer
from memest.estimation.gpu_target import target_gpus
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import resolve_run
from memest.profiles.stream import Stream
from memest.report.growth_result import ExpectedCourse, GrowthExplanation
from memest.report.result import Estimate, Verdict
from memest.search.explain_growth import expected_course, explanation_of
from memest.units import format_size

__all__ = ["Watch", "WatchedRun", "logger"]

logger = logging.getLogger("memest")

_FIRST = 3
"""Steps that are read in any case: states come with the first, the second is like all others."""
_MOST = 64
_HISTORY = 1_000_000


class Watch:
    """Prediction and readings of one run.

    Args:
        model: live; asked for its name and its numbers of parameters.
        counters: of the GPU, None on a machine without one.
        gpu: whose verdict is asked for; None = the GPU of the counters.
        gpu_memory: bytes of it, in place of the catalogue's.
        strict: a run that will not fit, and a prediction that fails, are errors.
        store: file of the store; False = no record is kept.
        history: keep the allocator's own history of the first steps: the difference by category.

    Attributes:
        prediction: None until there is one, and where it failed.
        problem: why there is no prediction; empty if there is one.
        steps: readings, those of the first steps and of every new peak.
        num_steps: optimizer steps that were completed.
        by_category: the allocated difference by category; None without a history.
        curve: a reading a step; None without a GPU.
    """

    def __init__(
        self,
        model: Any,
        counters: CudaCounters | None,
        *,
        gpu: str | None = None,
        gpu_memory: int | str | None = None,
        strict: bool = False,
        store: str | Path | bool | None = None,
        history: bool = False,
    ) -> None:
        self.model = model
        self.counters = counters
        self.strict = strict
        self.prediction: Estimate | None = None
        self.problem = "nothing was asked yet"
        self.steps: list[StepReading] = []
        self.num_steps = 0
        self._gpu, self._gpu_memory = gpu, gpu_memory
        self._answered_for: tuple[str | None, int | str | None] = gpu, gpu_memory
        self._store = store
        self._keeps_history = history
        self._stream: Callable[[], Stream] | None = None
        self.by_category: dict[str, int] | None = None
        self._readings: list[MemoryReading] = []
        self._environment: Environment | None = None
        self._began = self._last = time.monotonic()
        self._start_time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._setup: Setup | None = None
        self._record: Measurement | None = None
        self.closed = False
        self.curve = None if counters is None else MemoryCurve(counters)
        self._expected: Callable[[], ExpectedCourse] | None = None

    # -- before the first step

    def predict(
        self, setup: Setup, module_inputs: ModuleInputs = NO_INPUTS, model: Any = None
    ) -> Estimate | None:
        """Predict the run and warn, or stop, if it will not fit.

        Args:
            setup: the run.
            module_inputs: what a module of one's own is fed.
            model: a copy to trace in place of the live one.

        Returns:
            None where it cannot be predicted; ``problem`` says why, and a warning was given.

        Raises:
            DoesNotFitError: strict, and it will not fit.
            MemestError: strict, and there is no prediction.
        """
        self._setup = setup
        try:
            # in a thread of its own: regions of autocast, modes and grad mode are the thread's, and
            # none of the loop's must hold for the trace
            with ThreadPoolExecutor(1, thread_name_prefix="memest") as apart:
                self.prediction = apart.submit(self._estimate, setup, module_inputs, model).result()
            self.problem, self._setup = "", self.prediction.setup
        except Exception as error:  # noqa: BLE001 - a prediction must not end a training
            self.cannot_predict(error)
            return None
        self._judge(self.prediction)
        return self.prediction

    def _estimate(self, setup: Setup, module_inputs: ModuleInputs, model: Any) -> Estimate:
        profiler = Profiler.of(self.model if model is None else model, module_inputs=module_inputs)
        named_options = {"batch": None} if setup.batch != Setup().batch else {}
        profiled_setup = profiler.with_own_parts(setup, named_options)
        estimate = self._answer(profiler, profiled_setup)
        target = target_gpus(
            profiled_setup, gpu=self._answered_for[0], gpu_memory=self._answered_for[1]
        ).main
        run = resolve_run(profiler, profiled_setup, target.traits)
        self._expected = lambda: expected_course(run, estimate.model.id, target.name)
        if self._keeps_history:
            stream = run.stream
            self._stream = lambda: stream
        return estimate

    def _answer(self, profiler: Profiler, request: Setup) -> Estimate:
        gpu, memory = self._gpu, self._gpu_memory
        if gpu is None and self.counters is not None:
            gpu, memory = self.counters.gpu, memory or self.counters.total_bytes
        self._answered_for = gpu, memory
        try:
            return answer(profiler, request, gpu=gpu, gpu_memory=memory, max_batch=False)
        except MemestError:
            if self._gpu is not None or gpu is None:
                raise
            # a card that the catalogue does not know: its memory is known all the same
            self._answered_for = None, memory
            return answer(profiler, request, gpu_memory=memory, max_batch=False)

    def cannot_predict(self, error: Exception) -> None:
        """Warn that there is no prediction; training goes on unless strict.

        Raises:
            MemestError: strict.
        """
        text = " ".join(str(error).split()) or type(error).__name__
        self.problem = text if isinstance(error, MemestError) else f"{type(error).__name__}: {text}"
        if self.strict:
            if isinstance(error, MemestError):
                raise error
            raise MemestError(f"memest cannot predict this run: {self.problem}") from error
        logger.warning("memest: no prediction for this run, which goes on: %s", self.problem)

    def _judge(self, estimate: Estimate) -> None:
        if estimate.gpu is None:
            if self.strict:
                raise ConfigError(
                    "strict=True needs a GPU to decide by, and this machine has none that torch "
                    "sees: name one, gpu='rtx-4090', or leave strict out."
                )
            return
        if estimate.verdict is not Verdict.DOES_NOT_FIT:
            return
        text = (
            f"this run will not fit {estimate.gpu.name}: it needs "
            f"{format_size(estimate.peak.device_bytes)} (range "
            f"{format_size(estimate.interval.low_bytes)} to "
            f"{format_size(estimate.interval.high_bytes)}) "
            f"of {format_size(estimate.gpu.usable_bytes)}"
        )
        if self.strict:
            raise DoesNotFitError(
                f"{text}. Ask memest.max_batch for what fits, or leave strict out to try it."
            )
        logger.warning("memest: %s.", text)

    # -- while it trains

    def start(self) -> None:
        """Peaks begin here."""
        self._began = self._last = time.monotonic()
        counters = self.counters
        if counters is None:
            return
        self._environment = counters.environment()
        if counters.first is not None:
            self._readings.append(counters.first)
        counters.reset()
        self._readings.append(counters.read("model"))
        if self.curve is not None:
            self.curve.read(0)
        if self._keeps_history and self._stream is not None:
            try:
                recording.start_history(_HISTORY)
            except Exception as error:  # noqa: BLE001 - a history must not end a training
                logger.warning("memest: no history of the allocator is kept: %s", error)
                self._stream = None

    def step_done(self) -> bool:
        """An optimizer step is over.

        Returns:
            Whether something new was read: one of the first steps, or a new peak.
        """
        self.num_steps += 1
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        counters = self.counters
        if counters is None:
            return False
        if self.curve is not None:
            self.curve.read(self.num_steps)
        highest = max((s.reserved_bytes or 0 for s in self.steps), default=0)
        if self.num_steps > _FIRST and counters.reserved_peak() <= highest:
            return False
        if len(self.steps) >= _MOST:
            self.steps.pop(_FIRST)
        self.steps.append(counters.step(seconds))
        if self.num_steps == _FIRST:
            self._take_history()
        return True

    def _take_history(self) -> None:
        """End the history and lay the prediction beside it."""
        stream, self._stream = self._stream, None
        if not self._keeps_history or stream is None:
            return
        try:
            allocator_history = recording.take_history(_device())
            if self.attribution is not None:
                tensors = self.attribution.parts[0].difference_bytes or 0
                self.by_category = difference_by_category(allocator_history, stream(), tensors)
        except Exception as error:  # noqa: BLE001 - a history must not end a training
            logger.warning("memest: no difference by category: %s", error)

    @property
    def settled(self) -> bool:
        """Whether the steps that decide peaks were made."""
        return self.num_steps >= _FIRST

    @property
    def measured(self) -> MeasuredPeak:
        """The peaks so far."""
        if self.counters is None or self._environment is None:
            return MeasuredPeak()
        record = self._measurement(Case(model="live", setup=Setup()))
        return MeasuredPeak(
            allocated_bytes=record.allocated_bytes,
            reserved_bytes=record.reserved_bytes,
            device_bytes=record.device_bytes,
        )

    @property
    def attribution(self) -> Attribution | None:
        """Where prediction and measurement differ; None without one of them."""
        measured_peak = self.measured
        if self.prediction is None or measured_peak.allocated_bytes is None:
            return None
        return attribute(self.prediction.peak, measured_peak)

    @property
    def growth(self) -> GrowthExplanation | None:
        """How memory went so far, and why it grew; None without a GPU."""
        if self.curve is None:
            return None
        expected = None
        if self._expected is not None:
            try:
                expected = self._expected()
            except MemestError as error:
                logger.warning("memest: nothing expected to lay beside memory's course: %s", error)
                self._expected = None
        assert self.counters is not None
        return explanation_of(
            self.curve.points,
            source="this run",
            expected=expected,
            capacity_bytes=self.counters.total_bytes,
        )

    def logs(self) -> dict[str, int]:
        """What trackers are told, bytes by name; what is unknown is left out."""
        out: dict[str, int] = {}
        if self.prediction is not None:
            peak = self.prediction.peak
            out |= {f"memest/predicted_{n}_bytes": getattr(peak, f"{n}_bytes") for n in _PEAKS}
            out["memest/predicted_device_low_bytes"] = self.prediction.interval.low_bytes
            out["memest/predicted_device_high_bytes"] = self.prediction.interval.high_bytes
            if self.prediction.gpu is not None:
                out["memest/headroom_bytes"] = self.prediction.gpu.headroom_bytes
        measured_peak = self.measured
        for name in _PEAKS:
            value = getattr(measured_peak, f"{name}_bytes")
            if value is not None:
                out[f"memest/measured_{name}_bytes"] = value
        for category, size in (self.by_category or {}).items():
            out[f"memest/difference_tensors/{category.replace(' ', '_')}_bytes"] = size
        for part in self.attribution.parts if self.attribution is not None else ():
            if part.difference_bytes is not None:
                out[f"memest/difference_{part.name}_bytes"] = part.difference_bytes
        return out

    # -- after it

    def close(self, error: BaseException | None = None, *, rank: int = 0) -> Measurement | None:
        """The run is over: make the record and keep it.

        Args:
            error: that ended it early; None if none did.
            rank: of this process.

        Returns:
            The record; None where nothing was measured or nothing is known of the run. A store
            that cannot be written is a warning.
        """
        if self.closed:
            return self._record
        if self.counters is not None and self._environment is not None:
            self._take_history()  # of a run that ended before its first steps were made
            try:
                name = "oom" if status_of(error) == "oom" else "end"
                self._readings.append(self._last_reading(name))
                if self._setup is not None:
                    model = model_reference(self.model, self._path.parent)
                    setup = self._setup
                    if self.prediction is not None and ":" not in Path(model).name:
                        setup = dataclasses.replace(setup, task=Task(self.prediction.model.task))
                    case = case_of(model, setup, self.num_steps)
                    self._record = self._measurement(case, error, rank)
                    if self._store is not False and rank == 0:
                        with MeasurementStore(self._path) as store:
                            store.add([self._record])
            except Exception as problem:  # noqa: BLE001 - a record must not end a training
                logger.warning("memest: no record of this run: %s", problem)
        self.closed = True
        return self._record

    @property
    def _path(self) -> Path:
        store = self._store
        return Path(store).expanduser() if isinstance(store, (str, Path)) else default_store()

    def _last_reading(self, name: str) -> MemoryReading:
        assert self.counters is not None
        reading = self.counters.read(name)
        if name != "oom":
            return reading
        peaks = self.counters.step(0.0)  # of the step that was not completed
        return dataclasses.replace(
            reading, allocated_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes
        )

    def _measurement(
        self, case: Case, error: BaseException | None = None, rank: int = 0
    ) -> Measurement:
        remarks = ["measured inside a training run"]
        if self.prediction is not None:
            peak = self.prediction.peak
            peaks = ", ".join(f"{n} {getattr(peak, f'{n}_bytes')}" for n in _PEAKS)
            remarks.append(f"predicted before the first step, bytes: {peaks}")
        else:
            remarks.append(f"no prediction: {self.problem}"[:500])
        parameters = list(self.model.parameters()) if hasattr(self.model, "parameters") else []
        return Measurement(
            run=uuid.uuid4().hex if not rank else f"{uuid.uuid4().hex}-r{rank}",
            case=case,
            status=status_of(error),
            environment=self._environment,
            started=self._start_time,
            seconds=round(time.monotonic() - self._began, 3),
            parameters=sum(p.numel() for p in parameters) or None,
            trainable=sum(p.numel() for p in parameters if p.requires_grad) or None,
            readings=tuple(self._readings),
            steps=tuple(self.steps),
            failure=None if error is None else failure_of(error, f"step {self.num_steps + 1}"),
            rank=rank,
            remarks=tuple(remarks),
        )


class WatchedRun:
    """What users are told of a run under watch."""

    _watch: Watch

    def warn_of_growth(self) -> None:
        """Say once what is kept that the steps to come do not need, where something is."""
        try:
            growth = self._watch.growth
        except Exception as error:  # noqa: BLE001 - an explanation must not end a training
            logger.warning("memest: memory's course is not explained: %s", error)
            return
        if growth is not None and growth.leaks:
            finding = growth.findings[0]
            text = " ".join((*finding.evidence, *finding.remedy))
            logger.warning("memest: memory grows (%s): %s", finding.cause.value, text)

    @property
    def prediction(self) -> Estimate | None:
        """What was predicted, None before and where it failed; :attr:`problem` says why."""
        return self._watch.prediction

    @property
    def problem(self) -> str:
        """Why there is no prediction, empty if there is one."""
        return self._watch.problem

    @property
    def measured(self) -> MeasuredPeak:
        """The three peaks so far; None each on a machine without a GPU."""
        return self._watch.measured

    @property
    def attribution(self) -> Attribution | None:
        """Where prediction and measurement differ."""
        return self._watch.attribution

    @property
    def by_category(self) -> dict[str, int] | None:
        """The allocated difference by category, bytes; None without a history."""
        return self._watch.by_category

    @property
    def growth(self) -> GrowthExplanation | None:
        """How memory went so far, and why it grew; None on a machine without a GPU."""
        return self._watch.growth

    @property
    def record(self) -> Measurement | None:
        """What was kept, once the run is over."""
        return self._watch.close() if self._watch.closed else None


def _device() -> int:
    import torch

    return int(torch.cuda.current_device())


_PEAKS = ("allocated", "reserved", "device")
