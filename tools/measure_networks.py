"""What whole convolutional networks take in training, with and without cuDNN's search.

    python tools/measure_networks.py networks.jsonl --events FOLDER --seconds 150

Networks of timm, SGD with momentum under fp16 autocast, three steps each, in both memory formats,
with ``torch.backends.cudnn.benchmark`` on and off: what the allocator counted after each step. The
folder gets the allocator's own history of each run. Needs CUDA and timm; ``data/measurements/``
keeps what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import uuid
from itertools import product
from pathlib import Path
from typing import Any

import torch

NETWORKS = (
    "resnet50 efficientnet_b0 convnext_tiny densenet121 mobilenetv3_large_100 regnety_016 vgg16 "
    "resnext50_32x4d inception_v4 hrnet_w18 darknet53 tf_efficientnetv2_s rexnet_100 dla60 "
    "seresnet50 mixnet_s ghostnet_100 nfnet_l0 resnest50d xception41 cspresnet50 dpn68 "
    "mnasnet_100 legacy_seresnext26_32x4d res2net50_26w_4s selecsls42b "
    "swin_tiny_patch4_window7_224 deit_small_patch16_224 mixer_b16_224 poolformer_s12"
).split()
BATCH, STEPS = 64, 3


def main() -> None:
    """Measure until the time is spent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=Path, required=True, help="folder for histories")
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args()
    options.events.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    jobs = list(product(NETWORKS, (True, False), (False, True)))
    random.Random(0).shuffle(jobs)  # noqa: S311 - a draw that can be made again
    with options.out.open("w", encoding="utf-8") as file:
        for name, searches, last in jobs:
            if time.monotonic() > end:
                break
            try:
                row = measure(name, searches, last, options.events)
            except Exception as error:  # noqa: BLE001 - what fails is a line too
                row = {"model": name, "failure": f"{type(error).__name__}: {error}"[:500]}
            file.write(json.dumps(row) + "\n")
            file.flush()


def measure(name: str, searches: bool, last: bool, events: Path) -> dict[str, Any]:
    """Three steps of one network."""
    import timm

    from memest.calibration.recording.history import (
        mark_counters,
        start_history,
        take_history,
        write_history,
    )

    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cudnn.benchmark = searches
    about = {
        "model": f"timm/{name}",
        "batch": BATCH,
        "precision": "fp16",
        "optim": "sgd_momentum",
        "benchmark": searches,
        "channels_last": last,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "timm": timm.__version__,
        "gpu": torch.cuda.get_device_name(),
        "before_bytes": torch.cuda.memory_reserved(),
    }
    torch.manual_seed(0)
    network = timm.create_model(name).train()
    start_history(1_000_000)
    marks: list[Any] = [("load", 0, 0, mark_counters())]
    network = network.cuda()
    form = torch.channels_last if last else torch.contiguous_format
    network = network.to(memory_format=form)
    size = network.default_cfg["input_size"]
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler()
    loss_of = torch.nn.CrossEntropyLoss()
    steps = []
    for step in range(1, STEPS + 1):
        marks.append(("forward", step, 1, mark_counters()))
        images = torch.randn(BATCH, *size, device="cuda").contiguous(memory_format=form)
        labels = torch.zeros(BATCH, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(network(images), labels)
        marks.append(("backward", step, 1, mark_counters()))
        scaler.scale(loss).backward()
        marks.append(("optimizer", step, 1, mark_counters()))
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        steps.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    history = uuid.uuid4().hex
    write_history(
        events / f"{history}.jsonl.gz", take_history(0, marks, run=about["model"], case=about)
    )
    return {**about, "size": size, "steps": steps, "retries": retries, "history": history}


if __name__ == "__main__":
    main()
