"""What the explorer asks: a model and options, and the same in the words of other faces."""

from __future__ import annotations

import contextlib
import enum
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memest.catalog.gpu_counts import split_gpu_counts
from memest.catalog.gpus import find_gpu, plain_name
from memest.config.merging import implied_options
from memest.config.option import Kind, Option, Panel
from memest.config.option_table import OPTIONS, PLACE
from memest.config.options import read_bool, read_whole, setup_from_options
from memest.config.setup import Setup
from memest.config.spelling import command_words, python_snippet, read_scenario, write_scenario
from memest.errors import ConfigError, UnknownGpuError

__all__ = ["METHODS", "ExplorerQuestion", "default_of"]

METHODS = ("Full", "LoRA", "QLoRA")
"""What trains: all weights, or adapters, beside a base of 4 bits or not."""
_RANK = 16
_OF_ADAPTERS = tuple(
    option.name for option in OPTIONS if option.panel in (Panel.ADAPTERS, Panel.QUANTIZATION)
)
_MAKES_ADAPTERS = ("adapter", "peft", "lora_r", "use_dora", "use_rslora", "num_virtual_tokens")
_PRECISIONS = ("fp16", "bf16")
_UPLOAD_MARK = "#"


def default_of(option: Option) -> Any:
    """The value of an option that was not given, as text or a number; None where there is none."""
    setup = Setup()
    owner = setup.distributed if option.field == "distributed" else setup
    value = getattr(owner, option.name if owner is not setup else option.field, None)
    return value.value if isinstance(value, enum.Enum) else value


def _plain(option: Option, value: Any) -> Any:
    """A value in the type that widgets have for it; None where that is what is meant anyway."""
    if value in (None, (), "", []):
        return None
    if option.kind is Kind.LIST:
        return (value,) if isinstance(value, str) else tuple(value)
    if option.kind is Kind.WHOLE:
        value = read_whole(option.flags[0], value)
    elif option.kind is Kind.NUMBER:
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{option.flags[0]} {value!r} is not a number.") from None
    elif option.kind is Kind.SWITCH:
        value = read_bool(option.flags[0], value) or None
    elif option.kind is Kind.EITHER:
        return read_bool(option.flags[0], value)
    return None if value == default_of(option) else value


@dataclass(frozen=True, slots=True)
class ExplorerQuestion:
    """One question.

    Attributes:
        model: the reference, as ``memest estimate`` takes it; of an upload the name of its file.
        options: what was given, by the options' keywords, in the order of the table.
        upload: of an upload, the name of the copy that was kept; empty for other models.
        implied: those options that nobody gave: others imply them, and they go with these.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    upload: str = ""
    implied: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any], upload: str = "") -> ExplorerQuestion:
        """A question from options in any order; what is None, or the default, was not given.

        Raises:
            ConfigError: a value that is no number, where one belongs; names of GPUs that say
                another number of them than an option.
        """
        given = split_gpu_counts(options)
        named = [precision for precision in _PRECISIONS if given.get(precision)]
        if len(named) == 1 and given.get("precision") in (None, *named):
            given["precision"] = named[0]
            given.pop(named[0])
        # any other pair contradicts itself: both stay, and the answer says so
        items, unasked = [], set()
        # what others imply is shown, and can be chosen away
        implied = implied_options(given)
        for option in OPTIONS:
            value = _plain(option, given.get(option.name))
            if value is None and option.name in implied:
                is_named = given.get(option.name) is not None
                value = default_of(option) if is_named else implied[option.name]
                if not is_named:
                    unasked.add(option.name)
            if value is not None:
                items.append((option.name, value))
        return cls(model, tuple(items), upload, frozenset(unasked))

    @property
    def given(self) -> dict[str, Any]:
        """The options without those that others imply."""
        return {name: value for name, value in self.options if name not in self.implied}

    def check_values(self) -> None:
        """See to it that each value is legal.

        Raises:
            ConfigError: one is not.
        """
        assert self.setup

    @property
    def method(self) -> str:
        """Which of :data:`METHODS` it asks about."""
        names = {name for name, _ in self.options}
        if "qlora" in names:
            return "QLoRA"
        return "LoRA" if names.intersection(_MAKES_ADAPTERS) else "Full"

    def with_method(self, method: str) -> ExplorerQuestion:
        """The question about another of :data:`METHODS`."""
        if method == self.method:
            return self
        if method == "Full":
            return self.without(*_OF_ADAPTERS)
        rank = dict(self.options).get("lora_r", _RANK)
        changes: dict[str, Any] = {"lora_r": rank, "qlora": method == "QLoRA" or None}
        return self.with_options(**changes)

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
        """The question without some options; what others imply for them is what is meant then."""
        given = {name: value for name, value in self.given.items() if name not in names}
        return ExplorerQuestion.of(self.model, given, self.upload)

    def with_options(self, **changes: Any) -> ExplorerQuestion:
        """The question with some options changed."""
        return ExplorerQuestion.of(self.model, {**self.given, **changes}, self.upload)

    def with_gpu(self, name: str) -> ExplorerQuestion:
        """The question about one GPU, as somebody types it; empty for none.

        A number that stands with the card takes the place of the number of GPUs before.
        """
        changes: dict[str, Any] = {}
        with contextlib.suppress(UnknownGpuError):  # said by the answer
            if name:
                plain, count = plain_name(name)
                name = find_gpu(plain).slug
                changes = {} if count is None else {"num_gpus": count}
        return self.with_options(gpu=(name,) if name else (), **changes)

    def words(self, command: str) -> list[str]:
        """The command line, word by word."""
        return command_words(command, self.model, self.given)

    def command_line(self, command: str = "estimate") -> str:
        """The command line as a shell takes it."""
        return shlex.join(self.words(command))

    def snippet(self) -> str:
        """The Python that asks the same."""
        return python_snippet(self.model, self.given)

    def short(self) -> str:
        """The question as one line of text: the model, then a scenario."""
        model = f"{self.model}{_UPLOAD_MARK}{self.upload}" if self.upload else self.model
        return f"{shlex.quote(model)} {write_scenario(self.given)}".rstrip()

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
        model, _, upload = model.partition(_UPLOAD_MARK)
        return cls.of(model, read_scenario(shlex.join(words)) if words else {}, upload)
