"""Only ``valence/terminal.py`` prints, because it escapes its output."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.arch.source import FILES, PACKAGE, shown, tree

ALLOWED = PACKAGE / "terminal.py"
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


def direct_output(module: ast.Module, file: str) -> Iterator[str]:
    """Places that print, write to a standard stream, or make a console that does not escape."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        place = f"{file}:{node.lineno}"
        if isinstance(called, ast.Name) and called.id in ("print", "Console"):
            yield f"{place}: {called.id}(...)"
        if isinstance(called, ast.Attribute) and called.attr in ("write", "writelines"):
            owner = called.value
            if isinstance(owner, ast.Attribute) and owner.attr in STREAMS:
                yield f"{place}: {ast.unparse(owner)}.{called.attr}(...)"
        if isinstance(called, ast.Attribute) and called.attr in ("echo", "secho", "from_markup"):
            yield f"{place}: {ast.unparse(called)}(...)"
        if any(
            word.arg in ("markup", "emoji") and not _is_false(word.value) for word in node.keywords
        ):
            yield f"{place}: markup"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def places_of(path: Path) -> list[str]:
    return list(direct_output(tree(path), shown(path)))


def test_one_module_prints() -> None:
    assert [place for path in FILES if path != ALLOWED for place in places_of(path)] == []


def test_the_check_finds_what_it_looks_for() -> None:
    assert places_of(ALLOWED)
    forbidden = [
        "print(x)",
        "Console()",
        "sys.stderr.write(x)",
        "sys.__stdout__.writelines(x)",
        "typer.echo(x)",
        "Text.from_markup(x)",
        "f(x, markup=True)",
    ]
    allowed = ["print_message(x)", "file.write(x)", "f(x, markup=False, emoji=False)"]
    assert [len(list(direct_output(ast.parse(line), "x"))) for line in forbidden] == [1] * 7
    assert [list(direct_output(ast.parse(line), "x")) for line in allowed] == [[]] * 3
