"""Every mutation still says where it belongs."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.mutations.table import MUTATIONS, ROOT, Mutation, misplaced
from tests.mutations.trial import failure
from tests.programs import fork_server


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.wrong)
def test_what_a_mutation_replaces_is_there_once(mutation: Mutation) -> None:
    assert misplaced(mutation) == []
    assert all(old != new for _, old, new in mutation.edits)
    assert all((ROOT / test.split("::")[0]).is_file() for test in mutation.tests)


def test_mutations_are_several_and_differ() -> None:
    assert len({mutation.wrong for mutation in MUTATIONS}) == len({m.edits for m in MUTATIONS}) == len(MUTATIONS) >= 25


def test_a_trial_says_which_test_failed_first_or_that_one_could_not_be_run(tmp_path: Path) -> None:
    """Tests are in several folders with settings of their own, as those of the table are."""
    for folder, tests in {"a": "x = 1\n", "b": "def test_x(): assert 1 == 2\n", "c": "def test_y(): raise OSError\n"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text("")
        (tmp_path / folder / f"test_{folder}.py").write_text(f"def test_fine(): pass\n{tests}")
    with ProcessPoolExecutor(1, mp_context=fork_server(), max_tasks_per_child=1) as trials:

        def found(*folders: str) -> str | None:
            return trials.submit(failure, [f"{folder}/test_{folder}.py" for folder in folders], str(tmp_path)).result()

        assert found("a") is None
        assert found("a", "b", "c") == "b/test_b.py::test_x"
        with pytest.raises(RuntimeError, match="c/test_c.py::test_y"):
            found("a", "c")
