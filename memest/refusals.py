"""Refusals that several rules word alike: pairs that are not priced, lengths that cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable

from memest.errors import ConfigError

__all__ = ["refuse_beside", "refuse_uneven"]


def refuse_beside(flag: str, pairs: Iterable[tuple[object, str]]) -> None:
    """The first of what is there and not priced together with an option is refused.

    Args:
        flag: the option.
        pairs: whether something is there, and what it is.

    Raises:
        ConfigError: something is.
    """
    for there, what in pairs:
        if there:
            raise ConfigError(
                f"{what} is not priced together with {flag} yet, and memest does not guess: leave "
                "one of them out."
            )


def refuse_uneven(given: str, length: int | None, pieces: int, why: str) -> None:
    """A length that equal pieces do not make is refused, and the nearest are named.

    Args:
        given: the option of the length.
        length: what it says; None where nobody said one.
        pieces: into which it is cut.
        why: who cannot share it, and the reason.

    Raises:
        ConfigError: it is no multiple of the pieces.
    """
    if length is None or length % pieces == 0:
        return
    below = length // pieces * pieces
    near = " or ".join(str(n) for n in (below, below + pieces) if n)
    raise ConfigError(
        f"{given} {length} cannot be shared by {why}, so lengths are multiples of {pieces}, such "
        f"as {near}."
    )
