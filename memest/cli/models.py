"""``memest models``: search the catalogue of architectures, or describe one."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from memest.cli.console import Output, write_out
from memest.cli.parameters import AsciiFlag, DebugFlag, JsonFlag, NoColorFlag
from memest.errors import UnknownModelError

if TYPE_CHECKING:
    from rich.table import Table

    from memest.catalog.models import CatalogueEntry

__all__ = ["models"]


def _search(query: str) -> list[CatalogueEntry]:
    """One model by its id, or all whose id, alias or family holds every word asked for."""
    from memest.catalog.models import aliases, catalogue, closest_models, lookup

    exact = lookup(query)
    if exact is not None:
        return [exact]
    others: dict[str, list[str]] = {}
    for alias, target in aliases().items():
        others.setdefault(target, []).append(alias)
    words = query.lower().split()
    matches = []
    for entry in catalogue():
        text = " ".join((entry.id, entry.model_type, *others.get(entry.id, ()))).lower()
        if words and all(word in text for word in words):
            matches.append(entry)
    if not matches:
        near = closest_models(query)
        hint = f" Closest: {', '.join(near)}." if near else ""
        raise UnknownModelError(
            f"no model of the catalogue matches {query!r}.{hint} `memest models` lists all; "
            "`memest estimate` takes ids of the Hugging Face hub and config.json files too."
        )
    return matches


def _list(entries: Sequence[CatalogueEntry]) -> Table:
    from rich.table import Table as RichTable

    from memest.report.words import format_count

    table = RichTable.grid(padding=(0, 2, 0, 0))
    for side in ("left", "right", "left", "left"):
        table.add_column(justify=side, no_wrap=side == "right", overflow="fold")
    table.add_row("model", "parameters", "family", "configuration", style="dim")
    for entry in entries:
        table.add_row(entry.id, format_count(entry.parameters), entry.model_type, entry.provenance)
    return table


def _describe(entry: CatalogueEntry) -> Table:
    from rich.table import Table as RichTable

    from memest.catalog.models import aliases

    same = [alias for alias, target in aliases().items() if target == entry.id]
    origin = {
        "config.json": "the model's own config.json",
        "reconstructed": "rebuilt from published figures",
    }
    rows = [
        ("model", entry.id),
        ("same architecture", ", ".join(same) or "none listed"),
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
    if entry.note:
        rows.append(("note", entry.note))
    table = RichTable.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return table


def models(
    query: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Argument(metavar="QUERY", help="A model, or words of its name.", show_default=False),
    ] = None,
    *,
    json: JsonFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002, ARG001 - the same options everywhere
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
) -> int:
    """List the architectures that need no network, or describe one."""
    from memest.catalog.models import catalogue

    catalogue_entries = list(catalogue()) if query is None else _search(query)
    if json:
        rows = [dataclasses.asdict(entry) for entry in catalogue_entries]
        write_out(f"{json_module.dumps({'schema_version': 1, 'models': rows}, indent=2)}\n")
        return 0
    table = (
        _describe(catalogue_entries[0]) if len(catalogue_entries) == 1 else _list(catalogue_entries)
    )
    Output(color=not no_color).show(table)
    return 0
