"""The combinations that advice tries, and the largest micro-batch of each."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memest.config.idle_options import smallest_batch, smallest_micro_batch
from memest.config.kinds import Fsdp, Loop, Strategy
from memest.config.rollouts import Engine
from memest.config.setup import Attention, Dtype, Precision, Setup
from memest.errors import MissingDependencyError
from memest.report.result import Estimate, Verdict
from memest.search.cost import Probe

__all__ = [
    "BY_SFT_TRAINER",
    "LIGHTER",
    "LOSSES",
    "SAME_TRAINING",
    "STATES_OF",
    "Candidate",
    "Combo",
    "Finder",
    "Freedom",
    "asleep",
    "combos",
    "implementations",
    "lighter",
    "losses",
    "other_precisions",
    "sharded",
    "without_logits",
]

LIGHTER = ("adafactor", "sgd")
"""Optimizers with fewer states than Adam's, the closer relative first."""
STATES_OF = {"adafactor": 1, "adafactor_torch": 1, "sgd": 0, "sgd_loop": 0, "none": 0}
"""How many states of the parameters' size an optimizer keeps at most; 2 where not named."""
SAME_TRAINING = {
    "adamw_torch": "adamw_torch_fused",
    "adamw_torch_foreach": "adamw_torch_fused",
    "adam": "adam_fused",
}
"""Implementations with large temporaries, and the one that computes the same without them."""
BY_SFT_TRAINER = "SFTTrainer's fused loss"
"""What SFTTrainer of TRL 1.15 and later has unasked, whatever its ``loss_type``; the Trainer has no
setting that does it. (There ``use_liger_kernel`` leaves the loss as it is: TRL 1.16.)"""
LOSSES: dict[str, dict[str, Any]] = {
    "Liger's kernels": {"use_liger_kernel": True},
    BY_SFT_TRAINER: {"fused_loss": "trl-fused"},
}
"""Losses that never hold all logits, those of the Trainer itself first."""
_FUSED_SINCE = (2, 0)
_HALF = (Dtype.FLOAT16, Dtype.BFLOAT16)


class Freedom(enum.Enum):
    """How free plans are to choose the precision of autocast."""

    KEPT = enum.auto()
    """It was named: another one only where nothing fits with it."""
    OPEN = enum.auto()
    """Nobody named one: fp32, or the one that the GPU is made for, whichever is faster."""
    ANY = enum.auto()
    """Any that the GPU has (``--any-precision``)."""


