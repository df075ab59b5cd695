"""Where memory is: modules as a tree, equal layers folded into one row; phases as rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memest.events import Phase
from memest.report.result import Layer, PeakMoment, Row, TimePoint

__all__ = [
    "NO_MODULE",
    "STEP_PHASES",
    "LayerBlock",
    "Node",
    "PhaseRow",
    "biggest",
    "blocks",
    "phase_rows",
    "tree",
    "visible",
]

NO_MODULE = "(top level)"
_DEPTH_WITHOUT_LAYERS = 2
STEP_PHASES = frozenset({Phase.CLIP, Phase.OPTIMIZER, Phase.ZERO_GRAD})
"""Phases that come once a step, not once a micro-step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A module with all below it.

    Attributes:
        name: last part of its path, ``0-22`` where equal neighbours were folded.
        count: how many modules the row stands for.
        activation_bytes: of all of them, with their children.
        parameter_bytes: of all of them, with their children.
        children: largest first.
    """

    name: str
    count: int
    activation_bytes: int
    parameter_bytes: int
    children: tuple[Node, ...]

    @property
    def total_bytes(self) -> int:
        """Activations and parameters."""
        return self.activation_bytes + self.parameter_bytes

    @property
    def has_layers(self) -> bool:
        """Whether numbered modules are somewhere below."""
        return any(child.name[0].isdigit() or child.has_layers for child in self.children)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlock:
    """A block of the model, or several alike; sizes are of one of them."""

    name: str
    count: int
    activation_bytes: int
    parameter_bytes: int

    @property
    def total_bytes(self) -> int:
        """Activations and parameters of all of them."""
        return self.count * (self.activation_bytes + self.parameter_bytes)


def tree(layers: Iterable[Layer]) -> Node:
    """The root of the tree over the modules; its sizes are the sums over ``layers``."""
    return _node("", [(layer.module.split("."), layer) for layer in layers if layer.module], layers)


def _node(
    name: str, rows: Sequence[tuple[list[str], Layer]], layers: Iterable[Layer] | None = None
) -> Node:
    """A node of rows whose paths begin below it; a path used up is the node's own."""
    rows_by_child: dict[str, list[tuple[list[str], Layer]]] = {}
    activations = parameters = 0
    for path, layer in rows:
        activations += layer.activation_bytes
        parameters += layer.parameter_bytes
        if path:
            rows_by_child.setdefault(path[0], []).append((path[1:], layer))
    children = [_node(part, inner) for part, inner in rows_by_child.items()]
    outer_layers = [layer for layer in layers or () if not layer.module]
    if outer_layers:
        outside = Node(
            name=NO_MODULE,
            count=1,
            activation_bytes=sum(layer.activation_bytes for layer in outer_layers),
            parameter_bytes=sum(layer.parameter_bytes for layer in outer_layers),
            children=(),
        )
        children.append(outside)
        activations += outside.activation_bytes
        parameters += outside.parameter_bytes
    return Node(
        name=name,
        count=1,
        activation_bytes=activations,
        parameter_bytes=parameters,
        children=tuple(sorted(_fold(children), key=_by_size)),
    )


def _by_size(node: Node) -> tuple[int, int, str]:
    number = int(node.name.partition("-")[0]) if node.name[0].isdigit() else 0
    return -node.total_bytes, number, node.name


def _fold(nodes: list[Node]) -> Iterator[Node]:
    """Neighbours by number that are equal in all but their name, as one."""
    numbered_nodes = sorted(
        (node for node in nodes if node.name.isdigit()), key=lambda n: int(n.name)
    )
    yield from (node for node in nodes if not node.name.isdigit())
    group: list[Node] = []
    for node in numbered_nodes:
        if group and (
            int(node.name) != int(group[-1].name) + 1
            or replace(node, name="") != replace(group[0], name="")
        ):
            yield _merge_group(group)
            group = []
        group.append(node)
    if group:
        yield _merge_group(group)


def _merge_group(group: list[Node]) -> Node:
    if len(group) == 1:
        return group[0]
    name = f"{group[0].name}-{group[-1].name}"
    return replace(_multiply(group[0], len(group)), name=name)


def _multiply(node: Node, count: int) -> Node:
    return Node(
        name=node.name,
        count=node.count * count,
        activation_bytes=node.activation_bytes * count,
        parameter_bytes=node.parameter_bytes * count,
        children=tuple(_multiply(child, count) for child in node.children),
    )


def visible(root: Node, depth: int | None = None) -> Iterator[tuple[int, Node]]:
    """The rows of a tree with their level, from 0.

    Args:
        root: its own row is left out.
        depth: how many levels; None = down to the numbered layers, or two.
    """
    yield from _visible(root, depth, 0)


def _visible(node: Node, depth: int | None, level: int) -> Iterator[tuple[int, Node]]:
    for child in node.children:
        yield level, child
        if depth is None:
            is_open = not child.name[0].isdigit() and (
                child.has_layers or level + 1 < _DEPTH_WITHOUT_LAYERS
            )
        else:
            is_open = level + 1 < depth
        if is_open:
            yield from _visible(child, depth, level + 1)


