"""Mutants of small source texts, and which mutants of the package are chosen."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.mutations.operators import Mutant, find_mutants
from tests.mutations.sample import (
    EXCLUDED,
    PACKAGE,
    ROOT,
    STRATA,
    all_mutants,
    choose,
    is_under,
    mutated_files,
    stratum,
)


@pytest.fixture(scope="module")
def package_mutants() -> list[Mutant]:
    return all_mutants()


def changed(source: str) -> set[tuple[str, str]]:
    """Operator and text of every mutant of a function's only statement."""
    prefix = "def f():\n    "
    mutants = find_mutants(f"{prefix}{source}\n", "file.py")
    texts = [mutant.apply(f"{prefix}{source}\n") for mutant in mutants]
    assert all(text.startswith(prefix) and text.endswith("\n") for text in texts)
    return {
        (mutant.operator, text[len(prefix) : -1])
        for mutant, text in zip(mutants, texts, strict=True)
    }


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("return a < b", {("comparison", "return a <= b")}),
        ("return a  not in  (b)", {("comparison", "return a  in  (b)")}),
        (
            "return a < b == c",
            {("comparison", "return a <= b == c"), ("comparison", "return a < b != c")},
        ),
        ("return (a) + b", {("arithmetic", "return (a) - b")}),
        ("return 'é', a * b", {("arithmetic", "return 'é', a / b")}),
        ("return a and b", {("boolean", "return a or b")}),
        ("return not (a)", {("not", "return (a)")}),
        ("return -x", {("negative", "return x")}),
        ("return 0.5", {("constant", "return 1.5")}),
        ("return x if a else y", {("condition", "return x if (not (a)) else y")}),
        ("return x if a == b else y", {("comparison", "return x if a != b else y")}),
        (
            "return [x for x in y if x.a]",
            {("condition", "return [x for x in y if (not (x.a))]")},
        ),
        ("return torch.maximum(a, b)", {("extreme", "return torch.minimum(a, b)")}),
        (
            "return x.clamp(max=y)",
            {
                ("call", "return x"),
                ("extreme", "return x.clamp(min=y)"),
                ("keyword", "return x.clamp()"),
            },
        ),
        ("return (a).detach()[b]", {("call", "return (a)[b]")}),
        ("return torch.exp(a)", {("call", "return (a)")}),
        ("return f((a), b=(c),)", {("keyword", "return f((a),)")}),
        (
            "return f(b=c, d=e)",
            {("keyword", "return f(d=e)"), ("keyword", "return f(b=c)")},
        ),
        ("return f(a, b, c)", {("arguments", "return f(b, a, c)")}),
        ("f(a)", {("deletion", "pass")}),
        ("a += b", {("arithmetic", "a -= b"), ("deletion", "pass")}),
        ("return a.b", {("return", "return None")}),
    ],
)
def test_mutants_of_a_statement(source: str, mutants: set[tuple[str, str]]) -> None:
    assert changed(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        "'''A text with 1 < 2.'''",
        "raise ValueError(a < b, 1)",
        "raise Fault(f(a, b), where=x)",
        "x = WrongError(a, b, fix=-c)",
        "assert a < b",
        "x = f'{a + b}'",
        "x = 'a' + b",
        "x = folder / 'name'",
        "x: f(1, 2) = a",
        "print(a + b)",
        "x = open(a, encoding=b)",
        "x = limit(4096)",
        "__all__ = [1]",
        "x = folder.open(strict=True, timeout=5)",
        "def g(a=1, *, b: Gt(0) = -2): ...",
        "if TYPE_CHECKING: f(a)",
    ],
)
def test_texts_annotations_and_defaults_stay(source: str) -> None:
    assert changed(source) == set()


SOURCE = dedent(
    """
    TABLE = {"first": f(a < b)}

    class Box:
        size: int = 3

        @cached(size=1)
        def area(self, x):
            def inner(y):
                return x < y
            return inner(x) if x < 2 and x < 1 else x

        def __repr__(self):
            return str(self.size + 1)
    """
)


def test_names_are_those_of_functions_and_count_within_them() -> None:
    names = [mutant.name for mutant in find_mutants(SOURCE, "a/b.py")]
    assert names == [
        "a/b.py::module::comparison#1",
        "a/b.py::Box.area.inner::comparison#1",
        "a/b.py::Box.area::condition#1",
        "a/b.py::Box.area::boolean#1",
        "a/b.py::Box.area::comparison#1",
        "a/b.py::Box.area::constant#1",
        "a/b.py::Box.area::comparison#2",
        "a/b.py::Box.area::constant#2",
    ]


def test_names_do_not_change_with_other_functions() -> None:
    before = find_mutants(SOURCE, "a/b.py")
    after = find_mutants(f"def first(x):\n    return x < 1\n\n{SOURCE}", "a/b.py")
    assert [mutant.name for mutant in after if "::first::" not in mutant.name] == [
        mutant.name for mutant in before
    ]


def test_entries_of_tables_are_known() -> None:
    keys = {mutant.name: mutant.keys for mutant in find_mutants(SOURCE, "a/b.py")}
    assert keys["a/b.py::module::comparison#1"] == ("first",)
    assert keys["a/b.py::Box.area::boolean#1"] == ()


def test_mutants_of_the_package_are_programs_that_differ(package_mutants: list[Mutant]) -> None:
    assert len({mutant.name for mutant in package_mutants}) == len(package_mutants)
    for mutant in choose(package_mutants, 40):
        source = (ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8")
        tree = ast.dump(ast.parse(mutant.apply(source)))
        assert tree != ast.dump(ast.parse(source)), mutant


def test_every_folder_that_has_a_weight_is_there() -> None:
    files = mutated_files()
    assert {stratum(file) for file in files} == set(STRATA)
    assert all((ROOT / PACKAGE / name).exists() for name in EXCLUDED)
    assert not any(is_under(file, name) for file in files for name in EXCLUDED)


def test_a_change_of_one_file_leaves_the_choice_in_others(package_mutants: list[Mutant]) -> None:
    chosen = choose(package_mutants, 100)
    assert 90 <= len(chosen) <= 110
    file = chosen[0].file
    others = [mutant for mutant in package_mutants if mutant.file != file]
    remaining = {mutant.name for mutant in chosen if mutant.file != file}
    assert remaining <= {mutant.name for mutant in choose(others, 100)}
