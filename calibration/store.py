"""Measurements on disk: one SQLite file that survives whatever happens to those who write to it.

Write-ahead log, full synchronisation: what was told to be kept is on the disk. A run that is under
way is a row with an owner; what its worker has said so far is kept message by message, so a runner
that is killed leaves behind all it had heard. Several campaigns may share a file: a case that one
of them is measuring is left to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memest.calibration.case import Case, case_from_dict
from memest.calibration.measurement import (
    Environment,
    Failure,
    Measurement,
    Status,
    measurement_from_dict,
    measurement_of,
)
from memest.errors import ConfigError, MemestError

__all__ = ["MeasurementStore", "OpenRun", "default_store"]

_VERSION = 1
_APPLICATION = 0x6D656D65  # "meme": tells our files from other people's
_BUSY_SECONDS = 30.0
_SILENT_SECONDS = 120.0
"""An owner on another machine that said nothing for so long is gone."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, case_id TEXT NOT NULL, environment TEXT NOT NULL, status TEXT NOT NULL,
    started TEXT NOT NULL, owner TEXT NOT NULL, seen REAL NOT NULL, document TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS runs_of_case ON runs (case_id, environment);
CREATE TABLE IF NOT EXISTS messages (
    run TEXT NOT NULL, number INTEGER NOT NULL, document TEXT NOT NULL, PRIMARY KEY (run, number)
);
"""
_RUNNING = "running"
_RESULTS = (Status.OK.value, Status.OOM.value)


def default_store() -> Path:
    """``MEMEST_STORE``, else ``calibration.db`` in the user's own folder."""
    path_text = os.environ.get("MEMEST_STORE")
    if path_text:
        return Path(path_text).expanduser()
    from memest.files.folders import user_folder

    return user_folder() / "calibration.db"


