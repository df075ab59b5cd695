"""The modules of a model as an icicle: each as wide as the memory it holds, its parts below it."""

from __future__ import annotations

from typing import Any

import altair as alt

from memest.app.charts import Chart, to_chart
from memest.report.layers import Node
from memest.units import format_size

__all__ = ["PART", "icicle_chart", "node_at"]

PART = "part"
"""Name of the selection of a module."""
_LEVELS = 4
_NAMED, _PADDING, _LETTER = 64, 12, 6.4
"""Pixels from which on a part carries its name and size; around a name, and of one letter."""
_ALL = 0.995
"""From this share on a module is all of the one around it."""
_ROW = 58
_COLOURS = ("#8fc1e0", "#f0a36b")
"""Of parameters and of activations, light enough for black text."""


def node_at(root: Node, path: str) -> Node | None:
    """The node that names lead to from the root, parted by slashes; None where there is none."""
    node = root
    for name in filter(None, path.split("/")):
        found = next((child for child in node.children if child.name == name), None)
        if found is None:
            return None
        node = found
    return node


def icicle_chart(node: Node, path: str) -> Chart:
    """A node with what is below it.

    Args:
        node: to begin with; it takes the whole width.
        path: that leads to it from the root.
    """
    rows: list[dict[str, Any]] = []
    _add(rows, node, path, 0.0, 0, node.total_bytes or 1)
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("left:Q", axis=None, scale=alt.Scale(domain=[0, 1], nice=False)),
        y=alt.Y("top:Q", axis=None, scale=alt.Scale(reverse=True, nice=False)),
        tooltip=[
            alt.Tooltip("path:N", title="module"),
            alt.Tooltip("activations:N"),
            alt.Tooltip("parameters:N"),
        ],
    )
    chosen = alt.selection_point(name=PART, fields=["path"])
    rects = (
        base.mark_rect(stroke="white", strokeWidth=1.5, cursor="pointer")
        .encode(
            x2=alt.X2("right:Q"),
            y2=alt.Y2("bottom:Q"),
            color=alt.Color(
                "share:Q",
                scale=alt.Scale(domain=[0, 1], range=list(_COLOURS), interpolate="rgb"),
                legend=alt.Legend(
                    orient="top",
                    title="share of activations",
                    titleOrient="left",
                    format="%",
                    values=[0, 0.5, 1],
                    gradientLength=120,
                    gradientThickness=10,
                ),
            ),
        )
        .add_params(chosen)
    )
    room = "(datum.right - datum.left) * width"
    named = base.transform_filter(f"{room} > {_NAMED}").transform_calculate(
        name=f"truncate(datum.name, ({room} - {_PADDING}) / {_LETTER})"
    )
    text = {"align": "left", "dx": 6, "color": "#111111"}
    levels = 1 + max((row["top"] for row in rows), default=0)
    chart = alt.layer(
        rects,
        named.mark_text(dy=18, fontWeight="bold", **text).encode(text=alt.Text("name:N")),
        named.mark_text(dy=36, **text).encode(text=alt.Text("size:N")),
    ).properties(height=int(_ROW * levels) + 60)
    words = "; ".join(f"{row['path'] or 'all'}: {row['size']}" for row in rows)
    return to_chart(chart, f"Memory by module. {words}.")


def _add(
    rows: list[dict[str, Any]], node: Node, path: str, left: float, level: int, whole: int
) -> None:
    """A node and its children, from its left edge on; sizes are shares of the whole.

    A module that is all of the one around it, but for what nobody would see, stands in its row.
    """
    names = [node.name]
    while (inside := [child for child in node.children if child.total_bytes]) and (
        inside[0].total_bytes >= _ALL * node.total_bytes
    ):
        node = inside[0]
        names.append(node.name)
        path = f"{path}/{node.name}".lstrip("/")
    name = ".".join(filter(None, names)) or "all"
    width = node.total_bytes / whole
    rows.append(
        {
            "path": path,
            "name": name + (f" ({node.count} ×)" if node.count > 1 else ""),
            "left": left,
            "right": left + width,
            "top": level,
            "bottom": level + 1,
            "share": node.activation_bytes / max(node.total_bytes, 1),
            "size": format_size(node.total_bytes),
            "activations": format_size(node.activation_bytes),
            "parameters": format_size(node.parameter_bytes),
        }
    )
    if level + 1 >= _LEVELS:
        return
    for child in inside:
        _add(rows, child, f"{path}/{child.name}".lstrip("/"), left, level + 1, whole)
        left += child.total_bytes / whole
