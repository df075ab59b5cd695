"""The end of a fleet that is beside a device: an attendant on a node of the cluster."""

from __future__ import annotations

import queue
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memest.calibration.case import case_from_dict
from memest.calibration.running.attendant import Attendant
from memest.errors import MemestError
from memest.installed import release

__all__ = ["Station"]

_TOGETHER_SECONDS = 0.1
"""Messages of so long travel together."""


class Station:
    """Describes one device, and runs cases on it; an actor of the cluster.

    Args:
        device: ``cpu`` or ``cuda:0``; the cluster shows an actor its own GPU alone.
        command: the command line of the campaign, for the records.
    """

    def __init__(self, device: str, command: str) -> None:
        self._device = device
        self._attendant = Attendant(command)
        # a nursery goes with the thread that started it, so that is one and the same for all cases
        self._thread = ThreadPoolExecutor(max_workers=1)

    def describe(self, expected: str) -> dict[str, Any]:
        """Where this is.

        Args:
            expected: release of memest that the driver has.

        Returns:
            The name of the ``host``, and the ``environment`` of the device; or, in its place,
            a ``problem``; or ``another``, the release that is installed here.
        """
        here: dict[str, Any] = {"host": socket.gethostname()}
        found = release("memest")
        if found != expected:
            return here | {"another": found}
        try:
            told = self._thread.submit(self._attendant.describe, self._device).result()
        except MemestError as error:
            return here | {"problem": str(error)}
        return here | {"environment": told}

    def measure(
        self, run: str, case: dict[str, Any], timeout: float
    ) -> Iterator[list[dict[str, Any]]]:
        """Run a case; what its worker says comes as it is said, an ``end`` at last.

        Args:
            run: its identifier.
            case: as data.
            timeout: seconds after which it is ended.

        Yields:
            Messages. The end has the ``history`` of the allocator if there is one, as it is in
            its file.
        """
        heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

        def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{run}.jsonl.gz"
                asked = case_from_dict(case)
                end = self._attendant.run(
                    asked, self._device, heard.put, timeout=timeout,
                    events=str(path) if asked.record_events else "",
                )  # fmt: skip
                history = path.read_bytes() if end.events else None
            heard.put(
                {"kind": "end", "status": end.status, "failure": end.failure, "history": history}
            )

        done = self._thread.submit(work)
        done.add_done_callback(lambda _: heard.put(None))
        goes_on = True
        while goes_on:
            together = [heard.get()]
            time.sleep(_TOGETHER_SECONDS)
            while not heard.empty():
                together.append(heard.get())
            goes_on = together[-1] is not None
            yield [message for message in together if message is not None]
        done.result()  # raises what went wrong here
