"""Generating text as an input: how many tokens, with which search and cache. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memest.config.kinds import Strategy, check_whole_number
from memest.config.option import option
from memest.config.parallelism import Distributed
from memest.errors import ConfigError, not_legal

__all__ = ["CACHES", "Generation", "check_generation"]

CACHES = ("dynamic", "static")
_MAX_VALUE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A ``generate`` that follows the last optimizer step.

    Attributes:
        new_tokens: tokens that are generated for each sample.
        cache: ``dynamic`` concatenates at every step, ``static`` allocates its full length once.
        draws: tokens are drawn from all of the vocabulary, as trainers do that learn from them.

    Raises:
        ConfigError: values that no ``generate`` takes.
    """

    new_tokens: int = 20
    num_beams: int = option(1, "Beams of the search.", "--num-beams --generation-num-beams")
    cache: str = option(
        "dynamic",
        "Key/value cache of the generation: dynamic or static.",
        "NAME",
        name="cache_implementation",
    )
    draws: bool = False

    def __post_init__(self) -> None:
        for name, flag in (("new_tokens", "--generate"), ("num_beams", "--num-beams")):
            check_whole_number(flag, getattr(self, name), 1, _MAX_VALUE)
        if self.cache not in CACHES:
            label = f"--cache-implementation {self.cache!r}"
            raise not_legal(label, self.cache, CACHES, state="is not modelled")

    @property
    def words(self) -> str:
        """In a short phrase."""
        beams = "" if self.num_beams == 1 else f", {self.num_beams} beams"
        return f"{self.new_tokens:,} tokens generated{beams}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        if not self.draws:
            del values["draws"]
        return values


def check_generation(distributed: Distributed) -> None:
    """Where several GPUs generate otherwise than with the hooks of their modules.

    Raises:
        ConfigError: such GPUs.
    """
    if distributed.pp > 1:
        raise ConfigError(
            f"--generate and --pp {distributed.pp} exclude each other: generate calls a whole "
            "model, of which a GPU has stages here, and torch's schedules run micro-batches of one "
            "shape without caches. Leave one of them out."
        )
    flags = {"--ep": distributed.ep, "--cp": distributed.cp, "--sp": distributed.sp}
    flag = next((flag for flag, degree in flags.items() if degree > 1), "")
    if distributed.tp > 1 and distributed.strategy is Strategy.FSDP and not flag:
        flag = f"--fsdp {distributed.fsdp} and --tp"
    if flag:
        raise ConfigError(
            f"--generate is not priced together with {flag} yet, and memest does not guess: leave "
            "one of them out."
        )
    if distributed.flattens:
        raise ConfigError(
            "--generate is not priced together with --fsdp-version 1: the Trainer gathers the "
            "whole model there (summon_full_params) before it generates. Use --fsdp-version 2."
        )
