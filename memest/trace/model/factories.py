"""What a user names as ``package.module:name``: imported and run on purpose."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memest.config.own_code import check_own_code
from memest.errors import ConfigError, MemestError, ModelLoadError, closest
from memest.trace.cuda.devices import cuda_is_meta
from memest.trace.isolation import line_of
from memest.trace.model.top_level import check_top_level

__all__ = ["call_factory", "container", "import_reference"]


def import_reference(reference: str, flag: str = "") -> Any:
    """What a name leads to; the current directory counts as a place of modules.

    Args:
        reference: ``package.module:name``, the name perhaps with dots.
        flag: of the option that named it, for messages.

    Raises:
        ModelLoadError: there is no such module or name, importing it failed, or would train.
        ConfigError: no name of that kind, or such code is not to be run.
    """
    label = f"{flag} {reference}".strip()
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{label} is no package.module:name: write for example train:build.")
    check_own_code(label)
    with _current_directory():
        try:
            check_top_level(module_name, label)
            module = importlib.import_module(module_name)
        except MemestError:
            raise
        except ModuleNotFoundError as error:
            root = module_name.partition(".")[0]
            if error.name is not None and error.name not in (module_name, root):
                raise _user_error(label, "while it was imported", error) from error
            raise ModelLoadError(
                f"{label!r} cannot be imported: there is no module {error.name} in {_cwd()} nor "
                "among the installed packages. Write package.module:factory from the directory in "
                "which python -c 'import package.module' works."
            ) from error
        except (Exception, SystemExit) as error:
            raise _user_error(label, "while it was imported", error) from error
    value = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            public = [name for name in vars(module) if not name.startswith("_")]
            near = closest(part, public)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ModelLoadError(f"{module_name} has no {part!r}.{hint}") from error
    return value


@contextmanager
def _current_directory() -> Iterator[None]:
    """As ``python -m`` has it: modules of the current directory are found first."""
    place = _cwd()
    added = place not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, place)
    try:
        yield
    finally:
        if added and place in sys.path:
            sys.path.remove(place)


def _cwd() -> str:
    try:
        return str(os.getcwd())  # noqa: PTH109 - as sys.path spells it
    except OSError:
        return "."


def call_factory(factory: Any, reference: str, arguments: Mapping[str, Any]) -> Any:
    """What a factory returns: a function or class is called on meta, an instance is taken.

    Args:
        factory: what the reference led to.
        reference: for messages.
        arguments: that the user gave with ``--model-arg``.

    Raises:
        ConfigError: arguments that the factory does not take.
        ModelLoadError: its code raised an error, shown with its file and line.
    """
    if isinstance(factory, torch.nn.Module) or not callable(factory):
        if arguments:
            raise ConfigError(
                f"--model-arg {next(iter(arguments))}: {reference} is a {type(factory).__name__} "
                "that is there already, not a function or class: leave the arguments out."
            )
        return factory
    _check_arguments(factory, reference, arguments)
    with _current_directory(), cuda_is_meta(), torch.device("meta"):
        try:
            return factory(**arguments)
        except MemestError:
            raise
        except (Exception, SystemExit) as error:
            hint = ""
            if "from_pretrained" in str(error) or "meta device context" in str(error):
                hint = " Build it from its config: weights are not needed, and nothing is loaded."
            raise _user_error(reference, "while it built the model", error, hint) from error


def _check_arguments(factory: Any, reference: str, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    takes_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in parameters and not takes_kwargs:
            near = closest(name, parameters)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"--model-arg {name}: {reference} has no such argument.{hint} It takes "
                f"{', '.join(parameters) or 'none'}."
            )
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.name not in arguments
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise ConfigError(
            f"{reference} needs {', '.join(missing)}: add for example --model-arg "
            f"{missing[0]}=VALUE (in Python model_args={{{missing[0]!r}: ...}})."
        )


def _user_error(reference: str, when: str, error: BaseException, hint: str = "") -> ModelLoadError:
    """An error of the user's code, short, with its place."""
    text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    place = line_of(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
        text = error.msg
    at = f" at {place}" if place else ""
    return ModelLoadError(
        f"{reference}: your code raised {type(error).__name__} {when}{at}: {text}.{hint} --debug "
        "shows the traceback."
    )


def container(value: Any) -> Any:
    """Several models by name, as one module: ``models.unet``, ``models["vae"]``."""
    if not isinstance(value, Mapping) or not value:
        return value
    for name, item in value.items():
        if not isinstance(item, torch.nn.Module):
            raise ConfigError(
                f"models[{name!r}] is a {type(item).__name__}, not a torch.nn.Module: give a dict "
                "of modules. What is no module (a noise scheduler) belongs to the step."
            )
    return torch.nn.ModuleDict(dict(value))
