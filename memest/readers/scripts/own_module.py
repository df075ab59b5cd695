"""What to type for a module of a script's own, or of a file beside it: its name and its tensors."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memest.catalog.resolve import name_of_module
from memest.errors import ConfigError
from memest.readers.documents import read_source
from memest.readers.scripts.source import Source, parse_python
from memest.readers.scripts.things import Call, is_unknown

__all__ = ["typed_for"]

_UNTOLD = "package.module:name"
_TOKENS = re.compile(r"(?i)(\w+_)?(ids|idx|tokens?|targets|input_id)")
_NUMBERS = re.compile(r"(?i)t|y|timesteps?|time_steps?|labels?|target|classes")
"""Names of arguments that are whole numbers nearly always; who types them looks at them."""
_PLAIN = (bool, int, float, str)
_MOST_FILES = 4
"""Files that are gone through for a name that one hands on from another."""

_Definition = ast.ClassDef | ast.FunctionDef


def typed_for(made: Any, source: Source, tensors: int = 0) -> str:
    """What stands in the place of MODEL: ``models.unet:UNet --input 'x:float32[B,...]'``.

    Args:
        made: the call that makes the module; of anything else nothing is known.
        source: the script.
        tensors: that the script calls it with, where that is known.
    """
    if not isinstance(made, Call):
        return _UNTOLD
    folder = source.folder or Path()
    if made.subclass:
        found = _defined(source.body, made.subclass)
        place = name_of_module(folder, source.name)
        return (
            _UNTOLD if found is None else _words(f"{place}:{made.subclass}", found, made, tensors)
        )
    module, _, name = made.path.rpartition(".")
    is_method = module.rpartition(".")[2][:1].isupper()  # a class's from_pretrained
    if not module or is_method or not name.isidentifier():
        return _UNTOLD
    for start in dict.fromkeys((folder, Path())):
        path, found = _definition(start, module, name)
        if path is not None:
            inside = path.parent if path.name == "__init__.py" else path
            place = name_of_module(inside.parent, inside.name)
            return _words(f"{place}:{name}", found, made, tensors)
    return f"{module}:{name}"


def _definition(folder: Path, module: str, name: str) -> tuple[Path | None, _Definition | None]:
    """The file that a name is imported from, and its definition where that can be found."""
    path = _file(folder, module)
    first = path
    for _ in range(_MOST_FILES):
        if path is None:
            break
        try:
            body = parse_python(read_source(path, path.name), path.name)
        except ConfigError:
            break
        if (found := _defined(body, name)) is not None:
            return first, found
        path = next(
            (
                _file(path.parent if each.level else folder, each.module or "")
                for each in body
                if isinstance(each, ast.ImportFrom)
                and any((alias.asname or alias.name) == name for alias in each.names)
            ),
            None,
        )
    return first, None


def _file(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split(".")) if module.strip(".") else folder
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def _defined(body: Sequence[ast.stmt], name: str) -> _Definition | None:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    return None


def _words(place: str, found: _Definition | None, made: Call, tensors: int) -> str:
    if found is None:
        return place
    methods = {each.name: each for each in found.body if isinstance(each, ast.FunctionDef)}
    takes = methods.get("forward") if isinstance(found, ast.ClassDef) else None
    maker = methods.get("__init__") if isinstance(found, ast.ClassDef) else found
    names = [] if takes is None else [each.arg for each in takes.args.args][1:]
    count = max(len(_required(takes, skip=1)), tensors)
    inputs = [f" --input {shlex.quote(_tensor(name))}" for name in names[:count]]
    return f"{place}{''.join(inputs)}{_arguments(maker, made, isinstance(found, ast.ClassDef))}"


def _tensor(name: str) -> str:
    """A tensor by its argument: rows of tokens, a number a sample, or what is not said."""
    if _TOKENS.fullmatch(name):
        return f"{name}:int64[B,S]"
    return f"{name}:int64[B]" if _NUMBERS.fullmatch(name) else f"{name}:float32[B,...]"


def _required(function: ast.FunctionDef | None, *, skip: int) -> list[str]:
    """Arguments that a function must be given."""
    if function is None:
        return []
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return names[skip : len(names) - len(function.args.defaults)]


def _arguments(maker: ast.FunctionDef | None, made: Call, of_class: bool) -> str:
    """What the script makes it with, and what must be given and cannot be told."""
    if maker is None:
        return ""
    names = [each.arg for each in (*maker.args.posonlyargs, *maker.args.args)][int(of_class) :]
    given = dict(zip(names, (value.data for value in made.arguments), strict=False))
    given |= {key: value.data for key, value in made.keywords.items() if key != "**"}
    known = {
        key: data
        for key, data in given.items()
        if isinstance(data, _PLAIN) and not is_unknown(data)
    }
    untold = [key for key in _required(maker, skip=int(of_class)) if key not in known]
    words = [f"{key}={data}" for key, data in known.items()] + [f"{key}=..." for key in untold]
    return "".join(f" --model-arg {shlex.quote(each)}" for each in words)
