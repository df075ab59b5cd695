"""What is known of a model's steps, in memory and in the stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memest.attention import choose_backend
from memest.code_digest import tracing
from memest.events import Trace
from memest.hidden.call import GpuTraits
from memest.installed import release
from memest.places import data_folder
from memest.setup import Setup
from memest.sizes import Sizes
from memest.steps.card import Card
from memest.steps.document import (
    FORMAT,
    BadDocumentError,
    family_from_json,
    family_to_json,
    reach_from_json,
    reach_to_json,
    sizing_from_json,
    sizing_to_json,
)
from memest.steps.family import Family, Point, Reach, alone
from memest.steps.formula import NoFormulaError
from memest.steps.sizing import Sizing
from memest.store import VERSION, Document, Store, cache_folder, digest_of

__all__ = [
    "Shelf",
    "Steps",
    "asks_for_gpu",
    "chosen_like",
    "default_stores",
    "shipped_folder",
    "traces_in",
]


@cache
def shipped_folder() -> Path:
    """The profiles that come with the package."""
    return data_folder() / "step_profiles"


@cache
def _shipped_software() -> dict[str, str]:
    """The releases that the profiles which come with the package were traced with."""
    try:
        found = json.loads((shipped_folder() / "software.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(release) for name, release in found.items()}


def default_stores() -> tuple[Store, ...]:
    """The user's cache, and the profiles that come with the package."""
    return Store(cache_folder()), Store(shipped_folder(), shipped=True)


@dataclass(frozen=True, slots=True)
class Shelved:
    """A stored family: where it holds, and how to get it."""

    reach: Reach
    store: Store
    digest: str
    document: Document


@dataclass(slots=True)
class Steps:
    """What is known of one model under the part of a setup that changes its traces.

    Attributes:
        setup: that part.
        key: what the traces depend on; empty where that cannot be written down.
        cards: by the image size that was asked for.
        sizing: what the model makes of sizes.
        families: of micro-steps.
        shelf: families in the store that were not read yet.
        runs: models that were built, by the image size that was asked for.
        barren: where a family was looked for and there is none.
    """

    setup: Setup
    key: dict[str, Any]
    cards: dict[int | None, Card] = field(default_factory=dict)
    sizing: Sizing = field(default_factory=Sizing)
    families: list[Family] = field(default_factory=list)
    shelf: list[Shelved] = field(default_factory=list)
    runs: dict[int | None, Any] = field(default_factory=dict)
    barren: set[str] = field(default_factory=set)


def asks_for_gpu(setup: Setup) -> bool:
    """Whether each size is traced by itself, for one GPU.

    The Python of libraries asks for the GPU's properties, or the number of pieces in which a loss
    works, or how even they are, follows from the number of tokens. torchtune's pieces of each
    sample do neither.
    """
    alone = bool(setup.fused_loss) and not setup.fused_loss.startswith("torchtune-chunked")
    return setup.use_liger_kernel or setup.torch_compile or alone


