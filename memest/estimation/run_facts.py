"""What kind of run it is and what it takes of a GPU: what corrections ask about, and change.

The kind is told the same for estimates and measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memest.config.parallelism import Distributed, Strategy
from memest.config.setup import Setup
from memest.events import Trace, Weight, plain_name
from memest.profiles.model_card import ModelCard
from memest.report.result import PeakRanges
from memest.workspaces.operator_call import OpCall, TensorSpec, Value

__all__ = ["Peaks", "RunFacts", "run_facts"]

_ATTENTION = "attention: "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What kind of run it is.

    Attributes:
        kernels: distinct operators of the trace; by dtypes too where the trace keeps their calls.
        precision: kind of autocast.
        dtype: of most weights.
        attention: implementation that runs.
        optimizer: by name.
        loop: whose training loop.
        checkpointing: ``none``, ``full`` or ``every_n``.
        parallelism: ``one GPU``; else how it is spread, which FSDP and ZeRO are on one GPU too.
        compiler: ``eager``, or ``compiled`` by torch.compile.
    """

    kernels: int
    precision: str
    dtype: str
    attention: str
    optimizer: str
    loop: str
    checkpointing: str
    parallelism: str = "one GPU"
    compiler: str = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Memory on one GPU, bytes.

    Attributes:
        allocated_bytes: in tensors.
        reserved_bytes: in segments.
        device_bytes: reserved, context and kernels.
        low_bytes: the least that the device peak may be.
        high_bytes: the most.
        level: share of runs that lie between the two, None = no claim.
        basis: where the range is from, in a sentence.
        ranges: of the allocator's peaks; None where only the device's is known.
        process_low_bytes: the least that context and kernels may take.
        process_expected_bytes: what they are expected to take.
        managed_bytes: beside the allocator, in memory that leaves the GPU where room is short.
        slack_bytes: of the range, what libraries may take for workspaces of their own choice.
        added_bytes: what a correction added to the reserved peak of the replay.
        parts: corrected rows of the breakdown by category; they sum to ``allocated_bytes``
            exactly. Empty where nothing was corrected.
        notes: what a correction extrapolated or borrowed, and what an engine takes, in sentences.
        engine_bytes: of the device peak, an engine's that generates on the same GPU.
        engine_slack_bytes: of the range, what such an engine may take beside its share.
        engine_low_bytes: the least on the device while such an engine is awake that sleeps else.
        largest_engine_share: of the GPU's memory, the most that such an engine may take with the
            run sure to fit, in hundredths; None without one, or where no share will do.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    level: float | None
    basis: str
    process_low_bytes: int
    process_expected_bytes: int
    ranges: PeakRanges | None = None
    managed_bytes: int = 0
    slack_bytes: int = 0
    added_bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine_bytes: int = 0
    engine_slack_bytes: int = 0
    engine_low_bytes: int = 0
    largest_engine_share: float | None = None


def run_facts(setup: Setup, trace: Trace, weights: Iterable[Weight], card: ModelCard) -> RunFacts:
    """The facts of a run.

    Args:
        setup: resolved, as the trace was made for it.
        trace: of the run, its updates included.
        weights: of the run, at its sizes: a trace that serves many ranks of adapters has none.
        card: of the model.
    """
    return RunFacts(
        kernels=count_kernels(trace),
        precision=setup.precision.value,
        dtype=_dtype(setup, weights, card),
        attention=_attention(setup, card),
        optimizer=setup.optimizer,
        loop=setup.loop.value,
        checkpointing=card.checkpointing.partition(":")[0],
        parallelism=_parallelism(setup.distributed),
        compiler="compiled" if setup.torch_compile else "eager",
    )


def _parallelism(distributed: Distributed) -> str:
    if distributed.strategy is not Strategy.NONE:
        return distributed.strategy.value
    return "one GPU" if distributed.num_gpus == 1 else "several GPUs"


def count_kernels(trace: Trace) -> int:
    """How many distinct operators run: kernels load when the first one of a kind does.

    Calls that differ in shapes alone run the same kernels, so shapes do not count; a figure that
    counted them would also depend on how many sizes were traced.
    """
    signatures = {(call.op, _dtypes(call)) for call in trace.calls}
    names = {op for op, _ in signatures}
    return len(signatures) + len({plain_name(name) for name in trace.op_names} - names)


def _dtypes(call: OpCall) -> tuple[str, ...]:
    dtypes: list[str] = []

    def visit(value: Value) -> None:
        if isinstance(value, TensorSpec):
            dtypes.append(value.dtype)
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    for value in (*call.args, *(item for _, item in call.kwargs)):
        visit(value)
    return tuple(sorted(set(dtypes)))


def _dtype(setup: Setup, weights: Iterable[Weight], card: ModelCard) -> str:
    sizes: Counter[str] = Counter()
    for weight in weights:
        count = 1
        for extent in weight.shape:
            count *= extent
        sizes[weight.dtype] += count
    if sizes:
        return sizes.most_common(1)[0][0]
    name = card.about[0].split(" with ")[-1].removesuffix(" weights") if card.about else ""
    return name or setup.loaded_dtype.value


def _attention(setup: Setup, card: ModelCard) -> str:
    for note in card.about:
        if note.startswith(_ATTENTION):
            return note.removeprefix(_ATTENTION)
    return setup.attn_implementation.value
