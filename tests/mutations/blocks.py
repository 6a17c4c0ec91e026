"""Which test executes which code: marks in a copy of the package.

A block is a run of statements of a function that are executed together: it begins at the start of a
body or branch, or behind a statement that has branches. Each block gets a statement that sets one
byte of memory that all processes of a test share. Functions are not wrapped, since signatures are
read as settings.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.mutations.operators import Text

MARKS = "_block_marks"
MODULE = "block_marks"
VARIABLE = "BLOCK_MARKS"
"""Environment variable that names the file of marks."""
COMPOUND = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Block:
    """Characters ``start`` to ``end`` of a file, less those of smaller blocks inside."""

    file: str
    start: int
    end: int


def find_blocks(source: str, file: str) -> list[Block]:
    return [block for block, _ in _Blocks(source, file).blocks]


def block_at(blocks: list[Block], start: int) -> int | None:
    """The number of the smallest block that has this character; None for a module's own code."""
    around = [n for n, block in enumerate(blocks) if block.start <= start < block.end]
    return min(around, key=lambda n: blocks[n].end - blocks[n].start, default=None)


def add_marks(source: str, package: str, first: int) -> str:
    """The source with a mark in each of its blocks, which have the numbers from ``first``."""
    text, tree = Text(source), ast.parse(source)
    inserted: list[tuple[int, int, str]] = []
    for number, (block, node) in enumerate(_Blocks(source, "").blocks, first):
        if isinstance(node, ast.Lambda):
            inserted += [
                (block.start, 1, f"({MARKS}.__setitem__({number}, 1) or ("),
                (block.end, -number, "))"),
            ]
        else:
            inserted.append(
                (block.start, 0, _before(node, f"{MARKS}[{number}] = 1", source, block.start))
            )
    body = [node for node in tree.body if not _is_docstring(node) and not _is_future(node)]
    if not body or not inserted:
        return source
    statement = f"from {package}.{MODULE} import marks as {MARKS}"
    at = _start(text, body[0])
    inserted.append((at, -1, _before(body[0], statement, source, at)))
    for at, _, new in sorted(inserted, reverse=True):
        source = source[:at] + new + source[at:]
    return source


def marks_module(size: int) -> str:
    """The module that the copy of the package gets."""
    return (
        '"""Bytes that are set by executed blocks."""\n\nimport mmap\nimport os\n\n'
        f'if path := os.environ.get("{VARIABLE}"):\n    with open(path, "r+b") as file:\n'
        f"        marks = mmap.mmap(file.fileno(), {size})\nelse:\n    marks = bytearray({size})\n"
    )


def _before(node: ast.AST, statement: str, source: str, at: int) -> str:
    """Insert a statement before another one, on a separate line if that one has a body."""
    if not isinstance(node, (*COMPOUND, *DEFINED)):
        return f"{statement}; "
    return f"{statement}\n{source[source.rfind(chr(10), 0, at) + 1 : at]}"


def _start(text: Text, node: ast.stmt) -> int:
    if isinstance(node, DEFINED) and node.decorator_list:
        return text.source.rfind("@", 0, text.span(node.decorator_list[0])[0])
    return text.span(node)[0]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class _Blocks:
    def __init__(self, source: str, file: str) -> None:
        self.text, self.file = Text(source), file
        self.blocks: list[tuple[Block, ast.stmt | ast.Lambda]] = []
        self._visit(ast.parse(source), False)

    def _add(self, start: int, end: int, node: ast.stmt | ast.Lambda) -> None:
        self.blocks.append((Block(self.file, start, end), node))

    def _visit(self, node: ast.AST, inside: bool) -> None:
        """inside: the node is part of a function."""
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Lambda):
            self._add(*self.text.span(node.body), node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = True
        elif isinstance(node, ast.ClassDef):
            inside = False
        for name, value in ast.iter_fields(node):
            suite = (
                isinstance(value, list)
                and bool(value)
                and all(isinstance(child, ast.stmt) for child in value)
            )
            if suite and inside and not (name == "orelse" and self._is_elif(value)):
                self._add_suite(value)
        for child in ast.iter_child_nodes(node):
            self._visit(child, inside)

    def _is_elif(self, suite: list[ast.stmt]) -> bool:
        return isinstance(suite[0], ast.If) and self.text.of(suite[0]).startswith("elif")

    def _add_suite(self, suite: list[ast.stmt]) -> None:
        statements = [node for node in suite if not _is_docstring(node)]
        run: list[ast.stmt] = []
        for place, node in enumerate(statements):
            run.append(node)
            if isinstance(node, COMPOUND) or place == len(statements) - 1:
                self._add(_start(self.text, run[0]), self.text.span(node)[1], run[0])
                run = []
