"""Logs of a run's memory, one row a reading: CSV, JSON lines, a Trainer's state, nvidia-smi.

What training tools print is made rows of by :mod:`memest.readers.training_logs`.
What a column is, its name tells (``allocated_bytes``, ``memory.used [MiB]``,
``memest/allocated_bytes``); its unit, the name or the values. A unit that nothing tells is asked
for, not guessed.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.files.texts import read_small
from memest.readers.training_logs import printed_rows, with_known_names
from memest.report.growth_result import MemoryPoint, Quantity
from memest.units import GIB, KIB, MIB, parse_size

__all__ = ["MemoryLog", "read_memory_log"]

_MOST = 256 * MIB
_CERTAINLY_BYTES = 10_000_000
"""Above this a number without a unit counts bytes: no card has so many MiB."""
_CERTAINLY_BYTES_OF_HOST = 10_000_000_000
"""The same of a host, whose processes ps and getrusage count in KiB."""
_STEPS = ("step", "global_step", "_step", "train/global_step", "iteration", "iter", "steps")
_IN_EPOCH = ("iter", "iteration")
_EVALUATION = ("evaluation", "eval", "is_eval", "evaluating")
_UNITS = {
    "bytes": 1, "byte": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6,
    "gb": 10**9,
}  # fmt: skip
# behind a separator, or as a word of its own in camel case
_UNIT = re.compile(rf"(?:^|[^a-zA-Z]|(?<=[a-z])(?=[A-Z]))(?i:({'|'.join(_UNITS)}))\W*$")
_DRIVER = re.compile(
    r"(?:^|\W)(?:(?:system[/.]gpu|gpu\.\d).*bytes|nvml|nvidia)|memory.used|used_(?:gpu_)?memory|device",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"(?:^|[^a-z])(?:rss|host|proc\.memory|cpu(?=.*(?:mem|alloc|ram|[kmg]i?b|bytes)))",
    re.IGNORECASE,
)
_HIGHEST = re.compile(r"max|peak|high", re.IGNORECASE)
_OTHERWISE = re.compile(
    r"total|free|avail|percent|pct|%|util|predicted|diff|delta|limit|headroom|count|num_|retries"
    r"|error|small_pool|large_pool|\.(?:allocated|freed)$|__M(?:IN|AX)$|^memory\.reserved"
    r"|gpu\..*memoryAllocated$",
    re.IGNORECASE,
)
"""Of the card, shares, differences, counts, sums over the run, what W&B exports beside, and what
nvidia-smi calls reserved: the driver's own."""
_OF_ONE = (
    "rank",
    "local_rank",
    "global_rank",
    "gpu",
    "gpu_id",
    "device_id",
    "index",
    "uuid",
    "gpu_uuid",
    "pci.bus_id",
    "gpu_bus_id",
    "pid",
    "run",
)
"""Columns that say which of several processes or cards a row is of."""
_DELIMITERS = ",;\t"

_EXAMPLE = "step,allocated_mib,reserved_mib"
_SMI = "nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv -l 1"
_SMI_TIME = "%Y/%m/%d %H:%M:%S.%f"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLog:
    """What a log tells of memory.

    Attributes:
        points: its readings, in order.
        unit: ``step`` where a column numbers them, else ``row``.
        columns: for each quantity the name of its column.
        notes: what was taken how.
    """

    points: tuple[MemoryPoint, ...]
    unit: str
    columns: Mapping[Quantity, str]
    notes: tuple[str, ...]


