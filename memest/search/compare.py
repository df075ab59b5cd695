"""``memest.compare``: runs side by side, what each change buys, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memest.catalog.gpu_counts import split_gpu_count
from memest.config.life import refuse_host_memory
from memest.config.option_table import OWN_MODULE_NAMES
from memest.config.options import argument
from memest.config.setup import Setup
from memest.config.spelling import read_scenario, write_scenario
from memest.errors import ConfigError
from memest.estimation.estimate import read_run
from memest.estimation.gpu_target import Place, split_place
from memest.estimation.notes import notes_of_each
from memest.report.findings import Comparison, Scenario
from memest.report.result import Estimate
from memest.search.cost import Probe
from memest.search.profile import profile as make_profile
from memest.search.reasons import explain

if TYPE_CHECKING:
    import torch

    from memest.readers.run_config import RunConfig

__all__ = ["compare"]

Progress = Callable[[str], None]
Change = str | Mapping[str, Any]

BASE = "base"


def compare(
    model: str | torch.nn.Module | RunConfig | Sequence[str | RunConfig],
    scenarios: Sequence[Change] | Mapping[str, Change] = (),
    *,
    setup: Setup | None = None,
    gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    calibration: str | None = None,
    trust_remote_code: bool = False,
    max_batch: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Set runs side by side.

    Args:
        model: one model as for :func:`memest.estimate`, compared with itself under other
            options; or several names, compared under the same options; or what
            :func:`memest.read_config` returns, several to compare runs that differ in everything.
        scenarios: what differs from the options: ``"fp16"``, ``"grad-accum=4 batch=2"`` or a
            dict of options; by name if they come in a dict. The options themselves are the first
            scenario.
        setup: the training configuration; ``options`` are another way to give it.
        gpu: decides verdict and largest batch; a scenario may name another one.
        gpu_memory: as for :func:`memest.estimate`.
        device_context: as for :func:`memest.estimate`.
        calibration: as for :func:`memest.estimate`.
        trust_remote_code: run code that the model's repository brings.
        max_batch: look for the largest batch of each scenario when a GPU is named.
        progress: called with one line for each longer thing done.
        **options: what all scenarios share; ``inputs``, ``loss``, ``step_fn``, ``dims`` and
            ``model_args`` of a module of one's own among them, as for :func:`memest.estimate`.

    Returns:
        The comparison; the first scenario is what the others are compared with.

    Raises:
        ConfigError: nothing to compare, or a scenario that cannot be.
        MemestError: as for :func:`memest.estimate`.
    """
    gpu, options = split_gpu_count(gpu, setup, options)
    place = Place(
        gpu=gpu or None,
        gpu_memory=gpu_memory,
        device_context=device_context,
        calibration=argument("calibration", calibration, options),
    )
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    changes = _named_changes(scenarios)
    if not models:
        raise ConfigError("memest compare needs a model: memest compare MODEL --vs fp16.")
    if len(models) > 1 and changes:
        raise ConfigError(
            "several models or several scenarios, not both: compare the models under one set of "
            "options, or one model with --vs."
        )
    if len(models) == 1 and not changes:
        raise ConfigError(
            "nothing to compare with: name a change, for example --vs fp16 or --vs "
            "'grad-accum=4 batch=2', or a second model."
        )
    module_options = {name: options.pop(name) for name in OWN_MODULE_NAMES & options.keys()}
    profiles = []
    for source in models:
        run, own_setup, own_options = read_run(source), setup, options
        if run is not None:
            run = run.with_model(setup, {**options, **module_options})
            source, own_setup, own_options = str(run.model), run.setup, {}
        profiles.append(
            make_profile(
                source,
                own_setup,
                trust_remote_code=trust_remote_code,
                progress=progress,
                **module_options,
                **own_options,
            )
        )
    asked = [each.setup for each in profiles]
    # what can be wrong with words is said before anything slow
    asked += [profiles[0].setup_for(**split_place(change)[1]) for change in changes.values()]
    for own_setup in asked:
        refuse_host_memory(own_setup.life, "compare")
    probes: list[tuple[str, Probe, dict[str, Any]]] = []
    base = Probe(profiles[0], place)
    if changes:
        probes.append((BASE, base, {}))
        for name, change in changes.items():
            own_place, differing = split_place(change)
            probe = Probe(profiles[0], {**place, **own_place}) if own_place else base
            probes.append((name, probe, {**differing, **own_place}))
    else:
        probes += [
            (name, Probe(profile, place), {})
            for name, profile in zip(_unique_names(map(_name, models)), profiles, strict=True)
        ]
    return _compare(probes, max_batch=max_batch)


