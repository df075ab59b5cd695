"""Measurements and what was predicted for them: read once, kept for all sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from memest.calibration.exchange import read_measurements
from memest.calibration.fitting.blocks import Block, Figure, Heading, Items, Table, Text
from memest.calibration.fitting.prediction import Pair, pair
from memest.calibration.measurement import Measurement
from memest.calibration.store import MeasurementStore, default_store
from memest.places import data_folder
from memest.units import MIB

__all__ = ["STORE", "draw_blocks", "measurements", "pairs_of", "sources"]

Progress = Callable[[str], None]

STORE = "this machine's store"
MOST_TEXT = 512 * MIB
"""Bytes that an export may have when it is unpacked."""


def sources() -> dict[str, Path]:
    """Where measurements are: exports that come with the package, and the user's own store."""
    folder = data_folder() / "measurements"
    found = {
        path.name: path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if path.name.endswith((".jsonl", ".jsonl.gz"))
    }
    if default_store().is_file():
        found[STORE] = default_store()
    return found


def measurements(path: Path) -> tuple[list[Measurement], list[str]]:
    """The measurements of an export or a store, and what could not be read."""
    if path.suffix in (".jsonl", ".gz"):
        return read_measurements(path, most=MOST_TEXT)
    with MeasurementStore(path, create=False) as kept:
        return kept.measurements(), []


def pairs_of(found: tuple[Measurement, ...], progress: Progress | None = None) -> tuple[Pair, ...]:
    """Predictions beside measurements.

    Args:
        found: the measurements.
        progress: told about each of them.
    """
    return _pairs(tuple(measurement.run for measurement in found), found, progress)


@st.cache_resource(show_spinner=False, max_entries=8)
def _pairs(
    runs: tuple[str, ...], _found: tuple[Measurement, ...], _progress: Progress | None
) -> tuple[Pair, ...]:
    made = []
    for number, measurement in enumerate(_found, start=1):
        if _progress is not None:
            _progress(f"predicting {number} of {len(runs)}: {measurement.case.id}")
        made.append(pair(measurement))
    return tuple(made)


def draw_blocks(blocks: list[Block]) -> None:
    """A report of the library on the page."""
    for number, block in enumerate(blocks):
        if isinstance(block, Heading):
            st.markdown(f"{'#' * (block.level + 3)} {block.text}")
        elif isinstance(block, Text):
            st.markdown(block.text)
        elif isinstance(block, Items):
            st.markdown("\n".join(f"- {text}" for text in block.texts))
        elif isinstance(block, Table):
            st.caption(block.caption)
            st.dataframe(
                [dict(zip(block.head, row, strict=True)) for row in block.rows],
                hide_index=True,
                key=f"block_{number}",
                alt=block.caption,
            )
        elif isinstance(block, Figure):
            st.image(block.svg, caption=block.caption)
            st.caption(block.words)
