"""Real DeepSpeed, measured once and kept: ``recorded/zero_*.json``.

    # with DeepSpeed 0.19.8 installed
    DS_BUILD_OPS=0 PYTHONPATH=tests python -m support.deepspeed_ranks

DeepSpeed runs on the CPU, with PyTorch's fake process group in place of other ranks. What a CPU run
has in memory and a GPU's rank in host memory cannot be told apart, so offloading is compared by
the sum.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from support.paths import IN_TESTS
from support.paths import RECORDED_RANKS as RECORDED

AT_LEAST = 8192

_HALF = {"loop": "plain", "precision": "bf16"}
_SMALL = {"reduce_bucket_size": 300_000}
_TIGHT = {
    "reduce_bucket_size": 60_000, "stage3_prefetch_bucket_size": 60_000,
    "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 400_000,
}  # fmt: skip
_LORA = {
    "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
}  # fmt: skip
_FOUR = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
_ALONE = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
_CHUNKED, _FUSED = {**_HALF, "fused_loss": "trl-chunked"}, {**_HALF, "fused_loss": "trl-fused"}
_LIGER = {**_HALF, "use_liger_kernel": True}
_AHEAD = {
    "reduce_bucket_size": 300_000, "stage3_prefetch_bucket_size": 200_000,
    "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 200_000,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "zero_2": {"model": "llama", "ranks": 2, "setup": _HALF, "spread": {"zero": 2}},
    "zero_2_tiny_bucket": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"zero": 2, "zero_settings": {"reduce_bucket_size": 100_000}},
    },
    "zero_2_accumulation": {
        "model": "llama", "ranks": 4, "setup": {**_HALF, "grad_accum": 2},
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_2_frozen": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "freeze": ["embed", "layers.0"]},
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_2_tied": {
        "model": "llama-tied", "ranks": 8, "setup": _HALF,
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_1": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"zero": 1, "zero_settings": _SMALL},
    },
    "zero_1_accumulation": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "grad_accum": 3},
        "spread": {"zero": 1, "zero_settings": _SMALL},
    },
    "zero_3": {"model": "llama", "ranks": 2, "setup": _HALF, "spread": {"zero": 3}},
    "zero_3_small": {
        "model": "llama", "ranks": 4, "setup": _HALF,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_accumulation": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "grad_accum": 2},
        "spread": {"zero": 3, "zero_settings": {**_TIGHT, "stage3_max_reuse_distance": 200_000}},
    },
    "zero_3_odd": {
        "model": "llama-gqa", "ranks": 7, "setup": _HALF,
        "spread": {"zero": 3, "zero_settings": {
            **_TIGHT, "sub_group_size": 30_000, "stage3_max_live_parameters": 100_000,
        }},
    },
    "zero_3_tied": {
        "model": "llama-tied", "ranks": 8, "setup": _HALF,
        "spread": {"zero": 3, "zero_settings": {**_TIGHT, "contiguous_gradients": False}},
    },
    "zero_3_frozen": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "freeze": ["embed", "layers.0"]},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_checkpointing": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "checkpointing": "full"},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_neox": {
        "model": "gpt_neox", "ranks": 2, "setup": _HALF,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_t5": {
        "by_phase": True,  # masked attention is put together otherwise on a CPU
        "model": "t5", "ranks": 2, "setup": {**_HALF, "config": {"dropout_rate": 0.0}},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_alone": {
        "model": "llama", "ranks": 1, "setup": _HALF,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_offload": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {
            "zero": 3, "offload_optimizer": True, "offload_param": True, "zero_settings": _TIGHT,
        },
    },
    "zero_3_full": {
        "model": "llama", "ranks": 2, "setup": {"loop": "plain"},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_2_groups": {
        "model": "gpt_neox", "ranks": 4, "setup": _HALF, "two_groups": True,
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_1_groups": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "grad_accum": 2}, "two_groups": True,
        "spread": {"zero": 1, "zero_settings": _SMALL},
    },
    "zero_3_groups": {
        "model": "gpt_neox", "ranks": 4, "setup": {**_HALF, "grad_accum": 2}, "two_groups": True,
        "spread": {"zero": 3, "zero_settings": {**_TIGHT, "sub_group_size": 50_000}},
    },
    "zero_2_lora": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "adapter": _LORA},
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_1_qlora": {
        "model": "llama", "ranks": 2,
        "setup": {**_HALF, "adapter": _LORA, "quantization": _FOUR, "grad_accum": 2},
        "spread": {"zero": 1, "zero_settings": _SMALL},
    },
    "zero_2_qlora": {
        "model": "llama", "ranks": 2,
        "setup": {**_HALF, "adapter": _LORA, "quantization": _FOUR},
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_2_offload": {
        "model": "llama", "ranks": 2, "setup": _HALF,
        "spread": {"zero": 2, "offload_optimizer": True, "zero_settings": _SMALL},
    },
}  # fmt: skip

READ: dict[str, dict[str, Any]] = {
    "zero_3_read": {
        "model": "llama", "ranks": 2, "setup": _LIGER, "spread": {"zero": 3},
    },
    "zero_3_read_small": {
        "model": "llama", "ranks": 2, "setup": _LIGER,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_read_ahead": {
        "model": "llama", "ranks": 4, "setup": {**_CHUNKED, "grad_accum": 2},
        "spread": {"zero": 3, "zero_settings": _AHEAD},
    },
    "zero_3_read_tied": {
        "model": "llama-tied", "ranks": 3, "setup": {**_LIGER, "grad_accum": 2},
        "spread": {"zero": 3, "zero_settings": _AHEAD},
    },
    "zero_3_read_tied_small": {
        "model": "llama-tied", "ranks": 2, "setup": _CHUNKED,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_read_checkpointing": {
        "model": "llama-tied", "ranks": 2, "setup": {**_FUSED, "checkpointing": "full"},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_read_alone": {
        "model": "llama", "ranks": 1, "setup": _LIGER,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_lora": {
        "model": "llama", "ranks": 2, "setup": {**_HALF, "adapter": _ALONE},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_lora_read": {
        "model": "llama", "ranks": 2, "setup": {**_LIGER, "adapter": _ALONE, "grad_accum": 2},
        "spread": {"zero": 3, "zero_settings": {
            **_AHEAD, "stage3_param_persistence_threshold": 100,
        }},
    },
    "zero_3_lora_read_checkpointing": {
        "any_order": True,  # what a layer recomputed is given back in the order of a Python set
        "model": "llama-tied", "ranks": 2,
        "setup": {**_CHUNKED, "adapter": _ALONE, "checkpointing": "full"},
        "spread": {"zero": 3, "zero_settings": {
            **_TIGHT, "stage3_param_persistence_threshold": 100,
        }},
    },
    "zero_3_read_offload": {
        "model": "llama", "ranks": 2, "setup": _LIGER,
        "spread": {
            "zero": 3, "offload_optimizer": True, "offload_param": True, "zero_settings": _TIGHT,
        },
    },
}  # fmt: skip
"""Parameters that are read outside of their modules: heads by losses, adapters by peft."""

EVALUATED: dict[str, dict[str, Any]] = {
    "zero_2_evaluated": {
        "model": "llama", "ranks": 2, "setup": _HALF, "evaluation": [6, True],
        "spread": {"zero": 2, "zero_settings": _SMALL},
    },
    "zero_3_evaluated": {
        "model": "llama", "ranks": 2, "setup": _HALF, "evaluation": [6, True],
        "spread": {"zero": 3},
    },
    "zero_3_small_evaluated": {
        "model": "llama", "ranks": 4, "setup": _HALF, "evaluation": [6, False],
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_read_evaluated": {
        "model": "llama", "ranks": 2, "setup": _CHUNKED, "evaluation": [6, False],
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_ahead_evaluated": {
        "model": "llama-tied", "ranks": 3, "setup": _HALF, "evaluation": [6, True],
        "spread": {"zero": 3, "zero_settings": {
            **_TIGHT, "stage3_prefetch_bucket_size": 500_000,
            "stage3_max_live_parameters": 800_000, "stage3_max_reuse_distance": 200_000,
        }},
    },
}  # fmt: skip
"""Runs with an evaluation behind the training, see ``evaluation_ranks``."""


def recorded_run(name: str) -> Any:
    """What DeepSpeed was measured to do: a ``CpuRun``; its events from 8 KiB on."""
    from memest.calibration.running.cpu_memory import CpuRun, MemoryEvent, PhaseBytes

    document = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    phases = [PhaseBytes(*row) for row in document["phases"]]
    names = document["names"]
    events = [MemoryEvent(nbytes, "", names[place], 0) for nbytes, place in document["events"]]
    return CpuRun(phases, events)


def measured_rank(case: dict[str, Any], rank: int) -> Any:
    """Train with DeepSpeed as one rank, and measure it."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555",
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case["ranks"]),
    }  # fmt: skip
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["ranks"])
    import deepspeed

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.material import host_batches
    from memest.trace.losses import chunked
    from memest.trace.losses.loss import loss_for
    from support.cases import twin
    from support.evaluation_ranks import evaluate
    from support.ranks import STEPS, launch_nothing_on_the_cpu, loss_of_setup, make_optimizer_of

    # an operator that DeepSpeed would compile where it finds ninja; the fake group needs none
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="fake", dist_init_required=False)
    torch.manual_seed(0)
    options = {k: v for k, v in case["setup"].items() if k != "precision"}
    half = case["setup"].get("precision") == "bf16"
    twins = twin(case["model"], **{**options, "dtype": "bfloat16" if half else "float32"})
    setup, accum = twins.setup, twins.setup.grad_accum
    batches = host_batches(twins.plans, STEPS * accum)
    zero = {"stage": case["spread"]["zero"], **case["spread"].get("zero_settings", {})}
    if case["spread"].get("offload_optimizer"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if case["spread"].get("offload_param"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": accum,
        "train_batch_size": setup.batch * accum * case["ranks"],
        "bf16": {"enabled": half},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    loss_of = loss_for(twins.built)
    if setup.use_liger_kernel:
        # these look for Triton, so they come first
        for name in ("torch._inductor.codecache", "deepspeed.runtime.zero.muon.muon_optimizer"):
            importlib.import_module(name)
        launch_nothing_on_the_cpu()
        # gradients that no kernel has written are no numbers, and would skip the update
        stage_3: Any = importlib.import_module("deepspeed.runtime.zero.stage3")
        stage_3.is_invalid_grad_norm = lambda norm: False
    # a CPU has no product of halves in float32; what it would write has a place already
    chunked._add_product = lambda *_: None

    def run() -> None:
        mark("load 0 0")
        model = twins.real
        if zero["stage"] == 3:
            model = _made_in_parts(model, setup, config)
        with loss_of_setup(model, setup):
            run_in(model)

    def run_in(model: Any) -> None:
        optimizer = make_optimizer_of(setup)(model)
        if case.get("two_groups"):
            _part(optimizer, model)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        mark("batch 1 1")
        batch = None
        for index, on_host in enumerate(batches):
            step, micro = index // accum + 1, index % accum + 1
            batch = {name: torch.as_tensor(value).clone() for name, value in on_host.items()}
            mark(f"forward {step} {micro}")
            outputs = engine(**batch)
            loss = loss_of(outputs, batch)
            mark(f"backward {step} {micro}")
            engine.backward(loss)
            if micro == accum:
                mark(f"optimizer {step} 0")
            engine.step()
            if micro == accum:
                mark(f"zero_grad {step} 0")
            mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")
        if "evaluation" in case:
            # the Trainer evaluates the module in the engine
            evaluate(engine.module, twins, case)
        del batch, outputs

    return measure(run)


def _part(optimizer: Any, model: Any) -> None:
    """A group with weight decay and one without, as the Trainer has them."""
    from memest.trace.optimizers.torch import named_parameters

    (group,) = optimizer.param_groups
    named = named_parameters(model)
    optimizer.param_groups = [
        {**group, "params": [one.parameter for one in named if one.decays is wanted]}
        for wanted in (True, False)
    ]


def _made_in_parts(like: Any, setup: Any, config: dict[str, Any]) -> Any:
    """The same model as transformers builds it where stage 3 is configured: by ``zero.Init``."""
    from transformers.integrations import HfDeepSpeedConfig

    from memest.trace.model.adapters import base_of
    from memest.trace.model.build import freeze
    from support.cases import adapted

    base = base_of(like)
    kept = HfDeepSpeedConfig(config)  # transformers asks for it as long as it lives
    model = type(base)._from_config(like.config, dtype=base.dtype)
    del kept
    if setup.adapter is None:
        freeze(model, setup)
    if setup.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": bool(setup.use_reentrant)})
    if setup.adapter is not None:
        # whole until the engine partitions them with what is partitioned already
        model = adapted(model, setup, like.active_peft_config.task_type)
    return model.train()


def _record(name: str) -> None:
    from support.evaluation_ranks import predicted_evaluation
    from support.ranks import predicted_rank

    case = {**CASES, **READ, **EVALUATED}[name]
    rank = (predicted_evaluation if "evaluation" in case else predicted_rank)(case).rank
    run = measured_rank(case, rank)
    names = sorted({event.phase for event in run.events})
    events = [[e.nbytes, names.index(e.phase)] for e in run.events if abs(e.nbytes) >= AT_LEAST]
    document = {
        "software": "DeepSpeed 0.19.8, torch 2.13, CPU, fake process group",
        "case": case,
        "rank": rank,
        "phases": [[phase.name, phase.alive, phase.peak] for phase in run.phases],
        "names": names,
        "events": events,
    }
    RECORDED.mkdir(exist_ok=True)
    text = json.dumps(document, separators=(",", ":"))
    (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _main() -> None:
    if len(sys.argv) > 1:
        _record(sys.argv[1])
        return
    for name in (*CASES, *READ, *EVALUATED):
        # the profiler remembers addresses: a process for each
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "support.deepspeed_ranks", name]
            subprocess.run(command, check=True, cwd=folder, env=IN_TESTS)


if __name__ == "__main__":
    _main()
