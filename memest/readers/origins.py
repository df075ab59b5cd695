"""Every resolved value of an answer with where it comes from."""

from __future__ import annotations

from typing import Any

from memest.option_table import OPTIONS
from memest.readers.run_config import RunConfig
from memest.result import Origin
from memest.setup import Setup

__all__ = ["origins_of"]

_MODEL_CONFIG = "model config"


def origins_of(run: RunConfig, resolved: Setup) -> tuple[Origin, ...]:
    """One row for each option that was named, then those that nobody named.

    Args:
        run: what was asked for.
        resolved: the setup of the answer, with what the model decides filled in.
    """
    rows = [Origin(said.option, _plain(said.value), said.origin) for said in run.values]
    named = {said.option for said in run.values}
    parts = {option.name: option.field for option in OPTIONS if option.field}
    touched = {parts[name] for name in named if name in parts}
    asked, filled, plain = run.setup.to_dict(), resolved.to_dict(), Setup().to_dict()
    for name, value in filled.items():
        if name in named:
            continue
        if name in touched and name in ("adapter", "quantization", "eval_batch", "precision"):
            continue
        if value == plain[name]:
            origin = "default"
        elif value != asked[name]:
            origin = _MODEL_CONFIG
        else:
            # made of other options: offloading of the DeepSpeed document, a switch's field
            origin = next(
                (said.origin for said in run.values if parts.get(said.option) == name),
                "the options above",
            )
        rows.append(Origin(name, _plain(value), origin))
    return tuple(rows)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, (bool, int, float, str, list, dict)) or value is None:
        return value
    return str(value)
