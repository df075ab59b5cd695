"""What calls of a script return: its own functions are followed, others written down."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Sequence
from typing import Any

from memest.readers.scripts.command_line import (
    DATACLASS_PARSERS,
    CommandLine,
    parsed_dataclasses,
)
from memest.readers.scripts.entries import Entries, parameters
from memest.readers.scripts.expressions import DATA_SETS, Names, as_text
from memest.readers.scripts.plain_data import plain_method
from memest.readers.scripts.source import Source
from memest.readers.scripts.things import (
    Call,
    Class,
    Function,
    NamedPart,
    Namespace,
    OpenFile,
    Part,
    Symbol,
    Unknown,
    Value,
    entry_of,
)

__all__ = [
    "COPIES_OF_WEIGHTS",
    "NO_GRAD",
    "SLICE",
    "WRAPPERS",
    "Calls",
    "innermost",
    "is_over_weights",
    "root_of",
]

_MAX_CALLS = 25
_GPU_QUESTIONS = frozenset(
    "is_bfloat16_supported is_bf16_supported is_torch_bf16_gpu_available is_bf16_available".split()
)
"""Functions that ask whether the GPU has bfloat16."""
_ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available": True,
    "torch.cuda.get_device_capability": [8, 0],
}
_OFF_BY_DEFAULT = ("fp16", "bf16", "gradient_checkpointing")
"""Fields of ``TrainingArguments`` that scripts ask for, and that are off unless named."""
_SAME = frozenset(
    """to cuda cpu train eval half bfloat16 float double requires_grad_ to_bettertransformer
    add_argument_group add_mutually_exclusive_group""".split()
)
"""Methods that return what they are called on."""
WRAPPERS = frozenset(
    """compile DataParallel DistributedDataParallel FullyShardedDataParallel FSDP get_peft_model
    prepare_model_for_kbit_training prepare_model_for_int8_training prepare_model prepare
    setup_chat_format setup setup_module replace_linear freeze_model convert_to_float8_training
    initialize fully_shard apply_liger_kernel for_training for_inference
    train_on_responses_only""".split()
)
"""Functions and methods that return the model they are given."""
SLICE = "?slice"
"""In place of a path: a part of something is taken, ``x[:, :128]``."""
COPIES_OF_WEIGHTS = "?copies of weights"
"""In place of a path: a copy of each weight, made in a loop over them."""
_CHANGES_OF_PARTS = frozenset(
    """to half bfloat16 float double append insert extend add_module register_module update
    update_from_string reset_parameters""".split()
)
"""Methods that change a part of a model, ``model.lm_head.to(torch.float32)``."""
NO_GRAD = re.compile(r"\b(no_grad|inference_mode)\b")
_SETTERS = ("set_training", "set_optimizer", "set_evaluate", "set_dataloader")
"""Methods of ``TrainingArguments`` that change several of them at once."""
_PARAMETERS = ("parameters", "named_parameters")
_WHOLE_MODELS = ("module", "_orig_mod")
"""Attributes by which wrappers have the model that they are given."""
_RUNNERS = frozenset(("Fire", "run", "cli", "notebook_launcher", "spawn"))
"""Functions that call the one they are given: Fire's, Typer's, tyro's, accelerate's, torch's."""


def root_of(data: Any) -> Any:
    """The load that a model comes from, through what was wrapped around it."""
    seen = 0
    while isinstance(data, Call) and seen < 50:
        seen += 1
        if data.name in WRAPPERS:
            inner = data.argument(0, "model", "module", "trainer")
        elif data.name == "from_pretrained" and data.maker.startswith("PeftModel"):
            inner = data.argument(0, "model")
        elif data.name in _SAME and data.receiver is not None:
            inner = Value(data.receiver)
        else:
            return data
        if inner is None or not isinstance(inner.data, (Call, list)):
            return data
        data = inner.data
    return data


def innermost(data: Any) -> Any:
    """The same, with what cannot be told inside of wrappers."""
    for _ in range(50):
        data = root_of(data)
        inner = data.argument(0, "model", "module") if isinstance(data, Call) else None
        if isinstance(data, Call) and data.name in WRAPPERS and inner is not None:
            data = inner.data
        elif isinstance(data, Call) and data.name in _SAME and data.receiver is not None:
            data = data.receiver
        else:
            break
    return data


