"""Traces on demand: one model, asked for setups and GPUs.

What was traced once is kept, in memory and in the store, and answers everything that follows from
it. Torch is loaded when a trace has to be made, not before.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.attention import check_flash_gpu, choose_backend
from memest.errors import ConfigError, MemestError, MissingDependencyError
from memest.events import Trace, Weight
from memest.hidden.call import GpuTraits
from memest.places import data_folder
from memest.result import ModelFacts
from memest.setup import Attention, Loop, Setup
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
from memest.steps.program import Program
from memest.steps.sizing import Answer, Sizing, asked_sizes, milliseconds
from memest.steps.stream import Stream
from memest.store import Document, Store, cache_folder, digest_of

if TYPE_CHECKING:
    from memest.models.resolve import ModelSource

__all__ = ["Found", "Tracer", "default_stores", "installed_version", "shipped_folder"]

Progress = Callable[[str], None]
Sizes = Mapping[str, int]

_UPDATE_FIELDS = ("optim", "max_grad_norm", "master_weights", "loop")
_MAX_PROGRAMS = 16


@cache
def _exact_version(package: str) -> str | None:
    """The release of an installed package; builds of one release trace alike."""
    found = release_by_folder(package)
    if found is None:
        # loads a parser of e-mail: only where the usual place does not tell
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version(package)
        except PackageNotFoundError:
            return None
    return found.partition("+")[0]


def release_by_folder(package: str) -> str | None:
    """The release that the name of the folder of a package's metadata tells."""
    for entry in sys.path:
        try:
            names = [path.name for path in Path(entry or ".").glob(f"{package}-*.dist-info")]
        except OSError:
            continue
        if len(names) == 1:
            return names[0].removeprefix(f"{package}-").removesuffix(".dist-info")
    return None


