"""``memest cache``: the step profiles that are kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from memest.cli.console import Output, emit, write_document, write_out
from memest.cli.flags import shows, switch
from memest.config.adapter import read_adapter
from memest.config.quantization import read_quantization
from memest.errors import ConfigError
from memest.profiles.cache import STEPS_OF, Entry, Store, cache_folder, size_limit
from memest.units import format_size

__all__ = ["cache", "contents"]

_SWITCHES = {
    "padded": "padded batches",
    "use_reentrant": "reentrant checkpointing",
    "del_outputs": "del outputs",
}
_WORDS = {
    "task": "{}",
    "precision": "{}",
    "dtype": "{} weights",
    "checkpointing": "checkpointing {}",
    "attn_implementation": "{} attention",
    "sdpa_backend": "{} kernel",
    "loop": "{} loop",
    "zero_grad": "zero_grad {}",
    "zero_grad_at": "zero_grad {}",
    "num_labels": "{} labels",
    "freeze": "frozen: {}",
    "frozen_parts": "frozen: {}",
    "cast_weights": "dtypes after loading: {}",
    "adapter": "{}",
    "quantization": "{}",
    "software": "{}",
}
"""The parts of a setup that traces depend on, and how they are said."""
_SPREAD = {
    "tp": "layers shared by {}",
    "tp_sequence": "and the sequence between them",
    "ep": "experts shared by {}",
    "cp": "sequences shared by {}",
    "sp": "sequences and heads shared by {}",
    "partitioned": "parameters partitioned",
}
"""What of several GPUs traces depend on, by the names that keys alone have."""
_READERS: dict[str, Callable[[Any], Any]] = {
    "adapter": read_adapter,
    "quantization": read_quantization,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the folder holds.

    Attributes:
        folder: the cache folder.
        profiles: entries of models, used last first.
        optimizers: entries of optimizer updates.
        unknown: entries whose key cannot be read.
        problem: why nothing can be read; empty if it can.
        others: files and folders there that are not memest's.
    """

    folder: Path
    profiles: tuple[Entry, ...]
    optimizers: tuple[Entry, ...]
    unknown: tuple[Entry, ...]
    problem: str
    others: int

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them."""
        return (*self.profiles, *self.optimizers, *self.unknown)

    @property
    def total_bytes(self) -> int:
        """Size on disk."""
        return sum(entry.bytes for entry in self.entries)


def contents(folder: Path) -> Contents:
    """Look into a cache folder without touching anything."""
    problem, num_others = "", 0
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        names = []
    except NotADirectoryError:
        names, problem = [], "it is a file, not a folder: nothing is kept"
    except OSError as error:
        names, problem = [], f"it cannot be read: {error.strerror or error}"
    # reading only: a look must not make old entries seem used
    entries = Store(folder, writable=False).entries() if not problem else []
    by_kind: dict[str, list[Entry]] = {"profiles": [], "optimizers": [], "unknown": []}
    for entry in entries:
        if isinstance(entry.key.get("model"), str):
            by_kind["profiles"].append(entry)
        else:
            by_kind["optimizers" if "weights" in entry.key else "unknown"].append(entry)
    digests = {entry.digest for entry in entries}
    num_others = sum(1 for name in names if name not in digests)
    return Contents(
        folder=folder,
        profiles=tuple(by_kind["profiles"]),
        optimizers=tuple(by_kind["optimizers"]),
        unknown=tuple(by_kind["unknown"]),
        problem=problem,
        others=num_others,
    )


def _differences(key: Mapping[str, Any]) -> dict[str, Any]:
    """What of an entry's setup is not as when nothing is asked for."""
    from memest.config.setup import Setup

    setup = key.get("setup")
    if not isinstance(setup, dict):
        return {}
    defaults = Setup().to_dict()
    differences = {
        name: setup[name]
        for name in (*_WORDS, *_SWITCHES)
        if name in setup and name in defaults and setup[name] != defaults[name]
    }
    for name in _SPREAD:
        value = setup.get(name)
        value = value[0] if isinstance(value, list) and value else value
        # one of two ways to share a model may be unused, and says 1
        if value is not None and (value is True or value != 1):
            differences[name] = value
    if setup.get("optim") == "none":
        differences["optim"] = "none"
    if setup.get("loop") == "plain" and setup.get("grad_accum") != 1:
        differences["grad_accum"] = True
    return differences


def _words(key: Mapping[str, Any]) -> str:
    words = []
    for name, value in _differences(key).items():
        if name in _READERS:
            words.append(_reader_words(name, value))
        elif name in _WORDS:
            words.append(_WORDS[name].format(_plain(value)))
        elif name in _SPREAD:
            words.append(_SPREAD[name].format(value))
        elif name in _SWITCHES:
            words.append(_SWITCHES[name] if value else f"no {_SWITCHES[name]}")
        else:
            words.append({"optim": "no optimizer", "grad_accum": "accumulation"}[name])
    return ", ".join(words) or "as by default"


def _reader_words(name: str, value: Any) -> str:
    try:
        return str(_READERS[name](value).words)
    except (ConfigError, AttributeError):
        return _plain(value)  # of a key that nobody wrote as we do


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {version}" for name, version in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _layers(entry: Entry) -> str:
    """Whether an entry's steps were traced from few layers, or all; empty where it has none."""
    few = any(name.startswith(STEPS_OF["few"]) for name in entry.documents)
    of_steps = any(
        name.startswith(STEPS_OF["all"]) and not name.startswith(STEPS_OF["few"])
        for name in entry.documents
    )
    return ", ".join(word for word, there in (("few", few), ("all", of_steps)) if there)


