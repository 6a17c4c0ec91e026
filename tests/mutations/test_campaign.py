"""Recording and trying mutants in a small project."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.mutations.blocks import MARKS, add_marks, block_at, find_blocks
from tests.mutations.campaign import Campaign, Result, choose_tests
from tests.mutations.operators import Mutant, find_mutants
from tests.mutations.recording import Candidates, RecordedTest, Recording, record, rounds
from tests.mutations.trial import run_tests

SOURCE = '''
"""Sums."""

from __future__ import annotations

from functools import cache


def total(numbers, limit):
    """Of all numbers."""
    result = 0
    for number in numbers:
        if number > limit:
            continue
        result += number
    return result


@cache
def size(name):
    return len(name) + 1


def unused(a):
    return -a


def choose(positive):
    if positive: return 1
    elif positive is None: return 0
    pick = lambda x: (x * 2)
    return pick(-1)


def endless(count):
    while count > 0:
        count -= 1
    return count
'''
CHECKS = """
import pytest
from sums import choose, endless, size, total

@pytest.fixture(scope="module")
def result():
    return total([1, 2], 5)

def test_result(result):
    assert result == 3

def test_again(result):
    assert isinstance(result, int)

def test_size():
    assert size("ab") == 3

def test_size_again():
    assert size("ab") > 0

@pytest.mark.slow
def test_slow():
    assert choose(None) == 0

def test_choose():
    assert choose(False) == -2

def test_endless():
    assert endless(2) == 0

def test_without_marks():
    assert endless(1) == 0
    assert "_block_marks" not in choose.__code__.co_names

def test_broken():
    assert total([], 0) == 1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project") / "sums"
    (root / "sums").mkdir(parents=True)
    (root / "checks").mkdir()
    (root / "sums" / "__init__.py").write_text(SOURCE.lstrip())
    (root / "checks" / "test_sums.py").write_text(CHECKS)
    (root / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nmarkers =\n  slow\n  vllm\n  real\n  site\n"
    )
    return root


@pytest.fixture(scope="module")
def mutants(project: Path) -> dict[str, Mutant]:
    source = (project / "sums" / "__init__.py").read_text()
    return {
        mutant.name.removeprefix("__init__.py::"): mutant
        for mutant in find_mutants(source, "__init__.py")
    }


@pytest.fixture(scope="module")
def recording(project: Path) -> Recording:
    with pytest.MonkeyPatch.context() as patch:  # plugins take seconds to load
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")
        return record("all", ["checks"], root=project, package="sums", workers=1)


def noticing(recording: Recording, mutant: Mutant) -> set[str]:
    return {test.name.partition("::test_")[2] for test in Candidates(recording).of(mutant)}


def test_marks_change_no_result() -> None:
    source = SOURCE.lstrip()
    blocks = find_blocks(source, "sums.py")
    marked = add_marks(source, "sums", 0)
    assert "from __future__" in marked[: marked.index("import marks")]
    names: dict[str, object] = {MARKS: bytearray(len(blocks))}
    exec(
        compile(marked.replace(f"from sums.block_marks import marks as {MARKS}; ", ""), "", "exec"),
        names,
    )
    assert names["choose"](False) == -2  # type: ignore[operator]
    executed = [blocks[n] for n, mark in enumerate(names[MARKS]) if mark]  # type: ignore[arg-type]
    texts = {source[block.start : block.end].split("\n")[0] for block in executed}
    assert texts == {"if positive: return 1", "pick = lambda x: (x * 2)", "x * 2"}


def test_the_smallest_block_has_a_place() -> None:
    source = SOURCE.lstrip()
    blocks = find_blocks(source, "sums.py")
    number = block_at(blocks, source.index("result += number"))
    assert number is not None
    assert source[blocks[number].start : blocks[number].end] == "result += number"
    assert block_at(blocks, source.index("from functools")) is None


def test_tests_are_known_by_what_they_execute(
    recording: Recording, mutants: dict[str, Mutant]
) -> None:
    assert recording.failed == ["checks/test_sums.py::test_broken"]
    assert noticing(recording, mutants["unused::negative#1"]) == {"without_marks"}
    assert noticing(recording, mutants["endless::condition#1"]) == {"endless", "without_marks"}
    assert noticing(recording, mutants["choose::constant#2"]) == {"slow", "without_marks"}
    fast = recording.of_suite("fast")
    assert noticing(fast, mutants["choose::constant#2"]) == {"without_marks"}
    # Results that tests share count for each of them.
    assert noticing(recording, mutants["total::deletion#1"]) == {"result", "again", "without_marks"}
    assert noticing(recording, mutants["size::arithmetic#1"]) == {
        "size",
        "size_again",
        "without_marks",
    }


def test_mutants_are_caught_or_survive(
    project: Path, recording: Recording, mutants: dict[str, Mutant]
) -> None:
    names = ["total::comparison#1", "total::deletion#1", "unused::negative#1"]
    shown: list[Result] = []
    context = get_context("fork")
    with Campaign(root=project, package="sums", workers=1, context=context) as campaign:
        candidates = Candidates(recording).of
        results = campaign.run([mutants[name] for name in names], candidates, shown.append)
    assert [result.is_caught for result in results] == [False, True, False]
    assert results[1].trial.test == "checks/test_sums.py::test_result"
    assert [result.num_candidates for result in results] == [3, 3, 1]
    assert shown == results
    assert (project / "sums" / "__init__.py").read_text() == SOURCE.lstrip()


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("import time; time.sleep(600)", "hang"),
        ("import os; os.abort()", "crash"),
        ("import no_such_module", "failed"),
    ],
)
def test_ends_of_trials(tmp_path: Path, body: str, outcome: str) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    limit = 1.0 if outcome == "hang" else 60.0
    trial = run_tests(get_context("forkserver"), ["test_it.py::test_it"], tmp_path, limit)
    assert trial.outcome == outcome


def test_a_module_that_cannot_be_imported_has_a_separate_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module\ndef test_it(): pass\n")
    trial = run_tests(get_context("forkserver"), ["test_it.py::test_it"], tmp_path, 60.0)
    assert trial.outcome == "import"


def make_test(name: str, seconds: float, **shared: float) -> RecordedTest:
    return RecordedTest(name, seconds, shared, frozenset(), frozenset())


def test_files_come_before_functions_and_functions_before_cases() -> None:
    tests = [make_test(f"a.py::f[{n}]", 0.1 * n) for n in range(3)]
    tests += [make_test("a.py::h", 0.1), make_test("b.py::g", 5.0)]
    names = [test.name for test in rounds(tests)]
    assert names == ["a.py::f[0]", "b.py::g", "a.py::h", "a.py::f[1]", "a.py::f[2]"]


def test_shared_fixtures_are_paid_once_and_time_is_capped() -> None:
    tests = [make_test(f"a.py::f[{n}]", 1.0, run=6.0) for n in range(5)]
    first, second, seconds = choose_tests(tests, 10.0)
    assert len(first) + len(second) == 3
    assert 9.0 <= seconds <= 10.0
    assert choose_tests(tests, 1.0)[0] == ["a.py::f[0]"]