class Calls(Entries):
    """Takes calls: those of the script's own functions are followed, others written down.

    Attributes:
        gpu_questions: lines where the GPU's answer decides.
    """

    def __init__(self, source: Source, line: CommandLine) -> None:
        super().__init__(source, line)
        self.gpu_questions: list[int] = []
        self.classes: list[Class] = []
        self.names.own["__name__"] = Value("__main__")
        self._conditions: list[ast.expr] = []
        self._divisors: list[Value] = []
        self._loops: list[int] = []
        self._loaders: list[Call] = []
        self._hands_on = False
        self._owners: list[str] = []
        self._active: list[Function] = []
        self._returns: list[list[Value]] = []
        self._loops_over_weights = 0
        self._without_grad = 0
        self._conditional_calls = 0

    def follow(self, statements: Sequence[ast.stmt], names: Names) -> bool:
        """Follow statements; True where one of them leaves the function for certain."""
        raise NotImplementedError

    def _subscript(self, node: ast.Subscript, names: Names) -> Value:
        value = super()._subscript(node, names)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if self._loops and isinstance(value.data, Unknown) and _cuts(parts):
            self._note(SLICE, node.lineno, (), {}, receiver=value.data)
        return value

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        base = self.value_of(node.value, names)
        value = self.attribute_of(base, node)
        if isinstance(value.data, Function) and "property" in value.data.decorators:
            return self.inlined(value.data, [], {}, node)
        is_off = isinstance(value.data, Unknown) and node.attr in _OFF_BY_DEFAULT
        if is_off and isinstance(base.data, Call) and base.data.name.endswith("TrainingArguments"):
            return Value(False, defaults=(f"--{node.attr}",))
        path = value.data.path if isinstance(value.data, Symbol) else ""
        return self.of_command(path) or value

    def _comprehension(self, node: ast.ListComp | ast.DictComp, names: Names) -> Value:
        """Its calls are made for every item; what it makes cannot be told."""
        inner = Names(names)
        over_weights = False
        weights = None
        for generator in node.generators:
            weights = self.value_of(generator.iter, inner)
            over_weights |= is_over_weights(weights)
            self._forget(generator.target, inner)
            for condition in generator.ifs:
                self.value_of(condition, inner)
        self._loops.append(node.lineno)
        self._loops_over_weights += over_weights
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for part in parts:
            self.value_of(part, inner)
        self._loops.pop()
        self._loops_over_weights -= over_weights
        if weights is None or len(node.generators) > 1 or not isinstance(parts[0], ast.Name):
            return self.unknown(node)
        if over_weights:
            return self._chosen(node, weights, node.generators[0].ifs)
        return weights if isinstance(weights.data, Part) else self.unknown(node)

    def _chosen(
        self, node: ast.expr, weights: Value, conditions: Sequence[ast.expr | None]
    ) -> Value:
        """Those of a model's parameters for which conditions hold: all that train, or a part."""
        if all(
            isinstance(condition, ast.Attribute) and condition.attr == "requires_grad"
            for condition in conditions
        ):
            return weights
        return Value(NamedPart(as_text(node), node.lineno))

    def _forget(self, target: ast.expr, names: Names) -> None:
        """Names that a loop gives a value anew."""
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                names.own[each.id] = self.unknown(each, f"{each.id} of a loop")

    _listcomp = _setcomp = _generatorexp = _dictcomp = _comprehension

    def call(self, node: ast.Call, names: Names) -> Value:
        """What a call returns; one of a library is written down."""
        arguments, keywords = self._arguments(node, names)
        if isinstance(node.func, ast.Attribute):
            self._note_start(node, names, arguments, keywords)
            base = self.value_of(node.func.value, names)
            if not isinstance(base.data, Symbol):
                self._note_part(node, base, names, arguments)
                if node.func.attr in _PARAMETERS and isinstance(base.data, Unknown):
                    whole, path = self._whole_of(node.func, names)
                    if path in _WHOLE_MODELS:
                        base = base.with_data(whole)
                    elif path:
                        return Value(Part(as_text(node), node.lineno))
                return self._method(node, base, node.func.attr, arguments, keywords)
            target: Any = Symbol(f"{base.data.path}.{node.func.attr}")
        else:
            is_builtin = isinstance(node.func, ast.Name) and names.find(node.func.id) is None
            if is_builtin and isinstance(node.func, ast.Name):
                self._note_setattr(node.func.id, node, arguments)
                first = arguments[0] if arguments else Value(None)
                if node.func.id in ("filter", "list", "tuple", "iter") and arguments:
                    weights = arguments[-1]
                    if is_over_weights(weights):
                        return self._chosen(node, weights, _condition(arguments[:-1]))
                    if isinstance(weights.data, Part):
                        return weights
                if node.func.id == "vars" and arguments and not isinstance(first.data, Unknown):
                    return first
                if node.func.id == "exec" and self._line.words:
                    self.forget_values("what exec runs may set it")
                if node.func.id in ("getattr", "hasattr") and isinstance(first.data, Namespace):
                    entry = arguments[1].data if len(arguments) > 1 else None
                    if isinstance(entry, str) and entry in first.data.values:
                        found = first.data.values[entry]
                        return found if node.func.id == "getattr" else Value(True)
                if node.func.id == "open" and arguments and isinstance(arguments[0].data, str):
                    name = arguments[0].data
                    return arguments[0].with_data(OpenFile(as_text(node), node.lineno, name))
                value = self.builtin(node.func.id, node, arguments, keywords)
                if value is None and not hasattr(builtins, node.func.id):
                    # of a file that is not read: from x import *
                    self._note(f"?.{node.func.id}", node.lineno, arguments, keywords)
                return self.unknown(node) if value is None else value
            called = self.value_of(node.func, names)
            self._line.use(called.given)
            target = called.data
        return self._called(node, target, arguments, keywords)

    def _arguments(self, node: ast.Call, names: Names) -> tuple[list[Value], dict[str, Value]]:
        arguments: list[Value] = []
        keywords: dict[str, Value] = {}
        for each in node.args:
            value = self.value_of(each.value if isinstance(each, ast.Starred) else each, names)
            if isinstance(each, ast.Starred) and isinstance(value.data, list):
                arguments += [value.with_data(part) for part in value.data]
            else:
                arguments.append(value.at(each.lineno))
        for keyword in node.keywords:
            value = self.value_of(keyword.value, names)
            if keyword.arg is not None:
                keywords[keyword.arg] = value.at(keyword.value.lineno)
            elif isinstance(value.data, dict):
                keywords.update({name: entry_of(value, name) for name in value.data})
            elif isinstance(value.data, Namespace):
                keywords.update(value.data.values)
            elif isinstance(value.data, Call) and value.data.is_instance:
                keywords.update(value.data.keywords)
            else:
                keywords["**"] = value
        return arguments, keywords

    def _called(
        self, node: ast.Call, target: Any, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        if isinstance(target, Function):
            return self.inlined(target, arguments, keywords, node)
        if isinstance(target, Class):
            return self._made(target, arguments, keywords, node)
        if isinstance(target, Symbol):
            return self._of_library(target, arguments, keywords, node)
        if isinstance(target, Call):
            return Value(self._note("()", node.lineno, arguments, keywords, receiver=target))
        self._note(f"?.{as_text(node.func)}", node.lineno, arguments, keywords)
        return self.unknown(node)

    def _of_library(
        self, target: Symbol, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
    ) -> Value:
        name = target.name
        if name in _GPU_QUESTIONS:
            self.gpu_questions.append(node.lineno)
            return Value(True)
        if target.path in _ANSWERS:
            if "capability" in name:
                self.gpu_questions.append(node.lineno)
            return Value(_ANSWERS[target.path])
        if target.path in ("os.environ.get", "os.getenv"):
            return self.variable(node, arguments)
        if target.path == "argparse.Namespace":
            return Value(Namespace(keywords, Value(Unknown("an argument of the command line"))))
        if name.endswith("_like") and target.library == "torch" and self._loops_over_weights:
            self._note(COPIES_OF_WEIGHTS, node.lineno, arguments, keywords)
        first = arguments[0] if arguments else Value(None)
        if target.path == "deepspeed.add_config_arguments":
            return first
        if target.path in ("hydra.utils.instantiate", "hydra.utils.call"):
            entries = first.data if isinstance(first.data, dict) else {}
            path = entries.get("_target_")
            if isinstance(path, str) and not {"_partial_", "_args_"} & {*entries}:
                own = {key: entry_of(first, key) for key in entries if not key.startswith("_")}
                made = {
                    key: self.unknown(node) if isinstance(each.data, dict) else each
                    for key, each in own.items()
                }
                return self._of_library(Symbol(path), arguments[1:], {**made, **keywords}, node)
        settings = self.settings(target, node, arguments)
        if settings is not None:
            return settings
        call = self._note(target.path, node.lineno, arguments, keywords)
        if target.path in DATACLASS_PARSERS and not isinstance(first.data, Function):
            return parsed_dataclasses(call, self._line)[0]
        function = first.data
        if name in _RUNNERS and isinstance(function, Function):
            passed = call.argument(1, "args")
            given = passed.data if passed is not None and isinstance(passed.data, list) else []
            placed = [Value(each) for each in given]
            if name in ("notebook_launcher", "spawn"):
                ranks = [Unknown("the rank of a process", node.lineno)] if name == "spawn" else []
                self._line.use(() if passed is None else passed.given)
                return self.inlined(function, [*map(Value, ranks), *placed], {}, node)
            return self.inlined(function, placed, self.run_by(name, function), node)
        return self.declared_flag(call) or Value(call)

    def _method(
        self,
        node: ast.Call,
        base: Value,
        name: str,
        arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        data = base.data
        if isinstance(data, (Class, Namespace)) and name in data.methods:
            method = data.methods[name]
            method = method.bound(None, data) if isinstance(data, Class) else method
            return self.inlined(method, arguments, keywords, node)
        if isinstance(data, Namespace) and name == "update":
            entries = arguments[0].data if arguments else None
            data.update(entries, self.unknown(node), told=not self._conditions)
        if isinstance(data, (dict, list, str)) or data is None:
            if isinstance(data, list) and self._loops:
                self._note(name, node.lineno, arguments, {}, receiver=Unknown(as_text(node.func)))
            unknown, told = self.unknown(node), not self._conditions
            return plain_method(base, name, arguments, keywords, unknown, told=told)
        if isinstance(data, Call) and name in data.attributes:
            return self._called(node, data.attributes[name].data, arguments, keywords)
        if name == "clone" and self._loops_over_weights:
            self._note(COPIES_OF_WEIGHTS, node.lineno, arguments, keywords)
        call = self._note(name, node.lineno, arguments, keywords, receiver=data)
        if isinstance(data, Call) and name in _SETTERS:
            data.keywords["**"] = self.unknown(node)
        if isinstance(data, Call):
            parsed = self.of_parser(data, call)
            if parsed is not None:
                return parsed
        if (name in _SAME or name in _SETTERS) and isinstance(data, Call):
            return base
        is_lost = isinstance(data, Unknown) and name != "prepare" and name not in DATA_SETS
        return self.unknown(node) if is_lost else Value(call)

    def _note_start(
        self, node: ast.Call, names: Names, arguments: list[Value], keywords: dict[str, Value]
    ) -> None:
        """``super().__init__(...)`` in a class of the script: what the library's class is given."""
        function = self._active[-1].node if self._active else None
        is_start = isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"
        if not is_start or not isinstance(function, ast.FunctionDef):
            return
        if as_text(node.func) != "super().__init__":
            return
        own = function.args.args[0].arg if function.args.args else ""
        made = names.find(own)
        if made is None or not isinstance(made.data, Call):
            return
        if not any(isinstance(each, ast.Starred) for each in node.args):
            made.data.arguments = tuple(arguments)
        made.data.keywords.update(keywords)

    def _note_setattr(self, name: str, node: ast.Call, arguments: list[Value]) -> None:
        if name != "setattr" or len(arguments) != 3:
            return
        base, entry = arguments[0].data, arguments[1].data
        if isinstance(entry, str):
            told = arguments[2] if not self._conditions else self.unknown(node)
            if isinstance(base, Call):
                base.attributes[entry] = told
            elif isinstance(base, Namespace):
                base.values[entry] = told
            self._note(f"={entry}", node.lineno, arguments[2:], {}, receiver=base)
        elif isinstance(base, Call):
            base.keywords["**"] = self.unknown(node)
        elif isinstance(base, Namespace):
            base.update(None, self.unknown(node), told=False)

    def _note_part(self, node: ast.Call, base: Value, names: Names, arguments: list[Value]) -> None:
        """A change of a part, ``model.lm_head.float()``, as if something were put there."""
        func = node.func
        if not isinstance(base.data, Unknown) or not isinstance(func, ast.Attribute):
            return
        if func.attr not in _CHANGES_OF_PARTS:
            return
        whole, path = self._whole_of(func, names)
        if whole is not None:
            self._note(f"={path}", node.lineno, arguments, {}, receiver=whole)

    def _whole_of(self, func: ast.Attribute, names: Names) -> tuple[Call | None, str]:
        """Of a method of a part, ``model.lm_head.float``: the model and the path of the part."""
        parts: list[str] = []
        inner = func.value
        while isinstance(inner, (ast.Attribute, ast.Subscript)):
            if isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
            inner = inner.value
            if isinstance(inner, ast.Call):
                return None, ""  # what a call returns is no part of a model, and it is made once
            whole = self.value_of(inner, names).data
            if isinstance(whole, Call) and parts:
                return whole, ".".join(reversed(parts))
        return None, ""

    def _made(
        self, kind: Class, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
    ) -> Value:
        """An instance of a class of the script."""
        fields = {
            name: self.unknown(node, f"{kind.name}.{name}") if value is None else value
            for name, value in kind.fields.items()
        }
        start = kind.methods.get("__init__")
        if not kind.base and start is None:
            plain = Namespace({**fields, **keywords})
            plain.methods |= {name: m.bound(plain, kind) for name, m in kind.methods.items()}
            return Value(plain)
        made = self._note(kind.base or kind.name, node.lineno, arguments, {**fields, **keywords})
        made.subclass, made.methods = kind.name, frozenset(kind.methods)
        made.own = frozenset(kind.fields)
        for name, method in kind.methods.items():
            if name != "__init__":
                made.attributes[name] = Value(method.bound(made, kind))
        if start is not None:
            self.inlined(start, [Value(made), *arguments], keywords, node)
        return Value(made)

    def inlined(
        self,
        function: Function,
        arguments: Sequence[Value],
        keywords: dict[str, Value],
        node: ast.AST,
    ) -> Value:
        """What a function of the script returns, with its body followed."""
        self.step()
        if function in self._active or len(self._active) > _MAX_CALLS:
            return self.unknown(node, "a function that calls itself")
        function.is_followed = True
        names = Names(function.names)
        taken = parameters(function.node)
        defaults = self.defaults(function)
        if function.entry and not arguments:
            keywords = {**self.entered(function), **keywords}
        if function.first is not None:
            arguments = [function.first, *arguments]
        bound = dict(zip(taken, arguments, strict=False))
        for name in taken:
            value = keywords.get(name, bound.get(name, defaults.get(name)))
            names.own[name] = (
                self.unknown(function.node, f"{name}, an argument of a function")
                if value is None
                else value
            )
        if function.node.args.kwarg is not None:
            names.own[function.node.args.kwarg.arg] = Value(
                {name: v.data for name, v in keywords.items() if name not in taken}
            )
        self._active.append(function)
        if isinstance(function.node, ast.Lambda):
            value = self.value_of(function.node.body, names)
            self._active.pop()
            return value
        self._returns.append([])
        self._owners.append(function.owner or (self._owners[-1] if self._owners else ""))
        # a condition around the call is the call's; inside, returns are certain again
        around, self._conditions = self._conditions, []
        mark = len(self.calls)
        decorated = any(map(NO_GRAD.fullmatch, function.decorators))
        self._without_grad += decorated
        self._conditional_calls += bool(around)
        self.follow(function.node.body, names)
        self._conditional_calls -= bool(around)
        self._without_grad -= decorated
        self._conditions = around
        if around:
            for call in self.calls[mark:]:
                call.conditional = True
        self._owners.pop()
        self._active.pop()
        values = self._returns.pop()
        if not values:
            return Value(None)
        same = all(each.data == values[0].data for each in values)
        if same or root_of(values[0].data) is root_of(values[-1].data):
            return values[0]
        return self.unknown(node)

    def parameters_of(self, function: Function) -> dict[str, Value]:
        """What is given to a function whose calls are not known: its defaults, or nothing known."""
        if not function.is_uncertain:
            return {}
        return {
            name: self.unknown(function.node, f"{name}, an argument of a function")
            for name in parameters(function.node)
        }

    def _note(
        self,
        path: str,
        line: int,
        arguments: Iterable[Value],
        keywords: dict[str, Value],
        *,
        receiver: Any = None,
    ) -> Call:
        """Write a call down."""
        call = Call(
            path,
            line,
            receiver=receiver,
            arguments=tuple(arguments),
            keywords=dict(keywords),
            conditional=bool(self._conditions),
            every=self._divisors[-1] if self._divisors else None,
            loops=tuple(self._loops),
            loaders=tuple(self._loaders),
            inside=tuple(self._active),
            handed=self._hands_on,
            without_grad=self._without_grad > 0,
            owner=self._owners[-1] if self._owners else "",
        )
        self.calls.append(call)
        return call


def _cuts(parts: Sequence[ast.expr]) -> bool:
    """Whether an index takes less than there is: not ``[:]``, not ``[..., None]``."""
    return any(isinstance(each, ast.Slice) and (each.lower or each.upper) for each in parts)


def _condition(functions: Sequence[Value]) -> list[ast.expr | None]:
    """What a function that is given to ``filter`` asks of a parameter; None for one of others."""
    nodes = [each.data.node if isinstance(each.data, Function) else None for each in functions]
    return [each.body if isinstance(each, ast.Lambda) else None for each in nodes]


def is_over_weights(value: Value) -> bool:
    """Whether what is looped over are the weights of a model."""
    data = value.data
    while isinstance(data, Call) and data.name in ("items", "values"):
        data = data.receiver
    return (
        isinstance(data, Call)
        and data.name in ("parameters", "named_parameters", "state_dict")
        and data.receiver is not None
    )
