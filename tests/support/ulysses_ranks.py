"""Ulysses sequence parallelism by real DeepSpeed, measured once and kept: ``recorded/sp_*.json``.

    # with DeepSpeed 0.19.8 installed
    DS_BUILD_OPS=0 PYTHONPATH=tests python -m support.ulysses_ranks

DeepSpeed's engine, its attention in place of transformers' and its loader run on the CPU, as one
rank of PyTorch's fake process group, or as several processes under gloo, of which one is measured.
What a CPU has in the host's memory is the device's: batches that the loader keeps there are NumPy's
here, which the profiler does not see, and are copied where a GPU would copy them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.paths import IN_TESTS
from support.paths import RECORDED_RANKS as RECORDED

AT_LEAST = 8192

_HALF = {"loop": "plain", "precision": "bf16", "batch": 2, "attn_implementation": "sdpa"}
_SMALL = {"reduce_bucket_size": 300_000}
_TIGHT = {
    "reduce_bucket_size": 60_000, "stage3_prefetch_bucket_size": 60_000,
    "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 400_000,
}  # fmt: skip
_TINY = {"reduce_bucket_size": 40_000}
_LORA = {
    "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
}  # fmt: skip
_ATTENTION = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
_FOUR = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "sp_2": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_of_4": {
        "model": "llama-gqa", "ranks": 4, "setup": {**_HALF, "grad_accum": 2},
        "spread": {"sp": 2, "zero": 1, "zero_settings": _SMALL},
    },
    "sp_4_copies_of_heads": {
        "model": "llama-gqa", "ranks": 4, "setup": {**_HALF, "grad_accum": 4},
        "spread": {"sp": 4, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_checkpointing": {
        "model": "llama-gqa", "ranks": 2, "setup": {**_HALF, "checkpointing": "full"},
        "spread": {"sp": 2, "zero": 3, "zero_settings": _TIGHT},
    },
    "sp_2_zero_3": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"sp": 2, "zero": 3, "zero_settings": _SMALL},
    },
    "sp_2_full": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "precision": "fp32"},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_accelerate": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "loop": "accelerate"},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_offload": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"sp": 2, "zero": 2, "offload_optimizer": True, "zero_settings": _SMALL},
    },
    "sp_2_zero_3_offload": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {
            "sp": 2, "zero": 3, "offload_optimizer": True, "offload_param": True,
            "zero_settings": _TIGHT,
        },
    },
    "sp_2_gloo": {
        "model": "llama", "ranks": 2, "setup": _HALF, "gloo": True,
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_4_gloo": {
        "model": "llama-gqa", "ranks": 4, "setup": _HALF, "gloo": True,
        "spread": {"sp": 4, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_trainer": {
        "model": "llama", "ranks": 2,
        "setup": {**_HALF, "loop": "trainer", "grad_accum": 2, "max_grad_norm": 0.0},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_2_lora": {
        "model": "llama-gqa", "ranks": 4, "setup": {**_HALF, "adapter": _LORA, "grad_accum": 2},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _TINY},
    },
    "sp_2_trainer_lora": {
        "model": "llama", "ranks": 2,
        "setup": {
            **_HALF, "adapter": _LORA, "loop": "trainer", "grad_accum": 2, "max_grad_norm": 0.0,
        },
        "spread": {"sp": 2, "zero": 1, "zero_settings": _TINY},
    },
    "sp_2_qlora": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "adapter": _LORA, "quantization": _FOUR},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _TINY},
    },
    "sp_2_zero_3_qlora": {
        "model": "llama", "ranks": 2,
        "setup": {**_HALF, "adapter": _ATTENTION, "quantization": _FOUR},
        "spread": {"sp": 2, "zero": 3, "zero_settings": _SMALL},
    },
    "sp_2_zero_3_lora": {
        "model": "llama-gqa", "ranks": 2,
        "setup": {**_HALF, "adapter": _ATTENTION, "grad_accum": 2},
        "spread": {"sp": 2, "zero": 3, "zero_settings": _SMALL},
    },
}  # fmt: skip

EVALUATED: dict[str, dict[str, Any]] = {
    "sp_2_evaluated": {
        "model": "llama", "ranks": 2, "evaluation": [6, True],
        "setup": {**_HALF, "loop": "trainer", "grad_accum": 2, "max_grad_norm": 0.0},
        "spread": {"sp": 2, "zero": 2, "zero_settings": _SMALL},
    },
    "sp_4_lora_evaluated": {
        "model": "llama-gqa", "ranks": 4, "evaluation": [6, True],
        "setup": {**_HALF, "adapter": _LORA, "config": {"num_attention_heads": 8}},
        "spread": {"sp": 4, "zero": 2, "zero_settings": _TINY},
    },
    "sp_2_zero_3_evaluated": {
        "model": "llama-gqa", "ranks": 4, "setup": _HALF, "evaluation": [6, False],
        "spread": {"sp": 2, "zero": 3, "zero_settings": _TIGHT},
    },
}  # fmt: skip
"""Runs with the Trainer's own evaluation behind the training, see ``evaluation_ranks``."""


