"""Check that the tests detect mistakes: ``python -m tests.mutations`` makes many small changes to
the package, one at a time, and runs the tests that execute the changed code.

Exit status 1: fewer mutants were caught than ``--bar`` asks for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.campaign import Campaign, Progress, Result, describe
from tests.mutations.operators import Mutant
from tests.mutations.recording import (
    ENVIRONMENT,
    SUITES,
    Candidates,
    RecordedTest,
    Recording,
    load,
    record,
    save,
)
from tests.mutations.sample import PACKAGE, all_mutants, choose, is_under

BAR = 65
COMPARED_BAR = 95
COMPARED_CAP = 90.0
"""Seconds of tests of the full suite for a mutant that the fast suite has not caught."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "--size",
        type=int,
        default=200,
        help="about how many mutants are tried (default 200); 0: all",
    )
    parser.add_argument(
        "--paths", nargs="+", default=[], help="files and folders of the package, instead of all"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="mutants of these names, or of parts of names",
    )
    parser.add_argument(
        "--tests", nargs="+", default=[], help="files and folders of tests, instead of all"
    )
    parser.add_argument(
        "--suite", choices=SUITES, default="fast", help="fast: what `make test` runs (default)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the full suite on what the fast one does not catch",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="keep the record of the suite there, or use the one that is",
    )
    parser.add_argument(
        "--bar",
        type=float,
        help=f"percentage to catch (default {BAR}; with --compare {COMPARED_BAR})",
    )
    parser.add_argument(
        "--cap", type=float, default=25.0, help="seconds of tests for one mutant (default 25)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    return parser.parse_args(words)


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    mutants = all_mutants()
    if options.only:
        return [mutant for mutant in mutants if any(name in mutant.name for name in options.only)]
    paths = [path.rstrip("/").removeprefix(f"{PACKAGE}/") for path in options.paths]
    mutants = [m for m in mutants if not paths or any(is_under(m.file, path) for path in paths)]
    return choose(mutants, options.size) if options.size else mutants


def recording_of(options: argparse.Namespace) -> Recording:
    """Of the suite, from the folder if it has one: that of the full suite has the fast one too."""
    suite = "all" if options.compare else options.suite
    if options.record:
        for name in dict.fromkeys((suite, "all")):
            if (path := options.record / f"{name}.json").is_file():
                return load(path)
    began = time.monotonic()
    recording = record(suite, options.tests, workers=options.workers)
    print(f"recorded {len(recording.tests)} tests in {time.monotonic() - began:.0f} s", flush=True)
    for test in recording.failed:
        print(f"FAILED while it was recorded, not used: {test}")
    if options.record:
        save(recording, options.record / f"{suite}.json")
    return recording


def print_survivors(results: Sequence[Result]) -> None:
    survivors = [result for result in results if not result.is_caught]
    if survivors:
        print("\nsurvivors")
    for result in survivors:
        mutant = result.mutant
        print(f"{PACKAGE}/{mutant.file}:{mutant.line}  {mutant.name}  {describe(result)}")
        print(f"    {shorten(mutant.before)}  ->  {shorten(mutant.after)}")


def shorten(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def print_table(results: Sequence[Result]) -> None:
    rows: dict[str, Counter[str]] = {}
    for result in results:
        row = rows.setdefault(result.mutant.file.partition("/")[0], Counter())
        row["mutants"] += 1
        if result.is_caught:
            row["caught"] += 1
            if result.trial.outcome != "failed":
                row[result.trial.outcome] += 1
        else:
            row["survived" if result.num_candidates else "uncovered"] += 1
    columns = ("mutants", "caught", "survived", "uncovered", "import", "crash", "hang")
    print(
        f"\n{'':<20}"
        + "".join(f"{column:>11}" for column in columns)
        + "   (the last three are among the caught)"
    )
    total: Counter[str] = sum(rows.values(), Counter())
    for name, row in [*sorted(rows.items()), ("all", total)]:
        print(f"{name:<20}" + "".join(f"{row[column]:>11}" for column in columns))


def compare(campaign: Campaign, fast: Sequence[Result], full: Candidates, bar: float) -> bool:
    """Run the full suite's other tests on what the fast suite has not caught.

    Returns whether the fast suite's share is at least ``bar`` (%).
    """
    missed = [result for result in fast if not result.is_caught]
    tried = {result.mutant.name: set(result.tests) for result in missed}

    def others(mutant: Mutant) -> list[RecordedTest]:
        return [test for test in full.of(mutant) if test.name not in tried[mutant.name]]

    print(
        f"\nthe full suite on the {len(missed)} mutants that the fast suite has not caught",
        flush=True,
    )
    results = campaign.run([r.mutant for r in missed], others, Progress(len(missed)), COMPARED_CAP)
    outcomes = [result for result in results if result.is_caught]
    if outcomes:
        print("\ncaught by the full suite only")
    for result in outcomes:
        mutant = result.mutant
        print(f"{PACKAGE}/{mutant.file}:{mutant.line}  {mutant.name}  {describe(result)}")
        print(f"    {shorten(mutant.before)}  ->  {shorten(mutant.after)}")
    caught = len(fast) - len(missed)
    share = 100 * caught / max(caught + len(outcomes), 1)
    print(
        f"\nthe full suite catches {caught + len(outcomes)} of {len(fast)}; "
        f"the fast suite catches {caught} of these ({share:.1f} %, bar {bar:g} %)"
    )
    return share >= bar


def main(words: Sequence[str]) -> int:
    options = parse(words)
    began = time.monotonic()
    mutants = chosen_mutants(options)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  line {mutant.line}")
            print(f"    {shorten(mutant.before)}  ->  {shorten(mutant.after)}")
        return 0
    if not mutants:
        print("no mutant has such a name or path")
        return 2
    os.environ.update(ENVIRONMENT)
    recording = recording_of(options)
    suite = "fast" if options.compare else options.suite
    of_suite = Candidates(recording.of_suite(suite))
    with Campaign(workers=options.workers, cap=options.cap) as campaign:
        results = campaign.run(mutants, of_suite.of, Progress(len(mutants)))
        print_survivors(results)
        print_table(results)
        is_enough = True
        if options.compare:
            bar = COMPARED_BAR if options.bar is None else options.bar
            is_enough = compare(campaign, results, Candidates(recording), bar)
        for test in sorted(campaign.unreliable):
            print(f"fails without a mutant, not used: {test}")
    caught = sum(result.is_caught for result in results)
    share = 100 * caught / len(results)
    print(f"caught {caught} of {len(results)} ({share:.1f} %) in {time.monotonic() - began:.0f} s")
    if options.compare:
        return int(not is_enough)
    return int(share < (BAR if options.bar is None else options.bar))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
