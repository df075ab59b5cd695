"""The model configurations shipped with memest.

Each entry is the ``config.json`` of an architecture that transformers builds without remote code,
so an estimate needs no network. ``provenance`` tells a real file from one rebuilt from published
tables; the latter has the right parameter count, but dropout, dtype and head counts may rest on
the conventions of its family.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from memest.errors import ModelLoadError, closest
from memest.files.folders import data_folder

__all__ = [
    "MIRRORS",
    "CatalogueEntry",
    "alias_reason",
    "aliases",
    "as_said",
    "catalogue",
    "closest_models",
    "family_of_config",
    "left_out",
    "lookup",
    "model_types",
]

_TEXT_FIELDS = (
    "id file model_type auto_class published_basis source provenance license note".split()
)
"""Columns of the index that are kept as they are."""
MIRRORS = ("mirror", "copy")
"""How reasons of aliases begin that hold the weights of another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One architecture of the catalogue.

    Attributes:
        id: the Hugging Face id it answers to.
        file: its file among the configurations.
        model_type: transformers' name of the family, for example ``bert``.
        auto_class: the class that builds it, for example ``AutoModelForCausalLM``.
        parameters: parameters after building, tied weights once.
        published_parameters: the figure its authors publish, None if there is none.
        published_basis: how exact and how sure that figure is.
        source: where the configuration is from.
        provenance: ``config.json`` (a real file) or ``reconstructed``.
        license: licence of the checkpoint, empty if not known.
        note: remark for the user.
    """

    id: str
    file: str
    model_type: str
    auto_class: str
    parameters: int
    published_parameters: int | None
    published_basis: str
    source: str
    provenance: str
    license: str
    note: str

    def config(self) -> dict[str, Any]:
        """Read the configuration; a fresh dict at every call."""
        path = data_folder() / "models" / "configs" / self.file
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"the configuration of {self.id} in this installation cannot be read ({error}): "
                "reinstall memest"
            ) from error
        return data


def _rows(name: str) -> list[dict[str, str]]:
    text = (data_folder() / "models" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Every entry, in the order of the index; reads no configuration."""
    return tuple(
        CatalogueEntry(
            **{name: row[name] for name in _TEXT_FIELDS},
            parameters=int(row["parameters"]),
            published_parameters=int(row["published_parameters"] or 0) or None,
        )
        for row in _rows("index.csv")
    )


@functools.cache
def aliases() -> dict[str, str]:
    """Other ids of the same architecture, to the id of the entry."""
    return {row["alias"]: row["id"] for row in _rows("aliases.csv")}


@functools.cache
def left_out() -> dict[str, str]:
    """Ids of models that were looked for and are not in the catalogue, to the reason."""
    return {row["id"]: row["reason"] for row in _rows("excluded.csv")}


@functools.cache
def _reasons() -> dict[str, str]:
    """Lower-case aliases, with their organisation and without, to why they are some."""
    rows = _rows("aliases.csv")
    short = {row["alias"].rpartition("/")[2].lower(): row["reason"] for row in rows}
    return {**short, **{row["alias"].lower(): row["reason"] for row in rows}}


@functools.cache
def _mirrors() -> frozenset[str]:
    """Lower-case aliases that hold the weights of another model."""
    names = (alias.lower() for alias in aliases())
    return frozenset(name for name in names if _reasons()[name].startswith(MIRRORS))


def alias_reason(name: str) -> str:
    """Why another id stands for an entry; empty where it is the entry's own."""
    key = name.strip().strip("/").lower()
    entry = lookup(name)
    own = entry is None or key in (entry.id.lower(), entry.id.rpartition("/")[2].lower())
    return "" if own else _reasons().get(key, "")


@functools.cache
def model_types() -> frozenset[str]:
    """Families that transformers builds with its own code."""
    return frozenset(entry.model_type for entry in catalogue())


