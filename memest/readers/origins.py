"""Where each value of a setup comes from: it was named, the model has it, a release, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memest.config.option_table import OPTIONS
from memest.config.release_defaults import RELEASE_DEFAULTS, ReleaseDefault, release_default
from memest.config.setup import Setup
from memest.readers.values import plain
from memest.report.result import Origin

if TYPE_CHECKING:
    from memest.readers.run_config import RunConfig

__all__ = ["origins_of"]

_PARTS_BY_RELEASE: Mapping[str, Callable[[Setup], bool]] = {
    "autocast_adapter_dtype": lambda setup: setup.adapter is not None,
    "prepare_kbit": lambda setup: setup.prepares_base,
}
"""Options that are no fields of a setup and follow the release, and whether a setup has them."""


def _release_row(name: str, setup: Setup, family: str) -> ReleaseDefault | None:
    """What an option that was left open is by the declared software, and where that was read.

    None for an option that is the same in every release, and where none was declared.
    """
    rows = [row for row in RELEASE_DEFAULTS if row.option == name]
    libraries = {library for row in rows for library in row.since}
    if not libraries & set(setup.software.to_dict()):
        return None
    is_field = name not in _PARTS_BY_RELEASE
    if is_field and getattr(setup, name) not in (None, "auto"):
        return None
    among = {"use_reentrant": setup.who_recomputes, "attn_implementation": family}
    return release_default(name, setup.software, among.get(name, ""))


def _release_text(row: ReleaseDefault) -> str:
    return f"{row.value}, default of the software: {row.source}"


def origins_of(run: RunConfig, resolved_setup: Setup, family: str) -> tuple[Origin, ...]:
    """One row for each option that was named, then those that nobody named.

    Args:
        run: the configuration that was estimated.
        resolved_setup: the setup of the answer, with what the model decides filled in.
        family: ``model_type`` of the model.
    """
    rows = list(run.named_origins)
    named_options = {each.option for each in run.values}
    parts = {option.name: option.field for option in OPTIONS if option.field}
    touched_fields = {parts[name] for name in named_options if name in parts}
    before, after, usual = run.setup.to_dict(), resolved_setup.to_dict(), Setup().to_dict()
    for name, value in after.items():
        if name in named_options:
            continue
        if name in touched_fields and name in (
            "adapter",
            "quantization",
            "eval_batch",
            "precision",
        ):
            continue
        release = _release_row(name, run.setup, family)
        if release is not None:
            origin = _release_text(release)
        elif value == usual.get(name):
            origin = "default"
        elif value != before[name]:
            origin = "model config"
        else:
            # made of other options: offloading of the DeepSpeed document, a switch's field
            origin = next(
                (each.origin for each in run.values if parts.get(each.option) == name),
                "the options above",
            )
        rows.append(Origin(name, plain(value), origin))
    for name, has in _PARTS_BY_RELEASE.items():
        release = _release_row(name, run.setup, family)
        if release is not None and name not in named_options and has(run.setup):
            rows.append(Origin(name, release.value, _release_text(release)))
    return tuple(rows)
