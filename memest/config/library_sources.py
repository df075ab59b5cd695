"""What the sources of installed libraries say: read, not imported, since imports load torch.

Where a source does not surely say it, the answer is that nobody knows: who asks leaves the question
to the library.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["default_targets", "has_no_plan", "linear_names", "peft_methods"]

_TABLE = "TRANSFORMERS_MODELS_TO_{}_TARGET_MODULES_MAPPING"
_OTHER_MODELS = re.compile(
    r"^\s*from (?:\.\.(?!\.)|\.\.\.models|transformers\.models)", re.MULTILINE
)
"""Of a file that takes parts of other models, or by ``..auto`` any that a configuration names."""
_LINEAR = re.compile(r"^\s+self\.(\w+) = (?:nn\.Linear|Conv1D)\(", re.MULTILINE)


@cache
def peft_methods() -> tuple[str, ...]:
    """Members of the installed peft's ``PeftType``, in small letters; none where there is none."""
    return tuple(
        target.id.lower()
        for cls in _statements("peft", "utils/peft_types.py")
        if isinstance(cls, ast.ClassDef) and cls.name == "PeftType"
        for line in cls.body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    )


def default_targets(method: str, config: Mapping[str, Any]) -> bool | None:
    """Whether peft knows by itself which modules of a model a method adapts.

    Source: ``BaseTuner._prepare_adapter_config`` of peft 0.21, which looks the model type up in a
    table of ``utils/constants.py``. Which part of a configuration the model is built from is known
    to transformers alone, so a type that any part has counts, or that stands for one by default.

    Args:
        method: of peft, in small letters.
        config: a ``config.json``.

    Returns:
        None where the sources do not tell.
    """
    # OSF takes all linear layers of models that its table lacks
    types = None if method == "osf" else _target_tables().get(method.replace("_", ""))
    named = _model_types(config)
    if not types or not named:
        return None
    text = _settings(named)
    if text is None:
        return None
    return any(name in named or _mentions(text, name) for name in types)


def has_no_plan(config: Mapping[str, Any]) -> bool:
    """Whether transformers surely has no tensor-parallel plan for a model.

    Source: ``init_parallel_plans`` of transformers 5.23 (``distributed/mixin.py``), which takes
    plans of model classes, of their configurations and of the models inside.

    Args:
        config: a ``config.json``.
    """
    named = _model_types(config)
    if not named or "base_model_tp_plan" in config:
        return False
    settings = _settings(named)
    models = [source for name in named for source in _sources(name, "modeling_*.py")]
    if settings is None or not models:
        return False
    texts = [settings, *models]
    return not any("tp_plan" in text or _OTHER_MODELS.search(text) for text in texts)


def linear_names(config: Mapping[str, Any]) -> list[str]:
    """What the sources of a model's own type call linear layers, each name once."""
    sources = _sources(str(config.get("model_type")), "modeling_*.py")
    return list(dict.fromkeys(name for each in sources for name in _LINEAR.findall(each)))


def _mentions(text: str, model_type: str) -> bool:
    """Whether a source names a model type, or imports from the folder of its model."""
    names = {re.escape(model_type), re.escape(model_type.replace("-", "_"))}
    return re.search(rf"[\"'.](?:{'|'.join(names)})[\"'. ]", text) is not None


def _model_types(config: Mapping[str, Any]) -> set[str]:
    """Types of a configuration and of its parts; none where it does not say its own."""
    if not isinstance(config.get("model_type"), str):
        return set()
    parts = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, Mapping)]
    return {part["model_type"] for part in parts if isinstance(part.get("model_type"), str)}


def _settings(types: set[str]) -> str | None:
    """Sources of the configurations of model types; None where one of them is in none."""
    text = "\n".join(each for name in types for each in _sources(name, "configuration_*.py"))
    return text if all(f'"{name}"' in text for name in types) else None


@cache
def _sources(model_type: str, pattern: str) -> tuple[str, ...]:
    """Files of the installed transformers for a model type; none where no folder is called so."""
    folder = _folder("transformers")
    name = model_type.replace("-", "_")
    if folder is None or not name.isidentifier():
        return ()
    try:
        paths = sorted((folder / "models" / name).glob(pattern))
        return tuple(path.read_text(encoding="utf-8") for path in paths)
    except (OSError, ValueError):
        return ()


@cache
def _target_tables() -> dict[str, frozenset[str]]:
    """Model types by method, without the underlines of its name.

    Tables are literals, copies of others, and both with entries that are set one by one.
    """
    tables: dict[str, set[str]] = {}
    for line in _statements("peft", "utils/constants.py"):
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if all(
                isinstance(key, ast.Constant) for key in keys
            ):
                tables[name] = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=other), attr="copy"), args=[]),
            ) if other in tables:
                tables[name] = set(tables[other])
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key))]
            ) if name in tables:
                tables[name].add(str(key))
            case _:
                # changed in a way that is not followed
                for name in _names(line):
                    tables.pop(name, None)
    wanted = {_TABLE.format(method.replace("_", "").upper()): method for method in peft_methods()}
    return {
        wanted[name].replace("_", ""): frozenset(types)
        for name, types in tables.items()
        if name in wanted
    }


def _names(statement: ast.stmt) -> Iterator[str]:
    return (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


def _statements(package: str, path: str) -> list[ast.stmt]:
    """Statements of a file of an installed package; none where it is not there."""
    folder = _folder(package)
    try:
        text = "" if folder is None else (folder / path).read_text(encoding="utf-8")
        return ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return []


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None
