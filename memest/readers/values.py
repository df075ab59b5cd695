"""What is read of a document: values of options with their origins, and remarks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from memest.config.option import Option
from memest.config.option_table import OPTIONS
from memest.errors import ConfigError

__all__ = [
    "CHANGES",
    "COPIES",
    "FACTORY_SAYS_IT",
    "IMAGES",
    "LENGTH",
    "LOSS",
    "NOT_HERE",
    "PIXELS",
    "PREDICTIONS",
    "PROCESSES",
    "UNKNOWN",
    "Bounded",
    "DocumentReading",
    "Either",
    "KeyOrigin",
    "Level",
    "Missing",
    "ReadValue",
    "Remark",
    "Saving",
    "Spread",
    "StepSize",
    "names_of",
    "option_called",
    "plain",
]


_NOT_FROM_FILES = frozenset(
    """software loop num_steps task freeze lengths dataset tokenizer dataset_column padding
    data_seed length_steps generate""".split()
)
"""Options that other tools mean something else by: a dataset is a name there, not a file."""


class Level(enum.IntEnum):
    """Who has the last word: the higher one."""

    DEFAULT = 1
    """A framework's own default."""
    FILE = 2
    COMMAND = 3
    """The launch command: launcher, environment and script."""
    FLAG = 4
    """memest's own command line, or a keyword in Python."""


@dataclass(frozen=True, slots=True)
class ReadValue:
    """One value.

    Attributes:
        option: keyword of an option of an estimate, or ``model``.
        value: in any spelling that the option takes.
        origin: where it was said: ``run.yaml:micro_batch_size``, ``command: --bf16``,
            ``default of axolotl``.
        level: how much it counts.
        by: framework that it is a value of.
        checked: it is DeepSpeed's, and the Trainer stops where its own value differs
            (``HfTrainerDeepSpeedConfig.fill_match`` of transformers 5.23).
        several_gpus: it counts where there are several GPUs.
        stage_3: it counts under ZeRO-3 alone, and there whatever else was read of its option.
    """

    option: str
    value: Any
    origin: str
    level: Level
    by: str = ""
    checked: bool = False
    several_gpus: bool = False
    stage_3: bool = False


COPIES = "copies of shards"
"""In place of an option: how many copies of the model are sharded, over GPUs counted elsewhere."""
CHANGES = "entries of the model's configuration"
"""In place of an option: what a run changes of them, by name."""
PIXELS = "pixels of an image at most"
"""In place of an option: a cap; what sides it comes to is for the model to say."""
IMAGES = "how large images become: the model's own size is priced; --image-size says it"
"""Why they are not priced, until the model makes a size of a cap."""
LENGTH = "length of samples"
"""In place of a key, where nothing names how long samples are."""
NOT_HERE = "is not here"
"""Of the script that a command names."""
FACTORY_SAYS_IT = " in the place of MODEL says it"
"""How remarks on a script's own module end: whoever names it as the model has said what it is."""
LOSS = "loss of its own"
"""In place of a key: what a script makes of outputs. Heads of few numbers have no use for it."""
PREDICTIONS = "predictions"
"""In place of a key: outputs that an evaluation keeps. Of heads of few numbers they are nothing."""
UNKNOWN = "memest does not know it"
"""Why a key is ignored of which nothing is known."""


class Bounded(str):
    """What of a key is not modelled, where the run takes no more than what is priced."""

    __slots__ = ()


class Saving(Bounded):
    """What of a key is not modelled, where the run may take much less than what is priced."""

    __slots__ = ()


class Spread(Saving):
    """The same, where one process has several GPUs."""

    __slots__ = ()


class Either(str):
    """What of a key is not modelled, where the run may take more than what is priced, or less."""

    __slots__ = ()


class Missing(Bounded):
    """Why a run cannot be read: it names a DeepSpeed configuration that is not here.

    Attributes:
        name: of the file, as it is written.
        document: the one of that name that the tool comes with; None where there is none.
    """

    name: str
    document: dict[str, Any] | None

    def __new__(cls, why: str, name: str, document: dict[str, Any] | None) -> Missing:
        """The same as text."""
        made = super().__new__(cls, why)
        made.name, made.document = name, document
        return made


PROCESSES = Either("as many processes as it starts: 1 is taken; --num-gpus says it")
"""Of what starts several, where it does not say how many."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A key that became no value.

    Attributes:
        key: with its file: ``run.yaml:warmup_steps``.
        why: it does not matter, or what of it is not modelled.
        once_said: what of it is not modelled still, once the option that ``why`` asks for is given.
    """

    key: str
    why: str
    once_said: str = ""

    @property
    def is_bounded(self) -> bool:
        """Whether the run takes no more than what is priced."""
        return isinstance(self.why, Bounded)

    @property
    def saves(self) -> bool:
        """Whether the run may take much less than what is priced."""
        return isinstance(self.why, (Saving, Either))

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


@dataclass(frozen=True, slots=True)
class StepSize:
    """Samples of an optimizer step over all GPUs.

    Attributes:
        samples: how many.
        origin: which key says so.
        is_exact: the framework stops where batch, accumulation and GPUs make another number; else
            it takes as many micro-batches as reach it.
    """

    samples: int
    origin: str
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReading:
    """What one document says.

    Attributes:
        source: file name, or ``command``.
        format: title of its format.
        values: of options.
        ignored: what does not matter for memory.
        not_modelled: what matters, or may, and is left out of the estimate.
        samples_per_step: of the document, where it has them.
    """

    source: str
    format: str
    values: tuple[ReadValue, ...] = ()
    ignored: tuple[Remark, ...] = ()
    not_modelled: tuple[Remark, ...] = ()
    samples_per_step: StepSize | None = field(default=None)


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
class KeyOrigin:
    """Where a key stands.

    Attributes:
        origin: ``run.yaml:bf16`` or ``command: --bf16``.
        level: of a file or of a command.
    """

    origin: str
    level: Level


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, (bool, int, float, str, list, dict)) or value is None:
        return value
    return str(value)