def read_memory_log(path: str | Path) -> MemoryLog:
    """Read a log.

    Raises:
        ConfigError: it cannot be read, has no column of memory, or one whose unit nothing tells.
    """
    file = Path(path).expanduser()
    try:
        text = read_small(file, _MOST, utf_16=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is neither text nor a snapshot: give a file of "
            "torch.cuda.memory._dump_snapshot, or a log of memory as CSV or JSON lines."
        ) from error
    rows, note = _rows(text, path)
    names = list(dict.fromkeys(name for row in rows for name in row))
    notes = [note] if note else []
    columns = _columns(names, notes)
    if not columns:
        shown = ", ".join(name[:40] for name in names[:8])
        said = f"has no column of memory (it has {shown})" if names else "has no rows with names"
        raise ConfigError(
            f"{path} {said}: name them as in {_EXAMPLE}; allocated, max_allocated, reserved, "
            f"device and host are known, with their units, what {_SMI} writes, and what ms-swift, "
            "Ultralytics, mmengine, torchtitan and detectron2 print."
        )
    rows = _of_one(rows, names, notes)
    at_a_time = _rows_at_a_time([row.get("timestamp") for row in rows])
    if at_a_time > 1:
        raise ConfigError(
            f"{path}: rows come {at_a_time} at a time, one of each card, and nothing says which: "
            f"{_SMI} writes it, and -i 0 besides is one card alone."
        )
    return _log(rows, names, columns, path, notes)


def _rows(text: str, path: str | Path) -> tuple[list[dict[str, Any]], str]:
    stripped = text.lstrip()
    braces = stripped.startswith(("{", "["))
    if not (braces and _begins_json(stripped)):
        printed, note = printed_rows(text)
        if printed:
            return printed, note
    if braces:
        return with_known_names(_json_rows(stripped, path))
    head = text.partition("\n")[0]
    delimiter = max(_DELIMITERS, key=head.count)
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    try:
        return [{str(k): v for k, v in row.items() if k} for row in reader], ""
    except csv.Error as error:
        raise ConfigError(f"{path} is no CSV ({error}): a header and rows, {_EXAMPLE}.") from error