def _moment(seconds: float) -> str:
    """A stamp in local time; a clock that was wrong may have left one that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _document(contents: Contents, limit: int) -> dict[str, Any]:
    """The document of ``--json``; sizes in bytes, times in UTC."""

    def sums(entries: Iterable[Entry]) -> dict[str, Any]:
        entry_list = list(entries)
        used = max((entry.used for entry in entry_list), default=None)
        return {
            "entries": len(entry_list),
            "documents": sum(len(entry.documents) for entry in entry_list),
            "bytes": sum(entry.bytes for entry in entry_list),
            "used": None if used is None else _utc(used),
        }

    return {
        "schema_version": 1,
        "path": str(contents.folder),
        "problem": contents.problem or None,
        "total_bytes": contents.total_bytes,
        "limit_bytes": limit,
        "profiles": [
            {
                "digest": entry.digest,
                "model": entry.key["model"],
                "setup": _differences(entry.key),
                "torch": entry.key.get("torch"),
                "transformers": entry.key.get("transformers"),
                "documents": len(entry.documents),
                "traced_layers": _layers(entry),
                "bytes": entry.bytes,
                "used": _utc(entry.used),
            }
            for entry in contents.profiles
        ],
        "optimizers": sums(contents.optimizers),
        "unknown": sums(contents.unknown),
        "other_files": contents.others,
    }


def _utc(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _clear(folder: Path) -> tuple[int, int]:
    """(bytes freed, bytes that could not be)."""
    before = contents(folder).total_bytes
    Store(folder).clear()
    left = contents(folder).total_bytes
    return before - left, left


@shows()
def cache(
    *,
    output: Output,
    clear: Annotated[bool, switch("--clear", "Drop everything that is kept.")] = False,
    path: Annotated[bool, switch("--path", "The folder's path alone.")] = False,
) -> int:
    """The step profiles on disk, so that a model is traced once.

    MEMEST_CACHE chooses the folder, MEMEST_CACHE_LIMIT its size (512MiB if not set). What was used
    longest ago goes first. For example: memest cache --clear
    """
    if clear and path:
        raise ConfigError("--clear and --path exclude each other: drop one of them.")
    folder = cache_folder()
    if folder is None:
        raise ConfigError(
            "there is no cache: this user has no home folder that is known, and MEMEST_CACHE names "
            "no other. Set it to a folder."
        )
    if path:
        if output.as_json:
            write_document({"schema_version": 1, "path": str(folder)})
        else:
            write_out(f"{folder}\n")
        return 0
    if clear:
        return _clear_and_report(folder, output)
    limit = size_limit()
    cache_contents = contents(folder)
    if output.as_json:
        write_document(_document(cache_contents, limit))
        return 0
    write_out(f"{_summary(cache_contents, limit)}\n")
    if cache_contents.entries:
        _show(cache_contents, output)
    if cache_contents.others and not cache_contents.problem:
        what = (
            "one other file"
            if cache_contents.others == 1
            else f"{cache_contents.others} other files"
        )
        emit(f"memest: {what} in {folder}: not memest's, nothing here touches them.")
    return 0


def _clear_and_report(folder: Path, output: Output) -> int:
    freed_bytes, left_bytes = _clear(folder)
    if output.as_json:
        sizes = {"freed_bytes": freed_bytes, "left_bytes": left_bytes}
        write_document({"schema_version": 1, "path": str(folder), **sizes})
    else:
        freed_words = f"freed {format_size(freed_bytes)}" if freed_bytes else "nothing to clear"
        write_out(f"{folder}: {freed_words}.\n")
    if left_bytes:
        emit(
            f"memest: {format_size(left_bytes)} in {folder} could not be removed: see who owns it, "
            "or choose another folder with MEMEST_CACHE."
        )
        return 1
    return 0


def _summary(contents: Contents, limit: int) -> str:
    if contents.problem:
        return f"{contents.folder}: {contents.problem}. MEMEST_CACHE chooses another folder."
    if not contents.entries:
        return f"{contents.folder}: empty, of {format_size(limit)}."
    return f"{contents.folder}: {format_size(contents.total_bytes)} of {format_size(limit)}."


def _show(contents: Contents, output: Output) -> None:
    from rich.text import Text

    rows: list[tuple[str | Text, ...]] = [
        (
            entry.key["model"],
            _words(entry.key),
            _layers(entry),
            f"{len(entry.documents)}",
            format_size(entry.bytes),
            _moment(entry.used),
        )
        for entry in contents.profiles
    ]
    for name, entries in (
        ("optimizer updates", contents.optimizers),
        ("unreadable entries", contents.unknown),
    ):
        if entries:
            documents = sum(len(entry.documents) for entry in entries)
            size = format_size(sum(entry.bytes for entry in entries))
            used = _moment(max(entry.used for entry in entries))
            rows.append((Text(name, style="dim"), "", "", f"{documents}", size, used))
    head = ("model", "setup", "layers traced", "documents", "size", "last used")
    output.table(rows, head, ("left", "left", "left", "right", "right", "left"))
