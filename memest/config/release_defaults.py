"""What libraries took unasked, by release: for options that a question leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memest.config.software import Software

__all__ = ["RELEASE_DEFAULTS", "ReleaseDefault", "release_default"]


@dataclass(frozen=True, slots=True)
class ReleaseDefault:
    """What one option is where nobody names it, from a release on.

    Attributes:
        option: keyword of the option.
        value: what it is.
        source: where that was read, and in which releases.
        since: the first release of each library that has it, as (major, minor).
    """

    option: str
    value: str
    source: str
    since: Mapping[str, tuple[int, int]] = field(default_factory=dict)


RELEASE_DEFAULTS = (
    ReleaseDefault(
        "optim",
        "adamw_torch_fused",
        "TrainingArguments.optim of transformers 4.54.1 to 5.0.0, with torch 2.8 or later",
        {"transformers": (4, 54), "torch": (2, 8)},
    ),
    ReleaseDefault(
        "optim",
        "adamw_torch",
        "TrainingArguments.optim of transformers 4.32.1 to 4.53.3, and later before torch 2.8",
        {"transformers": (4, 32)},
    ),
    ReleaseDefault("optim", "adamw_hf", "TrainingArguments.optim of transformers 4.18.0 to 4.31.0"),
    ReleaseDefault(
        "dtype", "auto", "from_pretrained of transformers 5.0.0", {"transformers": (5, 0)}
    ),
    ReleaseDefault("dtype", "float32", "from_pretrained of transformers 4.18.0 to 4.57.1"),
    ReleaseDefault(
        "use_reentrant",
        "false",
        "gradient_checkpointing_enable of transformers 5.0.0",
        {"transformers": (5, 0)},
    ),
    ReleaseDefault(
        "use_reentrant",
        "true",
        "gradient_checkpointing_enable of transformers 4.18.0 to 4.57.1",
    ),
    ReleaseDefault(
        "use_cache", "false", "the Trainer of transformers 5.0.0", {"transformers": (5, 0)}
    ),
    ReleaseDefault(
        "use_cache", "auto", "the model's config, before transformers 5 under the Trainer too"
    ),
    ReleaseDefault("zero_grad", "none", "Optimizer.zero_grad of torch 2.0", {"torch": (2, 0)}),
    ReleaseDefault("zero_grad", "zero", "Optimizer.zero_grad of torch 1.13"),
)
"""The newest first: the first that a software has all releases for is the one that holds."""


def release_default(option: str, software: Software) -> ReleaseDefault:
    """What an option is under some software; what is not declared counts as the newest.

    Args:
        option: keyword of an option that the table has.
        software: declared versions.
    """
    return next(
        row
        for row in RELEASE_DEFAULTS
        if row.option == option
        and all(
            (getattr(software, library) or first) >= first for library, first in row.since.items()
        )
    )
