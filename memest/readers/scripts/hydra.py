"""Hydra: the settings that a function is given, composed of files and of a command's words.

Source: Hydra 1.3 ``_internal/defaults_list.py`` and ``_internal/config_loader_impl.py``: the
defaults in their order with ``_self_`` behind them unless it is named, groups under their own
names unless a package is said, words of the command last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from memest.errors import ConfigError
from memest.readers.documents import parse_document, read_source
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.settings_files import merged, overrides_of
from memest.readers.scripts.things import Call, Settings, Unknown, Value

__all__ = ["compose"]

_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_NOT_READ = ("-m", "--multirun", "-cp", "--config-path", "-cd", "--config-dir")
_MOST_FILES = 200


class _UnclearError(Exception):
    """Settings that cannot be told, with why."""


class _File(NamedTuple):
    """A file among the defaults.

    Attributes:
        name: in the folder of settings, without its suffix.
        group: the folder that it is in.
        package: where its entries go, with dots; empty for the top.
    """

    name: str
    group: str
    package: str


def compose(call: Call, folder: Path | None, line: CommandLine) -> Value:
    """The settings that ``@hydra.main(config_path="conf", config_name="train")`` gives a function.

    Args:
        call: the decorator.
        folder: of the script.
        line: the words of the command.
    """
    path, name = call.argument(0, "config_path"), call.argument(1, "config_name")
    place = "." if path is None else path.data
    told = isinstance(place, str) and name is not None and isinstance(name.data, str)
    if not told or name is None or ".." in PurePosixPath(str(place)).parts[1:]:
        return Value(Unknown("the settings of Hydra", call.line))
    root = (folder or Path()) / str(place)
    config = PurePosixPath(str(_argument(line, "--config-name", "-cn") or name.data))
    try:
        composed = _Composer(root, line).whole(str(config.with_suffix("")))
    except (_UnclearError, ConfigError) as error:
        return Value(Unknown(f"the settings of Hydra: {str(error).rstrip('.')}", call.line))
    return Value(composed)


def _argument(line: CommandLine, *flags: str) -> str | None:
    """The value of one of Hydra's own arguments."""
    words = line.words or ()
    for place, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag in flags:
            line.words_taken.add(flag.lstrip("-").replace("-", "_"))
            return text if equals else "".join(words[place + 1 : place + 2]) or None
    return None


