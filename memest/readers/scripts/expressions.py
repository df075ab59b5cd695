"""What an expression of a script stands for, as far as that can be told without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from sys import intern
from typing import Any

from memest.errors import ConfigError
from memest.readers.scripts.things import (
    Call,
    Class,
    Function,
    Namespace,
    Symbol,
    Unknown,
    Value,
    entry_of,
    is_unknown,
)

__all__ = ["DATA_SETS", "Expressions", "Names", "as_text", "path_of", "truth_of"]

_MAX_DEPTH = 60
_MAX_TEXT = 10_000
_MAX_NUMBER = 2**48
_MAX_ITEMS = 2000
_MAX_NESTED = 20
MAX_STEPS = 100_000
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
DATA_SETS = frozenset(
    """load_dataset load_from_disk DatasetDict map filter shuffle select train_test_split
    with_transform with_format remove_columns rename_column cast_column""".split()
)
"""Functions and methods that make data sets of several parts, ``tokenized["train"]``."""
_BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "min": min,
    "max": max,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": list,
    "round": round,
    "abs": abs,
}
"""Functions of Python that are applied to plain values."""


class Names:
    """Names of a module or a function, and those around it."""

    __slots__ = ("_around", "_elsewhere", "own")

    def __init__(self, around: Names | None = None) -> None:
        self.own: dict[str, Value] = {}
        self._around = around
        self._elsewhere: dict[str, Names] = {}

    def declare(self, name: str, *, is_global: bool) -> None:
        """``global`` and ``nonlocal``: a name of the module, or of a function around this one."""
        names = self
        while names._around is not None and (is_global or names is self or name not in names.own):
            names = names._around
        self._elsewhere[name] = names

    def owner(self, name: str) -> Names:
        """Whose name it is that is given a value here."""
        return self._elsewhere.get(name, self)

    def find(self, name: str) -> Value | None:
        """What a name stands for, None where nothing gives it a value."""
        names: Names | None = self
        while names is not None:
            if name in names.own:
                return names.own[name]
            names = names._around
        return None


def as_text(node: ast.AST) -> str:
    """An expression as it is written, cut where it is long."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) < 60 else f"{text[:57]}..."


