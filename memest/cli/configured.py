"""Configurations and launch commands of a question, settled before a command sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError
from memest.options import find_option
from memest.readers.reading import names_config, read_config
from memest.readers.run_config import RunConfig, settle

__all__ = ["Asked", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question whose files are read.

    Attributes:
        models: references.
        options: by keyword, of the setup and of the place.
        run: what configurations and flags came to.
        runs: of a comparison of configurations, one for each; empty otherwise.
    """

    models: tuple[str, ...]
    options: dict[str, Any]
    run: RunConfig
    runs: tuple[RunConfig, ...] = ()


def settled(
    models: Sequence[str], options: Mapping[str, Any], *, config: Sequence[str] = (),
    config_format: str | None = None, launch: str | None = None, axes: Sequence[str] = (),
    needs_model: bool = True, off: Sequence[str] = (), compares: bool = False,
) -> Asked:  # fmt: skip
    """Read what a command line names.

    Args:
        models: as typed; configuration files among them are taken for what they are.
        options: that were named.
        config: of ``--config``.
        config_format: of ``--config-format``.
        launch: of ``--launch``.
        axes: options that the command sets itself: those of ``--over``, what it looks for.
        needs_model: False for a command that has something to say without one.
        off: switches that were named with a word for false: they take back what files say.
        compares: several configurations in the place of models are runs of their own.

    Raises:
        ConfigError: no model, or anything that a reader refuses.
    """
    written = [each for each in models if names_config(each)]
    apart = compares and len(written) == len(models)
    if len(written) > 1 and not apart:
        raise ConfigError(
            f"{written[0]} and {written[1]} stand in the place of models, and a configuration is "
            "of one run. Files of one run together: --config A --config B. Runs that differ: "
            "memest compare A B, with nothing but configurations in the place of models."
        )
    files = [*config, *written]
    named = [each for each in models if each not in files]
    place = {name: value for name, value in options.items() if not find_option(name).field}
    flags = {name: value for name, value in options.items() if name not in place}
    first = named[0] if named else None
    if files or launch is not None:
        flags = {**_switched_off(off, flags), **flags}
    if apart and len(written) > 1:
        read = tuple(
            read_config(*config, each, config_format=config_format, command=launch, **flags)
            for each in written
        )
        return Asked(models=(), options=place, run=read[0], runs=read)
    if config_format is not None and not files and launch is None:
        raise ConfigError(
            "--config-format says the format of a file: add --config FILE or a launch command."
        )
    if files or launch is not None:
        run = read_config(*files, config_format=config_format, command=launch, model=first, **flags)
    else:
        run = settle((), flags, model=first)
    if run.model is None and needs_model:
        where = ", ".join(run.sources)
        raise ConfigError(
            f"{where} names no model: write it besides, memest estimate MODEL ..." if where else
            "Missing argument 'MODEL'. Name a model, a configuration (run.yaml) or, after --, the "
            "launch command of the run: `memest estimate --help` has examples."
        )  # fmt: skip
    found = run.options if files or launch is not None else flags
    for axis in axes:
        name = axis.partition("=")[0].lstrip("-").replace("-", "_")
        try:
            field = find_option(name).field
        except ConfigError:
            continue
        whole = field == "precision"
        found = {
            key: value for key, value in found.items()
            if key in flags or not (key == find_option(name).name or (whole and key == field))
        }  # fmt: skip
    known = tuple(named) or tuple(filter(None, (run.model,)))
    return Asked(models=known, options={**place, **found}, run=run)


def _switched_off(off: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Switches as options: without ``bf16`` and ``fp16`` a run is in fp32."""
    words = {"bf16", "fp16"}
    found: dict[str, Any] = {name: False for name in off if name not in words}
    if words & set(off) and not (words | {"precision"}) & set(flags):
        found["precision"] = "fp32"
    return found
