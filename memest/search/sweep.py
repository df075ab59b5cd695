"""``memest.sweep``: one question over a grid of options, for one model or many."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memest.config.options import read_whole, split_inputs
from memest.errors import ConfigError, MemestError, UnknownModelError
from memest.search.answer import WorkUnit, answer, in_order, units_of
from memest.search.grid import Grid, gpus_of, read_grid, setup_options
from memest.search.points import Sweep, SweepPoint

if TYPE_CHECKING:
    import torch

__all__ = ["SweepPlan", "available_cores", "plan", "sweep"]

Progress = Callable[[str], None]


def sweep(
    models: str | torch.nn.Module | Sequence[str | torch.nn.Module],
    grid: Mapping[str, Any] | None = None,
    *,
    jobs: int = 1,
    ray: str | bool | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Sweep:
    """Estimate a model, or several, at every point of a grid of options.

    Args:
        models: one model or several, each as for :func:`memest.estimate`.
        grid: options to vary, in any of their spellings, to their values: a list, one value, or
            text as on the command line (``"1:64:x2"``). The last one runs fastest.
        jobs: processes of this machine; several need names of models, not live modules, and in a
            script ``if __name__ == "__main__":`` around the call.
        ray: answer on a Ray cluster: True or ``"auto"`` for the one this machine is part of,
            ``"local"`` to start one, or its address.
        trust_remote_code: run code that a model's repository brings.
        progress: called with one line for each longer thing done in this process.
        **options: what is the same at every point, GPU included; several GPUs become an axis.
            ``inputs``, ``loss``, ``step_fn``, ``dims`` and ``model_args`` of a module of one's own
            are among them, as for :func:`memest.estimate`.

    Returns:
        A point for every combination, in the order of models and axes whatever ran first. A point
        that cannot be estimated says why and takes no other with it.

    Raises:
        ConfigError: for an unknown option, a value that no point can have, or too many points.
        UnknownModelError: for a model that leads nowhere.
        UnknownGpuError: for a GPU that is not in the catalogue.
        MissingDependencyError: without torch, or without ray where it was asked for.

    Example:
        >>> import memest
        >>> answers = memest.sweep(
        ...     "prajjwal1/bert-tiny", {"batch": [1, 2], "seq_len": [32, 64]}, gpu="t4", fp16=True
        ... )
        >>> [point.verdict.value for point in answers.points]
        ['fits', 'fits', 'fits', 'fits']
    """
    sweep_plan = plan(
        models, grid, jobs=jobs, ray=ray, trust_remote_code=trust_remote_code, **options
    )
    return sweep_plan.collect(sweep_plan.points(progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A sweep whose words were checked and whose points are not answered yet."""

    labels: tuple[str, ...]
    grid: Grid
    units: tuple[WorkUnit, ...]
    jobs: int | None
    ray: str | None

    @property
    def num_points(self) -> int:
        """Points of all models."""
        return len(self.labels) * self.grid.num_points

    def points(self, progress: Progress | None = None) -> Generator[SweepPoint, None, None]:
        """Answer one point after the other, in order.

        Args:
            progress: told about each longer thing done in this process.
        """
        if self.ray is not None:
            from memest.search.executors import answer_on_ray

            sweep_points = answer_on_ray(self.units, self.ray, self.jobs)
            return in_order(sweep_points, range(self.num_points))
        jobs = self.jobs or min(len(self.units), available_cores())
        units = units_of(self.units, jobs)
        if min(jobs, len(units)) > 1:
            from memest.search.executors import answer_in_processes

            return in_order(answer_in_processes(units, jobs), range(self.num_points))
        return (point for unit in units for point in answer(unit, progress))

    def collect(self, points: Iterable[SweepPoint]) -> Sweep:
        """The result that all points make."""
        return Sweep(
            models=self.labels, axes=self.grid.axes, fixed=self.grid.fixed, points=tuple(points)
        )


def available_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def plan(
    models: Any,
    grid: Mapping[str, Any] | None = None,
    *,
    jobs: int | str | None = 1,
    ray: str | bool | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> SweepPlan:
    """Check everything that can be wrong before the first point; arguments as :func:`sweep`.

    Args:
        models: as for :func:`sweep`.
        grid: as for :func:`sweep`.
        jobs: as for :func:`sweep`; None for a process a model, as far as there are cores.
        ray: as for :func:`sweep`.
        trust_remote_code: as for :func:`sweep`.
        **options: as for :func:`sweep`.
    """
    unique_models = _models(models)
    live = any(not isinstance(model, str) for model in unique_models)
    if jobs is not None:
        jobs = read_whole("--jobs", jobs)
        if jobs < 1:
            raise ConfigError(f"--jobs {jobs} is out of range: it must be at least 1.")
    cluster = _address(ray)
    module_inputs, options = split_inputs(options)
    if live or not module_inputs.travels:
        if cluster is not None or (jobs or 1) > 1:
            raise ConfigError(
                "live modules, tensors and functions stay in this process: leave out jobs and ray, "
                "or name them: package.module:factory, and inputs as x:float32[B,8]."
            )
        jobs = 1
    sweep_grid = read_grid(grid or {}, options, num_models=len(unique_models))
    _check_gpus(sweep_grid, on_cluster=cluster is not None)
    for model in unique_models:
        if isinstance(model, str):
            _check_model(model, trust_remote_code=trust_remote_code)
    if cluster is not None:
        from memest.search.executors import check_ray

        check_ray(cluster)
    labels = tuple(
        model if isinstance(model, str) else type(model).__name__ for model in unique_models
    )
    questions: list[list[Any]] = [[] for _ in unique_models]
    for question in sweep_grid.questions(len(unique_models)):
        questions[question.model].append(question)
    units = tuple(
        WorkUnit(
            model=model,
            label=label,
            trust_remote_code=trust_remote_code,
            questions=tuple(model_questions),
            feed=module_inputs,
        )
        for model, label, model_questions in zip(unique_models, labels, questions, strict=True)
    )
    return SweepPlan(labels=labels, grid=sweep_grid, units=units, jobs=jobs, ray=cluster)


def _models(models: Any) -> list[Any]:
    # a module may be iterable too (torch.nn.Sequential)
    model_list = list(models) if isinstance(models, (list, tuple)) else [models]
    unique_models: list[Any] = []
    for model in model_list:
        if not any(
            model is other or (isinstance(model, str) and model == other) for other in unique_models
        ):
            unique_models.append(model)
    if not unique_models:
        raise ConfigError("no model was named: give one or several, for example bert-base-uncased.")
    return unique_models


def _address(ray: str | bool | None) -> str | None:
    if ray is None or ray is False:
        return None
    return "auto" if ray is True else ray


def _check_gpus(grid: Grid, *, on_cluster: bool) -> None:
    from memest.catalog.nvml import resolve_gpu

    for name in gpus_of(grid):
        if on_cluster and name.strip().lower().startswith("local"):
            raise ConfigError(
                f"--gpu {name} is another GPU on every node of a cluster: name the card, for "
                "example --gpu rtx-4090."
            )
        resolve_gpu(name)
        setup_options([("gpu", name), *(each for each in grid.fixed if each[0] != "gpu")])


def _check_model(model: str, *, trust_remote_code: bool) -> None:
    """Refuse a name that leads nowhere; what is wrong with a file is told by its points."""
    from memest.catalog.resolve import resolve_model

    try:
        resolve_model(model, trust_remote_code=trust_remote_code)
    except UnknownModelError:
        raise
    except MemestError:
        return
