"""Command lines before Typer sees them, and those that Typer need not see.

Rewritten is what follows ``--``, a launch command, and other people's spellings: habits of
transformers' command lines, and one of our own, that Typer cannot declare:

- ``--per_device_train_batch_size 8``: underscores.
- ``--bf16 True``: a switch with a value.
- ``--gradient_checkpointing``: an option whose value may be left out.
- ``--help peft``: a group of options behind the switch for help.
- ``--ray``: another one; what follows is its value if it looks like an address.

The common questions are then read here, because Typer takes longer to start than they take to
answer: command lines without anything out of the ordinary (known options, each one once, one
model). Everything else (help, completion, slips of the pen) is Typer's.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from memest.cli.answering import run_estimate, run_fits
from memest.cli.console import Output
from memest.config.life import GPUS_ALONE
from memest.config.option import OFF_WORDS, ON_WORDS, Kind, Option
from memest.config.option_table import OPTIONS
from memest.errors import ConfigError, closest

__all__ = [
    "ALL",
    "DECIDED",
    "ESTIMATING",
    "HELP_GROUP",
    "REFUSED",
    "SWITCHED_OFF",
    "as_typed",
    "closest_flags",
    "normalise",
    "options_by_flag",
    "plain_question",
    "refuse_launch",
    "with_launch",
]

_MODE = re.compile(
    rf"^(none|full|selective|every.*|{'|'.join(sorted(ON_WORDS | OFF_WORDS))})$", re.IGNORECASE
)
_ADDRESS = re.compile(r"^(auto|local|ray://\S+|[^\s:=]+:\d+)$")
ESTIMATING = (
    "estimate",
    "fits",
    "read",
    "max-batch",
    "compare",
    "sweep",
    "stages",
    "advise",
    "explain-oom",
    "explain-growth",
)
"""Commands that take the options of an estimate."""
DECIDED = {"advise": ("batch", "grad_accum")}
"""What a command looks for itself, whatever a configuration says."""
REFUSED = dict.fromkeys(GPUS_ALONE, ("host_memory",))
"""What a command has nothing to say of and refuses, so that no help of it names it."""
ALL = "all"
"""The word after ``--help`` for every option."""
HELP_GROUP = "--help-group"
"""How the word after ``--help`` reaches a command, which hides it."""
SWITCHED_OFF = "--switched-off"
"""How a switch with a word for false reaches a command, which hides it."""
_ONE_RUN = ("estimate", "fits", "read", "max-batch", "stages", "advise")
"""Commands whose only positional is the model: a launch command may stand in its place."""
_OF_A_LOG = ("explain-oom", "explain-growth")
"""Commands whose first positional is what a run wrote, and whose second is the model."""
_OUTPUT = {
    "--json": "as_json",
    "--quiet": "quiet",
    "-q": "quiet",
    "--no-color": "colorless",
    "--ascii": "ascii_only",
    "--debug": "debug",
}
_OF_CARD = frozenset({"--gpu", "--gpu-memory", "--device-context", "--calibration"})
"""Options that are taken for memest's behind a script too; not by other spellings (--profile)."""
_TEXTS = {"--by": "by", "--depth": "depth", "--out": "out", "--snapshot": "snapshot"}
_READ = {"--config": "config", "--config-format": "config_format", "--launch": "launch"}
"""Options that name what readers read, by the name :func:`read_question` has for them."""

_FILES = tuple(".yaml .yml .toml .json .py .ipynb .bin .sh .bash .sbatch .slurm".split())
"""What may be a configuration of another tool, which takes readers to tell."""


@cache
def options_by_flag() -> dict[str, Option]:
    """Every spelling of every option of an estimate."""
    flags: dict[str, Option] = {}
    for option in OPTIONS:
        spellings = (f"--{name.replace('_', '-')}" for name in option.keywords)
        flags |= dict.fromkeys((*option.flags, *spellings), option)
    return flags


def closest_flags(flag: str, own: Iterable[str] = ()) -> list[str]:
    """The spellings near to ``flag``, of an estimate's options and a command's own ones."""
    return closest(flag.replace("_", "-"), [*own, *options_by_flag()])


