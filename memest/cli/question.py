"""What a command line asks, its configurations and its launch command read and settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memest.config.option import Option
from memest.config.option_table import OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.errors import ConfigError
from memest.readers.reading import names_config, read_config
from memest.readers.run_config import RunConfig, settle
from memest.readers.values import Level
from memest.readers.with_model import without_varied

__all__ = ["CommandQuestion", "read_question"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandQuestion:
    """A question whose files are read.

    Attributes:
        models: references.
        options: by keyword, of the setup and of the place.
        run: what configurations and flags came to.
        runs: of a comparison of configurations, one for each; empty otherwise.
    """

    models: tuple[str, ...]
    options: dict[str, Any]
    run: RunConfig
    runs: tuple[RunConfig, ...] = ()


def read_question(
    models: Sequence[str],
    options: Mapping[str, Any],
    *,
    config: Sequence[str] = (),
    config_format: str | None = None,
    launch: str | None = None,
    axes: Sequence[str] = (),
    left_open: Sequence[str] = (),
    needs_model: bool = True,
    off: Sequence[str] = (),
    compares: bool = False,
) -> CommandQuestion:
    """Read what a command line names.

    Args:
        models: as typed; configuration files among them are taken for what they are.
        options: that were named.
        config: of ``--config``.
        config_format: of ``--config-format``.
        launch: of ``--launch``.
        axes: options that the command sets itself: those of ``--over``, what it looks for.
        left_open: options that the command decides where a framework's default alone says them.
        needs_model: False for a command that has something to say without one.
        off: switches that were named with a word for false: they take back what files say, or
            other options imply.
        compares: several configurations in the place of models are runs of their own.

    Raises:
        ConfigError: no model, or anything that a reader refuses.
    """
    configurations = [reference for reference in models if names_config(reference)]
    separate_runs = compares and len(configurations) == len(models)
    if len(configurations) > 1 and not separate_runs:
        raise ConfigError(
            f"{configurations[0]} and {configurations[1]} stand in the place of models, and a "
            "configuration is of one run. Files of one run together: --config A --config B. Runs "
            "that differ: memest compare A B, with nothing but configurations in the place of "
            "models."
        )
    files = [*config, *configurations]
    model_names = [reference for reference in models if reference not in files]
    place = {name: value for name, value in options.items() if not find_option(name).field}
    flags = {name: value for name, value in options.items() if name not in place}
    first = model_names[0] if model_names else None
    flags = {**dict.fromkeys(off, False), **flags}
    if separate_runs and len(configurations) > 1:
        read = tuple(
            read_config(*config, reference, config_format=config_format, command=launch, **flags)
            for reference in configurations
        )
        return CommandQuestion(models=(), options=place, run=read[0], runs=read)
    if config_format is not None and not files and launch is None:
        raise ConfigError(
            "--config-format says the format of a file: add --config FILE or a launch command."
        )
    if files or launch is not None:
        parts = {name: place[name] for name in OWN_MODULE_NAMES & place.keys()}
        run = read_config(
            *files, config_format=config_format, command=launch, model=first, **flags, **parts
        )
    else:
        run = settle((), flags, model=first)
    if run.model is None and needs_model:
        raise ConfigError(
            _asked_for_model(run, files)
            if run.sources
            else "Missing argument 'MODEL'. Name a model, a configuration (run.yaml) or, after --, "
            "the launch command of the run: `memest estimate --help` has examples."
        )
    if run.model is not None and run.sources:
        run = run.fitted()
        model_names = [str(run.model), *model_names[1:]]  # with what a configuration changes of it
    varied = tuple(_options_of(axes))
    varied_flags = [flag for option in varied for flag in option.flags]
    kept = without_varied(varied_flags, run.values, run.not_modelled, run.setup)
    run = replace(run, values=kept[0], not_modelled=kept[1], setup=kept[2])
    run_options = run.options
    if not files and launch is None:
        # an autocast that is switched off by name is a word on precision
        words = {"precision"} & run.options.keys() if off else ()
        run_options = {**flags, **{name: run.options[name] for name in words}}
    defaults = {each.option for each in run.values if each.level is Level.DEFAULT}
    run_options = {
        name: value
        for name, value in run_options.items()
        if name not in left_open or name not in defaults
    }
    for option in varied:
        is_precision = option.field == "precision"
        run_options = {
            key: value
            for key, value in run_options.items()
            if key in flags or not (key == option.name or (is_precision and key == option.field))
        }
    references = tuple(model_names) or tuple(filter(None, (run.model,)))
    return CommandQuestion(models=references, options={**place, **run_options}, run=run)


def _asked_for_model(run: RunConfig, files: Sequence[str]) -> str:
    """Why a run names no model, and what to type in its place."""
    words = run.model_words
    if words == "MODEL ...":
        return f"{run.model_problem}: write it besides, memest estimate {words}"
    besides = ", with the extents of its tensors for the dots:" if "[B,...]" in words else ","
    config = "".join(f" --config {file}" for file in files)
    return f"{run.model_problem}: write it besides{besides} memest estimate {words}{config}"


def _options_of(axes: Sequence[str]) -> Iterator[Option]:
    """The options that axes name; what is none is refused by who varies it."""
    for axis in axes:
        with suppress(ConfigError):
            yield find_option(axis.partition("=")[0].lstrip("-").replace("-", "_"))
