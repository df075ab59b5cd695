"""Measurements and what was predicted for them: read once, kept for all sessions."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import chain, combinations
from pathlib import Path

import streamlit as st

from memest.app.uploads import MAX_EXPORT_BYTES, temporary
from memest.calibration.exchange import read_measurements
from memest.calibration.fitting.fit import dataset_digest
from memest.calibration.fitting.prediction import Pair, pair
from memest.calibration.fitting.report import report_blocks
from memest.calibration.measurement import Measurement
from memest.calibration.store import MeasurementStore, default_store
from memest.errors import ConfigError
from memest.files.folders import data_folder
from memest.report.error_plots import CORRECTED, GRID, INK
from memest.report.page import Block, Figure, Heading, Items, Table, Text
from memest.units import MIB

__all__ = [
    "STORE",
    "content_of",
    "draw_blocks",
    "measurements",
    "pairs_of",
    "read_upload",
    "report_of",
    "runs_of",
    "sources",
]

Progress = Callable[[str, float], None]
"""Told what is done, and the share of it that is over."""

STORE = "this machine's store"
MOST_TEXT = 512 * MIB
"""Bytes that an export may have when it is unpacked."""


def sources() -> dict[str, Path]:
    """Where measurements are: exports that lie in a checkout, and the user's own store."""
    outcomes = {path.name: path for path in _exports(data_folder() / "measurements")}
    if default_store().is_file():
        outcomes[STORE] = default_store()
    return outcomes


@functools.cache
def _exports(folder: Path) -> tuple[Path, ...]:
    """The exports among the records of a folder: some are of other things than training steps."""
    found = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path) as file:
            if "measurement" in json.loads(file.readline()):
                found.append(path)
    return tuple(found)


Read = tuple[list[Measurement], list[str]]
"""Measurements, and what could not be read."""


def measurements(path: Path) -> Read:
    """The measurements of an export or a store, read again only when it has changed."""
    state = path.stat()
    return _measurements(path, state.st_mtime_ns, state.st_size)


@st.cache_resource(show_spinner=False, max_entries=4)
def read_upload(name: str, content: bytes) -> Read:
    """The measurements of an uploaded export.

    Raises:
        ConfigError: it is too large, or holds none.
    """
    with temporary(name, content, MAX_EXPORT_BYTES) as path:
        return _read(path, name)


@st.cache_resource(show_spinner=False, max_entries=4)
def _measurements(path: Path, mtime_ns: int, size: int) -> Read:  # noqa: ARG001 - of the key
    return _read(path, path.name)


def _read(path: Path, name: str) -> Read:
    """What a file holds; errors call it by its name, for a page tells no path of its server."""
    if path.suffix in (".jsonl", ".gz"):
        try:
            return read_measurements(path, most=MOST_TEXT)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), name)) from None
    with MeasurementStore(path, create=False) as store:
        return store.measurements(), []


def runs_of(dataset: str) -> tuple[Measurement, ...]:
    """The measurements that a profile was fitted to; none where they are not on this machine.

    Args:
        dataset: digest of them, as the profile has it.
    """
    stamps = tuple((path, path.stat().st_mtime_ns) for path in sources().values())
    return _runs_of(dataset, stamps)


@st.cache_resource(show_spinner=False, max_entries=8)
def _runs_of(dataset: str, stamps: tuple[tuple[Path, int], ...]) -> tuple[Measurement, ...]:
    runs = [measurements(path)[0] for path, _ in stamps]
    # a profile may be of two exports, those of cards of one kind
    for some in chain(combinations(runs, 1), combinations(runs, 2)):
        if dataset_digest(chain(*some)) == dataset:
            return tuple(chain(*some))
    return ()


def pairs_of(runs: tuple[Measurement, ...], progress: Progress | None = None) -> tuple[Pair, ...]:
    """Predictions beside measurements.

    Args:
        runs: the measurements.
        progress: told about each of them.
    """
    return _pairs(content_of(runs), runs, progress)


def content_of(runs: Iterable[Measurement]) -> str:
    """A digest of measurements: a name of a run alone is whatever somebody's file says."""
    digest = hashlib.sha256()
    for measurement in runs:
        digest.update(json.dumps(measurement.to_dict(), sort_keys=True).encode())
    return digest.hexdigest()


@st.cache_resource(show_spinner=False, max_entries=8)
def _pairs(
    content: str,  # noqa: ARG001 - the key
    _runs: tuple[Measurement, ...],
    _progress: Progress | None,
) -> tuple[Pair, ...]:
    pairs = []
    for number, measurement in enumerate(_runs, start=1):
        if _progress is not None:
            done = (number - 1) / len(_runs)
            _progress(f"predicting {number} of {len(_runs)}: {measurement.case.id}", done)
        pairs.append(pair(measurement))
    return tuple(pairs)


def report_of(runs: tuple[Measurement, ...], progress: Progress | None = None) -> list[Block]:
    """Predicted against measured, as ``memest calibrate report`` has it."""
    return _report(content_of(runs), runs, progress)


@st.cache_resource(show_spinner=False, max_entries=8)
def _report(
    content: str,  # noqa: ARG001 - the key
    _runs: tuple[Measurement, ...],
    _progress: Progress | None,
) -> list[Block]:
    return report_blocks(pairs_of(_runs, _progress))


_NOTHING = "-"
"""What the library's tables write where there is nothing; a column of it is left out here."""


def draw_blocks(blocks: Sequence[Block]) -> None:
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
            rows = [dict(zip(block.head, row, strict=True)) for row in block.rows]
            empty = {name for name in block.head if all(row[name] == _NOTHING for row in rows)}
            st.dataframe(
                [{name: row[name] for name in block.head if name not in empty} for row in rows],
                hide_index=True,
                key=f"block_{number}",
                alt=block.caption,
            )
        elif isinstance(block, Figure):
            st.html(_picture(block))
            if block.words:
                st.caption(block.words)


_ON_DARK = {INK: "#e6ebf1", GRID: "#39434f", CORRECTED: "#5aa9f5"}
"""Colours of figures that are too dark on the dark page."""
_ON_A_PHONE = "<style>@media (max-width: 420px) {text {font-size:14px}}</style>"
"""A figure is drawn at 640 pixels, and shrinks; the width is that of the picture."""


def _picture(figure: Figure) -> str:
    """A figure of the library in the page's colours, with its caption as text."""
    svg = figure.svg.replace("</svg>", f"{_ON_A_PHONE}</svg>")
    if st.context.theme.type == "dark":
        for light, dark in _ON_DARK.items():
            svg = svg.replace(light, dark)
    data = base64.b64encode(svg.encode()).decode()
    caption = escape(figure.caption, quote=True)
    return (
        f'<figure style="margin:0"><img style="width:100%; max-width:44rem" alt="{caption}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
