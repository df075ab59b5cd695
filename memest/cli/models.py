"""``memest models``: search the catalogue of architectures, or describe one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from memest.cli.console import Output, write_document
from memest.cli.flags import argument, shows
from memest.errors import UnknownModelError

if TYPE_CHECKING:
    from memest.catalog.models import CatalogueEntry

__all__ = ["models"]


def _search(query: str) -> list[CatalogueEntry]:
    """One model by its id, or all whose id, alias or family holds every word asked for."""
    from memest.catalog.models import aliases, catalogue, closest_models, lookup

    exact = lookup(query)
    if exact is not None:
        return [exact]
    aliases_by_id: dict[str, list[str]] = {}
    for alias, target in aliases().items():
        aliases_by_id.setdefault(target, []).append(alias)
    words = query.lower().split()
    matches = []
    for entry in catalogue():
        text = " ".join((entry.id, entry.model_type, *aliases_by_id.get(entry.id, ()))).lower()
        if words and all(word in text for word in words):
            matches.append(entry)
    if not matches:
        suggestions = closest_models(query)
        hint = f" Closest: {', '.join(suggestions)}." if suggestions else ""
        raise UnknownModelError(
            f"no model of the catalogue matches {query!r}.{hint} `memest models` lists all; "
            "`memest estimate` takes ids of the Hugging Face hub and config.json files too."
        )
    return matches


def _facts(entry: CatalogueEntry) -> list[tuple[str, str]]:
    """A model by itself, fact by fact."""
    from memest.catalog.models import aliases
    from memest.estimation.shipped_runs import shipped_words

    other_names = [alias for alias, target in aliases().items() if target == entry.id]
    origin = {
        "config.json": "the model's own config.json",
        "reconstructed": "rebuilt from published figures",
    }
    rows = [
        ("model", entry.id),
        ("same architecture", ", ".join(other_names) or "none listed"),
        ("family", entry.model_type),
        ("built with", entry.auto_class),
        ("parameters", f"{entry.parameters:,} (tied weights once)"),
        (
            "published",
            f"{entry.published_parameters:,} ({entry.published_basis})"
            if entry.published_parameters
            else "no figure",
        ),
        ("configuration", origin.get(entry.provenance, entry.provenance)),
        ("source", entry.source),
        ("licence", entry.license or "not known"),
    ]
    found = shipped_words(entry.config(), entry.auto_class)
    rows.append(
        ("without torch", "\n".join(found) or "not answered: pip install 'memest-gpu[torch]'")
    )
    if entry.note:
        rows.append(("note", entry.note))
    return rows


@shows()
def models(
    query: Annotated[
        str | None,
        argument("QUERY", "A model, or words of its name."),
    ] = None,
    *,
    output: Output,
) -> int:
    """List the architectures that need no network, or describe one."""
    from memest.catalog.models import catalogue
    from memest.estimation.shipped_runs import is_shipped
    from memest.report.words import format_count

    catalogue_entries = list(catalogue()) if query is None else _search(query)
    if len(catalogue_entries) == 1 and not output.as_json:
        output.table(_facts(catalogue_entries[0]))
        return 0
    shipped = {e.id: is_shipped(e.config(), e.auto_class) for e in catalogue_entries}
    if output.as_json:
        documents = [
            {**dataclasses.asdict(entry), "without_torch": shipped[entry.id]}
            for entry in catalogue_entries
        ]
        write_document({"schema_version": 1, "models": documents})
        return 0
    output.table(
        (
            (e.id, format_count(e.parameters), e.model_type, "answered" if shipped[e.id] else "-")
            for e in catalogue_entries
        ),
        ("model", "parameters", "family", "no torch"),
        ("left", "right", "left", "left"),
    )
    return 0
