"""A run around its steps: what the rules of host memory say of it, and its peaks on the GPU.

What saving and resuming need on the GPU is appended to the stream of the run, so the peaks, the
verdict and the largest batch are those of all of it (:mod:`memest.profiles.transient`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memest.config.data_loading import DataLoading
from memest.config.kinds import Dtype, Strategy
from memest.config.life import Life, LifePart
from memest.config.quantization import Format
from memest.config.setup import Setup
from memest.estimation.batches import batch_sizes
from memest.estimation.breakdown import alive_at_end
from memest.estimation.checkpoint_rules import resuming, saving
from memest.estimation.host_facts import HostFacts, HostPart, HostRule, Unpriced, WeightFacts
from memest.estimation.host_rules import loading, training
from memest.estimation.pipeline import PipelineRun
from memest.estimation.run import Run
from memest.events import Category, Phase, Weight
from memest.profiles.stream import Stream
from memest.report.life_result import HostShare, HostVerdict, LifePhase, RunLife
from memest.units import GIB, format_size
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["config_dtype", "run_life", "with_life"]

_STATES = (Category.OPTIMIZER_STATES, Category.MASTER_WEIGHTS)
_OF_STEPS = (
    Category.ACTIVATIONS,
    Category.TEMPORARIES,
    Category.WORKSPACES,
    Category.INPUTS,
    Category.GRADIENTS,
)
"""What is there behind a step, and not before the first one."""
_LITTLE = 2 * GIB
"""Host memory of a process below which what is not counted may decide: a rule of thumb."""
_MASTER_BYTES = 4
_ADAM_STATES = 2
_NOT_FROM_CHECKPOINT = "it is no model of transformers: how it is loaded and saved is its script's"

_NOT_COUNTED = (
    "Python, the libraries, and host memory of CUDA itself: for every process",
    "page cache of mapped files: the kernel takes it back where memory is short",
    "the dataset, and the processes that load batches",
)
_PINNED = "what page-locked blocks are rounded up to: the next power of two for each tensor"


@dataclass(frozen=True, slots=True)
class _Priced:
    """The phases of a run with their rules.

    Attributes:
        facts: of the run.
        rules: by the name of the phase.
        saved: bytes of the GPU's tensors while a checkpoint is saved; 0 where it is not priced.
        resumed: the same while one is resumed from.
        alive: bytes that are alive behind the last step.
    """

    facts: HostFacts
    rules: Mapping[str, HostRule | Unpriced]
    saved: int
    resumed: int
    alive: int


def with_life(run: Run, config: Any) -> Run:
    """The run with what saving and resuming put on the GPU; itself where neither is asked for.

    Args:
        run: a run.
        config: of its model.
    """
    life = run.setup.life
    parts = () if life is None else life.parts
    if LifePart.SAVE not in parts and LifePart.RESUME not in parts:
        return run
    if isinstance(run, PipelineRun):
        return run
    priced = _priced(run, config)
    more = [
        (phase, size - priced.alive)
        for phase, size in ((Phase.SAVE, priced.saved), (Phase.RESUME, priced.resumed))
        if size > priced.alive
    ]
    return replace(run, around=tuple(more)) if more else run


def run_life(run: Run, config: Any, steps_peak: int) -> RunLife:
    """What to say of host memory and of the GPU around the steps.

    Args:
        run: a run.
        config: of its model.
        steps_peak: the allocated peak of the steps alone.
    """
    life = run.setup.life or Life()
    processes = life.node_processes(run.setup.distributed.num_gpus)
    if isinstance(run, PipelineRun):
        why = "a pipeline's stages are loaded and saved as its script does"
        names = ("loading", "training", *_asked(life))
        phases = tuple(LifePhase(phase=name, not_priced=why) for name in names)
        return _verdict(life, phases, processes, (), offloads=False)
    priced = _priced(run, config)
    gpu_bytes = {"saving": priced.saved, "resuming": priced.resumed}
    phases = tuple(
        _phase(name, rule, processes, gpu_bytes.get(name)) for name, rule in priced.rules.items()
    )
    gpu = tuple(_gpu_sentence(phase, steps_peak) for phase in phases if phase.gpu_bytes is not None)
    return _verdict(life, phases, processes, gpu, offloads=priced.facts.offloaded > 0)


def _asked(life: Life) -> tuple[str, ...]:
    names = {LifePart.SAVE: "saving", LifePart.RESUME: "resuming"}
    return tuple(name for part, name in names.items() if part in life.parts)


def _gpu_sentence(phase: LifePhase, steps_peak: int) -> str:
    size, peak = format_size(phase.gpu_bytes or 0), format_size(steps_peak)
    if (phase.gpu_bytes or 0) > steps_peak:
        return f"{phase.phase} takes {size} of tensors, more than the steps ({peak}): the peak."
    return f"{phase.phase} takes {size} of tensors, below the peak of the steps ({peak})."


def _phase(
    name: str, rule: HostRule | Unpriced, processes: int, gpu_bytes: int | None
) -> LifePhase:
    """A phase in figures: the fullest moment of the first process, and of the node."""
    if isinstance(rule, Unpriced):
        return LifePhase(phase=name, not_priced=rule.why)

    def of_node(moment: Sequence[HostPart]) -> int:
        return sum(part.nbytes * (processes if part.every else 1) for part in moment)

    fullest = max(rule.moments, key=of_node)
    return LifePhase(
        phase=name,
        process_bytes=max(sum(part.nbytes for part in moment) for moment in rule.moments),
        node_bytes=of_node(fullest),
        mapped_bytes=rule.mapped,
        gpu_bytes=gpu_bytes,
        parts=tuple(HostShare(what=p.what, bytes=p.nbytes, every=p.every) for p in fullest),
        source=rule.source,
    )


def _verdict(
    life: Life,
    phases: tuple[LifePhase, ...],
    processes: int,
    gpu: tuple[str, ...],
    *,
    offloads: bool,
) -> RunLife:
    """The phases with what they mean for the memory of a node."""
    need = max(phase.node_bytes or 0 for phase in phases)
    unpriced = [phase.phase for phase in phases if phase.not_priced]
    budget, reason = life.host_memory, ""
    if budget is None:
        verdict = HostVerdict.UNKNOWN
    elif need > budget:
        verdict = HostVerdict.DOES_NOT_FIT
    elif unpriced:
        verdict, reason = HostVerdict.CANNOT_SAY, f"not priced: {', '.join(unpriced)}"
    elif budget - need < processes * _LITTLE:
        verdict = HostVerdict.TIGHT
        each = format_size((budget - need) // processes)
        reason = f"{each} is left to each process for what is not counted"
    else:
        verdict = HostVerdict.FITS
    return RunLife(
        phases=phases,
        processes=processes,
        budget_bytes=budget,
        verdict=verdict,
        reason=reason,
        gpu=gpu,
        not_counted=(*_NOT_COUNTED, _PINNED) if offloads else _NOT_COUNTED,
    )


# -- facts of a run ----------------------------------------------------------------------------


def _priced(run: Run, config: Any) -> _Priced:
    setup, life = run.setup, run.setup.life or Life()
    steps = replace(run, evaluation=None, generation=None, around=())
    stream = steps.short_stream
    sizes = alive_at_end(stream)
    facts = _facts(steps, stream, sizes, config)
    rules: dict[str, HostRule | Unpriced] = {}
    of_transformers = config_dtype(config) is not None
    unknown = Unpriced(_NOT_FROM_CHECKPOINT)
    rules["loading"] = loading(setup, facts) if of_transformers else unknown
    rules["training"] = training(facts)
    if setup.eval_samples is not None:
        rules["evaluating"] = Unpriced(
            f"predictions of all {setup.eval_samples:,} samples end on the host, as NumPy arrays"
        )
    if LifePart.SAVE in life.parts:
        rules["saving"] = saving(setup, facts) if of_transformers else unknown
    if LifePart.RESUME in life.parts:
        rules["resuming"] = resuming(setup, facts) if of_transformers else unknown
    alive = sum(sum(each) for each in sizes.values())
    before = sum(sum(each) for category, each in sizes.items() if category not in _OF_STEPS)

    def on_gpu(name: str, base: int) -> int:
        rule = rules.get(name)
        return base + max(rule.on_gpu, 0) if isinstance(rule, HostRule) else 0

    saved, resumed = on_gpu("saving", alive), on_gpu("resuming", before)
    return _Priced(facts, rules, saved=saved, resumed=resumed, alive=alive)


def _facts(run: Run, stream: Stream, sizes: Mapping[Category, list[int]], config: Any) -> HostFacts:
    setup = run.setup
    distributed, weights = setup.distributed, run.weights
    own_weights = _of_rank(run)
    trained = sum(_elements(weight) for weight in weights if weight.trains)
    own_trained = sum(_elements(weight) for weight in own_weights if weight.trains)
    states = [size for category in _STATES for size in sizes.get(category, ())]
    state_bytes, host_states = sum(states), 0
    gradients = sum(_bytes(weight) for weight in own_weights if weight.trains)
    offloaded = getattr(stream, "host_bytes", 0)
    if not distributed.updates_on_device and setup.optimizer.startswith("adam"):
        if distributed.strategy is Strategy.FSDP:
            from memest.sharding.rank import adam_states_on_host

            host_states = adam_states_on_host(weights, setup, run.program.trace.landmarks)
            offloaded += host_states
        else:
            host_states = (1 + _ADAM_STATES) * _MASTER_BYTES * own_trained
    kept_states = state_bytes + host_states
    whole_states = kept_states * trained // own_trained if own_trained else 0
    return HostFacts(
        weights=tuple(_weight_facts(weight, setup, config) for weight in weights),
        weight_bytes=sum(sizes.get(Category.PARAMETERS, ())),
        state_bytes=state_bytes,
        largest_state=max(states, default=0),
        whole_states=whole_states,
        gradient_bytes=gradients,
        offloaded=offloaded,
        host_states=host_states,
        batches=_batches(run, stream),
        managed=run.program.trace.managed_bytes,
        shards=distributed.shard_ranks if distributed.strategy is not Strategy.NONE else 1,
    )


def _of_rank(run: Run) -> Sequence[Weight]:
    """The weights as the optimizer of a process sees them."""
    if run.setup.distributed.strategy in (Strategy.NONE, Strategy.DDP):
        return run.weights
    from memest.sharding.rank import updated_weights

    return updated_weights(run.weights, run.setup, run.program.trace.landmarks)


def _weight_facts(weight: Weight, setup: Setup, config: Any) -> WeightFacts:
    elements, in_file = _elements(weight), config_dtype(config) or Dtype.FLOAT32.value
    kept = weight.kept_dtype or weight.dtype
    if setup.distributed.strategy is Strategy.ZERO:
        kept = weight.dtype  # the engine's, whatever peft made of it
    elif setup.distributed.strategy is Strategy.FSDP:
        from memest.sharding.fsdp_units import stored_dtype

        kept = stored_dtype(weight, setup)
    loaded = in_file if setup.loaded_dtype is Dtype.AUTO else setup.loaded_dtype.value
    kept_bytes, num_values = elements * DTYPE_BYTES[kept], elements
    if setup.quantization is not None and weight.shape[-1:] == (1,) and not weight.trains:
        # 4-bit weights lie in a column, two numbers a byte
        num_values = 2 * kept_bytes if setup.quantization.format is Format.BNB_4BIT else elements
    is_new = setup.adapter is not None and weight.trains
    return WeightFacts(
        name=weight.name,
        elements=elements,
        file_bytes=0 if is_new else num_values * DTYPE_BYTES[in_file],
        loaded_bytes=kept_bytes if is_new else num_values * DTYPE_BYTES[loaded],
        kept_bytes=kept_bytes,
        trains=weight.trains,
        is_merged=".experts." in weight.name and len(weight.shape) == 3,
    )


def _elements(weight: Weight) -> int:
    count = 1
    for extent in weight.shape:
        count *= extent
    return count


def _bytes(weight: Weight) -> int:
    return _elements(weight) * DTYPE_BYTES[weight.dtype]


def _batches(run: Run, stream: Stream) -> int | None:
    """Bytes of the batches of a process that wait on the host, by the usual loader unless named."""
    batch = batch_sizes(stream, _num_batches(run))
    if batch is None:
        return None
    loader = run.setup.data_loading or DataLoading()
    parts = (loader.pinned_bytes(batch), loader.shared_bytes(batch), loader.pageable_bytes(batch))
    return sum(parts)


def _num_batches(run: Run) -> int:
    setup = run.setup
    return setup.num_steps * run.program.enough_micro_steps(setup.grad_accum)


def config_dtype(config: Any) -> str | None:
    """The dtype that a model's configuration names; None where it is no model of transformers.

    ``from_pretrained`` asks the configuration, and parts of it; float32 where they say nothing.

    Args:
        config: a configuration, as a mapping or as the library's object; None without.
    """

    def value(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    if config is None or not value(config, "model_type"):
        return None
    sources = [config, *(value(config, name) for name in ("text_config", "vision_config"))]
    for source in filter(None, sources):
        for name in ("dtype", "torch_dtype"):
            dtype = str(value(source, name) or "").removeprefix("torch.")
            if dtype in DTYPE_BYTES:
                return dtype
    return Dtype.FLOAT32.value
