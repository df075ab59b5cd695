"""Statistics of the caching allocator, under the names of ``torch.cuda.memory_stats``.

Source: ``c10/core/CachingDeviceAllocator.h`` (``Stat``, ``DeviceStats``), torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["AllocatorStats", "PoolStat", "Stat"]


@dataclass(slots=True)
class Stat:
    """One quantity: its value now, its peak, and the sums of its rises and falls."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def increase(self, amount: int) -> None:
        """Rise, and raise the peak with it."""
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        """Fall; the peak stays."""
        self.current -= amount
        self.freed += amount

    def reset_peak(self) -> None:
        """Start a new peak at the value now, as ``reset_peak_memory_stats`` does."""
        self.peak = self.current


@dataclass(slots=True)
class PoolStat:
    """One quantity over all blocks and over each of the two pools."""

    all: Stat = field(default_factory=Stat)
    small_pool: Stat = field(default_factory=Stat)
    large_pool: Stat = field(default_factory=Stat)

    def increase(self, amount: int, *, small: bool) -> None:
        """Rise in one pool."""
        self.all.increase(amount)
        (self.small_pool if small else self.large_pool).increase(amount)

    def decrease(self, amount: int, *, small: bool) -> None:
        """Fall in one pool."""
        self.all.decrease(amount)
        (self.small_pool if small else self.large_pool).decrease(amount)

    def reset_peak(self) -> None:
        """Start new peaks at the values now."""
        for stat in (self.all, self.small_pool, self.large_pool):
            stat.reset_peak()


@dataclass(slots=True)
class AllocatorStats:
    """Every statistic the allocator keeps."""

    allocation: PoolStat = field(default_factory=PoolStat)
    segment: PoolStat = field(default_factory=PoolStat)
    active: PoolStat = field(default_factory=PoolStat)
    inactive_split: PoolStat = field(default_factory=PoolStat)
    allocated_bytes: PoolStat = field(default_factory=PoolStat)
    reserved_bytes: PoolStat = field(default_factory=PoolStat)
    active_bytes: PoolStat = field(default_factory=PoolStat)
    inactive_split_bytes: PoolStat = field(default_factory=PoolStat)
    requested_bytes: PoolStat = field(default_factory=PoolStat)
    oversize_allocations: Stat = field(default_factory=Stat)
    oversize_segments: Stat = field(default_factory=Stat)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``: every peak becomes the value now."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, (PoolStat, Stat)):
                value.reset_peak()

    def as_dict(self) -> dict[str, int]:
        """Flat, with the keys of ``torch.cuda.memory_stats``: ``allocated_bytes.all.peak``."""
        return _flatten("", self)


def _flatten(prefix: str, stats: Any) -> dict[str, int]:
    flat: dict[str, int] = {}
    for entry in fields(stats):
        name, value = f"{prefix}{entry.name}", getattr(stats, entry.name)
        flat.update({name: value} if isinstance(value, int) else _flatten(f"{name}.", value))
    return flat