def _block_of(module: str) -> str:
    """The block that a module belongs to: up to the first number, or two levels.

    Example:
        >>> _block_of("bert.encoder.layer.23.attention.self")
        'bert.encoder.layer.23'
        >>> _block_of("bert.embeddings.LayerNorm")
        'bert.embeddings'
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:_DEPTH_WITHOUT_LAYERS])


def blocks(layers: Iterable[Layer]) -> list[LayerBlock]:
    """The blocks of a model in its own order; neighbours that are alike are one row."""
    sizes: dict[str, list[int]] = {}
    for layer in layers:
        size = sizes.setdefault(_block_of(layer.module) or NO_MODULE, [0, 0])
        size[0] += layer.activation_bytes
        size[1] += layer.parameter_bytes
    layer_blocks: list[LayerBlock] = []
    for name, (activations, parameters) in sizes.items():
        block = LayerBlock(
            name=name, count=1, activation_bytes=activations, parameter_bytes=parameters
        )
        larger_block = _extend(layer_blocks[-1], block) if layer_blocks else None
        if larger_block is not None:
            layer_blocks[-1] = larger_block
        else:
            layer_blocks.append(block)
    return layer_blocks


def _extend(group: LayerBlock, block: LayerBlock) -> LayerBlock | None:
    """The group with one more block, None if the block is not its next neighbour."""
    prefix, _, last = block.name.rpartition(".")
    group_prefix, _, numbers = group.name.rpartition(".")
    first, _, end = numbers.partition("-")
    alike = (
        prefix == group_prefix
        and last.isdigit()
        and first.isdigit()
        and int(last) == int(end or first) + 1
        and block.activation_bytes == group.activation_bytes
        and block.parameter_bytes == group.parameter_bytes
    )
    if not alike:
        return None
    path = f"{prefix}." if prefix else ""
    return replace(group, name=f"{path}{first}-{last}", count=group.count + 1)


def biggest(layers: Iterable[Layer], limit: int) -> tuple[list[LayerBlock], int]:
    """The largest blocks first, and how many rows were left out."""
    layer_blocks = sorted(blocks(layers), key=lambda block: -block.total_bytes)
    return layer_blocks[:limit], max(0, len(layer_blocks) - limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of one micro-step, or of several with the same figures."""

    step: int
    micro_step: int
    last_micro_step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    is_peak: bool
    breakdown: tuple[Row, ...] = ()
    """What was alive when the most was allocated."""
    module: str = ""
    op: str = ""
    """What allocated last before that; empty where the phase began with it."""

    @property
    def made_by(self) -> str:
        """Module and operator that made the highest moment, in words."""
        if not self.op:
            return "what was there before"
        return f"{self.op} of {self.module}" if self.module else self.op

    @property
    def label(self) -> str:
        """A short name for axes: ``2.1-3 forward``."""
        if not self.step:
            return self.phase.value
        micro = f".{self.micro_text}" if self.micro_text else ""
        return f"{self.step}{micro} {self.phase.value}"

    @property
    def micro_text(self) -> str:
        """The micro-step, or the first and the last of several; empty where there is none."""
        if self.phase in STEP_PHASES or not self.micro_step:
            return ""
        if self.last_micro_step == self.micro_step:
            return str(self.micro_step)
        return f"{self.micro_step}-{self.last_micro_step}"


def phase_rows(timeline: Iterable[TimePoint], peak_at: PeakMoment) -> list[PhaseRow]:
    """Rows in the order of time; the row of the allocated peak is never folded."""
    groups: list[list[PhaseRow]] = []
    for _, points in itertools.groupby(
        timeline, key=lambda p: (p.step, p.micro_step, p.phase in STEP_PHASES)
    ):
        group = [_row(point, peak_at) for point in points]
        if groups and _repeats(groups[-1], group):
            last = group[0].micro_step
            groups[-1] = [replace(row, last_micro_step=last) for row in groups[-1]]
        else:
            groups.append(group)
    return [row for group in groups for row in group]


def _row(point: TimePoint, peak_at: PeakMoment) -> PhaseRow:
    key = (point.step, point.micro_step, point.phase)
    return PhaseRow(
        step=point.step,
        micro_step=point.micro_step,
        last_micro_step=point.micro_step,
        phase=point.phase,
        allocated_bytes=point.allocated_bytes,
        reserved_bytes=point.reserved_bytes,
        is_peak=key == (peak_at.step, peak_at.micro_step, peak_at.phase),
        breakdown=point.breakdown,
        module=point.module,
        op=point.op,
    )


def _repeats(before: Sequence[PhaseRow], group: Sequence[PhaseRow]) -> bool:
    if any(row.is_peak or row.phase in STEP_PHASES for row in (*before, *group)):
        return False
    if before[0].step != group[0].step or before[0].last_micro_step + 1 != group[0].micro_step:
        return False

    def figures(rows: Sequence[PhaseRow]) -> list[tuple[Phase, int, int, tuple[Row, ...]]]:
        return [(row.phase, row.allocated_bytes, row.reserved_bytes, row.breakdown) for row in rows]

    return figures(before) == figures(group)
