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
_UNSAID = {
    "draws": False,
    "caches": True,
    "in_step": False,
    "beside_gradients": False,
    "max_length": None,
}
"""What is not said where it is so: nobody learns from what is written, and its length is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A ``generate`` that follows the last optimizer step.

    Attributes:
        new_tokens: tokens that are generated for each sample.
        max_length: greatest length of what is generated, the prompt of a decoder counted, in place
            of ``new_tokens``; None where those are known.
        cache: ``dynamic`` concatenates at every step, ``static`` allocates its full length once.
        draws: tokens are drawn from all of the vocabulary, as trainers do that learn from them.
        caches: keys and values are kept; else every token is a forward of all before it.
        in_step: the model writes in its training step, in training mode and at another temperature
            than 1, as TRL's OnlineDPOTrainer has it.
        beside_gradients: those of earlier micro-steps are there meanwhile.

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
    max_length: int | None = None
    caches: bool = True
    in_step: bool = False
    beside_gradients: bool = False

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
        alone = (
            "" if self.caches else ", each by a forward of all before it (checkpointing: no cache)"
        )
        return f"{self.new_tokens:,} tokens generated{beams}{alone}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        for name, usual in _UNSAID.items():
            if values[name] == usual:
                del values[name]
        return values

    def behind(self, prompt: int, limit: int | None) -> Generation:
        """The generation behind a prompt, with the tokens that there is room for.

        Sources: ``_validate_generated_length`` of transformers 5.23; the last token is not read.

        Args:
            prompt: tokens that the decoder begins with.
            limit: positions that it has; None for any number.

        Raises:
            ConfigError: ``generate`` would stop there, or read positions that are not there.
        """
        out = self
        if self.max_length is not None:
            if prompt >= self.max_length:
                raise ConfigError(
                    f"--generation-max-length {self.max_length} leaves nothing to generate: what "
                    f"the decoder begins with counts, {prompt:,} of them, and transformers stops. "
                    f"Write --generation-max-length {prompt + 128}, or --generate 128, which "
                    "counts new tokens alone."
                )
            out = dataclasses.replace(self, new_tokens=self.max_length - prompt, max_length=None)
        if limit is not None and prompt + out.new_tokens - 1 > limit:
            room = limit + 1 - prompt
            remedy = f"--generate {room} or less" if room > 1 else "a shorter --seq-len"
            raise ConfigError(
                f"{out.new_tokens:,} tokens generated behind {prompt:,} are more than the {limit} "
                f"positions of this model. Use {remedy}."
            )
        return out


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
