"""Training loops on a real device: written as people write them, or called where they live.

A loop tells a :class:`LoopWatch` of its phases; that is all that differs from the script somebody
would train with. :mod:`memest.trace.loops` holds the same loops for meta tensors, reference by
reference; the tests lay the two side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch

from memest.config.optimizers import facts_of
from memest.config.setup import Loop, Precision, SdpaBackend, Setup, ZeroGrad, ZeroGradAt
from memest.errors import ConfigError
from memest.trace.optimizers.in_backward import Stepper

__all__ = ["HostBatch", "LoopWatch", "train"]

HostBatch = dict[str, Any]
"""The tensors of one micro-batch in host memory, by argument name."""

_AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_OF_TRAINER = frozenset("adamw_torch adamw_torch_fused adafactor sgd adagrad rmsprop".split())
"""Optimizers of torch and transformers that the Trainer makes itself; others are handed to it, but
for those of libraries."""
_SDPA = {
    SdpaBackend.FLASH: "FLASH_ATTENTION",
    SdpaBackend.EFFICIENT: "EFFICIENT_ATTENTION",
    SdpaBackend.CUDNN: "CUDNN_ATTENTION",
    SdpaBackend.MATH: "MATH",
}
_CPU_LOOPS = {f"{name}_loop": name for name in ("adamw_torch", "sgd", "adagrad", "rmsprop")}
"""On a CPU the Trainer's torch optimizers go one parameter after the other."""


class LoopWatch(Protocol):
    """Told where a loop is."""

    def mark(self, phase: str, step: int, micro_step: int) -> None:
        """A phase begins."""

    def step_done(self, step: int) -> None:
        """An optimizer step is over, and the gradients are dropped."""


def train(
    model: torch.nn.Module,
    setup: Setup,
    batches: Sequence[HostBatch],
    make_optimizer: Callable[[Any], Any],
    loss_of: Callable[[Any, Any], torch.Tensor],
    device: torch.device,
    watch: LoopWatch,
) -> None:
    """Train on all batches, in the loop that the setup names.

    Args:
        model: on the device, in training mode; the Trainer moves it there itself.
        setup: loop, accumulation, precision, clipping, zero_grad, optimizer.
        batches: one for each micro-step of the run.
        make_optimizer: makes the optimizer for a model; None for ``none``.
        loss_of: takes the loss out of outputs and batch.
        device: where to train.
        watch: told of the phases.
    """
    run = _Run(model, setup, batches, make_optimizer, loss_of, device, watch)
    go = {
        Loop.PLAIN: run.plain,
        Loop.ACCELERATE: run.accelerate,
        Loop.LIGHTNING: run.lightning,
        Loop.TRAINER: run.trainer,
    }
    with _kernels(setup, device):
        go[setup.loop]()


@contextlib.contextmanager
def _kernels(setup: Setup, device: torch.device) -> Iterator[None]:
    """The attention kernel and the matmul mode that were asked for."""
    before = torch.backends.cuda.matmul.allow_tf32
    with contextlib.ExitStack() as stack:
        if setup.sdpa_backend is not SdpaBackend.AUTO:
            if device.type == "cpu":
                raise ConfigError("--sdpa-backend names kernels of GPUs: leave it out on a CPU.")
            kernel = getattr(torch.nn.attention.SDPBackend, _SDPA[setup.sdpa_backend])
            stack.enter_context(torch.nn.attention.sdpa_kernel([kernel]))
        if setup.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
            stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", before)
        yield


