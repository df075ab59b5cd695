"""A traced step as data: what was allocated, in which order, and what each allocation was.

Torch-free. ``trace`` writes it, ``replay`` and ``estimate`` read it.

The stream is a flat ``array('q')`` of tagged integers, ``value = index << 2 | kind``:

===========  =====================================================================
kind         meaning of ``index``
===========  =====================================================================
``ALLOC``    allocation number ``index`` is made
``FREE``     allocation number ``index`` dies
``CALL``     operator call site ``index`` may allocate behind the operator's back
``MARK``     mark ``index``: a phase begins
===========  =====================================================================
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.workspaces.operator_call import OpCall

__all__ = [
    "ALLOC",
    "CALL",
    "CAST",
    "CATEGORY_ORDER",
    "FREE",
    "MARK",
    "OF_MODULES",
    "OF_WEIGHTS",
    "REFERENCE",
    "WARM_UP",
    "Category",
    "Chain",
    "Chains",
    "Cue",
    "CueKind",
    "Landmarks",
    "Mark",
    "Part",
    "Phase",
    "Seam",
    "SeamKind",
    "Trace",
    "Weight",
    "on_stream",
    "plain_name",
    "stream_of",
]

ALLOC, FREE, CALL, MARK = 0, 1, 2, 3
_ON_STREAM = " on stream "
CAST = "cast by the engine"
"""Labels a parameter that a library makes half-precision after it has come to the device."""
REFERENCE = "ref_model"
"""What stands before the names of a reference model's modules, as TRL calls it."""
WARM_UP = "caching_allocator_warmup"
"""Labels the block that transformers takes and gives back where weights load onto the device."""


def on_stream(name: str, stream: int) -> str:
    """The name of an operator, or of a thread, that runs on a stream of the program's own.

    Example:
        >>> on_stream("aten.mm.default", 2), on_stream("aten.mm.default", 0)
        ('aten.mm.default on stream 2', 'aten.mm.default')
    """
    return f"{name}{_ON_STREAM}{stream}" if stream else name


def plain_name(name: str) -> str:
    """The name without the stream."""
    return name.partition(_ON_STREAM)[0]


def stream_of(name: str) -> int:
    """The stream that a name tells; 0 for the default one."""
    return int(name.rpartition(_ON_STREAM)[2]) if _ON_STREAM in name else 0


class Category(enum.StrEnum):
    """What an allocation is for; the rows of every breakdown."""

    PARAMETERS = "parameters"
    """Weights, trainable or frozen; tied weights once."""
    MASTER_WEIGHTS = "master weights"
    """fp32 copies of half-precision weights that the optimizer updates."""
    BUFFERS = "buffers"
    """Registered buffers of the modules."""
    GRADIENTS = "gradients"
    """What ``.grad`` of a parameter holds or will hold."""
    OPTIMIZER_STATES = "optimizer states"
    """Moments and other tensors of the optimizer's state."""
    ACTIVATIONS = "activations"
    """Results of the forward (or of a recompute) that outlive it because backward needs them."""
    AUTOCAST_COPIES = "autocast copies"
    """Half-precision copies of fp32 weights that autocast keeps."""
    TEMPORARIES = "temporaries"
    """Everything that lives shorter: within forward, backward or the optimizer step."""
    WORKSPACES = "workspaces"
    """Memory that kernels take behind the operators: cuBLAS, reductions, attention."""
    INPUTS = "inputs"
    """The batches on the GPU."""
    COMMUNICATION = "communication buffers"
    """Gradient buckets of DDP, gathered parameters, buffers of collectives."""
    ROUNDING = "rounding"
    """What the allocator hands out beyond the request: 512-byte rounding and unsplit rests."""
    REFERENCE = "reference model"
    """Weights of the second model of a preference method, which does not train."""
    RESTING = "model at rest"
    """What one of two models that train in turn keeps while the other does."""


