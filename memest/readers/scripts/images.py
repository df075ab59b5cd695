"""How many pixels an image has at most, as a script's processor, messages or PIL say it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from memest.readers.mapping import DocumentKeys
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Value, entry_of
from memest.readers.values import PIXELS

__all__ = ["put_pixels"]

_CAP = "max_pixels"
_SIZES = ("longest_edge", _CAP)
_MOST_SIDE = 1 << 14
"""``longest_edge`` of Qwen's processors is a number of pixels, of all others that of a side."""
_PROCESSORS = ("Processor", "ProcessorFast")
_SCALES = ("resize", "thumbnail")
"""Methods of PIL's images that are given a size."""


def put_pixels(keys: DocumentKeys, document: CallDocument, found: Found) -> None:
    """Put down the smallest of the caps that a script names, each of which holds.

    What cannot be told is left open: the size of images is said to be named by nothing.
    """
    caps = [*_of_processors(found.calls), *_of_pictures(found.calls), *_of_messages(found)]
    known = [each for each in caps if isinstance(each[1].data, int) and each[1].data > 0]
    if not known:
        return
    line, value = min(known, key=lambda each: each[1].data)
    document.used.update(value.given)
    keys.set_at(PIXELS, value.data, document.origin(line, value, _CAP))


def _of_processors(calls: tuple[Call, ...]) -> Iterator[tuple[int, Value]]:
    """What processors are made with, called with or told."""
    for call in calls:
        if call.path.startswith("=") and call.arguments:
            if call.path.rpartition(".")[2].strip("=") == _CAP:
                yield call.line, call.arguments[0]
            elif call.path == "=size" or call.path.endswith("processor.size"):
                yield from _of_size(call, call.arguments[0])
            continue
        makes = call.name == "from_pretrained" and call.maker.endswith(_PROCESSORS)
        if _CAP in call.keywords:
            yield call.line, call.keywords[_CAP]
        if makes and "size" in call.keywords:
            yield from _of_size(call, call.keywords["size"])


def _of_size(call: Call, size: Value) -> Iterator[tuple[int, Value]]:
    for name in _SIZES if isinstance(size.data, dict) else ():
        if name in size.data:
            value = entry_of(size, name)
            if isinstance(value.data, int) and name != _CAP and value.data <= _MOST_SIDE:
                value = value.with_data(value.data**2)
            yield call.line, value


def _of_pictures(calls: tuple[Call, ...]) -> Iterator[tuple[int, Value]]:
    """``image.resize((512, 512))``: the largest of them."""
    sizes = []
    for call in calls:
        size = call.argument(0, "size") if call.path in _SCALES else None
        sides = size.data if size is not None and isinstance(size.data, list) else []
        if size is not None and len(sides) == 2 and all(isinstance(side, int) for side in sides):
            sizes.append((call.line, size.with_data(sides[0] * sides[1])))
    yield from [max(sizes, key=lambda each: each[1].data)] if sizes else []


def _of_messages(found: Found) -> Iterator[tuple[int, Value]]:
    """``{"type": "image", "image": image, "max_pixels": 512 * 28 * 28}``: the largest of them."""
    numbers = [
        (key.lineno, number)
        for statement in found.source.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == _CAP
        for number in [_product(value)]
        if isinstance(number, int)
    ]
    for line, number in [max(numbers, key=lambda each: each[1])] if numbers else []:
        yield line, Value(number)


def _product(node: ast.expr) -> Any:
    """A whole number, or a product of such; None for what is neither."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        parts = _product(node.left), _product(node.right)
        return None if None in parts else parts[0] * parts[1]
    return None
