"""What cuDNN asked for, layer by layer, against what is expected of it."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from memest.units import MIB
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec
from memest.workspaces.registry import workspaces_of
from support.paths import ROOT

FILE = ROOT / "data" / "measurements" / "convolutions-h100-cudnn-9.19.jsonl.gz"
H100 = GpuTraits((9, 0), 132, 2048, torch=(2, 11))


def rows():
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file][1:]


def spec(shape, dtype, channels_last) -> TensorSpec:
    _, channels, height, width = shape
    row = (channels * height * width, height * width, width, 1)
    last = (channels * height * width, 1, channels * width, channels)
    return TensorSpec(tuple(shape), last if channels_last else row, dtype)


def expected(row, which) -> int:
    lay = row["dtype"], row["last"]
    image = spec((row["batch"], *row["in"]), *lay)
    weight = spec(row["w"], *lay)
    sizes = [
        (extent + 2 * pad - step * (kernel - 1) - 1) // stride + 1
        for extent, pad, step, kernel, stride in zip(
            row["in"][1:], row["pad"], row["dil"], row["w"][2:], row["stride"], strict=True
        )
    ]
    out = spec((row["batch"], row["w"][0], *sizes), *lay)
    how = (*(tuple(row[key]) for key in ("stride", "pad", "dil")), False, (0, 0), row["groups"])
    if which == "forward":
        call = OpCall("aten.convolution.default", (image, weight, None, *how), (), (out,), "main")
    else:
        mask = (which == "input", which == "weight", False)
        results = (image if mask[0] else None, weight if mask[1] else None, None)
        args = (out, image, weight, None, *how, mask)
        call = OpCall("aten.convolution_backward.default", args, (), results, "autograd")
    return sum(workspace.nbytes for workspace in workspaces_of(call, H100))


def taken(events) -> int:
    """Bytes that were freed before the operator returned."""
    freed = Counter(size for action, size in events if action == "f")
    return sum(size * count for size, count in freed.items())


@pytest.mark.parametrize(
    ("which", "right", "share"), [("forward", 0.9, 0.1), ("input", 0.85, 0.1), ("weight", 0.8, 0.1)]
)
def test_channels_first_is_expected_as_measured(which, right, share):
    """Most layers within 10 % or 1 MiB, and no bias: sums within a tenth of each other."""
    pairs = [(expected(row, which), taken(row[which])) for row in rows() if not row["last"]]

    assert len(pairs) > 1000
    near = sum(abs(ours - theirs) <= max(0.1 * theirs, MIB) for ours, theirs in pairs)
    assert near >= right * len(pairs)
    total = sum(theirs for _, theirs in pairs)
    assert abs(sum(ours for ours, _ in pairs) - total) <= share * total


@pytest.mark.parametrize("which", ["forward", "input"])
def test_channels_last_takes_next_to_nothing(which):
    pairs = [(expected(row, which), taken(row[which])) for row in rows() if row["last"]]

    assert sum(ours == 0 for ours, _ in pairs) == len(pairs)
    assert sum(theirs <= MIB for _, theirs in pairs) >= 0.85 * len(pairs)
