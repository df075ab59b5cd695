"""What becomes of the keys of a document: a table for each framework, and who keeps account.

Every key is a value of an option, ignored with why, or not modelled with what it would add.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memest.config.option import Kind
from memest.errors import ConfigError
from memest.readers.values import (
    UNKNOWN,
    DocumentReading,
    KeyOrigin,
    Level,
    ReadValue,
    Remark,
    Saving,
    StepSize,
    option_called,
)

__all__ = [
    "DocumentKeys",
    "Key",
    "KeyTable",
    "by_key",
    "read_part",
    "read_table",
]

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}


_ADDING = frozenset(
    "dpo grpo ppo orpo kto cpo reward rewards vllm teacher critic judge ref reference".split()
)
"""Words that speak of further models, or of further sequences."""
_SAVING = (
    "lora peft adapter 4bit 8bit quant fsdp deepspeed parallel checkpointing offload freeze".split()
)
"""What speaks of a training that takes less than that of all weights on one GPU."""


def _weight_of(key: str) -> type[str] | None:
    """The kind of remark that an unknown key deserves; None for one that is merely ignored."""
    name = key.lower().replace("-", "_")
    if _ADDING & set(name.split("_")):
        return str
    return Saving if any(word in name for word in _SAVING) else None


@dataclass(kw_only=True)
class DocumentKeys:
    """One document, or the part of one that a reader is given.

    Attributes:
        document: keys and values.
        source: how to call it: a file's name, or ``command``.
        framework: whose format it is.
        origins: where single keys come from, for those that the command line changed.
        folder: where the file lies, for files that it names.
        prefix: of the keys, for a part of a document: ``fsdp_config.``.
        level: of keys that ``origins`` does not have.
        samples_per_step: samples of an optimizer step over all GPUs.
    """

    document: dict[str, Any] = field(kw_only=False)
    source: str
    framework: str
    origins: Mapping[str, KeyOrigin] = field(default_factory=dict)
    folder: Path | None = None
    prefix: str = ""
    level: Level = Level.FILE
    samples_per_step: StepSize | None = None

    def __post_init__(self) -> None:
        self.document = dict(self.document)
        self._remaining = dict(self.document)
        self._values: list[ReadValue] = []
        self._ignored: list[Remark] = []
        self._not_modelled: list[Remark] = []

    # -- what is there

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is dealt with by that."""
        return self._remaining.pop(key, default)

    def has(self, key: str) -> bool:
        """Whether the document names a key and gives it a value."""
        return self.document.get(key) is not None

    def replace(self, key: str, value: Any) -> None:
        """Another value for a key: what it stands for."""
        self.document[key] = self._remaining[key] = value

    def rename(self, names: Mapping[str, str]) -> None:
        """Present names for former ones; the keys stand where they stood.

        Args:
            names: present names by former ones.
        """
        for former, present in names.items():
            if former not in self.document:
                continue
            if self.has(present):
                self.pass_over((former,), f"{present} counts")
                continue
            self.origins = {**self.origins, f"{self.prefix}{present}": self.origin(former)}
            self.replace(present, self.take(former))
            del self.document[former]

    @property
    def remaining(self) -> dict[str, Any]:
        """Keys that nobody took yet."""
        return dict(self._remaining)

    def origin(self, key: str) -> KeyOrigin:
        """Where a key stands."""
        full = f"{self.prefix}{key}"
        key_origin = self.origins.get(full) or self.origins.get(full.partition(".")[0])
        if key_origin is not None:
            return key_origin
        mark = ":"
        if self.source == "command":
            mark = ": " if self.framework == "launch command" else ": --"
        return KeyOrigin(f"{self.source}{mark}{full}", self.level)

    def where(self, key: str) -> str:
        """Where a key stands, for a message."""
        return self.origin(key).origin

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
            raise ConfigError(f"{self.where(key)} {value!r} is neither true nor false.")
        return _WORDS[word]

    def on(self, key: str) -> bool:
        """Whether a switch is on; where it is there and is not, that is noted.

        Raises:
            ConfigError: it is something else.
        """
        value = bool(self.switch(key))
        if not value and key in self.document:
            self.ignore(key, "off")
        return value

    def enabled(self, key: str) -> bool | None:
        """A switch that acts only where it is on: True, or None.

        Raises:
            ConfigError: it is something else.
        """
        return self.switch(key) or None

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
            raise ConfigError(f"{self.where(key)} {value!r} is not a whole number.")
        return int(text)

    def scalar(self, key: str) -> Any:
        """A key that is one word or number, None where it is not there.

        Raises:
            ConfigError: it is a list or a mapping.
        """
        value = self.take(key)
        if isinstance(value, (Mapping, list, tuple, set)):
            raise ConfigError(f"{self.where(key)} {value!r} is not one word or number.")
        return value

    def text(self, key: str) -> str | None:
        """A key that is a name, None where it is not there.

        Raises:
            ConfigError: it is a list or a mapping.
        """
        value = self.scalar(key)
        return None if value is None else str(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A key that is a mapping or JSON of one, empty where it is not there or off.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(key)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{self.where(key)} is not JSON: {error}.") from None
        if isinstance(value, Mapping):
            return value
        if value not in (None, False, ""):
            raise ConfigError(f"{self.where(key)} {value!r} is no mapping of names to values.")
        return {}

    def part(self, key: str) -> DocumentKeys:
        """A mapping inside the document by itself; empty where there is none.

        Raises:
            ConfigError: it is something else.
        """
        value = self.take(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where(key)} {value!r} is no mapping of names to values.")
        return replace(
            self,
            document={str(k): v for k, v in value.items()},
            prefix=f"{self.prefix}{key}.",
            level=self.origin(key).level,
            samples_per_step=None,
        )

    def without_prefix(self, start: str) -> DocumentKeys:
        """The same, its keys by what follows a common start; they stand where they stood."""
        names = {
            name if (short := name.removeprefix(start)) in self.document else short: name
            for name in self.document
        }
        origins = {f"{self.prefix}{short}": self.origin(name) for short, name in names.items()}
        return replace(
            self,
            document={short: self.document[name] for short, name in names.items()},
            origins={**self.origins, **origins},
            samples_per_step=None,
        )

    # -- what becomes of them

    def set(self, option: str, value: Any, key: str, *, checked: bool = False) -> None:
        """A value of an option, from a key."""
        self.set_at(option, value, self.origin(key), checked=checked)

    def set_at(
        self,
        option: str,
        value: Any,
        origin: KeyOrigin,
        *,
        checked: bool = False,
        several_gpus: bool = False,
    ) -> None:
        """A value of an option, from elsewhere (of several GPUs alone)."""
        framework = self.framework
        self._values.append(
            ReadValue(option, value, origin.origin, origin.level, framework, checked, several_gpus)
        )

    def default(
        self, option: str, value: Any, why: str = "", *, several_gpus: bool = False
    ) -> None:
        """A value that the framework takes where nobody says anything (of several GPUs alone)."""
        origin = f"default of {self.framework}" + (f" ({why})" if why else "")
        read_value = ReadValue(option, value, origin, Level.DEFAULT, self.framework)
        self._values.append(replace(read_value, several_gpus=several_gpus))

    def force_under_stage_3(self, option: str, value: Any, why: str) -> None:
        """A value that the framework takes under ZeRO-3, whatever it is told."""
        origin = f"{self.framework} under ZeRO-3 ({why})"
        read_value = ReadValue(option, value, origin, Level.DEFAULT, self.framework, stage_3=True)
        self._values.append(read_value)

    def set_from(self, name: str, key: Key) -> Any:
        """The value of a key as an option, or the framework's default; returns the key's."""
        value = getattr(self, key.read)(name)
        if value is not None:
            self.set(key.option, key.words.get(value, value) if key.words else value, name)
        elif key.default is not None:
            self.default(key.option, key.default, key.why)
        return value

    def value_of(self, option: str) -> Any:
        """What counts of the values of an option, None for nothing."""
        values = [each for each in reversed(self._values) if each.option == option]
        return max(values, key=lambda each: each.level).value if values else None

    def has_missed(self, key: str) -> bool:
        """Whether a key was noted as not modelled."""
        origin = self.where(key)
        return any(remark.key == origin for remark in self._not_modelled)

    def ignore(self, key: str, why: str) -> None:
        """A key that does not matter."""
        self._ignored.append(Remark(self.where(key), why))

    def pass_over(self, names: Iterable[str], why: str) -> None:
        """Keys that do not matter, for one reason: those of them that are there."""
        for key in names:
            self.take(key)
            if key in self.document:
                self.ignore(key, why)

    def miss(self, key: str, remark: str) -> None:
        """A key that matters and is not modelled."""
        self._not_modelled.append(Remark(self.where(key), remark))

    def miss_default(self, key: str, remark: str) -> None:
        """Something that a framework does unasked, and that is not modelled."""
        self._not_modelled.append(Remark(f"default of {self.framework}: {key}", remark))

    def offer(self, keyword: str, value: Any, key: str, otherwise: str) -> None:
        """A value for an option that memest may have; without it, what that means is noted."""
        option = option_called(keyword)
        if option is None:
            self.miss(key, otherwise)
        else:
            self.set(option.name, value, key)

    def offer_rest(self) -> None:
        """Every key left that has the name of an option is a value of it."""
        for key, value in self.remaining.items():
            option = option_called(key)
            if option is None:
                continue
            self.take(key)
            if value is None:
                self.ignore(key, "not set")
            elif option.kind is Kind.SWITCH and value is False:
                self.ignore(key, "off")
            else:
                self.set(option.name, value, key)

    def ignore_rest(
        self, ignored_keys: Mapping[str, str], unmodelled_keys: Mapping[str, str]
    ) -> None:
        """What becomes of the keys left.

        Args:
            ignored_keys: why a key does not matter.
            unmodelled_keys: what of a key is not modelled; it does so only where it is set.
        """
        for key, value in self.remaining.items():
            self.take(key)
            if key in unmodelled_keys:
                if value in (None, False, 0, "", "no") or value in ([], {}):
                    self.ignore(key, "off")
                else:
                    self.miss(key, unmodelled_keys[key])
            elif key in ignored_keys:
                self.ignore(key, ignored_keys[key])
            else:
                self.note_unknown(key, value)

    def note_unknown(self, key: str, value: Any) -> None:
        """A key that nobody knows: named loudly where it speaks of what decides memory.

        Args:
            key: its name.
            value: of it; what is switched off does nothing.
        """
        weight = _weight_of(key)
        if isinstance(value, Mapping):  # a block of another kind of run
            inside = (_weight_of(str(each)) for each in value)
            weight = weight or next((each for each in inside if each is not None), None)
        if weight is None or value in (None, False, 0, "", "no", "none") or value in ([], {}):
            self.ignore(key, UNKNOWN)
        else:
            self.miss(key, weight(f"{UNKNOWN}: priced without"))

    def ignore_all(self, why: str) -> None:
        """The keys left do not matter, all for one reason."""
        self.pass_over(self.remaining, why)

    def absorb(self, other: DocumentKeys) -> None:
        """Take over what became of a part's keys."""
        self._values += other._values
        self._ignored += other._ignored
        self._not_modelled += other._not_modelled
        self.samples_per_step = self.samples_per_step or other.samples_per_step

    def reading(self) -> DocumentReading:
        """What the document says."""
        return DocumentReading(
            source=self.source,
            format=self.framework,
            values=tuple(self._values),
            ignored=tuple(self._ignored),
            not_modelled=tuple(self._not_modelled),
            samples_per_step=self.samples_per_step,
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is an option of ours.

    Attributes:
        option: ours.
        read: how the value is written: a method of :class:`DocumentKeys`.
        default: what the framework takes where the key is not there, None for nothing.
        why: it does so, where that is not plain.
        words: values that are called otherwise here.
    """

    option: str
    read: str = "take"
    default: Any = None
    why: str = ""
    words: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """What becomes of the keys of a framework.

    Attributes:
        defaults: what it sets unasked, by option: the value, or the value and why.
        options: keys that are options of ours.
        readers: functions for keys that take more than a row, in their order.
        own_names: a key with the name of an option is that option.
        ignored_keys: why a key does not matter, by key.
        unmodelled_keys: what of a key is not modelled, by key.
        rest: why no other key matters, where that is one reason for all.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Key] = field(default_factory=dict)
    readers: tuple[Callable[[DocumentKeys], object], ...] = ()
    own_names: bool = False
    ignored_keys: Mapping[str, str] = field(default_factory=dict)
    unmodelled_keys: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""


def by_key(groups: Mapping[str, str]) -> dict[str, str]:
    """Reasons by key, from keys by reason."""
    return {key: why for why, keys in groups.items() for key in keys.split()}


def read_table(keys: DocumentKeys, table: KeyTable) -> None:
    """Take every key of a document by a framework's table.

    Raises:
        ConfigError: a value that cannot be.
    """
    for name, key in table.options.items():
        keys.set_from(name, key)
    for option, value in table.defaults.items():
        default, why = value if isinstance(value, tuple) else (value, "")
        keys.default(option, default, why)
    for read in table.readers:
        read(keys)
    if table.own_names:
        keys.offer_rest()
    if table.rest:
        keys.ignore_all(table.rest)
    else:
        keys.ignore_rest(table.ignored_keys, table.unmodelled_keys)


def read_part(keys: DocumentKeys, key: str, table: KeyTable) -> None:
    """Take the keys of a mapping inside a document by a table of its own.

    Raises:
        ConfigError: a value that cannot be.
    """
    part = keys.part(key)
    read_table(part, table)
    keys.absorb(part)
