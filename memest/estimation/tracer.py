"""Traces of one model: it is built once on the meta device, and its steps are run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memest.config.inputs import NO_INPUTS, ModuleInputs
from memest.config.installed import release
from memest.config.optimizers import facts_of
from memest.config.setup import Setup
from memest.errors import MissingDependencyError
from memest.estimation.question import Question
from memest.events import Trace
from memest.profiles.axes import key_of, sizes_text, traced_setup, windows
from memest.profiles.document import FORMAT
from memest.profiles.known_profiles import StepProfile

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource

__all__ = ["Progress", "Tracer"]

Progress = Callable[[str], None]


class Tracer:
    """Makes the traces of one model. Torch is loaded when the first one has to be made, not before.

    Args:
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        module_inputs: what a module of one's own is fed.
        progress: told what is being done.

    Attributes:
        traces_made: how many times training steps were traced.
    """

    def __init__(
        self,
        source: ModelSource | None = None,
        module: Any = None,
        module_inputs: ModuleInputs = NO_INPUTS,
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.module = module
        self.module_inputs = module_inputs
        self._progress = progress
        self.traces_made = 0

    @property
    def config(self) -> Any:
        """The configuration of the model; None where it has none."""
        if self.source is not None:
            return self.source.config
        return getattr(self.module, "config", None)

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the model's configuration; None where it has none."""
        if self.source is None:
            return getattr(self.config, "model_type", None)
        return (self.config or {}).get("model_type")

    @property
    def thresholds(self) -> list[int]:
        """Lengths at which the configuration says that something changes."""
        config = None if self.source is None else self.source.config
        return sorted(set(windows(config or {})))

    @property
    def is_reproducible(self) -> bool:
        """Whether everything that the traces depend on can be written down, and they be kept."""
        source = self.source
        if source is None or source.config is None or source.trust_remote_code:
            return False
        return self.module_inputs == NO_INPUTS

    def key(self, structure: Setup) -> dict[str, Any]:
        """What the traces of a structure depend on; empty where it cannot be written down."""
        source = self.source
        if not self.is_reproducible or source is None:
            return {}
        key = {
            "format": FORMAT,
            "model": source.id,
            "config": source.config,
            "auto_class": source.auto_class,
            "setup": key_of(structure),
        }
        package = facts_of(structure.optimizer).package
        if package:  # it steps in backward, and is part of the trace
            key["library"] = [package, release(package.replace("-", "_"))]
        if structure.use_liger_kernel or structure.fused_loss:
            key["kernels"] = [release("liger_kernel"), release("cut_cross_entropy")]
        return key

    def meta_model(self, profile: StepProfile, request: Setup) -> Any:
        """The model on the meta device (:class:`memest.trace.session.MetaModel`), built once.

        Raises:
            MemestError: the model cannot be built, or what builds it is not installed.
        """
        meta_model = profile.meta_models.get(request.image_size)
        if meta_model is not None:
            return meta_model
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Tracing a model needs torch and transformers: pip install 'memest[torch]'."
            ) from error
        from memest.trace.session import build

        self.say("building the model on the meta device")
        inputs = self.module_inputs
        meta_model = build(
            traced_setup(request),
            self.source,
            self.module,
            inputs.inputs,
            inputs.loss,
            step_fn=inputs.step_fn,
            dims=inputs.dims,
            model_args=inputs.model_args,
        )
        profile.meta_models[request.image_size] = meta_model
        return meta_model

    def steps(self, question: Question) -> Trace:
        """The training steps of a question.

        Raises:
            MemestError: the steps cannot be traced.
        """
        meta_model = self.meta_model(question.profile, question.request)
        from memest.trace.session import trace_built

        self.say(f"tracing training steps at {sizes_text(question.sizes)}")
        self.traces_made += 1
        return trace_built(meta_model, traced_setup(question.setup), question.gpu)

    def evaluation(self, question: Question, *, generates: bool, ranks: int | None) -> Trace:
        """The first batches of an evaluation, or the first steps of a generation."""
        meta_model = self.meta_model(question.profile, question.request)
        from memest.trace.session import evaluate_built

        self.say(f"tracing an evaluation at {sizes_text(question.sizes)}")
        setup = traced_setup(question.setup)
        return evaluate_built(meta_model, setup, question.gpu, generates=generates, ranks=ranks)

    def say(self, text: str) -> None:
        """Tell of something that takes a while."""
        if self._progress is not None:
            self._progress(text)
