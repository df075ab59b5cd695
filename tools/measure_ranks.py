"""What one rank of several takes of a GPU, without the others: PyTorch's fake process group.

    python tools/measure_ranks.py OUT.jsonl --events FOLDER --budget 200
    python tools/measure_ranks.py OUT.jsonl --device cpu --tiny      # a rehearsal

The fake group gives a rank of any number of ranks what it would allocate, on the streams on which
it would, and moves no data: FSDP is PyTorch's own, and the allocator is CUDA's. A case
with ``link`` lets each gather and reduction take as long as its bytes take at that many GB/s, by a
kernel that waits. What NCCL itself takes is not there. Every case runs in a process of its own; the
folder gets the allocator's history. ``data/measurements/`` keeps what was measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(CHECKOUT / "tests")]

from measure_trainers import (  # noqa: E402
    be_a_checkout,
    begin_history,
    counted,
    run_cases,
    taken,
    used_bytes,
)

STEPS = 3
QWEN, LLAMA, LLAMA_8B = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
VIT, BERT = "google/vit-large-patch16-224", "bert-large-uncased"
FULL, ONE = {"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_version": 1}
POLICY = {**FULL, "bf16": True, "fsdp_mixed_precision": True}
AGAIN = {"checkpointing": "full"}


def case(name: str, model: str, ranks: int, *, link: int = 0, **options: Any) -> dict[str, Any]:
    """A case: options are those of the command line."""
    usual = {"batch": 2, "seq_len": 1024, "loop": "plain", "num_gpus": ranks, "num_steps": STEPS}
    if model == VIT:
        usual.pop("seq_len")
    return {"name": name, "model": model, "link": link, "options": {**usual, **options}}


CASES = (
    case("fsdp2-policy", LLAMA, 8, **POLICY, **AGAIN, batch=4, seq_len=2048),
    case("fsdp1-vit", VIT, 8, **ONE, bf16=True, **AGAIN, batch=64),
    case("fsdp1-vit-link", VIT, 8, link=20, **ONE, bf16=True, **AGAIN, batch=64),
    case("fsdp1-llama", LLAMA, 8, **ONE, bf16=True, **AGAIN, batch=4),
    case("fsdp1-llama-link", LLAMA, 8, link=20, **ONE, bf16=True, **AGAIN, batch=4),
    case("fsdp2-autocast", QWEN, 8, **FULL, bf16=True),
    case("fsdp2-ends-link", LLAMA, 64, link=50, **POLICY, **AGAIN, fsdp_wrap_ends=True, batch=4),
    case("fsdp2-kept", LLAMA, 8, fsdp="shard_grad_op", bf16=True, fsdp_mixed_precision=True),
    case("fsdp2-accumulated", QWEN, 8, **POLICY, grad_accum=4),
    case("fsdp2-lora", LLAMA, 4, **FULL, dtype="bfloat16", lora_r=16, **AGAIN),
    case("fsdp1-float32", QWEN, 4, **ONE, batch=1),
    case("fsdp1-kept-link", QWEN, 8, link=20, fsdp="shard_grad_op", fsdp_version=1, bf16=True),
    case("fsdp2-bfloat16", LLAMA, 2, **FULL, dtype="bfloat16", seq_len=4096, **AGAIN),
    case("fsdp2-8b", LLAMA_8B, 64, **POLICY, **AGAIN, fsdp_wrap_ends=True, batch=1, seq_len=4096),
    case("fsdp2-vit", VIT, 4, **FULL, bf16=True, batch=32),
    case("fsdp1-accumulated", LLAMA, 8, **ONE, bf16=True, grad_accum=2),
    case("fsdp2-long", QWEN, 8, **POLICY, **AGAIN, batch=1, seq_len=16384),
    case("accelerate-fsdp1", LLAMA, 8, **ONE, bf16=True, **AGAIN, batch=4, loop="accelerate"),
    case("accelerate-fsdp2", LLAMA, 8, **FULL, bf16=True, **AGAIN, batch=4, loop="accelerate"),
    case(
        "accelerate-fsdp1-bert",
        BERT,
        4,
        **ONE,
        bf16=True,
        batch=16,
        seq_len=512,
        grad_accum=2,
        loop="accelerate",
    ),
    case("accelerate-fsdp1-link", QWEN, 8, link=50, **ONE, bf16=True, batch=4, loop="accelerate"),
    case("fsdp1-8b", LLAMA_8B, 8, **ONE, bf16=True, **AGAIN, seq_len=4096),
    case("fsdp1-gpt2", "gpt2-large", 4, **ONE, bf16=True, batch=4),
)
"""Most telling first: what a budget cuts off is least missed."""


def main() -> None:
    """Measure all cases, or the one that standard input describes."""
    run_cases(CASES, measure, _tiny, __file__, __doc__)


def _tiny(described: dict[str, Any]) -> dict[str, Any]:
    options = {**described["options"], "batch": 1}
    if "seq_len" in options:
        options["seq_len"] = 8
    return {**described, "options": options}


def measure(asked: dict[str, Any], device: str, events: Path | None) -> dict[str, Any]:
    """Train three steps as rank 0, and say what was counted."""
    be_a_checkout()
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memest.calibration.recording.history import mark_counters
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import make_material
    from memest.config.options import setup_from_options

    on_gpu = device == "cuda"
    setup = setup_from_options(**asked["options"])
    ranks = setup.distributed.num_gpus
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    material = make_material(asked["model"], setup)
    if on_gpu:
        torch.zeros(1, device="cuda")
        if asked["link"]:
            _take_time(asked["link"])
    context = used_bytes() if on_gpu else 0
    marks: list[Any] = []
    steps: list[dict[str, int]] = []
    loaded: dict[str, int] = {}

    class Watch:
        """Marks phases; reads counters where the load and each step end."""

        def mark(self, phase: str, step: int, micro_step: int) -> None:
            if on_gpu:
                if not loaded:
                    loaded.update(counted())
                if events is not None:
                    marks.append((phase, step, micro_step, mark_counters()))

        def step_done(self, step: int) -> None:  # noqa: ARG002 - the watch's signature
            steps.append(counted() if on_gpu else {})

    if on_gpu and events is not None:
        begin_history(marks)
    if setup.loop.value == "accelerate":
        accelerated(material, setup, Watch(), device)
    else:
        model = wrapped(material.model, setup, device)
        train(
            model, setup, material.batches, material.optimizer_for, material.loss_of,
            torch.device(device), Watch(),
        )  # fmt: skip
    row = {**asked, "status": "ok", "loaded": loaded, "steps": steps, "torch": torch.__version__}
    return row | taken(asked, marks, context, events) if on_gpu else row


def wrapped(model: Any, setup: Any, device: str) -> Any:
    """The model as a rank's script has it, on the device."""
    from torch.distributed import init_device_mesh

    from support.ranks import apply_fsdp1, apply_fsdp2

    options = setup.distributed
    if options.fsdp_version == 1:
        return apply_fsdp1(model, setup, "cuda:0" if device == "cuda" else device)
    mesh = init_device_mesh(device, (options.num_gpus,), mesh_dim_names=("shard",))
    return apply_fsdp2(model, mesh, reshards=options.fsdp.value == "full_shard", options=options)


