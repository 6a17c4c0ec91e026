"""Read YAML text, mappings and ``key=value`` overrides into plain values with their places."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter

from valence.config.describe import Key, as_yaml, dotted
from valence.errors import UserError

Node = Any
"""A node of ruamel.yaml, which declares no types for them: ``id`` is scalar, sequence or
mapping.
"""

COMMAND_LINE = "command line"
_SCALARS = ("null", "bool", "int", "float", "str", "timestamp")
_MAX_DEPTH = 16
DEPTH_FIX = "remove levels and aliases: settings have at most five levels"
_MAX_VALUES = 100_000
"""Values of a document, counted once per alias: 500 bytes of aliases can expand to billions."""


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """JSON-like values of a recipe, and the place (``recipe.yaml:12``) of every key and item."""

    values: Any
    places: Mapping[Key, str]

    def place(self, path: Key) -> str:
        """The place of the value at ``path``, or else of the innermost section around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def where(self, path: Key) -> str:
        """The place with the setting's dotted name, for a message."""
        return f"{self.place(path)} ({dotted(path)})"


def from_yaml(text: str, name: str) -> RawRecipe:
    """A YAML 1.2 document.

    Raises UserError with the line for bad syntax, duplicate or odd keys, and tags.
    """
    reader = _Reader(name)
    try:
        node = reader.compose(text)
    except (YAMLError, RecursionError) as error:
        line = _line_of(error, text)
        code, fix = _classify_syntax_error(error, text.splitlines()[line - 1])
        raise UserError(
            f"not valid YAML: {_problem(error)}", code=code, where=f"{name}:{line}", fix=fix
        ) from None
    if node is None:
        raise UserError(
            "the recipe is empty",
            code="recipe-empty",
            where=name,
            fix="write at least `method: ...`, `model: ...` and `data: ...`",
        )
    values = reader.value(node, ())
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise UserError(
            f"the recipe is {kind}, not a mapping",
            code="recipe-not-a-mapping",
            where=f"{name}:1",
            fix="write `method: ...`, `model: ...` and `data: ...` as top-level keys, without "
            "indentation or a leading `-`",
        )
    return RawRecipe(cast(Any, values), {(): name, **reader.places})


def from_mapping(mapping: Mapping[str, Any], name: str = "recipe") -> RawRecipe:
    """A recipe built in Python. Raises UserError for a value that YAML could not hold."""
    return RawRecipe(_plain(mapping, (), name), {(): name})


def override(raw: RawRecipe, assignment: str) -> RawRecipe:
    """The recipe with one ``dotted.name=YAML value`` of the command line.

    Creates missing sections and the next item of a list. A later override of a setting wins.
    """
    name, equals, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not equals or not text.strip() or not all(parts):
        fix = "write setting=value, such as train.seed=1 (null for no value)"
        if os.path.isfile(assignment):
            fix = (
                f"name the setting of the file, such as data.train={assignment}, or its option, "
                f"such as --data {assignment}"
            )
        raise UserError(
            f"{assignment!r} is not a setting with a value",
            code="override-syntax",
            where=COMMAND_LINE,
            fix=fix,
        )
    path = _resolve(raw.values, parts, text.strip())
    reader = _Reader(COMMAND_LINE, lines=False)
    try:
        node = reader.compose(text)
    except (YAMLError, RecursionError) as error:
        raise UserError(
            f"{assignment!r} is not valid YAML: {_problem(error)}",
            code="override-syntax",
            where=COMMAND_LINE,
            fix=_classify_syntax_error(error, text)[1],
        ) from None
    value = None if node is None else reader.value(node, path)
    places = {k: v for k, v in raw.places.items() if k[: len(path)] != path}
    for length in range(1, len(path) + 1):
        places.setdefault(path[:length], COMMAND_LINE)
    return RawRecipe(put(raw.values, path, value), {**places, **reader.places})


