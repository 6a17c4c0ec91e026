"""Tries mutants, two at a time, each worker in its own copy of the tree."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations.operators import Mutant
from tests.mutations.recording import RecordedTest, copy_tree, scratch_folder
from tests.mutations.sample import PACKAGE, ROOT
from tests.mutations.trial import Trial, fork_server, run_tests

FIRST_SECONDS = 5.0
FIRST_FILES = 8
"""Limits of a first run, which is enough for most mutants."""
FILE_SECONDS = 0.2
"""Time to import a file of tests."""


@dataclass(frozen=True)
class Result:
    """tests: that were run, in this order. num_candidates: that may notice the mutant."""

    mutant: Mutant
    trial: Trial
    tests: tuple[str, ...] = ()
    num_candidates: int = 0

    @property
    def is_caught(self) -> bool:
        return self.trial.outcome not in ("passed", "unknown")


def choose_tests(
    candidates: Sequence[RecordedTest], cap: float
) -> tuple[list[str], list[str], float]:
    """Choose tests for a first and a second run, of at most ``cap`` seconds together.

    Returns both lists and the seconds that are expected.
    """
    first: list[str] = []
    second: list[str] = []
    paid: set[str] = set()
    files: set[str] = set()
    total = 0.0
    for test in candidates:
        new_file = test.file not in files
        new_shared = {name: cost for name, cost in test.shared.items() if name not in paid}
        price = test.seconds + sum(new_shared.values()) + FILE_SECONDS * new_file
        if total + price > cap and first:
            continue
        total += price
        paid |= set(new_shared)
        if not second and (
            not first or (total <= FIRST_SECONDS and len(files) + new_file <= FIRST_FILES)
        ):
            first.append(test.name)
        else:
            second.append(test.name)
        files.add(test.file)
    return first, second, total


class Tree:
    """A copy of the tree in which one file at a time is changed."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self._package = root, root / package
        self._changes = 0

    def run(self, context: Any, mutant: Mutant | None, tests: Sequence[str], limit: float) -> Trial:
        """mutant: None for the unchanged package."""
        if mutant is None:
            return run_tests(context, tests, self.root, limit)
        path = self._package / mutant.file
        source, status = path.read_bytes(), path.stat()
        self._changes += 1
        try:
            path.write_bytes(mutant.apply(source.decode("utf-8")).encode("utf-8"))
            # Byte code is known by size and seconds, which two mutants may have in common.
            os.utime(path, (status.st_atime, int(status.st_mtime) + 2 * self._changes))
            return run_tests(context, tests, self.root, limit)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples of one mutant


class Campaign:
    """Copies of the tree and the server of processes, to be used in a ``with`` statement."""

    def __init__(
        self,
        *,
        root: Path = ROOT,
        package: str = PACKAGE,
        workers: int = 2,
        cap: float = 25.0,
        context: Any = None,
    ) -> None:
        self._root, self._package, self._workers, self._cap = root, package, workers, cap
        self._context = context or fork_server()
        self.unreliable: set[str] = set()

    def __enter__(self) -> Campaign:
        self._folder = scratch_folder()
        self._trees: list[Tree] = []
        for number in range(self._workers):
            tree = self._folder / str(number) / self._root.name
            copy_tree(tree, self._root)
            self._trees.append(Tree(tree, self._package))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def judge(
        self, tree: Tree, mutant: Mutant, candidates: Sequence[RecordedTest], cap: float
    ) -> Result:
        """Runs the tests that may notice it until one fails."""
        candidates = [test for test in candidates if test.name not in self.unreliable]
        if not candidates:
            return Result(mutant, Trial("passed"))
        first, second, seconds = choose_tests(candidates, cap)
        limit = 30.0 + 5.0 * seconds
        trial = Trial("passed")
        for tests in (first, second):
            if not tests:
                continue
            trial = tree.run(self._context, mutant, tests, limit)
            if trial.outcome in ("hang", "crash", "import"):
                control = tree.run(self._context, None, tests, limit)
                if control.outcome != "passed":
                    trial = Trial("unknown", control.test or tests[0])
            if trial.outcome != "passed":
                break
        return Result(mutant, trial, (*first, *second), len(candidates))

    def run(
        self,
        mutants: Iterable[Mutant],
        candidates: Callable[[Mutant], Sequence[RecordedTest]],
        show: Callable[[Result], None],
        cap: float | None = None,
    ) -> list[Result]:
        """Results in the order of the mutants. Tests that fail without a mutant are not used."""
        mutants = list(mutants)
        results = self._run_all(mutants, candidates, show, cap or self._cap)
        while broken := self._broken(
            {r.trial.test for r in results.values() if r.trial.outcome == "failed"}
        ):
            self.unreliable |= broken
            again = [mutant for mutant in mutants if results[mutant.name].trial.test in broken]
            results |= self._run_all(again, candidates, show, cap or self._cap)
        return [results[mutant.name] for mutant in mutants]

    def _broken(self, tests: set[str]) -> set[str]:
        """Those of these tests that fail without a mutant."""
        broken: set[str] = set()
        while remaining := sorted(tests - broken):
            trial = self._trees[0].run(self._context, None, remaining, 600.0)
            if trial.outcome == "passed":
                break
            if trial.outcome != "failed":
                raise RuntimeError(f"{trial.outcome} without a mutant: {' '.join(remaining)}")
            broken.add(trial.test)
        return broken

    def _run_all(
        self,
        mutants: Sequence[Mutant],
        candidates: Callable[[Mutant], Sequence[RecordedTest]],
        show: Callable[[Result], None],
        cap: float,
    ) -> dict[str, Result]:
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        done: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        for mutant in mutants:
            waiting.put(mutant)

        def work(tree: Tree) -> None:
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put(self.judge(tree, mutant, candidates(mutant), cap))
                except BaseException as error:  # which the main thread raises
                    done.put(error)
                    return

        for tree in self._trees:
            threading.Thread(target=work, args=(tree,), daemon=True).start()
        results: dict[str, Result] = {}
        for _ in mutants:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            results[result.mutant.name] = result
            show(result)
        return results


class Progress:
    """A line for each mutant, with the rate and the time that is left."""

    def __init__(self, total: int) -> None:
        self._began, self._total, self._done = time.monotonic(), total, 0

    def __call__(self, result: Result) -> None:
        self._done += 1
        rate = self._done / max(time.monotonic() - self._began, 1e-9)
        left = (self._total - self._done) / rate
        outcome = describe(result)
        print(
            f"{self._done:>4}/{self._total}  {60 * rate:4.1f} a minute  {left:5.0f} s left  "
            f"{result.mutant.name}  {outcome}",
            flush=True,
        )


def describe(result: Result) -> str:
    if result.is_caught:
        return f"{result.trial.outcome} {result.trial.test}".strip()
    if result.trial.outcome == "unknown":
        return f"NOT JUDGED {result.trial.test}"
    if not result.num_candidates:
        return "NOT COVERED"
    return f"SURVIVED {len(result.tests)} of {result.num_candidates} tests"
