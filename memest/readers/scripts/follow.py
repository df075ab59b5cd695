"""A script followed from its first statement to its last, with names in place of running.

Statements are taken in their order and functions of the script where they are called, so a name
stands for what it was last given. What is assigned under a condition that cannot be told, or
again in a loop, is unknown afterwards; calls of libraries are written down and not made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from memest.errors import ConfigError
from memest.readers.scripts.calling import NO_GRAD, Calls, is_over_weights, root_of
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.expressions import Names, as_text, truth_of
from memest.readers.scripts.source import Source
from memest.readers.scripts.things import (
    Call,
    Class,
    Function,
    Namespace,
    Symbol,
    Unknown,
    Value,
    entry_of,
)

__all__ = ["Follower", "follow"]

_REST = "**"
"""The entry of a mapping that stands for others, which cannot be told."""

_LOADERS = ("DataLoader", "create_loader")
"""What makes batches: torch's class, timm's function."""


class Follower(Calls):
    """Follows a script from its first statement to its last."""

    def hand_on(self) -> None:
        """What is followed from here on is called by whoever it was handed to."""
        self._hands_on = True

    def enter(self) -> None:
        """Follow the commands that the script has and calls nowhere: the one that is named."""
        commands = {name: each for each in self.functions for name in self.command_names(each)}
        named = [commands[word] for word in (self._line.words or ()) if word in commands]
        for function in dict.fromkeys(named[:1] or commands.values()):
            self.inlined(function, [], {}, function.node)
        for function in commands.values():
            function.is_followed = True

    def follow(self, statements: Sequence[ast.stmt], names: Names) -> bool:
        """Follow statements; True where one of them leaves the function for certain."""
        for statement in statements:
            self.step()
            handle = getattr(self, f"_do_{type(statement).__name__.lower()}", self._parts)
            if handle(statement, names) is True:
                return True
        return False

    def _do_expr(self, node: ast.Expr, names: Names) -> None:
        self.value_of(node.value, names)

    def _do_import(self, node: ast.Import, names: Names) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            names.own[name] = Value(Symbol(alias.name if alias.asname else name))

    def _do_importfrom(self, node: ast.ImportFrom, names: Names) -> None:
        for alias in node.names:
            path = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            names.own[alias.asname or alias.name] = Value(Symbol(path))

    def _do_assign(self, node: ast.Assign, names: Names) -> None:
        value = self.value_of(node.value, names)
        for target in node.targets:
            self._assign(target, value, names)
            self._note_labels(target, node.value, names)

    def _note_labels(self, target: ast.expr, node: ast.expr, names: Names) -> None:
        """``inputs["labels"] = labels["input_ids"]``: what was made of the targets' texts."""
        key = target.slice if isinstance(target, ast.Subscript) else None
        if not isinstance(target, ast.Subscript) or not isinstance(key, ast.Constant):
            return
        if key.value in ("labels", "decoder_input_ids", "target_ids"):
            base = self.value_of(target.value, names).data
            for each in ast.walk(node):
                made = names.find(each.id) if isinstance(each, ast.Name) else None
                if made is not None and isinstance(made.data, Call) and made.data is not base:
                    made.data.keywords.setdefault("text_target", Value(True))

    def _do_annassign(self, node: ast.AnnAssign, names: Names) -> None:
        if node.value is not None:
            self._assign(node.target, self.value_of(node.value, names), names)

    def _do_augassign(self, node: ast.AugAssign, names: Names) -> None:
        target = node.target
        before, more = self.value_of(target, names), self.value_of(node.value, names)
        if self._loops and isinstance(more.data, list):
            kept = [more.with_data(each) for each in more.data]
            self._note("extend", node.lineno, kept, {}, receiver=Unknown(as_text(target)))
        base = None if isinstance(target, ast.Name) else self.value_of(target.value, names).data
        if base is None or isinstance(base, (Namespace, dict)):
            # of anything else it changes what is there, in its place
            self._assign(target, self.combined(node, node.op, before, more), names)

    def _assign(self, target: ast.expr, value: Value, names: Names) -> None:
        if isinstance(target, ast.Name):
            names, around = names.owner(target.id), names
            if names is not around and (self._conditions or self._conditional_calls):
                value = self.unknown(target, f"{target.id} is set under a condition")
            before = names.own.get(target.id)
            again = self._loops and before is not None and before.data != value.data
            if again and root_of(value.data) is not root_of(before and before.data):
                value = self.unknown(target, f"{target.id} changes in a loop")
            names.own[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each, part in zip(target.elts, self._unpacked(value, len(target.elts))):  # noqa: B905
                self._assign(each, part, names)
        elif isinstance(target, ast.Attribute):
            self._assign_attribute(target, value, names)
        elif isinstance(target, ast.Subscript):
            base, key = self.value_of(target.value, names), self.value_of(target.slice, names)
            if isinstance(base.data, dict) and isinstance(key.data, (str, int)):
                told = not self._conditions
                base.data[str(key.data)] = value.data if told else self.unknown(target).data
            elif isinstance(base.data, Symbol) and isinstance(key.data, str):
                self._note(f"{base.data.path}[]", target.lineno, (key, value), {})

    def _assign_attribute(self, target: ast.Attribute, value: Value, names: Names) -> None:
        path, node = [target.attr], target.value
        base = self.value_of(node, names)
        while isinstance(base.data, Unknown) and isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
            base = self.value_of(node, names)
        if isinstance(base.data, (Call, Namespace)) and len(path) == 1:
            kept = base.data.attributes if isinstance(base.data, Call) else base.data.values
            kept[target.attr] = (
                value
                if not self._conditions
                else self.unknown(target, f"{target.attr} is set under a condition")
            )
        name = "=" + ".".join(reversed(path))
        self._note(name, target.lineno, (value,), {}, receiver=base.data)

    def _unpacked(self, value: Value, count: int) -> list[Value]:
        data = value.data
        if isinstance(data, Call) and data.name == "prepare" and len(data.arguments) == count:
            return list(data.arguments)
        if isinstance(data, list) and len(data) == count:
            return [value.with_data(each) for each in data]
        if isinstance(data, Call):
            # a model comes with its tokenizer, or with its optimizer
            rest = Unknown(f"a further result of {data.path}", data.line)
            return [value, *[Value(rest)] * (count - 1)]
        return [value if isinstance(data, Unknown) else Value(Unknown("a part"))] * count

    def _do_delete(self, node: ast.Delete, names: Names) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                model = root_of(self.value_of(target, names).data)
                if isinstance(model, Call) and not self._conditions:
                    model.deleted = True
                names.own.pop(target.id, None)
                continue
            if isinstance(target, ast.Subscript):
                if as_text(target.value) == "globals()" and isinstance(target.slice, ast.Constant):
                    model = root_of(
                        self.value_of(ast.Name(str(target.slice.value)), self.names).data
                    )
                    if isinstance(model, Call):
                        model.deleted = True  # under a condition that it is there
                    continue
                of, key = self.value_of(target.value, names), self.value_of(target.slice, names)
                if isinstance(of.data, dict) and isinstance(key.data, str):
                    if self._conditions:
                        of.data[key.data] = self.unknown(target).data
                    else:
                        of.data.pop(key.data, None)
                    continue
            part = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(part, ast.Attribute):
                # layers that are cut off are another model, as others put there are
                self._assign_attribute(part, self.unknown(target, "what is deleted"), names)

    def _do_return(self, node: ast.Return, names: Names) -> bool:
        value = self.value_of(node.value, names)
        if self._returns:
            self._returns[-1].append(value)
        return not self._conditions or not self._returns

    def _do_global(self, node: ast.Global | ast.Nonlocal, names: Names) -> None:
        for name in node.names:
            names.declare(name, is_global=isinstance(node, ast.Global))

    _do_nonlocal = _do_global

    def _do_match(self, node: ast.Match, names: Names) -> None:
        self._line.use(self.value_of(node.subject, names).given)
        for case in node.cases:
            for each in ast.walk(case.pattern):
                name = getattr(each, "name", None) or getattr(each, "rest", None)
                if isinstance(name, str):
                    names.own[name] = self.unknown(node, f"{name} of a pattern")
            self.value_of(case.guard, names)
        self._branch(node.subject, [*(case.body for case in node.cases), ()], names)

    def _do_if(self, node: ast.If, names: Names) -> bool:
        test = self.value_of(node.test, names)
        truth = truth_of(test)
        self._line.use(test.given)
        if truth is not None:
            return self.follow(node.body if truth else node.orelse, names)
        self._branch(node.test, (node.body, node.orelse), names)
        return False

    def _branch(self, test: ast.expr, branches: Iterable[Sequence[ast.stmt]], names: Names) -> None:
        """Follow what may run and what may run in its place; names that differ are unknown."""
        before = dict(names.own)
        ends: list[dict[str, Value]] = []
        self._conditions.append(test)
        self._divisors.append(self._divisor(test, names))
        for branch in branches:
            names.own = dict(before)
            self.follow(branch, names)
            ends.append(names.own)
        self._conditions.pop()
        self._divisors.pop()
        names.own = dict(before)
        for name in dict.fromkeys(name for end in ends for name in end):
            names.own[name] = self._merged(name, test, [end.get(name) for end in ends])

    def _divisor(self, test: ast.expr, names: Names) -> Value:
        """N of ``step % N == 0``; nothing for any other condition."""
        for node in ast.walk(test):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return self.value_of(node.right, names)
        return Value(None)

    def _merged(self, name: str, test: ast.expr, values: Sequence[Value | None]) -> Value:
        first = values[0]
        if first is not None and all(
            each is not None and each.data == first.data for each in values
        ):
            return first
        for each in values:
            if each is not None and isinstance(each.data, Function):
                each.data.is_uncertain = True
        roots = {id(root_of(each.data)) if each is not None else 0 for each in values}
        if first is not None and len(roots) == 1 and isinstance(first.data, Call):
            return Value(root_of(first.data))
        return self.unknown(test, f"{name} depends on: {as_text(test)}")

    def _do_for(self, node: ast.For | ast.AsyncFor, names: Names) -> None:
        if self._sets_entries(node, names):
            return
        iterated = self.value_of(node.iter, names)
        over_weights = is_over_weights(iterated)
        self._forget(node.target, names)
        self._loops_over_weights += over_weights
        loaders = self._loaders
        self._loaders = [*loaders, *self._loaders_in(node.iter, iterated, names)]
        self._loop(node, names)
        self._loaders = loaders
        self._loops_over_weights -= over_weights

    def _sets_entries(self, node: ast.For | ast.AsyncFor, names: Names) -> bool:
        """``for k, v in settings.items(): setattr(args, k, v)``, entry by entry; else False."""
        source = node.iter.func if isinstance(node.iter, ast.Call) else None
        is_items = isinstance(source, ast.Attribute) and source.attr == "items"
        if not is_items or not isinstance(source, ast.Attribute) or not _only_sets(node.body):
            return False
        whole = self.value_of(source.value, names)
        if not isinstance(whole.data, dict) or _REST in whole.data:
            return False
        for key in list(whole.data):
            self._assign(node.target, Value([key, entry_of(whole, key).data]), names)
            self.follow(node.body, names)
        return True

    def _loaders_in(self, node: ast.expr, iterated: Value, names: Names) -> list[Call]:
        """The loaders that a loop goes over, ``enumerate(tqdm(loader))`` among them."""
        inner = (each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
        roots = [
            root_of(each.data) for each in (iterated, *(self.value_of(e, names) for e in inner))
        ]
        return [each for each in roots if isinstance(each, Call) and each.name in _LOADERS][:1]

    _do_asyncfor = _do_for

    def _do_while(self, node: ast.While, names: Names) -> None:
        self._loop(node, names)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, names: Names) -> None:
        self._loops.append(node.lineno)
        if isinstance(node, ast.While):
            self.value_of(node.test, names)
        self.follow(node.body, names)
        self._loops.pop()
        self.follow(node.orelse, names)

    def _do_with(self, node: ast.With | ast.AsyncWith, names: Names) -> bool:
        for item in node.items:
            value = self.value_of(item.context_expr, names)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, names)
        without_grad = any(NO_GRAD.search(as_text(item.context_expr)) for item in node.items)
        self._without_grad += without_grad
        left = self.follow(node.body, names)
        self._without_grad -= without_grad
        return left

    _do_asyncwith = _do_with

    def _do_try(self, node: ast.Try, names: Names) -> bool:
        left = self.follow(node.body, names)
        kept = dict(names.own)
        for handler in node.handlers:
            self._conditions.append(handler.type or ast.Constant("except"))
            self.follow(handler.body, names)
            self._conditions.pop()
        # what an exception would have led to is not what a run does
        names.own = {**names.own, **kept}
        left = left or self.follow(node.orelse, names)
        return self.follow(node.finalbody, names) or left

    _do_trystar = _do_try

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        function = Function(node, names, self._owners[-1] if self._owners else "")
        function.entry = tuple(self.entry_of(node, names))
        names.own[node.name] = Value(function)
        self.functions.append(function)

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef, names: Names) -> None:
        base = ""
        fields: dict[str, Value | None] = {}
        methods: dict[str, Function] = {}
        for each in node.bases:
            data = self.value_of(each, names).data
            if isinstance(data, Class):
                fields, methods = {**data.fields, **fields}, {**data.methods, **methods}
            base = base or (
                data.path
                if isinstance(data, Symbol)
                else data.base
                if isinstance(data, Class)
                else ""
            )
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = self._field(statement.value, names)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                fields[statement.targets[0].id] = self.value_of(statement.value, names)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                methods[statement.name] = Function(statement, names, node.name)
        made = Class(node.name, base, fields, methods)
        self.classes.append(made)
        names.own[node.name] = Value(made)

    def _field(self, node: ast.expr | None, names: Names) -> Value | None:
        """The default of a field, that of ``field(default=...)`` among them."""
        if isinstance(node, ast.Call) and as_text(node.func).rpartition(".")[2] == "field":
            for keyword in node.keywords:
                if keyword.arg == "default":
                    return self.value_of(keyword.value, names)
                if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Lambda):
                    return self.value_of(keyword.value.body, names)
                if keyword.arg == "default_factory":
                    made = self.value_of(keyword.value, names).data
                    is_class = isinstance(made, Class) and not made.base
                    return self._made(made, [], {}, node) if is_class else self.unknown(node)
            return None
        return None if node is None else self.value_of(node, names)


