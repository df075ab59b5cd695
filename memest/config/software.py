"""Software of another time as an input: the versions that will train."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from memest.config.release_dates import dates_of, known_until, releases_before
from memest.errors import ConfigError

__all__ = ["Software", "torch_release_year"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The versions of the software that will train, where they differ from what is installed.

    Attributes:
        torch: (major, minor) of PyTorch, None for the installed one.
        transformers: (major, minor) of transformers, None for the installed one.
        cuda: (major, minor) of the CUDA toolkit PyTorch was built with.
        bitsandbytes: (major, minor) of bitsandbytes, None for the installed one.
        peft: (major, minor) of peft, None for the installed one.
    """

    torch: tuple[int, int] | None = None
    transformers: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    bitsandbytes: tuple[int, int] | None = None
    peft: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Software:
        """Read ``torch=1.10,transformers=4.18``, or ``2022-01``: what was out when a month began.

        A package that is named beside a month is what it is named as.

        Raises:
            ConfigError: for an unknown package, a version that is no number, or a month of which
                memest does not know the releases.
        """
        values: dict[str, tuple[int, int]] = {}
        items = list(filter(None, (part.strip() for part in text.split(","))))
        months = [item for item in items if _MONTH.fullmatch(item)]
        if len(months) > 1:
            raise ConfigError(
                f"--software {text!r} names {len(months)} months: {' and '.join(months)}. Drop all "
                "but one."
            )
        for month in months:
            values |= _of_month(month)
        values |= dict(_release(item, cls) for item in items if item not in months)
        newest = max(dates_of("torch"))
        torch = values.get("torch", newest)
        if torch[0] > newest[0] or _LAST_OF_1 < torch < (2, 0):
            raise ConfigError(
                f"--software {text!r}: PyTorch has no release {torch[0]}.{torch[1]}; the newest "
                f"that memest knows is {newest[0]}.{newest[1]}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, str]:
        """The declared versions as text, for JSON."""
        pairs = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: ".".join(map(str, v)) for name, v in pairs.items() if v is not None}


_MONTH = re.compile(r"\d{4}-\d{1,2}(-\d{1,2})?")
_FIRST_MONTH = (2019, 1)
"""The first that began with a PyTorch 1."""
_LAST_OF_1 = (1, 13)


def _of_month(text: str) -> dict[str, tuple[int, int]]:
    """The releases of a month, given as ``2022-01``; a day behind it says no more."""
    year, month = (int(part) for part in text.split("-")[:2])
    latest = known_until()
    if not (1 <= month <= 12 and _FIRST_MONTH <= (year, month) <= (latest[0] + 1, latest[1])):
        raise ConfigError(
            f"--software {text!r}: memest knows which releases there were from {_FIRST_MONTH[0]} "
            f"to {latest[0]}-{latest[1]:02d}; write the year and the month as in 2022-01, or name "
            "releases: torch=1.10,transformers=4.18"
        )
    return releases_before((year, month))


def _release(item: str, cls: type[Software]) -> tuple[str, tuple[int, int]]:
    """A package and its release, of ``torch=1.10``."""
    *names, last = (each.name for each in dataclasses.fields(cls))
    name, _, version = item.partition("=")
    name = name.strip().lower()
    match = re.match(r"^=?(\d+)(?:\.(\d+))?", version.strip())
    if name == "trl":
        raise ConfigError(
            f"--software {item!r}: which TRL is said by --log-probs: fused for 1.15 and later, "
            "logits for 1.6 to 1.13; what earlier releases did is not priced"
        )
    if name not in (*names, last):
        raise ConfigError(
            f"--software {item!r}: {name!r} is not a package whose version changes the "
            f"answer; write {', '.join(names)} or {last}, as in "
            "torch=1.10,transformers=4.18, or the month that the software is of, as in 2022-01"
        )
    if match is None:
        raise ConfigError(
            f"--software {item!r}: {version!r} is no version; write for example {name}=2.6"
        )
    return name, (int(match.group(1)), int(match.group(2) or 0))


def torch_release_year(version: str) -> int | None:
    """The year a release of PyTorch came out in, None where it is not known.

    Example:
        >>> torch_release_year("1.10")
        2021
        >>> torch_release_year("2.6.0+cu124")
        2025
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    month = dates_of("torch").get((int(match[1]), int(match[2]))) if match else None
    return None if month is None else month[0]
