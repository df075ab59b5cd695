"""Runs with a ``generate`` behind them: a phase of its own, in the same allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.hidden.call import GpuTraits
from memest.setup import Setup
from memest.tracing import Found, Tracer

__all__ = ["generated", "generation_notes"]


def generated(tracer: Tracer, found: Found, gpu: GpuTraits) -> Found:
    """The answer with the generation that its setup names; the answer itself where there is none.

    Raises:
        ConfigError: the model cannot generate, or not spread over GPUs like this.
        TraceError: something that a trace cannot follow.
    """
    setup = found.setup
    if setup.generation is None:
        return found
    _check_spread(setup)
    batch = setup.eval_batch or setup.batch
    own = replace(setup, batch=batch, padded=False, batching=None, padding_free=False)
    return replace(found, generation=tracer.generation(own, gpu))


def _check_spread(setup: Setup) -> None:
    """Where several GPUs generate otherwise than with the hooks of their modules.

    Raises:
        ConfigError: such a setup.
    """
    spread = setup.distributed
    if spread.pp > 1:
        raise ConfigError(
            f"--generate and --pp {spread.pp} exclude each other: generate calls a whole model, of "
            "which a GPU has stages here, and torch's schedules run micro-batches of one shape "
            "without caches. Leave one of them out."
        )
    flags = {"--ep": spread.ep, "--cp": spread.cp, "--sp": spread.sp}
    flag = next((flag for flag, ways in flags.items() if ways > 1), "")
    if spread.tp > 1 and spread.strategy is Strategy.FSDP and not flag:
        flag = f"--fsdp {spread.fsdp} and --tp"
    if flag:
        raise ConfigError(
            f"--generate is not priced together with {flag} yet, and memest does not guess: leave "
            "one of them out."
        )
    if spread.strategy is Strategy.FSDP and spread.fsdp_version == 1:
        raise ConfigError(
            "--generate is not priced together with --fsdp-version 1: the Trainer gathers the "
            "whole model there (summon_full_params) before it generates. Use --fsdp-version 2."
        )


def generation_notes(setup: Setup) -> Iterator[str]:
    """What there is to know of the generation."""
    asked = setup.generation
    if asked is None:
        return
    batch = setup.eval_batch or setup.batch
    yield (
        f"generation: {batch} prompts of {setup.seq_len} tokens (dense: padding changes the mask "
        f"alone), {asked.words}, until the end: sequences that finish early are carried along."
    )
    if asked.cache == "dynamic":
        yield (
            "generation: a dynamic cache is concatenated anew at every step, layer by layer, into "
            "blocks that grow, so the allocator keeps smaller ones that nothing fits; "
            "--cache-implementation static allocates once."
        )
