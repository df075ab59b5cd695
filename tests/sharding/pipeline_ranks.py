"""Real pipelines: processes with gloo, ``PipelineStage`` and the schedules of torch, on the CPU.

Run as a script, this trains one case and writes what every rank saw.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 3


def real_ranks(case: dict[str, Any]) -> list[Any]:
    """What every rank of a case measured, ``CpuRun`` each.

    Args:
        case: ``model``, and options of ``Setup`` and of ``Distributed`` in ``setup``, ``spread``.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(case), folder],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        files = [Path(folder) / f"rank{rank}" for rank in range(case["spread"]["pp"])]
        assert all(file.exists() for file in files), done.stdout + done.stderr
        return [pickle.loads(file.read_bytes()) for file in files]


def predicted_ranks(case: dict[str, Any]) -> list[Any]:
    """The streams of all ranks as memest makes them, with the CPU's operators and no workspaces."""
    from dataclasses import replace

    from cases import GPU

    from memest.pipelined import parts_of, plan_of
    from memest.sharding.pipeline import compose_rank
    from memest.sharding.schedules import stages_of
    from memest.trace.inputs import realise
    from memest.trace.stages import layers_of, trace_stage
    from memest.trace.training import trace_updates

    twins = twins_of(case)
    setup, model = twins.setup, twins.built.model
    parts = parts_of(setup.distributed, layers_of(model))
    traces = [
        trace_stage(
            model, setup, part=part, make_batch=lambda: realise(twins.plans), gpu=GPU,
            operators="cpu",
        )
        for part in parts
    ]  # fmt: skip
    for trace in traces:
        trace.calls = [replace(call, op="none") for call in trace.calls]
    plan, out = plan_of(setup, GPU.torch), []
    for rank in range(plan.ranks):
        own = [traces[n] for n in stages_of(plan.schedule, rank, plan.ranks, plan.per_rank)]
        weights = tuple(weight for trace in own for weight in trace.weights)
        updates = trace_updates(weights, setup, GPU)
        updates.calls = [replace(call, op="none") for call in updates.calls]
        out.append(compose_rank(plan, rank, own, updates, GPU))
    return out


def twins_of(case: dict[str, Any]) -> Any:
    from cases import twin

    from memest.distributed import Distributed

    spread = Distributed(num_gpus=case["spread"]["pp"], **case["spread"])
    return twin(case["model"], distributed=spread, **case.get("setup", {}))


def _be_rank(rank: int, case: dict[str, Any], folder: str) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from ranks import make_optimizer_of

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.material import host_batches
    from memest.sharding.schedules import stages_of
    from memest.trace.stages import causal_loss

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(0)
    twins = twins_of(case)
    setup, spread = twins.setup, twins.setup.distributed
    store = dist.FileStore(f"{folder}/store", spread.pp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spread.pp)
    own = stages_of(spread.pipeline_schedule, rank, spread.pp, spread.stages_per_gpu)
    count = spread.microbatches
    batches = list(host_batches(twins.plans, STEPS * setup.grad_accum * count))

    def run() -> None:
        stages = [_stage(twins, number) for number in own]
        schedule = _schedule(spread, stages, count, causal_loss(twins.real))
        trained = [p for stage in stages for p in stage.submod.parameters()]
        optimizer = make_optimizer_of(setup)(torch.nn.ModuleList(s.submod for s in stages))
        losses: list[Any] = []
        _marked(stages, spread, mark)
        for step in range(STEPS):
            for round_ in range(setup.grad_accum):
                _marked.step = step + 1
                mark(f"batch {step + 1} 0")
                ids = labels = None
                start = (step * setup.grad_accum + round_) * count
                mine = batches[start : start + count]
                whole = {
                    name: np.concatenate([np.asarray(b[name]) for b in mine])
                    for name in ("input_ids", "labels")
                }
                if 0 in own:
                    ids = torch.as_tensor(whole["input_ids"]).clone()
                if spread.pp * spread.stages_per_gpu - 1 in own:
                    labels = torch.as_tensor(whole["labels"]).clone()
                with _region(setup):
                    schedule.step(
                        *([] if ids is None else [ids]), target=labels,
                        losses=None if labels is None else losses,
                        return_outputs=spread.pp_return_outputs,
                    )  # fmt: skip
            mark(f"optimizer {step + 1} 0")
            optimizer.step()
            mark(f"zero_grad {step + 1} 0")
            for parameter in trained:
                parameter.grad = None if setup.zero_grad != "zero" else parameter.grad.zero_()
        mark("end")

    measured = measure(run)
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(measured))
    dist.barrier()


def _region(setup: Any) -> Any:
    from contextlib import nullcontext

    import torch

    if setup.precision == "fp32":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _stage(twins: Any, number: int) -> Any:
    """A stage cut by hand; its shapes are given, so that no step is spent on finding them."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    from memest.pipelined import parts_of
    from memest.trace.stages import cut, layers_of, stage_module

    model, spread = copy.deepcopy(twins.real), twins.setup.distributed
    part = parts_of(spread, layers_of(model))[number]
    held = cut(model, part)
    held.__enter__()

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cut = held  # it ends with its last reference

        def forward(self, given: Any) -> Any:
            return stage_module(self.model, part)(given)

    shape = next(plan.shape for plan in twins.plans if plan.name == "input_ids")
    config = model.config
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, config.hidden_size, device="meta", requires_grad=True)
    logits = torch.empty(*shape, config.vocab_size, device="meta", requires_grad=True)
    return PipelineStage(
        Part(), number, spread.pp * spread.stages_per_gpu, torch.device("cpu"),
        input_args=ids if part.first else hidden, output_args=logits if part.last else hidden,
    )  # fmt: skip


def _schedule(spread: Any, stages: Any, count: int, loss: Any) -> Any:
    from test_schedules import THEIRS
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    kind = THEIRS[spread.pipeline_schedule]
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if single else stages, count, loss_fn=loss)


def _marked(stages: Any, spread: Any, mark: Any) -> None:
    """Marks before every piece of work."""
    for stage in stages:
        for name, word in (
            ("forward_one_chunk", "forward"), ("backward_one_chunk", "backward"),
            ("backward_weight_one_chunk", "backward"),
        ):  # fmt: skip
            setattr(stage, name, _after_mark(getattr(stage, name), word, mark))


def _after_mark(work: Any, word: str, mark: Any) -> Any:
    def called(number: int, *args: Any, **more: Any) -> Any:
        mark(f"{word} {_marked.step} {number + 1}")
        return work(number, *args, **more)

    return called


def _main(text: str, folder: str) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "proof")]
    case = json.loads(text)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, case, folder))
        for rank in range(case["spread"]["pp"])
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
