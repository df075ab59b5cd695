"""Code that a question names, which is run to answer it: a server may refuse it."""

from __future__ import annotations

import os

from memest.errors import ConfigError

__all__ = ["NO_OWN_CODE", "check_own_code"]

NO_OWN_CODE = "MEMEST_NO_OWN_CODE"
"""A variable of the environment; set, nothing that a question names is imported or called.

Its value is what whoever set it says to that, in a sentence.
"""


def check_own_code(what: str) -> None:
    """Refuse to run code where that was switched off.

    Args:
        what: names the code, for the message.

    Raises:
        ConfigError: it was switched off.
    """
    if why := os.environ.get(NO_OWN_CODE):
        raise ConfigError(f"{what} names code that would be run to answer. {why}")
