"""The sheet a reader fills in: it takes keys from a document and says what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.option import Kind, Option
from memest.option_table import OPTIONS
from memest.readers.findings import Level, Reading, Remark, Said

__all__ = ["Place", "Sheet", "names_of", "option_called"]

_NOT_FROM_FILES = frozenset(
    """software loop num_steps task freeze lengths dataset tokenizer dataset_column padding
    data_seed length_steps generate""".split()
)
"""Options that other tools mean something else by: a dataset is a name there, not a file."""
_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}


def option_called(keyword: str) -> Option | None:
    """The option of a setup with this name, if there is one today."""
    for option in OPTIONS:
        if keyword in option.keywords and option.field and option.name not in _NOT_FROM_FILES:
            return option
    return None


def names_of(value: Any, origin: str, *, split: bool = False) -> tuple[str, ...]:
    """Names as a list, or as one word.

    Args:
        value: as written.
        origin: of it, for the message.
        split: commas part the word.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, str):
        parts = value.split(",") if split else [value]
        return tuple(part.strip() for part in parts if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(each, (str, int)) for each in value):
        return tuple(str(each) for each in value)
    raise ConfigError(f"{origin} {value!r} is neither a name nor a list of names.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key stands.

    Attributes:
        origin: ``run.yaml:bf16`` or ``command: --bf16``.
        level: of a file or of a command.
    """

    origin: str
    level: Level


class Sheet:
    """One document, or the part of one that a reader is given.

    Args:
        document: keys and values.
        source: how to call it: a file's name, or ``command``.
        framework: whose format it is.
        places: where single keys come from, for those that the command line changed.
        folder: where the file lies, for files that it names.
        prefix: of the keys, for a part of a document: ``fsdp_config.``.
        level: of keys that ``places`` does not have.
    """

    def __init__(
        self, document: Mapping[str, Any], *, source: str, framework: str,
        places: Mapping[str, Place] | None = None, folder: Path | None = None, prefix: str = "",
        level: Level = Level.FILE,
    ) -> None:  # fmt: skip
        self.document = dict(document)
        self.source = source
        self.framework = framework
        self.folder = folder
        self.samples_per_step: tuple[int, str] | None = None
        self._places = dict(places or {})
        self._prefix = prefix
        self._level = level
        self._left = dict(document)
        self._said: list[Said] = []
        self._ignored: list[Remark] = []
        self._missed: list[Remark] = []

    # -- looking

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is dealt with by that."""
        return self._left.pop(key, default)

    def has(self, key: str) -> bool:
        """Whether the document names a key and gives it a value."""
        return self.document.get(key) is not None

    def replace(self, key: str, value: Any) -> None:
        """Another value for a key: what it stands for."""
        self.document[key] = self._left[key] = value

    @property
    def left(self) -> dict[str, Any]:
        """Keys that nobody took yet."""
        return dict(self._left)

    def place(self, key: str) -> Place:
        """Where a key stands."""
        full = f"{self._prefix}{key}"
        found = self._places.get(full) or self._places.get(full.partition(".")[0])
        if found is not None:
            return found
        mark = ":"
        if self.source == "command":
            mark = ": " if self.framework == "launch command" else ": --"
        return Place(f"{self.source}{mark}{full}", self._level)

    def switch(self, key: str) -> bool | None:
        """A key that is true or false, None where it is not there.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in ("none", "null"):
            return None
        if word not in _WORDS:
            raise ConfigError(f"{self.place(key).origin} {value!r} is neither true nor false.")
        return _WORDS[word]

    def whole(self, key: str) -> int | None:
        """A key that is a whole number, None where it is not there.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(key)
        if value is None:
            return None
        text = str(value).strip()
        if isinstance(value, bool) or not text.lstrip("-").isdigit() or len(text) > 18:
            raise ConfigError(f"{self.place(key).origin} {value!r} is not a whole number.")
        return int(text)

    def scalar(self, key: str) -> Any:
        """A key that is one word or number, None where it is not there.

        Raises:
            ConfigError: it is a list or a mapping.
        """
        value = self.take(key)
        if isinstance(value, (Mapping, list, tuple, set)):
            raise ConfigError(f"{self.place(key).origin} {value!r} is not one word or number.")
        return value

    def part(self, key: str) -> Sheet:
        """A mapping inside the document as a sheet of its own; empty where there is none.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{self.place(key).origin} {value!r} is no mapping of names to values."
            )
        return Sheet(
            {str(k): v for k, v in value.items()}, source=self.source, framework=self.framework,
            places=self._places, folder=self.folder, prefix=f"{self._prefix}{key}.",
            level=self.place(key).level,
        )  # fmt: skip

    # -- saying

    def say(self, option: str, value: Any, key: str, *, checked: bool = False) -> None:
        """A value of an option, from a key."""
        place = self.place(key)
        self.say_at(option, value, place, checked=checked)

    def say_at(self, option: str, value: Any, place: Place, *, checked: bool = False) -> None:
        """A value of an option, from a place."""
        self._said.append(Said(option, value, place.origin, place.level, self.framework, checked))

    def default(self, option: str, value: Any, why: str = "") -> None:
        """A value that the framework takes where nobody says anything."""
        origin = f"default of {self.framework}" + (f" ({why})" if why else "")
        self._said.append(Said(option, value, origin, Level.DEFAULT, self.framework))

    def said(self, option: str) -> Any:
        """What counts of what was said of an option, None for nothing."""
        found = [said for said in reversed(self._said) if said.option == option]
        return max(found, key=lambda said: said.level).value if found else None

    def has_missed(self, key: str) -> bool:
        """Whether a key was noted as not modelled."""
        origin = self.place(key).origin
        return any(remark.key == origin for remark in self._missed)

    def ignore(self, key: str, why: str) -> None:
        """A key that does not matter."""
        self._ignored.append(Remark(self.place(key).origin, why))

    def miss(self, key: str, what: str) -> None:
        """A key that matters and is not modelled."""
        self._missed.append(Remark(self.place(key).origin, what))

    def miss_default(self, key: str, what: str) -> None:
        """Something that a framework does unasked, and that is not modelled."""
        self._missed.append(Remark(f"default of {self.framework}: {key}", what))

    def offer(self, keyword: str, value: Any, key: str, otherwise: str) -> None:
        """A value for an option that memest may have; without it, what that means is noted."""
        option = option_called(keyword)
        if option is None:
            self.miss(key, otherwise)
        else:
            self.say(option.name, value, key)

    def offer_rest(self) -> None:
        """Every key left that has the name of an option is a value of it."""
        for key, value in self.left.items():
            option = option_called(key)
            if option is None:
                continue
            self.take(key)
            if value is None:
                self.ignore(key, "not set")
            elif option.kind is Kind.SWITCH and value is False:
                self.ignore(key, "off")
            else:
                self.say(option.name, value, key)

    def ignore_rest(self, reasons: Mapping[str, str], matters: Mapping[str, str]) -> None:
        """What becomes of the keys left.

        Args:
            reasons: why a key does not matter.
            matters: what of a key is not modelled; it does so only where it is set.
        """
        for key, value in self.left.items():
            self.take(key)
            if key in matters:
                if value in (None, False, 0, "", "no") or value in ([], {}):
                    self.ignore(key, "off")
                else:
                    self.miss(key, matters[key])
            else:
                self.ignore(key, reasons.get(key, "memest does not know it"))

    def absorb(self, other: Sheet) -> None:
        """Take over what a part's sheet has."""
        self._said += other._said
        self._ignored += other._ignored
        self._missed += other._missed
        self.samples_per_step = self.samples_per_step or other.samples_per_step

    def reading(self) -> Reading:
        """What was found."""
        return Reading(
            source=self.source, format=self.framework, said=tuple(self._said),
            ignored=tuple(self._ignored), not_modelled=tuple(self._missed),
            samples_per_step=self.samples_per_step,
        )  # fmt: skip
