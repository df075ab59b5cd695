"""What a preference method trains for: its loss, and the reference that the loss asks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from memest.config.kinds import Dtype, LogProbs, Method
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.losses.fused_head import fused_head, has_router_loss
from memest.trace.losses.online_dpo import TrainingStep, online_dpo_step
from memest.trace.losses.preference import LossOfPairs, loss_of_pairs
from memest.trace.losses.preference_logits import Batch, Call
from memest.trace.losses.preference_recipes import ScriptLoss, torchtune_dpo
from memest.trace.losses.rollouts import loss_of_rollouts, score_completions
from memest.trace.losses.trl import parts_for_trl
from memest.trace.losses.verl import score_by_verl, score_values, value_step, verl_step
from memest.trace.model.adapters import base_of, copy_kept_dtypes
from memest.trace.model.value_head import with_values

__all__ = ["Objective", "objective_of", "recomputing_nothing", "without_dropout"]

_OF_PAIRS = ("entropy", "mean_logits", "hits")
_REPORTED: dict[Method, tuple[str, ...]] = {
    Method.DPO: _OF_PAIRS,
    Method.IPO: _OF_PAIRS,
    Method.KTO: ("entropy", "mean_logits"),
}
"""What a trainer has the fused head compute for its log; of completions it is entropies alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What the Trainer's ``compute_loss`` does in place of one forward.

    Attributes:
        loss: calls the model, and the reference where it has one; None where there is a step or a
            script.
        script: the same in a script's loop; None for the Trainer's.
        step: all of ``training_step``, of a trainer that has its own; None for transformers'.
        score: what both models are asked of completions before a step.
        make_scored: makes the tensors of what is scored at once; None for those of a micro-batch.
        trained: the model.
        reference: a second model; None where the trained one stands for it, its adapters off, or
            where there is none.
        recomputes_reference: checkpointing stays on while the reference is asked.
    """

    loss: LossOfPairs | None = None
    script: ScriptLoss | None = None
    step: TrainingStep | None = None
    score: Callable[[Call | None, Call | None, Batch], None] = score_completions
    make_scored: Callable[[], dict[str, Any]] | None = None
    trained: Any
    reference: torch.nn.Module | None = None
    recomputes_reference: bool = False

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """While the reference is asked: adapters are off, and a loss has nothing recomputed."""
        adapted = self.reference is None
        with (
            nullcontext() if self.step or self.recomputes_reference else self.recomputing_nothing(),
            self.trained.disable_adapter() if adapted else nullcontext(),
        ):
            yield

    def in_script(self, model: Call, reference: Call, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The loss of a script's loop, and what its names keep."""
        assert self.script is not None
        return self.script(model, reference, batch)

    def recomputing_nothing(self) -> AbstractContextManager[None]:
        """``disable_gradient_checkpointing`` of the trained model."""
        return recomputing_nothing(self.trained)


@contextmanager
def objective_of(model: Any, setup: Setup) -> Iterator[Objective | None]:
    """What a setup trains a model for, for the time of a trace; None for the usual loss.

    Args:
        model: on meta, perhaps wrapped by adapters.
        setup: the run.

    Raises:
        ConfigError: a model that the method's trainer does not take.
    """
    method = setup.method
    if method.is_supervised:
        yield None
        return
    base = base_of(model)
    asks = setup.has_reference
    reference = _reference_of(base, setup) if setup.has_reference_model and base is model else None
    of_torchtune = setup.log_probs is LogProbs.TORCHTUNE
    with ExitStack() as stack:
        drops_out = method in (Method.GRPO, Method.RLOO) or of_torchtune or setup.values_tokens
        if not drops_out:  # disable_dropout
            stack.enter_context(without_dropout(model))
        if setup.scores_by_fused_head:
            flag = f"--method {method}"
            forward = fused_head(
                parts_for_trl(base, flag),
                _REPORTED.get(method, ("entropy",)),
                balances_with_gradients_alone=True,
            )
            stack.enter_context(mock.patch.object(base, "forward", forward))
            if reference is not None:
                reference.forward = fused_head(
                    parts_for_trl(reference, flag), (), balances_with_gradients_alone=True
                )
        elif setup.values_tokens:
            stack.enter_context(mock.patch.object(base, "forward", with_values(base)))
        elif setup.is_critic:
            # verl's config.classifier_dropout = 0
            stack.enter_context(mock.patch.object(base, "dropout", torch.nn.Dropout(0.0)))
        elif method is not Method.REWARD:
            parts = parts_for_trl(base, f"--method {method}", calls_head=method.writes_pairs)
            if setup.log_probs is LogProbs.LOGITS and asks and has_router_loss(parts):
                raise ConfigError(
                    f"--log-probs logits with --method {method} is not priced for "
                    f"{type(base).__name__}, whose routers have a loss of their own: leave "
                    "--log-probs out, for TRL 1.15 and later."
                )
        if method.writes_pairs:
            yield Objective(step=online_dpo_step, trained=model, reference=reference)
            return
        if of_torchtune:
            yield Objective(
                script=torchtune_dpo,
                trained=model,
                reference=reference,
                recomputes_reference=True,
            )
            return
        if setup.log_probs is LogProbs.VERL:
            step, score = (
                (value_step, score_values) if setup.is_critic else (verl_step, score_by_verl)
            )
            yield Objective(script=step, score=score, trained=model)
            return
        by_trl = method.generates and setup.log_probs is LogProbs.FUSED
        loss = loss_of_rollouts(method) if by_trl else loss_of_pairs(method, setup.log_probs)
        yield Objective(
            loss=loss,
            trained=model,
            reference=reference,
            recomputes_reference=setup.log_probs in (LogProbs.SWIFT, LogProbs.FLOAT32),
        )


def _reference_of(model: torch.nn.Module, setup: Setup) -> Any:
    """The model as ``from_pretrained`` gives it once more: not in training mode.

    ``create_reference_model`` copies it instead, without gradients, before the Trainer switches the
    cache of keys and values off; with checkpointing it is off already.
    """
    reference: Any = copy.deepcopy(model)
    copy_kept_dtypes(model, reference)
    if setup.ref_dtype is not Dtype.AUTO and not setup.distributed.in_half:
        dtype = getattr(torch, setup.ref_dtype)
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(dtype)
    if setup.method.writes_pairs:
        reference.requires_grad_(False)
        reference.config.use_cache = not setup.checkpoint_every
    return reference.eval()


@contextmanager
def recomputing_nothing(model: torch.nn.Module) -> Iterator[None]:
    """``gradient_checkpointing_disable``, for a time."""
    with ExitStack() as stack:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                stack.enter_context(mock.patch.object(module, "gradient_checkpointing", False))
        yield


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """``disable_dropout_in_model``: modules alone, not what a model drops by a function."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                stack.enter_context(mock.patch.object(module, "p", 0))
        yield
