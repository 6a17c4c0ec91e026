"""The language of the project: names that describe their content, and plain words in texts.

The glossary (dev/glossary.md) has the terms to use instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import FILES, ROOT, shown, tree

FILLERS = frozenset(
    {
        "said",
        "told",
        "kept",
        "found",
        "seen",
        "given",
        "made",
        "asked",
        "taken",
        "own",
        "each",
        "it",
        "how",
        "what",
        "which",
        "most",
        "least",
        "along",
        "beside",
        "apart",
        "whole",
        "anew",
        "mend",
        "ghost",
        "ghosts",
        "ledger",
        "planted",
        "foretold",
        "laboratory",
        "learnt",
        "rig",
        "surroundings",
    }
)
"""Words that do not describe the content of a variable."""
EXEMPT = frozenset({"tokens_seen", "examples_seen", "at_least", "connection_made"})
"""Metrics, an option and a callback of asyncio."""

ARCHAIC = re.compile(
    r"\b(shall|anew|mend(?:s|ed|ing)?|beside|foretell\w*|foretold|likewise|to be had|"
    r"without a word|in silence|tak(?:e|es|en|ing) up|learnt|by heart|of (?:its|their) own|amid|"
    r"hence|whence|thus|therein|thereof|lest|ought|whilst|whoever|goes along|so many|"
    r"(?:is|are|was|were) told)\b",
    re.IGNORECASE,
)
"""Words and phrases that have a plainer equivalent."""
OPENINGS = re.compile(
    r"(?:^|^[-*|] |(?<=[.!?] ))(?:Of (?:a|an|the|several|all|what)|What [^.?!]*[.!]$|Likewise)\b",
    re.MULTILINE,
)
"""Sentences that do not begin with their subject."""
TEST_PHRASES = re.compile(
    r"_(?:told|foretold|anew|beside|own_answers|go_on|goes_on|gone_on|taken_up|is_said|said_at_once|"
    r"says_so|says_why|of_its_own|of_their_own|without_a_word|nobody)(?:_|$)|^test_what_"
)
"""Phrases in names of tests that have a plainer equivalent."""
PLAINLY_NAMED = (
    *("batching", "crash", "data", "distributed", "golden", "models", "mutations"),
    *("regression", "reports", "runs", "training"),
)
"""Folders of tests whose names are checked."""

SCRIPTS = [
    path
    for folder in ("benchmarks", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for path in sorted((ROOT / "dev").glob("*.md")) if path.name != "notebook.md"),
]
"""All pages but the decision records and the lab notebook, which are history."""


def bound_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of variables, attributes, parameters, classes, and functions but tests."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("test_"):
            yield node.lineno, node.name


def is_filler(name: str) -> bool:
    words = name.strip("_").lower().split("_")
    return name not in EXEMPT and not FILLERS.isdisjoint(words)


def docstrings(module: ast.Module) -> Iterator[ast.Constant]:
    """Strings that are statements."""
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def strings(module: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def prose(page: Path) -> str:
    """A Markdown page without code and link targets. Its lines stay the same."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(
        r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`code`", text))


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def misnamed(path: Path) -> list[str]:
    names = sorted({pair for pair in bound_names(tree(path)) if is_filler(pair[1])})
    return [f"{shown(path)}:{line}: {name}" for line, name in names]


def archaic_words(path: Path, nodes: Iterator[ast.Constant]) -> list[str]:
    return [
        f"{shown(path)}:{node.lineno}: {match[0]}"
        for node in nodes
        for match in ARCHAIC.finditer(str(node.value))
    ]


def odd_test_names(module: ast.Module) -> list[str]:
    return [
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and TEST_PHRASES.search(node.name)
    ]


def test_names_describe_their_content() -> None:
    assert [name for path in (*FILES, *SCRIPTS) for name in misnamed(path)] == []


def test_tests_have_plain_names() -> None:
    paths = [p for name in PLAINLY_NAMED for p in sorted((ROOT / "tests" / name).rglob("*.py"))]
    assert len(paths) > 100
    assert [f"{shown(path)}: {name}" for path in paths for name in odd_test_names(tree(path))] == []


def test_strings_of_the_package_use_plain_words() -> None:
    assert [word for path in FILES for word in archaic_words(path, strings(tree(path)))] == []


def test_docstrings_outside_the_package_use_plain_words() -> None:
    assert [word for path in SCRIPTS for word in archaic_words(path, docstrings(tree(path)))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_plain_words_and_sentences(page: Path) -> None:
    text = prose(page)
    assert [
        f"{page.relative_to(ROOT)}:{line_of(text, match)}: {match[0]}"
        for pattern in (ARCHAIC, OPENINGS)
        for match in pattern.finditer(text)
    ] == []


def test_the_checks_detect_violations(tmp_path: Path) -> None:
    source = (
        '"""It is told so."""\ndef kept(told): self.seen = 1\ndef test_what(): ...\nat_least = 2'
    )
    module = ast.parse(source)
    assert sorted(n for _, n in bound_names(module) if is_filler(n)) == ["kept", "seen", "told"]
    assert [ARCHAIC.findall(str(node.value)) for node in docstrings(module)] == [["is told"]]
    tests = "def test_what_it_says(): ...\ndef test_it_goes_on(): ...\ndef test_a(): ..."
    assert odd_test_names(ast.parse(tests)) == ["test_what_it_says", "test_it_goes_on"]
    page = tmp_path / "page.md"
    page.write_text("A page.\n\n```\nanew\n```\n\n- Of a row, `likewise` is read. Done anew.\n")
    assert [line_of(prose(page), match) for match in OPENINGS.finditer(prose(page))] == [7]
    assert ARCHAIC.findall(prose(page)) == ["anew"]