def installed_version(package: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package without importing it, None if it is not there."""
    text = _exact_version(package)
    if text is None:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@cache
def _fingerprint() -> str:
    """Changes with the code that traces, so that what older code traced is not believed."""
    here = Path(__file__).parent
    files = [*sorted((here / "trace").glob("*.py")), here / "hidden" / "registry.py"]
    stats = [(f.name, s.st_size, s.st_mtime_ns) for f in files for s in (f.stat(),)]
    return digest_of(stats)


@cache
def shipped_folder() -> Path:
    """The profiles that come with the package."""
    return data_folder() / "profiles"


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
class _Shelved:
    """A stored family: where it holds, and how to get it."""

    reach: Reach
    store: Store
    digest: str
    document: Document


@dataclass(slots=True)
class _Steps:
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
    shelf: list[_Shelved] = field(default_factory=list)
    runs: dict[int | None, Any] = field(default_factory=dict)
    barren: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Found:
    """A question that is answered: a program and the point to run it at.

    Attributes:
        setup: with the sizes that are taken.
        gpu: whose kernels run.
        program: micro-steps and updates.
        point: of the program's family.
        card: the model.
    """

    setup: Setup
    gpu: GpuTraits
    program: Program
    point: Point
    card: Card

    @property
    def stream(self) -> Stream:
        """The stream of the whole run."""
        return self.program.stream(
            self.point, self.gpu, num_steps=self.setup.num_steps, grad_accum=self.setup.grad_accum
        )

    @property
    def notes(self) -> list[str]:
        """What the trace has to say."""
        return list(self.program.trace.notes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of the model, see :attr:`memest.events.Trace.counts`."""
        family = self.program.micro_steps
        numbers = family.numbers_at(self.point)
        return tuple(numbers[place] for place in family.skeleton.counts)


class Tracer:
    """Makes and keeps the traces of one model.

    Args:
        source: where the model comes from; None for a live module.
        module: a live module, None otherwise.
        inputs: example inputs of a live module or factory, None otherwise.
        loss: takes the loss out of a live module's outputs, None for the usual ways.
        progress: told what is being done.
        stores: where traces are kept; the first one is written to.
    """

    def __init__(
        self, *, source: ModelSource | None = None, module: Any = None, inputs: Any = None,
        loss: Any = None, progress: Progress | None = None,
        stores: Sequence[Store] | None = None,
    ) -> None:  # fmt: skip
        self._source = source
        self._module = module
        self._inputs = inputs
        self._loss = loss
        self.progress = progress
        self._stores = tuple(default_stores() if stores is None else stores)
        self._own = self._stores[0] if self._stores else Store(None)
        self._known: dict[Setup, _Steps] = {}
        self._updates: dict[str, Family] = {}
        self._weights: dict[tuple[int, Point | None], tuple[Family, tuple[Weight, ...], str]] = {}
        self._programs: dict[tuple[int, str], tuple[Family, Program]] = {}
        self.traces_made = 0

    # -- questions

    def resolve(self, asked: Setup) -> Setup:
        """The setup with what the model decides filled in: sizes, task, attention.

        Raises:
            MemestError: the model cannot be built, or not for these sizes.
        """
        steps = self._steps(asked)
        answer = self._answer(steps, asked)
        card = steps.cards[asked.image_size]
        batch = asked.batch
        if card.batch is not None and asked.batch == Setup().batch:
            batch = card.batch
        return replace(
            asked, **answer.taken, task=card.task, attn_implementation=card.attention,
            checkpointing=card.checkpointing, batch=batch,
        )  # fmt: skip

    def assumptions(self, asked: Setup) -> tuple[str, ...]:
        """What was decided for a setup, in sentences."""
        steps = self._steps(asked)
        answer = self._answer(steps, asked)
        card = steps.cards[asked.image_size]
        source = self._source.notes if self._source is not None else ()
        return (*card.about, *answer.notes, *card.remarks, *source)

    def find(self, asked: Setup, gpu: GpuTraits, vary: Sequence[str] = ()) -> Found:
        """What answers a setup on a GPU.

        Args:
            asked: as the user gave it.
            gpu: whose kernels run.
            vary: sizes (``batch``, ``seq_len``, ...) that further questions will change: worth a
                few more traces now.

        Raises:
            MemestError: the steps cannot be traced.
        """
        steps, setup = self._steps(asked), self.resolve(asked)
        if setup.attn_implementation is Attention.FLASH_ATTENTION_2:
            check_flash_gpu(gpu.capability)
        sizes = _sizes_of(setup)
        held = self._held(steps, sizes, gpu)
        if held is None or not self._varies(held[0], vary, sizes):
            held = self._extended(steps, asked, setup, gpu, sizes, vary)
        family, point = held
        program = self._program(family, point, setup, gpu)
        return Found(setup, gpu, program, point, steps.cards[asked.image_size])

    def find_once(self, asked: Setup, gpu: GpuTraits) -> Found:
        """As :meth:`find`, with one trace at most: for a size near which nobody will ask again."""
        steps, setup = self._steps(asked), self.resolve(asked)
        if setup.attn_implementation is Attention.FLASH_ATTENTION_2:
            check_flash_gpu(gpu.capability)
        sizes = _sizes_of(setup)
        held = self._held(steps, sizes, gpu)
        if held is None:
            family = alone(self._traced(steps, asked, setup, gpu), sizes)
            self._keep(steps, family)
            held = family, ()
        program = self._program(*held, setup, gpu)
        return Found(setup, gpu, program, held[1], steps.cards[asked.image_size])

    def limit(self, asked: Setup, axis: str) -> int | None:
        """The greatest length that the model takes.

        Args:
            asked: as the user gave it.
            axis: ``seq_len`` or ``target_len``.

        Returns:
            None where the model names none, or where it is not known.
        """
        setup = self.resolve(asked)
        return self._limit(self._steps(asked), setup, axis)

    def trace(self, asked: Setup, gpu: GpuTraits) -> Found:
        """The same by a trace of its own, whatever is known: to compare with."""
        steps, setup = self._steps(asked), self.resolve(asked)
        sizes = _sizes_of(setup)
        family = alone(self._traced(steps, asked, setup, gpu), sizes)
        program = self._program(family, (), setup, gpu)
        return Found(setup, gpu, program, (), steps.cards[asked.image_size])

    def facts(self, found: Found) -> ModelFacts:
        """The model, counted."""
        parameters, trainable, buffers, parameter_bytes = found.counts
        card, source = found.card, self._source
        return ModelFacts(
            id=source.id if source is not None else card.class_name,
            class_name=card.class_name,
            parameters=parameters,
            trainable_parameters=trainable,
            buffers=buffers,
            parameter_bytes=parameter_bytes,
            source=source.provenance if source is not None else "live module",
            task=card.task.value,
        )

    # -- what is known

    def _steps(self, asked: Setup) -> _Steps:
        structure = _structure(asked)
        steps = self._known.get(structure)
        if steps is None:
            steps = self._known[structure] = _Steps(structure, self._key(structure))
            if steps.key:
                self._load(steps)
        return steps

    @property
    def _keeps(self) -> bool:
        """Whether everything that the traces depend on can be written down."""
        source = self._source
        if source is None or source.config is None or source.trust_remote_code:
            return False
        return self._inputs is None and self._loss is None

    def _key(self, structure: Setup) -> dict[str, Any]:
        source = self._source
        if not self._keeps or source is None:
            return {}
        return {
            "format": FORMAT,
            "model": source.id,
            "config": source.config,
            "auto_class": source.auto_class,
            "setup": structure.to_dict(),
        }

    def _load(self, steps: _Steps) -> None:
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
                steps.shelf.append(_Shelved(reach, store, digest, document))

    def _taken(self, steps: _Steps, wanted: Callable[[Reach], bool]) -> None:
        """Read the families on the shelf that are wanted."""
        for shelved in list(steps.shelf):
            if not wanted(shelved.reach):
                continue
            steps.shelf.remove(shelved)
            try:
                steps.families.append(family_from_json(shelved.document.content))
            except (BadDocumentError, ValueError):
                shelved.store.forget(shelved.digest, shelved.document.name)

    def _save_model(self, steps: _Steps) -> None:
        content = {
            "cards": [[str(size), card.to_json()] for size, card in steps.cards.items()],
            "sizing": sizing_to_json(steps.sizing),
            "barren": sorted(steps.barren),
        }
        self._write(steps.key, "model", content)

    def _write(self, key: dict[str, Any], name: str, content: Any, about: Any = None) -> None:
        if key:
            store = self._own
            full = _full_key(store, key)
            store.write(digest_of(full), name, content, full, about)

    def _keep(self, steps: _Steps, family: Family) -> None:
        """Keep a family; those it answers for are not needed any more."""
        points = {_point_name(family, point) for point in family.points}
        for old in list(steps.families):
            if {_point_name(old, p) for p in old.points} <= points and _chosen_like(old, family):
                steps.families.remove(old)
                if steps.key:
                    store = self._own
                    store.forget(_digest_in(store, steps.key), _family_name(old))
        steps.families.append(family)
        reach = reach_to_json(family.reach)
        self._write(steps.key, _family_name(family), family_to_json(family), reach)

    def _held(self, steps: _Steps, sizes: Sizes, gpu: GpuTraits) -> tuple[Family, Point] | None:
        self._taken(steps, lambda reach: reach.point_of(sizes) is not None)
        best = None
        for family in steps.families:
            point = family.point_of(sizes)
            if point is None or not _chosen(family, point, gpu, steps.setup):
                continue
            if best is None or len(family.axes) > len(best[0].axes):
                best = family, point
        return best

    @staticmethod
    def _varies(family: Family, vary: Sequence[str], sizes: Sizes) -> bool:
        return all(
            axis in family.axes or (axis == "target_len" and family.tied)
            or (axis == "batch" and sizes["batch"] == 1)
            for axis in vary
            if axis in sizes
        )  # fmt: skip

    # -- answers of the model

    def _answer(self, steps: _Steps, asked: Setup) -> Answer:
        wanted = asked_sizes(asked)
        known = steps.sizing.find(wanted)
        if known is not None and asked.image_size in steps.cards:
            return known
        run = self._run(steps, asked)
        answer: Answer = run.answer(asked)
        steps.cards[asked.image_size] = run.card
        steps.sizing.exact[wanted] = answer
        self._learn_lengths(steps, asked, run)
        self._save_model(steps)
        return answer

    def _learn_lengths(self, steps: _Steps, asked: Setup, run: Any) -> None:
        """Ask the model for some lengths, to know its answer for all."""
        given = {name for name, _ in asked_sizes(asked)}
        base = replace(asked, seq_len=None, target_len=None)
        if given - {"seq_len", "target_len"}:
            return
        for names in (("seq_len",), ("target_len",), ("seq_len", "target_len")):
            highest = {name: _highest(run, base, name) for name in names}
            if 0 in highest.values():
                continue
            answers = {}
            for lengths in _samples(highest):
                setup = replace(base, **lengths)
                try:
                    answers[asked_sizes(setup)] = run.answer(setup)
                except MemestError:
                    continue
            if len(answers) >= 3:
                steps.sizing.learn(answers, {})

    def _run(self, steps: _Steps, asked: Setup) -> Any:
        """The model, built."""
        run = steps.runs.get(asked.image_size)
        if run is not None:
            return run
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Tracing a model needs torch and transformers: pip install 'memest[torch]'."
            ) from error
        from memest.trace.session import build

        self._say("building the model on the meta device")
        run = build(asked, self._source, self._module, self._inputs, self._loss)
        steps.runs[asked.image_size] = run
        return run

    # -- traces

    def _traced(self, steps: _Steps, asked: Setup, setup: Setup, gpu: GpuTraits) -> Trace:
        run = self._run(steps, asked)
        from memest.trace.session import trace_built

        self._say(f"tracing training steps at {_words(_sizes_of(setup))}")
        self.traces_made += 1
        return trace_built(run, setup, gpu)

    def _extended(
        self, steps: _Steps, asked: Setup, setup: Setup, gpu: GpuTraits, sizes: Sizes,
        vary: Sequence[str],
    ) -> tuple[Family, Point]:  # fmt: skip
        """A trace at the point, or a family around it where one is wanted."""
        held = self._held(steps, sizes, gpu)
        if held is None:
            family = alone(self._traced(steps, asked, setup, gpu), sizes)
            self._keep(steps, family)
            held = family, ()
        self._taken(steps, lambda _: True)
        near = [f for f in steps.families if _chosen_like(f, held[0])]
        axes = _worth_varying(near, sizes, vary, own=held[0])
        while axes:
            place = _place(axes, sizes, held[0])
            grown = None
            if place not in steps.barren:
                grown = self._grown(steps, asked, setup, gpu, held, near, axes)
                if grown is None:
                    steps.barren.add(place)
                    self._save_model(steps)
            if grown is not None:
                self._keep(steps, grown)
                point = grown.point_of(sizes)
                if point is not None:
                    return grown, point
            # perhaps only the batch is well-behaved
            axes = ("batch",) if len(axes) > 1 and "batch" in axes else ()
        return held

    def _grown(
        self, steps: _Steps, asked: Setup, setup: Setup, gpu: GpuTraits,
        held: tuple[Family, Point], near: Sequence[Family], axes: tuple[str, ...],
    ) -> Family | None:  # fmt: skip
        from memest.growth import grow, range_of

        sizes = _sizes_of(setup)
        tied = "target_len" not in axes and sizes.get("target_len") == sizes.get("seq_len")
        tied = tied and "target_len" in sizes and "seq_len" in axes
        tokens = max(sizes.get("seq_len", 256), sizes.get("target_len", 0))
        found = {}
        for axis in reversed(axes):  # the batch comes last: how far it goes depends on the others
            limit = self._limit(steps, setup, axis)
            found[axis] = range_of(axis, sizes[axis], limit, tokens, self._thresholds)
            if (reached := found[axis]) is not None and axis in ("seq_len", "target_len"):
                tokens = max(tokens, reached.high)
        ranges = {axis: reached for axis in axes if (reached := found[axis]) is not None}
        if not ranges:
            return None
        known = {}
        for family in near:
            for sized, trace in _traces_in(family):
                if sized.keys() == sizes.keys() and all(
                    sized.get(n) == v for n, v in sizes.items()
                    if n not in ranges and not (tied and n == "target_len")
                ) and (not tied or sized.get("target_len") == sized.get("seq_len")):  # fmt: skip
                    known[tuple(sized[axis] for axis in ranges)] = trace
        centre = tuple(sizes[axis] for axis in ranges)
        known[centre] = held[0].at(held[1])

        def trace_at(wanted: Sizes) -> Trace:
            resized = replace(setup, **_fields_of(wanted))
            own = replace(asked, image_size=resized.image_size) if "image_size" in ranges else asked
            return self._traced(steps, own, resized, gpu)

        return grow(sizes, ranges, known, trace_at, tied=tied)

    @property
    def _thresholds(self) -> list[int]:
        """Lengths at which the config says that something changes."""
        config = None if self._source is None else self._source.config
        return sorted(set(_windows(config or {})))

    def _limit(self, steps: _Steps, setup: Setup, axis: str) -> int | None:
        """The greatest size the model takes."""
        if axis not in ("seq_len", "target_len"):
            return None
        highs = [
            rule.highs[rule.names.index(axis)] for rule in steps.sizing.rules if axis in rule.names
        ]
        limit = max(highs, default=None)
        return None if limit is None or limit >= _UNLIMITED else max(limit, getattr(setup, axis))

    # -- updates

    def _program(self, family: Family, point: Point, setup: Setup, gpu: GpuTraits) -> Program:
        name, updates = "", None
        if setup.optim != "none":
            name, updates = self._updates_for(family, point, setup, gpu)
        known = self._programs.get((id(family), name))
        if known is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            known = family, Program(family, updates)
            self._programs[id(family), name] = known
        return known[1]

    def _updates_for(
        self, family: Family, point: Point, setup: Setup, gpu: GpuTraits
    ) -> tuple[str, Family]:
        """Clipping and optimizer for these weights."""
        weights, weights_digest = self._weights_of(family, point)
        key = {
            "format": FORMAT,
            "weights": weights_digest,
            "setup": {name: str(getattr(setup, name)) for name in _UPDATE_FIELDS},
            "scaled": setup.precision == "fp16",
            "for_torch": list(gpu.torch),
        }  # fmt: skip
        name = digest_of(key)
        known = self._updates.get(name)
        if known is None:
            known = self._stored_updates(key)
        if known is None:
            try:
                from memest.trace.training import trace_updates
            except ImportError as error:
                raise MissingDependencyError(
                    "Tracing an optimizer needs torch and transformers: pip install "
                    "'memest[torch]'."
                ) from error
            self._say(f"tracing {setup.optim}")
            known = alone(trace_updates(weights, setup, gpu), {})
            if self._keeps:
                self._write(key, "updates", family_to_json(known))
        self._updates[name] = known
        return name, known

    def _weights_of(self, family: Family, point: Point) -> tuple[tuple[Weight, ...], str]:
        """The weights at a point, and a digest of them."""
        # mostly no size of the batch changes them, and one digest serves all points
        key = id(family), point if family.weights_vary else None
        known = self._weights.get(key)
        if known is None:
            weights = family.weights_at(family.numbers_at(point))
            rows = [
                [w.name, w.shape, w.stride, w.dtype, w.trains, w.decays, w.has_grad]
                for w in weights
            ]
            known = self._weights[key] = family, weights, digest_of(rows)
        return known[1], known[2]

    def _stored_updates(self, key: dict[str, Any]) -> Family | None:
        for store in self._stores if self._keeps else ():
            name = _digest_in(store, key)
            for document in store.read(name, "updates"):
                try:
                    return family_from_json(document.content)
                except (BadDocumentError, ValueError):
                    store.forget(name, document.name)
        return None

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text)


