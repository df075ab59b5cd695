"""Hostile inputs from good ones: bytes flipped and cut, documents with other values in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

__all__ = ["mutate"]

TOKENS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"}", b"[" * 50, b'"', b"\\u0000",
    b"\\ud800", b"NaN", b"Infinity", b"-1e999", b"1e400", b"9" * 400, b"null", b"true",
    b"../../../etc/passwd", b"file://",
    b"!!python/object/apply:os.system ['touch PWNED']", b"!!python/name:os.system", b"&a [*a,*a]",
    b"${HOME}", b"$(touch PWNED)", b"`touch PWNED`", b"__import__('os').system('touch PWNED')",
    b"cos\nsystem\n(S'touch PWNED'\ntR.", b"%s%n", b"\r\n", b"\t", b"--", b"=", b",", b"\x1b[2J",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.1, -0.0, float("nan"),
    float("inf"), 1e308, "", "0", "-1", "nan", "auto", "a" * 10_000, "\x00", "\ud7ff", "é" * 300,
    "../../x", "/dev/zero", "/dev/stdin", "__class__", [], {}, [[]], [None], {"": None},
    {"__class__": "x"}, "1e309", "1_000", " 8 ", "0x10", "８",
)  # fmt: skip


def mutate(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One input, made from the seeds by one to four changes."""
    text = chance.choice(seeds)
    if chance.random() < 0.5:
        document = _document(text, chance)
        if document is not None:
            text = document
            if chance.random() < 0.7:
                return text
    for _ in range(chance.randint(1, 4)):
        text = _bytes(text, seeds, chance)
    return text


def _bytes(text: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    end = min(len(text), at + chance.choice((1, 2, 8, 64, 512)))
    kind = chance.randrange(7)
    if kind == 0 and text:
        at = chance.randrange(len(text))
        return text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[end:]
    if kind == 2:
        return text[:at] + text[at:end] * chance.choice((2, 3, 100)) + text[end:]
    if kind == 3:
        return text[:at]
    if kind == 4:
        other = chance.choice(seeds)
        return text[:at] + other[chance.randrange(len(other) + 1) :]
    if kind == 5:
        return text[:at] + chance.randbytes(chance.choice((1, 4, 32))) + text[end:]
    return text[:at] + chance.choice(TOKENS) + text[at:]


def _document(text: bytes, chance: random.Random) -> bytes | None:
    """A JSON document with another value, name or place somewhere; None where it is no JSON."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for _ in range(chance.choice((1, 1, 2, 5))):
        document = _replace(document, chance)
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):
        return None


def _replace(node: Any, chance: random.Random) -> Any:
    if chance.random() < 0.15 or not isinstance(node, dict | list) or not node:
        return _value(chance)
    if isinstance(node, list):
        out = list(node)
        at = chance.randrange(len(out))
        kind = chance.randrange(4)
        if kind == 0:
            del out[at]
        elif kind == 1:
            out *= 2
        else:
            out[at] = _replace(out[at], chance)
        return out
    names = list(node)
    name = chance.choice(names)
    out = dict(node)
    kind = chance.randrange(6)
    if kind == 0:
        del out[name]
    elif kind == 1:
        out[f"{name}{chance.choice(('', 's', '_', ' ', chr(0)))}x"] = out.pop(name)
    elif kind == 2:
        out[chance.choice(names)] = out[name]
    else:
        out[name] = _replace(out[name], chance)
    return out


def _value(chance: random.Random) -> Any:
    value = chance.choice(VALUES)
    if chance.random() < 0.03:
        for _ in range(chance.choice((20, 200, 900))):
            value = [value]
    return value