class Phase(enum.StrEnum):
    """The parts of a training run that a mark can open."""

    LOAD = "load"
    BATCH = "batch"
    SCORING = "scoring"
    """What is learnt from is asked of the model, without gradients, before a step of verl's."""
    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    ZERO_GRAD = "zero_grad"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVE = "save"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning of a phase: which one, in which optimizer step and micro-step (from 1)."""

    phase: Phase
    step: int
    micro_step: int


class SeamKind(enum.StrEnum):
    """The places where a traced run can be cut and put together otherwise."""

    OPTIMIZER_MADE = "optimizer made"
    """The optimizer is constructed here, once."""
    STEP = "step"
    """An optimizer step begins: its batches, if they are all fetched first."""
    SAMPLE = "sample"
    """The next prefetched micro-batch is put on the device."""
    COUNT = "count"
    """The labels of the next prefetched micro-batch are counted."""
    COUNTED = "counted"
    """All labels are counted."""
    FETCHED = "fetched"
    """All micro-batches are there; the old ones are let go of, the last one excepted."""
    RELEASED = "released"
    """The old micro-batches are gone."""
    MICRO_STEP = "micro-step"
    """A micro-step begins."""
    UPDATE = "update"
    """The micro-steps are done: clipping and the optimizer follow."""
    UPDATED = "updated"
    """The optimizer is done; ``zero_grad`` follows where it has its place here."""
    END = "end"
    """The step is done."""
    EVALUATED = "evaluation batch"
    """A batch of an evaluation begins."""
    PIECE = "piece"
    """A piece of a pipeline stage's work begins, or the last one ends: see ``trace.stages``."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A place between two events.

    Attributes:
        position: index of the first event behind it.
        kind: which place.
        step: optimizer step, from 1; 0 while loading.
        index: number of the sample, count or micro-step, from 1; else 0.
    """

    position: int
    kind: SeamKind
    step: int
    index: int = 0


class CueKind(enum.IntEnum):
    """The places where a wrapper of the model or of its parameters has a hook."""

    PLACED = 0
    """The storage of a parameter is there."""
    ENTER = 1
    """The forward of a module begins, or its recomputation."""
    LEAVE = 2
    """It returns."""
    BACKWARD = 3
    """Autograd goes on with the operators of another module, the innermost one."""
    GRADIENT = 4
    """A gradient of a parameter is computed: it is given to, or added to, what the parameter has
    (a hook on the tensor)."""
    READY = 5
    """It has been added (a hook behind the accumulation)."""
    ENTER_FED = 6
    """As ENTER, with inputs that lead back to other parameters: gradients go on behind it."""
    DONE = 7
    """Autograd is at its end, where its callbacks run; ``index`` is 0, the model."""
    UPDATE = 8
    """The optimizer comes to a parameter that is updated apart from the others; ``index`` is its
    number among those that the optimizer has."""
    PRE_FORWARD = 9
    """A hook before a module's forward; this one and the next three are DeepSpeed's, and only in
    traces for ZeRO-3."""
    POST_FORWARD = 10
    """A hook behind it; a recomputation that is cut short has none."""
    PRE_BACKWARD = 11
    """Autograd comes to an output of the module."""
    POST_BACKWARD = 12
    """It has the gradients of all inputs of the module."""
    HELD = 13
    """The module is done with a weight, and autograd holds on to what it used of it (a view that
    was saved, or what a recomputation saved); ``index`` is the weight."""
    LET_GO = 14
    """Autograd lets go of the oldest of these."""
    READ = 15
    """The forward asks a module for a weight while that module does not run; ``index`` is the
    weight. In traces for ZeRO-3."""
    LET_GO_NEWEST = 16
    """Autograd lets go of the newest of what was held: a recomputation was kept beside it."""
    NO_GRAPH = 17
    """The forward of the model that follows makes no graph; ``index`` is 0, the model."""
    STAGE_INPUT = 20
    """What a pipeline stage is given for a micro-batch, of which ``index`` is the number."""
    STAGE_OUTPUT = 21
    """What it returns."""
    STAGE_TARGET = 22
    """What the loss of the last stage is given beside the output."""
    STAGE_LOSS = 23
    OUTPUT_GRADIENT = 24
    """What a stage is given to begin its backward with."""
    INPUT_GRADIENT = 25
    """What its backward gives back."""
    KEPT_GRADIENT = 26
    """The gradient that a parameter has when the first micro-batch is done; ``index`` is the
    weight's."""
    OUTPUT_REACHED = 27
    """Autograd has the gradient of what a stage returned (a hook on it)."""
    STAGE_WORK = 30
    """What follows is work on a stage; this one and those below are no trace's, but put in where
    the run of a pipeline is composed, and their ``index`` is the stage."""
    STAGE_LEFT = 31
    """The forward of a stage returns."""
    STAGE_SYNC = 32
    """What follows is the last backward of a step of the schedule."""
    STAGE_UNSHARD = 33
    """The schedule gathers the parameters of a stage."""
    STAGE_RESHARD = 34
    """It gives them back."""
    STAGE_REDUCE = 35
    """It reduces the gradients of a stage (``perform_reduce_grad``)."""


