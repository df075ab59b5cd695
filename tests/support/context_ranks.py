"""A real rank of context parallelism: torch's own ring attention, on the CPU.

The CPU has its flash kernel by another name than ring attention calls
(``_scaled_dot_product_flash_attention``): it is registered here under that name. The process group
is PyTorch's fake one, which moves no data, or gloo's with real processes.
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, Marks, join_group, measure_rank, real_ranks
from support.ranks import apply_fsdp2


def real_rank(case: dict[str, Any]) -> Any:
    """What a rank of a case measured, a ``CpuRun``.

    Args:
        case: ``model``, ``ways`` that share a sequence, ``rotate``, whether FSDP2 ``shards``,
            whether ``gloo`` connects real processes, options of ``Setup`` in ``setup``, and
            ``evaluation`` as for ``evaluation_ranks.real_evaluation``.
    """
    fullest = _rank(case)
    ranks = range(case["ways"]) if case.get("gloo") else (fullest,)
    return real_ranks(_be_rank, case, ranks)[fullest]


def _rank(case: dict[str, Any]) -> int:
    from memest.trace.parallel.context_parallel import fullest_rank

    return fullest_rank(case["ways"])


def predicted(case: dict[str, Any]) -> Any:
    """The stream of the rank that is traced, with the CPU's operators and no workspaces."""
    from dataclasses import replace

    from memest.profiles.axes import traced_setup
    from memest.profiles.pieces import splice
    from memest.sharding.rank import rank_stream, update_setup, updated_weights
    from memest.trace.cuda import cpu_ops
    from memest.trace.inputs.batch import realise
    from memest.trace.losses.loss import loss_for
    from memest.trace.parallel.context_parallel import sequence_split
    from memest.trace.training import plan_to_compose, trace_training, trace_updates
    from support.cases import GPU, setup_of, twin
    from support.evaluation_ranks import traced_evaluation, with_tail
    from support.streams import make_stream

    setup = setup_of(case["model"], distributed=_distributed(case), **_options(case))
    trace_setup = traced_setup(setup)
    options = {**_options(case), "precision": trace_setup.precision, "dtype": trace_setup.dtype}
    twins = twin(case["model"], runs=False, distributed=trace_setup.distributed, **options)
    with (
        sequence_split(twins.built_model.model, trace_setup) as split,
        mock.patch.object(cpu_ops, "_attention", _flash),
    ):
        trace = trace_training(
            twins.built_model.model, twins.setup, make_batch=lambda: realise(twins.plans),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu",
            plan=plan_to_compose(setup), split=split,
        )  # fmt: skip
    # without shards the optimizer works on whole weights
    alone = setup if case.get("shards") else replace(setup, distributed=_alone())
    weights = updated_weights(trace.weights, alone, trace.landmarks)
    whole_trace = splice(trace, trace_updates(weights, update_setup(alone), GPU))
    whole_trace.calls = [replace(call, op="none") for call in whole_trace.calls]
    accum = setup.grad_accum
    stream = make_stream(whole_trace, GPU, num_steps=STEPS, grad_accum=accum, cues=True)
    if "evaluation" in case:
        with (
            sequence_split(twins.built_model.model, replace(trace_setup, loop="trainer")) as split,
            mock.patch.object(cpu_ops, "_attention", _flash),
        ):
            tail = traced_evaluation(twins.built_model.model, twins, _evaluation_case(case), split)
        stream = with_tail(stream, tail)
    if not case.get("shards"):
        return stream
    return rank_stream(stream, setup, trace.weights, trace.landmarks, accum)


def _evaluation_case(case: dict[str, Any]) -> dict[str, Any]:
    """A case in the words of ``evaluation_ranks``."""
    return {**case, "ranks": case["ways"], "spread": {"cp": case["ways"]}}


def _alone() -> Any:
    from memest.config.parallelism import ONE_GPU

    return ONE_GPU


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {"optim": "adamw_torch", "attn_implementation": "sdpa", **case.get("setup", {})}


def _distributed(case: dict[str, Any]) -> Any:
    from memest.config.parallelism import Distributed

    ways = case["ways"]
    return Distributed(
        num_gpus=ways, cp=ways, cp_rotate=case.get("rotate", "allgather"), fsdp="full_shard"
    )


def _flash(
    query: Any, key: Any, value: Any, mask: Any = None, p: Any = 0.0, causal: Any = False,
    *, scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """What ``scaled_dot_product_attention`` runs where the flash kernel is taken."""
    import torch

    assert mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, p, causal, False, scale=scale
    )[0]


