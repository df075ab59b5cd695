"""The help of every command, on a screen: what most people use, one group of options, or all.

Typer parses; what is shown is laid out here, from what the commands declare, the table of options
and the examples.
"""

from __future__ import annotations

import shlex
from typing import Any

from typer.core import TyperCommand, TyperGroup

from memest.cli.argv import ALL, DECIDED, REFUSED, options_by_flag
from memest.cli.examples import EXAMPLES
from memest.cli.flags import OUTPUT
from memest.cli.layout import examples, heading, paragraph, rows, screen_width
from memest.cli.topics import TOPICS
from memest.config.option import Panel, sentences
from memest.config.option_table import OPTIONS
from memest.errors import ConfigError, closest, not_legal

__all__ = ["HelpCommand", "HelpGroup", "contents", "remember_group"]

_NUM_EXAMPLES = 3
_RARE = frozenset(
    """ascii_only colorless config_format debug depth jobs jsonl launch no_tips ray
    snapshot""".split()
)
"""Options of the commands themselves that stand in the long help alone."""
_FIRST = (Panel.BATCH, Panel.PRECISION, Panel.OPTIMIZER, Panel.RECOMPUTE, Panel.KERNELS)
_TABLE = {option.name: option for option in OPTIONS}
_OWN = "Options"
"""Heading of options that have none."""


class HelpCommand(TyperCommand):
    """A command with a help that fits on a screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: of those with the options of an estimate, what ``--help`` asks for."""
        page = _Page(self, ctx)
        word = ctx.meta.get(__name__)
        if not page.asks:
            formatter.write(page.whole())
        elif word is None:
            formatter.write(page.short())
        else:
            formatter.write(page.whole() if word == ALL else page.group(word))


def remember_group(ctx: Any, word: str | None) -> None:
    """Take what stands after ``--help``, before the help is shown."""
    if word is not None:
        ctx.meta[__name__] = word


