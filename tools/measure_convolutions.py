"""What cuDNN takes of the caching allocator for convolutions, read on a GPU.

    python tools/measure_convolutions.py convolutions.jsonl --seconds 75

Every distinct convolution of the networks below, in three batches, three dtypes and both memory
formats, drawn at random until the time is spent: the allocations and frees of its forward pass and
of the gradients of its input and of its weight. Needs CUDA and timm. The first line says where it
ran; ``data/measurements/`` keeps what was measured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

NETWORKS = (
    "resnet50 vgg16 densenet121 efficientnet_b0 mobilenetv3_large_100 convnext_tiny regnety_040 "
    "resnext50_32x4d inception_v3 resnet18 repvgg_a2 dla34 hrnet_w18 darknet53 "
    "tf_efficientnetv2_s vit_base_patch16_224"
).split()
BATCHES = (8, 32, 128)
LAYS = (
    ("float32", False),
    ("float16", False),
    ("float16", True),
    ("bfloat16", False),
    ("float32", True),
)
"""Dtype, and whether the channels lie last."""


def main() -> None:
    """Measure, and write a line for each convolution."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0)
    options = parser.parse_args()
    jobs = list(product(layers().items(), BATCHES, LAYS))
    random.Random(0).shuffle(jobs)  # noqa: S311 - a draw that can be made again
    end = time.monotonic() + options.seconds
    with options.out.open("w", encoding="utf-8") as file:
        file.write(json.dumps(environment() | {"jobs": len(jobs)}) + "\n")
        for (layer, network), batch, (dtype, last) in jobs:
            if time.monotonic() > end:
                break
            about = {"model": network, "batch": batch, **dict(layer), "dtype": dtype, "last": last}
            file.write(json.dumps(about | measure(dict(layer), batch, dtype, last)) + "\n")


def environment() -> dict[str, Any]:
    """Where this runs."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "capability": [gpu.major, gpu.minor],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "benchmark": torch.backends.cudnn.benchmark,
        "allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def layers() -> dict[tuple[tuple[str, Any], ...], str]:
    """Distinct convolutions, and the first network that has each."""
    import timm

    found: dict[tuple[tuple[str, Any], ...], str] = {}
    for name in NETWORKS:
        network = timm.create_model(name).cuda().eval()
        seen: list[tuple[tuple[str, Any], ...]] = []

        def note(layer: Any, inputs: Any, _: Any, seen: list[Any] = seen) -> None:
            if not isinstance(layer.padding, str):
                seen.append(
                    (
                        ("in", tuple(inputs[0].shape[1:])),
                        ("w", tuple(layer.weight.shape)),
                        ("stride", tuple(layer.stride)),
                        ("pad", tuple(layer.padding)),
                        ("dil", tuple(layer.dilation)),
                        ("groups", layer.groups),
                    )
                )

        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(note)
        with torch.no_grad():
            network(torch.zeros(1, *network.default_cfg["input_size"], device="cuda"))
        for layer in seen:
            found.setdefault(layer, name)
    return found


def measure(layer: dict[str, Any], batch: int, dtype: str, last: bool) -> dict[str, Any]:
    """Events of the three passes; what failed says why."""
    aten = torch.ops.aten
    form = torch.channels_last if last else torch.contiguous_format
    like = {"device": "cuda", "dtype": getattr(torch, dtype)}
    how = (layer["stride"], layer["pad"], layer["dil"], False, (0, 0), layer["groups"])
    out: dict[str, Any] = {}
    try:
        image = torch.ones(batch, *layer["in"], **like).contiguous(memory_format=form)
        weight = torch.ones(layer["w"], **like).contiguous(memory_format=form)
        result, out["forward"] = recorded(lambda: aten.convolution(image, weight, None, *how))
        gradient = torch.ones_like(result)
        for name, mask in (("input", [True, False, False]), ("weight", [False, True, False])):
            _, out[name] = recorded(
                lambda mask=mask: aten.convolution_backward(
                    gradient, image, weight, None, *how, mask
                )
            )
    except RuntimeError as error:
        out["error"] = f"{type(error).__name__}: {error}"[:200]
    return out


def recorded(run: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    """What a call returns, and the allocations (a) and frees (f) that it made."""
    memory = torch.cuda.memory
    torch.cuda.synchronize()
    memory._record_memory_history("all", context=None, max_entries=200, clear_history=True)
    result = run()
    torch.cuda.synchronize()
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(None)
    return result, list(_events(trace))


def _events(trace: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    for event in trace:
        if event["action"] in ("alloc", "free_requested"):
            yield event["action"][0], event["size"]


if __name__ == "__main__":
    main()
