"""What one text of Python says of others: modules that it imports, words that may name files."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WORD = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\.\*)?")
TELLING = {
    ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.Constant, ast.JoinedStr, ast.BinOp,
    ast.List, ast.Tuple, ast.Call, ast.arg,
}  # fmt: skip
WITHOUT_CODE = {"ctx", "op", "id", "attr", "arg", "name"}
PROGRAM = re.compile(r"-m\s+([\w.]+)")


@dataclass
class Reading:
    """What a text says; ``*`` stands for what is known only when it runs.

    Attributes:
        imports: dotted names that are imported or looked up in what was, anywhere in the text.
        spoken: dotted names in strings.
        programs: modules that ``python -m`` runs.
        words: what may be a file: strings, and paths put together by ``/``.
        base_paths: those paths that begin with a name, and the name.
        chains: names that something is looked up in, with that: ``a.b.c``.
        bare: other names that are used, and arguments, which pytest gives what they name.
        bindings: what names stand for that imports bind.
        lazy: names that the module looks up when they are asked for, and where.
        places: paths that the module gives names to, each as in ``base_paths``.
    """

    imports: set[str] = field(default_factory=set)
    spoken: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    base_paths: set[tuple[str, str]] = field(default_factory=set)
    chains: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    bindings: dict[str, set[str]] = field(default_factory=dict)
    lazy: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, other: Reading) -> None:
        """Take up what another text says when it runs."""
        for name in ("imports", "spoken", "programs", "words", "base_paths", "chains", "bare"):
            getattr(self, name).update(getattr(other, name))

    def look_up(self, bindings: Mapping[str, set[str]]) -> None:
        """Add to the imports what is looked up in names that are bound so."""
        for chain in self.chains:
            head, _, rest = chain.partition(".")
            self.imports.update(f"{import_name}.{rest}" for import_name in bindings.get(head, ()))
        # a module that is handed on may be asked for anything
        self.imports.update(
            f"{import_name}.?" for name in self.bare for import_name in bindings.get(name, ())
        )

    def mentions(self) -> set[str]:
        """Everything that may be the name of a function or a fixture."""
        return self.bare | self.words | {chain.partition(".")[0] for chain in self.chains}


def read(text: str) -> Reading:
    """What a text says; nothing if it is not Python."""
    tree = _tree(text)
    reading = _read([tree])
    reading.look_up(reading.bindings)
    reading.lazy = _lazy(tree)
    reading.places = {
        node.targets[0].id: _path(node.value)[:2]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.BinOp)
    }
    return reading


def read_tests(text: str) -> dict[str, Reading]:
    """What each test of a file says, with the functions and fixtures of the file that it uses.

    Returns:
        By function or class; under "" what holds for all: what is no definition, and fixtures and
        set-ups that no test has to ask for.
    """
    rest: list[ast.stmt] = []
    parts: dict[str, Reading] = {}
    for node in _tree(text).body:
        if (
            not isinstance(node, ast.FunctionDef | ast.ClassDef)
            or node.name in parts
            or node.name.startswith(("setup", "teardown", "pytest_"))
            or any("autouse" in ast.unparse(one) for one in node.decorator_list)
        ):
            rest.append(node)
        else:
            parts[node.name] = _read([node])
    parts[""] = _read(rest)
    bindings: dict[str, set[str]] = {}
    for part in parts.values():
        for name, import_names in part.bindings.items():
            bindings.setdefault(name, set()).update(import_names)
    readings: dict[str, Reading] = {}
    for name in parts:
        if name == "" or name.lower().startswith("test"):
            names, todo = {name}, [name]
            readings[name] = Reading()
            while todo:
                part = parts[todo.pop()]
                readings[name].add(part)
                new = (part.mentions() & parts.keys()) - names
                names |= new
                todo.extend(new)
            readings[name].look_up(bindings)
    return readings


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _read(nodes: Sequence[ast.AST]) -> Reading:
    reading = Reading()
    parts: set[int] = set()  # of nodes that were read with what they are part of
    for node in itertools.chain.from_iterable(map(_running, nodes)):
        if isinstance(node, ast.Name):
            if id(node) not in parts:
                reading.bare.add(node.id)
        elif isinstance(node, ast.Attribute):
            reading.chains.add(_chain(node))
            if isinstance(node.value, ast.Name):
                parts.add(id(node.value))
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            if id(node) not in parts:
                parts.update(id(part) for part in getattr(node, "values", ()))
                _say(reading, _string(node))
        elif isinstance(node, ast.Call):
            _start(reading, node.args)
            if isinstance(node.func, ast.Name) and node.func.id == "load_tool" and node.args:
                reading.words.add(f"tools/{_string(node.args[0])}.py")
        elif isinstance(node, ast.List | ast.Tuple):
            _start(reading, node.elts)
        elif isinstance(node, ast.BinOp):
            if id(node) not in parts:
                base, path, read_with_it = _path(node)
                reading.base_paths.add((base, path))
                parts.update(read_with_it)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name, import_name in _import_names(node):
                reading.imports.add(import_name)
                reading.bindings.setdefault(name, set()).add(import_name)
        elif isinstance(node, ast.arg):
            reading.bare.add(node.arg)
    reading.words.discard("")
    return reading


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that say something, parents first, without what only a type checker reads."""
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind in TELLING:
            yield node
        if kind is ast.If and _for_types(node.test):
            todo.extend(node.orelse)
            continue
        # twice as fast as ast.iter_child_nodes
        for name in getattr(kind, "_fields", ()):
            child = getattr(node, name)
            if type(child) is list:
                todo.extend(child)
            elif name not in WITHOUT_CODE:
                todo.append(child)


