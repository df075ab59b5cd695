"""When releases of the libraries that train came out: what a month had.

Source: the upload times of PyPI's index (``upload-time`` of the first file of X.Y.0, which for a
few releases is a later X.Y.Z because the first was withdrawn), read in November 2026.
"""

from __future__ import annotations

__all__ = ["dates_of", "known_until", "releases_before"]

Release = tuple[int, int]
Month = tuple[int, int]

_CAME_OUT = {
    "torch": """1.0 2018-12 1.1 2019-04 1.2 2019-08 1.3 2019-10 1.4 2020-01 1.5 2020-04 1.6 2020-07
        1.7 2020-10 1.8 2021-03 1.9 2021-06 1.10 2021-10 1.11 2022-03 1.12 2022-06 1.13 2022-10
        2.0 2023-03 2.1 2023-10 2.2 2024-01 2.3 2024-04 2.4 2024-07 2.5 2024-10 2.6 2025-01
        2.7 2025-04 2.8 2025-08 2.9 2025-10 2.10 2026-01 2.11 2026-03 2.12 2026-05 2.13 2026-07
        2.14 2026-09 2.15 2026-10""",
    "transformers": """4.0 2020-11 4.1 2020-12 4.2 2021-01 4.3 2021-02 4.4 2021-03 4.5 2021-04
        4.6 2021-05 4.7 2021-06 4.8 2021-06 4.9 2021-07 4.10 2021-08 4.11 2021-09 4.12 2021-10
        4.13 2021-12 4.14 2021-12 4.15 2021-12 4.16 2022-01 4.17 2022-03 4.18 2022-04 4.19 2022-05
        4.20 2022-06 4.21 2022-07 4.22 2022-09 4.23 2022-10 4.24 2022-11 4.25 2022-12 4.26 2023-01
        4.27 2023-03 4.28 2023-04 4.29 2023-05 4.30 2023-06 4.31 2023-07 4.32 2023-08 4.33 2023-09
        4.34 2023-10 4.35 2023-11 4.36 2023-12 4.37 2024-01 4.38 2024-02 4.39 2024-03 4.40 2024-04
        4.41 2024-05 4.42 2024-06 4.43 2024-07 4.44 2024-08 4.45 2024-09 4.46 2024-10 4.47 2024-12
        4.48 2025-01 4.49 2025-02 4.50 2025-03 4.51 2025-04 4.52 2025-05 4.53 2025-06 4.54 2025-07
        4.55 2025-08 4.56 2025-08 4.57 2025-10 5.0 2026-01 5.1 2026-02 5.2 2026-02 5.3 2026-03
        5.4 2026-03 5.5 2026-04 5.6 2026-04 5.7 2026-04 5.8 2026-05 5.9 2026-05 5.10 2026-06
        5.11 2026-06 5.12 2026-06 5.13 2026-07 5.14 2026-07 5.15 2026-08 5.16 2026-08 5.17 2026-09
        5.18 2026-09 5.19 2026-10 5.20 2026-10 5.21 2026-10 5.22 2026-10 5.23 2026-11
        5.24 2026-11""",
    "bitsandbytes": """0.31 2022-08 0.32 2022-08 0.33 2022-09 0.34 2022-09 0.35 2022-10 0.36 2023-01
        0.37 2023-02 0.38 2023-04 0.39 2023-05 0.40 2023-07 0.41 2023-07 0.42 2024-01 0.43 2024-03
        0.44 2024-09 0.45 2024-12 0.46 2025-05 0.47 2025-08 0.48 2025-09 0.49 2025-12
        0.50 2026-07""",
    "peft": """0.1 2023-02 0.2 2023-03 0.3 2023-05 0.4 2023-07 0.5 2023-08 0.6 2023-11 0.7 2023-12
        0.8 2024-01 0.9 2024-02 0.10 2024-03 0.11 2024-05 0.12 2024-07 0.13 2024-09 0.14 2024-12
        0.15 2025-03 0.16 2025-07 0.17 2025-08 0.18 2025-11 0.19 2026-04 0.20 2026-07
        0.21 2026-09""",
}


def _read(text: str) -> tuple[tuple[Release, Month], ...]:
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return tuple((_pair(release, "."), _pair(month, "-")) for release, month in pairs)


def _pair(text: str, between: str) -> tuple[int, int]:
    first, _, second = text.partition(between)
    return int(first), int(second)


_DATES = {package: _read(text) for package, text in _CAME_OUT.items()}


def dates_of(package: str) -> dict[Release, Month]:
    """The releases of a package that are known, the oldest first, and the months of them."""
    return dict(_DATES[package])


def known_until() -> Month:
    """The month of the newest release that is known, as (year, month)."""
    return max(dates[-1][1] for dates in _DATES.values())


def releases_before(month: Month) -> dict[str, Release]:
    """The newest release of each package that was out when a month began.

    Args:
        month: as (year, month). A package that did not exist yet is left out.

    Example:
        >>> releases_before((2022, 1))
        {'torch': (1, 10), 'transformers': (4, 15)}
    """
    out = {}
    for package, dates in _DATES.items():
        before = [release for release, came_out in dates if came_out < month]
        if before:
            out[package] = before[-1]
    return out
