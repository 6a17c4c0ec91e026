"""Would the tests see a mistake? ``python -m tests.mutations [WORDS ...]`` makes each wrong version of the table (or those that
have one of the words in their names) in a copy of the tree, and runs its tests there. It fails if one survives, or has moved."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.mutations.table import MUTATIONS, ROOT, Mutation, misplaced
from tests.mutations.trial import NEEDED, failure

COPIED = ("valence", "tests", "pyproject.toml")
HERE = "tests/arch/test_imports.py::test_the_package_is_where_the_tests_look"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def copy_tree(to: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name)
        else:
            shutil.copy(ROOT / name, to / name)


def verdict(mutation: Mutation, tree: Path, trials: ProcessPoolExecutor) -> tuple[bool, str]:
    """Whether a mutation of this tree is caught, and by which test. The tree is as before afterwards."""
    lost = misplaced(mutation, tree)
    if lost:
        return False, f"MOVED: {'; '.join(lost)}"
    before = {tree / file: (tree / file).read_text(encoding="utf-8") for file, *_ in mutation.edits}
    try:
        for file, old, new in mutation.edits:
            (tree / file).write_text((tree / file).read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        test = trials.submit(failure, mutation.tests, str(tree)).result()
    except RuntimeError as error:
        return False, f"CRASHED: {error}"
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    return test is not None, test or "SURVIVED"


def main(words: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.wrong for word in words)]
    began, seen = time.monotonic(), 0
    os.environ.update(ENVIRONMENT)
    context = get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as trials,
    ):
        tree = Path(folder)
        copy_tree(tree)
        tests = list(dict.fromkeys([HERE, *(test for mutation in chosen for test in mutation.tests)]))
        broken = trials.submit(failure, tests, folder).result()
        if broken:
            print(f"{broken} fails without any mutation")
            return 1
        for mutation in chosen:
            caught, by = verdict(mutation, tree, trials)
            seen += caught
            print(f"{mutation.wrong:<70}  {by}", flush=True)
    print(f"caught {seen} of {len(chosen)} in {time.monotonic() - began:.0f} s")
    return int(seen < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
