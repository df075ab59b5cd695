"""What is known of a model's steps, in memory and in the stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from memest.config.installed import release
from memest.config.kinds import LogProbs
from memest.config.setup import Setup
from memest.events import Trace
from memest.files.code_digest import tracing
from memest.files.folders import data_folder
from memest.profiles.axes import Sizes
from memest.profiles.cache import STEPS_OF, VERSION, Document, Store, cache_folder, digest_of
from memest.profiles.document import (
    FORMAT,
    BadDocumentError,
    domain_from_json,
    domain_to_json,
    family_from_json,
    family_to_json,
    rule_from_json,
    sizing_from_json,
    sizing_to_json,
)
from memest.profiles.family import Family, FamilyDomain, Point, single_trace_family
from memest.profiles.formula import NoFormulaError
from memest.profiles.model_card import ModelCard
from memest.profiles.packs import Packs
from memest.profiles.sizing import Sizing
from memest.profiles.transcript import Stack
from memest.profiles.updates import UpdateRule
from memest.workspaces.attention_choice import choose_backend
from memest.workspaces.operator_call import GpuTraits
from memest.workspaces.registry import reads_calls

__all__ = [
    "KnownProfiles",
    "StepProfile",
    "asks_for_gpu",
    "default_stores",
    "each_size_alone",
    "key_digest",
    "same_kernels",
    "shipped_folder",
    "shipped_releases",
    "shipped_software",
    "takes_kernels",
    "traces_in",
]


@cache
def shipped_folder() -> Path:
    """The profiles that come with the package."""
    return data_folder() / "step_profiles"


@cache
def shipped_software() -> dict[str, str]:
    """The releases that the profiles which come with the package were traced with."""
    try:
        releases = json.loads((shipped_folder() / "software.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(release) for name, release in releases.items()}


def default_stores() -> tuple[Store | Packs, ...]:
    """The user's cache, and the profiles that come with the package."""
    return Store(cache_folder()), Packs(shipped_folder())


@dataclass(frozen=True, slots=True)
class StoredFamily:
    """A stored family: where it holds, and how to get it."""

    domain: FamilyDomain
    store: Store | Packs
    digest: str
    document: Document


@dataclass(slots=True)
class StepProfile:
    """What is known of one model under the part of a setup that changes its traces.

    Attributes:
        setup: that part.
        key: what the traces depend on; empty where that cannot be written down.
        model_cards: by the image size that was asked for.
        sizing: what the model makes of sizes.
        families: of micro-steps.
        unread_families: families in the store that were not read yet.
        meta_models: those that were built, by image size and rank that were asked for.
        stacks: of those, the layers that repeat and of how many modules one is; likewise.
        barren_places: where a family was looked for and there is none.
    """

    setup: Setup
    key: dict[str, Any]
    model_cards: dict[int | None, ModelCard] = field(default_factory=dict)
    sizing: Sizing = field(default_factory=Sizing)
    families: list[Family] = field(default_factory=list)
    unread_families: list[StoredFamily] = field(default_factory=list)
    meta_models: dict[tuple[int | None, int | None], Any] = field(default_factory=dict)
    stacks: dict[tuple[int | None, int | None], dict[Stack, int]] = field(default_factory=dict)
    barren_places: set[str] = field(default_factory=set)


def asks_for_gpu(setup: Setup) -> bool:
    """Whether the Python of libraries asks for the GPU's properties: a trace is for one alone."""
    return setup.use_liger_kernel or setup.torch_compile or setup.fused_loss == "cce"


def each_size_alone(setup: Setup) -> bool:
    """Whether each size is traced by itself.

    Some ask for the GPU besides; else the number of pieces in which a loss works, or how even they
    are, follows from the number of tokens. torchtune's pieces of each sample do neither.
    """
    if not setup.method.is_supervised and _works_in_pieces(setup):
        return True
    return asks_for_gpu(setup) or bool(
        setup.fused_loss and not setup.fused_loss.startswith("torchtune-chunked")
    )


def _works_in_pieces(setup: Setup) -> bool:
    """Whether the loss of a trainer of TRL's works tile by tile, by sequence, or of halves."""
    if setup.log_probs is LogProbs.FUSED:
        # half of a length may be odd
        halves = setup.rollouts is not None and setup.rollouts.completion_len is None
        return setup.scores_by_fused_head or halves
    return setup.log_probs in (LogProbs.LOGITS, LogProbs.SWIFT)


