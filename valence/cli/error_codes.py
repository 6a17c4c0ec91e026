"""Messages and fixes of error codes, read from the calls that create the errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CODE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
UNKNOWN = "..."
"""Stands for a part of a text that is only known when the error occurs."""

Assignments = Mapping[str, list[ast.expr]]
"""The values that a function assigns to each of its variables."""


@dataclass(frozen=True, slots=True)
class ErrorText:
    """A message and its fix. Parts in capitals, and ``...``, vary."""

    message: str
    fix: str


def error_texts(code: str) -> list[ErrorText]:
    """The different texts of errors with this code, in the order of the files. Calls that only
    know a part of their code count if no call has all of it.
    """
    if not CODE.fullmatch(code):
        return []
    exact, partial = list[ErrorText](), list[ErrorText]()
    for call, values in _calls_with_code():
        for pattern in _code_patterns(call, values):
            if re.fullmatch(pattern, code):
                text = ErrorText(
                    _text(_message(call), values), _text(_argument(call, "fix"), values)
                )
                (exact if pattern == re.escape(code) else partial).append(text)
    return list(dict.fromkeys(exact or partial))


@cache
def _calls_with_code() -> list[tuple[ast.Call, Assignments]]:
    """Each call with the argument ``code``, and the assignments of the function around it."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    trees = [ast.parse(source) for source in sources if "code=" in source]
    return [call for tree in trees for call in _calls_in(tree, {})]


def _calls_in(node: ast.AST, values: Assignments) -> Iterator[tuple[ast.Call, Assignments]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        values = _assignments(node)
    if isinstance(node, ast.Call) and _argument(node, "code") is not None:
        yield node, values
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child, values)


def _assignments(function: ast.AST) -> Assignments:
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
            else:
                pairs = iter([(target, node.value)])
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(value)
    return values


def _message(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args else _argument(call, "message")


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _code_patterns(call: ast.Call, values: Assignments) -> list[str]:
    """Regular expressions for the codes that a call may use."""
    patterns: list[str] = []
    for text in _alternatives(_argument(call, "code"), values):
        parts = re.split(r"\.\.\.|[A-Z_]+", text)
        if any(parts):
            patterns.append("[a-z0-9-]+".join(map(re.escape, parts)))
    return patterns


def _text(node: ast.expr | None, values: Assignments) -> str:
    texts = dict.fromkeys(_alternatives(node, values))
    return "; or: ".join(text for text in texts if re.search("[a-z]{2}", text))


def _alternatives(node: ast.expr | None, values: Assignments) -> list[str]:
    """The texts that an expression may have."""
    match node:
        case None | ast.Constant(value=None):
            return []
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part) for part in parts)]
        case ast.IfExp(body=first, orelse=second):
            return [*_alternatives(first, values), *_alternatives(second, values)]
        case ast.Name(id=name) if name in values:
            rest = {key: value for key, value in values.items() if key != name}  # ends recursion
            return [text for value in values[name] for text in _alternatives(value, rest)]
        case _:
            return [UNKNOWN]


def _part(node: ast.expr) -> str:
    """A part of an f-string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name.upper()
        case _:
            return UNKNOWN
