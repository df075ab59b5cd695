"""Files of other libraries as plain data: JSON, YAML, TOML, with limits, without running anything.

PyYAML's ``SafeLoader`` makes plain values only, and tags are refused; aliases, depth and size are
bounded before anything is built, so a file of nested aliases cannot grow in memory.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from memest.errors import ConfigError, hint
from memest.files.texts import read_small
from memest.units import MIB

__all__ = [
    "MAX_NODES",
    "check_size",
    "find_file",
    "parse_document",
    "plain_value",
    "read_document",
    "read_source",
]

MAX_BYTES = 2 * MIB
MAX_DEPTH = 50
MAX_ALIASES = 100
MAX_NODES = 100_000
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")
_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+([eE][+-]?\d+)?|[+-]?\d+\.")


def find_file(name: str, *, folder: Path | None, origin: str) -> Path:
    """A configuration file that another one names.

    Args:
        name: as written.
        folder: folder of the file that names it. Frameworks look in the working directory, so
            that comes first; the folder is for those who ask from elsewhere.
        origin: who names it.

    Raises:
        ConfigError: it is in neither.
    """
    try:
        path = Path(name).expanduser()
        paths = [path] if folder is None or path.is_absolute() else [path, folder / path]
        for candidate in paths:
            if candidate.is_file():
                return candidate
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{origin} names {name!r}, which is no path: {error}.") from None
    places = " and ".join(dict.fromkeys(str(each.parent.absolute()) for each in paths))
    raise ConfigError(
        f"{origin} names the file {name!r}, which is not there (looked in {places}). Run memest "
        "where the training is launched, or give the file besides: --config FILE."
    )


def read_source(path: Path, label: str, *, limit: int = MAX_BYTES) -> str:
    """The text of a configuration file.

    Args:
        path: of the file.
        label: how messages call it.
        limit: bytes that it may have.

    Raises:
        ConfigError: it is a pickle, cannot be read, or is too large for a configuration.
    """
    if path.suffix.lower() in _PICKLES:
        raise ConfigError(
            f"{label} is a pickle: loading one runs code, so memest does not. Export it in the "
            "environment of the training: python -c \"import torch; open('training_args.json', "
            f"'w').write(torch.load('{path.name}', weights_only=False).to_json_string())\" and "
            "give training_args.json."
        )
    try:
        return read_small(path, limit)
    except FileNotFoundError:
        kind = "script" if path.suffix == ".py" else "file"
        beside = _files_beside(path)
        near = hint(path.name, beside)
        raise ConfigError(f"{label} cannot be read: there is no such {kind}.{near}") from None
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{label} is not text: configurations are YAML, JSON, TOML, Python or shell scripts."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{label!r} is no path: {error}.") from None


def _files_beside(path: Path) -> list[str]:
    """The files of the same kind that lie where one was looked for; none where that cannot be."""
    with suppress(OSError):
        return sorted(each.name for each in path.parent.glob(f"*{path.suffix}"))
    return []


def read_document(path: Path, label: str) -> dict[str, Any]:
    """The mapping that a file holds.

    Raises:
        ConfigError: it cannot be read, is not in its format, or holds something else.
    """
    return parse_document(read_source(path, label), path, label)


def parse_document(text: str, path: Path, label: str) -> dict[str, Any]:
    """The mapping that the text of a file holds; its suffix says in which format.

    Raises:
        ConfigError: it is not in its format, or holds something else.
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        legal = ", ".join((*_SUFFIXES, ".py", ".ipynb", ".sh", ".slurm"))
        raise ConfigError(f"{label}: the suffix {suffix!r} says no format. Legal: {legal}.")
    try:
        if suffix == ".json":
            document = json.loads(text)
        elif suffix == ".toml":
            document = tomllib.loads(text)
        else:
            document = _load_yaml(text, label)
        check_size(document, label)
    except RecursionError:
        raise ConfigError(_too_deep(label)) from None
    except ConfigError:
        raise
    except ValueError as error:
        kind = suffix[1:].upper().replace("YML", "YAML")
        raise ConfigError(f"{label} is not {kind}: {error}.") from None
    if document is None or document == {}:
        raise ConfigError(
            f"{label} holds nothing: a configuration names at least a model or a batch."
        )
    if not isinstance(document, dict):
        raise ConfigError(
            f"{label} holds {_kind(document)}: a configuration is a mapping of names to values."
        )
    return {str(key): value for key, value in document.items()}


def plain_value(text: str) -> Any:
    """A word of a command line as the value that YAML and HfArgumentParser see in it.

    Example:
        >>> [plain_value(word) for word in ("True", "8", "1e-4", "none", "bf16")]
        [True, 8, 0.0001, None, 'bf16']
    """
    word = text.strip().lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    if word in ("none", "null", "~", ""):
        return None
    if _NUMBER.fullmatch(word) and len(word) < 40:
        return float(word) if any(c in word for c in ".e") else int(word)
    if word[0] in "[{":
        try:
            value = json.loads(text)
            check_size(value, text)
        except (ValueError, RecursionError):
            return text
        return value
    return text


def _load_yaml(text: str, label: str) -> Any:
    import yaml

    try:
        _check_yaml(yaml.parse(text, Loader=yaml.SafeLoader), label)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{label} is not YAML{place}: {problem}.") from None
    except (TypeError, OverflowError) as error:
        # a mapping as a key, a date that no calendar has
        raise ConfigError(f"{label} is not YAML of plain values: {error}.") from None


def _check_yaml(events: Iterator[Any], label: str) -> None:
    """Bounds on what is not built yet."""
    import yaml

    depth = aliases = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if aliases > MAX_ALIASES:
                raise ConfigError(
                    f"{label} has more than {MAX_ALIASES} YAML aliases: write the values out."
                )
            continue
        tag = getattr(event, "tag", None)
        if (tag is not None and not tag.startswith("tag:yaml.org,2002:")) or _runs(tag):
            line = event.start_mark.line + 1
            raise ConfigError(
                f"{label} has the YAML tag {tag!r} in line {line}: configurations are plain "
                "values, and memest makes no objects from a file. Drop the tag."
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(label))


def _runs(tag: str | None) -> bool:
    return tag is not None and "python" in tag


def check_size(document: Any, label: str) -> None:
    """Bounds on what is there, with what aliases stand for counted each time."""
    queue, count = [(document, 0)], 0
    while queue:
        value, depth = queue.pop()
        count += 1
        if count > MAX_NODES:
            raise ConfigError(f"{label} has more than {MAX_NODES:,} values (aliases counted).")
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(label))
        if isinstance(value, dict):
            queue += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, (list, tuple, set)):
            queue += [(each, depth + 1) for each in value]


def _too_deep(label: str) -> str:
    return f"{label} is nested more than {MAX_DEPTH} deep: no configuration is."


def _kind(value: Any) -> str:
    names = {"list": "a list", "str": "text", "NoneType": "nothing"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
