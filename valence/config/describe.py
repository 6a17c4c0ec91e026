"""Describe settings for messages and tables: allowed values, default and meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel

from valence.config.schema import Recipe

Key = tuple[str | int, ...]
Node = Mapping[str, Any]
_ANYTHING: Node = {}

_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A row of a table of settings: dotted name, allowed values, default as YAML, meaning.

    summary: the first paragraph of the meaning.
    """

    name: str
    type: str
    default: str
    meaning: str
    summary: str


def settings_table(model: type[BaseModel] = Recipe, prefix: str = "") -> list[SettingRow]:
    """A row for every setting of a recipe, or of a loss (``prefix="loss."``).

    ``N`` stands for an index in a list.
    """
    return list(_rows(schema_of(model), prefix))


@lru_cache(maxsize=64)
def schema_of(model: type[BaseModel]) -> Node:
    """The model's JSON schema, with every reference replaced by its target."""
    schema = model.model_json_schema()
    return _inline(schema, schema.get("$defs", {}))


def at(node: Node, path: Key) -> Node:
    """The part of a schema for the value at ``path``; empty if it allows any value or none."""
    for part in path:
        children = (_child(variant, part) for variant in _variants(node))
        node = next((child for child in children if child is not None), _ANYTHING)
    return node


def names_of(node: Node) -> list[str]:
    """Names of the settings in a section."""
    return [name for variant in _variants(node) for name in variant.get("properties", {})]


def takes(node: Node, *, short: bool = False) -> str:
    """The allowed values of a setting: ``a whole number above 0 or null``.

    short: leave out the names of the settings in a section.
    """
    return " or ".join(_takes(variant, short) for variant in _variants(node))


def takes_null(node: Node) -> bool:
    return any(variant.get("type", "null") == "null" for variant in _variants(node))


def choices_of(node: Node) -> list[str]:
    """The words that a setting may be, if it takes only certain words."""
    return [
        word
        for v in _variants(node)
        for word in v.get("enum", [v["const"]] if "const" in v else [])
    ]


def types_of(node: Node) -> set[str]:
    """JSON types of a setting."""
    return {variant["type"] for variant in _variants(node) if "type" in variant}


def meaning(node: Node) -> str:
    """The setting's docstring on one line."""
    return " ".join(node.get("description", "").split())


def dotted(path: Key) -> str:
    return ".".join(map(str, path))


def as_yaml(value: object) -> str:
    """A value on one line as in a recipe, shortened if long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _inline(node: Any, defs: Node) -> Any:
    if isinstance(node, list):
        return [_inline(item, defs) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    plain = {
        name: _inline(value, defs)
        for name, value in fields.items()
        if name not in ("$ref", "$defs")
    }
    if "$ref" in fields:
        return {**_inline(defs[fields["$ref"].rsplit("/", 1)[1]], defs), **plain}
    return plain


def _variants(node: Node) -> list[Node]:
    return node.get("anyOf", [node])


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, int):
        first = node.get("prefixItems", [])
        return first[part] if part < len(first) else node.get("items")
    extra = node.get("additionalProperties")
    return node.get("properties", {}).get(part, extra if isinstance(extra, dict) else None)


def _takes(node: Node, short: bool) -> str:
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "const" in node:
        return f'"{node["const"]}"'
    match node.get("type"):
        case "integer" | "number" as kind:
            words = [
                "a whole number" if kind == "integer" else "a number",
                " and ".join(_bounds(node)),
            ]
            return " ".join(filter(None, words))
        case "array" if "prefixItems" in node:
            kinds = list(dict.fromkeys(map(takes, node["prefixItems"])))
            return (
                f"a list of {len(node['prefixItems'])} items "
                f"({'each ' if len(kinds) == 1 else ''}{', '.join(kinds)})"
            )
        case "array":
            return f"a list (each {takes(node.get('items', {}), short=short)})"
        case "object" if "properties" in node:
            return "a section" + ("" if short else f" ({', '.join(node['properties'])})")
        case "object":
            return "a mapping of names to values"
        case "string" if "pattern" in node:
            # only the number of pissa_niter_N is a pattern
            return re.sub(r"\[0-9\]\+", "N", node["pattern"]).strip("^$")
        case kind:
            return {"string": "text", "boolean": "true or false", "null": "null"}.get(
                str(kind), "any value"
            )


def _bounds(node: Node) -> Iterator[str]:
    return (f"{words} {_number(node[name])}" for name, words in _BOUNDS.items() if name in node)


def _number(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:,.10g}"


def _rows(section: Node, prefix: str) -> Iterator[SettingRow]:
    for name, node in section.get("properties", {}).items():
        inner = next((v for v in _variants(node) if "properties" in v), None)
        item = next((v["items"] for v in _variants(node) if "items" in v), _ANYTHING)
        if inner is None or len(_variants(node)) > 1:
            yield SettingRow(
                prefix + name,
                takes(node),
                _default(section, name),
                meaning(node),
                " ".join(node.get("description", "").partition("\n\n")[0].split()),
            )
        if inner is not None:
            yield from _rows(inner, f"{prefix}{name}.")
        elif "properties" in item:
            yield from _rows(item, f"{prefix}{name}.N.")


def _default(section: Node, name: str) -> str:
    if name in section.get("required", ()):
        return "required"
    node = section["properties"][name]
    if "default" not in node:  # a default_factory: an empty list or mapping
        return "[]" if "array" in types_of(node) else "{}"
    return as_yaml(node["default"])


def shorten_value(value: object) -> object:
    """The value of a setting for a table; a text of several lines becomes its size."""
    if isinstance(value, str) and "\n" in value.strip():
        return f"(text of {len(value.splitlines())} lines)"
    return value
