"""Result files of lm-eval: the difference between two models, and results that do not fit.

The files in ``lm_eval/`` were written by lm-eval 0.4.13 for SmolLM2-135M-Instruct before and after
the training of the quickstart, on two local tasks with 12 questions; facts about the machine are
removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import command
from tests.errors import raises_error
from valence.apps.compare.benchmarks import compare_results, read_benchmarks
from valence.cli import GATE_FAILED

FOLDER = Path(__file__).parent / "lm_eval"
BASELINE, CANDIDATE = FOLDER / "baseline.json", FOLDER / "candidate.json"


def test_the_results_are_those_of_the_files() -> None:
    capitals, naming = read_benchmarks(BASELINE, CANDIDATE)
    assert (capitals.task, capitals.metric) == ("capitals", "acc")
    assert (capitals.baseline, capitals.candidate) == pytest.approx((11 / 12, 10 / 12))
    assert capitals.higher_is_better is True
    # the variance of a mean of 12 answers, with 11 in the denominator
    margin = 1.96 * ((11 / 12 / 12 + 10 / 12 * 2 / 12) / 11) ** 0.5
    assert (capitals.low, capitals.high) == pytest.approx((-1 / 12 - margin, -1 / 12 + margin))
    assert (capitals.baseline_stderr, capitals.candidate_stderr) == pytest.approx(
        ((11 / 12 / 12 / 11) ** 0.5, (10 / 12 * 2 / 12 / 11) ** 0.5)
    )
    assert not capitals.is_paired
    assert (naming.baseline, naming.candidate, naming.low) == (0.0, 0.0, None)
    back = read_benchmarks(CANDIDATE, BASELINE)[0]
    assert back.to_dict()["difference"] == pytest.approx(1 / 12)


def changed(folder: Path, change: Callable[[Any], Any], source: Path = CANDIDATE) -> Path:
    content = json.loads(source.read_text())
    change(content)
    path = folder / f"changed.{source.name}"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["versions"].update(capitals=2),
        lambda c: c["n-samples"]["capitals"].update(effective=6),
        lambda c: c["configs"]["capitals"].update(num_fewshot=5),
        lambda c: c["configs"]["naming"]["generation_kwargs"].update(max_gen_toks=32),
        lambda c: c["results"].pop("naming"),
        lambda c: c.update(chat_template=None),
        lambda c: c.update(system_instruction="Be brief."),
        lambda c: c["config"].update(fewshot_seed=1),
    ],
)
def test_results_of_other_tasks_or_options_are_not_compared(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    with raises_error("benchmarks-differ"):
        read_benchmarks(BASELINE, changed(tmp_path, change))


def test_another_chat_template_is_compared(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda c: c.update(chat_template="{{ messages }}"))
    assert read_benchmarks(BASELINE, path) == read_benchmarks(BASELINE, CANDIDATE)


def test_addresses_of_functions_are_not_compared(tmp_path: Path) -> None:
    def process_docs(address: str) -> Callable[[Any], Any]:
        text = f"functools.partial(<function process_docs at {address}>, subject='law')"
        return lambda c: c["configs"]["capitals"].update(process_docs=text)

    paths = [
        changed(tmp_path, process_docs("0x7f03aa10"), BASELINE),
        changed(tmp_path, process_docs("0x7fe1bb20"), CANDIDATE),
    ]
    assert read_benchmarks(*paths) == read_benchmarks(BASELINE, CANDIDATE)


def test_a_value_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda c: c["results"]["naming"].update({"exact_match,none": "N/A"}))
    assert [result.task for result in read_benchmarks(BASELINE, path)] == ["capitals"]


def test_the_newest_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with raises_error("benchmarks-missing"):
        read_benchmarks(tmp_path, CANDIDATE)
    for age, (name, path) in enumerate({"new": CANDIDATE, "old": BASELINE}.items()):
        copy = tmp_path / "model" / f"results_{name}.json"
        copy.write_bytes(path.read_bytes())
        os.utime(copy, (1e9 - age, 1e9 - age))
    (result, _) = read_benchmarks(BASELINE, tmp_path)
    assert result.candidate == pytest.approx(10 / 12)


def test_another_file_is_refused(tmp_path: Path) -> None:
    with raises_error("file-not-readable"):
        read_benchmarks(tmp_path / "none.json", CANDIDATE)
    (tmp_path / "rows.json").write_text('{"results": []}')
    with raises_error("benchmarks-foreign"):
        read_benchmarks(BASELINE, tmp_path / "rows.json")


def test_benchmarks_alone_need_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("compare", "smollm2", "runs/first", "--lm-eval", str(BASELINE), str(CANDIDATE))
    assert command(*words) == 0
    assert "-0.083" in capsys.readouterr().out
    result = json.loads(Path("comparison/compare.json").read_text())
    assert [row["task"] for row in result["benchmarks"]] == ["capitals", "naming"]
    assert "capitals" in Path("comparison/report.html").read_text()
    assert command(*words, "--at-least", "0") == GATE_FAILED  # there is no win rate
    assert command(*words, "--max-broken", "0") == GATE_FAILED


# Samples


def with_samples(folder: Path, source: Path, scores: list[float], **changes: Any) -> Path:
    """A result file with the samples that lm-eval writes next to it for --log_samples."""
    folder.mkdir(exist_ok=True)
    content = json.loads(source.read_text())
    del content["results"]["naming"], content["configs"]["naming"]
    mean = sum(scores) / len(scores)
    content["results"]["capitals"]["acc,none"] = changes.pop("mean", mean)
    path = folder / "results_2026-01-01T00-00-00.json"
    path.write_text(json.dumps(content))
    samples = [
        {"doc_id": i, "doc_hash": f"question {i}", "filter": "none", "acc": score, **changes}
        for i, score in enumerate(scores)
    ]
    lines = "".join(json.dumps(sample) + "\n" for sample in reversed(samples))
    (folder / "samples_capitals_2026-01-01T00-00-00.jsonl").write_text(lines)
    return folder


BEFORE, AFTER = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_with_samples_the_interval_is_that_of_the_differences(tmp_path: Path) -> None:
    sides = [
        with_samples(tmp_path / "a", BASELINE, BEFORE),
        with_samples(tmp_path / "b", CANDIDATE, AFTER),
    ]
    (result,) = read_benchmarks(*sides)
    assert result.is_paired
    d = [0, 1, 0, 0, -1, 1]
    mean = sum(d) / 6
    error = (sum((x - mean) ** 2 for x in d) / 5 / 6) ** 0.5
    assert (result.low, result.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error))
    (same,) = read_benchmarks(sides[0], sides[0])
    assert (same.low, same.high) == (None, None)  # the models do not differ on any question


def test_scores_without_the_reported_mean_are_not_paired(tmp_path: Path) -> None:
    sides = [
        with_samples(tmp_path / "a", BASELINE, BEFORE, mean=0.9),
        with_samples(tmp_path / "b", CANDIDATE, AFTER),
    ]
    (result,) = read_benchmarks(*sides)
    assert not result.is_paired
    assert result.high is not None


def test_other_questions_are_not_compared(tmp_path: Path) -> None:
    sides = [
        with_samples(tmp_path / "a", BASELINE, BEFORE),
        with_samples(tmp_path / "b", CANDIDATE, AFTER, doc_hash="another question"),
    ]
    with raises_error("benchmarks-differ"):
        read_benchmarks(*sides)
    samples = next((tmp_path / "b").glob("samples_*"))
    samples.write_text("{")
    with raises_error("file-not-readable"):
        read_benchmarks(*sides)


def test_a_group_is_paired_over_the_questions_of_its_tasks() -> None:
    def results(scores: dict[str, list[float]]) -> dict[str, Any]:
        """Two tasks of different sizes in a group in a group."""
        samples = {
            task: [
                {"doc_id": i, "doc_hash": str(i), "filter": "none", "acc": value}
                for i, value in enumerate(values)
            ]
            for task, values in scores.items()
        }
        every = [value for values in scores.values() for value in values]
        names = {**scores, "outer": every}
        return {
            "results": {
                name: {"acc,none": sum(v) / len(v), "acc_stderr,none": 0.2}
                for name, v in names.items()
            },
            "group_subtasks": {"outer": ["inner", "x"], "inner": ["y"]},
            "configs": {},
            "versions": {},
            "n-samples": {},
            "samples": samples,
        }

    before = results({"x": [1, 0], "y": [0, 0, 1, 1]})
    after = results({"x": [1, 1], "y": [1, 0, 0, 1]})
    group = next(row for row in compare_results(before, after, "") if row.task == "outer")
    d = [0, 1, 1, 0, -1, 0]
    mean = sum(d) / 6
    error = (sum((x - mean) ** 2 for x in d) / 5 / 6) ** 0.5
    assert group.is_paired
    assert (group.low, group.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error))
