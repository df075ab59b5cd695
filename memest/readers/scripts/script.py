"""A training script or a notebook as readings: its calls by the readers that know their arguments.

The keyword arguments of ``TrainingArguments`` and ``SFTConfig`` are keys of the formats of those
names, those of ``LoraConfig`` of peft's file, those of ``from_pretrained`` and of a loop's calls
are options by their own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memest.readers.effects import OPTIONS_OF_4BIT, OPTIONS_OF_LORA
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.follow import follow
from memest.readers.scripts.found import Found, find
from memest.readers.scripts.loading import read_adapter, read_loading
from memest.readers.scripts.loop import read_loop
from memest.readers.scripts.remarks import read_remarks
from memest.readers.scripts.source import parse_script
from memest.readers.scripts.trainer import read_trainer
from memest.readers.values import DocumentReading, Level

__all__ = ["Script", "read_script"]


_WHOLES = {
    "adapter": frozenset(("peft", *OPTIONS_OF_LORA)),
    "quantization": frozenset(("load_in_4bit", "load_in_8bit", *OPTIONS_OF_4BIT)),
}
"""Configurations that a script makes, and what of them its arguments may name as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that trains.

    Attributes:
        found: what it holds.
        line: arguments that it is given.
    """

    found: Found
    line: CommandLine

    def reading(self) -> DocumentReading:
        """What its calls say; of one option, what is done last to the model.

        Raises:
            ConfigError: a value that cannot be.
        """
        parts: list[DocumentReading] = []
        first = read_trainer if self.found.trainer is not None else read_loop
        for read in (first, read_loading, read_adapter, read_remarks):
            part, used = read(self.found)
            parts.append(part)
            self.line.use(used)
        values = [value for part in parts for value in part.values]
        last = {value.option: value for value in values if value.level is not Level.DEFAULT}
        for whole, parts_of_it in _WHOLES.items():
            if whole in last:
                last = {name: each for name, each in last.items() if name not in parts_of_it}
        defaults = [value for value in values if value.level is Level.DEFAULT]
        return DocumentReading(
            source=self.found.source.name,
            format=parts[0].format,
            values=(*defaults, *last.values()),
            ignored=tuple(remark for part in parts for remark in part.ignored),
            not_modelled=tuple(remark for part in parts for remark in part.not_modelled),
            samples_per_step=parts[0].samples_per_step,
        )


def read_script(path: Path, label: str, line: CommandLine | None = None) -> Script:
    """Follow a script and find what trains in it.

    Args:
        path: of a ``.py`` or ``.ipynb``.
        label: how messages call it.
        line: the words behind its name in a launch command.

    Raises:
        ConfigError: it cannot be read, or trains nothing.
    """
    words = line or CommandLine()
    source = parse_script(path, label)
    return Script(found=find(follow(source, words), source), line=words)
