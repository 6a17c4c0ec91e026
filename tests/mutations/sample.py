"""The choice of files and of their mutants."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.operators import Mutant, find_mutants

ROOT = Path(__file__).parents[2]
PACKAGE = "valence"
EXCLUDED = ("cli", "reports", "terminal.py", "models/head_triton.py", "losses/guide.py")
"""What shows texts and charts, or needs a GPU."""
STRATA = {
    "losses": 50, "batching": 12, "training/step.py": 30, "training": 48,
    "data": 20, "models": 24, "distributed": 10, "config": 10, "rewards": 10, "apps": 12, "jobs": 4,
    "rollouts": 8, "": 4,
}  # fmt: skip
"""Prefix of a path -> its weight in the sample. A file belongs to the first prefix that fits."""
RARE = {"arguments": 0.3, "keyword": 0.4, "return": 0.3}
"""Operators whose mutants mostly fail at once -> weight of such a mutant; that of others is 1."""


def is_under(file: str, folder: str) -> bool:
    return not folder or file == folder or file.startswith(f"{folder}/")


def mutated_files(root: Path = ROOT) -> list[str]:
    """Paths below the package."""
    package = root / PACKAGE
    files = (path.relative_to(package).as_posix() for path in sorted(package.rglob("*.py")))
    return [file for file in files if not any(is_under(file, folder) for folder in EXCLUDED)]


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    package = root / PACKAGE
    return [
        m
        for file in mutated_files(root)
        for m in find_mutants((package / file).read_text(encoding="utf-8"), file)
    ]


def stratum(file: str) -> str:
    return next(folder for folder in STRATA if is_under(file, folder))


def rank(mutant: Mutant) -> float:
    """Mutants with the smallest ranks are chosen.

    It depends on the name alone: a change of one file leaves the choice in others as it is.
    """
    digest = hashlib.sha256(mutant.name.encode()).digest()
    uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
    return -math.log(uniform) / RARE.get(mutant.operator, 1.0)


def choose(mutants: Sequence[Mutant], size: int) -> list[Mutant]:
    """About ``size`` mutants, divided over the strata that occur by their weights."""
    groups: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=rank):
        groups.setdefault(stratum(mutant.file), []).append(mutant)
    total = sum(STRATA[folder] for folder in groups)
    chosen = {
        m.name
        for folder, group in groups.items()
        for m in group[: round(size * STRATA[folder] / total)]
    }
    return [mutant for mutant in mutants if mutant.name in chosen]
