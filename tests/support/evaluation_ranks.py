"""Real ranks that train and then evaluate: the Trainer's own evaluation loop on a wrapped model.

FSDP1 and FSDP2 run with PyTorch's fake process group, DDP as processes with gloo. accelerate hears
that the group is not gloo's, so that it gathers as it does on GPUs: into one tensor.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, join_group, measure_rank, real_ranks

HOST = 6144
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""


def real_evaluation(case: dict[str, Any]) -> Any:
    """What rank 0 of a case measured: a ``CpuRun``.

    Args:
        case: as for ``ranks.real_rank``, with ``evaluation``: samples of a batch, and whether
            predictions are kept; or with fields of a ``Generation`` in ``generation``.
    """
    ranks = 1 if case["spread"].get("fsdp") else case["ranks"]
    return real_ranks(_be_rank, case, range(ranks))[0]


def predicted_evaluation(case: dict[str, Any]) -> Any:
    """The stream of a rank that trains and evaluates, as memest makes it."""
    from support.ranks import predicted_rank

    return predicted_rank(case, lambda stream, twins: with_evaluation(stream, twins, case))


def with_evaluation(stream: Any, twins: Any, case: dict[str, Any]) -> Any:
    """A stream of training with the evaluation of a case behind it."""
    return with_tail(stream, traced_evaluation(twins.built_model.trained_model, twins, case))


def with_tail(stream: Any, trace: Any, batches: int | None = None) -> Any:
    """A stream of training with an evaluation or a generation behind it that was traced."""
    from memest.profiles import evaluation as tails
    from memest.trace.evaluation import TRACED_BATCHES
    from support.cases import GPU

    with mock.patch.object(tails, "workspaces_of", return_value=()):
        return tails.with_evaluation(
            stream, trace, GPU, (), batches=batches or TRACED_BATCHES, step=STEPS, cues=True
        )


def traced_evaluation(model: Any, twins: Any, case: dict[str, Any], split: Any = None) -> Any:
    """The evaluation of a case, of a model as a rank has it."""
    from memest.trace.evaluation import trace_evaluation
    from memest.trace.inputs.batch import realise
    from memest.trace.losses.loss import loss_for
    from memest.trace.parallel.ulysses_batches import collated_for
    from support.cases import GPU
    from support.ranks import loss_of_setup

    batch, keeps = case["evaluation"]
    plans = plans_of(twins, batch)
    model.config.use_cache = False  # as the Trainer sets it
    setup = replace(
        twins.setup, loop="trainer", batch=batch, eval_batch=batch,
        eval_samples=batch if keeps else None,
    )  # fmt: skip
    with loss_of_setup(twins.built_model.model, setup):
        return trace_evaluation(
            model, setup, make_batch=lambda: collated_for(realise(plans), setup),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu", ranks=case["ranks"],
            split=split,
        )  # fmt: skip


def check_evaluation(real: Any, predicted: Any, host: int = HOST) -> None:
    """Every phase of an evaluation, and every allocation and free from 8 KiB on, in order.

    Args:
        real, predicted: a ``CpuRun`` each, of a training and four batches behind it.
        host: bytes that a CPU run cannot tell from the device's.
    """
    from support.ranks import of_steps
    from support.real_memory import differences

    measured = {phase.name: phase for phase in real.phases}
    batches = [phase for phase in predicted.phases if phase.name.startswith("evaluation")]
    assert len(batches) == 4
    for phase in batches:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + 0.005 * real.peak, f"peak in {phase.name}"
    runs = [of_steps(run) for run in (real, predicted)]
    for run in runs:
        run.events = [event for event in run.events if event.phase.startswith("evaluation")]
    assert len(predicted.allocations(at_least=8192)) > 100
    assert differences(*runs, at_least=8192) == []


def plans_of(twins: Any, batch: int) -> Any:
    """The tensors of an evaluation batch."""
    from memest.trace.inputs.batch import plan_batch

    return plan_batch(twins.built_model, replace(twins.setup, batch=batch))[0]


def evaluate(model: Any, twins: Any, case: dict[str, Any], context: Any = None) -> None:
    """``Trainer.evaluate`` of a model that is wrapped already.

    Args:
        model: as the Trainer has it.
        twins: what it was built of.
        case: as for :func:`real_evaluation`.
        context: what cuts batches where ranks share sequences by ring attention.
    """
    import numpy as np
    import torch
    from accelerate import Accelerator, PartialState
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import EvalLoopContainer

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import to_device
    from memest.calibration.running.material import host_batches
    from memest.trace.evaluation import TRACED_BATCHES

    batch, keeps = case["evaluation"]
    batches = host_batches(plans_of(twins, batch), TRACED_BATCHES)
    if case["spread"].get("sp"):
        # the collator of training counts them
        for values in batches:
            shape = values["input_ids"].shape
            positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
            values["position_ids"] = torch.from_numpy(positions)
    at = {"batch": 0}

    def send(value: Any, *_: Any, **__: Any) -> Any:
        at["batch"] += 1
        mark(f"evaluation {STEPS} {at['batch']}")
        return to_device(value, torch.device("cpu"))

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            same = max(case["spread"].get(name, 1) for name in ("cp", "tp"))
            return TRACED_BATCHES * batch * case["ranks"] // same

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"row": index}

    to_host = EvalLoopContainer.get_arrays

    def arrays(container: Any) -> Any:
        mark("end 0 0")  # what follows is on the host
        return to_host(container)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # where the model is, it is already
        stack.enter_context(mock.patch.object(Trainer, "_move_model_to_device"))
        parallelism_config = _parallelism_config(case["spread"])
        if parallelism_config is not None:
            stack.enter_context(
                mock.patch.object(
                    Accelerator, "parallelism_config", property(lambda _: parallelism_config)
                )
            )
            # which takes processes on GPUs alone
            stack.enter_context(
                mock.patch.object(type(parallelism_config), "_validate_accelerator")
            )
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
        trainer.accelerator._cp_context = context
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


def _parallelism_config(parallelism: dict[str, Any]) -> Any:
    """What accelerate is told of ranks that share sequences or layers; None where none do."""
    from accelerate import ParallelismConfig

    sizes = {
        f"{name}_size": parallelism[name] for name in ("sp", "cp", "tp") if parallelism.get(name)
    }
    return ParallelismConfig(**sizes) if sizes else None


def environment(case: dict[str, Any], rank: int) -> None:
    """What a launcher tells a process, and accelerate reads."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["ranks"]),
        "ACCELERATE_TORCH_DEVICE": "cpu",  # else cpu:0, to which batches would be copied
        "OMP_NUM_THREADS": "1",  # else accelerate takes all there are
    }  # fmt: skip


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.cases import twin
    from support.ranks import (
        accelerate_loop,
        apply_fsdp1,
        make_optimizer_of,
        prepare_fsdp2,
        setup_of_case,
    )
    from support.tensor_ranks import generate

    environment(case, rank)
    ddp = not case["spread"].get("fsdp")
    join_group("gloo" if ddp else "fake", rank, case["ranks"], meeting)
    torch.manual_seed(0)
    setup = setup_of_case(case)
    options = dict(case.get("setup", {}))
    if not ddp:
        options.pop("precision", None)  # that is the policy's, not autocast's
    twins = twin(case["model"], distributed=setup.distributed, **options)
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def run() -> None:
        mark("load 0 0")
        if ddp:
            model = torch.nn.parallel.DistributedDataParallel(twins.real)
        elif setup.distributed.fsdp_version == 1:
            model = apply_fsdp1(twins.real, setup)
        else:
            model = prepare_fsdp2(twins.real, setup)
        # the Trainer evaluates what DDP wraps, and what FSDP makes of a model
        evaluates = twins.real if ddp else model
        then = generate if "generation" in case else evaluate
        accelerate_loop(
            model, setup, batches, make_optimizer_of(twins.setup), loss_for(twins.built_model),
            then=lambda: then(evaluates, twins, case),
        )  # fmt: skip

    return measure_rank(run, rank == 0)
