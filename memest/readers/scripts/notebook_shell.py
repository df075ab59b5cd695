"""What a notebook has a shell do: ``!torchrun train.py``, cells of bash, ``%env`` - as one text.

Source: IPython 9 ``core/inputtransformer2.py`` (``!``, ``!!``, ``name = !command``) and
``core/interactiveshell.py`` (``var_expand``: names of Python in ``{name}`` and ``$name``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memest.errors import ConfigError
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.follow import follow
from memest.readers.scripts.source import parse_script

__all__ = ["NotebookShell", "shell_of", "written_files"]

_COMMAND = re.compile(r"\s*(?:[\w, ]+=\s*)?!!?(?!=)\s*(.*)")
_VARIABLE = re.compile(r"\s*%(?:set_)?env\s+(\w+)\s*[=\s]\s*(.*?)\s*$")
_CELLS = re.compile(r"%%(?:bash|sh|script\s+(?:bash|sh))\b")
_WRITES = re.compile(r"%%(?:writefile|file)\s+([\w./-]+)")
_NAMES = re.compile(r"\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class NotebookShell:
    """The commands of a notebook.

    Attributes:
        text: as a shell script, a line for each line of its cells.
        environment: variables that its Python sets.
        places: what its lines are called.
    """

    text: str
    environment: Mapping[str, str]
    places: tuple[str, ...]

    def place(self, line: int) -> str:
        """Where a line of the text stands in the notebook."""
        return self.places[line - 1] if 0 < line <= len(self.places) else f"line {line}"


def shell_of(path: Path, label: str) -> NotebookShell | None:
    """The commands of a notebook, with the plain values of its Python in them; None for none.

    Args:
        path: of the notebook.
        label: how messages call it.

    Raises:
        ConfigError: it cannot be read.
    """
    source = parse_script(path, label)
    values: dict[str, str] = {}
    environment: dict[str, str] = {}
    try:
        follower = follow(source, CommandLine())
    except ConfigError:
        pass  # what its Python says stays as it is written
    else:
        plain = (str, int, float)
        own = follower.names.own
        values = {name: str(v.data) for name, v in own.items() if isinstance(v.data, plain)}
        for call in follower.calls:
            given = [each.data for each in call.arguments]
            if call.path == "os.environ[]" and all(isinstance(each, plain) for each in given):
                environment[str(given[0])] = str(given[1])
    lines: list[str] = []
    places: list[str] = []
    for number, text in source.texts:
        found = _commands(text)
        lines += [_NAMES.sub(lambda m: values.get(m[1] or m[2], m[0]), line) for line in found]
        places += [f"cell {number}, line {place}" for place in range(1, len(found) + 1)]
    if not any(lines):
        return None
    return NotebookShell("\n".join(lines), environment, tuple(places))


def written_files(path: Path, label: str) -> dict[str, str]:
    """What cells of a notebook write to files (``%%writefile``), by name.

    Args:
        path: of the notebook.
        label: how messages call it.
    """
    out: dict[str, str] = {}
    for _, text in parse_script(path, label).texts:
        first, _, rest = text.lstrip().partition("\n")
        if (found := _WRITES.fullmatch(first.strip())) is not None:
            out[found[1].removeprefix("./")] = rest
    return out


def _commands(text: str) -> list[str]:
    """The lines of a cell as a shell has them; what is Python is an empty line."""
    lines = text.split("\n")
    if text.lstrip().startswith("%%"):
        if _CELLS.match(text.lstrip()):
            return ["", *lines[1:]]
        if not text.lstrip().startswith(("%%capture", "%%time")):
            return [""] * len(lines)  # a file that is written, or another language
    out: list[str] = []
    goes_on = False
    for line in lines:
        command, variable = _COMMAND.match(line), _VARIABLE.match(line)
        if goes_on:
            out.append(line)
        elif command:
            out.append(command[1])
        elif variable:
            out.append(f"export {variable[1]}={shlex.quote(variable[2])}")
        else:
            out.append("")
        goes_on = bool(out[-1]) and line.endswith("\\")
    return out