@contextlib.contextmanager
def flash_by_its_other_name() -> Any:
    """The CPU's flash kernel under the name of CUDA's."""
    import torch

    aten = torch.ops.aten

    def forward(
        query: Any, key: Any, value: Any, p: float = 0.0, causal: bool = False,
        debug: bool = False, *, scale: Any = None,
    ) -> Any:  # fmt: skip
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, p, causal, scale=scale
        )
        state = torch.empty(2, dtype=torch.uint64)
        rest = torch.empty((), dtype=torch.uint64), torch.empty(0)
        return out, sums, None, None, query.shape[2], key.shape[2], state, *rest

    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, _q: Any, _k: Any,
        _max_q: int, _max_k: int, p: float, causal: bool, _seed: Any, _offset: Any, *,
        scale: Any = None,
    ) -> Any:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, p, causal, scale=scale
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    library.impl("scaled_dot_product_attention", _flash, "AutogradCPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def keep_until_wait() -> Any:
    """NCCL's shelf (``TensorShelf``), which the fake process group lacks: what is sent stays."""
    from torch.distributed import _functional_collectives as collectives

    sent_tensors: dict[int, Any] = {}

    def keeping(real: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            out = real(tensor, *args, **kwargs)
            sent_tensors[id(out.elem)] = tensor
            return out

        return call

    wait = collectives.AsyncCollectiveTensor.wait

    def wait_and_drop(tensor: Any) -> Any:
        out = wait(tensor)
        sent_tensors.pop(id(tensor.elem), None)
        return out

    with (
        mock.patch.object(collectives, "all_gather_single", keeping(collectives.all_gather_single)),
        mock.patch.object(collectives, "permute_tensor", keeping(collectives.permute_tensor)),
        mock.patch.object(collectives.AsyncCollectiveTensor, "wait", wait_and_drop),
    ):
        yield


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.cases import twin
    from support.evaluation_ranks import environment, evaluate

    torch.manual_seed(0)
    ways = case["ways"]
    if "evaluation" in case:
        environment(_evaluation_case(case), rank)
    twins = twin(case["model"], distributed=_distributed(case), **_options(case))
    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)
    join_group("gloo" if case.get("gloo") else "fake", rank, ways, meeting)
    mesh = init_device_mesh("cpu", (ways,), mesh_dim_names=("cp",))
    _attention.set_rotate_method(case.get("rotate", "allgather"))
    _attach_context_parallel_hooks(twins.real)
    context = partial(_attention.context_parallel, mesh=mesh)
    loop = _with_trainer if setup.loop == "trainer" else _script

    def then(model: Any) -> None:
        if "evaluation" in case:
            evaluate(model, twins, _evaluation_case(case), context)

    def run() -> None:
        mark("load 0 0")
        model = apply_fsdp2(twins.real, mesh) if case.get("shards") else twins.real
        loop(
            model, setup, batches, loss_for(twins.built_model), context, Marks(),
            lambda: then(model),
        )  # fmt: skip

    shelf = contextlib.nullcontext() if case.get("gloo") else keep_until_wait()
    with flash_by_its_other_name(), shelf:
        return measure_rank(run, rank == _rank(case))


def _script(
    model: Any, setup: Any, batches: Any, loss_of: Any, context: Any, watch: Any, then: Any
) -> None:  # fmt: skip
    """A tutorial's loop around ``context_parallel``; the collator shifts labels."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    accum, mark = setup.grad_accum, watch.mark
    mark("batch", 1, 1)
    for index, host_batch in enumerate(batches):
        step, micro = index // accum + 1, index % accum + 1
        batch = None
        batch = {name: value.clone() for name, value in host_batch.items()}
        batch["shift_labels"] = torch.nn.functional.pad(host_batch["labels"], (0, 1), value=-100)[
            :, 1:
        ].clone(memory_format=torch.contiguous_format)
        ids = host_batch["input_ids"]
        batch["position_ids"] = (
            torch.arange(ids.shape[1])
            .expand(ids.shape)
            .clone(memory_format=torch.contiguous_format)
        )
        buffers = list(batch.values())
        with context(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            mark("forward", step, micro)
            outputs = model(**batch)
            loss = loss_of(outputs, batch)
            if accum > 1:
                loss = loss / accum
            mark("backward", step, micro)
            loss.backward()
        del buffers
        if micro == accum:
            mark("optimizer", step, 0)
            optimizer.step()
            mark("zero_grad", step, 0)
            optimizer.zero_grad()
            watch.step_done(step)
        mark("batch", (index + 1) // accum + 1, (index + 1) % accum + 1)
    then()


def _with_trainer(
    model: Any, setup: Any, batches: Any, loss_of: Any, context: Any, watch: Any, then: Any
) -> None:  # fmt: skip
    """Transformers' own Trainer, whose accelerator is told of context parallelism."""
    import torch
    from accelerate import Accelerator
    from transformers import Trainer

    from memest.calibration.running.loops import train

    parallelism_config = SimpleNamespace(
        cp_enabled=True, cp_backend="torch", cp_size=2, tp_size=1, sp_size=1, sp_enabled=False,
        sp_backend="", tp_enabled=False,
    )  # fmt: skip
    real = Trainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.accelerator._cp_context = context
        with mock.patch.object(
            Accelerator, "parallelism_config", property(lambda _: parallelism_config)
        ):
            return real(self, *args, **kwargs)

    with mock.patch.object(Trainer, "training_step", training_step):
        train(
            model, setup, batches, lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
            loss_of, torch.device("cpu"), watch,
        )  # fmt: skip
    then()