def to_yaml(values: Mapping[str, object]) -> str:
    """Plain values as a YAML document that reads back as the same."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    out = StringIO()
    yaml.dump(dict(values), out)
    return out.getvalue()


class _Representer(SafeRepresenter):
    """Quotes text with unprintable characters, some of which would come back as line ends."""

    def represent_str(self, data: str) -> Any:
        style = None if data.isprintable() else '"'
        return cast(Any, self).represent_scalar("tag:yaml.org,2002:str", data, style=style)


cast(Any, _Representer).add_representer(str, _Representer.represent_str)


class _Reader:
    """Makes plain values of YAML nodes and notes the place of every key and item."""

    def __init__(self, name: str, *, lines: bool = True) -> None:
        self.name, self.lines = name, lines
        self.places: dict[Key, str] = {}
        self._count = 0
        self._yaml = YAML(typ="safe", pure=True)

    def compose(self, text: str) -> Node | None:
        return cast(Any, self._yaml).compose(text)

    def value(self, node: Node, path: Key) -> object:
        _check_depth(path, self._place(node))
        self._count += 1
        if self._count > _MAX_VALUES:
            raise UserError(
                f"the document has more than {_MAX_VALUES:,} values once its aliases are expanded",
                code="recipe-too-large",
                where=self.places.get(path[:1], self._place(node)),
                fix="remove aliases (*NAME) that repeat large parts of the document",
            )
        if node.id == "mapping":
            return self._mapping(node, path)
        if node.id == "sequence":
            for index, item in enumerate(node.value):
                self.places[(*path, index)] = self._place(item)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: Node, path: Key) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, item in node.value:
            if key.id != "scalar":
                raise UserError(
                    "the name of a setting is a list or a mapping",
                    code="setting-name-invalid",
                    where=self._place(key),
                    fix="write the name as one word, as in `method: kto`",
                )
            name = _text(str(key.value), self._place(key))
            inner = (*path, name)
            if name in values:
                raise UserError(
                    f"{dotted(inner)} is set twice, first at {self.places[inner]}",
                    code="setting-duplicate",
                    where=self._place(key),
                    fix="remove one of the two",
                )
            self.places[inner] = self._place(key)
            values[name] = self.value(item, inner)
        return values

    def _scalar(self, node: Node, path: Key) -> object:
        where = f"{self._place(node)} ({dotted(path)})"
        tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if tag not in _SCALARS:
            raise UserError(
                f"the YAML tag {tag} is not allowed in a recipe",
                code="yaml-tag",
                where=where,
                fix="remove the tag; if it is part of the text, put the text in quotes",
            )
        if tag in ("str", "timestamp"):
            return _text(str(node.value), where)
        try:
            return cast(Any, self._yaml).constructor.construct_object(node)
        except (ValueError, KeyError, IndexError):
            raise UserError(
                f"{node.value!r} is not of type {tag}",
                code="yaml-tag",
                where=where,
                fix=f"remove the tag !!{tag}",
            ) from None

    def _place(self, node: Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name


def _line_of(error: Any, text: str) -> int:
    """1-based line of a syntax error: that of an unclosed bracket or quote when the text ended
    inside one.
    """
    if isinstance(error, ReaderError):
        return text.count("\n", 0, cast(Any, error).position) + 1
    mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if opened is not None and re.search("stream end|end of stream", _problem(error)):
        mark = opened
    return 1 if mark is None else min(mark.line + 1, len(text.splitlines()))


def _problem(error: Any) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, ReaderError):
        return f"the character {chr(cast(Any, error).character)!r} is not allowed"
    return ", ".join(
        filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    )


def _classify_syntax_error(error: Exception, line: str) -> tuple[str, str]:
    """The code of a syntax error, and how to fix it."""
    problem = _problem(error)
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "yaml-tab", "indent with spaces, never with tabs"
    if isinstance(error, ReaderError):
        return "yaml-character", "remove it"
    if "another document" in problem:
        return "yaml-several-documents", "keep one recipe per file: remove the line ---"
    if "mapping values are not allowed" in problem:
        fix = (
            "write one `name: value` per line, indented like its neighbours; put text that "
            'holds ": " in quotes'
        )
        return "yaml-colon", fix
    if "undefined alias" in problem or "cannot start any token" in problem:
        fix = "put text that starts with a special character (* & @ % ` !) in quotes"
        return "yaml-special-character", fix
    if isinstance(error, RecursionError):
        return "recipe-too-deep", DEPTH_FIX
    fix = "close every bracket and quote, and indent the lines of a section alike"
    return "yaml-syntax", fix


def _check_depth(path: Key, where: str) -> None:
    if len(path) > _MAX_DEPTH:
        raise UserError(
            "the value is nested too deeply, or contains itself",
            code="recipe-too-deep",
            where=where,
            fix=DEPTH_FIX,
        )


def _text(text: str, where: str) -> str:
    surrogate = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if surrogate is not None:
        raise UserError(
            f"the text contains \\u{ord(surrogate):04x}, which is only half of a surrogate pair",
            code="text-encoding",
            where=where,
            fix="write the complete character instead of this escape, or remove it",
        )
    return text


def _plain(value: object, path: Key, name: str) -> object:
    where = f"{name} ({dotted(path)})"
    _check_depth(path, name)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value)
        for key in items:
            if not isinstance(key, str):
                raise UserError(
                    f"the name {key!r} is not a string",
                    code="setting-name-invalid",
                    where=where,
                    fix="put the name in quotes, or use another name",
                )
        return {
            _text(str(key), where): _plain(item, (*path, str(key)), name)
            for key, item in items.items()
        }
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, list | tuple):
        return [
            _plain(item, (*path, index), name)
            for index, item in enumerate(cast(Sequence[object], value))
        ]
    if isinstance(value, os.PathLike):
        return str(cast(os.PathLike[str], value))
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UserError(
        f"a {type(value).__name__} cannot be a setting",
        code="setting-type",
        where=where,
        fix="use a number, a string, True or False, None, a list or a dictionary",
    )


def _resolve(values: Any, parts: Sequence[str], text: str) -> Key:
    """The path of dotted ``parts``: a number is an index into a list, or of a list to create.

    In a list of one section, the name of a setting belongs to that section. text: the value to set
    there, for messages.
    """
    path: Key = ()
    for part in parts:
        if _is_one_section(values) and not part.isdecimal():
            path, values = (*path, 0), values[0]
        if isinstance(values, list) or (values is None and part.isdecimal()):
            items = cast(list[Any], values or [])
            if not part.isdecimal() or int(part) > len(items):
                raise UserError(
                    f"{dotted(path)} is a list of length {len(items)}, and has no item {part!r}",
                    code="override-index",
                    where=f"{COMMAND_LINE} ({dotted((*path, part))})",
                    fix=_list_fix(path, items, parts[len(path) :], text),
                )
            path = (*path, int(part))
            values = items[int(part)] if int(part) < len(items) else None
        elif values is None or isinstance(values, dict):
            path = (*path, part)
            values = cast(dict[str, Any], values or {}).get(part)
        else:
            raise UserError(
                f"{dotted(path)} is {as_yaml(values)}, and not a section with settings",
                code="override-not-a-section",
                where=f"{COMMAND_LINE} ({dotted((*path, part))})",
                fix=f"write {dotted(path)}={text}",
            )
    return path


def _is_one_section(values: Any) -> bool:
    """Whether a value is a list of one section, which a recipe may write as that section."""
    if not isinstance(values, list):
        return False
    items = cast(list[object], values)
    return len(items) == 1 and isinstance(items[0], dict)


def _list_fix(path: Key, items: Sequence[object], rest: Sequence[str], text: str) -> str:
    """How to write an override of a list, or of one of its items.

    rest: the parts after the list, of which the first is not an item. text: the value.
    """
    num_items = len(items)
    indices = f"use an index from 0 to {num_items} ({num_items} adds an item)"
    if rest[0].isdecimal() or not (items and isinstance(items[0], dict)):
        return indices
    of_first = f"{dotted((*path, 0, *rest))}={text} to change its first item; {indices}"
    if list(rest) == ["path"]:
        return f"write {dotted(path)}={text} to replace the list, or {of_first}"
    return f"write {of_first}"


def put(values: Any, path: Key, value: object) -> object:
    """A copy of ``values`` with ``value`` at ``path``."""
    if not path:
        return value
    part, rest = path[0], path[1:]
    if isinstance(part, int):
        items = cast(list[object], values or [])
        inner = items[part] if part < len(items) else None
        return [*items[:part], put(inner, rest, value), *items[part + 1 :]]
    section = cast(dict[str, object], values or {})
    return {**section, part: put(section.get(part), rest, value)}


def value_at(values: Any, path: Key) -> Any:
    """The value at a path of mappings and lists; None where there is none."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
