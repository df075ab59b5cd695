"""``MemestCallback``: transformers' Trainer under watch."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from memest.calibration.live import counters
from memest.calibration.live.arguments import first_batch, setup_of_arguments, unseen_of
from memest.calibration.live.attribution import MeasuredPeak
from memest.calibration.live.watch import Watch, WatchedRun, logger
from memest.calibration.measurement import Measurement
from memest.config.inputs import ModuleInputs, module_inputs_of
from memest.errors import MemestError

__all__ = ["MemestCallback"]

_FRAMES = 8


class MemestCallback(WatchedRun, TrainerCallback):
    """Predicts a Trainer's run before its first step, and measures it.

    Values go into the Trainer's own log under ``memest/...``, so every tracker gets them. A
    prediction that fails is a warning and never ends a training, unless ``strict``.

    Args:
        trainer: whose ``log`` is used; left out, the one that calls.
        gpu: whose verdict is asked for; left out, the GPU of this process.
        gpu_memory: bytes of it.
        strict: raise before the first step where the run will not fit, or cannot be predicted.
        inputs: as for :func:`memest.estimate`; left out, the first real batch of the loader.
        seq_len: tokens of a sample to price in place of the first batch's: the longest to come.
        store: file that the record goes to; left out, the store of ``memest calibrate``; False
            keeps none.
        history: keep the allocator's own history of the first three steps, for the difference of
            the tensors by category.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        gpu: str | None = None,
        gpu_memory: int | str | None = None,
        strict: bool = False,
        inputs: Any = None,
        seq_len: int | None = None,
        store: str | Path | bool | None = None,
        history: bool = False,
    ) -> None:
        self._trainer = trainer
        self._options: dict[str, Any] = {
            "gpu": gpu,
            "gpu_memory": gpu_memory,
            "strict": strict,
            "store": store,
            "history": history,
        }
        self._inputs, self._seq_len = inputs, seq_len
        self._watch = Watch(None, None)
        self._watch.problem = "training has not begun"
        self._rank = 0
        self._ooms = 0
        self._logged_values: dict[str, int] = {}
        self.unseen: list[str] = []

    # -- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Predict, log it, and begin to measure."""
        if self._trainer is None:
            self._trainer = _calling_trainer()
        model = kwargs.get("model")
        self._rank = int(getattr(args, "process_index", 0) or 0)
        watch = self._watch = Watch(model, counters.open_counters(), **self._options)
        try:
            self._predict(watch, args, kwargs.get("train_dataloader"))
        finally:
            if watch.prediction is None and self._options["strict"]:
                watch.closed = True
        if watch.prediction is not None and state.is_world_process_zero:
            self._log(state, watch.logs())
        watch.start()
        if watch.counters is None and state.is_world_process_zero:
            logger.warning("memest: no CUDA device here, so there is nothing to measure.")
        elif watch.counters is not None:
            self._ooms = watch.counters.ooms()
            # a training that ends by an error calls nobody
            atexit.register(self._at_exit)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the peaks; log them once they are settled, and when they grow."""
        watch = self._watch
        is_new = watch.step_done() and watch.settled
        if not state.is_world_process_zero:
            return
        if control.should_log and watch.curve is not None:
            self._write(state, watch.curve.logs())
        if is_new:
            self._log(state, watch.logs())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read between two batches of an evaluation: predictions gather there."""
        watch = self._watch
        if watch.curve is not None and watch.num_steps:
            watch.curve.read(watch.num_steps, evaluation=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the record and say what differs."""
        watch = self._watch
        if watch.closed:
            return
        atexit.unregister(self._at_exit)
        readings = _of_all_ranks(watch.measured)
        watch.close(rank=self._rank)
        if not state.is_world_process_zero:
            return
        logs = watch.logs()
        for name in ("allocated", "reserved", "device"):
            peaks = [v for one in readings if (v := getattr(one, f"{name}_bytes")) is not None]
            if len(readings) > 1 and peaks:
                logs[f"memest/measured_{name}_bytes_max_over_ranks"] = max(peaks)
        if watch.counters is not None:
            self._log(state, logs)
        if watch.attribution is not None:
            logger.info("memest: %s", watch.attribution)
        self.warn_of_growth()

    # -- what they do

    def _predict(self, watch: Watch, args: Any, loader: Any) -> None:
        try:
            module_inputs, batch = self._module_inputs(loader)
            setup = setup_of_arguments(args, batch=batch, seq_len=self._seq_len)
            self.unseen = unseen_of(args, self._trainer)
        except Exception as error:  # noqa: BLE001 - a prediction must not end a training
            watch.cannot_predict(error)
            return
        watch.predict(setup, module_inputs)
        if self.unseen and self._rank == 0 and watch.prediction is not None:
            logger.warning("memest: not in the prediction: %s.", "; ".join(self.unseen))

    def _module_inputs(self, loader: Any) -> tuple[ModuleInputs, int | None]:
        """What the model is fed, and the batch where a real one says it."""
        if self._inputs is not None:
            return module_inputs_of(self._inputs), None
        if self._seq_len is not None:
            return ModuleInputs(), None
        batch = None if loader is None else first_batch(loader)
        if batch is None:
            raise MemestError(
                "the loader has no batch to look at without taking it (a stream?): say the shapes, "
                "MemestCallback(seq_len=1024) or inputs='input_ids:int64[B,1024]'."
            )
        return ModuleInputs(inputs=batch), next((len(v) for v in batch.values() if v.dim()), None)

    def _log(self, state: Any, values: dict[str, int]) -> None:
        """Log what is new, by the Trainer where there is one."""
        new = {name: v for name, v in values.items() if self._logged_values.get(name) != v}
        if not new:
            return
        self._logged_values |= new
        self._write(state, new)

    def _write(self, state: Any, values: dict[str, int]) -> None:
        """Into the Trainer's log, where there is one."""
        if self._trainer is not None:
            self._trainer.log(dict(values))
            return
        state.log_history.append({**values, "step": state.global_step})

    def _at_exit(self) -> None:
        """The process ends and the training did not: out of memory, or another error."""
        watch = self._watch
        if watch.closed or watch.counters is None:
            return
        out_of_memory = watch.counters.ooms() > self._ooms
        error: BaseException = KeyboardInterrupt("the process ended before the training did")
        if out_of_memory:
            error = MemoryError("CUDA out of memory (counted by the allocator)")
        watch.close(error, rank=self._rank)

    def close(self, error: BaseException | None = None) -> Measurement | None:
        """Keep the record now: for scripts that catch the error of ``trainer.train()``."""
        atexit.unregister(self._at_exit)
        return self._watch.close(error, rank=self._rank)


def _calling_trainer() -> Trainer | None:
    """The Trainer whose event this is: callbacks are not told, and ``log`` is its own."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            return trainer
    return None


def _of_all_ranks(own: MeasuredPeak) -> list[MeasuredPeak]:
    """The peaks of all processes, at the end of a training that all of them completed."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    peaks_by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(peaks_by_rank, own)
    return list(peaks_by_rank)
