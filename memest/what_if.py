"""``memest.profile``: one model, any number of questions.

A profile keeps what was traced, so that every further question (another batch, length, number of
micro-batches, optimizer, GPU) is answered from formulas and a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memest.errors import ConfigError
from memest.estimator import answer
from memest.models.resolve import resolve_model
from memest.options import setup_from_options
from memest.result import Estimate
from memest.setup import Setup
from memest.tracing import Tracer

if TYPE_CHECKING:
    import torch

__all__ = ["Profile", "profile"]

Progress = Callable[[str], None]


def profile(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Profile:
    """A model and a training setup to ask questions of.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration that questions change; ``options`` are another way to
            give it.
        inputs: example inputs by argument name, for models that are no transformers models.
        loss: ``loss(outputs, batch)`` where the outputs carry none.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.
    """
    if setup is None:
        setup = setup_from_options(**options)
    elif options:
        raise ConfigError("Give either a Setup or options, not both: use dataclasses.replace.")
    return Profile(model, setup, inputs, loss, trust_remote_code, progress)


class Profile:
    """One model under one setup, which each question may change.

    Attributes:
        setup: what holds where a question says nothing.
    """

    def __init__(
        self, model: Any, setup: Setup, inputs: Any = None, loss: Any = None,
        trust_remote_code: bool = False, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.setup = setup
        named = isinstance(model, str)
        source = resolve_model(model, trust_remote_code=trust_remote_code) if named else None
        self._tracer = Tracer(
            source=source, module=None if named else model, inputs=inputs, loss=loss,
            progress=progress,
        )  # fmt: skip

    @property
    def traces_made(self) -> int:
        """How many times the model's steps were traced so far."""
        return self._tracer.traces_made

    def estimate(
        self,
        setup: Setup | None = None,
        *,
        gpu: str | Sequence[str] | None = None,
        gpu_memory: int | str | None = None,
        device_context: int | str | None = None,
        max_batch: bool = False,
        vary: Sequence[str] = (),
        **changes: Any,
    ) -> Estimate:
        """The estimate for the profile's setup with some options changed.

        Args:
            setup: a whole setup in place of the profile's.
            gpu: as for :func:`memest.estimate`.
            gpu_memory: as for :func:`memest.estimate`.
            device_context: as for :func:`memest.estimate`.
            max_batch: look for the largest batch too.
            vary: sizes that further questions will change (``batch``, ``seq_len``, ...): worth a
                few more traces now.
            **changes: options of an estimate that differ from the profile's setup.
        """
        asked = self.setup_for(setup, **changes)
        return answer(
            self._tracer, asked, gpu=gpu, gpu_memory=gpu_memory, device_context=device_context,
            max_batch=max_batch, vary=vary,
        )  # fmt: skip

    def setup_for(self, setup: Setup | None = None, **changes: Any) -> Setup:
        """The setup of a question."""
        base = self.setup if setup is None else setup
        return setup_from_options(base, **changes) if changes else base
