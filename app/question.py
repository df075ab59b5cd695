"""What the explorer asks: a model and options, and the same in the words of other faces.

A question is spelt in three ways: options of ``memest.estimate``, a command line, and a short text
that fits into a URL (the syntax of ``memest compare --vs`` behind the model's name).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError
from memest.option_table import OPTIONS, Kind, Option
from memest.options import find_option, setup_from_options
from memest.search.compare import read_scenario
from memest.setup import Setup

__all__ = ["PLACE", "Question"]

PLACE = ("gpu", "gpu_memory", "device_context", "profile")
"""Options that are arguments of an estimate and no part of the training setup."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        model: the reference, as ``memest estimate`` takes it.
        options: what was given, by the options' keywords, in the order of the table.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any]) -> Question:
        """A question from options in any order; what is None was not given."""
        names = [option.name for option in OPTIONS]
        given = ((name, options[name]) for name in names if options.get(name) not in (None, ()))
        return cls(model, tuple(given))

    @property
    def setup(self) -> Setup:
        """The training setup.

        Raises:
            ConfigError: the options contradict each other.
        """
        own = {name: value for name, value in self.options if name not in PLACE}
        return setup_from_options(**own)

    @property
    def where(self) -> dict[str, Any]:
        """GPU, memory, context and calibration profile, as far as they were given."""
        return {name: value for name, value in self.options if name in PLACE}

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that were named."""
        return tuple(dict(self.options).get("gpu", ()))

    def without(self, *names: str) -> Question:
        """The question without some options."""
        return Question(self.model, tuple(item for item in self.options if item[0] not in names))

    def with_options(self, **changes: Any) -> Question:
        """The question with some options changed."""
        return Question.of(self.model, {**dict(self.options), **changes})

    def words(self, command: str) -> list[str]:
        """The command line, word by word."""
        found = ["memest", command, self.model]
        for name, value in self.options:
            found += _words(find_option(name), value)
        return found

    def command_line(self, command: str = "estimate") -> str:
        """The command line as a shell takes it."""
        return shlex.join(self.words(command))

    def snippet(self) -> str:
        """The Python that asks the same."""
        lines = [f"    {self.model!r},"]
        for name, value in self.options:
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(f"    {name}={shown!r},")
        body = "\n".join(lines)
        return (
            f"import memest\n\nanswer = memest.estimate(\n{body}\n)\n"
            "print(answer)\nanswer.peak.device_bytes, answer.verdict"
        )

    def short(self) -> str:
        """The question as one line of text: the model, then a scenario."""
        words = [shlex.quote(self.model)]
        for name, value in self.options:
            first = value[0] if isinstance(value, tuple) else value
            spelt = find_option(name).flags[0].removeprefix("--")
            if isinstance(first, bool):
                words.append(spelt if first else f"no-{spelt}")
            else:
                words.append(shlex.quote(f"{spelt}={first}"))
        return " ".join(words)

    @classmethod
    def from_short(cls, text: str) -> Question:
        """Read what :meth:`short` wrote.

        Raises:
            ConfigError: a word that is no option.
        """
        try:
            model, *words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{text!r} cannot be read as a scenario: {error}.") from None
        if not words:
            return cls(model)
        found = read_scenario(shlex.join(words))
        for name, value in found.items():
            if find_option(name).kind is Kind.LIST:
                found[name] = (value,)
        return cls.of(model, found)


def _words(option: Option, value: Any) -> list[str]:
    flag = option.flags[0]
    if option.kind is Kind.LIST:
        return [word for each in value for word in (flag, str(each))]
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)]
