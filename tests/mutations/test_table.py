"""Every mutation still says where it belongs."""

from __future__ import annotations

import pytest

from tests.mutations.table import MUTATIONS, ROOT, Mutation, misplaced


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.wrong)
def test_what_a_mutation_replaces_is_there_once(mutation: Mutation) -> None:
    assert misplaced(mutation) == []
    assert all(old != new for _, old, new in mutation.edits)
    assert all((ROOT / test.split("::")[0]).is_file() for test in mutation.tests)


def test_mutations_are_several_and_differ() -> None:
    assert len({mutation.wrong for mutation in MUTATIONS}) == len({m.edits for m in MUTATIONS}) == len(MUTATIONS) >= 25
