"""Completions that a run writes and learns from: who writes them, how long they are. Torch-free.

Source: TRL 1.16 ``trainer/grpo_config.py``, ``trainer/rloo_config.py``,
``experimental/online_dpo/online_dpo_config.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from memest.config.generation import Generation
from memest.config.option import legal_values, option, plain_values, read_parts, settle
from memest.errors import ConfigError

__all__ = ["ACTOR", "Engine", "Moved", "Rollouts", "read_rollouts"]

ACTOR = "actor"
"""The critic that is a model like the actor, with another head."""

_MAX_TOKENS = 1 << 20
_MAX_STEPS = 1 << 16


class Engine(enum.StrEnum):
    """Who writes the completions."""

    MODEL = "model"
    """The trained model, by ``generate`` of transformers."""
    VLLM = "vllm"
    """vLLM on the same GPU (``vllm_mode="colocate"``)."""
    SERVER = "server"
    """vLLM on other GPUs."""


class Moved(enum.StrEnum):
    """What the trainer has on the host while an engine on its GPU writes."""

    NOTHING = "nothing"
    MODEL = "model"
    OPTIMIZER = "optimizer"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """How completions come about.

    Attributes:
        completion_len: tokens of a completion, the end of ``--seq-len``; None for half of it.
        kl_beta: weight of the divergence from the reference model, which is not there where it
            is 0; None for the method's own.
        num_generations: completions of a prompt; None for the method's own. What is written at
            once holds whole prompts, so it is a multiple.
        steps_per_generation: micro-batches whose completions are written at once; None for those
            of an optimizer step.
        scored_at_once: completions that are scored at once, by verl; None for those of a
            micro-batch.
        engine: who writes them.
        engine_share: of the GPU's memory, what vLLM takes (``gpu_memory_utilization``).
        engine_sleeps: it gives weights and cache back while the model trains.
        engine_gpus: GPUs that share the engine's weights, each with a share of its memory.
        engine_moves: what the trainer has on the host while such an engine writes, and on the GPU
            in every step.
        critic: model of values that trains in turn with the actor, by verl; ``actor`` for one like
            it, empty for none.
        critic_batch: completions of its micro-batch on one GPU; None for those of the actor's.
        critic_moves: what of it is on the host between its turns.

    Raises:
        ConfigError: values that no trainer takes.
    """

    completion_len: int | None = option(
        None,
        "Tokens of a completion, of --seq-len for prompt and completion; left out, half of it.",
        "--completion-len --max-completion-length TOKENS",
        between=(1, _MAX_TOKENS),
    )
    kl_beta: float | None = option(
        None,
        "Weight of the divergence from the reference model, which 0 does without; left out, 0 for "
        "grpo and 0.05 for rloo.",
        "--kl-beta BETA",
    )
    num_generations: int | None = option(
        None,
        "Completions of one prompt, which divide what is written at once and change no memory; "
        "left out, 8 for grpo and 2 for rloo.",
        between=(2, _MAX_STEPS),
    )
    steps_per_generation: int | None = option(
        None,
        "Micro-batches whose completions are generated at once; left out, those of an optimizer "
        "step.",
        between=(1, _MAX_STEPS),
    )
    scored_at_once: int | None = option(
        None,
        "Completions that verl scores at once before a step; left out, those of a micro-batch.",
        "--scored-at-once N log_prob_micro_batch_size_per_gpu",
        between=(1, _MAX_STEPS),
    )
    engine: Engine = option(
        Engine.MODEL,
        f"Who generates: {legal_values(Engine)}. vllm shares the GPU (colocate), server does not.",
        "NAME",
    )
    engine_share: float = option(
        0.3,
        "Part of the GPU's memory that vLLM takes for itself.",
        "--engine-share SHARE vllm_gpu_memory_utilization gpu_memory_utilization",
    )
    engine_sleeps: bool = option(
        False,
        "vLLM gives its weights and its cache back while the model trains.",
        "--engine-sleeps vllm_enable_sleep_mode",
    )
    engine_gpus: int = option(
        1,
        "GPUs that share the weights of vLLM (its tensor parallelism), each with its share of "
        "memory.",
        "--engine-gpus GPUS vllm_tensor_parallel_size",
        between=(1, 1 << 10),
    )
    engine_moves: Moved = option(
        Moved.NOTHING,
        f"What the trainer has on the host while vLLM writes: {legal_values(Moved)}.",
        "WHAT",
    )
    critic: str = option(
        "",
        "The critic of verl's PPO, which trains in turn with the actor: a model, or actor for one "
        "like it.",
        "--critic MODEL",
    )
    critic_batch: int | None = option(
        None,
        "Completions of the critic's micro-batch; left out, those of the actor's.",
        "--critic-batch N",
        between=(1, _MAX_STEPS),
    )
    critic_moves: Moved = option(
        Moved.NOTHING,
        f"What of the critic is on the host between its turns: {legal_values(Moved)}.",
        "--critic-moves WHAT",
    )

    def __post_init__(self) -> None:
        settle(self)
        for flag, value, low, high in (
            ("--kl-beta", self.kl_beta, 0.0, 1e6),
            ("--engine-share", self.engine_share, 0.0, 1.0),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"{flag} {value:g} is out of range: it must be {low:g} to {high:g}."
                )
        if self.engine_sleeps:
            self.check_shares("--engine-sleeps")
        if self.engine_share != 0.3:
            self.check_shares("--engine-share")
        if self.engine_gpus != 1:
            self.check_shares("--engine-gpus")
        if self.engine_moves is not Moved.NOTHING:
            self.check_shares("--engine-moves")
        if not self.critic and (self.critic_batch or self.critic_moves is not Moved.NOTHING):
            flag = "--critic-batch" if self.critic_batch else "--critic-moves"
            raise ConfigError(f"{flag} says nothing without a critic: add --critic actor.")
        if not self.engine_share:
            raise ConfigError(
                "--engine-share 0 leaves vLLM no memory: give it a part, 0.3 as TRL does."
            )

    def check_shares(self, flag: str) -> None:
        """Raises ConfigError where no engine shares the GPU, of which an option says something."""
        if self.engine is not Engine.VLLM:
            raise ConfigError(
                f"{flag} says nothing where no engine shares the GPU: add --engine vllm or drop it."
            )

    @property
    def as_traced(self) -> Rollouts:
        """What of it changes a step: neither how much else is written, nor what an engine takes."""
        return Rollouts(
            completion_len=self.completion_len,
            kl_beta=None if self.kl_beta is None else float(self.kl_beta > 0),
            scored_at_once=self.scored_at_once,
            engine=Engine.MODEL if self.engine is Engine.MODEL else Engine.SERVER,
        )

    def with_beta(self, beta: float) -> Rollouts:
        """The same with a method's own weight of the divergence, where none is named."""
        return self if self.kl_beta is not None else replace(self, kl_beta=beta)

    def completion_of(self, seq_len: int) -> int:
        """Tokens of a completion, of so many tokens of prompt and completion.

        Raises:
            ConfigError: they leave no room for a prompt.
        """
        tokens = max(1, seq_len // 2) if self.completion_len is None else self.completion_len
        if tokens >= seq_len:
            raise ConfigError(
                f"--completion-len {tokens} leaves no room for a prompt in --seq-len {seq_len}, "
                f"which counts both: write --seq-len {2 * tokens}, for prompts of {tokens} tokens."
            )
        return tokens

    def assumed(self, seq_len: int | None) -> list[str]:
        """What is said of completions where nobody named their length."""
        if self.completion_len is not None or seq_len is None:
            return []
        tokens = self.completion_of(seq_len)
        return [f"completions of {tokens} tokens, half of the length (--completion-len sets it)"]

    def generation_of(self, seq_len: int) -> Generation | None:
        """The ``generate`` that writes completions; None where an engine does.

        Args:
            seq_len: tokens of prompt and completion.

        Raises:
            ConfigError: as for :meth:`completion_of`.
        """
        if self.engine is not Engine.MODEL:
            return None
        return Generation(new_tokens=self.completion_of(seq_len), draws=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; of a critic where there is one."""
        values = plain_values(self)
        return values if self.critic else {n: v for n, v in values.items() if "critic" not in n}


def read_rollouts(source: Any) -> Rollouts | None:
    """Rollouts from a mapping of their names, or themselves; None where nothing is said of them.

    Raises:
        ConfigError: another kind of value, or names that there are not.
    """
    return read_parts(
        Rollouts,
        source,
        "rollouts",
        takes="give a mapping of completion_len and the like",
        instead="use --completion-len and its neighbours",
    )