def _is_mode(text: str) -> bool:
    """Whether a word after a MODE option is its value; a slip of the pen counts, a model not."""
    close_modes = difflib.get_close_matches(
        text.lower(), ("none", "full", "selective", "every_n"), n=1, cutoff=0.7
    )
    return bool(_MODE.match(text) or close_modes)


def _switch(option: Option, value: str | None, tokens: list[str]) -> list[str]:
    """A switch that is named alone, or with a word for true or false."""
    flag = option.flags[0]
    word = "true" if value is None else value.lower()
    if word in ON_WORDS:
        tokens[:] = [token for token in tokens if token != f"{SWITCHED_OFF}={option.name}"]
        return [flag]
    if word not in OFF_WORDS:
        return [f"{flag}={value}"]
    # the last one counts: off takes back an earlier on, and what a configuration says
    tokens[:] = [token for token in tokens if token != flag]
    return [f"{SWITCHED_OFF}={option.name}"]


def _either(option: Option, flag: str, value: str | None) -> str:
    """A switch with a negative form, as the positive form with a word."""
    word = "true" if value is None else value.lower()
    if flag.startswith("--no-"):
        word = "false" if word in ON_WORDS else "true" if word in OFF_WORDS else word
    return f"{option.flags[0]}={word}"


def _help_tokens(token: str, waiting: list[str]) -> list[str]:
    """The switch for help, behind the group of options that is named after it."""
    flag, equals, word = token.partition("=")
    if not equals and waiting and not waiting[0].startswith("-"):
        word = waiting.pop(0)
    return [f"{HELP_GROUP}={word}", flag] if word else [flag]


def normalise(argv: Sequence[str]) -> list[str]:
    """Rewrite option spellings to the declared ones; values stay as they are.

    Args:
        argv: arguments after the program's name.

    Returns:
        Arguments for Typer. Everything after ``--`` is left alone.

    Raises:
        ConfigError: an option's value is missing, or a switch has one; one option has two values,
            by two of its names.

    Example:
        >>> normalise(["--bf16", "True", "--per_device_train_batch_size=4", "--checkpointing"])
        ['--bf16', '--batch=4', '--checkpointing=full']
    """
    tokens: list[str] = []
    typed: dict[str, tuple[str, str]] = {}
    waiting = list(argv)
    has_model = False
    while waiting:
        token = waiting.pop(0)
        if token == "--":  # noqa: S105 - a word of the command line
            return [*tokens, token, *waiting]
        if tokens and tokens[0] in ESTIMATING and token.partition("=")[0] in ("--help", "-h"):
            tokens += _help_tokens(token, waiting)
            continue
        if not token.startswith("--"):
            has_model = has_model or _is_model(token, tokens)
            tokens.append(token)
            continue
        spelling, equals, inline_value = token.partition("=")
        flag = spelling.replace("_", "-")
        value = inline_value if equals else None
        option = options_by_flag().get(flag)
        if option is None and flag.startswith("--no-"):
            opposite = options_by_flag().get(f"--{flag[5:]}")
            if opposite is not None and opposite.kind is Kind.SWITCH and value is None:
                option, value = opposite, "false"
        if flag == "--ray" and not inline_value:
            address = waiting.pop(0) if waiting and _ADDRESS.match(waiting[0]) else "auto"
            tokens.append(f"{flag}={address}")
            continue
        if option is None:
            tokens.append(flag + equals + inline_value)
            continue
        if option.kind in (Kind.SWITCH, Kind.EITHER):
            if value is None and waiting and waiting[0].lower() in ON_WORDS | OFF_WORDS:
                value = waiting.pop(0)
            elif value is None and has_model and waiting and not waiting[0].startswith("-"):
                refuse_launch(argv)
                raise ConfigError(
                    f"{spelling} is a switch and takes no value: leave {waiting[0]} out."
                )
            if option.kind is Kind.SWITCH:
                tokens += _switch(option, value, tokens)
            else:
                tokens.append(_either(option, flag, value))
            continue
        flag = option.flags[0]
        if option.kind is Kind.MODE:
            if value is None and waiting and _is_mode(waiting[0]):
                value = waiting.pop(0)
            words = dict.fromkeys((*ON_WORDS, ""), "full") | dict.fromkeys(OFF_WORDS, "none")
            word = "full" if value is None else value
            tokens.append(f"{flag}={words.get(word.lower(), word)}")
        else:
            tokens.append(flag if value is None else f"{flag}={value}")
            if value is None:
                if _lacks_value(option, waiting):
                    refuse_launch(argv)
                    raise ConfigError(
                        f"{spelling} needs a value: {spelling} {option.metavar}. {option.line}"
                    )
                value = waiting.pop(0)
                tokens.append(value)
            first, given = typed.setdefault(flag, (spelling, value))
            # the same word again changes it, as in any command line; another one is a slip
            if option.kind is not Kind.LIST and first != spelling and given != value:
                raise ConfigError(
                    f"{first} {given} and {spelling} {value} are the same option: drop one."
                )
    return tokens