def path_of(node: ast.expr) -> list[str] | None:
    """``a.b.c`` as its parts, None for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def truth_of(value: Value) -> bool | None:
    """Whether a condition holds, None where that cannot be told."""
    data = value.data
    if isinstance(data, (Unknown, Symbol)) or is_unknown(data):
        return None
    if isinstance(data, Call):
        return True if data.is_instance else None
    return True if isinstance(data, (Class, Function, Namespace)) else bool(data)


class Expressions:
    """Evaluates expressions; what calls do is the subclass's matter."""

    def __init__(self, label: str) -> None:
        self.functions: list[Function] = []
        self._label = label
        self._steps = 0
        self._depth = 0

    def call(self, node: ast.Call, names: Names) -> Value:
        """What a call returns."""
        raise NotImplementedError

    def step(self) -> None:
        """Count one more thing that is followed.

        Raises:
            ConfigError: it is too much for a script.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ConfigError(f"{self._label} is too long to follow without running it.")

    def unknown(self, node: ast.AST, why: str = "") -> Value:
        """A value that cannot be told, by how it is written."""
        return Value(Unknown(why or as_text(node), getattr(node, "lineno", 0)))

    def value_of(self, node: ast.expr | None, names: Names) -> Value:
        """What an expression stands for."""
        if node is None:
            return Value(None)
        self.step()
        if self._depth > _MAX_DEPTH:
            return self.unknown(node, "nested too deep")
        self._depth += 1
        try:
            evaluate = getattr(self, f"_{type(node).__name__.lower()}", self._parts)
            value: Value = evaluate(node, names)
            return value
        finally:
            self._depth -= 1

    def _parts(self, node: ast.AST, names: Names) -> Value:
        """What cannot be told, whose parts are made all the same."""
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.expr):
                self.value_of(each, names)
        return self.unknown(node)

    # -- one function for each kind of expression

    def _constant(self, node: ast.Constant, _names: Names) -> Value:
        data = node.value
        plain = data is None or isinstance(data, (bool, int, float, str))
        too_long = isinstance(data, str) and len(data) > _MAX_TEXT
        too_large = isinstance(data, int) and not isinstance(data, bool) and abs(data) > 1 << 62
        return self.unknown(node) if not plain or too_long or too_large else Value(data)

    def _name(self, node: ast.Name, names: Names) -> Value:
        value = names.find(node.id)
        if value is None:
            return Value(Unknown(node.id, node.lineno))
        if isinstance(value.data, Unknown) and not value.data.line:
            return value.with_data(Unknown(value.data.why, node.lineno))
        return value

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        return self.attribute_of(self.value_of(node.value, names), node)

    def attribute_of(self, base: Value, node: ast.Attribute) -> Value:
        """An attribute of what was evaluated."""
        data = base.data
        if isinstance(data, Symbol):
            return base.with_data(Symbol(f"{data.path}.{node.attr}"))
        if isinstance(data, Namespace):
            if node.attr == "__dict__":
                return base
            method = data.methods.get(node.attr)
            found = data.values.get(node.attr, data.rest if method is None else Value(method))
            return self.unknown(node) if found is None else found
        if isinstance(data, Call):
            of_instance = data.keywords.get(node.attr) if data.is_instance else None
            found = data.attributes.get(node.attr, of_instance)
            return self.unknown(node) if found is None else found
        if isinstance(data, Class):
            if node.attr in data.methods:
                return Value(data.methods[node.attr].bound(None, data))
            return data.fields.get(node.attr) or self.unknown(node)
        if isinstance(data, Mapping) and node.attr in data:
            return entry_of(base, node.attr)
        return self.unknown(node)

    def _subscript(self, node: ast.Subscript, names: Names) -> Value:
        base, key = self.value_of(node.value, names), self.value_of(node.slice, names)
        of, by = base.data, key.data
        if isinstance(of, dict) and isinstance(by, (str, int)) and str(by) in of:
            return entry_of(base, str(by)).beside(key)
        if isinstance(of, Call) and of.name in DATA_SETS:
            return base  # a part of it, as long as the others
        if isinstance(of, Symbol) and of.name == "__dict__" and isinstance(by, str):
            return Value(Symbol(f"{of.path.removesuffix('.__dict__')}.{by}")).beside(key)
        if isinstance(of, (list, str)) and isinstance(by, int) and -len(of) <= by < len(of):
            return base.with_data(of[by]).beside(key)
        return self.unknown(node)

    def _dict(self, node: ast.Dict, names: Names) -> Value:
        data: dict[str, Any] = {}
        keys = [None if key is None else self.value_of(key, names).data for key in node.keys]
        values = [self.value_of(each, names) for each in node.values]
        for key_node, key, value in zip(node.keys, keys, values, strict=True):
            if key_node is not None and isinstance(key, (str, int)):
                data[str(key)] = value.data
            elif key_node is None and isinstance(value.data, dict):
                data.update(value.data)
            else:
                return self.unknown(node)
        return self._bounded(node, data).beside(*values)

    def _list(self, node: ast.List | ast.Tuple | ast.Set, names: Names) -> Value:
        items: list[Any] = []
        parts = [
            self.value_of(each.value if isinstance(each, ast.Starred) else each, names)
            for each in node.elts
        ]
        for each, value in zip(node.elts, parts, strict=True):
            if not isinstance(each, ast.Starred):
                items.append(value.data)
            elif isinstance(value.data, (list, tuple)):
                items += value.data
            else:
                return self.unknown(node)
        return self._bounded(node, items).beside(*parts)

    _tuple = _set = _list

    def _bounded(self, node: ast.AST, data: Any) -> Value:
        """A collection, unknown where it is larger than any configuration."""
        queue, count = [(data, 0)], 0
        while queue:
            each, depth = queue.pop()
            count += 1
            if count > _MAX_ITEMS or depth > _MAX_NESTED:
                self._steps += _MAX_ITEMS // 10
                return self.unknown(node, "larger than any configuration")
            if isinstance(each, dict):
                queue += [(part, depth + 1) for part in each.values()]
            elif isinstance(each, list):
                queue += [(part, depth + 1) for part in each]
        return Value(data)

    def _joinedstr(self, node: ast.JoinedStr, names: Names) -> Value:
        parts = [
            self.value_of(each.value if isinstance(each, ast.FormattedValue) else each, names)
            for each in node.values
        ]
        told = all(isinstance(value.data, (str, int)) for value in parts) and not any(
            isinstance(each, ast.FormattedValue) and each.format_spec for each in node.values
        )
        text = "".join(str(value.data) for value in parts) if told else ""
        return Value(text).beside(*parts) if told and len(text) <= _MAX_TEXT else self.unknown(node)

    def _binop(self, node: ast.BinOp, names: Names) -> Value:
        left, right = self.value_of(node.left, names), self.value_of(node.right, names)
        return self.combined(node, node.op, left, right)

    def combined(self, node: ast.AST, how: ast.operator, left: Value, right: Value) -> Value:
        """Two values by an operator: numbers, and texts and lists that are added."""
        pair = (left.data, right.data)
        compute = _OPERATORS.get(type(how))
        numbers = all(isinstance(each, (int, float)) and abs(each) < _MAX_NUMBER for each in pair)
        sums = isinstance(how, ast.Add) and any(
            all(isinstance(each, kind) and len(each) < _MAX_TEXT for each in pair)
            for kind in (str, list)
        )
        small = not isinstance(how, (ast.Pow, ast.LShift)) or (
            numbers and 0 <= pair[1] <= 48 and abs(pair[0]) <= 1 << 16
        )
        if compute is None or not (numbers or sums) or not small:
            return self.unknown(node)
        try:
            return self._bounded(node, compute(*pair)).beside(left, right)
        except (ArithmeticError, TypeError, ValueError):
            return self.unknown(node)

    def _unaryop(self, node: ast.UnaryOp, names: Names) -> Value:
        value = self.value_of(node.operand, names)
        if isinstance(node.op, ast.Not):
            truth = truth_of(value)
            return self.unknown(node) if truth is None else value.with_data(not truth)
        number = isinstance(value.data, (int, float)) and not isinstance(value.data, bool)
        if number and isinstance(node.op, (ast.USub, ast.UAdd)):
            return value.with_data(-value.data if isinstance(node.op, ast.USub) else value.data)
        return self.unknown(node)

    def _boolop(self, node: ast.BoolOp, names: Names) -> Value:
        decisive, told = isinstance(node.op, ast.Or), True
        parts: list[Value] = []
        for each in node.values:
            value = self.value_of(each, names)
            parts.append(value)
            truth = truth_of(value)
            told &= truth is not None
            if truth is decisive:
                break
        return parts[-1].beside(*parts) if told else self.unknown(node)

    def _compare(self, node: ast.Compare, names: Names) -> Value:
        left = self.value_of(node.left, names)
        right, *more = [self.value_of(each, names) for each in node.comparators]
        compare = _COMPARISONS.get(type(node.ops[0]))
        pair = (left.data, right.data)
        if more or compare is None or any(is_unknown(each) for each in pair):
            return self.unknown(node)
        if all(isinstance(each, Symbol) and each.library == "torch" for each in pair):
            # dtypes and devices are one of each name
            pair = (intern(left.data.path), intern(right.data.path))
        if any(isinstance(each, (Symbol, Function, Namespace)) for each in pair):
            return self.unknown(node)
        if any(isinstance(each, Call) and not each.is_instance for each in pair):
            return self.unknown(node)
        try:
            return Value(bool(compare(*pair))).beside(left, right)
        except TypeError:
            return self.unknown(node)

    def _ifexp(self, node: ast.IfExp, names: Names) -> Value:
        test = self.value_of(node.test, names)
        truth = truth_of(test)
        if truth is not None:
            return self.value_of(node.body if truth else node.orelse, names).beside(test)
        first, second = self.value_of(node.body, names), self.value_of(node.orelse, names)
        return first if first.data == second.data else self.unknown(node)

    def _lambda(self, node: ast.Lambda, names: Names) -> Value:
        function = Function(node, names)
        self.functions.append(function)
        return Value(function)

    def _namedexpr(self, node: ast.NamedExpr, names: Names) -> Value:
        value = self.value_of(node.value, names)
        names.owner(node.target.id).own[node.target.id] = value
        return value

    def _await(self, node: ast.Await, names: Names) -> Value:
        return self.value_of(node.value, names)

    def _call(self, node: ast.Call, names: Names) -> Value:
        return self.call(node, names)

    def builtin(
        self, name: str, node: ast.Call, arguments: list[Value], keywords: Mapping[str, Value]
    ) -> Value | None:
        """A function of Python on plain values, None where it is none of those."""
        first = arguments[0].data if arguments else None
        second = arguments[1].data if len(arguments) > 1 else None
        if name == "vars" and arguments:
            return arguments[0]
        if name == "getattr" and isinstance(first, Symbol) and isinstance(second, str):
            return Value(Symbol(f"{first.path}.{second}")).beside(*arguments)
        function = _BUILTINS.get(name)
        if function is None:
            return None
        if name == "dict" and not arguments and "**" not in keywords:
            made = {key: value.data for key, value in keywords.items()}
            return self._bounded(node, made).beside(*keywords.values())
        data = [each.data for each in arguments]
        things = (Unknown, Symbol, Call, Class, Function, Namespace)
        if keywords or any(is_unknown(each) or isinstance(each, things) for each in data):
            return self.unknown(node)
        try:
            result = function(*data)
        except (TypeError, ValueError, ArithmeticError):
            return self.unknown(node)
        return Value(list(result) if isinstance(result, tuple) else result).beside(*arguments)
