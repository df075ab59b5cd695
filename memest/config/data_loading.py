"""Batches on the host: what a DataLoader keeps ready there, pinned or in shared memory. Torch-free.

Source: torch 2.13 utils/data/dataloader.py (``_MultiProcessingDataLoaderIter``: every worker has
``prefetch_factor`` batches on the way, and gets its next one when one is handed out),
utils/data/_utils/pin_memory.py (a thread pins what workers send, without a limit of its own),
CachingHostAllocator.h (a block is rounded up to a power of two); accelerate 1.15 data_loader.py
(``DataLoaderShard`` asks for a batch before it hands out the one before).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memest.config.option import Kind, option, read_parts
from memest.errors import ConfigError

__all__ = ["DataLoading", "read_data_loading"]

_PREFETCH = 2
"""torch's own prefetch_factor."""
_PAGE = 4096
_MAX_VALUE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoading:
    """How batches are loaded, by the names of ``TrainingArguments`` without ``dataloader_``.

    Attributes:
        pin_memory: batches are copied to page-locked memory before they are handed out.
        num_workers: processes that load; 0 = the training process itself.
        prefetch_factor: batches that each worker has on the way; None = 2 where there are workers.
        persistent_workers: workers stay from epoch to epoch.
    """

    pin_memory: bool = option(
        True,
        "Whether batches are copied to page-locked memory; left out, they are.",
        kind=Kind.EITHER,
    )
    num_workers: int = option(
        0, "Processes that load batches: the host memory of batches that wait is said."
    )
    prefetch_factor: int | None = option(
        None, "Batches that each worker has on the way. Default: 2, torch's own."
    )
    persistent_workers: bool = option(
        False, "Workers stay from epoch to epoch; changes no size of batches."
    )

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num-workers", self.num_workers, 0),
            ("prefetch-factor", self.prefetch_factor, 1),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or not least <= value <= _MAX_VALUE):
                raise ConfigError(
                    f"--dataloader-{name} {value!r} is out of range: it must be a whole number of "
                    f"{least} to {_MAX_VALUE}."
                )
        if self.num_workers:
            return
        for name, is_set in (
            ("prefetch-factor", self.prefetch_factor is not None),
            ("persistent-workers", self.persistent_workers),
        ):
            if is_set:
                raise ConfigError(
                    f"--dataloader-{name} needs workers, and torch refuses it without: add "
                    "--dataloader-num-workers 2, or drop it."
                )

    @property
    def num_waiting(self) -> int:
        """Batches that are made or being made while the model trains on another."""
        return self.num_workers * (self.prefetch_factor or _PREFETCH)

    @property
    def num_loaded(self) -> int:
        """Batches that are loaded: those that wait, and the one that the training process holds."""
        return self.num_waiting + 1

    def pinned_bytes(self, sizes: Sequence[int]) -> int:
        """Page-locked bytes of all batches, once loading has caught up.

        Args:
            sizes: bytes of each tensor of one batch.
        """
        if not self.pin_memory:
            return 0
        return self.num_loaded * sum(1 << (size - 1).bit_length() for size in sizes if size)

    def shared_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of shared memory (``/dev/shm``) that batches of workers take, in whole pages.

        Pinned batches leave it one after the other: what is there at least is the one that is being
        copied. Without pinning all of them stay, the one that is held among them.
        """
        if not self.num_workers:
            return 0
        batch = sum(-(-size // _PAGE) * _PAGE for size in sizes if size)
        return batch if self.pin_memory else batch * self.num_loaded

    def pageable_bytes(self, sizes: Sequence[int]) -> int:
        """Ordinary bytes of the training process: the batch that it makes itself."""
        return 0 if self.num_workers else sum(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of what is not as by default."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def read_data_loading(source: Any) -> DataLoading | None:
    """Data loading from a mapping of its names, or itself; None where nothing is said of it.

    Raises:
        ConfigError: another kind of value, or names that there are not.
    """
    return read_parts(
        DataLoading,
        source,
        "data_loading",
        takes="give a mapping of num_workers and the like",
        instead="use --dataloader-num-workers and its neighbours",
    )
