"""The batches and the loss of GPUs that share sequences by Ulysses.

Sources: ``UlyssesSPDataLoaderAdapter`` of DeepSpeed 0.19.8, ``DataLoaderShard`` of accelerate 1.15
under it, ``deepspeed_sp_compute_loss`` of transformers 5.23, which scripts repeat as the guides of
accelerate and DeepSpeed show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memest.config.setup import Loop, Setup
from memest.errors import ConfigError
from memest.trace.cuda.known_values import attach, evaluate
from memest.trace.parallel.collectives import IGNORED, with_positions

__all__ = ["UlyssesBatches", "collated_for"]

Batch = dict[str, Any]


class _GatherLosses(torch.autograd.Function):
    """``torch.distributed.nn.functional.all_gather`` of a number, and its reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
        ctx.ranks = ranks
        return tuple(torch.empty_like(value) for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return torch.empty_like(gradients[0]), None


class UlyssesBatches:
    """What a loop asks: the loader's batches, the part of one, and the loss of all parts.

    The loader gathers a batch of every rank at once, cuts them, and keeps the parts in host memory:
    they last for as many micro-steps as there are ranks. Under accelerate's loader, the batch that
    the rank itself brought stays on the device until then.
    """

    def __init__(self, model: Any, setup: Setup, *, nccl: bool) -> None:
        """Begin without a batch.

        Args:
            model: whose loss function scripts call.
            setup: the run.
            nccl: whether gathers allocate as those of GPUs do.
        """
        self.ranks = setup.distributed.sp
        self._model = model
        self._keeps_batch = setup.loop is not Loop.PLAIN
        self._nccl = nccl
        self._parts: list[tuple[str, torch.Size, torch.dtype, torch.Tensor | None]] = []
        self._other_values: Batch = {}
        self._held_batch: Batch | None = None

    # -- batches

    def refill(self, make_batch: Callable[[], Batch]) -> None:
        """``refill``: the batches of all ranks, gathered, their labels shifted, cut.

        Raises:
            ConfigError: a batch that cannot be cut.
        """
        self._held_batch = None  # accelerate's loader lets go of the last one first
        batch = with_positions(make_batch())
        _check(batch, self.ranks)
        self._held_batch = batch if self._keeps_batch else None
        length = batch["input_ids"].shape[1]
        device = batch["input_ids"].device
        length_tensor = torch.full((1,), length, dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(length_tensor) for _ in range(self.ranks)]
        self._allocate_gather_buffer(length_tensor)
        del lengths
        rank_batches: list[Batch] = [{} for _ in range(self.ranks)]
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            copies = [torch.zeros_like(value) for _ in range(self.ranks)]
            self._allocate_gather_buffer(value)
            for rank_batch, tensor in zip(rank_batches, copies, strict=True):
                rank_batch[name] = tensor
            del copies, tensor
        self._note_parts(batch)
        del batch, value
        for rank_batch in rank_batches:
            labels = rank_batch.pop("labels")
            labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)
            rank_batch["shift_labels"] = labels[..., 1:].contiguous()
            del labels
            for name in list(rank_batch):
                del rank_batch[name]  # its part goes to the host

    def _allocate_gather_buffer(self, value: torch.Tensor) -> None:
        """``all_gather`` into a list goes through one tensor (``ProcessGroupNCCL::allgather``)."""
        if self._nccl:
            torch.empty((self.ranks, *value.shape), dtype=value.dtype, device=value.device)

    def _note_parts(self, batch: Batch) -> None:
        """What the adapter hands out: everything but labels, and these shifted, last."""
        self._parts, self._other_values = [], {}
        names = [name for name in batch if name != "labels"]
        for name in (*names, "labels"):
            value = batch[name]
            if not isinstance(value, torch.Tensor):
                self._other_values[name] = value
                continue
            length = value.shape[1] // self.ranks
            shape = torch.Size((value.shape[0], length))
            known_value = evaluate(value)
            part_name = "shift_labels" if name == "labels" else name
            part = (
                None if known_value is None or name == "labels" else known_value[:, :length].clone()
            )
            self._parts.append((part_name, shape, value.dtype, part))

    def part(self) -> Batch:
        """The part of a batch that the rank computes with, moved to the device."""
        out: Batch = dict(self._other_values)
        for name, shape, dtype, known_value in self._parts:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            out[name] = tensor if known_value is None else attach(tensor, known_value)
        return out

    # -- loss

    def own_loss(self, outputs: Any, shift_labels: torch.Tensor) -> torch.Tensor:
        """The loss of the rank's tokens, as scripts compute it of the logits."""
        config: Any = self._model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        loss: torch.Tensor = self._model.loss_function(
            logits=outputs.logits,
            labels=None,
            shift_labels=shift_labels,
            vocab_size=config.vocab_size,
        )
        return loss

    def joined_loss(self, loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
        """The losses of all parts, weighted by the tokens that count in each."""
        losses = _GatherLosses.apply(loss, self.ranks)
        num_counted = (shift_labels != IGNORED).view(-1).sum()
        counts = torch.stack([torch.empty_like(num_counted) for _ in range(self.ranks)])
        stacked_losses = torch.stack(losses)
        finite_losses = torch.where(counts > 0, stacked_losses, torch.zeros_like(stacked_losses))
        total = (finite_losses * counts).sum()
        return total / counts.sum().clamp(min=1)


def collated_for(batch: Batch, setup: Setup) -> Batch:
    """A batch as the collator of a run gives it to an evaluation: with the positions of training's.

    ``Trainer.get_eval_dataloader`` has the collator of training, and no adapter on top of its
    loader: every rank evaluates whole sequences.
    """
    return with_positions(batch) if setup.distributed.sp > 1 else batch


def _check(batch: Batch, ranks: int) -> None:
    """What the adapter stops at.

    Raises:
        ConfigError: no labels or tokens, a tensor of another shape, a length that cannot be shared.
    """
    for name in ("input_ids", "labels"):
        if not isinstance(batch.get(name), torch.Tensor):
            raise ConfigError(
                f"--sp: the batch has no {name}, which DeepSpeed's loader takes out of it: name "
                "them among the inputs, or leave --sp out."
            )
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.shape != shape:
            raise ConfigError(
                f"--sp: {name} is of shape {tuple(value.shape)}, and DeepSpeed's loader takes "
                f"tensors of the shape of input_ids alone, {tuple(shape)}: leave it or --sp out."
            )
    if shape[1] % ranks:
        near = shape[1] // ranks * ranks or ranks
        raise ConfigError(
            f"--sp {ranks} does not divide the {shape[1]} tokens of a sequence, and DeepSpeed cuts "
            f"it in equal parts: write --seq-len {near}."
        )
