"""Where the command line enters a script: parsers, variables, settings, functions it starts."""

from __future__ import annotations

import ast

from memest.readers.scripts.command_line import (
    PARSERS,
    CommandLine,
    parsed_arguments,
    parsed_dataclasses,
)
from memest.readers.scripts.expressions import Expressions, Names, as_text, path_of
from memest.readers.scripts.hydra import compose
from memest.readers.scripts.parameters import absl_flag, of_click, of_fire, of_signature
from memest.readers.scripts.settings_files import made_settings, settings_of
from memest.readers.scripts.source import Source
from memest.readers.scripts.things import Call, Function, Namespace, Symbol, Unknown, Value

__all__ = ["Entries", "parameters"]

_LAUNCHER_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
_OF_FILES = {
    "parse_json_file": "json_file",
    "parse_yaml_file": "yaml_file",
    "parse_dict": "args",
}
"""Methods of HfArgumentParser that take no words, and what they take."""
_CLICK = ("click", "rich_click", "asyncclick")
_ENTERING = (*_CLICK, "typer", "hydra", "draccus", "pyrallis")
"""Libraries whose decorators make a function one that the command line fills."""


class Entries(Expressions):
    """Takes what a command says: what is not a library's call here is a subclass's matter.

    Attributes:
        calls: in the order in which they are made.
        names: of the module.
    """

    def __init__(self, source: Source, line: CommandLine) -> None:
        super().__init__(source.name)
        self.calls: list[Call] = []
        self.names = Names()
        self._folder = source.folder
        self._line = line
        self._argv = [source.name, *(line.words or ())]
        self._flags: dict[str, Value] = {}

    def forget_values(self, why: str) -> None:
        """Plain values of the module are not known any more: code that is not read may set them."""
        for name, value in self.names.own.items():
            if isinstance(value.data, (str, int, float)) and not name.startswith("__"):
                self.names.own[name] = Value(Unknown(f"{name}: {why}"))

    def of_command(self, path: str) -> Value | None:
        """What the command says of a library's name: ``sys.argv``, a flag of absl; else None."""
        library, _, name = path.rpartition(".")
        if path == "sys.argv":
            return Value(list(self._argv))
        return self._flags.get(name) if library == "absl.flags.FLAGS" else None

    def declared_flag(self, call: Call) -> Value | None:
        """What ``flags.DEFINE_integer`` of absl returns: a flag with its value; else None."""
        declared = absl_flag(call, self._line) if ".DEFINE_" in call.path else None
        if declared is None:
            return None
        name, value = declared
        self._flags[name] = call.attributes["value"] = value
        return Value(call)

    def settings(self, target: Symbol, node: ast.Call, arguments: list[Value]) -> Value | None:
        """What a function returns that makes mappings of settings; None for any other."""
        return made_settings(target.path, arguments, self._folder, self._line, self.unknown(node))

    def variable(self, node: ast.Call, arguments: list[Value]) -> Value:
        """A variable of the environment, as the command sets it; none of a launcher's without."""
        name = arguments[0].data if arguments else None
        environment = self._line.environment
        if environment is None or not isinstance(name, str):
            return self.unknown(node)
        if name in environment:
            return Value(environment[name])
        default = arguments[1] if len(arguments) > 1 else Value(None)
        return default if name in _LAUNCHER_VARIABLES else self.unknown(node)

    def run_by(self, runner: str, function: Function) -> dict[str, Value]:
        """Parameters of a function that a library runs: from the command line, else defaults."""
        defaults = self.defaults(function)
        names = parameters(function.node)
        if runner == "Fire":
            return of_fire({name: defaults.get(name) for name in names}, self._line)
        annotations = self._annotations(function)
        return of_signature({n: (defaults.get(n), annotations[n]) for n in names}, self._line)

    def entered(self, function: Function) -> dict[str, Value]:
        """Parameters of a function that its decorators make one that the command line fills."""
        names = parameters(function.node)
        for call in function.entry:
            if call.path == "hydra.main" and names:
                return {names[0]: compose(call, self._folder, self._line)}
            if call.name == "wrap" and names:
                kind = self._annotations(function)[names[0]]
                made = Call(call.path, call.line, arguments=(kind,))
                return {names[0]: parsed_dataclasses(made, self._line)[0]}
        if any(call.library in _CLICK for call in function.entry):
            return of_click(function.entry, self._line)
        return self.run_by("", function)

    def entry_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> list[Call]:
        """The decorators that make a function one that the command line fills."""
        found: list[Call] = []
        for each in node.decorator_list:
            path = path_of(each.func if isinstance(each, ast.Call) else each)
            first = names.find(path[0]) if path else None
            data = None if first is None else first.data
            is_library = isinstance(data, (Symbol, Call)) and data.library in _ENTERING
            if is_library or (isinstance(data, Function) and data.entry):
                made = self.value_of(each, names).data
                made = Call(made.path, node.lineno) if isinstance(made, Symbol) else made
                found += [made] if isinstance(made, Call) else []
        return found

    def command_names(self, function: Function) -> list[str]:
        """By what words a function is a command that nothing in the script calls; mostly none."""
        made = [call for call in function.entry if call.name in ("command", "main", "wrap")]
        if function.is_followed or not made:
            return []
        first = made[0].argument(0, "name")
        own = getattr(function.node, "name", "").replace("_", "-")
        named = first is not None and isinstance(first.data, str) and made[0].name == "command"
        return [str(first.data) if named and first is not None else own]

    def named(self, function: Function) -> dict[str, Value]:
        """Parameters of a function handed to whoever calls it that go by arguments nobody took."""
        line = self._line
        return {
            name: Value(line.named[name], given=(f"--{name}",))
            for name in parameters(function.node)
            if line.words and name in line.named and name not in line.taken
        }

    def _annotations(self, function: Function) -> dict[str, Value]:
        """The annotations of parameters; what Typer is told in one, ``Annotated[int, ...]``."""
        arguments = function.node.args
        out: dict[str, Value] = {}
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            node = each.annotation
            parts = node.slice.elts if _is_annotated(node) else []  # type: ignore[union-attr]
            values = [self.value_of(part, function.names) for part in parts[1:]]
            told = [value for value in values if isinstance(value.data, Call)]
            node = parts[0] if parts and not told else node
            if isinstance(node, ast.Name) and not told:
                told = [self.value_of(node, function.names)]
            out[each.arg] = told[0] if told else Value(Unknown(as_text(node) if node else ""))
        return out

    def of_parser(self, parser: Call, call: Call) -> Value | None:
        """What the methods of parsers of arguments return, None for anything else."""
        if parser.name in ("ArgumentParser", "add_parser"):
            if call.name == "set_defaults":
                parser.attributes.update(call.keywords)
            if call.name in ("parse_args", "parse_known_args"):
                given = call.argument(0, "args")
                own = given.data if given is not None and isinstance(given.data, list) else None
                is_own = own is not None and all(isinstance(each, str) for each in own)
                line = CommandLine(tuple(own or ())) if is_own else self._line
                namespace = self._parsed(parser, line)
                whole = call.name == "parse_args"
                return Value(
                    namespace if whole else [namespace, namespace.rest and namespace.rest.data]
                )
        if parser.name in PARSERS and call.name.startswith("parse"):
            line = self._line
            if call.name in _OF_FILES:
                told = settings_of(call.argument(0, *_OF_FILES.values()), self._folder)
                if told is not None:
                    line = CommandLine(line.words, told)
                elif not line.words:
                    return Value(Unknown("arguments of a file", call.line))
            values = parsed_dataclasses(parser, line)
            if "return_remaining_strings" in call.keywords:
                values.append(Value([]))
            single = len(values) == 1 and call.name == "parse"
            return values[0] if single else Value([each.data for each in values])
        return None

    def _parsed(self, parser: Call, line: CommandLine) -> Namespace:
        """What a parser makes of the words, with its parents and the command that they choose."""
        parsers = [parser]
        parents = parser.keywords.get("parents", Value([])).data
        parsers += [each for each in parents if isinstance(each, Call)] if parents else []
        chosen: dict[str, Value] = {}
        for each in self.calls:
            commands = each.receiver if each.name == "add_parser" else None
            if not isinstance(commands, Call) or commands.receiver is not parser:
                continue
            name = each.argument(0, "name")
            if name is not None and name.data in (line.words or ()) and not chosen:
                line.words_taken.add(str(name.data))
                parsers.append(each)
                chosen = {str((commands.keywords.get("dest") or Value("")).data): name}
        added = (each for each in self.calls if each.name == "add_argument")
        options = [each for each in added if any(each.receiver is part for part in parsers)]
        for part in parsers[1:]:
            parser.attributes.update(part.attributes)
        namespace = parsed_arguments(parser, options, line)
        namespace.values.update(chosen)
        return namespace

    def defaults(self, function: Function) -> dict[str, Value]:
        """The defaults of a function's parameters, of those that have one."""
        arguments = function.node.args
        placed = [*arguments.posonlyargs, *arguments.args]
        first = len(placed) - len(arguments.defaults)
        nodes = dict(zip([each.arg for each in placed[first:]], arguments.defaults, strict=True))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                nodes[each.arg] = default
        return {name: self.value_of(default, function.names) for name, default in nodes.items()}


def _is_annotated(node: ast.expr | None) -> bool:
    """``Annotated[int, ...]``."""
    return (
        isinstance(node, ast.Subscript)
        and as_text(node.value).rpartition(".")[2] == "Annotated"
        and isinstance(node.slice, ast.Tuple)
    )


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """The names of a function's parameters, in their order."""
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [each.arg for each in every]
