"""Single changes of a run by which ``memest.suggest`` makes it fit, and what each is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memest.config.parallelism import Strategy
from memest.config.quantization import Format
from memest.config.rollouts import Engine
from memest.config.setup import Precision, Setup
from memest.report.suggestions import Suggestion
from memest.search.combos import STATES_OF, implementations

__all__ = [
    "ALL_LINEAR",
    "NOTHING",
    "Change",
    "batches_of",
    "cut_from_host",
    "lean_of",
    "more_gpus",
    "other_implementations",
    "other_optimizers",
    "sleeping_engine",
    "smaller_evaluations",
    "with_adapters",
    "with_checkpointing",
]

_MOST_GPUS = 8
_RANK = 16
_HOST_STEPS = (16, 4, 1)
"""Batches of an evaluation between two moves of its predictions to the host, to be tried."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something to try.

    Attributes:
        kind: of which one suggestion is enough.
        words: what is done, as a phrase.
        options: what is given in addition or in place.
        distance: how far it leads from the run that was asked for; 0 trains the same.
        training: what makes the training another one.
    """

    kind: str
    words: str
    options: dict[str, Any] = field(hash=False)
    distance: int = 0
    training: str = ""

    def includes(self, made: Suggestion) -> bool:
        """Whether all that another one does is done here, and more."""
        return all(self.options.get(name) == value for name, value in made.options)

    def then(self, other: Change) -> Change:
        """Both together."""
        return Change(
            f"{self.kind} {other.kind}".strip() if not other.distance else other.kind,
            f"{self.words}, {other.words}".removeprefix(", "),
            {**self.options, **other.options},
            max(self.distance, other.distance),
            other.training or self.training,
        )


NOTHING = Change("", "", {})
ALL_LINEAR = Change("", "on all linear layers", {"lora_target_modules": "all-linear"})


def lean_of(setup: Setup, *, optimizer: bool = True) -> Change:
    """What trains the same in less memory; without what another optimizer would replace."""
    change = NOTHING
    same = (*other_implementations(setup), *sleeping_engine(setup), *with_checkpointing(setup))
    for each in same:
        if optimizer or "optim" not in each.options:
            change = change.then(each)
    return change


def batches_of(setup: Setup, batch: int) -> Change:
    """Micro-batches of so many samples, and as many samples a step as before."""
    accum = setup.grad_accum * (setup.batch // batch)
    options = {"batch": batch, "grad_accum": accum}
    return Change("batch", f"micro-batches of {batch}, {accum} a step", options)


def other_implementations(setup: Setup) -> Iterator[Change]:
    """Other implementations of the same."""
    for options in implementations(setup):
        for name, value in options.items():
            yield Change(name, value if name == "optim" else f"{value} attention", options)


def with_checkpointing(setup: Setup) -> Iterator[Change]:
    """Layers that are computed again in backward."""
    if setup.checkpointing == "none":
        yield Change("checkpointing", "checkpointing", {"checkpointing": "full"})


def smaller_evaluations(setup: Setup) -> Iterator[list[Change]]:
    """The same steps, and an evaluation that keeps less on the GPU, for each way to that.

    Source: ``Trainer.evaluation_loop`` of transformers 5.23: predictions go to the host every
    ``eval_accumulation_steps`` batches; without it they are concatenated on the GPU until the end.
    """
    if setup.eval_samples is not None:
        every = [n for n in _HOST_STEPS if n < (setup.eval_accumulation_steps or n + 1)]
        words = "predictions of the evaluation to the host every"
        yield [
            Change(
                "evaluation",
                f"{words} {n} batches" if n > 1 else f"{words} batch",
                {"eval_accumulation_steps": n},
            )
            for n in every
        ]
        words = "only the loss kept of the evaluation (as little: preprocess_logits_for_metrics"
        training = "no predictions for compute_metrics"
        options = {"prediction_loss_only": True}
        yield [Change("predictions", f"{words} that takes the argmax)", options, 1, training)]
    elif setup.eval_batch is not None and setup.eval_batch > 1:
        sizes = [setup.eval_batch >> n for n in range(1, setup.eval_batch.bit_length())]
        yield [
            Change("evaluation", f"evaluation in batches of {size}", {"eval_batch": size})
            for size in sizes
        ]


def sleeping_engine(setup: Setup) -> Iterator[Change]:
    """An engine on the GPU that is there while it writes alone."""
    rollouts = setup.rollouts
    if rollouts is not None and rollouts.engine is Engine.VLLM and not rollouts.engine_sleeps:
        yield Change("engine", "vLLM asleep while the model trains", {"engine_sleeps": True})


def other_optimizers(setup: Setup) -> Iterator[Change]:
    """Fewer or smaller states; those of adapters are small anyway."""
    optim = setup.optimizer
    if setup.adapter is not None:
        return
    if optim.startswith("adam") and "bit" not in optim:
        training = f"states of 8 bits in place of {optim}'s"
        yield Change("optimizer", "8-bit AdamW", {"optim": "adamw_bnb_8bit"}, 2, training)
    if STATES_OF.get(optim, 2) > STATES_OF["adafactor"]:
        training = f"in place of {optim}"
        yield Change("optimizer", "Adafactor", {"optim": "adafactor"}, 2, training)


def with_adapters(setup: Setup) -> Iterator[Change]:
    """Adapters, and a base of fewer bits below them."""
    if setup.quantization is not None:
        return
    base = "a base of 4 bits"
    if setup.adapter is not None:
        yield Change("4-bit base", "QLoRA", {"qlora": True}, 4, base)
        return
    rank, alone = {"lora_r": _RANK}, "trains adapters only"
    yield Change("adapter", f"LoRA of rank {_RANK}", rank, 3, alone)
    yield Change("4-bit base", "QLoRA", {"qlora": True, **rank}, 4, f"{alone}, beside {base}")


def cut_from_host(setup: Setup) -> Iterator[Change]:
    """Shards of 4-bit weights that are cut in host memory: else each GPU has them whole at first.

    FSDP1 flattens the weights of a unit into one of one dtype, hence their storage and the rest.
    """
    base, distributed = setup.quantization, setup.distributed
    half = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}.get(setup.precision)
    is_4bit = base is not None and base.format is Format.BNB_4BIT
    if not is_4bit or half is None or distributed.strategy is not Strategy.FSDP:
        return
    options = {
        "fsdp_version": 1,
        "fsdp_cpu_ram_efficient_loading": True,
        "bnb_4bit_quant_storage": half,
        "dtype": half,
        "prepare_kbit": False,
    }
    training = f"what is not quantised is {half}"
    yield Change("loading", "FSDP1, cut in host memory", options, 3, training)
    words = "FSDP1, cut and kept in host memory"
    yield Change("loading", words, {**options, "fsdp_offload": True}, 3, training)


def more_gpus(setup: Setup) -> Iterator[Change]:
    """Shards on as many GPUs as it takes, up to those of one machine."""
    distributed = setup.distributed
    if distributed.shares_model or distributed.pp > 1:
        return
    sharded = distributed.strategy in (Strategy.FSDP, Strategy.ZERO)
    shards = {} if sharded else {"fsdp": "full_shard"}
    name = "shards" if sharded else "FSDP"
    number = max(distributed.num_gpus * (2 if distributed.num_gpus > 1 and sharded else 1), 2)
    while number <= _MOST_GPUS:
        options = {**shards, "num_gpus": number}
        yield Change(
            "gpus", f"{name} on {number} GPUs", options, 5, f"{number} GPUs, each with its batch"
        )
        number *= 2
