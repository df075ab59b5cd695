"""A document made of the arguments of calls, for the readers that know their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memest.readers.mapping import DocumentKeys
from memest.readers.scripts.source import Source
from memest.readers.scripts.things import Call, Unknown, Value, is_unknown, known
from memest.readers.training_arguments import IGNORED_KEYS, UNMODELLED_KEYS
from memest.readers.values import (
    Bounded,
    DocumentReading,
    Either,
    KeyOrigin,
    Level,
    Remark,
    Saving,
    option_called,
)

__all__ = ["MODEL_KEY", "CallDocument"]

MODEL_KEY = "model_name_or_path"
"""The model, by the name that all readers know."""

_SAVING_KEYS = frozenset(
    """gradient_checkpointing activation_checkpointing load_in_4bit load_in_8bit
    use_liger_kernel bnb_4bit_use_double_quant quantization_config freeze lora_dropout
    gradient_checkpointing_kwargs""".split()
)
"""Keys without which a run takes no less."""
_NO_SIZE = frozenset(
    """lora_alpha bias task_type init_lora_weights train_dataset eval_dataset tokenizer
    processing_class callbacks data_collator lr betas eps random_state trust_remote_code token
    compute_metrics""".split()
)


_OF_TRL = ("trl.get_quantization_config", "trl.get_kbit_device_map")


class CallDocument:
    """Arguments of calls by name, with where each stands.

    Attributes:
        source: the script.
        used: arguments of the command line that are in it.
        entries: of the model's configuration, that go with its name.
    """

    def __init__(
        self,
        source: Source,
        framework: str,
        title: str = "",
        *,
        ignored_keys: Mapping[str, str] = IGNORED_KEYS,
        unmodelled_keys: Mapping[str, str] = UNMODELLED_KEYS,
    ) -> None:
        self.used: set[str] = set()
        self.source = source
        self._framework = framework
        self._ignored_keys = ignored_keys
        self._unmodelled_keys = unmodelled_keys
        self._title = title or framework
        self.entries: dict[str, Any] = {}
        self._document: dict[str, Any] = {}
        self._origins: dict[str, KeyOrigin] = {}
        self._ignored: list[Remark] = []
        self._not_modelled: list[Remark] = []

    def __contains__(self, key: str) -> bool:
        return key in self._document

    def __bool__(self) -> bool:
        return bool(self._document)

    def get(self, key: str) -> Any:
        """The value of a key, None where it is not there."""
        return self._document.get(key)

    def take(self, key: str) -> Any:
        """The value of a key, which is not in the document afterwards."""
        return self._document.pop(key, None)

    def change(self, key: str, value: Any) -> None:
        """Another value for a key, which stands where it stood."""
        self._document[key] = value

    def origin(self, line: int, value: Value | None = None, key: str = "") -> KeyOrigin:
        """Where a value comes from."""
        if value is not None and value.given:
            return KeyOrigin(f"command: {', '.join(value.given)}", Level.COMMAND)
        words = key
        if value is not None and value.defaults:
            words = f"default of {', '.join(value.defaults)}"
        # the code has the last word over what launches it
        line = value.line if value is not None and value.line else line
        return KeyOrigin(f"{self.source.place(line)} {words}".rstrip(), Level.COMMAND)

    def put(self, key: str, value: Value, call: Call) -> None:
        """A keyword argument; one that is not known is said to be."""
        self.used.update(value.given)
        given = value.data
        if isinstance(given, Mapping):
            # TRL's functions say again what its ModelConfig says, which is read
            given = {k: v for k, v in given.items() if getattr(v, "path", "") not in _OF_TRL}
        data = known(given)
        if call.conditional:
            data = Unknown("under a condition", call.line)
        if isinstance(data, Mapping) and is_unknown(data):
            for name, part in data.items():
                if is_unknown(part):
                    why = part if isinstance(part, Unknown) else Unknown("not all of it is literal")
                    self.miss_unknown(f"{key}.{name}", why, value.line or call.line)
            data = {name: part for name, part in data.items() if not is_unknown(part)}
        if is_unknown(data):
            part = data if isinstance(data, Unknown) else Unknown("a list that is not all literal")
            self.miss_unknown(key, part, value.line or call.line)
            return
        self._document[key] = data
        self._origins[key] = self.origin(call.line, value, key)

    def put_all(self, call: Call, *, without: Iterable[str] = ()) -> None:
        """Every keyword argument of a call."""
        for key, value in call.keywords.items():
            if key == "**":
                self.miss(call.line, call.name, Either("further arguments cannot be told: **"))
            elif key not in without:
                self.put(key, value, call)

    def say(self, key: str, value: Any, line: int) -> None:
        """A value that a call stands for."""
        self._document[key] = value
        self._origins[key] = self.origin(line)

    def say_default(self, key: str, value: Any, why: str) -> None:
        """A value that is in force unless the document has one."""
        if key not in self._document:
            self._document[key] = value
            self._origins[key] = KeyOrigin(f"{self.source.name}: {why}", Level.COMMAND)

    def miss(self, line: int, key: str, why: str, *, once_said: str = "") -> None:
        """Something of the script that is not modelled; what is left of it is that of a remark."""
        self._not_modelled.append(Remark(f"{self.source.place(line)} {key}", why, once_said))

    def miss_each(self, remarks: Iterable[tuple[int, str, str]]) -> None:
        """The same of several, line, name and why; of one name in one line once."""
        said: set[tuple[int, str]] = set()
        for line, key, why in remarks:
            if (line, key) not in said:
                said.add((line, key))
                self.miss(line, key, why)

    def has_missed(self, key: str) -> bool:
        """Whether a key was said to be not modelled."""
        return any(remark.key.endswith(f" {key}") for remark in self._not_modelled)

    def ignore(self, line: int, key: str, why: str) -> None:
        """Something of the script that does not matter."""
        self._ignored.append(Remark(f"{self.source.place(line)} {key}", why))

    def miss_unknown(self, key: str, data: Unknown, line: int) -> None:
        """A value that cannot be told, where it matters."""
        if key == MODEL_KEY:
            self.miss(line, "model", f"cannot be told without running ({data.why}); MODEL says it")
            return
        first, _, last = key.partition(".")
        last = last or first
        for name in (first, last):
            if name in self._ignored_keys or name in _NO_SIZE:
                self.ignore(line, key, self._ignored_keys.get(name, "changes no size"))
                return
        option = option_called(last)
        hint = f"; {option.flags[0]} says it" if option is not None else ""
        why = f"cannot be told without running ({data.why}): priced as if it were not there{hint}"
        if last == "num_labels":
            self.miss(line, key, Bounded(why))  # a row of the head each
            return
        saves = last in _SAVING_KEYS or isinstance(self._unmodelled_keys.get(last), Bounded)
        self.miss(line, key, Saving(why) if saves else Either(why))

    def take_over(self, other: CallDocument) -> None:
        """Keep what another document says of its own values, not the values."""
        self.used |= other.used
        self._ignored += other._ignored
        self._not_modelled += other._not_modelled

    def keys(self) -> DocumentKeys:
        """The document for a reader."""
        return DocumentKeys(
            self._document,
            source=self.source.name,
            framework=self._framework,
            origins=self._origins,
            level=Level.COMMAND,
        )

    def reading(self, keys: DocumentKeys) -> DocumentReading:
        """What a reader found, with what this document says besides."""
        found = keys.reading()
        return DocumentReading(
            source=self.source.name,
            format=f"script: {self._title}",
            values=found.values,
            ignored=(*self._ignored, *found.ignored),
            not_modelled=(*self._not_modelled, *found.not_modelled),
            samples_per_step=found.samples_per_step,
        )
