"""Real ranks: processes on the CPU with gloo, measured as the proofs measure one process.

Run as a script, it trains one case and writes what rank 0 saw. A process of its own, because ranks
are forked, and autograd's threads do not survive a fork.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 3


def real_rank(case: dict[str, Any]) -> Any:
    """What rank 0 of a case measured: a ``CpuRun``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.pickle"
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(case), folder, str(out)],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert out.exists(), done.stdout + done.stderr
        return pickle.loads(out.read_bytes())


def predicted_rank(case: dict[str, Any]) -> Any:
    """The stream of a rank as memest makes it, on the CPU's operators, without CUDA's workspaces."""
    from cases import GPU

    from memest.sharding.rank import rank_stream
    from memest.steps.stream import Stream, lay_out
    from memest.trace.inputs import realise
    from memest.trace.losses import loss_for
    from memest.trace.optimizers import weights_of
    from memest.trace.training import TracePlan, trace_training

    twins = _twins(case)
    setup = twins.setup
    trace = trace_training(
        twins.built.model,
        setup,
        make_batch=lambda: realise(twins.plans),
        loss_of=loss_for(twins.built),
        gpu=GPU,
        operators="cpu",
        plan=TracePlan(steps=STEPS, micro_steps=setup.grad_accum),
    )
    places: dict[int, int] = {}
    numbered = replace(trace)
    numbered.sizes = [places.setdefault(size, len(places)) for size in trace.sizes]
    course = lay_out(
        numbered, ((),) * len(trace.calls), len(places), num_steps=STEPS,
        grad_accum=setup.grad_accum, cues=True,
    )  # fmt: skip
    table = list(places)
    stream = Stream.of(course, [table[place] for place in course.places], 0)
    weights = weights_of(twins.built.model)
    return rank_stream(stream, setup, weights, trace.landmarks, setup.grad_accum)


def as_run(stream: Any, *, sharded: bool = False) -> Any:
    """A stream in the form in which runs on the CPU are measured; of the load, what wrappers do."""
    from memest.calibration.running.cpu_memory import CpuRun, MemoryEvent, PhaseBytes
    from memest.events import CATEGORY_ORDER, Category, Phase

    run = CpuRun()
    now = peak = alive = done = 0
    phase = None
    loading = True
    wrapped = {CATEGORY_ORDER.index(Category.COMMUNICATION)}
    if sharded:
        wrapped.add(CATEGORY_ORDER.index(Category.PARAMETERS))
    for index, event in enumerate(stream.events):
        while done < len(stream.marks) and stream.mark_positions[done] <= index:
            begun = stream.marks[done]
            done += 1
            if phase is not None:
                run.phases.append(PhaseBytes(phase, alive, peak))
            phase = f"{begun.phase} {begun.step} {begun.micro_step}"
            alive = peak = now
            loading = begun.phase is Phase.LOAD
        number = event if event >= 0 else ~event
        if loading and stream.categories[number] not in wrapped:
            continue
        size = stream.sizes[number] * (1 if event >= 0 else -1)
        now += size
        peak = max(peak, now)
        label = stream.label_names[stream.labels[number]]
        module = stream.module_names[stream.modules[number]]
        run.events.append(MemoryEvent(size, f"{module}/{label}", phase, number))
    run.phases.append(PhaseBytes(phase, alive, peak))
    return run


def _twins(case: dict[str, Any]) -> Any:
    from cases import twin

    from memest.distributed import Distributed

    spread = Distributed(num_gpus=case["ranks"], **case.get("spread", {}))
    return twin(case["model"], distributed=spread, **case.get("setup", {}))


def _be_rank(rank: int, case: dict[str, Any], rendezvous: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses import loss_for
    from memest.trace.optimizers import make_optimizer
    from memest.trace.recorder import Recorder

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(rendezvous, case["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case["ranks"])
    torch.manual_seed(0)
    twins = _twins(case)
    setup, spread = twins.setup, twins.setup.distributed
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    class Marks:
        def mark(self, phase: str, step: int, micro_step: int) -> None:
            mark(f"{phase} {step} {micro_step}")

        def step_done(self, step: int) -> None:
            pass

    def run() -> None:
        mark("load 0 0")
        model = torch.nn.parallel.DistributedDataParallel(
            twins.real,
            bucket_cap_mb=spread.ddp_bucket_cap_mb,
            find_unused_parameters=setup.finds_unused_parameters,
            gradient_as_bucket_view=spread.ddp_gradient_as_bucket_view,
        )
        train(
            model, setup, batches, lambda m: make_optimizer(m, setup, Recorder(), (2, 13)),
            loss_for(twins.built), torch.device("cpu"), Marks(),
        )  # fmt: skip

    measured = measure(run)
    dist.barrier()
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(measured))


def _main(text: str, folder: str, out: str) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "proof")]
    case = json.loads(text)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, case, f"{folder}/store", out))
        for rank in range(case["ranks"])
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