def _only_sets(body: Sequence[ast.stmt]) -> bool:
    """Whether statements do nothing but give things their entries."""
    for each in body:
        if isinstance(each, ast.If):
            if not _only_sets(each.body) or not _only_sets(each.orelse):
                return False
            continue
        call = each.value if isinstance(each, ast.Expr) else None
        if not isinstance(call, ast.Call) or as_text(call.func) != "setattr":
            return False
    return True


def follow(source: Source, line: CommandLine) -> Follower:
    """Follow a script.

    Args:
        source: of it.
        line: the words behind its name.

    Raises:
        ConfigError: it is too long or too deep to follow.
    """
    follower = Follower(source, line)
    try:
        follower.follow(source.body, follower.names)
        used = {
            each.id
            for statement in source.body
            for each in ast.walk(statement)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        }
        follower.enter()
        follower.hand_on()
        for function in list(follower.functions):
            # handed to somebody who calls them: what they are given is not known
            name = getattr(function.node, "name", "")
            if not function.is_followed and (name in used or not name):
                given = {**follower.parameters_of(function), **follower.named(function)}
                follower.inlined(function, [], given, function.node)
        for made in [call for call in follower.calls if call.methods]:
            for value in list(made.attributes.values()):
                method = value.data
                if isinstance(method, Function) and not method.is_followed:
                    follower.inlined(method, [], {}, method.node)
    except RecursionError:
        raise ConfigError(f"{source.name} is nested too deep to follow.") from None
    return follower
