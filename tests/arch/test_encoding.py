"""Text files are UTF-8 in every locale: code that opens one as text names its encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.arch.source import FILES, shown, tree

MODE_AT = {"open": 1, "fdopen": 1, "Path.open": 0, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Functions that open files -> position of the mode."""
NOT_TEXT = ("os.open", "webbrowser.open", "tarfile.open", "zipfile.open")


def unnamed(module: ast.Module) -> Iterator[int]:
    """Lines that open a file, or read a program's output, as text in the encoding of the locale."""
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Call)
            and _is_text(node)
            and not any(k.arg in ("encoding", None) for k in node.keywords)
        ):
            yield node.lineno


def _is_text(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    keywords = {k.arg: k.value for k in call.keywords}
    if last in ("read_text", "write_text"):
        return len(call.args) < (2 if last == "write_text" else 1)
    if any(_constant(keywords.get(word)) is True for word in ("text", "universal_newlines")):
        return last in ("run", "Popen", "check_output", "call", "check_call")
    if last not in MODE_AT or name in NOT_TEXT:
        return False
    position = MODE_AT["Path.open" if last == "open" and name not in ("open", "io.open") else last]
    default = "w+b" if last.endswith("TemporaryFile") else "r"
    mode = keywords.get(
        "mode", call.args[position] if len(call.args) > position else ast.Constant(default)
    )
    return isinstance(_constant(mode), str) and "b" not in str(_constant(mode))


def _constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def test_text_has_a_named_encoding() -> None:
    assert [f"{shown(path)}:{line}" for path in FILES for line in unnamed(tree(path))] == []


def test_the_check_finds_what_it_looks_for() -> None:
    text = [
        "p.read_text()",
        "p.write_text(x)",
        "open(f)",
        "p.open()",
        "open(f, 'w')",
        "subprocess.run(c, text=True)",
        "os.fdopen(1)",
    ]
    other = [
        "p.read_text(encoding='utf-8')",
        "open(f, 'rb')",
        "p.open('ab')",
        "os.open(f, 0)",
        "subprocess.run(c)",
        "p.read_bytes()",
    ]
    assert [list(unnamed(ast.parse(line))) for line in text] == [[1]] * len(text)
    assert [list(unnamed(ast.parse(line))) for line in other] == [[]] * len(other)
