"""Only ``valence/terminal.py`` prints: whatever it prints is escaped there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import FILES, PACKAGE, name_of, tree

ALLOWED = PACKAGE / "terminal.py"
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


def direct_output(path: Path) -> Iterator[str]:
    """Places that print, write to a standard stream, or make a console that does not escape."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        place = f"{name_of(path)}:{node.lineno}"
        if isinstance(called, ast.Name) and called.id in ("print", "Console"):
            yield f"{place}: {called.id}(...)"
        if isinstance(called, ast.Attribute) and called.attr in ("write", "writelines"):
            owner = called.value
            if isinstance(owner, ast.Attribute) and owner.attr in STREAMS:
                yield f"{place}: {ast.unparse(owner)}.{called.attr}(...)"
        if isinstance(called, ast.Attribute) and called.attr in ("echo", "secho", "from_markup"):
            yield f"{place}: {ast.unparse(called)}(...)"
        if any(word.arg in ("markup", "emoji") and not _is_false(word.value) for word in node.keywords):
            yield f"{place}: markup"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("path", [path for path in FILES if path != ALLOWED], ids=name_of)
def test_one_module_prints(path: Path) -> None:
    assert list(direct_output(path)) == []


def test_the_check_finds_what_it_looks_for() -> None:
    assert len(list(direct_output(ALLOWED))) >= 1