OF_WEIGHTS = frozenset(
    {
        CueKind.PLACED,
        CueKind.GRADIENT,
        CueKind.READY,
        CueKind.HELD,
        CueKind.LET_GO,
        CueKind.READ,
        CueKind.LET_GO_NEWEST,
        CueKind.KEPT_GRADIENT,
    }
)
"""Cues whose ``index`` is a weight's."""
OF_MODULES = frozenset(
    {
        CueKind.ENTER,
        CueKind.ENTER_FED,
        CueKind.LEAVE,
        CueKind.BACKWARD,
        CueKind.DONE,
        CueKind.PRE_FORWARD,
        CueKind.POST_FORWARD,
        CueKind.PRE_BACKWARD,
        CueKind.POST_BACKWARD,
        CueKind.NO_GRAPH,
    }
)
"""Cues whose ``index`` is a module's."""


@dataclass(slots=True)
class Cue:
    """A place between two events at which wrappers of a model act: DDP, FSDP, ZeRO.

    Nobody changes one; it is not frozen, because there are as many as operators, and a frozen one
    takes five times as long to make.

    Attributes:
        position: index of the first event behind it.
        kind: what happens there.
        index: the module (of ``module_names``), or the weight (of ``weights``).
        allocation: of the storage it is about; -1 where it is about none.
    """

    position: int
    kind: CueKind
    index: int
    allocation: int = -1


@dataclass(frozen=True, slots=True)
class Landmarks:
    """What wrap policies ask of a model.

    Attributes:
        kinds: class of each module, by its path.
        blocks: classes whose members are not to be split (``_no_split_modules``).
        embeddings: path of the input embeddings; None where there are none.
        head: path of the output embeddings.
        norm: path of the norm behind the last layer.
        shared_paths: other paths of parameters that have several, each with the first one.
        units: what the library itself shards when it loads the model: paths of the modules of a
            unit, whether it gives parameters back after its forward, whether it is of experts.
        ties: the configuration ties embeddings to a head that is not there.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    embeddings: str | None = None
    head: str | None = None
    norm: str | None = None
    shared_paths: Mapping[str, str] = field(default_factory=dict)
    units: tuple[tuple[tuple[str, ...], bool, bool], ...] = ()
    ties: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as an optimizer sees it.

    Attributes:
        name: path in the model.
        shape: in elements.
        stride: in elements.
        dtype: by torch's name.
        trains: ``requires_grad``.
        decays: whether the Trainer puts it into the group with weight decay.
        has_grad: whether the backward reached it.
        kept_dtype: in which it lies in memory, where a library computes with a copy in ``dtype``
            and which that is does not follow from the setup; empty = it does.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trains: bool
    decays: bool
    has_grad: bool
    kept_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a stream of allocations that are copies of each other.

    Attributes:
        start: its first event.
        number: of its first allocation; the others follow in the same order in every copy.
        inherited_frees: the allocations made before it that it frees, in the order of its frees.
    """

    start: int
    number: int
    inherited_frees: tuple[int, ...]