class HelpGroup(TyperGroup):
    """A command of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write what its commands are."""
        formatter.write(contents(self, ctx.command_path, with_topics=False))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command.

        Raises:
            ConfigError: there is none of that name.
        """
        word = args[0] if args else ""
        # a shell may ask while a name is typed; what begins with a dash is an option that is none
        if not word or word in self.commands or word.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = closest(word, self.commands if ctx.parent else (*self.commands, "--version"))
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if not ctx.parent:
            model = "MODEL" if near else shlex.quote(word)
            hint += f" A model is named after a command: memest estimate {model}."
        raise ConfigError(
            f"there is no command {word!r}.{hint} `{ctx.command_path} --help` lists the commands."
        )


class _Page:
    """The help of one command, for the screen that there is."""

    def __init__(self, command: TyperCommand, ctx: Any) -> None:
        self.width = screen_width()
        self.path = str(ctx.command_path)
        self.examples = EXAMPLES.get(self.path.removeprefix("memest "), ())
        self.decided = DECIDED.get(command.name or "", ())
        self.text = command.help or ""
        pieces = command.collect_usage_pieces(ctx)
        self.usage = paragraph(f"Usage: {self.path} {' '.join(pieces)}", self.width)
        refused = REFUSED.get(command.name or "", ())
        parameters = [
            each
            for each in command.get_params(ctx)
            if not getattr(each, "hidden", 0) and each.name not in refused
        ]
        self.arguments: list[Any] = [
            each for each in parameters if each.param_type_name == "argument"
        ]
        self.asks = any(each.name == "help_group" for each in command.params)
        self.panels: dict[str, list[Any]] = {}
        for each in parameters:
            is_help = "--help" in each.opts
            if each.param_type_name == "option" and not (is_help and self.asks):
                panel = getattr(each, "rich_help_panel", None) or _OWN
                self.panels.setdefault(panel, []).append(each)

    def short(self) -> str:
        """What most people use, and how to see the rest."""
        blocks = [self.usage, paragraph(self.text.partition("\n\n")[0], self.width)]
        blocks.append(
            rows(
                [(a.metavar or a.name, sentences(a.help or "")[0]) for a in self.arguments],
                self.width,
            )
        )
        of_run: list[tuple[str, str]] = []
        own: list[tuple[str, str]] = []
        output: list[tuple[str, str]] = []
        for each in sorted(self._options(), key=_place):
            option = _TABLE.get(each.name)
            if each.name in self.decided:
                continue
            if option is not None and option.short is not None:
                of_run.append((_term(each), option.line))
            elif option is None and each.name not in _RARE:
                panel = getattr(each, "rich_help_panel", None)
                block = output if panel == OUTPUT else of_run if each.name == "config" else own
                block.append((_term(each), sentences(each.help or "")[0]))
        titles = {"Of this command": own, "The run": of_run, OUTPUT: output}
        blocks += [heading(x) + rows(some, self.width) for x, some in titles.items() if some]
        return "\n".join([*filter(None, blocks), self._examples(), self._more()])

    def group(self, word: str) -> str:
        """The options under one heading.

        Raises:
            ConfigError: there is no such group.
        """
        panel = self._panel(word)
        block = heading(panel) + self._rows(panel)
        return "\n".join([self.usage, block, self._more()])

    def whole(self) -> str:
        """Everything."""
        blocks = [self.usage, paragraph(self.text, self.width)]
        if self.arguments:
            pairs = [(each.metavar or each.name, each.help or "") for each in self.arguments]
            blocks.append(heading("Arguments") + rows(pairs, self.width))
        blocks += [heading(panel) + self._rows(panel) for panel in self.panels]
        if self.examples:
            blocks.append(heading("Examples") + examples(self.examples, self.width))
        return "\n".join(filter(None, blocks))

    def _options(self) -> list[Any]:
        return [each for parameters in self.panels.values() for each in parameters]

    def _rows(self, panel: str) -> str:
        pairs = [(_term(each), each.help or "") for each in self.panels[panel]]
        return rows(pairs, self.width)

    def _examples(self) -> str:
        return heading("Examples") + examples(self.examples[:_NUM_EXAMPLES], self.width)

    def _more(self) -> str:
        groups = ", ".join(_words(panel)[0] for panel in self.panels)
        pairs = [
            (f"--help {ALL}", "Every option."),
            ("--help GROUP", f"Those of one group: {groups}."),
            ("memest help", "What the words mean: reserved, tight, accumulation, ZeRO, ..."),
        ]
        return heading("More") + rows(pairs, self.width)

    def _panel(self, word: str) -> str:
        """The heading that a word stands for: a group's, or that of an option it names."""
        for panel in self.panels:
            if word.lower() in _words(panel):
                return panel
        flag = f"--{word.lower().lstrip('-').replace('_', '-')}"
        option = options_by_flag().get(flag)
        for panel, parameters in self.panels.items():
            if any(flag in p.opts or (option and p.name == option.name) for p in parameters):
                return panel
        names = [_words(panel)[0] for panel in self.panels]
        raise not_legal(f"--help {word}", word, [*names, ALL], state="names no group of options")


def _place(parameter: Any) -> int:
    """Where an option stands in the short help: the batch first, GPUs last."""
    option = _TABLE.get(parameter.name)
    panels = [*_FIRST, *(panel for panel in Panel if panel not in _FIRST)]
    return panels.index(option.panel) if option else len(panels)


def _words(panel: str) -> tuple[str, ...]:
    """What asks for a heading: of the table's what they say, of others their first word."""
    known = [each for each in Panel if each.value == panel]
    return known[0].words if known else (panel.split()[0].lower(),)


def _term(parameter: Any) -> str:
    """An option as it is typed."""
    # the names of the help option come in any order
    flags = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    return f"{flags} {parameter.metavar or ''}".rstrip()


def contents(group: TyperGroup, path: str, *, with_topics: bool) -> str:
    """What the commands of a group are, and the topics besides."""
    width = screen_width()
    is_root = path == "memest"
    blocks = [
        paragraph(f"Usage: {path} COMMAND ...", width),
        paragraph(group.help or "", width),
        heading("Commands")
        + rows([(name, _purpose(each.help or "")) for name, each in group.commands.items()], width),
    ]
    if with_topics:
        blocks.append(
            heading("Topics") + rows([(name, topic.title) for name, topic in TOPICS.items()], width)
        )
        more = "A command's own page: memest COMMAND --help. A topic's: memest help TOPIC."
    elif is_root:
        more = (
            "The help of a command: memest COMMAND --help. What the words mean (reserved, tight, "
            "accumulation, ...): memest help. A dialogue: memest alone, on a terminal. "
            "The version: memest --version."
        )
    else:
        more = f"The help of a command: {path} COMMAND --help."
    return "\n".join([*blocks, paragraph(more, width)])


def _purpose(text: str) -> str:
    return sentences(text.partition("\n\n")[0])[0].rstrip(".")
