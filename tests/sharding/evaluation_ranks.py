"""Real ranks that train and then evaluate: the Trainer's own evaluation loop on a wrapped model.

FSDP1 and FSDP2 run with PyTorch's fake process group, DDP as processes with gloo. accelerate hears
that the group is not gloo's, so that it gathers as it does on GPUs: into one tensor.

Run as a script, this trains and evaluates one case and writes what rank 0 saw.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent


def real_evaluation(case: dict[str, Any]) -> Any:
    """What rank 0 of a case measured: a ``CpuRun``.

    Args:
        case: as for ``ranks.real_rank``, with ``evaluation``: samples of a batch, and whether
            predictions are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.pickle"
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(case), folder, str(out)],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert out.exists(), done.stdout + done.stderr
        return pickle.loads(out.read_bytes())


def predicted_evaluation(case: dict[str, Any]) -> Any:
    """The stream of a rank that trains and evaluates, as memest makes it."""
    from ranks import predicted_rank

    return predicted_rank(case, lambda stream, twins: evaluated(stream, twins, case))


def evaluated(stream: Any, twins: Any, case: dict[str, Any]) -> Any:
    """A stream of training with the evaluation of a case behind it."""
    from cases import GPU
    from ranks import STEPS, loss_of_setup

    from memest.steps import evaluation as tails
    from memest.trace.evaluation import TRACED_BATCHES, trace_evaluation
    from memest.trace.inputs import realise
    from memest.trace.losses import loss_for

    batch, keeps = case["evaluation"]
    plans = plans_of(twins, batch)
    twins.built.model.config.use_cache = False  # as the Trainer sets it
    setup = replace(
        twins.setup, loop="trainer", batch=batch, eval_batch=batch,
        eval_samples=batch if keeps else None,
    )  # fmt: skip
    with loss_of_setup(twins.built.model, setup):
        trace = trace_evaluation(
            twins.built.trained, setup, make_batch=lambda: realise(plans),
            loss_of=loss_for(twins.built), gpu=GPU, operators="cpu", ranks=case["ranks"],
        )  # fmt: skip
    with mock.patch.object(tails, "hidden_allocations", return_value=()):
        return tails.with_evaluation(
            stream, trace, GPU, (), batches=TRACED_BATCHES, step=STEPS, cues=True
        )


def plans_of(twins: Any, batch: int) -> Any:
    """The tensors of an evaluation batch."""
    from memest.trace.inputs import plan_batch

    return plan_batch(twins.built, replace(twins.setup, batch=batch))[0]


def evaluate(model: Any, twins: Any, case: dict[str, Any]) -> None:
    """``Trainer.evaluate`` of a model that is wrapped already."""
    import torch
    from accelerate import PartialState
    from ranks import STEPS
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import EvalLoopContainer

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import to_device
    from memest.calibration.running.material import host_batches
    from memest.trace.evaluation import TRACED_BATCHES

    batch, keeps = case["evaluation"]
    batches = host_batches(plans_of(twins, batch), TRACED_BATCHES)
    at = {"batch": 0}

    def send(value: Any, *_: Any, **__: Any) -> Any:
        at["batch"] += 1
        mark(f"evaluation {STEPS} {at['batch']}")
        return to_device(value, torch.device("cpu"))

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return TRACED_BATCHES * batch * case["ranks"]

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"row": index}

    to_host = EvalLoopContainer.get_arrays

    def arrays(container: Any) -> Any:
        mark("end 0 0")  # what follows is on the host
        return to_host(container)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # where the model is, it is already
        stack.enter_context(mock.patch.object(Trainer, "_move_model_to_device"))
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder, use_cpu=True, per_device_eval_batch_size=batch, report_to=[],
                disable_tqdm=True, remove_unused_columns=False,
                label_names=["labels"],  # as of the model before it was wrapped
            ),
            data_collator=lambda rows: batches[rows[0]["row"] // batch % TRACED_BATCHES],
            compute_metrics=(lambda _: {}) if keeps else None,
        )  # fmt: skip
        trainer.accelerator._models.append(model)  # it has prepared the model before it trains
        PartialState._shared_state["backend"] = "not gloo"

        def gathers(out: Any, own: Any) -> None:
            # NCCL compares no shapes and has no tensors of its own here; gloo does and has
            for part in out.chunk(case["ranks"]):
                part.copy_(own.view(-1))

        stack.enter_context(mock.patch.object(torch.distributed, "all_gather_into_tensor", gathers))
        stack.enter_context(mock.patch("accelerate.data_loader.send_to_device", send))
        stack.enter_context(mock.patch.object(EvalLoopContainer, "get_arrays", arrays))
        trainer.evaluate(Rows())


def _environment(case: dict[str, Any], rank: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["ranks"]),
    }  # fmt: skip


def _be_rank(rank: int, case: dict[str, Any], rendezvous: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from cases import twin
    from ranks import (
        STEPS,
        accelerate_loop,
        make_optimizer_of,
        prepared,
        twins_of,
        wrapped,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.material import host_batches
    from memest.trace.losses import loss_for

    _environment(case, rank)
    ddp = not case["spread"].get("fsdp")
    store: Any = dist.FileStore(rendezvous, case["ranks"]) if ddp else FakeStore()
    dist.init_process_group(
        "gloo" if ddp else "fake", store=store, rank=rank, world_size=case["ranks"]
    )
    torch.manual_seed(0)
    asked = twins_of(case).setup
    options = dict(case.get("setup", {}))
    if not ddp:
        options.pop("precision", None)  # that is the policy's, not autocast's
    twins = twin(case["model"], distributed=asked.distributed, **options)
    batches = host_batches(twins.plans, STEPS * asked.grad_accum)

    def run() -> None:
        mark("load 0 0")
        if ddp:
            model = torch.nn.parallel.DistributedDataParallel(twins.real)
        elif asked.distributed.fsdp_version == 1:
            model = wrapped(twins.real, asked)
        else:
            model = prepared(twins.real, asked)
        # the Trainer evaluates what DDP wraps, and what FSDP makes of a model
        evaluates = twins.real if ddp else model
        accelerate_loop(
            model, asked, batches, make_optimizer_of(twins.setup), loss_for(twins.built),
            then=lambda: evaluate(evaluates, twins, case),
        )  # fmt: skip

    measured = measure(run)
    if ddp:
        dist.barrier()
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(measured))


def _main(text: str, folder: str, out: str) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "proof")]
    case = json.loads(text)
    if case["spread"].get("fsdp"):
        _be_rank(0, case, "", out)
        return
    from forked import run_forked

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"{folder}/store"
    run_forked(_be_rank, [(rank, case, store, out) for rank in range(case["ranks"])])


if __name__ == "__main__":
    _main(*sys.argv[1:])