class KnownProfiles:
    """Families, kept in stores as well.

    Args:
        stores: the first one that can be is written to.
    """

    def __init__(self, stores: Sequence[Store | Packs] | None = None) -> None:
        self._stores = tuple(default_stores() if stores is None else stores)
        folders = (store for store in self._stores if isinstance(store, Store))
        self._own = next(folders, Store(None))
        self._on_gpu: dict[tuple[Setup, GpuTraits], StepProfile] = {}

    def load(self, profile: StepProfile) -> None:
        """Look for what is stored of these steps."""
        for store in self._stores:
            digest = _digest_in(store, profile.key)
            for document in store.read(digest, "model"):
                try:
                    content = document.content
                    cards = {
                        _image(size): ModelCard.from_json(card) for size, card in content["cards"]
                    }
                    sizing = sizing_from_json(content["sizing"])
                    barren_places = set(map(str, content["barren"]))
                except (BadDocumentError, KeyError, TypeError, ValueError):
                    store.forget(digest, document.name)
                    continue
                profile.model_cards.update(cards)
                profile.sizing.exact.update(sizing.exact)
                profile.sizing.rules.extend(sizing.rules)
                profile.barren_places.update(barren_places)
            for document in store.read(digest, "steps"):
                try:
                    domain = domain_from_json(document.about)
                except BadDocumentError:
                    store.forget(digest, document.name)
                    continue
                profile.unread_families.append(StoredFamily(domain, store, digest, document))

    def read_families(self, profile: StepProfile, accepts: Callable[[FamilyDomain], bool]) -> None:
        """Read the families of accepted domains that were not read yet."""
        for stored_family in list(profile.unread_families):
            if not accepts(stored_family.domain):
                continue
            profile.unread_families.remove(stored_family)
            try:
                family = family_from_json(stored_family.document.content)
            except (BadDocumentError, ValueError):
                stored_family.store.forget(stored_family.digest, stored_family.document.name)
                continue
            if _notes_enough(family):
                profile.families.append(family)

    def save_model(self, profile: StepProfile) -> None:
        """Store what is known of the model."""
        content = {
            "cards": [[str(size), card.to_json()] for size, card in profile.model_cards.items()],
            "sizing": sizing_to_json(profile.sizing),
            "barren": sorted(profile.barren_places),
        }
        self.write(profile.key, "model", content)

    def write(self, key: dict[str, Any], name: str, content: Any, about: Any = None) -> None:
        """Store a document; one without a key is not stored."""
        if key:
            store = self._own
            full = _full_key(store, key)
            store.write(key_digest(full), name, content, full, about)

    def keep_family(self, profile: StepProfile, family: Family) -> None:
        """Keep a family; those it answers for are not needed any more."""
        points = {_point_name(family, point) for point in family.points}
        for old_family in list(profile.families):
            if {_point_name(old_family, p) for p in old_family.points} <= points and same_kernels(
                old_family, family
            ):
                profile.families.remove(old_family)
                if profile.key:
                    store = self._own
                    store.forget(_digest_in(store, profile.key), _family_name(old_family))
        profile.families.append(family)
        domain = domain_to_json(family.domain)
        self.write(profile.key, _family_name(family), family_to_json(family), domain)

    def of_gpu(self, profile: StepProfile, gpu: GpuTraits) -> StepProfile:
        """The same model, with what was traced for one GPU alone."""
        own = self._on_gpu.get((profile.setup, gpu))
        if own is None:
            key = {**profile.key, "gpu": repr(gpu)} if profile.key else {}
            own = StepProfile(profile.setup, key, profile.model_cards, profile.sizing)
            own.meta_models = profile.meta_models
            self._on_gpu[profile.setup, gpu] = own
            if key:
                self.load(own)
        return own

    def evaluation(self, profile: StepProfile, about: dict[str, Any]) -> Trace | None:
        """The first batches of an evaluation, where they are stored.

        Args:
            profile: of the model.
            about: what the evaluation depends on beside the model.
        """
        family = (
            self.stored_family(_evaluation_key(profile, about), "evaluation")
            if profile.key
            else None
        )
        return None if family is None else family.at(())

    def keep_evaluation(self, profile: StepProfile, about: dict[str, Any], trace: Trace) -> None:
        """Store the first batches of an evaluation, to be found by :meth:`evaluation`."""
        content = family_to_json(single_trace_family(trace, about["sizes"]))
        self.write(_evaluation_key(profile, about), "evaluation", content)

    def find(
        self, profile: StepProfile, sizes: Sizes, gpu: GpuTraits, *, cues: bool = False
    ) -> tuple[Family, Point] | None:
        """The family that answers for sizes on a GPU, and the point.

        Args:
            profile: of the model.
            sizes: of the batch.
            gpu: decides kernels.
            cues: the family must say where wrappers of the model act; older ones do not.
        """
        self.read_families(profile, lambda domain: domain.point_of(sizes) is not None)
        best = None
        for family in profile.families:
            point = family.point_of(sizes)
            if point is None or not takes_kernels(family, point, gpu, profile.setup):
                continue
            if cues and not family.skeleton.cues:
                continue
            if best is None or len(family.axes) > len(best[0].axes):
                best = family, point
        return best

    def stored_family(self, key: dict[str, Any], prefix: str) -> Family | None:
        """The updates, or the evaluation, that are kept under a key."""
        for store in self._stores:
            name = _digest_in(store, key)
            for document in store.read(name, prefix):
                try:
                    family = family_from_json(document.content)
                except (BadDocumentError, ValueError):
                    store.forget(name, document.name)
                    continue
                if _notes_enough(family):
                    return family
        return None

    def stored_rule(self, key: dict[str, Any], weights: int) -> UpdateRule | None:
        """What an optimizer does to so many weights of any shapes, where it is kept under a key."""
        for store in self._stores:
            name = _digest_in(store, key)
            for document in store.read(name, "rule"):
                try:
                    rule = rule_from_json(document.content, weights)
                except (BadDocumentError, ValueError):
                    store.forget(name, document.name)
                    continue
                if _notes_enough(rule.family):
                    return rule
        return None


