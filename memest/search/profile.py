"""``memest.profile``: one model, any number of questions.

A profile keeps what was traced, so that every further question (another batch, length, number of
micro-batches, optimizer, GPU) is answered from formulas and a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.config.inputs import NO_INPUTS, ModuleInputs, module_inputs_of
from memest.config.life import Life
from memest.config.options import merge_options, setup_from_options
from memest.config.setup import Setup
from memest.estimation.estimate import answer, spot
from memest.estimation.gpu_target import split_place, target_gpus
from memest.estimation.life import run_life
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.estimation.whole_run import resolve_run, steps_run
from memest.profiles.vectorised import PeakQuery, allocated_peaks
from memest.profiles.work import StepWork, step_work
from memest.replay.conf import parse_alloc_conf
from memest.report.life_result import RunLife
from memest.report.result import Estimate, Spot

if TYPE_CHECKING:
    import torch

__all__ = ["Profile", "profile"]

Progress = Callable[[str], None]


def profile(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    inputs: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    step_fn: Callable[..., Any] | str | None = None,
    dims: Mapping[str, int] | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Profile:
    """A model and a training setup to ask questions of.

    Args:
        model: as for :func:`memest.estimate`.
        setup: the training configuration that questions change; ``options`` are another way to
            give it.
        inputs: as for :func:`memest.estimate`.
        loss: as for :func:`memest.estimate`.
        step_fn: as for :func:`memest.estimate`.
        dims: as for :func:`memest.estimate`.
        model_args: as for :func:`memest.estimate`.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.

    Raises:
        ConfigError: options or inputs that cannot be; a model is looked at when it is first asked.
    """
    module_inputs = module_inputs_of(inputs, loss, step_fn, dims, model_args)
    model_profile = Profile(
        model, merge_options(setup, options), module_inputs, trust_remote_code, progress
    )
    model_profile.pending_options = options
    return model_profile


class Profile:
    """One model under one setup, which each question may change.

    Attributes:
        setup: what holds where a question says nothing.
        pending_options: the options that made it, until it is known what the model brings.
    """

    def __init__(
        self,
        model: Any,
        setup: Setup,
        module_inputs: ModuleInputs = NO_INPUTS,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.setup = setup
        self.pending_options: Mapping[str, Any] | None = None
        self._profiler = Profiler.of(
            model,
            module_inputs=module_inputs,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )

    @property
    def traces_made(self) -> int:
        """How many times the model's steps were traced so far."""
        return self._profiler.traces_made

    def known_alone(self) -> AbstractContextManager[None]:
        """Within it, what needs a trace raises :class:`memest.errors.NotKnownError`.

        Example:
            >>> import memest
            >>> model = memest.profile("bert-large-uncased")
            >>> with model.known_alone():  # profiles of popular models come with the package
            ...     _ = model.spot(batch=4, gpu="t4")
        """
        return self._profiler.known_alone()

    def estimate(
        self,
        setup: Setup | None = None,
        *,
        max_batch: bool = False,
        vary: Sequence[str] = (),
        common: bool = True,
        **changes: Any,
    ) -> Estimate:
        """The estimate for the profile's setup with some options changed.

        Args:
            setup: a whole setup in place of the profile's.
            max_batch: look for the largest batch too.
            vary: sizes that further questions will change (``batch``, ``seq_len``, ...): worth a
                few more traces now.
            common: say what it means for the GPUs that people have, where none is named.
            **changes: ``gpu``, ``gpu_memory``, ``device_context`` and ``calibration`` as for
                :func:`memest.estimate`, and options that differ from the profile's setup.
        """
        place, changes = split_place(changes)
        request = self.setup_for(setup, **changes)
        return answer(
            self._profiler, request, max_batch=max_batch, vary=vary, common=common, **place
        )

    def spot(self, setup: Setup | None = None, *, vary: Sequence[str] = (), **changes: Any) -> Spot:
        """The peaks and the verdict of :meth:`estimate` alone, for those who ask many times."""
        place, changes = split_place(changes)
        return spot(self._profiler, self.setup_for(setup, **changes), vary=vary, **place)

    def run(
        self, setup: Setup | None = None, *, gpu: str | Sequence[str] | None = None, **changes: Any
    ) -> Run:
        """What answers a question: the steps, and the stream that the allocator sees."""
        request = self.setup_for(setup, **changes)
        return resolve_run(self._profiler, request, target_gpus(request, gpu=gpu).main.traits)

    def life(self, run: Run, life: Life, steps_peak: int) -> RunLife:
        """The host memory of a run, asked for or not.

        Args:
            run: as :meth:`run` returned it.
            life: what of it.
            steps_peak: the allocated peak of the steps, bytes.
        """
        asked = replace(run, setup=replace(run.setup, life=life))
        return run_life(asked, self._profiler.config, steps_peak)

    def work(
        self, setup: Setup | None = None, *, gpu: str | Sequence[str] | None = None, **changes: Any
    ) -> StepWork:
        """Arithmetic, launches and memory written by one optimizer step in the steady state."""
        request = self.setup_for(setup, **changes)
        # a step alone: nothing that comes behind the steps is traced for it
        run = steps_run(self._profiler, request, target_gpus(request, gpu=gpu).main.traits)
        return step_work(run.program.trace_at(run.point), run.setup.grad_accum)

    def allocated(
        self, points: Sequence[Mapping[str, Any]], *, gpu: str | Sequence[str] | None = None
    ) -> list[int]:
        """The allocated peaks of many points at once, with NumPy over the formulas.

        Allocations are rounded to 512 bytes and nothing else: that is all there is under
        expandable segments. With fixed segments the rests of blocks too small to be split off come
        on top, below 1 MiB for each large block.

        Args:
            points: what each one changes of the profile's setup.
            gpu: whose kernels run.

        Returns:
            Bytes, in the order of the points.
        """
        runs: list[Run] = []
        names = sorted({name for point in points for name in point})
        for point in points:
            request = self.setup_for(**point)
            traits = target_gpus(request, gpu=gpu).main.traits
            vary = names if len(points) > 3 else ()
            runs.append(resolve_run(self._profiler, request, traits, vary))
        if not all(f.is_program_alone for f in runs):
            # wrappers, evaluations, generations and other lengths have no formulas
            return [self._allocated_peak(f) for f in runs]
        return allocated_peaks(
            [
                PeakQuery(f.program, f.point, f.gpu, f.setup.num_steps, f.setup.grad_accum)
                for f in runs
            ]
        )

    def _allocated_peak(self, run: Run) -> int:
        """The allocated peak of one point, under expandable segments."""
        conf = parse_alloc_conf("expandable_segments:True")
        return self._profiler.replays(conf).of(run.short_stream).peak_allocated_bytes

    def with_own_parts(self, setup: Setup, options: Mapping[str, Any]) -> Setup:
        """A whole setup with what the model brings, where its options name none."""
        return self._profiler.with_own_parts(setup, options)

    def setup_for(self, setup: Setup | None = None, **changes: Any) -> Setup:
        """The setup of a question."""
        if self.pending_options is not None:
            self.setup, self.pending_options = (
                self._profiler.with_own_parts(self.setup, self.pending_options),
                None,
            )
        base = self.setup if setup is None else setup
        return setup_from_options(base, **changes) if changes else base
