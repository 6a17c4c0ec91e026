"""One run of a test suite, as what each test executes and how long it takes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutations.blocks import MODULE, Block, add_marks, block_at, find_blocks, marks_module
from tests.mutations.operators import Mutant
from tests.mutations.recorder import FOLDER, SIZE
from tests.mutations.recorder import PACKAGE as PACKAGE_VARIABLE
from tests.mutations.sample import PACKAGE, ROOT

SUITES = {"fast": ("slow", "vllm", "real", "site"), "all": ("vllm",)}
"""Name of a suite -> markers of tests that are not in it."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VALENCE_REQUIRE_ALL": "0",
}  # fmt: skip
OPTIONS = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-seed=0")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".peers", ".hypothesis", "__pycache__", ".pytest_cache"
)
NOT_COPIED_FROM_ROOT = {"site", "runs"}


@dataclass(frozen=True)
class RecordedTest:
    """blocks: what it executes. shared: name of a shared fixture -> its seconds, once."""

    name: str
    seconds: float
    shared: dict[str, float]
    markers: frozenset[str]
    blocks: frozenset[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class Recording:
    """imported: blocks that run while modules are imported. failed: not in ``tests``."""

    blocks: list[Block]
    tests: list[RecordedTest]
    imported: frozenset[int]
    failed: list[str] = field(default_factory=list)

    def of_suite(self, suite: str) -> Recording:
        excluded = set(SUITES[suite])
        tests = [test for test in self.tests if not excluded & test.markers]
        return Recording(self.blocks, tests, self.imported, self.failed)


class Candidates:
    """The tests that may notice a mutant."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._blocks: dict[str, list[Block]] = {}
        self._numbers: dict[str, list[int]] = {}
        self._tests: dict[int, list[RecordedTest]] = {}
        for number, block in enumerate(recording.blocks):
            self._blocks.setdefault(block.file, []).append(block)
            self._numbers.setdefault(block.file, []).append(number)
        for test in recording.tests:
            for number in test.blocks:
                self._tests.setdefault(number, []).append(test)

    def of(self, mutant: Mutant) -> list[RecordedTest]:
        """Those that execute its block, most useful first.

        Code that runs at import may be noticed by tests that execute another part of its file, or
        that are in the folder of the same name. In a table, tests whose names have the key of the
        entry come first.
        """
        blocks = self._blocks.get(mutant.file, [])
        place = block_at(blocks, mutant.start)
        number = None if place is None else self._numbers[mutant.file][place]
        direct = [] if number is None else self._tests.get(number, [])
        if number is not None and number not in self._recording.imported:
            return rounds(direct)
        near = {
            test.name: test
            for n in self._numbers.get(mutant.file, [])
            for test in self._tests.get(n, [])
        }
        for test in direct:
            near.pop(test.name, None)
        folder = f"tests/{mutant.file.partition('/')[0]}/"
        here = [test for test in self._recording.tests if test.file.startswith(folder)]
        near_here = [test for test in near.values() if test.file.startswith(folder)]
        named = [
            test for test in near.values() if any(is_word(key, test.name) for key in mutant.keys)
        ]
        ordered = [
            *rounds(direct),
            *rounds(named),
            *rounds(near_here),
            *rounds(here),
            *rounds(near.values()),
        ]
        return list({test.name: test for test in ordered}.values())


def rounds(tests: Iterable[RecordedTest]) -> list[RecordedTest]:
    """First the cheapest test of each file, then another function of each, and cases last.

    Cases of one function mostly notice the same mutants, and so do functions of one file.
    Cheapest first within a round.
    """
    num_cases: Counter[str] = Counter()
    num_functions: Counter[str] = Counter()
    ranks: dict[str, int] = {}
    placed: list[tuple[int, int, float, str, RecordedTest]] = []
    for test in sorted(tests, key=lambda test: (cost(test), test.name)):
        if test.function not in ranks:
            ranks[test.function] = num_functions[test.file]
            num_functions[test.file] += 1
        rank = ranks[test.function]
        placed.append((num_cases[test.function], rank, cost(test), test.name, test))
        num_cases[test.function] += 1
    return [test for *_, test in sorted(placed, key=lambda place: place[:4])]


def is_word(key: str, name: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(key)}(?![A-Za-z0-9_])", name) is not None


def cost(test: RecordedTest) -> float:
    return test.seconds + sum(test.shared.values())


def copy_tree(to: Path, root: Path = ROOT) -> None:
    def ignored(folder: str, names: list[str]) -> set[str]:
        at_root = NOT_COPIED_FROM_ROOT if Path(folder) == root else set[str]()
        return NOT_COPIED(folder, names) | at_root

    shutil.copytree(root, to, ignore=ignored)


def scratch_folder() -> Path:
    """In memory where there is room."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4e9
    return Path(tempfile.mkdtemp(prefix="mutants-", dir=memory if roomy else None))


def mark_copy(tree: Path, package: str = PACKAGE) -> list[Block]:
    """Marks the blocks of a copy of the tree, and returns them."""
    blocks: list[Block] = []
    for path in sorted((tree / package).rglob("*.py")):
        source, file = path.read_text(encoding="utf-8"), path.relative_to(tree / package).as_posix()
        result = find_blocks(source, file)
        if result and "triton" not in file:  # whose compiler reads the source of its kernels
            path.write_text(add_marks(source, package, len(blocks)), encoding="utf-8")
            blocks += result
    (tree / package / f"{MODULE}.py").write_text(
        marks_module(max(len(blocks), 1)), encoding="utf-8"
    )
    return blocks


def record(
    suite: str,
    tests: Sequence[str] = (),
    *,
    root: Path = ROOT,
    package: str = PACKAGE,
    workers: int = 2,
) -> Recording:
    """Run a suite, or its part in these files and folders, in a marked copy of the tree."""
    folder = scratch_folder()
    try:
        tree = folder / "marked" / root.name
        copy_tree(tree, root)
        blocks = mark_copy(tree, package)
        entries = _run_recorder(tree, suite, tests, len(blocks), package, workers)
        recording = Recording(blocks, *read_records(entries))
        if not recording.tests and not recording.failed:
            output = (tree.parent / "output").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"no test was recorded:\n{output[-4000:]}")
        if not recording.failed:
            return recording
        # Code that is compiled cannot set marks. Its tests pass in an unmarked copy.
        tree = folder / "unmarked" / root.name
        copy_tree(tree, root)
        again = _run_recorder(tree, suite, recording.failed, len(blocks), package, workers)
        passed = {entry["test"] for entry in again if entry.get("passed")}
        return with_recovered(recording, [e for e in entries if e.get("test") in passed])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_recovered(recording: Recording, entries: Sequence[dict[str, Any]]) -> Recording:
    """With tests that failed because of the marks: they may execute all of each file of which
    they executed a part."""
    tests = list(recording.tests)
    for entry in entries:
        files = {recording.blocks[number].file for number in entry["blocks"]}
        numbers = [n for n, block in enumerate(recording.blocks) if block.file in files]
        tests.append(_test(entry | {"blocks": numbers}))
    failed = sorted(set(recording.failed) - {test.name for test in tests})
    tests.sort(key=lambda test: test.name)
    return Recording(recording.blocks, tests, recording.imported, failed)


