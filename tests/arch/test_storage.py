"""Only storage.py makes files safe: locks, flushes to the disk, and renames."""

from __future__ import annotations

import ast

from tests.arch.source import FILES, shown, tree

OWNER = "valence/storage.py"
CALLS = ("flock", "fsync", "fdatasync", "rename", "renames", "lockf")
"""Names of functions and methods that only the owner calls."""


def is_storage_call(node: ast.AST) -> bool:
    """Whether a node calls one of these, or ``replace`` with a path alone."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, function = node.func.attr, node.func.value
    if name == "replace":  # of os, or of a path: that of a text has two arguments
        is_os = isinstance(function, ast.Name) and function.id == "os"
        return is_os or (len(node.args) == 1 and not node.keywords)
    return name in CALLS


def test_only_one_module_locks_flushes_and_renames_files() -> None:
    places = [
        f"{shown(path)}:{node.lineno}"
        for path in FILES
        if shown(path) != OWNER
        for node in ast.walk(tree(path))
        if is_storage_call(node)
    ]
    assert places == []


def test_the_check_recognizes_calls() -> None:
    code = """
fcntl.flock(file, 1); os.fsync(1); os.replace(a, b); path.replace(target); path.rename(target)
text.replace("a", "b"); replace(options, a=1); time.replace(tzinfo=None); items.flush()
"""
    assert [is_storage_call(n) for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)] == [
        *[True] * 5, *[False] * 4
    ]  # fmt: skip
