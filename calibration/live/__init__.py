"""memest in other libraries' training loops; each loads its library when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.calibration.live.trainer import MemestCallback

__all__ = ["MemestCallback"]


def __getattr__(name: str) -> Any:
    if name != "MemestCallback":
        raise AttributeError(f"module 'memest.calibration.live' has no attribute {name!r}")
    from memest.errors import MissingDependencyError

    try:
        from memest.calibration.live.trainer import MemestCallback
    except ImportError as error:
        raise MissingDependencyError(
            "MemestCallback is for transformers' Trainer: pip install 'memest-gpu[torch]' "
            "accelerate."
        ) from error
    return MemestCallback
