"""Byte units: constants, one parser and one formatter.

Memory is an exact ``int`` of bytes everywhere in memest; this module is the only place that
divides. Binary units carry their binary names (KiB, MiB, GiB); ``GB`` is decimal, as it is on
the box of a GPU.
"""

from __future__ import annotations

import re

from memest.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "format_delta", "format_size", "parse_size", "plural"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")

_MAX_DIGITS = 64


def parse_size(text: str | int) -> int:
    """Read a size such as ``1343MiB``, ``80 GiB``, ``24GB`` or ``1048576`` into bytes.

    Args:
        text: a number with an optional unit. ``GiB`` is 2**30, ``GB`` is 10**9.

    Returns:
        The size in bytes, rounded down to a whole byte.

    Raises:
        ConfigError: if the text is not a size.

    Example:
        >>> parse_size("1.5 GiB")
        1610612736
        >>> parse_size("24GB")
        24000000000
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    # Python refuses to convert numbers of thousands of digits
    if match is not None and match.group(2).lower() in ("k", "m", "g", "t"):
        size, letter = match.group(1)[:_MAX_DIGITS], match.group(2).upper()
        raise ConfigError(
            f"{text.strip()[:_MAX_DIGITS]!r} may be {size}{letter}iB, as Slurm, Docker and free "
            f"count, or {size}{letter}B, as a box says it: write which"
        )
    if match is None or factor is None or len(match.group(1)) > _MAX_DIGITS:
        raise ConfigError(
            f"{text[:_MAX_DIGITS]!r} is not a size: write a number with B, KiB, MiB, GiB, KB, MB "
            "or GB, for example 80GiB or 1343MiB"
        )
    number = match.group(1)
    return int(number) * factor if "." not in number else int(float(number) * factor)


def format_size(num_bytes: int) -> str:
    """Write bytes for people: GiB with two decimals from 1 GiB on, MiB without decimals below.

    Example:
        >>> format_size(3 * 1024**3 // 2)
        '1.50 GiB'
        >>> format_size(1343 * 1024**2)
        '1.31 GiB'
        >>> format_size(600 * 1024)
        '600 KiB'
    """
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    if size >= GIB:
        return f"{sign}{size / GIB:,.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:,.0f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:,.0f} KiB"
    return f"{sign}{size} B"


def plural(number: int, noun: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_delta(num_bytes: int) -> str:
    """Write a difference with its sign, as :func:`format_size` does.

    Example:
        >>> format_delta(2 * 1024**2)
        '+2 MiB'
    """
    return format_size(num_bytes) if num_bytes < 0 else f"+{format_size(num_bytes)}"