def measured_rank(case: dict[str, Any], rank: int, store: str) -> Any:
    """Train with DeepSpeed as one rank of a case, and measure it.

    Args:
        case: ``model``, ``ranks``, and options of ``Setup`` and of ``Distributed`` in ``setup`` and
            ``spread``; ``gloo`` for ranks that are all there; ``evaluation`` as for
            ``evaluation_ranks.real_evaluation``.
        rank: which one.
        store: a file where processes meet.
    """
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29557",
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case["ranks"]),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    if not case.get("gloo"):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["ranks"])
    else:
        meeting = dist.FileStore(store, case["ranks"])
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=case["ranks"])
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.material import host_batches
    from support.cases import twin
    from support.deepspeed_ranks import _made_in_parts
    from support.evaluation_ranks import evaluate
    from support.ranks import STEPS, make_optimizer_of

    # an operator that DeepSpeed would compile where it finds ninja; gloo needs none
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(
        dist_backend="gloo" if case.get("gloo") else "fake", dist_init_required=False
    )
    torch.manual_seed(0)
    options = {k: v for k, v in case["setup"].items() if k != "precision"}
    half = case["setup"]["precision"] == "bf16"
    twins = twin(case["model"], **{**options, "dtype": "bfloat16" if half else "float32"})
    setup, accum, ways = twins.setup, twins.setup.grad_accum, case["spread"]["sp"]
    batches = host_batches(twins.plans, STEPS * accum)
    for batch in batches:
        ids = batch["input_ids"]
        batch["position_ids"] = _counted(ids.shape)
    zero = {"stage": case["spread"]["zero"], **case["spread"].get("zero_settings", {})}
    for key in ("offload_optimizer", "offload_param"):
        if case["spread"].get(key):
            zero[key] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": accum,
        "train_batch_size": setup.batch * accum * case["ranks"] // ways,
        "bf16": {"enabled": half},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def then(model: Any) -> None:
        if "evaluation" in case:
            evaluate(model, twins, case)

    def run() -> None:
        mark("load 0 0")
        model = twins.real
        if zero["stage"] == 3 and "quantization" not in case["setup"]:
            # zero.Init does not know of the group that shares sequences
            model = _made_in_parts(
                model, setup, {k: v for k, v in config.items() if k != "train_batch_size"}
            )
        optimizer = make_optimizer_of(setup)(model)
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation="sdpa",
            sequence_parallel_size=ways, micro_batch_size=setup.batch,
            disable_in_eval=True,  # as Accelerator._prepare_deepspeed asks for it
        )  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
        loader = _loader(batches, setup.loop.value, mpu)
        train = _trainer if setup.loop == "trainer" else _script
        train(engine, loader, STEPS, accum, mpu, mark, lambda: then(engine.module))

    with mock.patch.object(torch.Tensor, "cpu", lambda t: _on_host(t)):
        return measure(run)


def _counted(shape: Any) -> Any:
    import numpy as np

    return np.broadcast_to(np.arange(shape[1]), shape).copy()


def _on_host(tensor: Any) -> Any:
    """A copy in memory that is not torch's."""
    import torch

    if tensor.is_floating_point():
        return tensor  # what an evaluation brings to the host in the end
    return torch.from_numpy(tensor.numpy().copy())


def _on_device(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.as_tensor(value).clone() for name, value in batch.items()}


def _loader(batches: Any, loop: str, mpu: Any) -> Any:
    """DeepSpeed's adapter on accelerate's loader, or on one that leaves batches to the adapter."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    if loop == "plain":
        inner: Any = _Moved(batches)
    else:
        from accelerate import data_loader

        class Shard(data_loader.DataLoaderShard):
            """On a CPU it has nothing to move."""

        data_loader.send_to_device = lambda batch, *_, **__: _on_device(batch)
        inner = Shard(
            [{n: torch.as_tensor(v) for n, v in batch.items()} for batch in batches],
            device=torch.device("cpu"), batch_size=None,
        )  # fmt: skip
    return UlyssesSPDataLoaderAdapter(
        inner, sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=mpu.get_sequence_parallel_world_size(), device=torch.device("cpu"),
    )  # fmt: skip


class _Moved:
    """Batches that are copied where the adapter moves them: it holds them and nobody else does."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return (_on_device(batch) for batch in self._batches)


