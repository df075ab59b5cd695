"""The training loops, written as people write them, or called in the libraries that own them.

``to_device`` stands for the copy to a GPU: host batches are numpy memory, which PyTorch's allocator
never sees, so the copies are the only tensors that count, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from real_memory import mark

from memest.setup import Setup

HostBatch = dict[str, torch.Tensor]


def host_batches(plans: Any, count: int) -> list[HostBatch]:
    """The planned batch, ``count`` times, in memory that PyTorch did not allocate."""
    from memest.trace.inputs import realise

    out = []
    for _ in range(count):
        batch = realise(plans, device="cpu")
        out.append({k: _host(v) for k, v in batch.items()})
    return out


def _host(value: Any) -> Any:
    return torch.from_numpy(np.array(value.numpy())) if isinstance(value, torch.Tensor) else value


def to_device(batch: HostBatch) -> HostBatch:
    """One new tensor for each: what ``.to("cuda")`` does."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def plain(model: Any, setup: Setup, batches: list[HostBatch], make: Callable[..., Any]) -> None:
    """The loop of the tutorials, which keeps ``outputs`` until the next forward rebinds it.

    Hugging Face course, chapter 3, "A full training loop".
    """
    optimizer = make(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    set_to_none = setup.zero_grad != "zero"
    accum = setup.grad_accum
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.precision == "bf16")
    mark("batch 1 1")
    for index, batch in enumerate(batches):
        step, micro = index // accum + 1, index % accum + 1
        batch = to_device(batch)
        mark(f"forward {step} {micro}")
        with autocast:
            outputs = model(**batch)
            loss = outputs.loss
        if accum > 1:
            loss = loss / accum
        mark(f"backward {step} {micro}")
        loss.backward()
        if micro == accum:
            if setup.max_grad_norm:
                mark(f"clip {step} {micro}")
                torch.nn.utils.clip_grad_norm_(parameters, setup.max_grad_norm)
            if optimizer is not None:
                mark(f"optimizer {step} 0")
                optimizer.step()
            mark(f"zero_grad {step} 0")
            (optimizer or model).zero_grad(set_to_none=set_to_none)
        mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")


class _Rows(torch.utils.data.Dataset):
    """Row i of the training data is a number; the collator makes the batch from it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"row": index}


@contextlib.contextmanager
def _moves_to_device() -> Iterator[None]:
    """accelerate's loader copies each batch to the device, though the device is the CPU here."""

    def send(batch: Any, device: Any, non_blocking: bool = False, **_: Any) -> Any:
        return to_device(batch)

    with mock.patch("accelerate.data_loader.send_to_device", send):
        yield


def accelerate(
    model: Any, setup: Setup, batches: list[HostBatch], make: Callable[..., Any]
) -> None:
    """The loop of accelerate's documentation, "Gradient accumulation", with the real library."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=setup.grad_accum,
        mixed_precision="bf16" if setup.precision == "bf16" else "no",
    )
    loader = torch.utils.data.DataLoader(
        _Rows(len(batches)), batch_size=1, collate_fn=lambda rows: batches[rows[0]["row"]]
    )
    optimizer = make(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    optimizer.zero_grad()
    accum = setup.grad_accum
    step = micro = 1
    with _moves_to_device():
        mark("batch 1 1")
        for batch in loader:
            with accelerator.accumulate(model):
                mark(f"forward {step} {micro}")
                outputs = model(**batch)
                loss = outputs.loss
                mark(f"backward {step} {micro}")
                accelerator.backward(loss)
                if accelerator.sync_gradients and setup.max_grad_norm:
                    mark(f"clip {step} {micro}")
                    accelerator.clip_grad_norm_(model.parameters(), setup.max_grad_norm)
                if accelerator.sync_gradients:
                    mark(f"optimizer {step} 0")
                optimizer.step()
                if accelerator.sync_gradients:
                    mark(f"zero_grad {step} 0")
                optimizer.zero_grad()
            micro += 1
            if micro > accum:
                step, micro = step + 1, 1
            mark(f"batch {step} {micro}")


def trainer(model: Any, setup: Setup, batches: list[HostBatch], folder: Path) -> None:
    """transformers' own Trainer with its own optimizer.

    Marks come from its callbacks and from the methods that are meant to be overridden.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    accum = setup.grad_accum
    state = {"step": 0, "micro": 0}

    class Marks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            mark(f"optimizer {state['step']} 0")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            mark(f"zero_grad {state['step']} 0")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            mark("end 0 0")

    class Watched(Trainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            state["step"] += 1
            state["micro"] = 0
            mark(f"batch {state['step']} 0")
            return super().get_batch_samples(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            state["micro"] += 1
            mark(f"forward {state['step']} {state['micro']}")
            loss = super().compute_loss(*args, **kwargs)
            mark(f"backward {state['step']} {state['micro']}")
            return loss

        def _clip_grad_norm(self, model: Any) -> Any:
            mark(f"clip {state['step']} {state['micro']}")
            return super()._clip_grad_norm(model)

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            if grad_norm is None:
                mark(f"clip {state['step']} {state['micro']}")
            return super()._get_grad_norm(model, grad_norm=grad_norm)

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=setup.precision == "bf16",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accum,
        max_steps=len(batches) // accum,
        optim=setup.optim.removesuffix("_loop"),
        max_grad_norm=1.0 if setup.max_grad_norm is None else setup.max_grad_norm,
        gradient_checkpointing=setup.checkpointing != "none",
        gradient_checkpointing_kwargs=(
            {"use_reentrant": bool(setup.use_reentrant)} if setup.checkpointing != "none" else None
        ),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    run = Watched(
        model=model,
        args=arguments,
        train_dataset=_Rows(len(batches)),
        data_collator=lambda rows: batches[rows[0]["row"]],
        callbacks=[Marks()],
    )
    with _moves_to_device():
        run.train()
