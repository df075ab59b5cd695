"""JSON Schemas of dataclasses: types from their hints, descriptions from their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
SWITCH: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "array", "items": TEXT}
ANY: Schema = {}
_PLAIN: dict[Any, Schema] = {str: TEXT, int: WHOLE, float: NUMBER, bool: SWITCH, Any: ANY}
_ENTRY = re.compile(r"^(?P<names>[\w, ]+): (?P<text>.*)$")


def array(items: Schema) -> Schema:
    """A list of one kind of thing."""
    return {"type": "array", "items": items}


def by_name(values: Schema, description: str = "") -> Schema:
    """An object whose keys are names."""
    return said({"type": "object", "additionalProperties": values}, description)


def choice(values: Sequence[str]) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    if not schema:
        return schema
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return schema | {"type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def said(schema: Schema, description: str) -> Schema:
    """The same with a description."""
    return schema | ({"description": description} if description else {})


def record(
    properties: Mapping[str, Schema], *, optional: Sequence[str] = (), description: str = ""
) -> Schema:
    """An object with these keys, all of which are there but the optional ones."""
    named = {
        name: said(schema, schema.get("description", "") or ("In bytes." if _is_size(name) else ""))
        for name, schema in properties.items()
    }
    required = [name for name in properties if name not in optional]
    return said({"type": "object", "properties": named, "required": required}, description)


def _is_size(name: str) -> bool:
    return name == "bytes" or name.endswith("_bytes")


class Definitions:
    """What schemas of one document refer to.

    Args:
        special: schemas of classes whose documents are no mirror of their fields, by class.
    """

    def __init__(self, special: Mapping[type, Any] | None = None) -> None:
        self.schemas: dict[str, Schema] = {}
        self._special = dict(special or {})

    def add(self, name: str, schema: Schema) -> Schema:
        """A reference to a schema that is put here."""
        self.schemas.setdefault(name, schema)
        return {"$ref": f"#/$defs/{name}"}

    def ref(self, kind: type) -> Schema:
        """A reference to the schema of a class."""
        if kind.__name__ not in self.schemas:
            self.schemas[kind.__name__] = {}  # it may refer to itself
            make = self._special.get(kind)
            self.schemas[kind.__name__] = make(self) if make else self.of(kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def of(
        self,
        kind: type,
        *,
        without: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        more: Mapping[str, Schema] | None = None,
        optional: Sequence[str] = (),
    ) -> Schema:
        """The schema of a dataclass, as :class:`memest.report.answer.Document` writes it.

        Args:
            kind: the dataclass.
            without: fields that its document does not have.
            renamed: keys of fields that have another name there.
            more: keys that are no fields.
            optional: keys that are not always there.
        """
        hints, texts = typing.get_type_hints(kind), field_texts(kind)
        properties: dict[str, Schema] = {}
        for field in dataclasses.fields(kind):
            if field.name in (*without, *getattr(kind, "left_out", ())):
                continue
            key = (renamed or {}).get(field.name, field.name)
            properties[key] = said(self.typed(hints[field.name]), texts.get(field.name, ""))
        for name in getattr(kind, "computed", ()):
            getter = inspect.getattr_static(kind, name).fget
            text = inspect.getdoc(getter) or ""
            properties[name] = said(self.typed(typing.get_type_hints(getter)["return"]), text)
        properties |= more or {}
        return record(properties, optional=optional, description=first_line(kind))

    def typed(self, hint: Any) -> Schema:
        """The schema of what a type hint says, as JSON has it."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
        if origin in (typing.Union, types.UnionType):
            kinds = [each for each in arguments if each is not type(None)]
            schemas = [self.typed(each) for each in kinds]
            whole = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            return or_null(whole) if len(kinds) < len(arguments) else whole
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            items = [self.typed(each) for each in arguments]
            return {
                "type": "array", "prefixItems": items, "minItems": len(items),
                "maxItems": len(items),
            }  # fmt: skip
        if origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
            return array(self.typed(arguments[0]) if arguments else ANY)
        if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
            return by_name(self.typed(arguments[1]))
        if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
            return self.add(hint.__name__, said(choice([m.value for m in hint]), first_line(hint)))
        if dataclasses.is_dataclass(hint):
            return self.ref(hint)
        raise TypeError(f"no schema of {hint!r}")


def first_line(kind: Any) -> str:
    """The summary of a docstring."""
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def field_texts(kind: type) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each field."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            texts |= _in_attributes(each.__doc__ or "") | _behind_fields(each)
    return texts


def _in_attributes(docstring: str) -> dict[str, str]:
    """The entries of a section ``Attributes:``."""
    _, _, section = inspect.cleandoc(docstring).partition("Attributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        entry = _ENTRY.match(line[4:]) if not line.startswith("     ") else None
        if entry:
            names = [name.strip() for name in entry["names"].split(",")]
            texts |= dict.fromkeys(names, entry["text"])
        elif line.strip():
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return {name: _sentence(text) for name, text in texts.items()}


def _behind_fields(kind: type) -> dict[str, str]:
    """Texts that stand below fields."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for one, following in itertools.pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[one.target.id] = _sentence(" ".join(value.value.split()))  # type: ignore[union-attr]
    return texts


def _sentence(text: str) -> str:
    return text.replace("``", "`")[:1].upper() + text.replace("``", "`")[1:]
