"""What an error says to add or to use, as another question: one click in place of typing it.

Errors of the library end with what to type next, and spell it as the command line does.
"""

from __future__ import annotations

import re
import shlex

from memest.app.labels import label_of, value_words
from memest.app.question import ExplorerQuestion
from memest.app.uploads import check_question
from memest.catalog.models import catalogue
from memest.config.option import Kind
from memest.config.options import find_option
from memest.config.spelling import read_scenario
from memest.errors import MemestError, UnknownModelError, closest

__all__ = ["remedies"]

_SAID = re.compile(r"\b(?:[Uu]se|[Aa]dd) --([a-z0-9-]+)(?: ([\w.=-]*\w))?")
_NO_VALUES = frozenset("and file in its or what which with".split())
"""Words that go on with the sentence behind a flag."""


def remedies(question: ExplorerQuestion, error: MemestError) -> list[tuple[str, ExplorerQuestion]]:
    """What an error says to do, as far as the page can do it.

    Args:
        question: that was refused.
        error: that refused it.

    Returns:
        Options that it names with a legal value, or models whose names are near, in words, each
        with the question that has them.
    """
    if isinstance(error, UnknownModelError):
        near = closest(question.model, (entry.id for entry in catalogue()))
        return [(name, ExplorerQuestion.of(name, question.given)) for name in near]
    found = []
    for flag, value in _SAID.findall(str(error)):
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
            words = (f"{label_of(find_option(n))} {value_words(v)}" for n, v in options.items())
            found.append((", ".join(words), other))
    return found
