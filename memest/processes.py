"""A process that ends with the one that began it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
"""``linux/prctl.h``"""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent is gone; elsewhere a closed pipe has to do.

    The parent is the thread that began this process (``prctl(2)``): it has to stay as well.

    Args:
        parent: its process id, asked for before this process began; where it is gone by now, this
            process ends here. None where that is not known.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