@dataclass(frozen=True, slots=True)
class Combo:
    """What a plan decides besides micro-batch and accumulation.

    Attributes:
        checkpointing: of layers.
        precision: of autocast.
        optim: the optimizer.
        attention: its implementation.
        fsdp: how FSDP2 shards where nothing did; empty where sharding is as asked for.
        loss: the loss that does without all logits; empty where it is the one asked for.
        engine_sleeps: the engine on the GPU does so while the model trains, unlike asked for.
    """

    checkpointing: str
    precision: Precision
    optim: str
    attention: Attention
    fsdp: str = ""
    loss: str = ""
    engine_sleeps: bool = False

    def changes(self) -> dict[str, Any]:
        """As options of an estimate."""
        return {
            "checkpointing": self.checkpointing,
            "precision": self.precision.value,
            "optim": self.optim,
            "attn_implementation": self.attention.value,
            **({"fsdp": self.fsdp} if self.fsdp else {}),
            **(LOSSES[self.loss] if self.loss else {}),
            **({"engine_sleeps": True} if self.engine_sleeps else {}),
        }

    def words(self) -> str:
        """As a phrase."""
        parts = [f"checkpointing {self.checkpointing}", self.precision.value, self.optim]
        if self.attention is not Attention.AUTO:
            parts.append(f"{self.attention.value} attention")
        if self.fsdp:
            parts.append(f"FSDP2 {self.fsdp}")
        if self.loss:
            parts.append(self.loss)
        if self.engine_sleeps:
            parts.append("vLLM asleep while the model trains")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A combination with a micro-batch, and its estimate.

    Attributes:
        combo: the combination.
        batch: samples of a micro-batch.
        grad_accum: micro-batches of an optimizer step.
        estimate: the answer for it.
        engine_share: of the GPU's memory, what the engine on it takes where that is less than was
            asked for; None where it is as asked for.
    """

    combo: Combo
    batch: int
    grad_accum: int
    estimate: Estimate
    engine_share: float | None = None

    @property
    def largest_engine_share(self) -> float | None:
        """The most that an engine on the GPU may take with this sure to fit; None if no share."""
        assert self.estimate.gpu is not None
        return self.estimate.gpu.largest_engine_share

    @property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return self.estimate.verdict

    @property
    def headroom_bytes(self) -> int:
        """What is left of the card, negative where something is missing."""
        assert self.estimate.gpu is not None
        return self.estimate.gpu.headroom_bytes

    @property
    def samples(self) -> int:
        """Samples of one optimizer step."""
        return self.batch * self.grad_accum

    def changes(self) -> dict[str, Any]:
        """As options of an estimate."""
        changes = {**self.combo.changes(), "batch": self.batch, "grad_accum": self.grad_accum}
        share = self.engine_share
        return changes if share is None else {**changes, "engine_share": share}


def combos(probe: Probe, freedom: Freedom) -> tuple[list[Combo], list[Combo]]:
    """The combinations that keep to what was asked for, and those with another precision.

    Checkpointing is free to choose: it changes memory and time, not the training.
    """
    setup = probe.profile.setup
    precisions = other_precisions(probe, setup)
    most = {Freedom.KEPT: 0, Freedom.OPEN: 1, Freedom.ANY: len(precisions)}[freedom]
    choices = [setup.precision, *precisions[:most]]
    others = precisions if freedom is Freedom.KEPT else []
    return list(_product(setup, choices)), list(_product(setup, others))


def _product(setup: Setup, precisions: Sequence[Precision]) -> Iterator[Combo]:
    checkpointing = list(dict.fromkeys(("none", setup.checkpointing, "full")))
    # the implementations of attention compute the same; sdpa does without the score matrix
    attention = [setup.attn_implementation]
    optimizers = [setup.optimizer]
    for options in implementations(setup):
        if "optim" in options:
            optimizers.append(options["optim"])
        else:
            attention.append(Attention(options["attn_implementation"]))
    for optim in optimizers:
        for kind in attention:
            for precision in precisions:
                for mode in checkpointing:
                    yield Combo(mode, precision, optim, kind)


def implementations(setup: Setup) -> Iterator[dict[str, Any]]:
    """Options that compute the same as what a setup names, in less memory."""
    torch = setup.software.torch
    if setup.optimizer in SAME_TRAINING and (torch is None or torch >= _FUSED_SINCE):
        yield {"optim": SAME_TRAINING[setup.optimizer]}
    if setup.attn_implementation is Attention.EAGER:
        yield {"attn_implementation": Attention.SDPA.value}


def lighter(combinations: Sequence[Combo]) -> list[Combo]:
    """The same combinations with lighter optimizers; what they train is not the same."""
    first = combinations[0]
    num_states = STATES_OF.get(first.optim, 2)
    names = [name for name in LIGHTER if STATES_OF[name] < num_states]
    same_optimizer = [combo for combo in combinations if combo.optim == first.optim]
    return [replace(combo, optim=name) for name in names for combo in same_optimizer]


def sharded(setup: Setup, combinations: Sequence[Combo]) -> list[Combo]:
    """The same combinations with what is trained cut among the GPUs, where each has it whole."""
    distributed = setup.distributed
    whole = distributed.strategy is Strategy.DDP and not distributed.shares_model
    if distributed.data_ranks == 1 or distributed.pp > 1 or not whole:
        return []
    return [replace(combo, fsdp=Fsdp.FULL_SHARD.value) for combo in combinations]


def asleep(setup: Setup, combinations: Sequence[Combo]) -> list[Combo]:
    """The same combinations with the engine on the GPU asleep while the model trains."""
    rollouts = setup.rollouts
    if rollouts is None or rollouts.engine is not Engine.VLLM or rollouts.engine_sleeps:
        return []
    return [replace(combo, engine_sleeps=True) for combo in combinations]


def without_logits(setup: Setup, combinations: Sequence[Combo]) -> list[Combo]:
    """What recomputes most, with each loss that does without all logits."""
    recomputing = [combo for combo in combinations if combo.checkpointing == "full"]
    return [replace(recomputing[-1], loss=loss) for loss in losses(setup)]


def losses(setup: Setup) -> list[str]:
    """Those of :data:`LOSSES` that a run can be given: SFTTrainer's in the Trainer's loop alone."""
    if setup.use_liger_kernel or setup.fused_loss:
        return []
    by_trainer = setup.loop is Loop.TRAINER and setup.method.is_supervised
    return [name for name in LOSSES if by_trainer or name != BY_SFT_TRAINER]


def other_precisions(probe: Probe, setup: Setup) -> list[Precision]:
    """Other autocast precisions that the GPU computes in, the safer one first.

    Half-precision weights have no use for autocast; fp32 instead of an autocast that was asked
    for costs memory and time, so it is never proposed.
    """
    if setup.loaded_dtype in _HALF or setup.master_weights:
        return []
    try:
        facts = probe.estimate(batch=smallest_batch(setup)).model
    except MissingDependencyError:
        return []  # other runs of the model may be answered without
    if facts.parameters and facts.parameter_bytes < 3 * facts.parameters:
        return []
    precisions = []
    if probe.spec.has_bf16:
        precisions.append(Precision.BF16)
    if probe.spec.has_fast_fp16:
        precisions.append(Precision.FP16)
    return [precision for precision in precisions if precision is not setup.precision]


class Finder:
    """Looks for the largest micro-batch of combinations.

    Args:
        probe: answers single points.
        samples: of one optimizer step, of one GPU.
    """

    shares_gpu = False
    """Whether an engine that writes completions is on the GPU, too."""
    is_exact = False
    """Whether a step must have the samples asked for and no more: trainers that write completions
    stop where ``num_generations`` does not divide what they write at once."""
    unit = 1
    """What a micro-batch must be a multiple of."""
    smallest = 1
    """The smallest micro-batch with which the trainer begins."""

    def __init__(self, probe: Probe, samples: int) -> None:
        self.probe = probe
        self.samples = samples
        rollouts = probe.profile.setup.rollouts
        self.shares_gpu = rollouts is not None and rollouts.engine is Engine.VLLM
        self.is_exact = probe.profile.setup.method.generates
        self.unit = probe.profile.setup.batch_unit
        self.smallest = smallest_micro_batch(probe.profile.setup, samples)

    def at(self, combo: Combo, batch: int, grad_accum: int | None = None) -> Candidate:
        """A combination with a micro-batch; accumulation makes up the rest, rounded up."""
        accum = -(-self.samples // batch) if grad_accum is None else grad_accum
        estimate = self.probe.estimate(**combo.changes(), batch=batch, grad_accum=accum)
        return Candidate(combo, batch, accum, estimate)

    def with_share(self, candidate: Candidate, share: float) -> Candidate:
        """The same with another share for the engine on the GPU."""
        changes = {**candidate.changes(), "engine_share": share}
        return replace(candidate, estimate=self.probe.estimate(**changes), engine_share=share)

    def candidates(self, combo: Combo) -> list[Candidate]:
        """The plans worth a look: what surely fits, what might, else the smallest.

        Of the micro-batches that fit, the one with the fewest accumulation steps, made as small as
        those steps allow; and, where its product is above the effective batch, the largest one
        that divides it. That alone where a step must be :attr:`is_exact`. The
        :attr:`smallest` is looked at or, as it keeps no gradients of earlier ones, the whole step
        at once.
        """
        surely = self._largest(combo, lambda c: c.verdict is Verdict.FITS)
        maybe = self._largest(combo, lambda c: c.verdict is not Verdict.DOES_NOT_FIT, surely)
        candidates = self._plans(combo, surely) if surely else []
        steps = self._split(surely)[1] if surely else self.samples + 1
        if maybe > surely and self._split(maybe)[1] < steps:
            candidates += self._plans(combo, maybe)[:1]
        smallest = dict.fromkeys((self.smallest, self.samples))
        candidates = candidates or [self.at(combo, batch) for batch in smallest]
        return [*candidates, *self._with_less(combo, surely)]

    def _with_less(self, combo: Combo, surely: int) -> list[Candidate]:
        """What surely fits with fewer steps once the engine on the GPU takes less than asked for.

        Args:
            combo: the combination.
            surely: the largest micro-batch that surely fits with the share that was asked for.
        """
        if not self.shares_gpu or combo.engine_sleeps:
            return []
        largest = self._largest(combo, lambda c: c.largest_engine_share is not None, surely)
        if largest == surely or (surely and self._split(largest) == self._split(surely)):
            return []
        return [
            self.with_share(each, each.largest_engine_share)
            for each in self._plans(combo, largest)
            if each.largest_engine_share is not None and each.verdict is not Verdict.FITS
        ]

    def _plans(self, combo: Combo, largest: int) -> list[Candidate]:
        batch, steps = self._split(largest)
        candidates = [self.at(combo, batch, steps)]
        if batch * steps != self.samples:
            candidates.append(self.at(combo, self._largest_divisor(largest)))
        return candidates

    def larger(self, candidate: Candidate) -> Candidate:
        """What would fill the GPU better: as few accumulation steps less as there can be."""
        steps = candidate.grad_accum - 1
        if self.is_exact:
            steps = next(n for n in range(steps, 0, -1) if self.samples % (n * self.unit) == 0)
        return self.at(candidate.combo, -(-self.samples // steps), steps)

    def _split(self, largest: int) -> tuple[int, int]:
        """The micro-batch up to the largest with the fewest accumulation steps, and those."""
        if self.is_exact:
            batch = self._largest_divisor(largest)
            return batch, self.samples // batch
        steps = -(-self.samples // largest)
        return -(-self.samples // steps), steps

    def _largest_divisor(self, largest: int) -> int:
        sizes = range(self.smallest, largest + 1)
        divisors = (n for n in sizes if self.samples % n == 0 and n % self.unit == 0)
        return max(divisors, default=self.smallest)

    def _largest(self, combo: Combo, holds: Callable[[Candidate], bool], floor: int = 0) -> int:
        """The largest micro-batch up to the effective batch for which something holds; 0 if none.

        The whole batch is asked for on its own: without accumulation no gradients are alive in
        the forward, so it may fit where a smaller one with two steps does not.
        """
        if floor >= self.samples or holds(self.at(combo, self.samples)):
            return self.samples
        sizes: Sequence[int] = range(max(floor + 1, self.smallest), self.samples)
        if self.is_exact:
            sizes = [n for n in sizes if self.samples % n == 0 and n % self.unit == 0]
        number = bisect_left(sizes, True, key=lambda size: not holds(self.at(combo, size)))
        return sizes[number - 1] if number else floor