# -- sizes ----------------------------------------------------------------------------------------

_UNLIMITED = 1 << 17


def _full_key(store: Store, key: dict[str, Any]) -> dict[str, Any]:
    """The key with the software that traces, as a store tells its documents apart."""
    if store.shipped:
        # these are checked against the code when the package is made
        shipped = _shipped_software()
        installed = {name: _exact_version(name) for name in ("torch", "transformers")}
        return {**key, **{name: found or shipped.get(name) for name, found in installed.items()}}
    return {
        **key,
        "code": _fingerprint(),
        "torch": _exact_version("torch"),
        "transformers": _exact_version("transformers"),
    }


def _digest_in(store: Store, key: dict[str, Any]) -> str:
    return digest_of(_full_key(store, key))


def _structure(asked: Setup) -> Setup:
    """The part of a setup that changes the traces of micro-steps."""
    return replace(
        asked, batch=1, seq_len=None, target_len=None, image_size=None, audio_seconds=None,
        grad_accum=1 if asked.loop is Loop.PLAIN and asked.grad_accum == 1 else 2,
        optim="none" if asked.optim == "none" else "adamw_torch_fused",
        max_grad_norm=None, master_weights=False, alloc_conf="", num_steps=2, tf32=False,
    )  # fmt: skip


def _sizes_of(setup: Setup) -> dict[str, int]:
    """The sizes of a batch; audio in milliseconds where they are whole."""
    sizes = {"batch": setup.batch}
    for name in ("seq_len", "target_len", "image_size"):
        value = getattr(setup, name)
        if value is not None:
            sizes[name] = value
    if setup.audio_seconds is not None:
        whole = milliseconds(setup.audio_seconds)
        if whole is not None:
            sizes["audio_ms"] = whole
        else:
            # a fraction of a millisecond is a size of its own
            numerator, denominator = setup.audio_seconds.as_integer_ratio()
            sizes["audio_numerator"], sizes["audio_denominator"] = numerator, denominator
    return sizes


