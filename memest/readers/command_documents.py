"""Documents that a launch command names, and its arguments over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from memest.readers.documents import find_file, read_document
from memest.readers.formats import FileFormat
from memest.readers.mapping import DocumentKeys
from memest.readers.training_arguments import IGNORED_KEYS, UNMODELLED_KEYS
from memest.readers.values import DocumentReading, KeyOrigin, Level, option_called

__all__ = [
    "CONFIG_SUFFIXES",
    "document_among",
    "file_among",
    "ignore_words",
    "merge_arguments",
    "open_document",
    "read_as",
    "read_negations",
]

_CONFIG_KEYS = ("config", "config_file", "cfg", "config_path")
CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def file_among(arguments: dict[str, Any], positionals: list[str]) -> tuple[str | None, str]:
    """The configuration file among a program's arguments."""
    for key in _CONFIG_KEYS:
        value = arguments.get(key)
        if isinstance(value, str) and value.lower().endswith(CONFIG_SUFFIXES):
            arguments.pop(key)
            return value, f"command: --{key}"
    for word in positionals:
        if word.lower().endswith(CONFIG_SUFFIXES):
            positionals.remove(word)
            return word, f"command: {word}"
    return None, ""


def open_document(file: str, origin: str) -> tuple[dict[str, Any], Path]:
    """The document of a file that the command names, and its folder."""
    path = find_file(file, folder=None, origin=origin)
    return read_document(path, file), path.parent


def document_among(
    arguments: dict[str, Any], positionals: list[str]
) -> tuple[dict[str, Any], str, Path | None]:
    """The document that a program's arguments name, its name, and its folder; else nothing."""
    file, origin = file_among(arguments, positionals)
    if file is None:
        return {}, "command", None
    document, folder = open_document(file, origin)
    return document, file, folder


def merge_arguments(
    document: Mapping[str, Any], arguments: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, KeyOrigin]]:
    """A file's document with what the command line changes, and where that stands."""
    out = dict(document)
    origins: dict[str, KeyOrigin] = {}
    for values, mark in ((arguments, "--"), (overrides, "")):
        for key, value in values.items():
            origins[key] = KeyOrigin(f"command: {mark}{key}", Level.COMMAND)
            if "." not in key:
                out[key] = value
                continue
            section = out
            for part in key.split(".")[:-1]:
                subsection = section.get(part)
                section[part] = dict(subsection) if isinstance(subsection, Mapping) else {}
                section = section[part]
            section[key.rpartition(".")[2]] = value
    return out, origins


def read_negations(arguments: dict[str, Any]) -> dict[str, Any]:
    """``--no_flag`` of HfArgumentParser."""
    out: dict[str, Any] = {}
    for key, value in arguments.items():
        name = key.removeprefix("no_")
        is_option = option_called(name) or name in IGNORED_KEYS or name in UNMODELLED_KEYS
        out[name if name != key and is_option and value is True else key] = (
            False if name != key and is_option and value is True else value
        )
    return out


def ignore_words(keys: DocumentKeys, words: Iterable[str]) -> None:
    """Loose words that mean nothing."""
    for word in words:
        keys.ignore(word, "memest does not know it")


def read_as(
    file_format: FileFormat,
    document: dict[str, Any],
    origins: dict[str, KeyOrigin],
    source: str,
    folder: Path | None,
    read: Callable[[DocumentKeys], None] | None = None,
) -> DocumentReading:
    """What a document says in a format, with what the command line changed in it.

    Raises:
        ConfigError: a value that cannot be.
    """
    level = Level.COMMAND if source == "command" else Level.FILE
    part = DocumentKeys(
        document,
        source=source,
        framework=file_format.title,
        origins=origins,
        folder=folder,
        level=level,
    )
    (read or file_format.read)(part)
    return part.reading()