def _for_types(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _import_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Names that a statement binds, and what they stand for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            head = alias.name.partition(".")[0]
            yield head, head
            yield "*", alias.name  # bound to no name of its own


def _chain(node: ast.expr) -> str:
    """``a.b.c`` as it is written; of other expressions what follows them."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    names.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(names))


def _string(node: ast.AST) -> str:
    """A string, with a star for each value in it; of other expressions a star."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
        )
    return "*"


def _path(node: ast.expr) -> tuple[str, str, set[int]]:
    """What ``BASE / "a" / b`` names.

    Returns:
        The name that it begins with, if it is one; the path without unknown ends; which nodes were
        read.
    """
    pieces: list[str] = []
    parts: set[int] = set()
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        pieces.append(_string(node.right).strip("/"))
        parts.update((id(node), id(node.right)))
        node = node.left
    path = "/".join(reversed(pieces))
    while path.startswith("*/") or path.endswith("/*"):
        path = path.removeprefix("*/").removesuffix("/*")
    path_text = path if WORD.fullmatch(path) and path.strip("*./") else ""
    return node.id if isinstance(node, ast.Name) else "", path_text, parts


def _say(reading: Reading, text: str) -> None:
    if "import " in text:
        # * is for a value: any expression will do
        reading.add(read(textwrap.dedent(text.replace("*", "_"))))
    reading.programs.update(PROGRAM.findall(text))
    word = text.removeprefix("./").rstrip("/")
    if len(word) > 1 and WORD.fullmatch(word) and word.strip("*."):
        reading.words.add(word)
        if "." in word and DOTTED.fullmatch(word):
            reading.spoken.add(word)


def _start(reading: Reading, nodes: list[ast.expr]) -> None:
    words = [_string(node) for node in nodes]
    reading.programs.update(b for a, b in itertools.pairwise(words) if a == "-m")


def _lazy(tree: ast.Module) -> dict[str, str]:
    """Of a module with ``__getattr__``: what it tells a type checker of its names."""
    if not any(getattr(node, "name", "") == "__getattr__" for node in tree.body):
        return {}
    return {
        name: import_name
        for block in tree.body
        if isinstance(block, ast.If) and _for_types(block.test)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name, import_name in _import_names(node)
    }