def _script(
    engine: Any, loader: Any, steps: int, accum: int, mpu: Any, mark: Any, then: Any
) -> None:  # fmt: skip
    """The guides' loop (accelerate's ``sequence_parallelism``, DeepSpeed's ALST tutorial)."""
    group, ways = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    mark("batch 1 1")
    batch = None
    for index in range(steps * accum):
        step, micro = index // accum + 1, index % accum + 1
        batch = _next(loader, micro)
        batch = _on_device(batch)
        mark(f"forward {step} {micro}")
        outputs = engine(**batch)
        shift_labels = batch["shift_labels"]
        loss = engine.module.loss_function(
            logits=outputs.logits, labels=None, shift_labels=shift_labels,
            vocab_size=engine.module.config.vocab_size,
        )  # fmt: skip
        loss = _joined(loss, shift_labels, group, ways)
        mark(f"backward {step} {micro}")
        engine.backward(loss)
        if micro == accum:
            mark(f"optimizer {step} 0")
        engine.step()
        if micro == accum:
            mark(f"zero_grad {step} 0")
        mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")
    then()
    del batch, outputs, shift_labels


def _next(loader: Any, micro: int) -> Any:
    """The next part, from a new batch in every step's first micro-step as in the prediction."""
    if micro == 1:
        loader.micro_batches.clear()
    elif not loader.micro_batches:
        loader.micro_batches.extend([_next.last] * 64)
    _next.last = next(loader)
    return _next.last


def _joined(loss: Any, shift_labels: Any, group: Any, ways: int) -> Any:
    import torch.distributed.nn.functional as functional

    losses = functional.all_gather(loss, group=group)
    good = (shift_labels != -100).view(-1).sum()
    counts = functional.all_gather(good, group=group)
    total = sum(losses[rank] * counts[rank] for rank in range(ways) if counts[rank] > 0)
    return total / max(sum(counts), 1)


def _trainer(
    engine: Any, loader: Any, steps: int, accum: int, mpu: Any, mark: Any, then: Any
) -> None:  # fmt: skip
    """The Trainer's step, its loss by its own function."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    del mpu
    config = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    for step in range(1, steps + 1):
        mark(f"batch {step} 0")
        samples = [_next(loader, micro) for micro in range(1, accum + 1)]
        for micro, sample in enumerate(samples, start=1):
            if micro > 1:
                mark(f"batch {step} {micro}")
            inputs = _on_device(sample)
            mark(f"forward {step} {micro}")
            loss = deepspeed_sp_compute_loss(None, engine, inputs, False, config)
            del inputs
            mark(f"backward {step} {micro}")
            loss = loss / accum
            engine.backward(loss, scale_wrt_gas=False)
            if micro == accum:
                mark(f"optimizer {step} 0")
            engine.step()
            loss = loss.detach()
        mark(f"zero_grad {step} 0")
    then()
    mark("end 0 0")


def _record(name: str, rank: int, wanted: int, store: str) -> None:
    case = {**CASES, **EVALUATED}[name]
    run = measured_rank(case, rank, store)
    if rank != wanted:
        return
    import accelerate
    import torch
    import transformers

    names = sorted({event.phase for event in run.events})
    events = [[e.nbytes, names.index(e.phase)] for e in run.events if abs(e.nbytes) >= AT_LEAST]
    group = "gloo" if case.get("gloo") else "fake process group"
    document = {
        "software": f"DeepSpeed 0.19.8, torch {torch.__version__.partition('+')[0]}, transformers "
        f"{transformers.__version__}, accelerate {accelerate.__version__}, CPU, {group}",
        "case": case,
        "rank": rank,
        "phases": [[phase.name, phase.alive, phase.peak] for phase in run.phases],
        "names": names,
        "events": events,
    }
    text = json.dumps(document, separators=(",", ":"))
    (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, wanted, name, meeting = sys.argv[2:]
        _record(name, int(rank), int(wanted), meeting)
        return
    from support.evaluation_ranks import predicted_evaluation
    from support.ranks import predicted_rank

    cases = {**CASES, **EVALUATED}
    for name in sys.argv[1:] or cases:
        case = cases[name]
        wanted = (predicted_evaluation if "evaluation" in case else predicted_rank)(case).rank
        ranks = [wanted] if not case.get("gloo") else range(case["ranks"])
        # the profiler remembers addresses: processes for each
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder) / "store")
            running = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "support.ulysses_ranks",
                        "--rank",
                        str(rank),
                        str(wanted),
                        name,
                        meeting,
                    ],
                    cwd=folder,
                    env=IN_TESTS,
                )
                for rank in ranks
            ]
            assert [process.wait() for process in running] == [0] * len(running), name


if __name__ == "__main__":
    _main()