class _Composer:
    """Composes the files of a folder."""

    def __init__(self, root: Path, line: CommandLine) -> None:
        self._root = root
        self._line = line
        self._num_files = 0
        self._choices: dict[str, Any] = {}

    def whole(self, name: str) -> Settings:
        """The settings, with the command's words over them and references followed."""
        words: list[str] = []
        more: list[tuple[str, str]] = []
        for word in self._line.words or ():
            key, equals, text = word.partition("=")
            if word.startswith("~") or key in _NOT_READ:
                raise _UnclearError(f"what {word} makes of them")
            if not equals or word.startswith("-"):
                continue
            group, _, _ = key.lstrip("+~").partition("@")
            if not (self._root / group).is_dir():
                words.append(word)
                continue
            self._line.words_taken.add(group.split(".")[0])
            if key.startswith("+"):
                more.append((group, text))
            else:
                self._choices[group] = text
        tops = [_File(name, "", "")]
        tops += [_File(f"{group}/{each}", group, group.replace("/", ".")) for group, each in more]
        before: dict[str, Any] | None = None
        while before != self._choices:  # a file that is chosen may choose others
            before = dict(self._choices)
            files = list(chain.from_iterable(map(self._files, tops)))
        out = Settings()
        for file, own in files:
            document = own
            for key in reversed([each for each in file.package.split(".") if each]):
                document = {key: document}
            out = merged(out, document)
        out = merged(out, overrides_of(words, self._line))
        whole: Settings = _resolved(out, out)
        return whole

    def _files(self, file: _File) -> Iterator[tuple[_File, dict[str, Any]]]:
        """The files in the order in which they are laid over each other."""
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise _UnclearError("more files than anybody has")
        document, package = self._read(file)
        file = file if package is None else file._replace(package=package)
        defaults = document.get("defaults", [])
        if not isinstance(defaults, list):
            raise _UnclearError(f"the defaults of {file.name}")
        own = {key: value for key, value in document.items() if key != "defaults"}
        seen_self = False
        for entry in defaults:
            if entry == "_self_":
                seen_self = True
                yield file, own
            else:
                for each in self._of_entry(entry, file):
                    yield from self._files(each)
        if not seen_self:
            yield file, own

    def _of_entry(self, entry: Any, file: _File) -> Iterator[_File]:
        """The files that one of the defaults stands for."""
        if isinstance(entry, str):
            name, _, package = entry.partition("@")
            group = f"{file.group}/" if file.group and not name.startswith("/") else ""
            path = f"{group}{name.lstrip('/')}"
            inner = str(PurePosixPath(path).parent).replace("/", ".").strip(".")
            yield _File(path, str(PurePosixPath(path).parent).strip("."), package or inner)
            return
        if not isinstance(entry, Mapping) or len(entry) != 1:
            raise _UnclearError(f"a default of {file.name}")
        key, option = next((str(k), v) for k, v in entry.items())
        *marks, named = key.split()
        group, _, package = named.partition("@")
        absolute = group.startswith("/") or not file.group
        group = group.lstrip("/") if absolute else f"{file.group}/{group}"
        if "override" in marks:
            self._choices.setdefault(group, option)
            return
        option = self._choices.get(group, option)
        for each in option if isinstance(option, list) else [option]:
            if each in (None, "null"):
                continue
            if not isinstance(each, str) or "${" in each or each == "???":
                raise _UnclearError(f"{group} of {file.name}")
            if "optional" in marks and self._path(f"{group}/{each}") is None:
                continue
            if group.startswith("hydra/"):
                continue  # how Hydra logs and starts
            where = {"_global_": "", "": group.replace("/", ".")}.get(package, package)
            each = each.removesuffix(".yaml")
            yield _File(f"{group}/{each}", group, where)

    def _path(self, name: str) -> Path | None:
        if ".." in PurePosixPath(name).parts:
            return None
        path = self._root / f"{name}.yaml"
        return path if path.is_file() else None

    def _read(self, file: _File) -> tuple[dict[str, Any], str | None]:
        """The document of a file, and the package that its first lines name."""
        path = self._path(file.name)
        if path is None:
            raise _UnclearError(f"no file {file.name}.yaml")
        text = read_source(path, path.name)
        found = next(filter(None, map(_PACKAGE.match, text.splitlines()[:5])), None)
        package = None if found is None else found[1]
        is_empty = not re.sub(r"#.*", "", text).strip(" \n\t-{}")
        document = {} if is_empty else parse_document(text, path, path.name)
        named = {"_global_": "", "_group_": file.group.replace("/", ".")}
        return document, None if package is None else named.get(package, package)


def _resolved(data: Any, whole: Mapping[str, Any], depth: int = 0) -> Any:
    """Settings whose references to other entries are followed, as far as they can be told."""
    if isinstance(data, Mapping):
        out = Settings({key: _resolved(value, whole, depth) for key, value in data.items()})
        out.given |= getattr(data, "given", {})
        return out
    if isinstance(data, list):
        return [_resolved(value, whole, depth) for value in data]
    if data == "???":
        return Unknown("???, which the command must say")
    if not isinstance(data, str) or "${" not in data or depth > 10:
        return data
    match = _REFERENCE.fullmatch(data)
    found: Any = whole
    for key in match[1].split(".") if match else ():
        found = found.get(key) if isinstance(found, Mapping) else None
    return _resolved(found, whole, depth + 1) if match and found is not None else Unknown(data)
