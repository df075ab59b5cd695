"""Ranks of DDP (real ones under gloo) and of FSDP (one, of PyTorch's fake group), and predicted."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.rank_processes import STEPS, Marks, join_group, measure_rank, real_ranks


def real_rank(case: dict[str, Any]) -> Any:
    """What rank 0 of a case measured: a ``CpuRun``.

    Args:
        case: ``model``, ``ranks``, and options of ``Setup`` and of ``Distributed`` in ``setup`` and
            ``spread``.
    """
    if case.get("spread", {}).get("fsdp"):
        return real_ranks(_be_fsdp_rank, case)[0]
    return real_ranks(_be_ddp_rank, case, range(case["ranks"]))[0]


def predicted_rank(case: dict[str, Any], behind: Any = None) -> Any:
    """The stream of a rank as memest makes it, with the CPU's operators and no workspaces.

    Args:
        case: as for :func:`real_rank`.
        behind: puts something behind the training: is given its stream and the traced model.
    """
    import torch

    from memest.profiles.axes import traced_setup
    from memest.profiles.pieces import Pieces, splice
    from memest.profiles.stream import Stream, lay_out
    from memest.sharding.rank import rank_stream, update_setup, updated_weights
    from memest.trace.inputs.batch import realise
    from memest.trace.losses.loss import loss_for
    from memest.trace.losses.objective import objective_of
    from memest.trace.model.adapters import cast_parameters
    from memest.trace.parallel.sequence_parallel import drop_attention_mask
    from memest.trace.parallel.ulysses import shared_sequence
    from memest.trace.session import rank_model
    from memest.trace.training import plan_to_compose, trace_training, trace_updates
    from support.cases import GPU, twin

    setup = setup_of_case(case)
    trace_setup = traced_setup(setup)
    options = {
        **case.get("setup", {}),
        "precision": trace_setup.precision,
        "dtype": trace_setup.dtype,
    }
    twins = twin(case["model"], runs=False, distributed=trace_setup.distributed, **options)
    plans = drop_attention_mask(plans_of(twins), setup.distributed)
    if trace_setup.distributed.in_half:
        half = twins.built_model.dtype
        cast_parameters(
            twins.built_model.trained_model, half if half.itemsize == 2 else torch.bfloat16
        )
    with (
        loss_of_setup(twins.built_model.model, setup),
        shared_sequence(twins.built_model.model, twins.setup, nccl=False) as shared_batches,
        rank_model(twins.built_model.trained_model, twins.setup) as model,
        objective_of(model, setup) as objective,
    ):
        trace = trace_training(
            model,
            twins.setup,
            make_batch=lambda: realise(plans),
            loss_of=loss_for(twins.built_model),
            gpu=GPU,
            operators="cpu",
            plan=plan_to_compose(setup),
            loading=twins.built_model.loading,
            ulysses_batches=shared_batches,
            objective=objective,
        )
    # the Trainer's groups, or its accumulation, where a case has them
    as_trainer = case.get("two_groups") or case.get("as_trainer")
    whose = replace(setup, loop="trainer") if as_trainer else setup
    updates = None
    if setup.distributed.updates_on_device:
        updates = trace_updates(
            updated_weights(trace.weights, whose, trace.landmarks), update_setup(setup), GPU
        )
    whole_trace = splice(trace, updates)
    places: dict[int, int] = {}
    numbered_trace = replace(whole_trace)
    numbered_trace.sizes = [places.setdefault(size, len(places)) for size in whole_trace.sizes]
    course = lay_out(
        numbered_trace, ((),) * len(whole_trace.calls), len(places), num_steps=STEPS,
        grad_accum=setup.grad_accum, pieces=Pieces(numbered_trace), cues=True,
    )  # fmt: skip
    table = list(places)
    stream = Stream.of(course, [table[place] for place in course.places], 0)
    if behind is not None:
        stream = behind(stream, twins)
    return rank_stream(stream, whose, trace.weights, trace.landmarks, setup.grad_accum)


def plans_of(twins: Any) -> Any:
    """The tensors of a micro-batch: those that the model takes, or what a method makes of them."""
    from memest.trace.inputs.batch import plan_batch
    from memest.trace.inputs.completions import batch_of_completions
    from memest.trace.inputs.pairs import batch_of_pairs

    if twins.setup.method.is_supervised:
        return twins.plans
    if twins.setup.method.generates:
        return batch_of_completions(plan_batch(twins.built_model, twins.setup)[0], twins.setup)
    return batch_of_pairs(lambda setup: plan_batch(twins.built_model, setup)[0], twins.setup)


def as_run(stream: Any) -> Any:
    """A stream in the form in which runs on the CPU are measured; of the load, what wrappers make.

    Whole weights do not count where DDP leaves them as they are; shards do.
    """
    from memest.calibration.running.cpu_memory import CpuRun, MemoryEvent, PhaseBytes
    from memest.events import CAST, Phase

    run = CpuRun()
    now = peak = alive = next_mark = 0
    phase = None
    loading = True
    for index, event in enumerate(stream.events):
        while next_mark < len(stream.marks) and stream.mark_positions[next_mark] <= index:
            mark = stream.marks[next_mark]
            next_mark += 1
            if phase is not None:
                run.phases.append(PhaseBytes(phase, alive, peak))
            phase = f"{mark.phase} {mark.step} {mark.micro_step}"
            alive = peak = now
            loading = mark.phase is Phase.LOAD
        number = event if event >= 0 else ~event
        label = stream.label_names[stream.labels[number]]
        if loading and not label.startswith(("ddp:", "fsdp:", "zero:")) and label != CAST:
            continue
        size = stream.sizes[number] * (1 if event >= 0 else -1)
        now += size
        peak = max(peak, now)
        module = stream.module_names[stream.modules[number]]
        run.events.append(MemoryEvent(size, f"{module}/{label}", phase, number))
    run.phases.append(PhaseBytes(phase, alive, peak))
    return run


def of_steps(run: Any) -> Any:
    """The same without the load, and without what only the CPU's kernels take.

    On a CPU ``chunk_cat`` pads and joins with tensors of its own, and a sum of two dtypes is made
    by way of copies; CUDA has one kernel for each.
    """
    run.events = [
        event
        for event in run.events
        if not event.phase.startswith("load")
        and "chunk_cat" not in event.op
        and "aten::add_/PythonSubclass/aten::add_" not in event.op
    ]
    return run


def freed_from_before(run: Any) -> int:
    """Bytes that were there before a run was measured, and went while it loaded."""
    alive, freed_bytes = set(), 0
    for event in run.events:
        if event.phase.startswith("load"):
            if event.nbytes > 0:
                alive.add(event.key)
            elif event.key not in alive:
                freed_bytes -= event.nbytes
            else:
                alive.discard(event.key)
    return freed_bytes


def without_updates(run: Any) -> Any:
    """The same without the optimizer, whose foreach kernels copy on a CPU."""
    run.events = [e for e in run.events if not e.phase.startswith(("load", "optimizer"))]
    return run


def setup_of_case(case: dict[str, Any]) -> Any:
    """The setup of a case, as it is asked for."""
    from memest.config.parallelism import Distributed
    from support.cases import setup_of

    distributed = Distributed(num_gpus=case["ranks"], **case.get("spread", {}))
    return setup_of(case["model"], distributed=distributed, **case.get("setup", {}))


def loss_of_setup(model: Any, setup: Any) -> Any:
    """Another library's loss or kernels in place of the model's own, where a setup names them."""
    from memest.trace.losses.fused_loss import apply_fused_loss, apply_liger
    from support.cases import GPU

    if setup.use_liger_kernel:
        return apply_liger(model, GPU)
    if not setup.fused_loss:
        return nullcontext()
    return apply_fused_loss(model, GPU, setup.fused_loss)


def launch_nothing_on_the_cpu() -> None:
    """In a real rank Liger's Python takes the CPU for CUDA: it allocates, and launches nothing.

    What it reads from tensors that no kernel has written is any number; no size depends on one.
    """
    from memest.trace.cuda.no_triton import Library
    from memest.trace.losses import fused_loss

    replacements = tuple(
        (theirs, ours.replace('"meta"', '"cpu"')) for theirs, ours in fused_loss._LIGER.replacements
    )
    fused_loss._LIGER = Library(
        fused_loss._LIGER.name, fused_loss._LIGER.rewritten_prefix, replacements
    )


def make_optimizer_of(setup: Any) -> Any:
    from memest.trace.optimizers.torch import make_optimizer
    from memest.trace.recorder import Recorder

    return lambda model: make_optimizer(model, setup, Recorder(), (2, 13))


def _be_ddp_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.cases import twin

    join_group("gloo", rank, case["ranks"], meeting)
    torch.manual_seed(0)
    distributed = setup_of_case(case).distributed
    twins = twin(case["model"], distributed=distributed, **case.get("setup", {}))
    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def run() -> None:
        mark("load 0 0")
        model = torch.nn.parallel.DistributedDataParallel(
            twins.real,
            bucket_cap_mb=distributed.ddp_bucket_cap_mb,
            find_unused_parameters=setup.finds_unused_parameters,
            gradient_as_bucket_view=distributed.ddp_gradient_as_bucket_view,
        )
        with loss_of_setup(twins.real, setup):
            train(
                model, setup, batches, make_optimizer_of(setup), loss_for(twins.built_model),
                torch.device("cpu"), Marks(),
            )  # fmt: skip

    return measure_rank(run, rank == 0)


def _be_fsdp_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.cases import twin

    join_group("fake", rank, case["ranks"], meeting)
    torch.manual_seed(0)
    setup = setup_of_case(case)
    plain = setup.loop == "plain"
    options = dict(case.get("setup", {}))
    if not plain:
        options.pop("precision", None)  # that is the policy's, not autocast's
    twins = twin(case["model"], distributed=setup.distributed, **options)
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)
    loss_of, optimizer = loss_for(twins.built_model), make_optimizer_of(twins.setup)
    launch_nothing_on_the_cpu()
    gc.collect()  # what the quantised model was made of

    def run() -> None:
        with loss_of_setup(twins.real, setup):
            run_in()

    def run_in() -> None:
        mark("load 0 0")
        if setup.distributed.fsdp_version == 1:
            model = apply_fsdp1(twins.real, setup, reduces=case.get("reduces", ""))
            if plain:
                train(model, twins.setup, batches, optimizer, loss_of, torch.device("cpu"), Marks())
            else:
                accelerate_loop(model, setup, batches, optimizer, loss_of)
        elif plain:
            mesh = mesh_of(setup, ("replicate", "shard"))
            reshards = setup.distributed.fsdp == "full_shard"
            model = apply_fsdp2(twins.real, mesh, reshards=reshards)
            train(model, twins.setup, batches, optimizer, loss_of, torch.device("cpu"), Marks())
        else:
            accelerate_loop(prepare_fsdp2(twins.real, setup), setup, batches, optimizer, loss_of)

    return measure_rank(run)


MESH_NAMES = ("dp_replicate", "dp_shard_cp")
"""As accelerate calls the dimensions of its mesh."""


def dims_of(setup: Any, names: tuple[str, str]) -> tuple[str, ...]:
    """The dimensions that the mesh of a run has."""
    return names if setup.distributed.num_copies > 1 else names[1:]


def mesh_of(setup: Any, names: tuple[str, str]) -> Any:
    from torch.distributed import init_device_mesh

    shape = (setup.distributed.num_copies, setup.distributed.shard_ranks)
    dims = dims_of(setup, names)
    return init_device_mesh("cpu", shape[-len(dims) :], mesh_dim_names=dims)


def apply_fsdp2(
    model: Any, mesh: Any, names: Any = None, *, reshards: bool = True, options: Any = None
) -> Any:
    """PyTorch's recipe for FSDP2: layers, and the rest with the root.

    Args:
        model: what is sharded, in place.
        mesh: the ranks that have a shard each.
        names: classes of the layers; the model's own if None.
        reshards: whether layers give back what they gathered after their forward.
        options: a ``Distributed`` that may name a policy, and units at the ends of the model, as
            torchtitan has both.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy: dict[str, Any] = {}
    if options is not None and options.fsdp_mixed_precision:
        policy["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    layers = (model._no_split_modules if names is None else names) or ()
    for block in list(model.modules()):
        if type(block).__name__ in layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards, **policy)
    if options is not None and options.fsdp_wrap_ends:
        base, head = model.base_model, model.get_output_embeddings()
        fully_shard(base.embed_tokens, mesh=mesh, reshard_after_forward=reshards, **policy)
        fully_shard([base.norm, head], mesh=mesh, reshard_after_forward=False, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def apply_fsdp1(model: Any, setup: Any, device: str = "cpu", *, reduces: str = "") -> Any:
    """FSDP1, as accelerate's ``prepare_model`` wraps and upcasts, or as PyTorch's tutorial does.

    Args:
        model: what is sharded.
        setup: the run.
        device: where it lies.
        reduces: the dtype in which gradients are reduced, where it is not the one that computes.
    """
    import functools
    from types import MethodType

    import torch
    from accelerate.utils import convert_outputs_to_fp32
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    distributed, plain = setup.distributed, setup.loop == "plain"
    names = set(model._no_split_modules or ())
    blocks = {type(module) for module in model.modules() if type(module).__name__ in names}
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision.value)
    mixed_precision = None
    if half is not None and (not plain or distributed.fsdp_mixed_precision):
        reduce_dtype = getattr(torch, reduces) if reduces else half
        mixed_precision = MixedPrecision(
            param_dtype=half, reduce_dtype=reduce_dtype, buffer_dtype=half
        )
    prefetch = distributed.fsdp_backward_prefetch
    if prefetch is None:
        prefetch = "backward_pre" if plain else "no_prefetch"
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
    if setup.adapter is not None:
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)
    if mixed_precision is not None and not plain:
        # Accelerator.prepare_model does so before it wraps
        own = model.forward
        region = torch.autocast("cpu", dtype=half)(getattr(own, "__func__", own))
        asks = torch.is_autocast_enabled  # of CUDA where nobody says which
        torch.is_autocast_enabled = lambda kind="cpu": asks(kind)
        torch.get_autocast_dtype = lambda kind="cpu": half
        region = convert_outputs_to_fp32(region)
        model.forward = MethodType(region, model) if hasattr(own, "__func__") else region
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[distributed.fsdp.value.upper()],
        auto_wrap_policy=policy,
        mixed_precision=mixed_precision,
        backward_prefetch={
            "backward_pre": BackwardPrefetch.BACKWARD_PRE,
            "backward_post": BackwardPrefetch.BACKWARD_POST,
        }.get(str(prefetch)),
        use_orig_params=setup.keeps_parameters,
        cpu_offload=CPUOffload(offload_params=True) if distributed.fsdp_offload else None,
        device_id=torch.device(device),
    )
    if mixed_precision is not None and not plain:
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if unit._has_params and unit._flat_param.requires_grad:
                unit._flat_param.data = unit._flat_param.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
    return model


