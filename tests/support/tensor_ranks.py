"""A real rank of tensor parallelism: transformers' own sharding, on the CPU.

The process group is PyTorch's fake one, which moves no data: gloo's threads let go of what they
sent whenever they come to it, so there is no order to compare.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, Marks, measure_rank, real_ranks


def real_rank(case: dict[str, Any]) -> Any:
    """What the first rank of a case measured, a ``CpuRun``.

    Args:
        case: ``model``, ``ranks`` that share layers, options of ``Setup`` in ``setup``, and
            ``evaluation`` as for ``evaluation_ranks.real_evaluation`` or fields of a
            ``Generation`` in ``generation``.
    """
    return real_ranks(_be_rank, case)[0]


def predicted(case: dict[str, Any]) -> Any:
    """The stream of the first rank, with the CPU's operators and no workspaces."""
    from memest.profiles.pieces import splice
    from memest.sharding.rank import rank_stream, update_setup, updated_weights
    from memest.trace.generation import TRACED_STEPS
    from memest.trace.inputs.batch import realise
    from memest.trace.losses.loss import loss_for
    from memest.trace.session import rank_model
    from memest.trace.training import plan_to_compose, trace_training, trace_updates
    from support.cases import GPU
    from support.evaluation_ranks import traced_evaluation, with_tail
    from support.streams import make_stream

    twins = twins_of(case, runs=False)
    setup = twins.setup
    with rank_model(twins.built_model.trained_model, setup) as model:
        trace = trace_training(
            model, setup, make_batch=lambda: realise(twins.plans),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu",
            plan=plan_to_compose(setup),
        )  # fmt: skip
    tail = None
    if "evaluation" in case or "generation" in case:
        trace_tail = traced_evaluation if "evaluation" in case else traced_generation
        with rank_model(twins.built_model.trained_model, setup) as model:
            tail = trace_tail(model, twins, _evaluation_case(case))
    weights = updated_weights(trace.weights, setup, trace.landmarks)
    whole_trace = splice(trace, trace_updates(weights, update_setup(setup), GPU))
    whole_trace.calls = [replace(call, op="none") for call in whole_trace.calls]
    accum = setup.grad_accum
    stream = make_stream(whole_trace, GPU, num_steps=STEPS, grad_accum=accum, cues=True)
    if tail is not None:
        steps = TRACED_STEPS if "generation" in case else None
        stream = with_tail(stream, tail, steps)
    if setup.distributed.fsdp == "none":
        return stream
    return rank_stream(stream, setup, trace.weights, trace.landmarks, accum)


def twins_of(case: dict[str, Any], *, runs: bool = True) -> Any:
    from memest.config.parallelism import Distributed
    from memest.trace.parallel.sequence_parallel import drop_attention_mask
    from support.cases import twin

    if "spread" in case:
        distributed = Distributed(**case["spread"])
        twins = twin(case["model"], runs=runs, distributed=distributed, **case.get("setup", {}))
        return replace(twins, plans=drop_attention_mask(twins.plans, distributed))
    distributed = Distributed(num_gpus=case["ranks"], tp=case["ranks"])
    return twin(case["model"], runs=runs, distributed=distributed, **case.get("setup", {}))


def _evaluation_case(case: dict[str, Any]) -> dict[str, Any]:
    """A case in the words of ``evaluation_ranks``."""
    return {**case, "spread": {"tp": case["ranks"]}}


def traced_generation(model: Any, twins: Any, case: dict[str, Any]) -> Any:
    """The first steps of a generation, of a model as a rank has it."""
    from memest.config.generation import Generation
    from memest.trace.generation import trace_generation
    from memest.trace.inputs.batch import realise
    from support.cases import GPU

    return trace_generation(
        model, twins.setup, Generation(**case["generation"]), gpu=GPU, operators="cpu",
        make_batch=lambda: realise(twins.plans),
    )  # fmt: skip


def generate(model: Any, twins: Any, case: dict[str, Any]) -> None:
    """transformers' own ``generate``, whose end is decided here."""
    import torch
    from transformers.generation.utils import GenerationMixin

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.material import host_batches
    from memest.config.generation import Generation
    from memest.trace.generation import TRACED_STEPS, options_of

    (batch,) = host_batches(twins.plans, 1)
    step = 1
    mark(f"generation {STEPS} 1")

    class Enough(Exception):
        pass

    def has_unfinished(*_: Any, **__: Any) -> bool:
        nonlocal step
        step += 1
        if step > TRACED_STEPS:
            mark("end 0 0")
            raise Enough
        mark(f"generation {STEPS} {step}")
        return True

    inputs = {name: torch.as_tensor(v).clone() for name, v in batch.items()}
    del inputs["labels"]
    model.eval()
    with (
        mock.patch.object(GenerationMixin, "_has_unfinished_sequences", has_unfinished),
        contextlib.suppress(Enough),
    ):
        model.generate(**inputs, **options_of(Generation(**case["generation"])))


def _be_rank(_rank: int, case: dict[str, Any], _meeting: str) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.config.parallelism import Distributed
    from memest.trace.losses.loss import loss_for
    from memest.trace.parallel.tensor_parallel import on_ranks
    from support.evaluation_ranks import environment, evaluate
    from support.ranks import accelerate_loop

    torch.manual_seed(0)
    if "evaluation" in case:
        environment(case, 0)
    twins = twins_of(case)
    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def run() -> None:
        mark("load 0 0")
        if "evaluation" in case or "generation" in case:
            then = evaluate if "evaluation" in case else generate
            accelerate_loop(
                twins.real, setup, batches, optimizer_of_shards, loss_for(twins.built_model),
                then=lambda: then(twins.real, twins, _evaluation_case(case)),
            )  # fmt: skip
            return
        train(
            twins.real, setup, batches, optimizer_of_shards, loss_for(twins.built_model),
            torch.device("cpu"), Marks(),
        )  # fmt: skip

    with on_ranks(Distributed(num_gpus=case["ranks"], tp=case["ranks"])) as meshes:
        twins = replace(twins, real=shard_with_adapters(twins.real, meshes.tp))
        return measure_rank(run)


def shard_with_adapters(model: Any, mesh: Any) -> Any:
    """The model sharded, then peft's adapters in it, as a script has it from_pretrained."""
    import peft

    from memest.config.parallelism import Distributed
    from memest.trace.parallel.tensor_parallel import Meshes, shard_model

    config = None
    if isinstance(model, peft.PeftModel):
        config = model.peft_config["default"]
        model = model.unload()
    ranks = mesh.size()
    shard_model(model, Meshes(mesh), Distributed(num_gpus=ranks, tp=ranks))
    return model if config is None else peft.get_peft_model(model, config)


def optimizer_of_shards(model: Any) -> Any:
    """Sharded and whole parameters in groups of their own, as the Trainer puts them: torch's
    foreach and fused kernels refuse the two together.
    """
    import torch

    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], foreach=True)