class MeasurementStore:
    """The measurements of one file.

    Args:
        path: of the file; made where it is missing, its folder too.
        create: False refuses a file that is not there.

    Raises:
        ConfigError: the file is something else, or made by a later release.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if not create and not path.exists():
            raise ConfigError(
                f"there is no store at {path}: `memest calibrate run` makes one, and --store names "
                "another."
            )
        with _readable_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._prepare()

    def _prepare(self) -> None:
        mine = self._db.execute("PRAGMA application_id").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and mine != _APPLICATION:
            raise ConfigError(f"{self.path} is a database of something else: name another --store.")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise ConfigError(
                f"{self.path} was made by a later release of memest (format {version}, this one "
                f"knows {_VERSION}): update memest, or name another --store."
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if not tables:
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        self._db.executescript(_SCHEMA)

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the log back and let go of the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    # -- running cases

    def begin(self, case: Case, environment: Environment) -> OpenRun | None:
        """Take a case, unless it is measured already or somebody is at it.

        Args:
            case: what is to run.
            environment: a measurement counts for the same GPU and software only.

        Returns:
            The run that was begun, None where there is nothing to do.
        """
        with _readable_errors(self.path), self._transaction():
            rows = self._db.execute(
                "SELECT run, status, owner, seen, document FROM runs "
                "WHERE case_id = ? AND environment = ?",
                (case.id, environment.key),
            ).fetchall()
            for run, status, owner, seen_at, document in rows:
                if status == _RUNNING:
                    if _alive(owner, seen_at):
                        return None
                    self._abandon(run)
                elif status in _RESULTS and _answers(case, document):
                    return None
            open_run = OpenRun(self, case, environment)
            self._put_open_run(open_run)
            return open_run

    def result(self, case: Case, environment: Environment) -> Measurement | None:
        """The result of a case (out of memory is one), None if there is none yet."""
        with _readable_errors(self.path):
            rows = self._db.execute(
                "SELECT document FROM runs WHERE case_id = ? AND environment = ? "
                "AND status IN (?, ?) ORDER BY started",
                (case.id, environment.key, *_RESULTS),
            ).fetchall()
        documents = [document for (document,) in rows if _answers(case, document)]
        return measurement_from_dict(json.loads(documents[-1])) if documents else None

    def hear(self, run: str, number: int = 0, message: dict[str, Any] | None = None) -> bool:
        """Keep one message of a worker; without one, that the owner of the run is alive.

        Returns:
            False where somebody whose clock differs took the owner for gone, see :meth:`take_back`.
        """
        with _readable_errors(self.path):
            if message is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO messages VALUES (?, ?, ?)",
                    (run, number, json.dumps(message)),
                )
            cursor = self._db.execute(
                "UPDATE runs SET seen = ? WHERE run = ? AND status = ?",
                (time.time(), run, _RUNNING),
            )
            return cursor.rowcount > 0

    def take_back(self, open_run: OpenRun) -> None:
        """Take up a run again that was ended by somebody who took its owner for gone."""
        with _readable_errors(self.path), self._transaction():
            self._put_open_run(open_run)

    def keep(self, measurement: Measurement) -> None:
        """Store the end of a run in place of its messages."""
        with _readable_errors(self.path), self._transaction():
            self._put(measurement)
            self._db.execute("DELETE FROM messages WHERE run = ?", (measurement.run,))

    def recover(self) -> int:
        """Turn runs whose owner is gone into measurements that were interrupted.

        Returns:
            How many there were.
        """
        with _readable_errors(self.path), self._transaction():
            rows = self._db.execute(
                "SELECT run, owner, seen FROM runs WHERE status = ?", (_RUNNING,)
            ).fetchall()
            orphaned_runs = [run for run, owner, seen_at in rows if not _alive(owner, seen_at)]
            for run in orphaned_runs:
                self._abandon(run)
        return len(orphaned_runs)

    def _abandon(self, run: str) -> None:
        """What was heard of a run whose owner is gone becomes its measurement."""
        row = self._db.execute(
            "SELECT started, document FROM runs WHERE run = ?", (run,)
        ).fetchone()
        messages = self._db.execute(
            "SELECT document FROM messages WHERE run = ? ORDER BY number", (run,)
        ).fetchall()
        measurement = measurement_of(
            run,
            case_from_dict(json.loads(row[1])),
            [json.loads(document) for (document,) in messages],
            Status.INTERRUPTED,
            started=row[0],
            seconds=0.0,
            failure=Failure(
                kind="Interrupted", message="the campaign was ended while this case ran"
            ),
        )
        self._put(measurement)
        self._db.execute("DELETE FROM messages WHERE run = ?", (run,))

    # -- all measurements

    def measurements(self) -> list[Measurement]:
        """Everything that is not under way, oldest first."""
        with _readable_errors(self.path):
            rows = self._db.execute(
                "SELECT run, document FROM runs WHERE status != ? ORDER BY started, run",
                (_RUNNING,),
            ).fetchall()
        return [
            measurement_from_dict(json.loads(document), where=f"run {run} of {self.path}")
            for run, document in rows
        ]

    def running(self) -> int:
        """How many runs are under way."""
        with _readable_errors(self.path):
            row = self._db.execute("SELECT count(*) FROM runs WHERE status = ?", (_RUNNING,))
            return int(row.fetchone()[0])

    def add(self, measurements: Iterable[Measurement]) -> tuple[int, int, list[str]]:
        """Take over measurements of others.

        Returns:
            (new ones, those that were here already, runs that are here with another content and
            were left as they are).
        """
        new = same = 0
        contradictions = []
        with _readable_errors(self.path), self._transaction():
            for measurement in measurements:
                row = self._db.execute(
                    "SELECT document FROM runs WHERE run = ?", (measurement.run,)
                ).fetchone()
                if row is None:
                    self._put(measurement)
                    new += 1
                elif json.loads(row[0]) == measurement.to_dict():
                    same += 1
                else:
                    contradictions.append(measurement.run)
        return new, same, contradictions

    def _put_open_run(self, open_run: OpenRun) -> None:
        """A run under way, and all that was heard of it."""
        self._put_row(open_run, _RUNNING, _owner(), open_run.case.to_dict())
        self._db.executemany(
            "INSERT OR REPLACE INTO messages VALUES (?, ?, ?)",
            [
                (open_run.run, number, json.dumps(one))
                for number, one in enumerate(open_run.messages)
            ],
        )

    def _put(self, measurement: Measurement) -> None:
        self._put_row(measurement, measurement.status.value, "", measurement.to_dict())

    def _put_row(
        self, run: OpenRun | Measurement, status: str, owner: str, document: dict[str, Any]
    ) -> None:
        key = run.environment.key if run.environment else ""
        row = (run.run, run.case.id, key, status, run.started, owner, time.time())
        self._db.execute(
            "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, json.dumps(document)),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class OpenRun:
    """A run under way.

    Attributes:
        run: its identifier.
        case: what runs.
        environment: where it runs.
        started: UTC.
        messages: what was heard of it; the first says where it runs.
    """

    def __init__(self, store: MeasurementStore, case: Case, environment: Environment) -> None:
        self.run = uuid.uuid4().hex
        self.case = case
        self.environment = environment
        self.started = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._store = store
        self._began = time.monotonic()
        self._closed = False
        self.messages: list[dict[str, Any]] = [
            {"kind": "environment", "environment": dataclasses.asdict(environment)}
        ]
        self._phase: list[dict[str, Any]] = []

    def hear(self, message: dict[str, Any]) -> None:
        """Keep what the worker says; of phases, which are many, only the last, and in memory."""
        if message["kind"] == "phase":
            self._phase = [message]
            return
        self.messages.append(message)
        if not self._store.hear(self.run, len(self.messages) - 1, message):
            self._store.take_back(self)

    def still_here(self) -> None:
        """Say that the owner of this run is alive."""
        if self._closed:
            return
        if not self._store.hear(self.run):
            self._store.take_back(self)

    def close(
        self, status: Status, failure: Failure | None = None, events: str = ""
    ) -> Measurement:
        """The run is over: make a measurement of what was heard, and keep it."""
        measurement = measurement_of(
            self.run,
            self.case,
            (*self.messages, *self._phase),
            status,
            started=self.started,
            seconds=round(time.monotonic() - self._began, 3),
            failure=failure,
            events=events,
        )
        self._store.keep(measurement)
        self._closed = True
        return measurement


def _answers(case: Case, document: str) -> bool:
    """Whether a result is that of the case: of its rank 0, and with the history if it is asked."""
    values = json.loads(document)
    # a history that could not be kept will not be kept the next time either
    history_or_remark = values.get("events") or values.get("remarks")
    return not values.get("rank") and (not case.record_events or bool(history_or_remark))


def _owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    """When a process began: numbers of processes are used again."""
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]
    return "gone"


def _alive(owner: str, seen_at: float) -> bool:
    host, pid, start_time = (*owner.split(":"), "", "", "")[:3]
    if host == socket.gethostname() and pid.isdigit() and sys.platform == "linux":
        return _start_time(int(pid)) == start_time
    # a stamp from the future tells as little as an old one: a clock was set. Whoever is taken for
    # gone by mistake takes his run back with his next word
    return abs(time.time() - seen_at) < _SILENT_SECONDS


@contextlib.contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Errors of the database in words that help."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "not a database" in text or "malformed" in text:
            raise ConfigError(
                f"{path} is not a store of measurements, or is damaged ({text}): name another "
                "--store; `memest calibrate merge` takes what can be read out of an old one."
            ) from error
        if "locked" in text:
            raise MemestError(
                f"{path} is locked by another process for more than {_BUSY_SECONDS:.0f} s ({text})."
            ) from error
        raise MemestError(
            f"the store {path} cannot be used: {text}. What was kept before is still in it."
        ) from error
    except OSError as error:
        raise MemestError(
            f"the store {path} cannot be opened: {error.strerror or error}. Name another --store."
        ) from error