def prepare_fsdp2(model: Any, setup: Any, mesh: Any = None) -> Any:
    """accelerate's own preparation."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=setup.distributed.fsdp.value == "full_shard",
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    precision = "no" if setup.precision == "fp32" else setup.precision.value
    if precision != "no":
        plugin.set_mixed_precision(precision)
    names = MESH_NAMES
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=precision, is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh=mesh_of(setup, names) if mesh is None else {dims_of(setup, names): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=list(dims_of(setup, names))),
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def accelerate_loop(
    model: Any, setup: Any, batches: Any, make_optimizer: Any, loss_of: Any,
    then: Any = None, waits: bool = True,
) -> None:  # fmt: skip
    """The loop of accelerate's documentation; an ``Accelerator`` wants a GPU for FSDP.

    ``then`` is what follows, while the loop's names are still bound; what is reduced ``waits`` for
    the last micro-batch.
    """
    import torch

    from memest.calibration.running.cpu_memory import mark

    optimizer, accum, batch = make_optimizer(model), setup.grad_accum, None
    mark("batch 1 1")
    for index, on_host in enumerate(batches):
        step, micro = index // accum + 1, index % accum + 1
        batch = {name: torch.as_tensor(value).clone() for name, value in on_host.items()}
        mark(f"forward {step} {micro}")
        context = nullcontext()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro == accum or not waits)
        elif micro < accum:
            context = model.no_sync()
        with context:
            outputs = model(**batch)
            loss = loss_of(outputs, batch)
            mark(f"backward {step} {micro}")
            loss = loss / accum
            loss.backward()
        if micro == accum:
            mark(f"optimizer {step} 0")
            optimizer.step()
            mark(f"zero_grad {step} 0")
            optimizer.zero_grad()
        mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")
    if then is not None:
        then()
    del batch, outputs