@dataclass(slots=True)
class Chain:
    """Parts of a stream that are copies of each other.

    Attributes:
        length: events of each.
        count: allocations made by each.
        parts: by start.
    """

    length: int
    count: int
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class Chains:
    """All chains of a stream, and what is worth remembering about the stream's structure.

    Attributes:
        chains: the chains.
        kinds: for each allocation number, which kind it is of: those of a kind are of one size,
            whatever it is. Empty where that is not known.
        memo: filled by those who read streams; streams that differ in nothing but sizes share it.
        examples: a number of each kind.
    """

    chains: list[Chain] = field(default_factory=list)
    kinds: Sequence[int] = ()
    memo: dict[Any, Any] = field(default_factory=dict)
    examples: list[int] = field(init=False)

    def __post_init__(self) -> None:
        first: dict[int, int] = {}
        for number, kind in enumerate(self.kinds):
            first.setdefault(kind, number)
        place = {kind: index for index, kind in enumerate(first)}
        self.kinds = [place[kind] for kind in self.kinds]
        self.examples = list(first.values())


@dataclass(slots=True)
class Trace:
    """One traced sequence of training steps.

    Allocation ``i`` has ``sizes[i]`` requested bytes, ``categories[i]`` (index into
    ``CATEGORY_ORDER``), ``modules[i]`` (index into ``module_names``) and ``ops[i]`` (index into
    ``op_names``). Call site ``j`` has ``call_of_site[j]`` (index into ``calls``),
    ``site_modules[j]``.
    """

    events: array[int] = field(default_factory=lambda: array("q"))
    sizes: list[int] = field(default_factory=list)
    categories: bytearray = field(default_factory=bytearray)
    modules: array[int] = field(default_factory=lambda: array("l"))
    ops: array[int] = field(default_factory=lambda: array("l"))
    call_of_site: array[int] = field(default_factory=lambda: array("l"))
    site_modules: array[int] = field(default_factory=lambda: array("l"))
    calls: list[OpCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    """Operators that launch a kernel on the device, behind each mark; views do not."""
    module_names: list[str] = field(default_factory=list)
    op_names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)
    """What the steps do that may take more memory than is noted, in words."""
    attention_choices: list[tuple[Any, str]] = field(default_factory=list)
    """Every attention call of the trace and the kernel taken for it (``attention.SdpaCall``), in
    the order of the calls."""
    seams: list[Seam] = field(default_factory=list)
    """Where the run can be cut, in order."""
    micro_steps: tuple[int, ...] = ()
    """How many micro-steps each traced step has."""
    weights: tuple[Weight, ...] = ()
    """The parameters, and which of them got a gradient."""
    managed_bytes: int = 0
    """Taken beside the allocator, in memory that moves between host and GPU by the page
    (``cudaMallocManaged``): states of paged optimizers."""
    cues: list[Cue] = field(default_factory=list)
    """Where wrappers act, in order; empty in a trace that was made before they were written
    down."""
    landmarks: Landmarks = field(default_factory=Landmarks)
    """What wrap policies ask of the model."""
    counts: tuple[int, ...] = ()
    """Numbers of the model: see ``result.ModelFacts``; empty where nobody needs them."""
    unnoted_ops: list[str] = field(default_factory=list)
    """Operators that were seen and whose calls were not noted, because nothing was computed from
    them when the trace was made (``workspaces.registry.reads_calls``), each one once."""

    @property
    def num_allocations(self) -> int:
        """How many allocations the trace makes."""
        return len(self.sizes)

    def decode(self) -> Iterator[tuple[int, int]]:
        """The stream as (kind, index) pairs."""
        for value in self.events:
            yield value & 3, value >> 2

    def category(self, allocation: int) -> Category:
        """The category of one allocation."""
        return CATEGORY_ORDER[self.categories[allocation]]


CATEGORY_ORDER: tuple[Category, ...] = tuple(Category)
"""The order in which reports list categories; ``Trace.categories`` indexes it."""