def accelerated(material: Any, setup: Any, watch: Any, device: str) -> None:
    """The loop of accelerate's documentation, its plugin with the defaults of its launcher."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "RANK": "0", "LOCAL_RANK": "0",
        "WORLD_SIZE": str(setup.distributed.num_gpus), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29513",
    }  # fmt: skip
    version = setup.distributed.fsdp_version
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        use_orig_params=False,
    )
    accelerator = Accelerator(
        cpu=device == "cpu",
        gradient_accumulation_steps=setup.grad_accum,
        mixed_precision=setup.precision.value,
        fsdp_plugin=plugin,
    )
    if version == 1:
        # it puts flat parameters in the place of those that an optimizer would have
        model = accelerator.prepare(material.model)
        optimizer = accelerator.prepare(material.optimizer_for(model))
    else:
        optimizer = material.optimizer_for(material.model)
        model, optimizer = accelerator.prepare(material.model, optimizer)
    step = micro = 1
    optimizer.zero_grad()
    for sample in material.batches:
        watch.mark("batch", step, micro)
        batch = {name: value.to(device) for name, value in sample.items()}
        with accelerator.accumulate(model):
            watch.mark("forward", step, micro)
            outputs = model(**batch)
            loss = material.loss_of(outputs, batch)
            watch.mark("backward", step, micro)
            accelerator.backward(loss)
            last = accelerator.sync_gradients
            if last:
                watch.mark("optimizer", step, 0)
            optimizer.step()
            if last:
                watch.mark("zero_grad", step, 0)
            optimizer.zero_grad()
        if last:
            if device == "cuda":
                torch.cuda.synchronize()
            watch.step_done(step)
        step, micro = (step + 1, 1) if last else (step, micro + 1)


def _take_time(gigabytes: int) -> None:
    """Let collectives keep their stream busy for as long as their bytes take at that many GB/s."""
    import functools

    import torch
    import torch.distributed as dist

    cycles_a_second = 1.7e9

    def taking_time(name: str) -> None:
        collective = getattr(dist, name)

        @functools.wraps(collective)
        def wait_too(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            nbytes = max(t.nbytes for t in tensors)
            torch.cuda._sleep(int(nbytes / (gigabytes * 1e9) * cycles_a_second))
            return collective(*args, **kwargs)

        setattr(dist, name, wait_too)

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        taking_time(name)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
