"""What every file of a checkout depends on, by what stands in it.

A Python file depends on the modules that it imports, in functions too, with the packages around
them; on what it looks up in packages that find their names when asked; on what ``python -m`` and
code in its strings run; and on the files that its strings name, or whose folder they name. A test
depends on every conftest.py above it, a notebook on what its cells import.
"""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from support.affected.checkout import Checkout
from support.affected.reading import Reading, read, read_tests
from support.blocks import blocks_of

PAGES = re.compile(r"README\.md|CONTRIBUTING\.md|docs/[^/]+\.md")
"""The pages whose commands and code are run."""
COMMANDS_OF_PAGES = "tests/faces/docs/test_commands.py"
CODE_OF_PAGES = "tests/faces/docs/test_own_pages.py"
PLACES = "tests/support/paths.py"
NAME_FOR_OTHERS = (
    PLACES, "tests/support/blocks.py", "tests/support/tools.py", "tests/support/affected/",
    "tools/campaigns.py",
)  # fmt: skip
"""Files that name what others ask them for, or what rules and fast tests look at: not their own."""
IMPORT_FOLDERS = ("tests", "benchmarks")
"""Folders that tests import from, besides the installed packages."""


class Graph:
    """Which files and tests depend on which files.

    Attributes:
        files: all of them, those included that are gone since.
        uses: what each file depends on at first hand, and each test (``FILE::NAME``, a function or
            a class), which depends on its file too, that is on what all tests of the file run.
    """

    def __init__(
        self, checkout: Checkout, packages: Mapping[str, str], former_files: Iterable[str] = ()
    ) -> None:
        """Read all of a checkout.

        Args:
            checkout: its files.
            packages: folders of installed packages, by their dotted names.
            former_files: files that were there: what still asks for them depends on them.
        """
        self.files = frozenset(checkout.files() | set(former_files))
        self._packages = sorted(packages.items(), key=lambda item: -len(item[0]))
        self._with: dict[str, set[str]] = {}  # files by every part of their paths
        for name in self.files:
            for part in name.split("/"):
                self._with.setdefault(part, set()).add(name)
        self._module_cache: dict[tuple[str, str], frozenset[str]] = {}
        collecting = gc.isenabled()
        gc.disable()  # which would go through all trees again and again
        try:
            self._readings = dict(self._read(checkout))
        finally:
            if collecting:
                gc.enable()
        self.uses = {name: self._uses(name) for name in self._readings if not PAGES.fullmatch(name)}

    def touched_by(self, changes: Iterable[str]) -> dict[str, str]:
        """Files and tests that depend on what changed, however far, and through which change."""
        users: dict[str, set[str]] = {}
        for name, used in self.uses.items():
            for other in used:
                users.setdefault(other, set()).add(name)
        causes: dict[str, str] = {}
        for change in sorted(changes):
            todo = [change]
            while todo:
                name = todo.pop()
                if name not in causes:
                    causes[name] = change
                    todo.extend(users.get(name, ()))
        return causes

    def behind(self, *names: str) -> set[str]:
        """Everything that files or tests depend on, however far, themselves included."""
        dependencies, todo = set(names), [*names]
        while todo:
            new = self.uses.get(todo.pop(), set()) - dependencies
            dependencies |= new
            todo.extend(new)
        return dependencies

    def is_used(self, name: str) -> bool:
        """Whether anything depends on a file."""
        return any(name in used for used in self.uses.values())

    def tests(self) -> set[str]:
        """Every test that is written down as one, ``FILE::NAME``."""
        return {name for name in self.uses if "::" in name}

    def lazy(self, name: str) -> dict[str, str]:
        """Names that a module finds when asked, and where."""
        return self._readings[name].lazy

    def _read(self, checkout: Checkout) -> Iterator[tuple[str, Reading]]:
        for name in self.files:
            if is_test(name):
                for test, reading in read_tests(checkout.text(name)).items():
                    yield f"{name}::{test}" if test else name, reading
            elif name.endswith((".py", ".ipynb")) or PAGES.fullmatch(name):
                yield name, read(code_of(checkout, name))

    def _uses(self, node: str) -> set[str]:
        """What a file or a test depends on; of a page, what its code does."""
        reading = self._readings[node]
        name = node.partition("::")[0]
        folder = str(PurePosixPath(name).parent)
        is_installed = any(name.startswith(f"{place}/") for _, place in self._packages)
        # where Python looks besides: a program's own folder
        beside = "" if is_installed or name.startswith("tests/") else folder
        modules = set(reading.imports)
        if not reading.lazy:  # which speaks of what it finds when asked
            modules |= {word for word in reading.spoken if word.partition(".")[0] in self._ours}
        for module in reading.programs:
            modules |= {module, f"{module}.__main__"}
        dependencies = set().union(*(self._modules_behind(module, beside) for module in modules))
        if not name.startswith(NAME_FOR_OTHERS):
            named_files = self._named_files(reading, folder)
            if is_installed:
                named_files = {path for path in named_files if path.startswith("data/")}
            if name in (COMMANDS_OF_PAGES, CODE_OF_PAGES):  # by case: see the rules
                named_files = {path for path in named_files if not PAGES.fullmatch(path)}
            dependencies |= named_files
        if node != name:
            return dependencies | {name}
        if name.startswith("tests/") and PurePosixPath(name).name != "conftest.py":
            above = PurePosixPath(name).parents
            dependencies |= {path for one in above if (path := f"{one}/conftest.py") in self.files}
        if name == CODE_OF_PAGES:
            pages = [page for page in self._readings if PAGES.fullmatch(page)]
            dependencies |= set().union(*(self._uses(page) for page in pages))
        return dependencies - {name}

    @functools.cached_property
    def _tops(self) -> set[str]:
        """The checkout's own folders."""
        return {name.partition("/")[0] for name in self.files if "/" in name}

    @functools.cached_property
    def _ours(self) -> set[str]:
        """First names of modules that are the checkout's own."""
        heads = {package.partition(".")[0] for package, _ in self._packages}
        for name in self.files:
            parts = name.split("/")
            if len(parts) > 2 and parts[0] in IMPORT_FOLDERS:
                heads.add(parts[1])
        return heads

    def _module(self, module_name: str, beside: str) -> str | None:
        """The file of a module."""
        path = module_name.replace(".", "/")
        bases = [f"{place}/{path}" for place in (*IMPORT_FOLDERS, beside)]
        for package, place in self._packages:
            if f"{module_name}.".startswith(f"{package}."):
                bases = [place + path[len(package) :]]
                break
        ends = ("/__init__.py", ".py")
        paths = (f"{base}{end}" for base in bases for end in ends if f"{base}{end}" in self.files)
        return next(paths, None)

    def _modules_behind(self, module_name: str, beside: str) -> frozenset[str]:
        """The modules that a dotted name leads through, and those that it asks them for."""
        key = (module_name, beside)
        if key not in self._module_cache:
            self._module_cache[key] = frozenset(self._resolve(module_name, beside))
        return self._module_cache[key]

    def _resolve(self, module_name: str, beside: str) -> Iterator[str]:
        before, prefix = None, ""
        for part in module_name.split("."):
            if part in ("*", "__file__", "__path__") and before:
                yield from self._room(before, prefix)
            homes = {} if before is None else self._readings_of(before).lazy
            for home in homes.values() if part in ("*", "?") else [homes.get(part)]:
                if home is not None:
                    yield from self._resolve(home, beside)
            prefix = f"{prefix}.{part}" if prefix else part
            before = self._module(prefix, beside)
            if before is None:
                return
            yield before

    def _readings_of(self, name: str) -> Reading:
        return self._readings.get(name) or Reading()

    def _room(self, init: str, package_name: str) -> Iterator[str]:
        """Every module of a package."""
        inside = f"{package_name}."
        folders = [place for package, place in self._packages if package.startswith(inside)]
        if init.endswith("/__init__.py"):
            folders.append(init.removesuffix("/__init__.py"))
        for name in self.files:
            if name.endswith(".py") and name.startswith(tuple(f"{one}/" for one in folders)):
                yield name

    @functools.cached_property
    def _bases(self) -> dict[str, str]:
        """Where names of places lie."""
        bases = {"ROOT": ""}
        for name, (base, path) in self._readings_of(PLACES).places.items():
            bases[name] = f"{bases.get(base, '')}/{path}".strip("/")
        return bases

    def _named_files(self, reading: Reading, folder: str) -> set[str]:
        """Files that a text names."""
        words = reading.words | {
            path for base, path in reading.base_paths if base not in self._bases
        }
        # f"{name}.json" is mostly told its names in the same text
        stars = [word for word in words if "*" in word and "/" not in word]
        spelt = {star.replace("*", word) for star in stars for word in reading.words}
        root_paths = {
            f"{self._bases[base]}/{path}".strip("/")
            for base, path in reading.base_paths
            if base in self._bases
        }
        for import_name in reading.imports:
            module, _, name = import_name.rpartition(".")
            if module == "support.paths" and "/" in self._bases.get(name, ""):
                root_paths.add(self._bases[name])
        files: set[str] = set()
        for word in words | (spelt & self._with.keys()):
            files |= self._meanings(word, folder, reading.words, rooted=False)
        for word in root_paths:
            files |= self._meanings(word, folder, reading.words, rooted=True)
        return files

    def _meanings(self, word: str, folder: str, values: set[str], *, rooted: bool) -> set[str]:
        """Files that a word can mean.

        Code is meant by its path, from the root or from where the word is said, a page by its name,
        other files also by a folder that they are in. The name of one of the checkout's own folders
        is a word like others, unless it is said to begin at the root.

        Args:
            word: a name or a path, with a star for each unknown value.
            folder: of the text that has the word.
            values: strings of that text: where some fit in place of the stars, others do not count.
            rooted: whether it begins at the checkout's root.
        """
        is_path = rooted or "/" in word
        if not is_path and word in self._tops:
            return set()
        sure = next((part for part in reversed(word.split("/")) if "*" not in part), "")
        if sure not in self._with:
            return set()
        pattern = re.escape(word).replace(r"\*", "([^/]*)")
        page = re.compile(f"(?:.*/)?{pattern}")
        code = re.compile(f"(?:{re.escape(folder)}/)?{pattern}{'(?:/.*)?' if is_path else ''}")
        other = re.compile(f"(?:.*/)?{pattern}(?:/.*)?")
        fitting: dict[str, bool] = {}
        for name in self._with[sure]:
            if PAGES.fullmatch(name):
                match = page.fullmatch(name)
            elif name.endswith(".py") and not name.startswith(("data/", "docs/")):
                match = code.fullmatch(name)
            else:
                match = other.fullmatch(name)
            if match:
                fitting[name] = set(match.groups()) <= values
        return {name for name, fits in fitting.items() if fits or not any(fitting.values())}


def is_test(name: str) -> bool:
    """Whether pytest looks for tests in a file."""
    return bool(re.fullmatch(r"tests/(?:.*/)?test_[^/]*\.py", name))


def code_of(checkout: Checkout, name: str) -> str:
    """The Python in a file: all of it, a notebook's cells, the blocks of a page."""
    text = checkout.text(name)
    if name.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    if name.endswith(".md"):
        return "\n".join(blocks_of(text, "python"))
    return text
