"""A grid over options: the points that axes span, for one model or several. Torch-free."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memest.catalog.gpu_counts import split_gpu_counts
from memest.config.option_table import OWN_MODULE_NAMES, PLACE
from memest.config.options import find_option, is_harmless, setup_from_options
from memest.config.setup import Software
from memest.errors import ConfigError
from memest.search.axes import MAX_POINTS, Axis, axis_option, axis_values, read_value

__all__ = ["Grid", "GridPoint", "gpus_of", "json_value", "read_grid", "setup_options"]

_APART = frozenset({*PLACE, *OWN_MODULE_NAMES, "trust_remote_code"})
"""Options that are arguments of an estimate and no part of the training setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One point before it is answered: plain data, so that it travels between processes.

    Attributes:
        index: its place among all points.
        model: index of its model.
        options: what is asked, by the options' keywords: the axes first, then what is fixed.
    """

    index: int
    model: int
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Axes, and the options that are the same everywhere."""

    axes: tuple[Axis, ...]
    fixed: tuple[tuple[str, Any], ...]

    @property
    def num_points(self) -> int:
        """Points for one model."""
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def has_gpu(self) -> bool:
        """Whether the grid names a GPU, or its memory."""
        names = {name for name, _ in self.fixed} | {axis.name for axis in self.axes}
        return bool(names & {"gpu", "gpu_memory"})

    def questions(self, num_models: int = 1) -> Iterator[GridPoint]:
        """Every point: models one after the other, the last axis runs fastest."""
        names = [axis.name for axis in self.axes]
        values = [axis.values for axis in self.axes]
        points = itertools.product(range(num_models), itertools.product(*values))
        for index, (model, combination) in enumerate(points):
            options = (*zip(names, combination, strict=True), *self.fixed)
            yield GridPoint(index=index, model=model, options=options)


def gpus_of(grid: Grid) -> tuple[str, ...]:
    """Every GPU that the grid names."""
    names = [value for axis in grid.axes if axis.name == "gpu" for value in axis.values]
    names += [value for name, value in grid.fixed if name == "gpu"]
    return tuple(name for name in names if name is not None)


def setup_options(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The options of a point that belong to the training setup.

    Raises:
        ConfigError: the name of a GPU says another number of them than an option.
    """
    split = split_gpu_counts(dict(options))
    return {name: value for name, value in split.items() if name not in _APART}


def json_value(value: Any) -> Any:
    """A value as JSON has it: numbers, text, booleans, null, and lists of text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Software):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return ",".join(f"{name}={json_value(each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return [json_value(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _read_fixed_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The fixed options by their keywords, and the GPUs if there are several."""
    fixed_options: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    gpus: list[Any] = []
    for name, value in options.items():
        if value is None or is_harmless(name, value):
            continue
        option = find_option(name)
        if option.name == "gpu" and not isinstance(value, str):
            gpus = list(value)
            continue
        value = read_value(option, value)
        if option.name in fixed_options and fixed_options[option.name] != value:
            raise ConfigError(
                f"{spellings[option.name]} and {name} are the same option, given as "
                f"{fixed_options[option.name]} and {value}: drop one."
            )
        fixed_options[option.name], spellings[option.name] = value, name
    if len(gpus) == 1:
        fixed_options["gpu"] = gpus.pop()
    return fixed_options, gpus


def read_grid(grid: Mapping[str, Any], options: Mapping[str, Any], *, num_models: int = 1) -> Grid:
    """Put axes and fixed options together, and look for what can be wrong with the words.

    Args:
        grid: option to values: an iterable, one value, or text as on the command line. Options in
            any of their spellings.
        options: what is the same at every point. Several GPUs become the last axis.
        num_models: how many models the grid is asked of, for the limit on points.

    Raises:
        ConfigError: for an unknown option or one that is given twice, a value that no point can
            have, or too many points.
    """
    fixed_options, gpus = _read_fixed_options(options)
    axes: dict[str, Axis] = {}
    for name, source in grid.items():
        option = axis_option(str(name))
        if option.name in axes:
            raise ConfigError(f"{option.flags[0]} is swept over twice: put its values together.")
        axes[option.name] = Axis(name=option.name, values=axis_values(option, source))
    if gpus:
        if "gpu" in axes:
            raise ConfigError("--gpu is given and swept over: drop one of the two.")
        axes["gpu"] = Axis(name="gpu", values=axis_values(find_option("gpu"), gpus))
    _check_twice(axes, fixed_options)
    sweep_grid = Grid(axes=tuple(axes.values()), fixed=tuple(fixed_options.items()))
    total = sweep_grid.num_points * num_models
    if total > MAX_POINTS:
        sizes = [f"{len(axis.values):,} x {axis.label}" for axis in sweep_grid.axes]
        models = [f"{num_models} models"] if num_models > 1 else []
        raise ConfigError(
            f"the grid has {total:,} points ({', '.join(models + sizes)}), more than "
            f"{MAX_POINTS:,}: take fewer values, for example by a factor as in batch=1:64:x2."
        )
    _check_values(sweep_grid)
    return sweep_grid


def _check_twice(axes: Mapping[str, Axis], fixed_options: Mapping[str, Any]) -> None:
    """Refuse an option that is fixed and swept over, precision under its three names too."""
    for name in axes:
        option = find_option(name)
        for fixed_name in fixed_options:
            fixed_option = find_option(fixed_name)
            if fixed_option is option or (option.field == fixed_option.field == "precision"):
                raise ConfigError(
                    f"{fixed_option.flags[0]} is given and {option.flags[0]} swept over: drop one "
                    "of the two."
                )


def _check_values(grid: Grid) -> None:
    """Refuse a value that makes every point it is part of impossible, whatever the model.

    A value that is impossible only together with another one is left to its points.
    """
    axes = [axis for axis in grid.axes if axis.name not in _APART]
    possible: list[set[int]] = [set() for _ in axes]
    refusals: dict[tuple[int, int], ConfigError] = {}
    fixed_options = setup_options(grid.fixed)
    for places in itertools.product(*(range(len(axis.values)) for axis in axes)):
        options = {axis.name: axis.values[place] for axis, place in zip(axes, places, strict=True)}
        try:
            setup_from_options(**options, **fixed_options)
        except ConfigError as problem:
            if not axes:
                raise
            for position in enumerate(places):
                refusals.setdefault(position, problem)
        else:
            for possible_places, place in zip(possible, places, strict=True):
                possible_places.add(place)
    for (axis, place), error in refusals.items():
        if place not in possible[axis]:
            raise error
