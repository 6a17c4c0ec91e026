"""Record and compare from the command line: see the package's docstring."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.regression.command_recording import record_commands
from tests.regression.commands import OUTPUTS, Command, select
from tests.regression.comparison import compare
from tests.regression.inputs import write_inputs
from tests.regression.mistakes import ERRORS
from tests.regression.recipes import RECIPES, Recipe
from tests.regression.recording import record
from tests.regression.touched import print_touched

ROOT = Path(__file__).parents[2]
PARTS = {"recipes": RECIPES, "outputs": OUTPUTS, "errors": ERRORS}


@dataclass(frozen=True)
class Plan:
    """What is recorded."""

    recipes: Sequence[Recipe]
    outputs: Sequence[Command]
    errors: Sequence[Command]


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.command == "touched":
        sys.exit(print_touched())
    if arguments.command == "compare":
        sys.exit(0 if compare(arguments.first, arguments.second) else 1)
    plan = _select(arguments.parts, arguments.only)
    with TemporaryDirectory() as name:
        scratch = Path(name)
        write_inputs(scratch / "inputs")
        if arguments.command == "record":
            sys.exit(_record({arguments.folder: arguments.tree}, scratch / "inputs", plan))
        remaining = arguments.keep or scratch
        folders = remaining / "before", remaining / "after"
        with worktree(arguments.revision, scratch / "tree") as tree:
            _record(dict(zip(folders, (tree, ROOT), strict=True)), scratch / "inputs", plan)
        sys.exit(0 if compare(*folders) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.regression")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the parts and keep the results")
    recording.add_argument("folder", type=Path, help="a new folder for the recording")
    recording.add_argument("--tree", type=Path, default=ROOT, help="where the package is")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    against = commands.add_parser("against", help="compare this tree with a revision")
    against.add_argument("revision")
    against.add_argument("--keep", type=Path, help="a new folder for both recordings")
    commands.add_parser("touched", help="print what one step of a run touches")
    names = [item.name for items in PARTS.values() for item in items]
    for item in (recording, against):
        item.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART",
                          help=f"of {', '.join(PARTS)}; all by default")  # fmt: skip
        item.add_argument("--only", nargs="+", choices=names, metavar="NAME",
                          help="recipes and commands to run, of all parts")  # fmt: skip
    return parser


def _select(parts: Sequence[str], only: Sequence[str] | None) -> Plan:
    """The recipes and commands of the parts that are selected, and the commands that they need."""

    names = [
        item.name for part in parts for item in PARTS[part] if only is None or item.name in only
    ]
    recipes = [recipe for recipe in RECIPES if recipe.name in names]
    return Plan(recipes, select(OUTPUTS, names), select(ERRORS, names))


def _record(trees: Mapping[Path, Path], inputs: Path, plan: Plan) -> int:
    """Record into each new folder with the package of a tree. Returns how many recipes failed,
    having printed why.
    """
    num_failed = 0
    for folder, tree in trees.items():
        print(f"{folder.name}: {len(plan.recipes)} recipes with the package of {tree}", flush=True)
        began = time.monotonic()
        errors = record(folder, tree, inputs, plan.recipes)
        print(f"  {time.monotonic() - began:.0f} s in all", flush=True)
        for name, error in errors.items():
            print(f"{name} failed:\n{error}")
        num_failed += len(errors)
    if plan.outputs or plan.errors:
        print(f"{len(plan.outputs) + len(plan.errors)} commands with each package", flush=True)
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:  # of each tree, one runs at a time
            jobs = [
                pool.submit(record_commands, folder, tree, inputs, plan.outputs, plan.errors)
                for folder, tree in trees.items()
            ]
        for job in jobs:
            job.result()
        print(f"  {time.monotonic() - began:.0f} s in all", flush=True)
    return num_failed


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """Check a revision out into a folder, for as long as the block lasts."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


if __name__ == "__main__":
    main()
