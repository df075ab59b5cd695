"""A launch command whose program is a training script: the script itself, else its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from memest.errors import ConfigError
from memest.readers.command_documents import (
    file_among,
    ignore_words,
    merge_arguments,
    open_document,
    read_as,
    read_negations,
)
from memest.readers.command_words import Command
from memest.readers.formats import FORMATS, FileFormat, find_format, recognise
from memest.readers.known_scripts import complete_arguments
from memest.readers.mapping import DocumentKeys, KeyTable, read_table
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.script import Script, read_script
from memest.readers.scripts.source import SUFFIXES
from memest.readers.training_arguments import (
    IGNORED_KEYS,
    METHODS,
    MODELS,
    PRICED_METHODS,
    SIZES,
    UNMODELLED_KEYS,
)
from memest.readers.trl import read_trl
from memest.readers.values import (
    NOT_HERE,
    Bounded,
    DocumentReading,
    Either,
    KeyOrigin,
    Level,
    Saving,
    option_called,
)

__all__ = ["read_script_command"]

_UNREAD = {"verl": ("verl", "--method sft"), "openrlhf": ("OpenRLHF", "--method dpo or grpo")}
"""Frameworks that have no reader, and what is priced nearest, by the package that is started."""
_OF_UNREAD = re.compile(r"(?:^|/)(verl/trainer|openrlhf/cli|openrlhf/trainer)/")
"""Where their programs lie, for those that are started by path."""


def read_script_command(
    keys: DocumentKeys,
    command: Command,
    arguments: dict[str, Any],
    overrides: dict[str, Any],
    positionals: list[str],
    file_format: FileFormat | None,
) -> list[DocumentReading]:
    """A training script: what it holds, else its arguments taken for what their names say.

    Raises:
        ConfigError: a framework whose runs nobody reads here, or a file that is not there.
    """
    program = command.program
    by_path = _OF_UNREAD.search(program.replace("\\", "/"))
    package = by_path[1].partition("/")[0] if by_path else program.partition(".")[0]
    if package in _UNREAD and file_format is None:
        framework, nearest = _UNREAD[package]
        raise ConfigError(
            f"the launch command: {program} is {framework}'s, whose runs memest does not read: "
            "what it trains, asks and gathers is its own. The nearest that is priced is TRL's: "
            f"memest estimate MODEL {nearest}, with --batch, --seq-len and --num-gpus."
        )
    file, origin = file_among(arguments, positionals)
    readings: list[DocumentReading] = []
    deepspeed_file = arguments.pop("deepspeed_config", None)
    if isinstance(deepspeed_file, str):
        # DeepSpeed's own arguments (add_config_arguments): a switch, and the file beside it
        if arguments.get("deepspeed") is True:
            arguments.pop("deepspeed")
        settings, folder_of_file = open_document(deepspeed_file, "command: --deepspeed_config")
        readings.append(
            read_as(find_format("deepspeed"), settings, {}, deepspeed_file, folder_of_file)
        )
    elif "deepspeed" not in arguments and any(
        launcher.name == "deepspeed" for launcher in command.launchers
    ):
        keys.miss(
            "deepspeed", Saving("no file of DeepSpeed is named: DDP is priced; --zero says it")
        )
    arguments = read_negations(arguments)
    document, known_script = complete_arguments(PurePath(program).stem, arguments)
    own_loop = document.pop("loop", None)
    source, folder, document_format = known_script or "command", None, file_format
    unclear: ConfigError | None = None
    recognised_format = file_format
    content: dict[str, Any] = {}
    if file is not None:
        content, folder_of_file = open_document(file, origin)
        try:
            recognised_format = file_format or recognise(content, file)
        except ConfigError as error:
            unclear = error  # of the script's own settings, which it reads itself
    if file is not None and recognised_format is not None:
        if recognised_format.name in ("accelerate", "deepspeed", "peft"):
            readings.append(read_as(recognised_format, content, {}, file, folder_of_file))
        else:
            document, source, folder, document_format = (
                content,
                file,
                folder_of_file,
                recognised_format,
            )
    environment = None if command.launchers else command.environment
    named = {**(content if unclear else document), **arguments}
    line = CommandLine(command.words, named, environment)
    script, why = _script_here(program, line)
    if script is None and unclear is not None:
        raise unclear
    if script is not None:
        reading = script.reading()
        ignore_words(keys, [word for word in positionals if word not in line.words_taken])
        merged, origins = merge_arguments(document, arguments, overrides)
        return [*readings, _beside(merged, origins, source, reading, line), reading]
    if document_format is None:
        document_format = FORMATS[0] if known_script else _format_of(arguments, program)
    stem = PurePath(program).stem
    method = _method_named(stem)
    if method in PRICED_METHODS and document_format is not None and document_format.name == "trl":
        # alignment-handbook's scripts, and TRL's own, are called as their trainers
        document_format = replace(document_format, read=partial(read_trl, method=method))
        method = ""
    _note_script(keys, stem, {**document, **arguments})
    if own_loop is not None:
        keys.set_at("loop", own_loop, KeyOrigin(f"command: {known_script}", Level.FILE))
    if method:
        keys.miss(f"{stem}.py", f"{METHODS[method]}; priced is supervised fine-tuning")
    if document_format is None:
        for key in (*arguments, *overrides):
            keys.ignore(f"--{key}" if key in arguments else key, "memest does not know it")
    else:
        document, origins = merge_arguments(document, arguments, overrides)
        readings.append(read_as(document_format, document, origins, source, folder))
    meaning = (
        "its arguments say nothing that memest knows"
        if document_format is None
        else f"taken for the published {known_script}, with its defaults"
        if known_script
        else f"taken for one on {document_format.title}"
    )
    # of a script that says nothing, nothing bounds what it does
    remark = Either if document_format is None else Bounded
    keys.miss(
        program,
        remark(f"the script is not read{why}: {meaning}; --loop and --config-format say otherwise"),
    )
    ignore_words(keys, positionals)
    return readings


def _script_here(program: str, line: CommandLine) -> tuple[Script | None, str]:
    """The script that a command starts, where it is on this machine; else why it is not read."""
    path = Path(program)
    try:
        if re.fullmatch(r"\w+(\.\w+)*", program) and path.suffix != ".py":
            inside = Path(*program.split("."))  # python -m package.train
            path = inside / "__main__.py" if inside.is_dir() else inside.with_suffix(".py")
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            return None, f" (it {NOT_HERE})" if path.suffix.lower() in SUFFIXES else ""
    except (OSError, ValueError):
        return None, ""
    try:
        return read_script(path, program, line), ""
    except ConfigError as error:
        return None, f" ({str(error).rstrip('.')})"


_NAMES = KeyTable(
    options={**MODELS, **SIZES},
    own_names=True,
    ignored_keys=IGNORED_KEYS,
    unmodelled_keys=UNMODELLED_KEYS,
)
"""Arguments of a script by their names alone."""


def _beside(
    arguments: Mapping[str, Any],
    origins: Mapping[str, KeyOrigin],
    source: str,
    reading: DocumentReading,
    line: CommandLine,
) -> DocumentReading:
    """Arguments that reach no call which is read: they mean what their names say."""
    own = {key: value for key, value in arguments.items() if key not in line.words_taken}
    rest = {key: value for key, value in {**own, **line.taken}.items() if key not in line.used}
    keys = DocumentKeys(
        rest, source=source, framework="transformers", origins=origins, level=Level.COMMAND
    )
    named = {value.option for value in reading.values if value.level is not Level.DEFAULT}
    trains_another = any(each.why.endswith("; MODEL says it") for each in reading.not_modelled)
    if trains_another:
        keys.pass_over(MODELS, "the script trains another model than what it loads by it")
    for key in rest:
        option = option_called(key)
        if option is not None and option.name in named:
            keys.take(key)
            keys.ignore(key, "the script names it itself")
    read_table(keys, _NAMES)
    return keys.reading()


_WEAK_MARKS = frozenset(
    """max_length packing template max_samples stage lora_rank val_size flash_attn plot_loss
    cutoff_len lora_target
    dataset_dir preprocessing_num_workers adapter_name_or_path beta""".split()
)
"""Names that scripts of all kinds have."""
_TASKS_OF_SCRIPTS = {
    "run_glue": "sequence-classification",
    "run_classification": "sequence-classification",
    "run_xnli": "sequence-classification",
    "run_clm": "causal-lm",
    "run_mlm": "masked-lm",
    "run_ner": "token-classification",
    "run_qa": "question-answering",
    "run_squad": "question-answering",
    "run_swag": "multiple-choice",
    "run_summarization": "seq2seq-lm",
    "run_translation": "seq2seq-lm",
    "run_image_classification": "image-classification",
    "run_semantic_segmentation": "image-segmentation",
    "run_mim": "masked-image-modeling",
    "run_audio_classification": "audio-classification",
    "run_speech_recognition_ctc": "ctc",
    "run_speech_recognition_seq2seq": "speech-seq2seq",
}
"""Heads of transformers' example scripts."""


