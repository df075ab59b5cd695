"""A training script or a notebook as readings: its calls by the readers that know their arguments.

The keyword arguments of ``TrainingArguments`` and ``SFTConfig`` are keys of the formats of those
names, those of ``LoraConfig`` of peft's file, those of ``from_pretrained`` and of a loop's calls
are options by their own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from memest.readers.effects import OPTIONS_OF_4BIT, OPTIONS_OF_LORA
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.follow import follow
from memest.readers.scripts.found import Found, find
from memest.readers.scripts.lightning import lightning_of
from memest.readers.scripts.loading import read_adapter, read_loading
from memest.readers.scripts.loop import read_loop
from memest.readers.scripts.mode import left_in_eval
from memest.readers.scripts.remarks import read_remarks
from memest.readers.scripts.source import parse_script
from memest.readers.scripts.things import Call, Symbol
from memest.readers.scripts.trainer import read_trainer
from memest.readers.scripts.vision import is_vision_load
from memest.readers.values import (
    LENGTH,
    LOSS,
    PREDICTIONS,
    PROCESSES,
    Bounded,
    DocumentReading,
    Level,
    ReadValue,
    Remark,
)
from memest.readers.with_model import NO_LABELS

__all__ = ["Script", "read_script"]


_WHOLES = {
    "adapter": frozenset(("peft", *OPTIONS_OF_LORA)),
    "quantization": frozenset(("load_in_4bit", "load_in_8bit", *OPTIONS_OF_4BIT)),
}
"""Configurations that a script makes, and what of them its arguments may name as well."""


_SPEECH = ("Whisper", "Speech2Text", "SpeechEncoderDecoder")
"""Beginnings of classes whose samples are speech, where no task says so."""
_SMALL_OUTPUTS = frozenset(
    """sequence-classification image-classification audio-classification multiple-choice""".split()
)
"""Heads with a few numbers a sample, whose predictions and losses are no memory."""
_OF_OUTPUTS = tuple(
    f" {name}"
    for name in (
        "compute_metrics",
        "preprocess_logits_for_metrics",
        "label_smoothing_factor",
        "gather_for_metrics",
        LOSS,
        PREDICTIONS,
    )
)


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
        values = [*(value for part in parts for value in part.values), *self._processes()]
        last = {value.option: value for value in values if value.level is not Level.DEFAULT}
        for whole, parts_of_it in _WHOLES.items():
            if whole in last:
                last = {name: each for name, each in last.items() if name not in parts_of_it}
        defaults = [value for value in values if value.level is Level.DEFAULT]
        if "prepare_kbit" in last and not any(each.option == "checkpointing" for each in values):
            # a script that prepares its base says whether that switches checkpointing on
            why = f"{self.found.source.name}: nothing switches it on"
            defaults.append(ReadValue("checkpointing", "none", why, Level.DEFAULT))
        return DocumentReading(
            source=self.found.source.name,
            format=parts[0].format,
            values=(*defaults, *last.values()),
            ignored=tuple(remark for part in parts for remark in part.ignored),
            not_modelled=tuple(
                remark
                for part in parts
                for remark in self._of_task(part.not_modelled, str(_value(last, "task")), last)
            )
            + self._of_mode(last)
            + self._of_devices()
            + self._uncounted(),
            samples_per_step=parts[0].samples_per_step,
        )

    def _of_mode(self, values: Mapping[str, ReadValue]) -> tuple[Remark, ...]:
        """What is switched on and does nothing, in the mode that the model is in."""
        lightning = lightning_of(self.found)
        if self.found.trainer is not None:
            return ()
        recomputes = _value(values, "checkpointing") not in (None, "none")
        # checkpoints around FSDP's units recompute in any mode
        recomputes = recomputes and not any(
            key.startswith("activation_checkpointing")
            for call in self.found.calls
            for key in call.keywords
        )
        module = None if lightning is None else lightning.module
        extras = left_in_eval(self.found, module, recomputes=recomputes)
        place = self.found.source.place
        return tuple(Remark(f"{place(each.line)} {each.what}", each.why) for each in extras)

    def _starts(self) -> Iterator[tuple[Call, object]]:
        """Calls that start processes of a function, a GPU each, with how many."""
        for call in self.found.calls:
            if call.name == "notebook_launcher" or call.path == "torch.multiprocessing.spawn":
                number = call.argument(2, "num_processes", "nprocs")
                yield call, None if number is None else number.data

    def _processes(self) -> Iterator[ReadValue]:
        for call, number in self._starts():
            if isinstance(number, int):
                origin = f"{self.found.source.place(call.line)} {call.name}"
                yield ReadValue("num_gpus", number, origin, Level.COMMAND)

    def _uncounted(self) -> tuple[Remark, ...]:
        return tuple(
            Remark(f"{self.found.source.place(call.line)} {call.name}", PROCESSES)
            for call, number in self._starts()
            if not isinstance(number, int)
        )

    def _of_devices(self) -> tuple[Remark, ...]:
        """Several GPUs that the script shows to one process, whose trainer takes them all."""
        alone = self.line.words is None or self.line.environment is not None
        for call in self.found.calls if alone and self.found.trainer is not None else ():
            given = [each.data for each in call.arguments] if call.path == "os.environ[]" else []
            if given[:1] == ["CUDA_VISIBLE_DEVICES"] and "," in str(given[1]):
                why = "several GPUs and one process are DataParallel: priced is one GPU"
                return (Remark(f"{self.found.source.place(call.line)} {given[0]}", why),)
        return ()

    def _of_task(
        self, remarks: Iterable[Remark], task: str, values: Mapping[str, ReadValue]
    ) -> Iterator[Remark]:
        """Remarks as they stand for the model's head: what samples are, how large outputs are."""
        load = self.found.load
        kind = load.kind if load is not None else ""
        own = None if load is None else load.keywords.get("auto_model")
        if own is not None and isinstance(own.data, Symbol):
            kind = own.data.name  # what Unsloth's FastModel is told to load
        is_vision = load is not None and is_vision_load(load)
        if load is not None and is_vision and "segmentation" not in load.path:
            task = "image-classification"
        for remark in remarks:
            if remark.key.endswith(LENGTH) and (is_vision or kind.startswith(_SPEECH)):
                if not is_vision and "target_len" not in values:
                    yield Remark(remark.key.replace("samples", "labels"), NO_LABELS)
            elif task in _SMALL_OUTPUTS and remark.key.endswith(_OF_OUTPUTS):
                yield replace(remark, why=Bounded(remark.why))
            else:
                yield remark


def _value(values: Mapping[str, ReadValue], option: str) -> object:
    return values[option].value if option in values else None


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
