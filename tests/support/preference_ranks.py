"""A rank of TRL's preference trainers under FSDP, and the loop that its ranks have in common."""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, join_group, measure_rank, real_ranks
from support.ranks import (
    MESH_NAMES,
    apply_fsdp1,
    apply_fsdp2,
    dims_of,
    make_optimizer_of,
    mesh_of,
    plans_of,
    prepare_fsdp2,
    setup_of_case,
)


def real_preference_rank(case: dict[str, Any]) -> Any:
    """What rank 0 of a case measured, a ``CpuRun``; the case is that of ``ranks.real_rank``."""
    return real_ranks(_be_rank, case)[0]


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.material import host_batches
    from memest.trace.losses import fused_head
    from memest.trace.losses.objective import objective_of
    from support.cases import twin

    # a CPU has no product of halves in float32; what it would write has a place already
    fused_head._add_product = lambda *_: None
    join_group("fake", rank, case["ranks"], meeting)
    torch.manual_seed(0)
    setup = setup_of_case(case)
    options = {k: v for k, v in case.get("setup", {}).items() if k != "precision"}
    twins = twin(case["model"], distributed=setup.distributed, **options)
    batches = host_batches(plans_of(twins), STEPS * setup.grad_accum)
    make_optimizer = make_optimizer_of(twins.setup)

    def run() -> None:
        with objective_of(twins.real, setup) as objective:
            mark("load 0 0")
            if objective.reference is not None:
                _prepare_reference(objective.reference, setup)
            flattens = setup.distributed.flattens
            if objective.script:
                reshards = setup.distributed.fsdp == "full_shard"
                mesh = mesh_of(setup, ("replicate", "shard"))
                model = apply_fsdp2(twins.real, mesh, reshards=reshards)
            else:
                model = (apply_fsdp1 if flattens else prepare_fsdp2)(twins.real, setup)
            optimizer = make_optimizer(model)
            train = train_in_script if objective.script else train_for_preference
            train(
                model, objective, objective.reference or model, setup, batches,
                bool if flattens else model.set_requires_gradient_sync,
                lambda loss: loss.backward(), optimizer.step,
                lambda: _end_step(model, objective.reference, setup),
                lambda number, inputs: hand_out(model, setup, number, inputs),
            )  # fmt: skip

    return measure_rank(run)


def hand_out(model: Any, setup: Any, number: int, inputs: Any) -> None:
    """TRL's own: the weights for an engine, whose names for them are those of its loops.

    The model itself writes a token, which is a forward.
    """
    import torch
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.models.utils import unwrap_model_for_generation

    from memest.calibration.running.cpu_memory import mark

    if not setup.method.generates:
        return
    if setup.writes_completions:
        mark(f"generation {number} 0")
        accelerator = SimpleNamespace(
            unwrap_model=lambda model: model, state=SimpleNamespace(deepspeed_plugin=None)
        )
        with (
            mock.patch(
                "trl.distributed.DistributedBackend", return_value=mock.Mock(is_zero3=False)
            ),
            # without labels TRL's head is the model's own
            mock.patch.object(model, "forward", MethodType(type(model).forward, model)),
            unwrap_model_for_generation(model, accelerator) as writer,
            torch.no_grad(),
        ):
            writer.generate(
                input_ids=inputs["prompt_ids"], attention_mask=inputs["prompt_mask"],
                max_new_tokens=1, do_sample=True,
            )  # fmt: skip
        mark(f"batch {number} 0")
        return
    giver = VLLMGeneration.__new__(VLLMGeneration)
    giver.model, giver.accelerator = model, SimpleNamespace(device=torch.device("cpu"))
    giver._dist = SimpleNamespace(
        gather_params=lambda _: nullcontext(), is_fsdp=True, fsdp_version=2
    )
    for _ in giver._iter_named_params():
        pass


def _end_step(model: Any, reference: Any, setup: Any) -> None:
    """Drop gradients, and have the reference follow the model as TRL's callback has it."""
    from trl.trainer.callbacks import SyncRefModelCallback

    model.zero_grad()
    if setup.sync_ref_model:
        SyncRefModelCallback._sync_target_model(model, reference, 0.6)


