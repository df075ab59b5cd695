"""Software of another time as an input: the versions that will train."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

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
        """Read ``torch=1.10,transformers=4.18``.

        Raises:
            ConfigError: for an unknown package or a version that is no number.
        """
        values: dict[str, tuple[int, int]] = {}
        *names, last = (each.name for each in dataclasses.fields(cls))
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, version = item.partition("=")
            name = name.strip().lower()
            match = re.match(r"^=?(\d+)(?:\.(\d+))?", version.strip())
            if name not in (*names, last):
                raise ConfigError(
                    f"--software {item!r}: {name!r} is not a package whose version changes the "
                    f"answer; write {', '.join(names)} or {last}, as in "
                    "torch=1.10,transformers=4.18"
                )
            if match is None:
                raise ConfigError(
                    f"--software {item!r}: {version!r} is no version; write for example {name}=2.6"
                )
            values[name] = (int(match.group(1)), int(match.group(2) or 0))
        torch = values.get("torch", _NEWEST)
        if torch[0] > _NEWEST[0] or _LAST_OF_1 < torch < (2, 0):
            raise ConfigError(
                f"--software {text!r}: PyTorch has no release {torch[0]}.{torch[1]}; the newest "
                f"that memest knows is {_NEWEST[0]}.{_NEWEST[1]}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, str]:
        """The declared versions as text, for JSON."""
        pairs = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: ".".join(map(str, v)) for name, v in pairs.items() if v is not None}


_FIRST_OF_YEAR = {
    (1, 0): 2018,
    (1, 1): 2019,
    (1, 4): 2020,
    (1, 8): 2021,
    (1, 11): 2022,
    (2, 0): 2023,
    (2, 2): 2024,
    (2, 6): 2025,
    (2, 10): 2026,
}
"""The first of PyTorch's releases of each year, by its list of releases."""
_LAST_OF_1, _NEWEST = (1, 13), (2, 13)


def torch_release_year(version: str) -> int | None:
    """The year a release of PyTorch came out in, None where it is not known.

    Example:
        >>> torch_release_year("1.10")
        2021
        >>> torch_release_year("2.6.0+cu124")
        2025
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release > _NEWEST or (2, 0) > release > _LAST_OF_1:
        return None
    return max((year for first, year in _FIRST_OF_YEAR.items() if first <= release), default=None)