def _begins_json(text: str) -> bool:
    """Whether a text begins like a document or a line of JSON."""
    try:
        json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_rows(text: str, path: str | Path) -> list[dict[str, Any]]:
    """Rows of a Trainer's state, of a list, or of one object a line."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep for a log.") from error
    except ValueError:
        content = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                content.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                said = getattr(error, "msg", error)
                raise ConfigError(
                    f"{path}, line {number} is no JSON ({said}): one object a line, a list, "
                    "or a trainer_state.json."
                ) from error
    if isinstance(content, dict):
        content = content.get("log_history", [content])
    return [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []


def _columns(names: Sequence[str], notes: list[str]) -> dict[Quantity, str]:
    """For each quantity the first column that is of it."""
    found: dict[Quantity, str] = {}
    for name in names:
        quantity = _quantity(name)
        if quantity is not None and found.setdefault(quantity, name) != name:
            notes.append(
                f"{name} was not read, for {found[quantity]} is: give a log of one GPU and one run."
            )
    return found


def _of_one(
    rows: list[dict[str, Any]], names: Iterable[str], notes: list[str]
) -> list[dict[str, Any]]:
    """The rows of the first process, card or run, where a column says which."""
    for name in (name for name in names if name.lower() in _OF_ONE):
        values = list(dict.fromkeys(row[name] for row in rows if row.get(name) not in (None, "")))
        if len(values) > 1:
            notes.append(
                f"only rows whose {name} is {values[0]} were read, of {len(values)} there."
            )
            rows = [row for row in rows if row.get(name) == values[0]]
    return rows


def _rows_at_a_time(stamps: Sequence[Any]) -> int:
    """How many rows nvidia-smi wrote for each reading: as many as it saw cards.

    Example:
        >>> _rows_at_a_time([f"2026/11/28 10:00:{n // 2:02}.00{n % 2}" for n in range(8)])
        2
    """
    try:
        times = [datetime.strptime(str(stamp).strip(), _SMI_TIME) for stamp in stamps]  # noqa: DTZ007
    except ValueError:
        return 1
    gaps = [(after - before).total_seconds() for before, after in pairwise(times)]
    begins = [at for at, gap in enumerate(gaps, 1) if gap > max(gaps) / 5]
    sizes = {after - before for before, after in pairwise([0, *begins])}
    return sizes.pop() if len(sizes) == 1 and len(begins) > 1 else 1


def _quantity(name: str) -> Quantity | None:
    name = name.rpartition(" - ")[2]  # W&B exports write the run in front
    if _OTHERWISE.search(name):
        return None
    lower = name.lower()
    if _HOST.search(name) and "gpu" not in lower:
        return Quantity.HOST
    if "reserved" in lower or "cached" in lower:
        return Quantity.RESERVED
    if _DRIVER.search(name):
        return Quantity.DEVICE
    if "allocated" in lower:
        highest = _HIGHEST.search(name) or "measured" in lower
        return Quantity.PEAK_ALLOCATED if highest else Quantity.ALLOCATED
    return None


def _log(
    rows: Sequence[Mapping[str, Any]],
    names: Iterable[str],
    columns: Mapping[Quantity, str],
    path: str | Path,
    notes: list[str],
) -> MemoryLog:
    step = min(
        (name for name in names if name.lower() in _STEPS),
        key=lambda name: _STEPS.index(name.lower()),
        default=None,
    )
    if step in _IN_EPOCH and "epoch" in names:
        step = None  # counted anew in each epoch
    flag = next((name for name in names if name.lower() in _EVALUATION), None)
    sizes = {
        quantity: _sizes(
            [row.get(name) for row in rows],
            name,
            path,
            notes,
            _CERTAINLY_BYTES_OF_HOST if quantity is Quantity.HOST else _CERTAINLY_BYTES,
        )
        for quantity, name in columns.items()
    }
    points: list[MemoryPoint] = []
    seen: set[int] = set()
    restart = 0
    for number, row in enumerate(rows):
        values = {f"{q.value}_bytes": each[number] for q, each in sizes.items()}
        if all(value is None for value in values.values()):
            continue
        at = _whole(row.get(step), step or "", path) if step else None
        if at is not None and points and at < points[-1].step and at in seen:
            restart = number + 1
            points, seen = [], set()
        seen.add(number + 1 if at is None else at)
        points.append(
            MemoryPoint(
                step=number + 1 if at is None else at,
                evaluation=str(row.get(flag or "", "")).strip().lower()
                in ("1", "true", "yes", "eval"),
                **values,
            )
        )
    if restart:
        notes.append(
            f"{step} begins anew at row {restart}: only what follows was read. Number the steps "
            "through where it is one run."
        )
    training = Counter(point.step for point in points if not point.evaluation)
    if step and len(training) > 1 and min(training.values()) > 1:
        notes.append(
            f"every {step} has several rows: where they are of several processes or cards, the "
            "growth of one is not seen among the others. A column rank, gpu or pid tells them "
            "apart."
        )
    points.sort(key=lambda point: point.step)
    return MemoryLog(
        points=tuple(points),
        unit="step" if step else "row",
        columns=columns,
        notes=tuple(notes),
    )


def _whole(value: Any, name: str, path: str | Path) -> int | None:
    if value in (None, ""):
        return None
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {name} is {value!r}: a whole number is needed.") from error


def _sizes(
    values: Sequence[Any], name: str, path: str | Path, notes: list[str], certainly_bytes: int
) -> list[int | None]:
    """Bytes of a column, by the unit of its values or of its name."""
    match = _UNIT.search(name)
    unit = _UNITS[match[1].lower()] if match else None
    sizes: list[int | None] = []
    for value in values:
        text = str(value).strip()
        if value in (None, "") or text.lower() in ("nan", "none", "n/a", "[n/a]"):
            sizes.append(None)
            continue
        try:
            if text[-1].isalpha() or text[0] == "-":  # a size is never negative
                sizes.append(parse_size(text))
            else:
                sizes.append(int(float(text) * (unit or 1)))
        except (ConfigError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{path}: {name} is {text[:40]!r}: a size is needed, 1343MiB or a number."
            ) from error
    bare = [
        size
        for size, value in zip(sizes, values, strict=True)
        if size is not None and not str(value).strip()[-1:].isalpha()
    ]
    if unit is None and bare:
        if max(bare) < certainly_bytes:
            raise ConfigError(
                f"{path}: nothing says what {name} counts: call it {name}_mib, _kib or _bytes, or "
                "write units behind the values (1343 MiB)."
            )
        notes.append(f"{name} was taken as bytes: it names no unit, and is too large for others.")
    return sizes
