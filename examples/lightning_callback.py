"""memest in Lightning: predicted before the first step, measured beside it, logged by the Trainer.

    trainer = lightning.Trainer(callbacks=[MemoryForecast(inputs="x:float32[B,32]", batch=8)])

Options are those of ``memest.measure``. The step that is priced is that of the module: its
``training_step`` is called on a copy, on the meta device, where ``self.log`` does nothing.
"""

from __future__ import annotations

from typing import Any

import lightning

import memest


class MemoryForecast(lightning.Callback):
    """``memest.measure`` around ``fit``."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.run: memest.calibration.live.measure.Measure | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Predict, and log it before the first step."""

        def step(model: Any, batch: Any) -> Any:
            model.log = model.log_dict = lambda *_, **__: None
            loss = model.training_step(batch, 0)
            return loss["loss"] if isinstance(loss, dict) else loss

        options = {"grad_accum": trainer.accumulate_grad_batches, **self.options}
        trainer_of_module, pl_module._trainer = pl_module._trainer, None  # no part of a copy
        try:
            self.run = memest.measure(pl_module, trainer.optimizers[0], step_fn=step, **options)
            self.run.__enter__()
        finally:
            pl_module._trainer = trainer_of_module
        self._log(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Log the peaks of the step that settles them."""
        if self.run is not None and self.run.num_steps == 3:
            self._log(trainer)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Keep the record."""
        self._close(None)
        self._log(trainer)

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        """Out of memory is a record too."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self.run is not None and self.run.record is None:
            self.run.__exit__(None if error is None else type(error), error, None)

    def _log(self, trainer: lightning.Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(self.run.logs() if self.run else {}, step=trainer.global_step)
