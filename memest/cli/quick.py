"""The common questions without Typer, which takes longer to start than they take to answer.

Only command lines without anything out of the ordinary are read here: known options, each one once,
one model. Everything else (help, completion, slips of the pen) is Typer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from memest.cli.answering import run_estimate, run_fits
from memest.cli.argv import options_by_flag
from memest.option import Kind

__all__ = ["quick"]

_OUTPUT = {
    "--json": "json",
    "--quiet": "quiet",
    "-q": "quiet",
    "--no-color": "no_color",
    "--ascii": "ascii",
    "--debug": "debug",
}
_TEXTS = {"--by": "by", "--depth": "depth", "--out": "out", "--snapshot": "snapshot"}

_FILES = (".yaml", ".yml", ".toml", ".json", ".py", ".bin")
"""What may be a configuration of another tool, which takes readers to tell."""


def _may_be_file(model: str) -> bool:
    return model.lower().endswith(_FILES) or ".py:" in model  # a function of a file


def quick(words: Sequence[str]) -> Callable[[], int] | None:
    """What to run for a command line, None where Typer has to look at it.

    Args:
        words: after ``argv.normalise``.
    """
    if len(words) < 2 or words[0] not in ("estimate", "fits"):
        return None
    flags = options_by_flag()
    texts = _TEXTS if words[0] == "estimate" else {"--fail-over": "fail_over"}
    model: str | None = None
    options: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    rest = iter(words[1:])
    for word in rest:
        flag, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if not word.startswith("-"):
            if model is not None:
                return None
            model = word
        elif word in _OUTPUT:
            shown[_OUTPUT[word]] = True
        elif flag in flags and flags[flag].kind is Kind.SWITCH and not equals:
            options[flags[flag].name] = True
        elif flag in flags or flag in texts:
            value = attached if equals else next(rest, None)
            if value is None or (flag in flags and flags[flag].kind is Kind.SWITCH):
                return None
            if flag in texts:
                if texts[flag] in shown:
                    return None
                shown[texts[flag]] = value
            elif flags[flag].kind is Kind.LIST:
                options.setdefault(flags[flag].name, []).append(value)
            elif flags[flag].name in options:
                return None
            else:
                options[flags[flag].name] = value
        else:
            return None
    if model is None or _may_be_file(model):
        return None
    if words[0] == "estimate":
        return partial(run_estimate, model, options, **shown)
    kept = {name: shown[name] for name in ("json", "quiet", "debug", "fail_over") if name in shown}
    return partial(run_fits, model, options, **kept)
