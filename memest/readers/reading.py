"""Files and launch commands, read: ``memest.read_config`` and ``memest.read_command``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memest.errors import ConfigError
from memest.files.texts import write_text
from memest.readers.command_words import SHELL_SUFFIXES, Command, split_command, words_of
from memest.readers.commands import read_launch
from memest.readers.documents import parse_document, read_document, read_source
from memest.readers.formats import (
    FileFormat,
    check_training,
    find_format,
    is_model_config,
    recognise,
)
from memest.readers.mapping import DocumentKeys
from memest.readers.run_config import RunConfig, settle
from memest.readers.scripts.notebook_shell import shell_of, written_files
from memest.readers.scripts.script import read_script
from memest.readers.scripts.source import SUFFIXES, parse_python
from memest.readers.shell_script import launch_among
from memest.readers.torchtitan_functions import makes_config, read_function
from memest.readers.torchtune import named_recipe, read_torchtune
from memest.readers.values import Bounded, DocumentReading, Missing, Remark

__all__ = ["names_config", "read_command", "read_config"]

_CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".bin", *SUFFIXES, *SHELL_SUFFIXES)


def read_config(
    *files: str | Path,
    config_format: str | None = None,
    command: str | Sequence[str] | None = None,
    model: str | None = None,
    **options: Any,
) -> RunConfig:
    """Read configurations of other people's tools.

    Args:
        files: training arguments (JSON, YAML), TRL, accelerate, DeepSpeed, axolotl, LLaMA-Factory,
            ms-swift, torchtune, torchtitan (TOML, or ``file.py:function``), peft's
            ``adapter_config.json``, training scripts and notebooks, shell scripts that launch them;
            several together.
        config_format: the format, where a file's keys do not tell.
        command: a launch command besides, see :func:`read_command`.
        model: the model, where no file names it, or another one.
        options: options of :func:`memest.estimate`; they come before all else.

    Returns:
        What :func:`memest.estimate` takes in place of a model.

    Raises:
        ConfigError: a file that cannot be read, or contradictions.

    Example::

        run = memest.read_config("run.yaml", "accelerate.yaml")
        print(memest.estimate(run, gpu="h100-sxm"))
    """
    if not files and command is None:
        raise ConfigError("read_config was given no file.")
    file_format = None if config_format is None else find_format(config_format)
    readings: list[DocumentReading] = []
    if command is not None:
        readings += read_launch(split_command(words_of(command)), file_format=file_format)
    for file in files:
        if Path(file).suffix.lower() in SHELL_SUFFIXES:
            readings += read_launch(Command(program=str(file)), file_format=file_format)
        elif Path(file).suffix.lower() == ".ipynb" or Path(file).suffix.lower() == ".ipynb":
            readings += _read_notebook(str(file), file_format)
        else:
            readings.append(_read_file(str(file), file_format))
    return settle(list(_with_absent(readings, options)), options, model=model)


def read_command(
    command: str | Sequence[str],
    *files: str | Path,
    config_format: str | None = None,
    model: str | None = None,
    **options: Any,
) -> RunConfig:
    """Read a launch command, without running anything.

    Args:
        command: one text, or its words: ``accelerate launch --config_file a.yaml train.py --bf16``.
        files: further configurations.
        config_format: whose arguments the script takes, where that is not clear.
        model: the model, where the command names none.
        options: options of :func:`memest.estimate`; they come before all else.

    Raises:
        ConfigError: no command that starts a training, or contradictions.
    """
    return read_config(*files, config_format=config_format, command=command, model=model, **options)


def _with_absent(
    readings: Sequence[DocumentReading], options: Mapping[str, Any]
) -> Iterator[DocumentReading]:
    """Readings, with what stands for a DeepSpeed configuration that a run names and is not here.

    The file that is given besides, the stage that is named, else the file of that name that comes
    with the tool, which is said.

    Raises:
        ConfigError: there is none of these.
    """
    title = find_format("deepspeed").title
    is_given = any(each.format == title for each in readings) or options.get("zero") is not None
    for reading in readings:
        absent = [each for each in reading.not_modelled if isinstance(each.why, Missing)]
        if not absent:
            yield reading
            continue
        (remark,) = absent
        why = remark.why
        assert isinstance(why, Missing)
        rest = tuple(each for each in reading.not_modelled if each is not remark)
        if is_given:
            ignored = (*reading.ignored, Remark(remark.key, "what is given besides counts"))
            yield replace(reading, not_modelled=rest, ignored=ignored)
        elif why.document is None:
            raise ConfigError(f"{str(why).rstrip('.')}, or name the stage: --zero 3.")
        else:
            words = (
                f"{why.name} is not here: assumed is the one that comes with "
                f"{reading.format}; --config FILE gives another"
            )
            yield replace(reading, not_modelled=(*rest, Remark(remark.key, Bounded(words))))
            keys = DocumentKeys(why.document, source=why.name, framework=title)
            find_format("deepspeed").read(keys)
            yield keys.reading()


def names_config(reference: str) -> bool:
    """Whether what stands in the place of a model is a configuration file.

    A ``.json`` is one unless it is a model's own.
    """
    file, marked, name = reference.partition(".py:")
    path = Path(f"{file}.py" if marked else reference)
    suffix = path.suffix.lower()
    try:
        there = path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False
    if there and marked:
        return not _is_factory(path.expanduser(), name)
    if suffix in _CONFIG_SUFFIXES:
        return there or suffix in (".yaml", ".yml", ".toml", ".ipynb", ".py", *SHELL_SUFFIXES)
    if suffix != ".json" or not there:
        return False
    try:
        document = read_document(path.expanduser(), reference)
    except ConfigError:
        return False
    if is_model_config(document):
        return False
    try:
        recognise(document, reference)
    except ConfigError:
        # of no format, or of several: the resolver of models says what is wrong with it
        return False
    return True


def _is_factory(path: Path, name: str) -> bool:
    """Whether a name of a file is a class, or a function where none makes a configuration."""
    try:
        body = parse_python(read_source(path, path.name), path.name)
        kinds = {
            each.name: each for each in body if isinstance(each, (ast.ClassDef, ast.FunctionDef))
        }
        of_titan = makes_config(path, path.name)
    except ConfigError:
        return False
    return isinstance(kinds.get(name), ast.ClassDef) or (name in kinds and not of_titan)


def _read_file(name: str, file_format: FileFormat | None) -> DocumentReading:
    file, _, function = name.partition(".py:")
    if function:
        return _titan_function(f"{file}.py", function)
    path = Path(name).expanduser()
    if path.suffix.lower() in SUFFIXES:
        is_titan = file_format is not None and file_format.name == "torchtitan"
        if is_titan or (path.suffix.lower() == ".py" and makes_config(path, name)):
            return _titan_function(name, None)
        return read_script(path, name).reading()
    text = read_source(path, name)
    document = parse_document(text, path, name)
    document_format = file_format or recognise(document, name)
    if file_format is not None:
        # several files and one format named: those that are clearly of another keep theirs
        document_format = _clear_other(document, name, file_format)
    check_training(document, document_format, name)
    keys = DocumentKeys(
        document, source=path.name, framework=document_format.title, folder=path.parent
    )
    recipe = named_recipe(text) if document_format.name == "torchtune" else None
    if recipe is None:
        document_format.read(keys)
    else:
        name_of_recipe, gpus = recipe
        if gpus is not None:
            keys.default("num_gpus", gpus, "the command in its header")
        read_torchtune(keys, recipe=name_of_recipe)
    return keys.reading()


def _read_notebook(name: str, file_format: FileFormat | None) -> list[DocumentReading]:
    """A notebook that trains, else the one command in it that does."""
    path = Path(name).expanduser()
    try:
        reading = _read_file(name, file_format)
    except ConfigError:
        command = _command_of(path, name)
        if command is None:
            raise
    else:
        try:
            command = _command_of(path, name)
        except ConfigError:
            return [reading]  # several, none of which is asked about
        if command is None:
            return [reading]
        why = f"{command.program} is started besides: answered is what its Python trains; give "
        remark = Remark(f"{path.name} command", Bounded(f"{why}the command for the other"))
        return [replace(reading, not_modelled=(*reading.not_modelled, remark))]
    started = DocumentReading(source=path.name, format="notebook that starts a command")
    written = written_files(path, name).get(command.program)
    if written is None:
        return [started, *read_launch(command, file_format=file_format)]
    with TemporaryDirectory() as folder:
        script = Path(folder) / Path(command.program).name
        write_text(script, written)
        launched = replace(command, program=str(script))
        return [started, *read_launch(launched, file_format=file_format)]


def _command_of(path: Path, name: str) -> Command | None:
    """The one command of a notebook that trains; None for none."""
    shell = shell_of(path, name)
    if shell is None:
        return None
    return launch_among(shell.text, name, shell.environment, how="", place=shell.place)


def _clear_other(document: dict[str, Any], name: str, file_format: FileFormat) -> FileFormat:
    try:
        document_format = recognise(document, name)
    except ConfigError:
        return file_format
    apart = ("accelerate", "deepspeed", "peft")
    return (
        document_format
        if document_format.name in apart and file_format.name not in apart
        else file_format
    )


def _titan_function(file: str, name: str | None) -> DocumentReading:
    path = Path(file).expanduser()
    settings, unknown = read_function(path, name, file)
    keys = DocumentKeys(settings, source=path.name, framework="torchtitan", folder=path.parent)
    find_format("torchtitan").read(keys)
    reading = keys.reading()
    return replace(reading, not_modelled=(*reading.not_modelled, *unknown))