class Shelf:
    """Families, kept in stores as well.

    Args:
        stores: the first one is written to.
    """

    def __init__(self, stores: Sequence[Store] | None = None) -> None:
        self._stores = tuple(default_stores() if stores is None else stores)
        self._own = self._stores[0] if self._stores else Store(None)
        self._on_gpu: dict[tuple[Setup, GpuTraits], Steps] = {}

    def load(self, steps: Steps) -> None:
        """Look for what is stored of these steps."""
        for store in self._stores:
            digest = _digest_in(store, steps.key)
            for document in store.read(digest, "model"):
                try:
                    content = document.content
                    cards = {_image(size): Card.from_json(card) for size, card in content["cards"]}
                    sizing = sizing_from_json(content["sizing"])
                    barren = set(map(str, content["barren"]))
                except (BadDocumentError, KeyError, TypeError, ValueError):
                    store.forget(digest, document.name)
                    continue
                steps.cards.update(cards)
                steps.sizing.exact.update(sizing.exact)
                steps.sizing.rules.extend(sizing.rules)
                steps.barren.update(barren)
            for document in store.read(digest, "steps"):
                try:
                    reach = reach_from_json(document.about)
                except BadDocumentError:
                    store.forget(digest, document.name)
                    continue
                steps.shelf.append(Shelved(reach, store, digest, document))

    def take(self, steps: Steps, wanted: Callable[[Reach], bool]) -> None:
        """Read the families on the shelf that are wanted."""
        for shelved in list(steps.shelf):
            if not wanted(shelved.reach):
                continue
            steps.shelf.remove(shelved)
            try:
                steps.families.append(family_from_json(shelved.document.content))
            except (BadDocumentError, ValueError):
                shelved.store.forget(shelved.digest, shelved.document.name)

    def save_model(self, steps: Steps) -> None:
        """Store what is known of the model."""
        content = {
            "cards": [[str(size), card.to_json()] for size, card in steps.cards.items()],
            "sizing": sizing_to_json(steps.sizing),
            "barren": sorted(steps.barren),
        }
        self.write(steps.key, "model", content)

    def write(self, key: dict[str, Any], name: str, content: Any, about: Any = None) -> None:
        """Store a document; one without a key is not stored."""
        if key:
            store = self._own
            full = _full_key(store, key)
            store.write(digest_of(full), name, content, full, about)

    def keep(self, steps: Steps, family: Family) -> None:
        """Keep a family; those it answers for are not needed any more."""
        points = {_point_name(family, point) for point in family.points}
        for old in list(steps.families):
            if {_point_name(old, p) for p in old.points} <= points and chosen_like(old, family):
                steps.families.remove(old)
                if steps.key:
                    store = self._own
                    store.forget(_digest_in(store, steps.key), _family_name(old))
        steps.families.append(family)
        reach = reach_to_json(family.reach)
        self.write(steps.key, _family_name(family), family_to_json(family), reach)

    def of_gpu(self, steps: Steps, gpu: GpuTraits) -> Steps:
        """The same model, with what was traced for one GPU alone."""
        own = self._on_gpu.get((steps.setup, gpu))
        if own is None:
            key = {**steps.key, "gpu": repr(gpu)} if steps.key else {}
            own = Steps(steps.setup, key, steps.cards, steps.sizing, runs=steps.runs)
            self._on_gpu[steps.setup, gpu] = own
            if key:
                self.load(own)
        return own

    def evaluation(self, steps: Steps, about: dict[str, Any]) -> Trace | None:
        """The first batches of an evaluation, where they are stored.

        Args:
            steps: of the model.
            about: what the evaluation depends on beside the model.
        """
        found = self.stored(_evaluation_key(steps, about), "evaluation") if steps.key else None
        return None if found is None else found.at(())

    def keep_evaluation(self, steps: Steps, about: dict[str, Any], trace: Trace) -> None:
        """Store the first batches of an evaluation, to be found by :meth:`evaluation`."""
        content = family_to_json(alone(trace, about["sizes"]))
        self.write(_evaluation_key(steps, about), "evaluation", content)

    def held(
        self, steps: Steps, sizes: Sizes, gpu: GpuTraits, *, cues: bool = False
    ) -> tuple[Family, Point] | None:
        """The family that answers for sizes on a GPU, and the point.

        Args:
            steps: of the model.
            sizes: of the batch.
            gpu: decides kernels.
            cues: the family must say where wrappers of the model act; older ones do not.
        """
        self.take(steps, lambda reach: reach.point_of(sizes) is not None)
        best = None
        for family in steps.families:
            point = family.point_of(sizes)
            if point is None or not chosen(family, point, gpu, steps.setup):
                continue
            if cues and not family.skeleton.cues:
                continue
            if best is None or len(family.axes) > len(best[0].axes):
                best = family, point
        return best

    def stored(self, key: dict[str, Any], prefix: str) -> Family | None:
        """The updates, or the evaluation, that are kept under a key."""
        for store in self._stores:
            name = _digest_in(store, key)
            for document in store.read(name, prefix):
                try:
                    return family_from_json(document.content)
                except (BadDocumentError, ValueError):
                    store.forget(name, document.name)
        return None


def _evaluation_key(steps: Steps, about: dict[str, Any]) -> dict[str, Any]:
    return {**steps.key, "evaluation": about} if steps.key else {}


_TRACING_WITH = {"adapter": ("peft",), "quantization": ("peft", "bitsandbytes")}
"""What traces besides torch and transformers, by the part of a setup that calls for it."""


def _full_key(store: Store, key: dict[str, Any]) -> dict[str, Any]:
    """The key with the software that traces, as a store tells its documents apart."""
    setup = key.get("setup", {})
    for part, packages in _TRACING_WITH.items():
        if setup.get(part):
            key = {**key, **{package: release(package) for package in packages}}
    if store.shipped:
        # these are checked against the code when the package is made
        shipped = _shipped_software()
        installed = {name: release(name) for name in ("torch", "transformers")}
        return {**key, **{name: found or shipped.get(name) for name, found in installed.items()}}
    return {
        **key,
        # what other code traced is not believed
        "code": tracing(),
        # releases that write documents otherwise share the folder, and no document
        "format": [VERSION, FORMAT],
        "torch": release("torch"),
        "transformers": release("transformers"),
    }


def _digest_in(store: Store, key: dict[str, Any]) -> str:
    return digest_of(_full_key(store, key))


def chosen(family: Family, point: Point, gpu: GpuTraits, setup: Setup) -> bool:
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


def chosen_like(one: Family, other: Family) -> bool:
    """Whether two families have the same attention kernels."""
    return [k for _, k in one.skeleton.attention_choices] == [
        k for _, k in other.skeleton.attention_choices
    ]


def traces_in(family: Family) -> list[tuple[dict[str, int], Trace]]:
    """The traces a family was made of, with their sizes."""
    return [(family.reach.sizes_at(point), family.at(point)) for point in family.points]


def _point_name(family: Family, point: Point) -> str:
    return json.dumps(family.reach.sizes_at(point), sort_keys=True)


def _family_name(family: Family) -> str:
    """A name that says what it is for; the digest keeps different kernels apart."""
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    sizes = sorted({**family.fixed, **{a: list(family.points[0]) for a in family.axes}}.items())
    mark = digest_of([family.axes, sizes, kinds, family.tied])[:12]
    return f"steps-{'-'.join(family.axes) or 'point'}-{mark}"


def _image(text: str) -> int | None:
    return None if text == "None" else int(text)
