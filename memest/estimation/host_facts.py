"""What the rules of host memory ask of a run, and what they say of a phase. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from memest.config.setup import Setup

__all__ = [
    "HostFacts",
    "HostPart",
    "HostRule",
    "Moment",
    "Unpriced",
    "WeightFacts",
    "parts_of_model",
    "stays",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """A weight on its way through a run; sizes are those of the whole tensor.

    Attributes:
        name: path in the model.
        elements: of it.
        file_bytes: as its checkpoint has it; 0 of what no checkpoint has (adapters).
        loaded_bytes: as ``from_pretrained`` makes it.
        kept_bytes: as it is kept for training, and saved.
        trains: whether it does.
        is_merged: the loader makes it of several tensors of the file (experts).
    """

    name: str
    elements: int
    file_bytes: int
    loaded_bytes: int
    kept_bytes: int
    trains: bool
    is_merged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the rules ask of a run, of one process unless said otherwise.

    Attributes:
        weights: whole ones.
        weight_bytes: of the weights and their shards on the GPU, behind a step.
        state_bytes: of the optimizer's states and master weights on the GPU.
        largest_state: the largest storage of them.
        whole_states: of the states of all processes together, where they have parts.
        gradient_bytes: of the gradients that the optimizer sees.
        offloaded: what training keeps on the host for good, pinned or not.
        host_states: of states and master weights that are there.
        batches: of batches that wait; None where nobody knows.
        managed: of states in managed memory.
        shards: processes that share a copy of what is sharded.
    """

    weights: tuple[WeightFacts, ...]
    weight_bytes: int
    state_bytes: int
    largest_state: int
    whole_states: int
    gradient_bytes: int
    offloaded: int = 0
    host_states: int = 0
    batches: int | None = 0
    managed: int = 0
    shards: int = 1

    @property
    def whole_weights(self) -> int:
        """All weights as they are kept."""
        return sum(weight.kept_bytes for weight in self.weights)

    @property
    def trained_weights(self) -> int:
        """Those that train, as they are kept."""
        return sum(weight.kept_bytes for weight in self.weights if weight.trains)

    @property
    def largest_weight(self) -> int:
        """The largest, as it is kept."""
        return max((weight.kept_bytes for weight in self.weights), default=0)


@dataclass(frozen=True, slots=True)
class HostPart:
    """Something in host memory for a while.

    Attributes:
        what: in words.
        nbytes: of one process that has it.
        every: all processes of a node have it, not the first alone.
    """

    what: str
    nbytes: int
    every: bool = True


Moment = tuple[HostPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRule:
    """What a phase takes.

    Attributes:
        moments: what is there at once, one after the other.
        source: file and function of the library.
        mapped: bytes of files that are mapped, once for a node: page cache.
        on_gpu: bytes on the GPU beyond weights and states, at the fullest moment; may be below 0.
    """

    moments: tuple[Moment, ...]
    source: str
    mapped: int = 0
    on_gpu: int = 0


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A phase that no rule covers, and why."""

    why: str


def parts_of_model(setup: Setup) -> Unpriced | None:
    """Runs whose processes have different parts of a model."""
    distributed = setup.distributed
    if distributed.pp > 1:
        return Unpriced("a pipeline's stages are loaded and saved as its script does")
    if distributed.shares_model:
        return Unpriced("layers or experts shared by --tp or --ep")
    return None


def stays(facts: HostFacts) -> Moment:
    """What is on the host while a run trains."""
    parts = (
        HostPart("offloaded", facts.offloaded),
        HostPart("batches that wait", facts.batches or 0),
        HostPart("paged states, where the GPU has no room for them", facts.managed),
    )
    return tuple(part for part in parts if part.nbytes)
