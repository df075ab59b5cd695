"""Clipping and optimizers, traced apart from the model, and put together with its micro-steps."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from memest.config.installed import bitsandbytes_version, release
from memest.config.optimizers import OPTIMIZER_FACTS, facts_of
from memest.config.packages import OPTIMIZER, library_needed
from memest.config.parallelism import Strategy
from memest.config.setup import Setup
from memest.estimation.early import say_import
from memest.events import Landmarks, Trace, Weight
from memest.profiles.cache import digest_of
from memest.profiles.document import FORMAT, family_to_json, rule_to_json
from memest.profiles.family import Family, Point, single_trace_family
from memest.profiles.known_profiles import KnownProfiles
from memest.profiles.program import Program
from memest.profiles.updates import (
    NoRuleError,
    UpdateRule,
    find_rule,
    marked_weights,
    shape_classes,
)
from memest.workspaces.operator_call import GpuTraits

__all__ = ["BY_SHAPE", "OptimizerTraces"]

_UPDATE_FIELDS = ("master_weights", "loop")
_OPTIONAL_FIELDS = ("optim_args", "optim_target_modules", "weight_decay")
_MAX_PROGRAMS = 16
_ROWS = 1 << 26
"""Rows of a weight for which Adafactor may make a state: transformers makes it on the host."""
_ShardGrounds = tuple[tuple[Weight, ...], Setup, Landmarks]
_OF_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_IN_BLOCKS = (name for name, facts in OPTIMIZER_FACTS.items() if facts.block_states)
BY_SHAPE = frozenset((*_OF_TORCH, *_IN_BLOCKS))
"""Optimizers that do the same to weights of any size, or say at which sizes they do not. Others of
libraries may not: torchao keeps small states whole."""


class OptimizerTraces:
    """The programs of one model's families with optimizers.

    Args:
        known_profiles: where updates are kept.
        keeps: whether they are.
        say: told what is being done.
    """

    def __init__(
        self, known_profiles: KnownProfiles, keeps: bool, say: Callable[[str], None]
    ) -> None:
        self._known_profiles = known_profiles
        self._keeps = keeps
        self._say = say
        self._families: dict[str, Family] = {}
        self._rules: dict[str, UpdateRule | None] = {}
        self._weights: dict[tuple[int, Point | None], tuple[Family, tuple[Weight, ...], str]] = {}
        self._last_shards: tuple[_ShardGrounds, tuple[tuple[Weight, ...], str]] | None = None
        self._programs: dict[tuple[int, str], tuple[Family, Program]] = {}

    def program(
        self,
        family: Family,
        point: Point,
        setup: Setup,
        gpu: GpuTraits,
        *,
        digest: str,
        model: Callable[[], Any],
    ) -> Program:
        """Micro-steps and the updates that go with them.

        Args:
            family: of the micro-steps.
            point: of the family.
            setup: names the optimizer.
            gpu: decides versions.
            digest: of what the model was built from: with the names of the weights it says which
                modules own them.
            model: builds it, so it is asked only where an optimizer must know which modules own
                the weights.
        """
        name, updates = "", None
        in_step = setup.optimizer != "none" and not setup.steps_in_backward
        if in_step and setup.distributed.updates_on_device:
            name, updates = self._updates_for(family, point, setup, gpu, digest, model)
        entry = self._programs.get((id(family), name))
        if entry is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            entry = family, Program(family, updates)
            self._programs[id(family), name] = entry
        return entry[1]

    def _updates_for(
        self,
        family: Family,
        point: Point,
        setup: Setup,
        gpu: GpuTraits,
        digest: str,
        model: Callable[[], Any],
    ) -> tuple[str, Family]:
        """Clipping and optimizer for these weights."""
        weights, weights_digest = self._weights_of(family, point)
        if setup.distributed.strategy in (Strategy.FSDP, Strategy.ZERO):
            from memest.sharding.rank import update_setup

            weights, weights_digest = self._shards_of(weights, setup, family.skeleton.landmarks)
            setup = update_setup(setup)
        return self._family_for(weights, weights_digest, setup, gpu, digest, model)

    def of_weights(self, weights: tuple[Weight, ...], setup: Setup, gpu: GpuTraits) -> Family:
        """Clipping and optimizer for some weights, by an optimizer that treats all alike."""
        return self._family_for(weights, _digest(weights), setup, gpu, "", lambda: None)[1]

    def _family_for(
        self,
        weights: tuple[Weight, ...],
        weights_digest: str,
        setup: Setup,
        gpu: GpuTraits,
        digest: str,
        model: Callable[[], Any],
    ) -> tuple[str, Family]:
        facts = facts_of(setup.optimizer)
        key: dict[str, Any] = {
            "format": FORMAT,
            "weights": weights_digest,
            "setup": {"optim": setup.optimizer, "max_grad_norm": str(setup.named_clip_norm)}
            | {name: str(getattr(setup, name)) for name in _UPDATE_FIELDS},
            "scaled": setup.precision == "fp16",
            "for_torch": list(gpu.torch),
        }
        extra_settings = {name: getattr(setup, name) for name in _OPTIONAL_FIELDS}
        key["setup"] |= {n: v for n, v in extra_settings.items() if v not in (None, "", ())}
        if facts.by_module:
            key["built_from"] = digest
        if facts.block_states:
            key["bitsandbytes"] = list(bitsandbytes_version(setup.software))
            key["for_transformers"] = list(setup.software.transformers or ())
        if facts.package:
            key["library"] = [facts.package, release(facts.package.replace("-", "_"))]
        name = digest_of(key)
        updates = self._families.get(name)
        if updates is None and self._keeps:
            updates = self._known_profiles.stored_family(key, "updates")
        if updates is None:
            updates = self._by_rule(weights, key)
        if updates is None:
            OPTIMIZER.check()
            say_import(self._say)
            roles = None
            if facts.by_module:
                from memest.trace.model.roles import roles_of

                roles = roles_of(model())
            trace = self._trace(weights, setup, gpu, roles)
            updates = single_trace_family(trace, {})
            if not self._found_rule(trace, weights, setup, gpu, roles, key) and self._keeps:
                self._known_profiles.write(key, "updates", family_to_json(updates))
        self._families[name] = updates
        return name, updates

    def _by_rule(self, weights: tuple[Weight, ...], key: dict[str, Any]) -> Family | None:
        """Updates that follow from those of other shapes; None where they do not, or not yet."""
        rule_key = _rule_key(weights, key)
        name = digest_of(rule_key)
        if name not in self._rules and self._keeps:
            rule = self._known_profiles.stored_rule(rule_key, len(weights))
            if rule is not None:
                self._rules[name] = rule
        found = self._rules.get(name)
        return None if found is None else found.at(weights)

    def _found_rule(
        self,
        trace: Trace,
        weights: tuple[Weight, ...],
        setup: Setup,
        gpu: GpuTraits,
        roles: Any,
        key: dict[str, Any],
    ) -> bool:
        """Find out what updates of other shapes follow from these, and keep it."""
        if setup.optimizer not in BY_SHAPE:
            return False
        rule_key = _rule_key(weights, key)
        name = digest_of(rule_key)
        if name in self._rules:
            return False  # it was looked for, and there is none
        try:
            limits = facts_of(setup.optimizer).size_limits
            marks = marked_weights(weights, limits)
            if setup.optimizer == "adafactor":
                _check_rows(marks)
            marked_trace = self._trace(marks, setup, gpu, roles)
            rule = find_rule(trace, weights, marked_trace, marks, limits)
        except NoRuleError:
            self._rules[name] = None
            return False
        self._rules[name] = rule
        if self._keeps:
            self._known_profiles.write(rule_key, "rule", rule_to_json(rule))
        return True

    def _trace(
        self, weights: tuple[Weight, ...], setup: Setup, gpu: GpuTraits, roles: Any
    ) -> Trace:
        library = library_needed(setup.optimizer)
        if library is not None:
            library.check()
        from memest.trace.training import trace_updates

        self._say(f"tracing {setup.optimizer}")
        return trace_updates(weights, setup, gpu, roles)

    def _weights_of(self, family: Family, point: Point) -> tuple[tuple[Weight, ...], str]:
        """The weights at a point, and a digest of them."""
        # mostly no size of the batch changes them, and one digest serves all points
        key = id(family), point if family.weights_vary else None
        entry = self._weights.get(key)
        if entry is None:
            weights = family.weights_at(family.numbers_at(point))
            entry = self._weights[key] = family, weights, _digest(weights)
        return entry[1], entry[2]

    def _shards_of(
        self, weights: tuple[Weight, ...], setup: Setup, landmarks: Landmarks
    ) -> tuple[tuple[Weight, ...], str]:
        """What the optimizer of a rank updates, and a digest of it: mostly that of the run before.

        The same question on other GPUs has other kernels, and the same shards.
        """
        grounds = weights, setup, landmarks
        if self._last_shards is None or self._last_shards[0] != grounds:
            from memest.sharding.rank import updated_weights

            shards = updated_weights(*grounds)
            self._last_shards = grounds, (shards, _digest(shards))
        return self._last_shards[1]


def _check_rows(weights: tuple[Weight, ...]) -> None:
    if any(prod(weight.shape[:-1]) > _ROWS for weight in weights):
        raise NoRuleError


def _rule_key(weights: tuple[Weight, ...], key: dict[str, Any]) -> dict[str, Any]:
    """The key of what is done to weights of any shapes."""
    limits = facts_of(key["setup"]["optim"]).size_limits
    return {**key, "weights": digest_of(shape_classes(weights, limits)), "rule": 2}


def _digest(weights: tuple[Weight, ...]) -> str:
    return digest_of(
        [[w.name, w.shape, w.stride, w.dtype, w.trains, w.decays, w.has_grad] for w in weights]
    )
