"""Generating text as an input: how many tokens, with which search and cache. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memest.config.option import option
from memest.errors import ConfigError, closest

__all__ = ["CACHES", "Generation"]

CACHES = ("dynamic", "static")
_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A ``generate`` that follows the last optimizer step.

    Attributes:
        new_tokens: tokens that are generated for each sample.
        cache: ``dynamic`` concatenates at every step, ``static`` allocates its full length once.

    Raises:
        ConfigError: values that no ``generate`` takes.
    """

    new_tokens: int = 20
    num_beams: int = option(1, "Beams of the search.", flags="--num-beams --generation-num-beams")
    cache: str = option(
        "dynamic",
        "Key/value cache of the generation: dynamic or static.",
        name="cache_implementation",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        for name, flag in (("new_tokens", "--generate"), ("num_beams", "--num-beams")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{flag} {value!r} is not a whole number.")
            if not 1 <= value <= _MOST:
                raise ConfigError(f"{flag} {value} is out of range: it must be 1 to {_MOST:,}.")
        if self.cache not in CACHES:
            near = closest(str(self.cache), CACHES)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"--cache-implementation {self.cache!r} is not modelled.{hint} Legal: "
                f"{', '.join(CACHES)}."
            )

    @property
    def words(self) -> str:
        """In a short phrase."""
        beams = "" if self.num_beams == 1 else f", {self.num_beams} beams"
        return f"{self.new_tokens:,} tokens generated{beams}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)
