"""The predicted run as a memory snapshot, for the viewers that people already have.

An allocation's frames are the operator, the modules around it, innermost first, and the phase; its
category is that of the breakdown.
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from memest.events import CATEGORY_ORDER, Mark
from memest.files.texts import check_target
from memest.files.whole import write_whole
from memest.profiles.stream import Stream
from memest.replay.conf import parse_alloc_conf
from memest.replay.recording import AllocationLabel, Annotation, Frames, record

__all__ = ["SNAPSHOT_SUFFIXES", "check_snapshot_target", "memory_history", "save_memory_history"]

SNAPSHOT_SUFFIXES = (".pickle", ".json")
"""Files that a snapshot can be written to; both are what ``memest replay`` reads."""

_PICKLE_PROTOCOL = 4  # the page of memory_viz reads protocols 2 to 4
_TOP = "(top level)"


def check_snapshot_target(path: str | Path) -> Path:
    """The file that a snapshot shall go to; asked before anything slow.

    Raises:
        ConfigError: another suffix, a folder, or a folder that is not there.
    """
    file = Path(path).expanduser()
    check_target(file, SNAPSHOT_SUFFIXES)
    return file


def save_memory_history(stream: Stream, alloc_conf: str, path: Path) -> None:
    """Write the snapshot of a run; the file is there whole or not at all.

    Args:
        stream: of the run, every event of it.
        alloc_conf: as ``PYTORCH_CUDA_ALLOC_CONF`` has it.
        path: checked by :func:`check_snapshot_target`.
    """
    content = memory_history(stream, alloc_conf)

    def as_json(file: BinaryIO) -> None:
        file.writelines(
            piece.encode() for piece in json.JSONEncoder(separators=(",", ":")).iterencode(content)
        )

    def as_pickle(file: BinaryIO) -> None:
        pickle.Pickler(file, _PICKLE_PROTOCOL).dump(content)

    write_whole(path, as_json if path.suffix.lower() == ".json" else as_pickle)


def memory_history(stream: Stream, alloc_conf: str) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return after the run.

    Args:
        stream: of the run.
        alloc_conf: as ``PYTORCH_CUDA_ALLOC_CONF`` has it.
    """
    words = _Words(stream)
    return record(
        stream.events,
        stream.sizes,
        parse_alloc_conf(alloc_conf),
        label_of=words.of,
        streams=stream.on_streams,
        annotations=tuple(_parts(stream)),
        conf_text=alloc_conf,
    )


def _phase(mark: Mark) -> str:
    """A phase in words: ``backward of step 2, micro-step 1``."""
    if not mark.step:
        return mark.phase.value
    micro = f", micro-step {mark.micro_step}" if mark.micro_step else ""
    return f"{mark.phase.value} of step {mark.step}{micro}"


def _parts(stream: Stream) -> Iterator[Annotation]:
    ends = (*stream.mark_positions, len(stream.events))
    for mark, (start, stop) in zip(stream.marks, pairwise(ends), strict=True):
        yield Annotation(_phase(mark), start, stop)


class _Words:
    """Frames and categories; what is said alike is one object, which a pickle stores once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._labels: dict[tuple[int, int, int, int], AllocationLabel] = {}
        self._frames: dict[tuple[int, int], Frames] = {}
        self._at = 0

    def of(self, index: int, number: int) -> AllocationLabel:
        """What to say of the allocation ``number`` that event ``index`` makes."""
        stream = self._stream
        mark = bisect_right(stream.mark_positions, index) - 1
        module, label = stream.modules[number], stream.labels[number]
        category = stream.categories[number]
        key = mark, module, label, category
        allocation_label = self._labels.get(key)
        if allocation_label is None:
            op = stream.label_names[label] or CATEGORY_ORDER[category].value
            place = stream.module_names[module] or _TOP
            frames = [{"name": op, "filename": place, "line": 0}, *self._around(mark, module)]
            allocation_label = self._labels[key] = AllocationLabel(
                frames, CATEGORY_ORDER[category].value
            )
        return allocation_label

    def _around(self, mark: int, module: int) -> Frames:
        """The modules from the innermost out, then the phase."""
        frames = self._frames.get((mark, module))
        if frames is None:
            parts = self._stream.module_names[module].split(".")
            frames = [
                {"name": parts[depth - 1], "filename": ".".join(parts[:depth]), "line": 0}
                for depth in range(len(parts), 0, -1)
                if parts[depth - 1]
            ]
            phase = _phase(self._stream.marks[mark]) if mark >= 0 else "load"
            frames.append({"name": phase, "filename": "memest", "line": 0})
            self._frames[mark, module] = frames
        return frames