def _named_changes(scenarios: Sequence[Change] | Mapping[str, Change]) -> dict[str, dict[str, Any]]:
    """The options of each scenario by its name."""
    if isinstance(scenarios, str):
        scenarios = [scenarios]
    pairs: list[tuple[str, Change]]
    if isinstance(scenarios, Mapping):
        pairs = list(scenarios.items())
    else:
        pairs = [
            (scenario if isinstance(scenario, str) else write_scenario(scenario), scenario)
            for scenario in scenarios
        ]
    changes: dict[str, dict[str, Any]] = {}
    for name, change in pairs:
        if name in changes or name == BASE:
            raise ConfigError(f"the scenario {name!r} is there twice: drop one.")
        if not isinstance(change, (str, Mapping)):
            raise ConfigError(
                f"the scenario {name!r} is {change!r}: write a text or a dict of options, as in "
                "{'half': {'fp16': True}, 'small': 'batch=1'}; a list of them names them itself."
            )
        changes[name] = read_scenario(change) if isinstance(change, str) else dict(change)
        if not changes[name]:
            raise ConfigError(f"the scenario {name!r} changes nothing.")
    return changes


def _name(model: Any) -> str:
    run = read_run(model)
    if run is not None:
        return ", ".join(dict.fromkeys(reading.source for reading in run.readings))
    return model if isinstance(model, str) else type(model).__name__


def _unique_names(names: Iterable[str]) -> list[str]:
    """Names of which none is there twice: files of two folders may have one name."""
    counts: Counter[str] = Counter()
    labels = []
    for name in names:
        counts[name] += 1
        labels.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return labels


def _compare(probes: list[tuple[str, Probe, dict[str, Any]]], *, max_batch: bool) -> Comparison:
    scenarios: list[Scenario] = []
    first: Estimate | None = None
    notes: dict[str, None] = {}
    reasons = (probe.untimed(**split_place(change)[1]) for _, probe, change in probes)
    untimed = next(filter(None, reasons), "")
    seconds: list[float] = []
    for name, probe, change in probes:
        own_place, differing = split_place(change)
        estimate = probe.estimate(max_batch=max_batch, **differing)
        total = None
        if not untimed:
            seconds.append(probe.seconds_per_sample(**differing))
            total = probe.work(**differing).total
        scenarios.append(
            Scenario(
                name=name,
                model=estimate.model.id,
                changes=tuple((key, str(value)) for key, value in change.items()),
                estimate=estimate,
                reasons=None if first is None else explain(first, estimate),
                relative_time=seconds[-1] / seconds[0] if seconds else None,
                flops=total.flops if total is not None else None,
                launches=total.launches if total is not None else None,
            )
        )
        first = first or estimate
        if change and first.setup == estimate.setup and not own_place:
            why = "the options say it already, or the model has no such size"
            notes[f"{name} changes nothing: {why}."] = None
    samples = {scenario.effective_batch for scenario in scenarios}
    if not untimed and len(samples) > 1:
        notes["scenarios differ in samples per optimizer step: time is compared by sample."] = None
    notes.update(dict.fromkeys(notes_of_each({s.name: s.estimate.notes for s in scenarios})))
    basis = untimed or probes[0][1].time_basis(scenarios[0].estimate.setup)
    return Comparison(scenarios=tuple(scenarios), time_basis=basis, notes=tuple(notes))