def _prepare_reference(reference: Any, setup: Any) -> None:
    """TRL's own preparation."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trl.models.utils import prepare_fsdp

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=setup.distributed.fsdp.value == "full_shard",
        cpu_ram_efficient_loading=False,
    )
    if setup.precision != "fp32":
        plugin.set_mixed_precision(setup.precision.value)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"),
        torch_device_mesh=mesh_of(setup, MESH_NAMES),
        parallelism_config=SimpleNamespace(fsdp_dim_names=dims_of(setup, MESH_NAMES)),
    )  # fmt: skip
    prepare_fsdp(reference, accelerator)


def train_for_preference(
    model: Any, objective: Any, reference: Any, setup: Any, batches: Any,
    begin: Any, backward: Any, step: Any, zero_grad: Any, hand_out: Any = None, scored: Any = None,
) -> None:  # fmt: skip
    """``Trainer._run_epoch`` around a trainer's own ``compute_loss``, reference by reference.

    Args:
        model: wrapped.
        objective: what the trainer computes.
        reference: that it asks, wrapped.
        setup: the run.
        batches: in host memory.
        begin: told before a micro-step whether it is the last one of its step.
        backward: given the loss.
        step: updates.
        zero_grad: drops gradients.
        hand_out: gives the weights to what writes completions: is told the step, and its batch.
        scored: who is asked what the model said when it wrote, where it is not the wrapped one.
    """
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.trace.losses.rollouts import score_completions

    def ask(**inputs: Any) -> Any:
        with objective.as_reference():
            return reference(**inputs)

    def score(inputs: Any) -> None:
        with objective.recomputing_nothing():
            score_completions(
                (scored or model) if setup.scores_own_completions else None,
                ask if setup.has_reference else None,
                inputs,
            )

    accum, total = setup.grad_accum, torch.zeros(())
    for number in range(1, STEPS + 1):
        mark(f"batch {number} 0")
        samples = [
            {name: torch.as_tensor(value).clone() for name, value in on_host.items()}
            for on_host in batches[(number - 1) * accum : number * accum]
        ]
        if "advantages" in samples[0]:
            if hand_out is not None:
                hand_out(number, samples[0])
            score(samples[0])
        for micro, inputs in enumerate(samples, start=1):
            mark(f"forward {number} {micro}")
            begin(micro == accum)
            total += _training_step(model, objective, ask, inputs, backward, f"{number} {micro}")
        mark(f"optimizer {number} 0")
        step()
        mark(f"zero_grad {number} 0")
        zero_grad()
    mark(f"batch {STEPS + 1} 0")
    del samples, inputs


def train_in_script(
    model: Any, objective: Any, reference: Any, setup: Any, batches: Any,
    _: Any, backward: Any, step: Any, zero_grad: Any, __: Any,
) -> None:  # fmt: skip
    """The loop of a recipe, whose names keep what its loss returns until they are bound anew.

    Gradients are reduced in every micro-step.
    """
    import torch

    from memest.calibration.running.cpu_memory import mark

    def ask(**inputs: Any) -> Any:
        with objective.as_reference():
            return reference(**inputs)

    loss = outputs = inputs = None
    for number in range(1, STEPS + 1):
        for micro in range(1, setup.grad_accum + 1):
            mark(f"batch {number} {micro}")
            inputs = None
            on_host = batches[(number - 1) * setup.grad_accum + micro - 1]
            inputs = {name: torch.as_tensor(value).clone() for name, value in on_host.items()}
            mark(f"forward {number} {micro}")
            loss, outputs = objective.in_script(model, ask, inputs)
            if setup.grad_accum > 1:
                loss = loss / 1
            mark(f"backward {number} {micro}")
            backward(loss)
        mark(f"optimizer {number} 0")
        step()
        mark(f"zero_grad {number} 0")
        zero_grad()
    mark(f"batch {STEPS + 1} 0")
    del loss, outputs, inputs


def _training_step(
    model: Any, objective: Any, ask: Any, inputs: Any, backward: Any, at: str
) -> Any:  # fmt: skip
    from memest.calibration.running.cpu_memory import mark

    loss = objective.loss(model, ask, dict(inputs))
    mark(f"backward {at}")
    loss = loss / 1 / 1
    backward(loss)
    return loss.detach()