@dataclass(frozen=True, slots=True)
class _Run:
    model: Any
    setup: Setup
    batches: Sequence[HostBatch]
    make_optimizer: Any
    loss_of: Any
    device: torch.device
    watch: LoopWatch

    @property
    def _cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def _sets_to_none(self) -> bool:
        return self.setup.zero_grad is not ZeroGrad.ZERO

    def _on_device(self, batch: HostBatch) -> HostBatch:
        return to_device(batch, self.device)

    def plain(self) -> None:
        """The loop of the tutorials, which keeps ``outputs`` until the next forward rebinds it.

        Hugging Face course, chapter 3, "A full training loop"; with fp16 as in PyTorch's
        "Automatic Mixed Precision examples".
        """
        setup, model, mark = self.setup, self.model, self.watch.mark
        optimizer = self.make_optimizer(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        accum, kind = setup.grad_accum, self.device.type
        dtype = _AUTOCAST.get(setup.precision)
        scales = setup.precision is Precision.FP16 and optimizer is not None
        scaler = torch.amp.GradScaler(kind) if scales else None

        def zero_grad(step: int) -> None:
            mark("zero_grad", step, 0)
            (optimizer or model).zero_grad(set_to_none=self._sets_to_none)

        mark("batch", 1, 1)
        for index, batch in enumerate(self.batches):
            step, micro = index // accum + 1, index % accum + 1
            if micro == 1 and setup.zero_grad_at is ZeroGradAt.BEFORE_FORWARD:
                zero_grad(step)
            batch = self._on_device(batch)
            mark("forward", step, micro)
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                outputs = model(**batch)
                loss = self.loss_of(outputs, batch)
            if micro == 1 and setup.zero_grad_at is ZeroGradAt.BEFORE_BACKWARD:
                zero_grad(step)
            if accum > 1:
                loss = loss / accum
            mark("backward", step, micro)
            if isinstance(optimizer, Stepper):
                optimizer.backward(loss)
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
            if micro == accum:
                self._clip_and_step(optimizer, scaler, parameters, step)
                if setup.zero_grad_at is ZeroGradAt.AFTER_STEP:
                    zero_grad(step)
                self.watch.step_done(step)
            if setup.del_outputs:
                outputs = loss = None
            mark("batch", (index + 1) // accum + 1, (index + 1) % accum + 1)

    def _clip_and_step(self, optimizer: Any, scaler: Any, parameters: list[Any], step: int) -> None:
        setup, mark = self.setup, self.watch.mark
        if setup.max_grad_norm and optimizer is not None:
            mark("clip", step, setup.grad_accum)
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, setup.max_grad_norm)
        if optimizer is None:
            return
        mark("optimizer", step, 0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self._allocate_ranks(step)

    def _allocate_ranks(self, step: int) -> None:
        """What peft asks a script to call behind each step where AdaLoRA trains."""
        if hasattr(getattr(self.model, "base_model", None), "rankallocator"):
            self.model.base_model.update_and_allocate(step)

    def accelerate(self) -> None:
        """The loop of accelerate's documentation, "Gradient accumulation", with the library."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        setup, mark, accum = self.setup, self.watch.mark, self.setup.grad_accum
        AcceleratorState._reset_state(reset_partial_state=True)
        precision = "no" if setup.precision is Precision.FP32 else setup.precision.value
        accelerator = Accelerator(
            cpu=self._cpu, gradient_accumulation_steps=accum, mixed_precision=precision
        )
        loader = torch.utils.data.DataLoader(self._rows, batch_size=1, collate_fn=self._collate)
        optimizer = self.make_optimizer(self.model)
        model, optimizer, loader = accelerator.prepare(self.model, optimizer, loader)
        if optimizer is not None:
            optimizer.zero_grad()
        step = micro = 1
        with self._copies():
            mark("batch", 1, 1)
            for batch in loader:
                with accelerator.accumulate(model):
                    mark("forward", step, micro)
                    outputs = model(**batch)
                    loss = self.loss_of(outputs, batch)
                    mark("backward", step, micro)
                    if isinstance(optimizer, Stepper):
                        optimizer.backward(loss / accum)
                    else:
                        accelerator.backward(loss)
                    last = accelerator.sync_gradients
                    if last and setup.max_grad_norm and optimizer is not None:
                        mark("clip", step, micro)
                        accelerator.clip_grad_norm_(model.parameters(), setup.max_grad_norm)
                    if optimizer is None:
                        if last:
                            mark("zero_grad", step, 0)
                            model.zero_grad(set_to_none=self._sets_to_none)
                    else:
                        if last:
                            mark("optimizer", step, 0)
                        optimizer.step()
                        if last:
                            self._allocate_ranks(step)
                            mark("zero_grad", step, 0)
                        optimizer.zero_grad(set_to_none=self._sets_to_none)
                if last:
                    self.watch.step_done(step)
                if setup.del_outputs:
                    outputs = loss = None
                micro += 1
                if micro > accum:
                    step, micro = step + 1, 1
                mark("batch", step, micro)

    def lightning(self) -> None:
        """Lightning's own Trainer with automatic optimization; marks come from its hooks."""
        import lightning

        setup, watch, accum = self.setup, self.watch, self.setup.grad_accum
        model, loss_of, sets_to_none = self.model, self.loss_of, self._sets_to_none
        made = self.make_optimizer(model)

        class Watched(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.index = 0

            @property
            def at(self) -> tuple[int, int]:
                return self.index // accum + 1, self.index % accum + 1

            def configure_optimizers(self) -> Any:
                return made

            def on_before_batch_transfer(self, batch: Any, *_: Any) -> Any:
                watch.mark("batch", *self.at)
                return batch

            def transfer_batch_to_device(self, batch: Any, device: Any, *_: Any) -> Any:
                return to_device(batch, device)

            def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
                watch.mark("forward", *self.at)
                outputs = self.model(**batch)
                return loss_of(outputs, batch)

            def optimizer_zero_grad(self, *_: Any) -> None:
                (model if made is None else made).zero_grad(set_to_none=sets_to_none)

            def on_before_backward(self, *_: Any) -> None:
                watch.mark("backward", *self.at)

            def configure_gradient_clipping(self, *arguments: Any, **how: Any) -> None:
                if setup.clip_norm and made is not None:
                    watch.mark("clip", *self.at)
                    super().configure_gradient_clipping(*arguments, **how)
                if made is not None:
                    watch.mark("optimizer", self.at[0], 0)

            def on_train_batch_end(self, *_: Any) -> None:
                step, micro_step = self.at
                self.index += 1
                if micro_step == accum:
                    watch.step_done(step)

            def on_train_end(self) -> None:
                watch.mark("end", 0, 0)

        precision = {Precision.FP16: "16-mixed", Precision.BF16: "bf16-mixed"}
        lightning.Trainer(
            accelerator="cpu" if self._cpu else "gpu",
            devices=1,
            max_epochs=1,
            precision=precision.get(setup.precision, "32-true"),  # type: ignore[arg-type]
            accumulate_grad_batches=accum,
            gradient_clip_val=setup.clip_norm or None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(
            Watched(),
            torch.utils.data.DataLoader(self._rows, batch_size=1, collate_fn=self._collate),
        )

    def trainer(self) -> None:
        """Transformers' own Trainer, with its own optimizer where it makes that one itself.

        Marks come from its callbacks and from the methods that are meant to be overridden.
        """
        from transformers import Trainer, TrainerCallback, TrainingArguments

        setup, watch, accum = self.setup, self.watch, self.setup.grad_accum
        at = {"step": 0, "micro": 0}

        class Marks(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.mark("optimizer", at["step"], 0)

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.mark("zero_grad", at["step"], 0)

            def on_step_end(self, *_: Any, **__: Any) -> None:
                watch.step_done(at["step"])

            def on_train_end(self, *_: Any, **__: Any) -> None:
                watch.mark("end", 0, 0)

        class WatchedTrainer(Trainer):
            def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
                at["step"] += 1
                at["micro"] = 0
                watch.mark("batch", at["step"], 0)
                return super().get_batch_samples(*args, **kwargs)

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                at["micro"] += 1
                watch.mark("forward", at["step"], at["micro"])
                loss = super().compute_loss(*args, **kwargs)
                watch.mark("backward", at["step"], at["micro"])
                return loss

            def _clip_grad_norm(self, model: Any) -> Any:
                watch.mark("clip", at["step"], at["micro"])
                return super()._clip_grad_norm(model)

            def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
                if grad_norm is None:
                    watch.mark("clip", at["step"], at["micro"])
                return super()._get_grad_norm(model, grad_norm=grad_norm)

        own, optimizers = self._optimizer_of_trainer()
        checkpoints = setup.checkpointing == "full"  # any other: the model's own switch
        reentrant = setup.use_reentrant
        with tempfile.TemporaryDirectory() as folder, self._copies():
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=self._cpu,
                fp16=setup.precision is Precision.FP16,
                bf16=setup.precision is Precision.BF16,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=accum,
                max_steps=len(self.batches) // accum,
                optim=own,
                optim_args=setup.optim_args or None,
                optim_target_modules=_targets(setup),
                weight_decay=setup.weight_decay or 0.0,
                max_grad_norm=1.0 if setup.max_grad_norm is None else setup.max_grad_norm,
                gradient_checkpointing=checkpoints,
                gradient_checkpointing_kwargs=(
                    {"use_reentrant": reentrant} if checkpoints and reentrant is not None else None
                ),
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                dataloader_pin_memory=not self._cpu,
                remove_unused_columns=False,
                **_supported_arguments(
                    TrainingArguments,
                    train_sampling_strategy="sequential",
                    use_cache=setup.use_cache,
                    tf32=True if setup.tf32 else None,
                ),
            )
            run = WatchedTrainer(
                model=self.model,
                args=arguments,
                train_dataset=self._rows,
                data_collator=self._collate,
                callbacks=[Marks()],
                optimizers=optimizers,
            )
            run.train()

    def _optimizer_of_trainer(self) -> tuple[str, tuple[Any, Any]]:
        """The name to give to the Trainer, and the optimizer where it has none by that name."""
        name = (
            _CPU_LOOPS.get(self.setup.optimizer, self.setup.optimizer)
            if self._cpu
            else self.setup.optimizer
        )
        if name in _OF_TRAINER or facts_of(name).package:
            return name, (None, None)
        return "adamw_torch", (self.make_optimizer(self.model), None)

    @property
    def _rows(self) -> list[dict[str, int]]:
        """Row i of the training data is a number; the collator makes the batch from it."""
        return [{"row": number} for number in range(len(self.batches))]

    def _collate(self, rows: list[dict[str, int]]) -> HostBatch:
        return self.batches[rows[0]["row"]]

    @contextlib.contextmanager
    def _copies(self) -> Iterator[None]:
        """Accelerate's loader copies each batch to the device, also where that is the CPU."""
        if not self._cpu:
            yield
            return

        def send(batch: Any, device: Any, non_blocking: bool = False, **_: Any) -> Any:
            return self._on_device(batch)

        with mock.patch("accelerate.data_loader.send_to_device", send):
            yield


def _targets(setup: Setup) -> str | list[str] | None:
    """As the Trainer takes them."""
    modules = setup.optim_target_modules
    return (modules if isinstance(modules, str) else list(modules)) or None


def _supported_arguments(arguments: Any, **values: Any) -> dict[str, Any]:
    """Those of the arguments that this release has, and that were given."""
    names = {field.name for field in dataclasses.fields(arguments)}
    return {name: v for name, v in values.items() if name in names and v is not None}


def to_device(batch: HostBatch, device: torch.device) -> HostBatch:
    """One new tensor for each on the device: also where host and device are the same memory."""
    if device.type == "cpu":
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