_LENGTHS_OF_SCRIPTS = {
    "run_glue": {"seq_len": 128},
    "run_classification": {"seq_len": 128},
    "run_xnli": {"seq_len": 128},
    "run_qa": {"seq_len": 384},
    "run_summarization": {"seq_len": 1024, "target_len": 128},
    "run_translation": {"seq_len": 1024, "target_len": 128},
}
"""Defaults of their ``max_seq_length`` (``max_length``), ``max_source_length`` and
``max_target_length``."""
_LENGTHS_OF_TOKENIZERS = ("run_clm", "run_mlm", "run_fim")
"""Scripts that take the tokenizer's longest where nobody names a length, 1,024 if that is too
long."""
_LENGTH_KEYS = ("block_size", "max_seq_length", "max_length", "max_source_length")


def _note_script(keys: DocumentKeys, stem: str, arguments: Mapping[str, Any]) -> None:
    """What the name of a script says: the head, the loop, lengths."""
    apart = stem.removesuffix("_no_trainer")
    default = KeyOrigin(f"command: {stem}.py", Level.DEFAULT)
    if apart in _TASKS_OF_SCRIPTS:
        keys.set_at("task", _TASKS_OF_SCRIPTS[apart], default)
    for option, length in _LENGTHS_OF_SCRIPTS.get(apart, {}).items():
        keys.set_at(option, length, default)
    if "target_len" in _LENGTHS_OF_SCRIPTS.get(apart, {}):
        # val_max_target_length, which is max_target_length unless it is named
        length = arguments.get("max_target_length", _LENGTHS_OF_SCRIPTS[apart]["target_len"])
        keys.set_at("generation_max_length", length, default)
    if apart in _LENGTHS_OF_TOKENIZERS and not any(key in arguments for key in _LENGTH_KEYS):
        keys.set_at("seq_len", 1024, default)
        keys.miss(
            f"{stem}.py",
            "the longest sample is the tokenizer's to say: priced are 1,024 tokens, or the model's "
            "positions where those are fewer; --seq-len says it",
        )
    if apart != stem:
        # a loop of its own on accelerate, around torch's AdamW
        for option, value in (("loop", "accelerate"), ("optim", "adamw_torch")):
            keys.set_at(option, value, KeyOrigin(f"command: {stem}.py", Level.FILE))
        keys.set_at("max_grad_norm", 0.0, default)  # DeepSpeed's engine may clip all the same
        train, evaluation = (
            arguments.get(f"per_device_{name}_batch_size", 8) for name in ("train", "eval")
        )
        # training holds logits and their gradients at once
        if isinstance(train, int) and isinstance(evaluation, int) and evaluation > 2 * train:
            keys.miss(
                f"{stem}.py",
                f"it evaluates with {evaluation} samples at once, and trains with {train}",
            )


def _method_named(stem: str) -> str:
    """The way of training that a script's name says; empty for none."""
    words = stem.lower().split("_")
    return next((method for method in METHODS if method in words), "")


def _format_of(arguments: Mapping[str, Any], program: str) -> FileFormat | None:
    """Training arguments, or those of a framework whose marks are among them."""
    if "trl" in PurePath(program).parts:
        return find_format("trl")
    keys = set(arguments)
    scores = {
        each: len((each.marks - _WEAK_MARKS) & keys)
        for each in FORMATS
        if each.name in ("trl", "llama-factory")
    }
    best = max(scores, key=lambda each: scores[each])
    if scores[best]:
        return best
    names = {"model_name_or_path", "model_name", "output_dir", "deepspeed", "fsdp", *SIZES}
    if any(key in names or option_called(key) for key in keys):
        return FORMATS[0]
    return None
