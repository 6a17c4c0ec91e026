"""Sizes, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.arch.source import FILES, ROOT, name_of, tree

LINES_OF_A_FILE = 800
LINES_OF_A_FUNCTION = 120
TAKES_ANYTHING = {
    "valence/report/sinks.py": 1,
    "valence/checkpoint/keeper.py": 1,
    "valence/reward/threads.py": 1,
    "valence/training/pages.py": 1,
    "valence/network.py": 1,
}
"""Files with a handler of every error, each of which says why."""


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_OF_A_FILE


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f"{shown(path)}:{f.lineno} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {where: size for where, size in sizes.items() if size > LINES_OF_A_FUNCTION} == {}


def test_no_handler_takes_every_error() -> None:
    found: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or "Exception" in _names(node.type)):
                found[shown(path)] = found.get(shown(path), 0) + 1
    assert found == TAKES_ANYTHING


def _names(node: ast.AST) -> set[str]:
    return {n.id.removeprefix("Base") for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_every_module_says_what_it_is() -> None:
    assert [shown(path) for path in FILES if not ast.get_docstring(tree(path))] == []


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


FOLDERS = "home|root|Users|tmp|work|workspace|mnt|srv"
OF_A_MACHINE = re.compile(rf"(?<![\w.:/~-])/(?:{FOLDERS})/[\w.]|file://|[A-Z]:\\\\Users")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def test_files_speak_of_no_machine_and_are_finished() -> None:
    found: list[str] = []
    for path in _tracked():
        if path == Path(__file__) or path.name == "LICENSE" or path.suffix == ".jinja":  # texts of others
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not a text
        found += [f"{shown(path)}:{n}: {line.strip()[:80]}" for n, line in enumerate(lines, 1) if _forbidden(line)]
    assert found == []


def _forbidden(line: str) -> bool:
    return bool(OF_A_MACHINE.search(line) or UNFINISHED.search(line))


@pytest.mark.parametrize(("line", "forbidden"), [
    ("open('/ho" + "me/someone/x')", True), ("see /wo" + "rk/main", True), ("(/tm" + "p/x)", True), ("TO" + "DO later", True),
    ("https://host/home/x", False), ("a/wo" + "rk/b", False), ("the folder tmp_path / 'x'", False), ("methods", False),
])  # fmt: skip
def test_what_is_forbidden_is_seen(line: str, forbidden: bool) -> None:
    assert _forbidden(line) is forbidden
