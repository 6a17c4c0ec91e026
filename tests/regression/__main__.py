"""Record and compare from the command line: see the package's docstring."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.regression.comparison import compare
from tests.regression.inputs import write_inputs
from tests.regression.recipes import RECIPES, Recipe
from tests.regression.recording import record

ROOT = Path(__file__).parents[2]


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.command == "compare":
        sys.exit(0 if compare(arguments.first, arguments.second) else 1)
    recipes = [item for item in RECIPES if not arguments.only or item.name in arguments.only]
    with TemporaryDirectory() as name:
        scratch = Path(name)
        write_inputs(scratch / "inputs")
        if arguments.command == "record":
            sys.exit(_record(arguments.folder, arguments.tree, scratch / "inputs", recipes))
        remaining = arguments.keep or scratch
        with worktree(arguments.revision, scratch / "tree") as tree:
            _record(remaining / "before", tree, scratch / "inputs", recipes)
        _record(remaining / "after", ROOT, scratch / "inputs", recipes)
        sys.exit(0 if compare(remaining / "before", remaining / "after") else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.regression")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the recipes and keep the results")
    recording.add_argument("folder", type=Path, help="a new folder for the recording")
    recording.add_argument("--tree", type=Path, default=ROOT, help="where the package is")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    against = commands.add_parser("against", help="compare this tree with a revision")
    against.add_argument("revision")
    against.add_argument("--keep", type=Path, help="a new folder for both recordings")
    for item in (recording, against):
        names = [recipe.name for recipe in RECIPES]
        item.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="recipes to run")
    return parser


def _record(folder: Path, tree: Path, inputs: Path, recipes: Sequence[Recipe]) -> int:
    """Returns how many recipes failed, having printed why."""
    print(f"{folder.name}: {len(recipes)} recipes with the package of {tree}", flush=True)
    began = time.monotonic()
    errors = record(folder, tree, inputs, recipes)
    print(f"  {time.monotonic() - began:.0f} s in all", flush=True)
    for name, error in errors.items():
        print(f"{name} failed:\n{error}")
    return len(errors)


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
