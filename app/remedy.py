"""What an error says to add or to use, as another question: one click in place of typing it.

Errors of the library end with what to type next, and spell it as the command line does.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from memest.app.question import ExplorerQuestion
from memest.app.uploads import check_question
from memest.config.option import Kind
from memest.config.options import find_option
from memest.config.spelling import read_scenario
from memest.errors import MemestError

__all__ = ["remedies"]

_SAID = re.compile(r"\b(?:[Uu]se|[Aa]dd) --([a-z0-9-]+)(?: ([\w.=-]*\w))?")
_NO_VALUES = frozenset("and file in its or what which with".split())
"""Words that go on with the sentence behind a flag."""


def remedies(
    question: ExplorerQuestion, text: str
) -> list[tuple[dict[str, Any], ExplorerQuestion]]:
    """What an error says to do, as far as the page can do it.

    Args:
        question: that was refused.
        text: of the error.

    Returns:
        Options that are named with a legal value, each with the question that has them.
    """
    found = []
    for flag, value in _SAID.findall(text):
        try:
            option = find_option(flag.removeprefix("no-").replace("-", "_"))
            is_switch = option.kind in (Kind.SWITCH, Kind.EITHER)
            given = value if not is_switch and value.lower() not in _NO_VALUES else ""
            options = read_scenario(shlex.quote(f"{flag}={given}" if given else flag))
            other = question.with_options(**options)
            other.check_values()
            check_question(other)
        except MemestError:
            continue
        if other != question:
            found.append((options, other))
    return found