def _is_model(token: str, before: Sequence[str]) -> bool:
    """Whether a word is the only positional that a command takes, its model."""
    if not before or before[0] not in _ONE_RUN:
        return False
    return not token.startswith("-") and not before[-1].startswith("-")


def _lacks_value(option: Option, waiting: Sequence[str]) -> bool:
    """Whether an option stands at the end of the words, or in front of another one."""
    if option.metavar == "WORDS" and waiting:
        return False  # the name of another tool's option is among what they say
    following = waiting[0] if waiting else "--"
    return following.startswith("--") or following in _OUTPUT or following in options_by_flag()


def as_typed(message: str, argv: Sequence[str]) -> str:
    """A message about an option and its value, with the option as it was typed.

    Example:
        >>> as_typed("--seq-len '2k' is not a whole number.", ["--max-seq-length", "2k"])
        "--max-seq-length '2k' is not a whole number."
    """
    for token, following in zip(argv, (*argv[1:], ""), strict=False):
        spelling, equals, value = token.partition("=")
        option = options_by_flag().get(spelling.replace("_", "-"))
        if option is None or spelling == option.flags[0]:
            continue
        value = value if equals else following
        flag = re.escape(option.flags[0])
        about = f"{flag} ({re.escape(repr(value))}|{re.escape(value)})(?!\\w)"
        if value and re.search(about, message):
            message = spelling.join(re.split(rf"{flag}(?![\w-])", message))
    return message


def with_launch(words: Sequence[str]) -> list[str]:
    """What follows ``--`` as the value of ``--launch``, where it is a command.

    One word alone stays what it always was: a model whose name looks like an option.

    Example:
        >>> with_launch(["estimate", "--json", "--", "torchrun", "train.py"])
        ['estimate', '--json', '--launch=torchrun train.py']
    """
    words = list(words)
    if not words or words[0] not in ESTIMATING or "--" not in words:
        return words
    at = words.index("--")
    if len(words) - at <= 2:
        return words
    return [*words[:at], f"--launch={shlex.join(words[at + 1 :])}"]


def refuse_launch(words: Sequence[str]) -> None:
    """Refuse a launch command that stands in the place of a model, or of a log.

    Its options would be taken for memest's own, so nobody guesses where it begins.

    Args:
        words: as they were typed.

    Raises:
        ConfigError: with the very command to type.
    """
    if not words or words[0] not in (*_ONE_RUN, *_OF_A_LOG) or "--" in words:
        return
    from memest.readers.command_words import begins_launch

    waits_for_log = words[0] in _OF_A_LOG
    for at in range(1, len(words)):
        flag = words[at - 1].replace("_", "-")
        option = options_by_flag().get(flag)
        is_switch = flag in _OUTPUT or (option is not None and option.kind is Kind.SWITCH)
        is_value = flag.startswith("-") and flag != "-" and "=" not in flag and not is_switch
        if is_value or (words[at].startswith("-") and words[at] != "-"):
            continue
        begun = _words_in(words[at]) if waits_for_log and " " in words[at] else words[at:]
        if begun and begins_launch(begun):
            own, launch = _own_behind(begun, words[:at])
            if waits_for_log:
                typed = shlex.join(launch)
                raise ConfigError(
                    f"{typed} is a launch command, and {words[0]} reads what a run wrote: keep "
                    f"that, {typed} 2>&1 | tee run.log, then memest {words[0]} run.log -- {typed}."
                    f" Before it runs: memest fits --gpu t4 -- {typed}."
                )
            command = f"memest {shlex.join([*words[:at], *own, '--', *launch])}"
            raise ConfigError(
                f"{words[at]} begins a launch command, which stands behind --: {command} (memest's "
                "own options, such as --gpu, in front of --; nothing is run)."
            )
        waits_for_log = False


