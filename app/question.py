"""What the explorer asks: a model and options, and the same in the words of other faces."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memest.config.option import Kind
from memest.config.option_table import OPTIONS, PLACE
from memest.config.options import find_option, setup_from_options
from memest.config.setup import Setup
from memest.config.spelling import command_words, python_snippet, read_scenario, write_scenario
from memest.errors import ConfigError

__all__ = ["ExplorerQuestion"]


@dataclass(frozen=True, slots=True)
class ExplorerQuestion:
    """One question.

    Attributes:
        model: the reference, as ``memest estimate`` takes it.
        options: what was given, by the options' keywords, in the order of the table.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any]) -> ExplorerQuestion:
        """A question from options in any order; what is None was not given."""
        names = [option.name for option in OPTIONS]
        items = ((name, options[name]) for name in names if options.get(name) not in (None, ()))
        return cls(model, tuple(items))

    @property
    def setup(self) -> Setup:
        """The training setup.

        Raises:
            ConfigError: the options contradict each other.
        """
        setup_options = {name: value for name, value in self.options if name not in PLACE}
        return setup_from_options(**setup_options)

    @property
    def place(self) -> dict[str, Any]:
        """GPU, memory, context and calibration, as far as they were given."""
        return {name: value for name, value in self.options if name in PLACE}

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that were named."""
        return tuple(dict(self.options).get("gpu", ()))

    def without(self, *names: str) -> ExplorerQuestion:
        """The question without some options."""
        return ExplorerQuestion(
            self.model, tuple(item for item in self.options if item[0] not in names)
        )

    def with_options(self, **changes: Any) -> ExplorerQuestion:
        """The question with some options changed."""
        return ExplorerQuestion.of(self.model, {**dict(self.options), **changes})

    def words(self, command: str) -> list[str]:
        """The command line, word by word."""
        return command_words(command, self.model, dict(self.options))

    def command_line(self, command: str = "estimate") -> str:
        """The command line as a shell takes it."""
        return shlex.join(self.words(command))

    def snippet(self) -> str:
        """The Python that asks the same."""
        return python_snippet(self.model, dict(self.options))

    def short(self) -> str:
        """The question as one line of text: the model, then a scenario."""
        return f"{shlex.quote(self.model)} {write_scenario(dict(self.options))}".rstrip()

    @classmethod
    def from_short(cls, text: str) -> ExplorerQuestion:
        """Read what :meth:`short` wrote.

        Raises:
            ConfigError: a word that is no option.
        """
        try:
            model, *words = shlex.split(text) or [""]
        except ValueError as error:
            raise ConfigError(f"{text!r} cannot be read as a scenario: {error}.") from None
        if not words:
            return cls(model)
        options = read_scenario(shlex.join(words))
        for name, value in options.items():
            if find_option(name).kind is Kind.LIST and not isinstance(value, tuple):
                options[name] = (value,)
        return cls.of(model, options)
