"""What an assistant needs of a command's document: the answer, without what takes most of its room.

A document of ``memest estimate --json`` has 45 kB for a model of 24 layers, its brief form has
2. Names and values stay those of the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memest.config.setup import Setup

__all__ = ["brief"]

_LONG = frozenset(
    """layers timeline ranges context_bytes calibration origins basis source curve unsteady steps
    shares buffers parameter_bytes managed_bytes device_with_managed_bytes""".split()
)
"""What is left out wherever it stands: details of where, of how sure, and of why."""
_ALWAYS = frozenset("batch seq_len precision optim num_gpus".split())
"""Of a setup, besides what is no default."""
_MOST_PARTS = 5
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def brief(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document without its details, and with a word on how to get them.

    Args:
        document: as ``--json`` has it.
    """
    left_out: dict[str, None] = {}
    short = _shorter(document, left_out)
    if left_out:
        short["left_out"] = f"{', '.join(left_out)}: ask again with detail full"
    return short


def _shorter(document: Mapping[str, Any], left_out: dict[str, None]) -> dict[str, Any]:
    short: dict[str, Any] = {}
    # of each GPU limits say the same, and more
    doubled = ("gpu", "common_gpus", "gpus") if "limits" in document else ()
    for name, value in document.items():
        if value in _NOTHING or name in doubled:
            continue
        if name in _LONG:
            left_out[name] = None
        elif name == "setup":
            short[name] = _chosen(value)
        elif name == "breakdown":
            short[name] = _largest(value)
        elif isinstance(value, Mapping):
            short[name] = _shorter(value, left_out)
        elif isinstance(value, list):
            short[name] = [
                _shorter(each, left_out) if isinstance(each, Mapping) else each for each in value
            ]
        else:
            short[name] = value
    return short


def _chosen(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What of a setup is no default."""
    usual = Setup().to_dict()
    return {
        name: value
        for name, value in setup.items()
        if value is not None and (name in _ALWAYS or value != usual.get(name))
    }


def _largest(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The largest categories, and the rest in one row: they add up to the allocated peak."""
    ordered = sorted(rows, key=lambda row: -row["bytes"])
    largest = [dict(row) for row in ordered[:_MOST_PARTS]]
    rest = sum(row["bytes"] for row in ordered[_MOST_PARTS:])
    return [*largest, {"category": "the rest", "bytes": rest}] if rest else largest