def _run_recorder(
    tree: Path, suite: str, tests: Sequence[str], size: int, package: str, workers: int
) -> list[dict[str, Any]]:
    """What the plugin has written of a run of these tests."""
    folder = tree.parent
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}",
        FOLDER: str(folder),
        SIZE: str(max(size, 1)),
        PACKAGE_VARIABLE: package,
    }
    expression = " and ".join(f"not {marker}" for marker in SUITES[suite])
    parallel = ["--numprocesses", str(workers), "--dist", "loadgroup"] if workers > 1 else []
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.mutations.recorder", *OPTIONS),
        *(f"--basetemp={folder / 'temporary'}", "-m", expression, *parallel, *tests),
        "--ignore=tests/mutations",  # which test this tool, and not the package
    ]
    with (folder / "output").open("wb") as file:
        subprocess.run(command, cwd=tree, env=environment, stdout=file, stderr=file, check=False)
    paths = sorted(folder.glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def read_records(
    entries: Sequence[dict[str, Any]],
) -> tuple[list[RecordedTest], frozenset[int], list[str]]:
    """Tests that passed, blocks that run at import, and names of tests that failed."""
    imported: set[int] = set()
    for entry in entries:
        imported |= set(entry.get("imported", ()))
    of_tests = [entry for entry in entries if "test" in entry]
    tests = [_test(entry) for entry in of_tests if entry["passed"]]
    failed = sorted(entry["test"] for entry in of_tests if not entry["passed"])
    return sorted(tests, key=lambda test: test.name), frozenset(imported), failed


def _test(entry: dict[str, Any]) -> RecordedTest:
    return RecordedTest(
        entry["test"],
        entry["seconds"],
        entry["shared"],
        frozenset(entry["markers"]),
        frozenset(entry["blocks"]),
    )


def sources_digest(root: Path = ROOT) -> str:
    """Of the package alone: a recording is wrong once blocks have moved."""
    total = hashlib.sha256()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def save(recording: Recording, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "sources": sources_digest(),
        "blocks": [[block.file, block.start, block.end] for block in recording.blocks],
        "imported": sorted(recording.imported),
        "failed": recording.failed,
        "tests": [
            {
                "test": test.name, "seconds": test.seconds, "shared": test.shared,
                "markers": sorted(test.markers), "blocks": sorted(test.blocks),
            }
            for test in recording.tests
        ],
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")


def load(path: Path) -> Recording:
    """Raises ValueError if the package has changed since."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["sources"] != sources_digest():
        raise ValueError(
            f"{path} was recorded with other sources of the package: delete it to record again"
        )
    blocks = [Block(*block) for block in content["blocks"]]
    tests = [_test(entry) for entry in content["tests"]]
    return Recording(blocks, tests, frozenset(content["imported"]), content["failed"])
