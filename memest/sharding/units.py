"""Units of FSDP: which modules gather their parameters together, in which order.

Sources: ``fsdp2_prepare_model`` of accelerate 1.15 (which the Trainer uses): layers, input
embeddings, final norm with output embeddings, and the rest with the root; and the recipe of
PyTorch's FSDP2 tutorial: layers, and the rest with the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memest.distributed import Fsdp
from memest.errors import ConfigError, closest
from memest.events import Landmarks, Weight
from memest.head_rules import reader_of_head
from memest.installed import installed_version
from memest.setup import Loop, Setup

__all__ = ["UnitPlan", "check_head_is_gathered", "plan_units", "units_of"]

ROOT = ""
_PROMPTS = ("CartridgeEncoder", "PrefixEncoder", "PromptEncoder", "PromptEmbedding")
"""Classes of peft that its policy always wraps."""
_COMPLETES_GROUPS = (2, 13)
"""The release of torch in which that was read; none earlier was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A call of ``fully_shard``.

    Attributes:
        modules: paths of the modules it was given.
        weights: numbers of the parameters that it manages, in its order.
        reshards: parameters are given back after its forward.
        ranks: that share it; None = as many as share the others.
    """

    modules: tuple[str, ...]
    weights: tuple[int, ...]
    reshards: bool
    ranks: int | None = None


def units_of(setup: Setup, weights: Sequence[Weight], landmarks: Landmarks) -> tuple[UnitPlan, ...]:
    """The units of a run.

    FSDP1's policies wrap layers alone (``transformer_auto_wrap_policy``); what is left is the
    root's, with accelerate too. Beside adapters it is peft's ``fsdp_auto_wrap_policy``, which the
    Trainer sets and peft's documentation asks of scripts: what trains is apart from what is frozen.
    """
    spread = setup.distributed
    if spread.ep > 1:
        return _own_units(landmarks, weights, spread.expert_shard_ranks)
    return plan_units(
        landmarks, weights, classes=spread.fsdp_wrap,
        reshards=spread.fsdp is Fsdp.FULL_SHARD,
        as_accelerate=setup.loop is not Loop.PLAIN and spread.fsdp_version == 2,
        as_peft=setup.adapter is not None and spread.fsdp_version == 1,
    )  # fmt: skip


def check_head_is_gathered(
    setup: Setup, plans: Sequence[UnitPlan], weights: Sequence[Weight], landmarks: Landmarks
) -> None:
    """A loss that reads the head's weight needs it gathered, which its own unit does not do.

    The root's unit is gathered from the beginning of the forward; a group of the final norm and
    the head is by the norm. torch completes such a group where the head was not called
    (``_force_complete_incomplete_states`` of torch 2.13, pull request 180428 of April 2026).

    Raises:
        ConfigError: the head lies in another unit, or torch was told to be an earlier one.
    """
    reads, head = reader_of_head(setup), landmarks.head
    if not reads or head is None:
        return
    known = {landmarks.shared.get(f"{head}.weight", f"{head}.weight")}
    own = {
        number for number, weight in enumerate(weights)
        if weight.name in known or weight.name.startswith(f"{head}.")
    }  # fmt: skip
    said = setup.software.torch or installed_version("torch")
    for plan in plans:
        if plan.modules == (ROOT,) or not own.intersection(plan.weights):
            continue
        if len(plan.modules) == 1:
            raise ConfigError(
                f"{reads} reads the weight of {head} without calling it, and {plan.modules[0]} is "
                "an FSDP unit, which is gathered where it is called: the loss would have a part of "
                "the weight. Let the root have it: leave its class out of --fsdp-wrap, and the "
                f"head out of what an adapter copies, or leave {reads.partition(' ')[0]} out."
            )
        if said is not None and said < _COMPLETES_GROUPS:
            version = ".".join(map(str, said))
            raise ConfigError(
                f"{reads} leaves {head} uncalled, which accelerate makes one FSDP unit with the "
                f"final norm, and torch {version} does not end such a unit: the second forward "
                "stops. Use --software torch=2.13, or --fsdp-version 1."
            )


def plan_units(
    landmarks: Landmarks, weights: Sequence[Weight], *, classes: Sequence[str], reshards: bool,
    as_accelerate: bool, as_peft: bool = False,
) -> tuple[UnitPlan, ...]:  # fmt: skip
    """The units of a model, in the order in which they are made; the root is the last.

    Args:
        landmarks: of the model.
        weights: its parameters.
        classes: of the modules that become units; empty = those that may not be split.
        reshards: what was asked for (``reshard_after_forward``).
        as_accelerate: with units for embeddings and head.
        as_peft: with units for layers without children whose weight trains, and for prompts.

    Raises:
        ConfigError: a class that no module has.
    """
    kinds = landmarks.kinds
    wanted = _checked(classes, kinds) if classes else set(landmarks.blocks)
    order = _bottom_up(list(kinds))
    apart = _trained_alone(kinds, weights) if as_peft else set()
    groups: list[tuple[tuple[str, ...], bool]] = [
        ((name,), reshards)
        for name in order
        if name != ROOT and (kinds[name] in wanted or name in apart)
    ]
    if as_accelerate:
        groups += _ends(landmarks, weights, {name for (name,), _ in groups}, reshards)
    # the root never reshards: its backward would gather again at once
    groups.append(((ROOT,), False))
    if as_accelerate:
        _check_embeddings(landmarks, groups)
    return _filled(landmarks, weights, groups)


def _filled(
    landmarks: Landmarks, weights: Sequence[Weight],
    groups: Sequence[tuple[tuple[str, ...], bool]],
) -> tuple[UnitPlan, ...]:  # fmt: skip
    """Units with the parameters that are theirs; those without any, but for the root, are none."""
    order = _bottom_up(list(landmarks.kinds))
    owner = {name: number for number, (names, _) in enumerate(groups) for name in names}
    members: list[list[int]] = [[] for _ in groups]
    place = {name: number for number, name in enumerate(order)}
    for index, weight in enumerate(weights):
        members[_owner_of(weight.name, owner)].append(index)
    for (names, _), group in zip(groups, members, strict=True):
        group.sort(key=lambda index: _rank(weights[index].name, names, place, index))
    return tuple(
        UnitPlan(modules=names, weights=tuple(group), reshards=own)
        for (names, own), group in zip(groups, members, strict=True)
        if group or names == (ROOT,)
    )


def _trained_alone(kinds: Mapping[str, str], weights: Sequence[Weight]) -> set[str]:
    """What ``fsdp_auto_wrap_policy`` of peft 0.21 wraps beside the layers of the model."""
    parents = {_parent(name) for name in kinds if name != ROOT}
    trained = {weight.name for weight in weights if weight.trains}
    return {
        name
        for name, kind in kinds.items()
        if kind in _PROMPTS or (name not in parents and f"{name}.weight" in trained)
    }


def _own_units(
    landmarks: Landmarks, weights: Sequence[Weight], expert_ranks: int
) -> tuple[UnitPlan, ...]:
    """Units that transformers makes by its own plan: experts, the rest of the layers, the ends.

    Source: ``apply_fully_sharded_data_parallelism`` of transformers 5.23.
    """
    groups = [*landmarks.units, ((ROOT,), False, False)]
    plans = _filled(landmarks, weights, [(names, own) for names, own, _ in groups])
    experts = {names for names, _, of_experts in groups if of_experts}
    return tuple(
        replace(plan, ranks=expert_ranks) if plan.modules in experts else plan for plan in plans
    )


def _ends(
    landmarks: Landmarks, weights: Sequence[Weight], taken: set[str], reshards: bool
) -> list[tuple[tuple[str, ...], bool]]:
    """Input embeddings, and the final norm with the output embeddings."""
    embeddings, head = landmarks.embeddings, landmarks.head
    names = {weight.name for weight in weights}
    # a tied weight goes by its first name
    tied = (
        embeddings is not None and head is not None
        and (f"{embeddings}.weight" in names) != (f"{head}.weight" in names)
    )  # fmt: skip
    out: list[tuple[tuple[str, ...], bool]] = []
    if embeddings is not None and not tied and embeddings not in taken:
        out.append(((embeddings,), reshards))
        taken = taken | {embeddings}
    found = (landmarks.norm, embeddings, head) if tied else (landmarks.norm, head)
    tail = tuple(dict.fromkeys(n for n in found if n is not None and n not in taken))
    if tail:
        out.append((tail, False))
    return out


def _check_embeddings(landmarks: Landmarks, groups: Sequence[tuple[tuple[str, ...], bool]]) -> None:
    """Input embeddings inside another unit are sharded twice, which FSDP refuses.

    Raises:
        ConfigError: the run would stop.
    """
    embeddings = landmarks.embeddings
    if embeddings is None or not any(embeddings in names for names, _ in groups):
        return
    for (outer, *_), _ in groups:
        if outer != ROOT and embeddings.startswith(f"{outer}."):
            kind = landmarks.kinds[outer]
            others = [name for name in landmarks.blocks if name != kind]
            raise ConfigError(
                f"accelerate makes the input embeddings ({embeddings}) an FSDP unit of their own, "
                f"and they lie in {outer}, which is one already ({kind}): the run stops there. "
                f"Leave {kind} out: --fsdp-wrap {others[0] if others else 'CLASS'}."
            )


def _checked(classes: Sequence[str], kinds: Mapping[str, str]) -> set[str]:
    known = sorted(set(kinds.values()))
    for name in classes:
        if name not in known:
            near = closest(name, known)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"--fsdp-wrap {name!r}: the model has no module of this class.{hint} It has: "
                f"{', '.join(known)}."
            )
    return set(classes)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _owner_of(name: str, owner: Mapping[str, int]) -> int:
    """The innermost unit around a parameter."""
    path = _parent(name)
    while path not in owner:
        path = _parent(path)
    return owner[path]


def _rank(
    weight: str, modules: Sequence[str], place: Mapping[str, int], index: int
) -> tuple[int, int, int]:
    """The order of a group's parameters: its modules one after the other, each bottom up."""
    path = _parent(weight)
    first = next(n for n, m in enumerate(modules) if m in (ROOT, path) or path.startswith(f"{m}."))
    return first, place.get(path, 0), index


def _bottom_up(names: Sequence[str]) -> list[str]:
    """Paths in the order of a walk that visits children first.

    Args:
        names: parents before children, as ``named_modules`` has them.
    """
    children: dict[str, list[str]] = {}
    for name in names:
        if name != ROOT:
            children.setdefault(_parent(name), []).append(name)
    out: list[str] = []
    stack: list[tuple[str, bool]] = [(ROOT, False)]
    while stack:
        name, done = stack.pop()
        if done:
            out.append(name)
            continue
        stack.append((name, True))
        stack.extend((child, False) for child in reversed(children.get(name, ())))
    return out
