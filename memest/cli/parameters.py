"""Typer parameters, made from the table of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from memest.cli.argv import DECIDED, HELP_GROUP, SWITCHED_OFF
from memest.cli.console import Output
from memest.cli.flags import value_flag, with_signature
from memest.cli.help_pages import remember_group
from memest.cli.question import read_question
from memest.config.option import Kind, Option
from memest.config.option_table import OPTIONS

__all__ = ["with_options"]

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

_WRAPS = ("fsdp_wrap",)
_LAID_OUT = {
    "stages": tuple(
        option.name
        for option in OPTIONS
        if option.name.startswith(("fsdp", "zero", "offload_")) and option.name not in _WRAPS
    )
}
"""What a command lays side by side, whatever files say of it."""

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
            "deepspeed, axolotl, llama-factory, llama-factory-v1, ms-swift, verl, torchtune, "
            "torchtitan, peft.",
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
            axes=(
                *(values.get("over") or ()),
                *DECIDED.get(function.__name__, ()),
                *_LAID_OUT.get(function.__name__, ()),
            ),
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
