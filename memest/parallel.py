"""How one model is spread over GPUs: shards of its layers, stages of a pipeline.

Spreading data over copies of the model is the business of :mod:`memest.distributed`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memest.errors import ConfigError, closest
from memest.kinds import choose, whole

if TYPE_CHECKING:
    from memest.distributed import Distributed

__all__ = [
    "Rotate",
    "Schedule",
    "StagePart",
    "check_experts",
    "check_shape",
    "read_rotate",
    "read_schedule",
    "read_split",
]

_MAX_WAYS = 1 << 12
_MAX_MICROBATCHES = 1 << 12


class Schedule(enum.StrEnum):
    """Who of a pipeline runs what when, as ``torch.distributed.pipelining`` has it."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (``ScheduleGPipe``)."""
    ONE_F_ONE_B = "1f1b"
    """A backward after each forward once the pipeline is full (``Schedule1F1B``)."""
    LOOPED_BFS = "looped-bfs"
    """Stage after stage, each with all micro-batches (``ScheduleLoopedBFS``)."""
    INTERLEAVED = "interleaved"
    """1F1B with several stages on each GPU (``ScheduleInterleaved1F1B``)."""
    ZB_H1 = "zb-h1"
    """Gradients of weights apart from those of inputs, one stage on each GPU
    (``ScheduleInterleavedZeroBubble``)."""
    INTERLEAVED_ZB = "interleaved-zb"
    """The same with several stages on each GPU."""
    ZBV = "zbv"
    """Two stages on each GPU, the first with the last (``ScheduleZBVZeroBubble``)."""

    @property
    def several_stages(self) -> bool:
        """Whether a GPU has more than one stage."""
        return self not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return self in (Schedule.ZB_H1, Schedule.INTERLEAVED_ZB, Schedule.ZBV)


class Rotate(enum.StrEnum):
    """How keys and values of a sequence come to all its GPUs (``cp_comm_strategy``)."""

    ALLGATHER = "allgather"
    """Each gathers all of them at once."""
    ALLTOALL = "alltoall"
    """They go round, one neighbour at a time."""


_OTHER_NAMES = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved1f1b": Schedule.INTERLEAVED,
    "loopedbfs": Schedule.LOOPED_BFS,
    "interleavedzerobubble": Schedule.INTERLEAVED_ZB,
    "interleavedzb": Schedule.INTERLEAVED_ZB,
    "zbh1": Schedule.ZB_H1,
    "zbvzerobubble": Schedule.ZBV,
}


@dataclass(frozen=True, slots=True)
class StagePart:
    """The layers of a model that one stage of a pipeline has.

    Attributes:
        start: its first layer.
        stop: the layer behind its last.
        first: it has what comes before the layers.
        last: it has what comes after them, and the loss.
        splits: gradients of inputs and of weights are computed apart.
    """

    start: int
    stop: int
    first: bool
    last: bool
    splits: bool = False

    @property
    def words(self) -> str:
        """For people, and for keys."""
        layers = f"layers {self.start} to {self.stop - 1}"
        if self.stop == self.start + 1:
            layers = f"layer {self.start}"
        if self.stop == self.start:
            layers = "no layers"
        parts = ["embeddings"] * self.first + [layers] + ["head"] * self.last
        return ", ".join(parts)


def read_schedule(value: Any) -> Schedule | None:
    """A schedule by its name here or in torch.

    Raises:
        ConfigError: no such schedule.
    """
    if value is None or isinstance(value, Schedule):
        return value
    text = str(value).strip().lower().replace("_", "-").removeprefix("schedule")
    plain = text.replace("-", "")
    for schedule in Schedule:
        if text == schedule.value or plain == schedule.value.replace("-", ""):
            return schedule
    if plain in _OTHER_NAMES:
        return _OTHER_NAMES[plain]
    legal = ", ".join(schedule.value for schedule in Schedule)
    if plain == "dualpipev":
        raise ConfigError(f"--pp-schedule {value!r} is not modelled yet. Legal: {legal}.")
    near = closest(text, [schedule.value for schedule in Schedule])
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--pp-schedule {value!r} is not known.{hint} Legal: {legal}.")


def read_rotate(value: Any) -> Rotate:
    """A way of rotating keys and values by its name here or in torch (``_RotateMethod``).

    Raises:
        ConfigError: no such way.
    """
    if isinstance(value, Rotate):
        return value
    plain = str(value).replace("_", "").replace("-", "")
    found: Rotate = choose("--cp-rotate", plain, Rotate)
    return found


def read_split(value: Any) -> tuple[int, ...]:
    """Layers of each stage, also as text with commas.

    Raises:
        ConfigError: something that is no list of numbers.
    """
    if value is None or value == "":
        return ()
    parts: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    try:
        out = tuple(int(str(part).strip()) for part in parts)
    except (TypeError, ValueError):
        out = (-1,)
    if any(count < 0 for count in out):
        raise ConfigError(
            f"--pp-split {value!r} is no list of layers: give how many each stage has, in order, "
            "for example --pp-split 7,8,8,9."
        )
    return out


