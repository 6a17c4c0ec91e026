"""An A/B test: sides that stay, a file that loses no vote, and the votes that count."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.disk import full_disk
from tests.errors import raises_error
from valence.apps.serve.experiment import (
    Assignment,
    Experiment,
    ServedRun,
    ab_path,
    read_result,
)
from valence.apps.serve.sequential import sequential_test

RUNS = (ServedRun("runs/first", 26), ServedRun("runs/second", 52))


@pytest.fixture(autouse=True)
def fixed_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different in each test of A and B, and the same in each run of these tests."""
    numbers = count()
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")


@contextmanager
def opened(folder: Path, *, share: float = 0.5, runs: Any = RUNS) -> Iterator[Experiment]:
    with closing(Experiment(ab_path(folder / "feedback.jsonl"), runs, share)) as experiment:
        yield experiment


def sides(experiment: Experiment, num: int = 1000) -> list[str]:
    return [experiment.plan.assign(f"user/{number}").side for number in range(num)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_sides_are_stable_and_have_their_share(tmp_path: Path, share: float) -> None:
    with opened(tmp_path, share=share) as experiment:
        before = sides(experiment)
    with opened(tmp_path, share=share) as experiment:
        assert sides(experiment) == before
    assert Counter(before)["b"] / 1000 == pytest.approx(share, abs=0.05)
    other = tmp_path / "other"
    other.mkdir()
    with opened(other, share=share) as experiment:
        assert sides(experiment) != before  # by another salt


def test_the_file_names_no_user(tmp_path: Path) -> None:
    with opened(tmp_path) as experiment:
        assignment = experiment.plan.assign("user/anna@example.com")
        experiment.vote(assignment, "1", "0123456789ab", True)
    text = (tmp_path / "feedback.ab.jsonl").read_text()
    assert "anna" not in text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"share": 0.4}, "ab-share-changed"),
        ({"runs": (RUNS[0], ServedRun("runs/third", 52))}, "ab-runs-changed"),
        ({"runs": (ServedRun("runs/first", 27), RUNS[1])}, "ab-runs-changed"),
        ({"runs": RUNS[::-1]}, "ab-runs-changed"),
    ],
)
def test_a_test_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    with opened(tmp_path):
        pass
    with raises_error(code), opened(tmp_path, **changes):
        pass
    with opened(tmp_path):
        pass


def test_weights_that_were_replaced_at_the_same_step_are_noticed(tmp_path: Path) -> None:
    runs = (ServedRun("runs/first", 26, "1" * 32), ServedRun("runs/second", 52, "2" * 32))
    replaced = (runs[0], ServedRun("runs/second", 52, "3" * 32))
    with opened(tmp_path, runs=runs):
        pass
    with raises_error("ab-weights-changed") as raised, opened(tmp_path, runs=replaced):
        pass
    assert "runs/second at step 52" in raised.error.message
    with opened(tmp_path, runs=runs):
        pass


def test_a_file_without_digests_can_be_continued(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with opened(tmp_path, runs=(ServedRun("runs/first", 26, "1" * 32), RUNS[1])):
        pass


def test_the_first_vote_of_a_unit_is_tested_and_the_last_of_each_rater_is_shown(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as experiment:
        assign = experiment.plan.assign
        units = [f"user/{number}" for number in range(40)]
        for number, unit in enumerate(units):
            experiment.vote(assign(unit), f"{number}", "", None)  # a comment
            experiment.vote(assign(unit), f"{number}", "", number % 3 == 0)
            experiment.vote(assign(unit), f"{number}", "", number % 3 != 0)
            experiment.vote(assign(unit), f"{number} again", "", True)
        experiment.vote(assign(units[0]), "0 again", "", None)
        result = experiment.result
        index = [assign(unit).index for unit in units]
    labels = [number % 3 == 0 for number in range(40)]
    expected = sequential_test(index, labels)
    assert result.e_values == expected.e_values
    for number, side in enumerate((result.a, result.b)):
        mine = [label for label, at in zip(labels, index, strict=True) if at == number]
        assert (side.votes, side.ups) == (len(mine), sum(mine))
        withdrawn = index[0] == number
        assert side.thumbs_up == mine.count(False) + len(mine) - withdrawn
        assert side.thumbs_down == mine.count(True)
        assert side.interval[0] < sum(mine) / len(mine) < side.interval[1]
    assert read_result(tmp_path / "feedback.jsonl") == result
    assert read_result(tmp_path / "feedback.ab.jsonl") == result


def test_votes_on_answers_of_another_test_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path) as experiment:
        experiment.vote(Assignment("another", "unit", "a"), "1", "", True)
        assert experiment.result.a.thumbs_up + experiment.result.b.thumbs_up == 0


def test_an_established_difference_is_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as experiment:
        for number in range(400):
            assignment = experiment.plan.assign(f"user/{number}")
            label = number % 10 < (8 if assignment.side == "b" else 3)
            experiment.vote(assignment, str(number), "", label)
            if number == 30:
                assert experiment.result.better is None
                assert "not established yet" in experiment.result.verdict
        result = experiment.result
    assert (result.better, result.votes_left) == ("b", None)
    assert result.verdict.startswith("B is better: established after")
    as_json = json.loads(json.dumps(result.to_dict()))
    assert as_json["better"] == "b"
    assert as_json["b"]["run"] == "runs/second"


def test_a_line_that_a_crash_has_cut_off_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as experiment:
        for number in range(3):
            assignment = experiment.plan.assign(f"user/{number}")
            experiment.vote(assignment, str(number), "", True)
    path = tmp_path / "feedback.ab.jsonl"
    full = path.read_bytes()
    path.write_bytes(full + b'{"completion": "4", "ra')
    result = read_result(path)
    assert result.a.thumbs_up + result.b.thumbs_up == 3
    with opened(tmp_path) as experiment:
        assert experiment.result == result
        experiment.vote(experiment.plan.assign("user/4"), "4", "", False)
    assert path.read_bytes().startswith(full)
    assert len(path.read_text().splitlines()) == 5
    path.write_bytes(b'{"test"')  # killed as the test began
    with opened(tmp_path) as experiment:
        assert experiment.result.a.thumbs_up == 0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    path = tmp_path / "feedback.ab.jsonl"
    full = path.read_text()
    for text in (full.replace("0.5", "0.6"), full + "{}\n", "[]\n", '{"a": 1}\n', "no JSON\n"):
        path.write_text(text)
        with raises_error("output-line-foreign", where="feedback.ab.jsonl:"), opened(tmp_path):
            pass
        with raises_error("output-line-foreign", where="feedback.ab.jsonl:"):
            read_result(path)
        assert path.read_text() == text
    with raises_error("ab-test-missing", where="none.ab.jsonl"):
        read_result(tmp_path / "none.jsonl")


def test_a_vote_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as experiment:
        assignment = experiment.plan.assign("user/1")
        with full_disk(), raises_error("file-not-writable", where="feedback.ab.jsonl"):
            experiment.vote(assignment, "1", "", True)
        experiment.vote(assignment, "1", "", False)
        assert experiment.result.a.thumbs_up + experiment.result.b.thumbs_up == 0
    with opened(tmp_path):
        pass
