"""Measurements as JSON lines: the form in which they are handed on and kept under ``data/``.

One line is one figure of one run, a case record as ``memest validate`` takes it: what was trained,
on what, which counter, how many bytes. The first line of a run carries the whole measurement too
(``measurement``), so nothing is lost on the way; a run without a figure has a line all the same.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from memest.calibration.measurement import Measurement, Status, measurement_from_dict
from memest.errors import ConfigError, MemestError
from memest.files.whole import write_whole
from memest.units import MIB

__all__ = ["export_records", "read_measurements", "records_of", "write_lines"]

_METRICS = ("allocated", "reserved", "device")
_MAX_LINE = 16 * MIB
_MAX_FILE = 2048 * MIB
_MAX_PROBLEMS = 1000


def records_of(measurement: Measurement) -> list[dict[str, Any]]:
    """The case records of one run: one for each counter that was read, at least one."""
    environment, case = measurement.environment, measurement.case
    figures = {name: getattr(measurement, f"{name}_bytes") for name in _METRICS}
    last = next((r for r in measurement.readings if r.name == "oom"), None)
    if measurement.status is Status.OOM and last is not None:
        # how far it came is a lower bound, and said to be no more
        for name in ("allocated", "reserved"):
            readings = (figures[name], getattr(last, f"{name}_bytes"))
            figures[name] = max((n for n in readings if n is not None), default=None)
    base: dict[str, Any] = {
        "model": case.model,
        "task": case.setup.task.value,
        "setup": case.to_dict()["setup"],
        "gpu": environment.gpu if environment else "",
        "source": f"memest calibrate, run {measurement.run}, {measurement.started}",
        "software": {
            name: version
            for name in ("torch", "transformers", "cuda", "driver")
            if environment and (version := getattr(environment, name))
        },
        "status": measurement.status.value,
        "notes": _notes(measurement),
    }
    if measurement.status is Status.OOM:
        base["oom"] = True
    if case.cap_bytes is not None:
        base["limit_bytes"] = case.cap_bytes
    metrics = [name for name in _METRICS if figures[name] is not None] or ["allocated"]
    records = [
        {
            "id": f"{case.id}-{measurement.run[:8]}-{name}",
            **base,
            "metric": name,
            "measured_bytes": figures[name],
        }
        for name in metrics
    ]
    records[0]["measurement"] = measurement.to_dict()
    return records


def _notes(measurement: Measurement) -> str:
    words = []
    if measurement.failure is not None:
        failure = measurement.failure
        first = (failure.message.splitlines() or [""])[0]
        words.append(f"{measurement.status.value} in phase {failure.phase or '?'}: {first[:300]}")
    if measurement.environment is not None:
        words += measurement.environment.notes
    words += measurement.remarks
    return "; ".join(words)


def export_records(measurements: Iterable[Measurement]) -> Iterator[str]:
    """The lines of many runs."""
    for measurement in measurements:
        for record in records_of(measurement):
            yield json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a file whole or not at all; ``.gz`` at its end compresses.

    Returns:
        How many lines.

    Raises:
        MemestError: it cannot be written.
    """
    count = 0

    def write(file: BinaryIO) -> None:
        nonlocal count
        gzip_file = gzip.GzipFile("", "wb", 9, file, 0) if path.suffix == ".gz" else None
        count = 0
        for line in lines:
            (gzip_file or file).write(line.encode("utf-8", errors="backslashreplace") + b"\n")
            count += 1
        if gzip_file is not None:
            gzip_file.close()

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
    except OSError as error:
        raise MemestError(f"{path} cannot be written: {error.strerror or error}.") from error
    return count


def read_measurements(path: Path, *, most: int = _MAX_FILE) -> tuple[list[Measurement], list[str]]:
    """The measurements of a file of records.

    Args:
        path: JSON lines, gzip where the name ends in ``.gz``.
        most: bytes that it may have, unpacked.

    Returns:
        Measurements, each once, and what could not be read, line by line.

    Raises:
        ConfigError: the file cannot be read at all, or holds no measurement.
    """
    measurements: dict[str, Measurement] = {}
    problems: list[str] = []
    bare = 0
    for number, line in _lines(path, most):
        where = f"line {number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ConfigError(f"{where} is no record")
            if "measurement" in record:
                measurement = measurement_from_dict(record["measurement"], where=where)
                measurements.setdefault(measurement.run, measurement)
            elif "case" in record and "run" in record:
                measurement = measurement_from_dict(record, where=where)
                measurements.setdefault(measurement.run, measurement)
            else:
                bare += 1
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}: {error}" if where not in str(error) else str(error))
            if len(problems) > _MAX_PROBLEMS:
                raise ConfigError(
                    f"{path} has more than {_MAX_PROBLEMS:,} lines that are no records, the first "
                    f"one: {problems[0]}."
                ) from None
    if not measurements and (problems or bare):
        why = problems[0] if problems else "its records carry no measurement"
        raise ConfigError(
            f"{path} holds no measurement ({why}): give a file that `memest calibrate export` "
            "wrote."
        )
    return list(measurements.values()), problems


def _lines(path: Path, most: int) -> Iterator[tuple[int, str]]:
    try:
        if path.stat().st_size > most:
            raise ConfigError(f"{path} is larger than {most // MIB} MiB.")
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number = read = 0
            while raw := file.readline(_MAX_LINE + 1):
                number, read = number + 1, read + len(raw)
                if read > most:
                    raise ConfigError(f"{path} is larger than {most // MIB} MiB when unpacked.")
                if len(raw) > _MAX_LINE:
                    raise ConfigError(f"{path}, line {number} is longer than 16 MiB.")
                if raw.strip():
                    yield number, raw.decode("utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from None