def _notes_enough(family: Family) -> bool:
    """Whether its traces noted all calls from which something is computed today.

    Traces note the calls of operators that have a rule, and name the others that they saw. Where
    one of these has a rule by now, the family would answer as if there were none, so it is not
    believed, and its steps are traced anew. To note every call would spare that, and make every
    document a fifth to a half larger and take twice as long to read, for rules that are seldom
    added. Where a rule only changed there is nothing to check: calls are kept as they were, and
    the rule is asked with the question. The user's own cache needs this for rules from outside the
    package alone, for :func:`tracing` covers those of the package; the profiles that come with the
    package rest on it.
    """
    return not any(map(reads_calls, family.skeleton.unnoted_ops))


def _evaluation_key(profile: StepProfile, about: dict[str, Any]) -> dict[str, Any]:
    return {**profile.key, "evaluation": about} if profile.key else {}


_TRACING_WITH = {"adapter": ("peft",), "quantization": ("peft", "bitsandbytes")}
"""What traces besides torch and transformers, by the part of a setup that calls for it."""


def _tracing_with(key: Mapping[str, Any]) -> tuple[str, ...]:
    """The packages that make the traces of a key."""
    setup = key.get("setup", {})
    parts = [packages for part, packages in _TRACING_WITH.items() if setup.get(part)]
    return tuple(dict.fromkeys(("torch", "transformers", *chain.from_iterable(parts))))


def shipped_releases(key: Mapping[str, Any]) -> dict[str, str]:
    """The releases that traced what comes with the package of a key, where one is missing here.

    Args:
        key: of a model's steps; empty where nothing of them is kept.

    Returns:
        By package; empty where everything that traces is installed, so that what is shipped is
        what would be traced here.
    """
    packages = _tracing_with(key) if key else ()
    if all(map(release, packages)):
        return {}
    shipped = shipped_software()
    return {name: release(name) or shipped.get(name, "unknown") for name in packages}


def _full_key(store: Store | Packs, key: dict[str, Any]) -> dict[str, Any]:
    """The key with the software that traces, as a store tells its documents apart."""
    installed_releases = {name: release(name) for name in _tracing_with(key)}
    if store.shipped:
        # these are checked against the code when the package is made
        shipped = shipped_software()
        return {
            **key,
            **{name: own or shipped.get(name) for name, own in installed_releases.items()},
        }
    return {
        **key,
        # what other code traced is not believed
        "code": tracing(),
        # releases that write documents otherwise share the folder, and no document
        "format": [VERSION, FORMAT],
        **installed_releases,
    }


def key_digest(key: Mapping[str, Any]) -> str:
    """The name of a key. What the model is called in it is for people who look at the cache."""
    return digest_of({name: value for name, value in key.items() if name != "model"})


def _digest_in(store: Store | Packs, key: dict[str, Any]) -> str:
    return key_digest(_full_key(store, key))


def takes_kernels(family: Family, point: Point, gpu: GpuTraits, setup: Setup) -> bool:
    """Whether a GPU takes the attention kernels that the family has."""
    if not family.skeleton.attention_choices:
        return True
    try:
        numbers = family.numbers_at(point)
    except NoFormulaError:
        return False
    return all(
        choose_backend(call, gpu, setup.sdpa_backend).value == backend
        for call, backend in family.choices_at(numbers)
    )


def same_kernels(one: Family, other: Family) -> bool:
    """Whether two families have the same attention kernels."""
    return [k for _, k in one.skeleton.attention_choices] == [
        k for _, k in other.skeleton.attention_choices
    ]


def traces_in(family: Family) -> list[tuple[dict[str, int], Trace]]:
    """The traces a family was made of, with their sizes."""
    return [(family.domain.sizes_at(point), family.at(point)) for point in family.points]


def _point_name(family: Family, point: Point) -> str:
    return json.dumps(family.domain.sizes_at(point), sort_keys=True)


def _family_name(family: Family) -> str:
    """A name that says what it is for; the digest keeps different kernels apart."""
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    sizes = sorted(
        {**family.fixed_sizes, **{a: list(family.points[0]) for a in family.axes}}.items()
    )
    mark = digest_of([family.axes, sizes, kinds, family.tied])[:12]
    layers = "few" if family.fold is not None else "all"
    return f"{STEPS_OF[layers]}-{'-'.join(family.axes) or 'point'}-{mark}"


def _image(text: str) -> int | None:
    return None if text == "None" else int(text)
