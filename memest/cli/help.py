"""``memest help``: a page for each command, in the order of a manual, and some topics."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Optional

import typer

from memest.cli.console import write_out
from memest.cli.examples import EXAMPLES
from memest.cli.parameters import DebugFlag
from memest.errors import ConfigError, closest

__all__ = ["TOPICS", "help_page", "show_help"]

_EXIT_CODES = """\
0    done; for fits and advise: it fits
1    failure: a model that cannot be traced, a recording that differs
2    wrong usage: an option, a value or a file that cannot be
3    tight: too close to call (fits, advise)
4    does not fit (fits, advise)
5    unknown model or GPU
6    a package of an extra is missing
130  interrupted
141  the reader of a pipe is gone"""

TOPICS: dict[str, tuple[str, str]] = {
    "exit-codes": (
        "what scripts can rely on",
        f"{_EXIT_CODES}\n\nData goes to standard output, everything else to standard error.",
    ),
    "environment": (
        "variables that are read",
        """\
MEMEST_CACHE       folder of step profiles (memest cache says where)
MEMEST_HOME        folder of calibration profiles and measurements
HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
                   as the Hugging Face hub takes them
COLUMNS, NO_COLOR  width and colours of reports""",
    ),
    "naming-models": (
        "how a model is named",
        """\
bert-large-uncased              a name of the catalogue (memest models)
meta-llama/Llama-3.1-8B         an id of the Hugging Face hub
./my-model, ./config.json       a folder, or the configuration itself
package.module:factory          anything that returns a torch.nn.Module
'gpt2?n_layer=4&n_embd=256'     any of them with values of its configuration changed""",
    ),
    "sizes": (
        "how sizes of memory are written",
        """\
22GiB, 1343MiB, 512KiB          binary units, as torch and nvidia-smi count
24GB                            decimal, as on the box of a GPU
1048576                         bytes""",
    ),
}


def help_page(root: Any, topic: str | None) -> str:
    """The page of a command or a topic, or the list of all.

    Args:
        root: the command line as Typer makes it.
        topic: None for the list.

    Raises:
        ConfigError: neither a command nor a topic.
    """
    if topic is None:
        return _contents(root)
    if topic in root.commands:
        return _command_page(root, topic)
    if topic in TOPICS:
        what, text = TOPICS[topic]
        return f"{_section('NAME', f'{topic} - {what}')}\n{_section('DESCRIPTION', text)}"
    legal = [*root.commands, *TOPICS]
    near = closest(topic, legal)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"there is no command and no topic {topic!r}.{hint} `memest help` lists them all."
    )


def _section(title: str, text: str) -> str:
    body = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
    return f"{title}\n{body}"


def _paragraphs(command: Any) -> tuple[str, str]:
    """The first line of a command's help, and the rest without its example."""
    text = inspect.cleandoc(command.help or "")
    first, _, rest = text.partition("\n")
    return first.rstrip("."), rest.partition("For example:")[0].strip()


def _contents(root: Any) -> str:
    wide = max(map(len, (*root.commands, *TOPICS))) + 2
    commands = "\n".join(
        f"{name:<{wide}}{_paragraphs(command)[0]}" for name, command in root.commands.items()
    )
    topics = "\n".join(f"{name:<{wide}}{what}" for name, (what, _) in TOPICS.items())
    return (
        f"{_section('NAME', 'memest - how much GPU memory a PyTorch training run will take')}\n"
        f"{_section('COMMANDS', commands)}\n{_section('TOPICS', topics)}\n"
        f"{_section('SEE ALSO', 'memest help COMMAND, memest COMMAND --help')}"
    )


def _command_page(root: Any, name: str) -> str:
    command = root.commands[name]
    what, more = _paragraphs(command)
    arguments = " ".join(
        parameter.metavar or parameter.name.upper()
        if parameter.required
        else f"[{parameter.metavar or parameter.name.upper()}]"
        for parameter in command.params
        if parameter.param_type_name == "argument"
    )
    inner = " COMMAND" if hasattr(command, "commands") else ""
    parts = [
        _section("NAME", f"memest-{name} - {what[0].lower()}{what[1:]}"),
        _section("SYNOPSIS", " ".join(f"memest {name}{inner} {arguments} [OPTIONS]".split())),
    ]
    if more:
        parts.append(_section("DESCRIPTION", more))
    examples = EXAMPLES.get(name, ())
    if examples:
        lines = "\n\n".join(f"{what}:\n    {line}" for line, what in examples)
        parts.append(_section("EXAMPLES", lines))
    parts.append(_section("EXIT STATUS", _EXIT_CODES))
    parts.append(_section("SEE ALSO", f"memest {name} --help lists every option."))
    return "\n".join(parts)


def show_help(
    topic: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Argument(
            metavar="TOPIC", help="A command, or a topic; left out, the list.", show_default=False
        ),
    ] = None,
    *,
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
) -> int:
    """Pages on commands and topics, with examples.

    For example: memest help estimate
    """
    from memest.cli.commands import build

    write_out(help_page(build(), topic))
    return 0
