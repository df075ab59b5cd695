"""Whether importing a module would train: what is named in a script runs all that is no function.

The syntax tree tells, before anything runs. Functions, classes and what stands under
``if __name__ == "__main__"`` do not run when a module is imported; functions that are called
outside of them do.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from memest.errors import ModelLoadError

__all__ = ["check_top_level"]

_STARTS = frozenset(("fit", "fit_one_cycle", "backward"))
"""Methods that train, whatever they are of; ``train`` is a trainer's, of a model it is a mode."""
_APART = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def check_top_level(module_name: str, label: str) -> None:
    """Refuse a module that trains where it is imported.

    Args:
        module_name: as it would be imported.
        label: how the user named it.

    Raises:
        ModelLoadError: it would.
        ImportError: there is no such module.
    """
    if module_name in sys.modules:
        return
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    path = Path(spec.origin)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the import says what is wrong with it
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    trainers = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes_trainer(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in _run_calls(tree.body, functions, set()):
        if _trains(call, trainers):
            raise ModelLoadError(
                f"{label} would train before it is answered: to import {path.name} runs its line "
                f"{call.lineno}, {ast.unparse(call.func)}(...). Put what trains under "
                "if __name__ == '__main__': in that file, or the model into a file of its own."
            )


def _run_calls(
    statements: Sequence[ast.AST], functions: dict[str, ast.FunctionDef], entered: set[str]
) -> Iterator[ast.Call]:
    """The calls that run where statements do, those of the module's own functions among them."""
    waiting = list(reversed(statements))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _is_main_guard(node.test):
            waiting += reversed(node.orelse)
            continue
        if isinstance(node, _APART):
            continue
        if isinstance(node, ast.Call):
            yield node
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in functions and name not in entered:
                entered.add(name)
                yield from _run_calls(functions[name].body, functions, entered)
        waiting += reversed(list(ast.iter_child_nodes(node)))


def _is_main_guard(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = (test.left, *test.comparators)
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)


def _trains(call: ast.Call, trainers: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in _STARTS:
        return True
    of = call.func.value
    named = isinstance(of, ast.Name) and (of.id in trainers or "trainer" in of.id.lower())
    return call.func.attr == "train" and (named or _makes_trainer(of))


def _makes_trainer(node: ast.AST) -> bool:
    """Whether an expression is ``Trainer(...)``, ``trl.SFTTrainer(...)``."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return str(name).endswith("Trainer")
