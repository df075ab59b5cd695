"""``memest.stages``: the same run under every way to share it among GPUs, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.gpu_counts import split_gpu_count
from memest.config.life import Life
from memest.config.options import argument
from memest.config.parallelism import Distributed
from memest.config.setup import Dtype, Setup
from memest.errors import ConfigError, MemestError, MissingDependencyError
from memest.estimation.gpu_target import Place
from memest.estimation.kernel_notes import trained_dtype
from memest.estimation.notes import notes_of_each
from memest.estimation.run import Run
from memest.report.stages_result import OfficialRow, StageRow, StageTable
from memest.search.cost import Probe
from memest.search.profile import profile as make_profile
from memest.sharding.deepspeed_estimator import (
    ModelStates,
    zero2_model_states,
    zero3_model_states,
)
from memest.sharding.engine import num_elements
from memest.units import format_size

if TYPE_CHECKING:
    import torch

__all__ = ["stages"]

Progress = Callable[[str], None]

_VARIED = (
    "zero",
    "zero_settings",
    "fsdp",
    "offload_optimizer",
    "offload_param",
    "fsdp_offload",
    "fsdp_shard_size",
    "fsdp_version",
)
_OF_FSDP = ("fsdp_wrap", "transformer_layer_cls_to_wrap")
_ALONE = {"num_gpus": 1}


def stages(
    model: str | torch.nn.Module,
    *,
    setup: Setup | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    calibration: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> StageTable:
    """The same run on one GPU, under DDP, the stages of ZeRO and FSDP2.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration; ``options`` are another way to give it.
        gpus_per_node: for hybrid sharding and for DeepSpeed's own figures; None = all on one.
        gpu: decides kernels and verdicts.
        gpu_memory: as for :func:`memest.estimate`.
        device_context: as for :func:`memest.estimate`.
        calibration: as for :func:`memest.estimate`.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: as for :func:`memest.estimate`, ``inputs`` and ``loss`` of a module of one's own
            among them; ``num_gpus`` says how many share.

    Raises:
        ConfigError: one GPU, or options that the table varies itself.
        MemestError: as for :func:`memest.estimate`.
    """
    if options.get("sp", 1) != 1 or (setup is not None and setup.distributed.sp != 1):
        raise ConfigError(
            "--sp is DeepSpeed's, and memest stages lays its stages beside DDP and FSDP, which "
            "have nothing of the kind: leave it out, or compare them by memest sweep with "
            "--over zero=1,2,3."
        )
    gpu, options = split_gpu_count(gpu, setup, options)
    place = Place(
        gpu=gpu,
        gpu_memory=gpu_memory,
        device_context=device_context,
        calibration=argument("calibration", calibration, options),
    )
    ddp_options = {name: options.pop(name) for name in list(options) if name.startswith("ddp_")}
    fsdp_options = {name: options.pop(name) for name in list(options) if name in _OF_FSDP}
    multi_gpu_options = {name: options.pop(name) for name in list(options) if name == "nccl_memory"}
    base = make_profile(
        model,
        setup,
        trust_remote_code=trust_remote_code,
        progress=progress,
        **options,
    )
    distributed = base.setup.distributed
    _check(distributed, gpus_per_node)
    node_size = gpus_per_node or distributed.num_gpus
    life = base.setup.life or Life()
    if life.processes_per_node is None:
        life = replace(life, processes_per_node=gpus_per_node)
    probe = Probe(base, place)
    rows: list[StageRow] = []
    runs: dict[str, Run] = {}
    refusal: MemestError | None = None
    for name, changes in _variants(distributed, node_size):
        extra_options = {} if changes == _ALONE else dict(multi_gpu_options)
        if base.setup.cast_weights and changes.keys() & {"zero", "fsdp"}:
            extra_options["cast_weights"] = ()
        if "fsdp" in changes:
            extra_options |= fsdp_options
        elif not changes:
            extra_options |= ddp_options
        changes |= extra_options
        try:
            estimate = probe.estimate(**changes)
            stage_run = base.run(base.setup_for(**changes), gpu=gpu)
        except (ConfigError, MissingDependencyError) as error:
            refusal = refusal or error
            rows.append(
                StageRow(
                    name=name, options=tuple(changes.items()), estimate=None, refused=str(error)
                )
            )
            continue
        runs[name] = stage_run
        host = base.life(stage_run, life, estimate.peak.allocated_bytes)
        rows.append(
            StageRow(name=name, options=tuple(changes.items()), estimate=estimate, host=host)
        )
    if not runs:
        assert refusal is not None
        raise refusal
    num_parameters, largest = _counts(next(iter(runs.values())))
    notes = _unlike(runs)
    if base.setup.cast_weights:
        casts = ", ".join(base.setup.cast_weights)
        notes.append(
            f"--cast-weights {casts} is of one GPU and DDP: who shards weights settles their dtype"
        )
    notes += notes_of_each({row.name: row.estimate.notes for row in rows if row.estimate})
    return StageTable(
        model=_id(rows),
        num_gpus=distributed.num_gpus,
        parameters=num_parameters,
        rows=tuple(rows),
        official=tuple(_official(rows, num_parameters, largest, distributed.num_gpus, node_size)),
        notes=tuple(notes),
    )


def _check(distributed: Distributed, gpus_per_node: int | None) -> None:
    if distributed.num_gpus == 1:
        raise ConfigError("memest stages shares a run among GPUs: add --num-gpus 8.")
    names = [name for name in _VARIED if getattr(distributed, name) != getattr(Distributed(), name)]
    if names:
        flag = {"zero_settings": "deepspeed"}.get(names[0], names[0]).replace("_", "-")
        raise ConfigError(
            f"--{flag} is one of the things that memest stages varies: leave it out, or ask "
            "`memest estimate` for that run alone."
        )
    if gpus_per_node is not None and not 1 <= gpus_per_node <= distributed.num_gpus:
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node} is out of range: it must be 1 to "
            f"{distributed.num_gpus}, "
            "the GPUs of --num-gpus."
        )
    if gpus_per_node is not None and distributed.num_gpus % gpus_per_node:
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node} does not divide the {distributed.num_gpus} GPUs of "
            "--num-gpus."
        )


def _variants(distributed: Distributed, node_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    degrees = {"TP": distributed.tp, "EP": distributed.ep, "PP": distributed.pp}
    label = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    yield "one GPU", dict(_ALONE)
    yield label if label and distributed.data_ranks == 1 else "DDP", {}
    yield "ZeRO-1", {"zero": 1}
    yield "ZeRO-2", {"zero": 2}
    yield "ZeRO-2, optim. off", {"zero": 2, "offload_optimizer": True}
    yield "ZeRO-3", {"zero": 3}
    yield "ZeRO-3, optim. off", {"zero": 3, "offload_optimizer": True}
    yield "ZeRO-3, all off", {"zero": 3, "offload_optimizer": True, "offload_param": True}
    yield "FSDP2 grad_op", {"fsdp": "shard_grad_op"}
    yield "FSDP2 full", {"fsdp": "full_shard"}
    if 1 < node_size < distributed.num_gpus:
        yield "FSDP2 hybrid", {"fsdp": "full_shard", "fsdp_shard_size": node_size}
    yield "FSDP1 full", {"fsdp": "full_shard", "fsdp_version": 1}
    yield "FSDP2 full, off", {"fsdp": "full_shard", "fsdp_offload": True}


def _unlike(runs: Mapping[str, Run]) -> list[str]:
    """What rows differ by besides sharing: whether what trains is held in float32."""
    as_loaded, in_full = [], []
    for name, run in runs.items():
        dtypes = {trained_dtype(weight, run.setup) for weight in run.weights if weight.trains}
        if not dtypes & {Dtype.FLOAT32.value}:
            as_loaded.append(name)
        elif run.setup.computes_in_half:
            in_full.append(name)
    if not (as_loaded and in_full):
        return []
    others = "; ".join(in_full)
    if len(as_loaded) + len(in_full) == len(runs):
        others = "all others"
    text = (
        f"{'; '.join(as_loaded)}: weights and optimizer states stay in half precision, as the "
        f"model is loaded. {others}: both are in float32, as DeepSpeed and accelerate hold what "
        "trains under mixed precision, which may take more than sharing saves. "
    )
    return [f"{text}--dtype float32 compares the same training."]


def _id(rows: list[StageRow]) -> str:
    return next(row.estimate.model.id for row in rows if row.estimate is not None)


def _counts(run: Run) -> tuple[int, int]:
    """Parameters of the model, and of the module that has the most itself."""
    sizes: dict[str, int] = {}
    for weight in run.weights:
        module = weight.name.rpartition(".")[0]
        sizes[module] = sizes.get(module, 0) + num_elements(weight.shape)
    return sum(sizes.values()), max(sizes.values(), default=0)


def _official(
    rows: list[StageRow], parameters: int, largest: int, num_gpus: int, node_size: int
) -> Iterator[OfficialRow]:
    for row in rows:
        options = dict(row.options)
        offloads = options.get("offload_optimizer", False)
        nodes = num_gpus // node_size
        if options.get("zero") == 2:
            states = zero2_model_states(
                parameters, gpus_per_node=node_size, nodes=nodes, offloads_optimizer=offloads
            )
        elif options.get("zero") == 3:
            states = zero3_model_states(
                parameters,
                largest,
                gpus_per_node=node_size,
                nodes=nodes,
                offloads_optimizer=offloads,
                offloads_params=options.get("offload_param", False),
            )
        else:
            continue
        yield OfficialRow(name=row.name, states=states, difference=_difference(row, states))


def _difference(row: StageRow, states: ModelStates) -> str:
    """What makes the two figures differ, in numbers."""
    if row.estimate is None:
        return ""
    columns = row.columns
    state_bytes = sum(columns[name] for name in ("parameters", "gradients", "optimizer"))
    other_bytes = row.estimate.peak.device_bytes - state_bytes
    delta = state_bytes - states.gpu_bytes
    comparison = "more" if delta >= 0 else "less"
    phase = row.estimate.peak_at.phase.value
    return (
        f"states alive at the peak ({phase}) are {format_size(abs(delta))} {comparison} than its "
        f"{format_size(states.gpu_bytes)}; {format_size(other_bytes)} of buffers and gathered "
        "parameters, activations, cache, context and NCCL are not in its table"
    )
