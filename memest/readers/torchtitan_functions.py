"""torchtitan's configurations that are Python: read from the syntax tree, never run.

A function returns ``Trainer.Config(...)`` or changes what another function of the file returns.
Literals and sums of them are values; everything else is unknown and said to be.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memest.errors import ConfigError, closest
from memest.readers.documents import read_source
from memest.readers.scripts.expressions import as_text, path_of
from memest.readers.scripts.source import parse_python
from memest.readers.values import Remark

__all__ = ["makes_config", "read_function", "registry_file", "take_checkpointing"]

_MAX_DEPTH = 40
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_SECTIONS = ("training", "parallelism", "optimizer", "compile", "activation_checkpoint")
_QUIET_SECTIONS = ("loss", "validator", "validation", "debug", "override")
"""Sections of which only what is literal counts: the rest is data, or as large as it is anyway."""
_TRAINERS = ("Trainer", "JobConfig")
_OPTIMIZERS = ("default_adamw", "OptimizersContainer")
_CHECKPOINTS = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
_HARMLESS = (ast.Expr, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef)
"""Statements that set nothing: a function inside is seen where it is called."""
_UNKNOWN = object()


def read_function(
    path: Path, name: str | None, label: str
) -> tuple[dict[str, Any], tuple[Remark, ...]]:
    """The settings that a function returns, by section, and what is unknown.

    Args:
        path: of the file.
        name: of the function; None where the file has one alone.
        label: how to call the file.

    Raises:
        ConfigError: no Python, no such function, or several and none named.
    """
    body = parse_python(read_source(path, label), label)
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    makers = {key: node for key, node in functions.items() if _returns_config(node)}
    if name is None:
        if len(makers) != 1:
            names = ", ".join(makers) or "none"
            raise ConfigError(
                f"{label} has {len(makers)} functions that make a configuration ({names}): name "
                f"one, for example {label}:{next(iter(makers), 'llama3_8b')}."
            )
        name = next(iter(makers))
    if name not in functions:
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in body):
            raise ConfigError(
                f"{label}:{name} is a class, and no configuration: name it in the place of MODEL."
            )
        matches = closest(name, functions)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise ConfigError(f"{label} has no function {name}.{hint}")
    reader = _Function(functions, label)
    settings = reader.settings_of(name, 0)
    if "class" in settings.get("activation_checkpoint", {}):
        # classes of June 2026, as old as the default of model_registry
        settings["activation_checkpoint"].pop("class")
        settings.setdefault("model", {}).setdefault("attn_backend", "the default, flex or varlen,")
    return settings, tuple(reader.unknown)


_CHECKPOINTING_WORD = "activation-checkpoint:"


def take_checkpointing(arguments: dict[str, Any], positionals: list[str]) -> dict[str, Any]:
    """``activation-checkpoint:full``, a word that may stand behind an argument's value.

    Args:
        arguments: of the command; values lose the word.
        positionals: loose words, which lose it too.

    Returns:
        What it says, as arguments; nothing where it is not there.
    """
    found = [word for word in positionals if word.startswith(_CHECKPOINTING_WORD)]
    positionals[:] = [word for word in positionals if word not in found]
    for key, value in arguments.items():
        if isinstance(value, list):
            marked = [word for word in value if str(word).startswith(_CHECKPOINTING_WORD)]
            rest = [word for word in value if word not in marked]
            arguments[key] = rest[0] if marked and len(rest) == 1 else rest
            found += marked
    if not found:
        return {}
    mode = found[-1].removeprefix(_CHECKPOINTING_WORD).replace("-", "_")
    return {
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": "op",
    }


def registry_file(module: str, function: str) -> Path:
    """The file of torchtitan's configurations of a model, in the folder that it is started in.

    Raises:
        ConfigError: it is not there.
    """
    path = Path("torchtitan", "models", module, "config_registry.py")
    if not path.is_file():
        raise ConfigError(
            f"the launch command names torchtitan's configuration {function} of {module}, and "
            f"{path} is not here. Run memest in torchtitan's folder, or name the file: memest "
            f"estimate FOLDER/{path}:{function}."
        )
    return path


def makes_config(path: Path, label: str) -> bool:
    """Whether a file is one of torchtitan's: it imports torchtitan, or makes a ``Trainer.Config``.

    Raises:
        ConfigError: it cannot be read, or is no Python.
    """
    text = read_source(path, label)
    if "torchtitan" not in text and "Trainer.Config" not in text:
        return False
    for statement in parse_python(text, label):
        for node in ast.walk(statement):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "torchtitan" for name in names):
                return True
            if isinstance(node, ast.Attribute) and path_of(node) == ["Trainer", "Config"]:
                return True
    return False


def _returns_config(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node))


class _Function:
    def __init__(self, functions: dict[str, ast.FunctionDef], label: str) -> None:
        self._functions = functions
        self._label = label
        self.unknown: list[Remark] = []

    def settings_of(self, name: str, depth: int) -> dict[str, Any]:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{self._label}: {name} is made of itself.")
        settings: dict[str, Any] = {}
        bindings: dict[str, Any] = {}
        bases: set[str] = set()
        for statement in self._functions[name].body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, value = statement.targets[0], statement.value
                if isinstance(target, ast.Attribute):
                    self._assign(settings, target, value, bindings, bases)
                elif isinstance(target, ast.Name):
                    new_settings = self._settings_by_call(value, bindings, depth)
                    if new_settings is None:
                        bindings[target.id] = value
                    else:
                        settings = new_settings
                        bases.add(target.id)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                new_settings = self._settings_by_call(statement.value, bindings, depth)
                if new_settings is not None:
                    settings = new_settings
                elif not (isinstance(statement.value, ast.Name) and statement.value.id in bases):
                    self._miss(name, statement.value)
            elif not isinstance(statement, _HARMLESS):
                line = getattr(statement, "lineno", 0)
                self.unknown.append(
                    Remark(f"{self._label}:{line}", "a statement that is not read: no literal")
                )
        return settings

    def _settings_by_call(
        self, value: ast.expr | None, bindings: dict[str, Any], depth: int
    ) -> dict[str, Any] | None:
        """The settings that a call makes, None for anything else."""
        path = path_of(value.func) if isinstance(value, ast.Call) else None
        if path is None:
            return None
        assert isinstance(value, ast.Call)
        if len(path) == 1:
            name = path[0]
            return self.settings_of(name, depth + 1) if name in self._functions else None
        return self._config(value, bindings) if path[-1] == "Config" else None

    def _assign(
        self,
        settings: dict[str, Any],
        target: ast.Attribute,
        value: ast.expr,
        bindings: dict[str, Any],
        bases: set[str],
    ) -> None:
        path = path_of(target)
        if path is None or path[0] not in bases:
            return
        if path[1:] == ["model_spec"]:
            settings["model"] = self._model(value, bindings, settings.get("model", {}))
        elif len(path) == 3:
            literal = self._literal(value, bindings)
            if literal is _UNKNOWN:
                self._miss(".".join(path[1:]), value)
                settings.setdefault(path[1], {}).pop(path[2], None)
            else:
                settings.setdefault(path[1], {})[path[2]] = literal
        elif len(path) == 2:
            self._set(settings, path[1], value, bindings)

    def _config(self, call: ast.Call, bindings: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {"activation_checkpoint": {"selective_ac_option": "op"}}
        path = path_of(call.func) or []
        if len(path) > 1 and path[-2] not in _TRAINERS:
            settings["class"] = path[-2]
        for keyword in call.keywords:
            if keyword.arg is None:
                self._miss("**", keyword.value)
            else:
                self._set(settings, keyword.arg, keyword.value, bindings)
        return settings

    def _set(
        self, settings: dict[str, Any], name: str, value: ast.expr, bindings: dict[str, Any]
    ) -> None:
        """One field of the configuration; those that are no sections of numbers, as their text."""
        bound = bindings.get(value.id) if isinstance(value, ast.Name) else None
        value = bound if isinstance(bound, ast.expr) else value
        literal = self._literal(value, bindings)
        if name == "model_spec":
            settings["model"] = self._model(value, bindings, settings.get("model", {}))
        elif name == "hf_assets_path":
            if literal is not _UNKNOWN:
                settings.setdefault("model", {})["hf_assets_path"] = literal
        elif name == "activation_checkpoint" and literal is None:
            settings[name] = {"mode": "none"}
        elif isinstance(value, ast.Call) and name in (*_SECTIONS, *_QUIET_SECTIONS):
            settings[name] = self._section(name, value, bindings)
        elif name in _SECTIONS:
            self._miss(name, value)
        else:
            settings[name] = as_text(value) if literal is _UNKNOWN else literal

    def _model(
        self, value: ast.expr, bindings: dict[str, Any], before: dict[str, Any]
    ) -> dict[str, Any]:
        if isinstance(value, ast.Name) and isinstance(bindings.get(value.id), ast.expr):
            value = bindings[value.id]
        model = dict(before)
        # torchtitan keeps each family's functions in a folder of its name
        model["name"] = Path(self._label).expanduser().absolute().parent.name
        if isinstance(value, ast.Call) and value.args:
            flavor = self._literal(value.args[0], bindings)
            if flavor is not _UNKNOWN:
                model["flavor"] = flavor
            for word in value.keywords:
                literal = self._literal(word.value, bindings)
                model[word.arg or "**"] = as_text(word.value) if literal is _UNKNOWN else literal
        else:
            self._miss("model_spec", value)
        return model

    def _section(self, name: str, call: ast.Call, bindings: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        path = path_of(call.func) or [""]
        owner = path[-2] if path[-1] == "Config" and len(path) > 1 else path[-1]
        if name == "activation_checkpoint" and owner == "ActivationCheckpointConfig":
            settings["selective_ac_option"] = "op"
        elif name == "activation_checkpoint":
            kind = next((mode for part, mode in _CHECKPOINTS.items() if part in path), None)
            if kind is None:
                self._miss(name, call)
            else:
                settings["mode"] = kind
                settings["class"] = owner
                # the class of today chooses by operator
                settings["selective_ac_option"] = "op"
        elif name == "loss" or (name == "optimizer" and owner not in _OPTIMIZERS):
            settings["class"] = owner
        for keyword in call.keywords:
            if keyword.arg is None:
                self._miss(f"{name}.**", keyword.value)
                continue
            value = self._literal(keyword.value, bindings)
            if value is not _UNKNOWN:
                settings[keyword.arg] = value
            elif keyword.arg == "param_groups":
                settings |= _param_groups(keyword.value)
            elif name not in _QUIET_SECTIONS:
                self._miss(f"{name}.{keyword.arg}", keyword.value)
        return settings

    def _literal(self, value: ast.expr, bindings: dict[str, Any], depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            return _UNKNOWN
        if isinstance(value, ast.Name) and isinstance(bindings.get(value.id), ast.expr):
            return self._literal(bindings[value.id], {}, depth + 1)
        if isinstance(value, ast.BinOp) and type(value.op) in _OPERATORS:
            left = self._literal(value.left, bindings, depth + 1)
            right = self._literal(value.right, bindings, depth + 1)
            numbers = all(isinstance(n, (int, float)) and abs(n) < 2**40 for n in (left, right))
            if not numbers or (isinstance(value.op, ast.FloorDiv) and right == 0):
                return _UNKNOWN
            return _OPERATORS[type(value.op)](left, right)
        try:
            return ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _UNKNOWN

    def _miss(self, key: str, value: ast.expr) -> None:
        why = f"no literal, so unknown: {as_text(value)}"
        self.unknown.append(Remark(f"{self._label}:{key}", why))


def _param_groups(value: ast.expr) -> dict[str, Any]:
    """Groups of one optimizer, whatever their rates, are that optimizer."""
    names = {
        str(word.value.value)
        for word in ast.walk(value)
        if isinstance(word, ast.keyword)
        and word.arg == "optimizer_name"
        and isinstance(word.value, ast.Constant)
    }
    return {"name": names.pop()} if len(names) == 1 else {"param_groups": as_text(value)}