def family_of_config(name: str) -> str | None:
    """The family whose configuration is of a class, None where the catalogue has none.

    Example:
        >>> family_of_config("DebertaV2Config"), family_of_config("OwnConfig")
        ('deberta-v2', None)
    """
    word = name.removesuffix("Config").lower()
    matches = (each for each in model_types() if each.replace("-", "").replace("_", "") == word)
    return next(matches, None)


@functools.cache
def _by_id() -> dict[str, CatalogueEntry]:
    """Lower-case id, alias or unambiguous last part of an id, to the entry."""
    entries = {entry.id: entry for entry in catalogue()}
    full = {name.lower(): entry for name, entry in entries.items()}
    for alias, target in aliases().items():
        full.setdefault(alias.lower(), entries[target])
    tails: dict[str, list[CatalogueEntry]] = {}
    own_tails = {name.rpartition("/")[2] for name in full if name not in _mirrors()}
    for name, entry in full.items():
        tail = name.rpartition("/")[2]
        # of two entries that are the same model a mirror may stand for either: it adds new ones
        if name not in _mirrors() or tail not in own_tails:
            tails.setdefault(tail, []).append(entry)
    for tail, catalogue_entries in tails.items():
        # "Qwen2.5-7B" for "Qwen/Qwen2.5-7B", unless two architectures share the short name
        if len({entry.id for entry in catalogue_entries}) == 1:
            full.setdefault(tail, catalogue_entries[0])
    return full


def as_said(name: str) -> str:
    """A name without what people leave out or put in: case, spaces, dashes and underscores."""
    return re.sub(r"[\s_-]", "", name.lower())


@functools.cache
def _by_words() -> dict[str, CatalogueEntry | None]:
    """Names without organisation, spaces and dashes, to the entry; None where there are several."""
    found: dict[str, CatalogueEntry | None] = {}
    for name, entry in _by_id().items():
        if "/" not in name and found.setdefault(as_said(name), entry) != entry:
            found[as_said(name)] = None
    return found


def lookup(name: str, *, exactly: bool = False) -> CatalogueEntry | None:
    """Find a model by id, alias or id without its organisation, as it is written or as one says it.

    Args:
        name: in letters of any case.
        exactly: as it is written alone.

    A foreign organisation is not ignored: a fine-tune may have changed the architecture.

    Example:
        >>> lookup("google-bert/bert-large-uncased").id, lookup("bert large uncased").id
        ('bert-large-uncased', 'bert-large-uncased')
        >>> lookup("someone/bert-large-uncased") is None
        True
    """
    name = name.strip().strip("/")
    entry = _by_id().get(name.lower())
    return entry if entry is not None or exactly else _by_words().get(as_said(name))


def closest_models(name: str, *, limit: int = 3) -> tuple[str, ...]:
    """Ids of the catalogue that look most like ``name``, best first; may be empty."""
    ids = [entry.id for entry in catalogue()]
    # their originals are what is meant, and Unsloth's copies are all alike
    others = [alias for alias in aliases() if alias.lower() not in _mirrors()]
    name = re.sub(r"(?i)(-unsloth)?-bnb-4bit$", "", name)
    name = re.sub(r"\s+", "-", name.strip())  # as one says it: llama 3.1 8b
    tail = name.rpartition("/")[2]
    by_tail = {each.rpartition("/")[2]: each for each in reversed(ids)}
    nearest: list[str] = []
    if len(tail) > 2:
        fragment = tail.lower()
        # the right name under another organisation, or only a part of it, is the commonest slip
        nearest = [each for short, each in by_tail.items() if fragment in short.lower()]
        nearest.sort(
            key=lambda each: (
                not each.rpartition("/")[2].lower().startswith(fragment),
                not each.lower().endswith(fragment),
                len(each),
            )
        )
    nearest += closest(name, (*ids, *others), limit=limit)
    nearest += [by_tail[each] for each in closest(tail, by_tail, limit=limit)]
    return tuple(dict.fromkeys(nearest))[:limit]
