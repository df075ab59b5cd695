"""Which code allocates, by the Python and C++ frames that a recording of torch keeps."""

from __future__ import annotations

import enum
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Role", "line_of", "role_of", "site_of", "sites_of"]

Frames = Iterable[Mapping[str, Any]]
"""Frames of one allocation, innermost first, as a snapshot has them."""

# torch/optim and the like say what allocates; the rest of torch is the way there
_INTERNAL = re.compile(
    r"/(?:site|dist)-packages/torch/"
    r"(?!(?:optim|amp|nn/utils)/|utils/checkpoint\.py|distributed/fsdp/)"
    r"|/torch/optim/(?:optimizer|lr_scheduler)\.py$"
    r"|/lib/python3[^/]*/(?!(?:site|dist)-packages/)"
    r"|<"
)
# the innermost operators only make the storage
_OPERATOR = re.compile(r"\bat::_ops::(?!(?:new_)?empty|resize_|set_)(\w+)::")
_NODE = re.compile(r"\btorch::autograd::(?:generated::)?(\w+)::apply")
_DEPTH = 2

_PACKAGES = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|<")
_OPTIMIZER = re.compile(r"/optim/|/optimizers?(?:/[^/]*|_[^/]*)?\.py$")
_MODULES = re.compile(r"/torch/nn/modules/module\.py$")
_BACKWARD = re.compile(r"/torch/(?:_tensor|autograd/(?:__init__|graph))\.py$")
_EVALUATION = re.compile(r"^(?:\w*evaluat\w*|\w*validat\w*|eval_\w+|\w+_eval|prediction_step)$")


class Role(enum.StrEnum):
    """What part of a training step an allocation is made in, as its frames tell."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    COPY = "copy"
    OTHER = "other"


def site_of(frames: Frames) -> str:
    """What allocates: ``modeling_bert.py:123 forward < modeling_bert.py:201 forward [addmm]``.

    The innermost Python code outside torch's internals and its caller; the operator where C++
    frames were recorded too.

    Args:
        frames: innermost first, as a snapshot has them.

    Returns:
        Empty where there is no such frame, as in a backward without C++ frames.
    """
    python: list[str] = []
    operator = ""
    for frame in frames:
        filename, name = str(frame["filename"]), str(frame["name"])
        if filename.endswith(".py"):
            if len(python) < _DEPTH and not _INTERNAL.search(filename.replace("\\", "/")):
                python.append(_short(frame))
        elif not (operator or python):
            match = _OPERATOR.search(name) or _NODE.search(name)
            operator = match[1] if match else ""
    call_path = " < ".join(python)
    if not operator:
        return call_path
    return f"{call_path} [{operator}]" if call_path else f"[{operator}]"


def line_of(frames: Frames) -> str:
    """The innermost line of the user's own code on the way to an allocation: ``train.py:57 train``.

    Returns:
        Empty where every frame is of an installed package.
    """
    for frame in frames:
        filename = str(frame["filename"]).replace("\\", "/")
        if filename.endswith(".py") and not _PACKAGES.search(filename):
            return _short(frame)
    return ""


def role_of(frames: Frames) -> Role:
    """The part of a step that an allocation is made in.

    The autograd engine runs backward in threads of its own, which have no Python frames: an
    allocation with C++ frames alone is of a backward where they name autograd's nodes.
    """
    is_module = is_backward = False
    for frame in frames:
        filename, name = str(frame["filename"]).replace("\\", "/"), str(frame["name"])
        if not filename.endswith(".py"):
            is_backward = is_backward or "torch::autograd::Engine" in name
        elif _OPTIMIZER.search(filename):
            return Role.OPTIMIZER
        elif _EVALUATION.search(name):
            return Role.EVALUATION
        elif name == "deepcopy" or name.endswith("state_dict"):
            return Role.COPY
        elif name.endswith("_call_impl") and _MODULES.search(filename):
            is_module = True
        elif _BACKWARD.search(filename) and name in ("backward", "grad"):
            is_backward = True
    if is_backward:
        return Role.BACKWARD
    return Role.FORWARD if is_module else Role.OTHER


def sites_of(trace: Sequence[Mapping[str, Any]]) -> tuple[array[int], tuple[str, ...]]:
    """For each entry of a device's trace the index of its site, -1 for none, and the sites."""
    table: dict[str, int] = {}
    sites_by_frames: dict[tuple[tuple[str, int, str], ...], str] = {}
    sites = array("l", [-1]) * len(trace)
    for index, entry in enumerate(trace):
        frames = entry.get("frames")
        if not frames or entry["action"] not in ("alloc", "oom"):
            continue
        key = tuple((f["filename"], f["line"], f["name"]) for f in frames)
        site = sites_by_frames.get(key)
        if site is None:
            site = sites_by_frames[key] = sys.intern(site_of(frames))
        if site:
            sites[index] = table.setdefault(site, len(table))
    return sites, tuple(table)


def _short(frame: Mapping[str, Any]) -> str:
    short = re.split(r"[/\\]", str(frame["filename"]))[-1]
    return f"{short}:{frame['line']} {frame['name']}"