def _fields_of(sizes: Sizes) -> dict[str, Any]:
    """The same as fields of a setup."""
    fields: dict[str, Any] = {
        name: size for name, size in sizes.items() if not name.startswith("audio")
    }
    if "audio_ms" in sizes:
        fields["audio_seconds"] = sizes["audio_ms"] / 1000
    return fields


def _words(sizes: Sizes) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def _highest(run: Any, base: Setup, name: str) -> int:
    """The greatest length the model takes, by bisection; 0 where it takes none of this kind."""

    def takes(length: int) -> bool:
        try:
            asked: Any = {name: length}
            answer = run.answer(replace(base, **asked))
        except (ConfigError, ValueError):
            return False
        return bool(answer.taken.get(name) == length)

    if not takes(16):
        return 0
    if takes(_UNLIMITED):
        return _UNLIMITED
    low, high = 16, _UNLIMITED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def _samples(highest: Mapping[str, int]) -> list[dict[str, Any]]:
    """Lengths to ask a model about: both ends, and primes between."""
    out: list[dict[str, Any]] = []
    for a, b in ((1, 1), (7, 13), (11, 5), (0, 0), (3, 17), (13, 2)):
        row: dict[str, Any] = {}
        for number, (name, high) in enumerate(highest.items()):
            share = (a, b)[number % 2]
            row[name] = high if share == 0 else min(1 + high * share // 19, high)
        if row not in out:
            out.append(row)
    low: dict[str, Any] = dict.fromkeys(highest, 1)
    return [low, *[row for row in out if row != low]]


_WINDOW = re.compile(r"window|chunk_size|local_attention|original_max_position|max_distance")


def _windows(config: Any) -> Iterator[int]:
    """The lengths in a config that bound what attention looks at."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            yield from _windows(value)
        elif _WINDOW.search(str(name)):
            values = value if isinstance(value, list) else [value]
            yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))


# -- families -------------------------------------------------------------------------------------


def _chosen(family: Family, point: Point, gpu: GpuTraits, setup: Setup) -> bool:
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


def _chosen_like(one: Family, other: Family) -> bool:
    return [k for _, k in one.skeleton.attention_choices] == [
        k for _, k in other.skeleton.attention_choices
    ]


def _worth_varying(
    near: Sequence[Family], sizes: Sizes, vary: Sequence[str], own: Family
) -> tuple[str, ...]:
    """The sizes that shall vary: those asked for, and those in which questions differed before."""
    axes = {axis for axis in vary if axis in sizes}
    for family in near:
        if set(family.fixed) | set(family.axes) | ({"target_len"} if family.tied else set()) != set(
            sizes
        ):
            continue
        axes.update(family.axes)
        axes.update(n for n, v in family.fixed.items() if sizes[n] != v)
    axes.update(own.axes)
    if sizes["batch"] == 1:
        axes.discard("batch")
    if "target_len" in axes and sizes.get("target_len") == sizes.get("seq_len"):
        axes.discard("target_len")
        axes.add("seq_len")
    return tuple(
        a for a in ("batch", "seq_len", "target_len", "image_size", "audio_ms") if a in axes
    )


def _place(axes: tuple[str, ...], sizes: Sizes, family: Family) -> str:
    """Where a family was looked for: other sizes of these axes would not find it either."""
    rest = {n: v for n, v in sizes.items() if n not in axes}
    remainder = {a: sizes[a] % 128 for a in axes if a != "batch"}
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    return digest_of([axes, rest, remainder, sizes["batch"] == 1, kinds])


def _traces_in(family: Family) -> list[tuple[dict[str, int], Trace]]:
    """The traces a family was made of, with their sizes."""
    found = []
    for point in family.points:
        sizes = {**family.fixed, **dict(zip(family.axes, point, strict=True))}
        if family.tied:
            sizes["target_len"] = sizes["seq_len"]
        found.append((sizes, family.at(point)))
    return found


def _point_name(family: Family, point: Point) -> str:
    sizes = {**family.fixed, **dict(zip(family.axes, point, strict=True))}
    if family.tied:
        sizes["target_len"] = sizes["seq_len"]
    return json.dumps(sizes, sort_keys=True)


def _family_name(family: Family) -> str:
    """A name that says what it is for; the digest keeps different kernels apart."""
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    sizes = sorted({**family.fixed, **{a: list(family.points[0]) for a in family.axes}}.items())
    mark = digest_of([family.axes, sizes, kinds, family.tied])[:12]
    return f"steps-{'-'.join(family.axes) or 'point'}-{mark}"


def _image(text: str) -> int | None:
    return None if text == "None" else int(text)
