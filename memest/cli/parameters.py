"""Typer parameters, made from the table of options; configurations and launch commands settled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from memest.cli.argv import DECIDED, HELP_GROUP, SWITCHED_OFF
from memest.cli.console import Output
from memest.cli.flags import value_flag, with_signature
from memest.cli.help_pages import remember_group
from memest.config.option import Kind, Option
from memest.config.option_table import OPTIONS, OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.errors import ConfigError
from memest.readers.reading import names_config, read_config
from memest.readers.run_config import RunConfig, settle
from memest.readers.values import Level
from memest.readers.with_model import without_varied

__all__ = ["read_question", "with_options"]

_TYPES: dict[Kind, Any] = {Kind.SWITCH: bool, Kind.LIST: list[str] | None}
_TEXT = str | None  # numbers too: setup_from_options reads them, and says more
_FILES = "Configurations of other tools"


def _complete_gpu(incomplete: str) -> list[str]:
    """Names of GPUs that begin like what was typed, for a shell."""
    from memest.catalog.spec import list_gpus

    names = (alias for spec in list_gpus() for alias in spec.aliases)
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def _parameter(option: Option) -> inspect.Parameter:
    # the other spellings are rewritten to the first before Typer sees them
    first, *others = option.flags
    short_flags = [flag for flag in others if not flag.startswith("--")]
    long_flags = [flag for flag in others if flag.startswith("--")]
    help_text = option.help
    if long_flags:
        help_text += f" Also {', '.join(long_flags)}."
    info = typer.Option(
        first,
        *short_flags,
        autocompletion=_complete_gpu if option.name == "gpu" else None,
        help=help_text,
        metavar=option.metavar,
        rich_help_panel=option.panel.value,
        show_default=False,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if option.kind is Kind.SWITCH else None,
        annotation=Annotated[_TYPES.get(option.kind, _TEXT), info],
    )


_LEFT_OPEN = {"advise": ("precision",)}
"""What a command decides where nothing but a framework's default says it."""

_CONFIGURATIONS: dict[str, Any] = {
    "config": Annotated[
        list[str] | None,
        value_flag(
            "--config",
            "FILE",
            "The run as another tool's configuration has it. Training arguments (JSON, YAML), TRL, "
            "accelerate, DeepSpeed, axolotl, LLaMA-Factory, ms-swift, torchtune, torchtitan (TOML, "
            "file.py:function), peft's adapter_config.json, training scripts and notebooks (.py, "
            ".ipynb), shell scripts that launch them (.sh, .slurm); nothing is run. Also in place "
            "of MODEL. Repeatable; options named here come first.",
            panel=_FILES,
        ),
    ],
    "config_format": Annotated[
        _TEXT,
        value_flag(
            "--config-format",
            "NAME",
            "Its format, where its keys do not tell: transformers, trl, accelerate, "
            "deepspeed, axolotl, llama-factory, llama-factory-v1, ms-swift, torchtune, torchtitan, "
            "peft.",
            panel=_FILES,
        ),
    ],
    "help_group": Annotated[
        _TEXT, typer.Option(HELP_GROUP, hidden=True, is_eager=True, callback=remember_group)
    ],
    "switched_off": Annotated[list[str] | None, typer.Option(SWITCHED_OFF, hidden=True)],
    "launch": Annotated[
        _TEXT,
        value_flag(
            "--launch",
            "COMMAND",
            "The launch command of the run, read and never run; the same may be written "
            "after --: memest estimate -- accelerate launch train.py --bf16 True.",
            panel=_FILES,
        ),
    ],
}


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
            f"{run.model_problem}: write it besides, memest estimate {run.model_words}"
            + "".join(f" --config {file}" for file in files if run.model_words != "MODEL ...")
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


def _options_of(axes: Sequence[str]) -> Iterator[Option]:
    """The options that axes name; what is none is refused by who varies it."""
    for axis in axes:
        with suppress(ConfigError):
            yield find_option(axis.partition("=")[0].lstrip("-").replace("-", "_"))


def _is_named(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != ()


def _is_argument(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(info, typer.models.ArgumentInfo) for info in metadata)


def with_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command every option of an estimate.

    Args:
        function: a command whose parameter ``options`` takes them: a dict of those that were
            named on the command line or in configurations; ``run``, if it has one, is what they
            came to with their origins. Where it has none, what was read, ignored and is not
            modelled is said on stderr. ``runs`` takes configurations in the place of several
            models.

    Returns:
        The command for Typer, with a signature of its own; Python may leave out what has a default,
        and name ``output``.
    """
    signature = inspect.signature(function, eval_str=True)
    names = [option.name for option in OPTIONS]

    def command(*, output: Output | None = None, **given: Any) -> int:
        values = {**defaults, **given}
        options = {name: value for name in names if _is_named(value := values.pop(name))}
        values.pop("help_group")
        if "gpu" in options:
            from memest.catalog.gpu_counts import split_gpu_counts

            # before files are read: a number that stands with the name is an option like others
            options = split_gpu_counts(options)
        several = "models" in values
        model_arguments = values["models"] if several else values["model"]
        question = read_question(
            [each for each in ((model_arguments or ()) if several else [model_arguments]) if each],
            options,
            config=values.pop("config") or (),
            config_format=values.pop("config_format"),
            launch=values.pop("launch"),
            off=values.pop("switched_off") or (),
            axes=(*(values.get("over") or ()), *DECIDED.get(function.__name__, ())),
            left_open=_LEFT_OPEN.get(function.__name__, ()),
            compares="runs" in signature.parameters,
            needs_model=several or signature.parameters["model"].default is not None,
        )
        if several:
            values["models"] = list(question.models)
        else:
            values["model"] = question.models[0] if question.models else None
        if "runs" in signature.parameters:
            values["runs"] = question.runs
        if "run" in signature.parameters:
            # as for a plain question: without files there is nothing to say of origins
            plain = output is not None and not question.run.sources
            values["run"] = None if plain else question.run
        elif not values.get("quiet"):
            for run in question.runs or (question.run,):
                for note in filter(None, (run.sources_note, *run.notes)):
                    (output or Output()).note(note)
        if output is not None:
            values["output"] = output
        with question.run.telling_origins():
            return function(options=question.options, **values)

    own_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name not in ("options", "run", "runs")
    ]
    # arguments first, as a usage line has them; the options of an estimate before a command's own
    arguments = [
        # a model may come from a configuration or a launch command
        p.replace(default=None) if p.name in ("model", "models") else p
        for p in own_parameters
        if _is_argument(p)
    ]
    rest = [p for p in own_parameters if not _is_argument(p)]
    files = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _CONFIGURATIONS.items()
    ]
    parameters = [*arguments, *files, *map(_parameter, OPTIONS), *rest]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return with_signature(command, function, signature.replace(parameters=parameters))