def _words_in(text: str) -> list[str]:
    """The words of a command in quotes; none where the text is what a run wrote."""
    if "\n" in text or "out of memory" in text.lower():
        return []
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _own_behind(launch: Sequence[str], before: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is memest's of the words behind a launch command's script, and the command without it.

    Args:
        launch: the launch command.
        before: what stands in front of it; an option there leaves that of its name to the script.
    """
    from memest.readers.command_words import split_command

    try:
        behind = list(split_command(launch).words)
    except ConfigError:
        return [], list(launch)
    at = len(launch) - len(behind)
    if list(launch[at:]) != behind:  # they stand in quotes, in one word of another command
        return [], list(launch)
    named = {_dashed(word) for word in before}
    own: list[str] = []
    kept = list(launch[:at])
    while behind:
        word = behind.pop(0)
        if word in ("--json", "--quiet", "-q"):
            own.append(word)
        elif _dashed(word) not in _OF_CARD - named:
            kept.append(word)
        else:
            own.append(word)
            if "=" not in word and behind:
                own.append(behind.pop(0))
    return own, kept


def _dashed(word: str) -> str:
    """The option that a word names, without its value."""
    return word.partition("=")[0].replace("_", "-")


def _may_be_file(model: str) -> bool:
    return model.lower().endswith(_FILES) or ".py:" in model  # a function of a file


def plain_question(words: Sequence[str]) -> Callable[[], int] | None:
    """What to run for a command line, None where Typer has to look at it.

    Args:
        words: as :func:`normalise` returns them.
    """
    if len(words) < 2 or words[0] not in ("estimate", "fits"):
        return None
    flags = options_by_flag()
    texts = _TEXTS if words[0] == "estimate" else {"--fail-over": "fail_over"}
    model: str | None = None
    options: dict[str, Any] = {}
    report_options: dict[str, Any] = {}
    read: dict[str, Any] = {}
    output: dict[str, bool] = {}
    rest = iter(words[1:])
    for word in rest:
        flag, equals, inline_value = (
            word.partition("=") if word.startswith("--") else (word, "", "")
        )
        if not word.startswith("-"):
            if model is not None:
                return None
            model = word
        elif word in _OUTPUT:
            output[_OUTPUT[word]] = True
        elif flag in flags and flags[flag].kind is Kind.SWITCH and not equals:
            options[flags[flag].name] = True
        elif flag in flags or flag in texts or flag in _READ:
            value = inline_value if equals else next(rest, None)
            if value is None or (flag in flags and flags[flag].kind is Kind.SWITCH):
                return None
            if flag in texts:
                if texts[flag] in report_options:
                    return None
                report_options[texts[flag]] = value
            elif flag == "--config":
                read.setdefault("config", []).append(value)
            elif flag in _READ:
                if _READ[flag] in read:
                    return None
                read[_READ[flag]] = value
            elif flags[flag].kind is Kind.LIST:
                options.setdefault(flags[flag].name, []).append(value)
            elif flags[flag].name in options:
                return None
            else:
                options[flags[flag].name] = value
        else:
            return None
    answer = run_estimate if words[0] == "estimate" else run_fits
    shown = Output(**output)
    if read or (model is not None and _may_be_file(model)):
        return partial(_answer_read, answer, model, options, shown, read, report_options)
    if model is None:
        return None
    return partial(answer, model, options, shown, **report_options)


def _answer_read(
    answer: Callable[..., int],
    model: str | None,
    options: dict[str, Any],
    output: Output,
    read: Mapping[str, Any],
    report_options: Mapping[str, Any],
) -> int:
    """Answer a question that a configuration, a script or a launch command is part of."""
    from memest.catalog.gpu_counts import split_gpu_counts
    from memest.cli.question import read_question

    # before files are read: a number that stands with the name is an option like others
    options = split_gpu_counts(options) if "gpu" in options else options
    question = read_question([] if model is None else [model], options, **read)
    with question.run.telling_origins():
        return answer(
            question.models[0], question.options, output, run=question.run, **report_options
        )