def check_shape(spread: Distributed) -> None:
    """Whether the GPUs can be laid out so.

    Raises:
        ConfigError: they cannot, or an option belongs to what is not there.
    """
    whole("--tp", spread.tp, 1, _MAX_WAYS)
    whole("--cp", spread.cp, 1, _MAX_WAYS)
    whole("--sp", spread.sp, 1, _MAX_WAYS)
    whole("--ep", spread.ep, 1, _MAX_WAYS)
    whole("--pp", spread.pp, 1, _MAX_WAYS)
    ways = spread.tp * spread.sequence_ranks * spread.pp
    if spread.num_gpus % ways:
        near = max(spread.num_gpus // ways, 1) * ways
        degrees = {"--tp": spread.tp, "--cp": spread.cp, "--sp": spread.sp, "--pp": spread.pp}
        flags = [f"{flag} {degree}" for flag, degree in degrees.items() if degree > 1]
        raise ConfigError(
            f"{' '.join(flags)} needs {ways} GPUs, or a multiple of them, and --num-gpus is "
            f"{spread.num_gpus}: write --num-gpus {near}."
        )
    check_experts(spread)
    given = {
        "--pp-schedule": spread.pp_schedule is not None,
        "--pp-microbatches": spread.pp_microbatches is not None,
        "--pp-stages-per-gpu": spread.pp_stages_per_gpu is not None,
        "--pp-split": bool(spread.pp_split),
        "--no-pp-return-outputs": not spread.pp_return_outputs,
    }
    if spread.tp == 1 and spread.tp_sequence_parallel:
        raise ConfigError("--tp-sequence-parallel has no meaning without --tp: add --tp 2 or more.")
    if not (spread.tp_sequence_parallel or spread.tp_loss_parallel):
        raise ConfigError(
            "--no-tp-loss-parallel has no meaning without --tp-sequence-parallel: transformers' "
            "plan gathers the logits."
        )
    if spread.cp == 1 and spread.cp_rotate is not Rotate.ALLGATHER:
        raise ConfigError("--cp-rotate has no meaning without --cp: add --cp 2 or more.")
    if spread.pp == 1:
        for flag in (flag for flag, there in given.items() if there):
            raise ConfigError(f"{flag} has no meaning without a pipeline: add --pp 2 or more.")
        return
    schedule, stages = spread.pipeline_schedule, spread.stages_per_gpu
    if spread.pp_stages_per_gpu is not None:
        whole("--pp-stages-per-gpu", stages, 1, 64)
    if not schedule.several_stages and stages != 1:
        raise ConfigError(
            f"--pp-schedule {schedule} has one stage on each GPU, not {stages}: take interleaved, "
            "looped-bfs or interleaved-zb."
        )
    if schedule is Schedule.ZBV and stages != 2:
        raise ConfigError(f"--pp-schedule zbv has two stages on each GPU, not {stages}.")
    micro = spread.microbatches
    whole("--pp-microbatches", micro, 1, _MAX_MICROBATCHES)
    if schedule is Schedule.ONE_F_ONE_B and micro < spread.pp:
        raise ConfigError(
            f"--pp-microbatches {micro} is too few for 1f1b, which takes at least as many as there "
            f"are stages: {spread.pp}."
        )
    rounds = max(1, micro // spread.pp)
    by_rounds = (Schedule.INTERLEAVED, Schedule.ZB_H1, Schedule.INTERLEAVED_ZB)
    if schedule in by_rounds and micro % rounds:
        raise ConfigError(
            f"--pp-microbatches {micro} is refused by {schedule}: with {spread.pp} GPUs it goes in "
            f"{rounds} rounds, and that must divide it, as {micro // rounds * rounds} does."
        )
    if spread.pp_split and len(spread.pp_split) != spread.pp * stages:
        raise ConfigError(
            f"--pp-split names {len(spread.pp_split)} stages, and there are {spread.pp * stages}: "
            f"{spread.pp} GPUs with {stages} each."
        )


def check_experts(spread: Distributed) -> None:
    """Whether the experts can be shared so.

    Source: ``DistributedConfig._validate_mesh_config`` of transformers 5.23, and its
    ``_resolve_parallel_plans``, which wants a plan of every kind of sharding that is asked for:
    experts are shared beside sharded layers, not alone.

    Raises:
        ConfigError: they cannot.
    """
    if spread.ep == 1:
        return
    sharded = str(spread.fsdp) != "none"
    if spread.tp == 1 and not sharded:
        raise ConfigError(
            f"--ep {spread.ep} shares the experts of layers that are sharded too, as transformers "
            f"has it: add --tp {spread.ep} (all GPUs see one batch) or --fsdp full_shard "
            "--loop plain (each has its own)."
        )
    if spread.ep % spread.tp:
        raise ConfigError(
            f"--ep {spread.ep} and --tp {spread.tp} do not go together: transformers wants a "
            f"multiple of --tp. Write --ep {max(spread.ep // spread.tp, 1) * spread.tp}."
        )
    if spread.ep != spread.tp and not sharded:
        raise ConfigError(
            f"--ep {spread.ep} and --tp {spread.tp} do not go together without FSDP: the other "
            f"{spread.ep // spread.tp} groups have batches of their own. Write --ep {spread.tp}, "
            "or add --fsdp full_shard --loop plain."
        )
    if spread.num_gpus % spread.ep:
        near = max(spread.num_gpus // spread.ep, 1) * spread.ep
        raise ConfigError(
            f"--ep {spread.ep} needs {spread.ep} GPUs, or a multiple of them, and --num-gpus is "
            f"{spread.num_gpus}: write --num-gpus {near}."
        )
