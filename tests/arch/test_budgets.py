"""Limits on the content of the package's files."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.arch.source import FILES, ROOT, shown, tree

TAKES_ANYTHING = {
    "valence/reports/sinks.py": 1,
    "valence/training/checkpoints.py": 1,
    "valence/user_code/attempt.py": 1,
    "valence/training/trainer.py": 1,
    "valence/network.py": 1,
    "valence/apps/serve/app.py": 1,
    "valence/apps/compare/run_benchmarks.py": 1,
    "valence/models/loading.py": 1,
}
"""Files with a handler of every error, each of which says why."""


def test_no_handler_takes_every_error() -> None:
    handlers = {
        shown(path): [
            f"{shown(path)}:{node.lineno}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or "Exception" in _names(node.type))
        ]
        for path in FILES
    }
    assert TAKES_ANYTHING.keys() <= handlers.keys()
    wrong = {
        file: lines for file, lines in handlers.items() if len(lines) != TAKES_ANYTHING.get(file, 0)
    }
    assert wrong == {}


def _names(node: ast.AST) -> set[str]:
    return {n.id.removeprefix("Base") for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_every_module_says_what_it_is() -> None:
    assert [shown(path) for path in FILES if not ast.get_docstring(tree(path))] == []


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


FOLDERS = "home|root|Users|tmp|work|workspace|mnt|srv"
OF_A_MACHINE = re.compile(rf"(?<![\w.:/~-])/(?:{FOLDERS})/[\w.]|file://|[A-Z]:\\\\Users")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def test_files_speak_of_no_machine_and_are_finished() -> None:
    results: list[str] = []
    for path in _tracked():
        # texts of others
        if path == Path(__file__) or path.name == "LICENSE" or path.suffix == ".jinja":
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not a text
        results += [
            f"{shown(path)}:{n}: {line.strip()[:80]}"
            for n, line in enumerate(lines, 1)
            if _forbidden(line)
        ]
    assert results == []


def _forbidden(line: str) -> bool:
    return bool(OF_A_MACHINE.search(line) or UNFINISHED.search(line))


def test_the_check_of_texts_finds_what_it_looks_for() -> None:
    forbidden = [
        "open('/ho" + "me/someone/x')",
        "see /wo" + "rk/main",
        "(/tm" + "p/x)",
        "TO" + "DO later",
    ]
    allowed = ["https://host/home/x", "a/wo" + "rk/b", "the folder tmp_path / 'x'", "methods"]
    assert [line for line in (*forbidden, *allowed) if _forbidden(line)] == forbidden


def test_no_file_of_the_package_is_ignored_by_git() -> None:
    """A wheel leaves out what .gitignore names, also files that are tracked."""
    paths = "\n".join(shown(path) for path in FILES)
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    result = subprocess.run(
        command, cwd=ROOT, input=paths, capture_output=True, text=True, check=False
    )
    if result.returncode == 128:
        pytest.skip("not a git checkout")
    assert result.stdout == ""
