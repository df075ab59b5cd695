"""The options of data loading on the host, and the value of a setup that they make."""

from __future__ import annotations

import dataclasses
from typing import Any

from memest.data_loading import DataLoading
from memest.option import Kind, Option, Panel

__all__ = ["DATA_LOADING", "merge_data_loading"]

_PREFIX = "dataloader_"


def _part(name: str, help_text: str, kind: Kind, *, off: bool = False, **more: Any) -> Option:
    flag = f"--dataloader-{name.replace('_', '-')}"
    flags = (flag, flag.replace("--", "--no-", 1)) if off else (flag,)
    return Option(
        name=_PREFIX + name, flags=flags, help=help_text, panel=Panel.BATCH, kind=kind,
        field="data_loading", **more,
    )  # fmt: skip


DATA_LOADING: tuple[Option, ...] = (
    _part(
        "num_workers",
        "Processes that load batches: the host memory of batches that wait is said. Default: 0.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "prefetch_factor",
        "Batches that each worker has on the way. Default: 2, torch's own.",
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "pin_memory",
        "Whether batches are copied to page-locked memory; left out, they are.",
        Kind.EITHER,
        off=True,
    ),
    _part(
        "persistent_workers",
        "Workers stay from epoch to epoch; changes no size of batches.",
        Kind.SWITCH,
    ),
)


def merge_data_loading(given: dict[str, Any], old: DataLoading | None) -> None:
    """Replace the options of data loading by the value they stand for, ``given["data_loading"]``.

    Args:
        given: options by name; those of data loading are taken out.
        old: the value that they change.

    Raises:
        ConfigError: wrong values.
    """
    names = [option.name for option in DATA_LOADING]
    parts = {name.removeprefix(_PREFIX): given.pop(name) for name in names if name in given}
    if parts:
        given["data_loading"] = dataclasses.replace(old or DataLoading(), **parts)
