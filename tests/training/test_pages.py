"""The report during a run, the log's record of the machine, and training rows evaluated for the
report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.logs import repeatable
from tests.simulated_cuda import CUDA, simulated_device
from tests.training.conftest import SharedRuns
from tests.training.test_run import ROWS, folder, logged, recipe  # noqa: F401  (a fixture)
from valence.models.dtypes import slow_dtype
from valence.reports import page
from valence.storage import atomic_write
from valence.training import trainer as pages
from valence.training.open_run import restore
from valence.training.out_of_memory import peak_memory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[str]]:
    """A clock, and what was written by it; each page takes two seconds."""
    clock, actual = Clock(), list[str]()

    def write(path: Path, status: str) -> None:
        actual.append(status)
        clock.now += 2

    monkeypatch.setattr(page, "write_page", write)
    return clock, actual


def test_the_page_takes_a_small_share_of_the_time(written: tuple[Clock, list[str]]) -> None:
    clock, result = written
    ours = pages.Pages(Path("run"), result.append, clock)
    while clock.now < 10_000:
        ours.update()
        clock.now += 1
    largest = 10_000 * pages.MAX_SHARE / 2
    assert 10_000 / (2 / pages.MAX_SHARE + 4) - 1 < len(result) <= largest


def test_a_short_run_writes_none_on_the_way(written: tuple[Clock, list[str]]) -> None:
    clock, result = written
    ours = pages.Pages(Path("run"), result.append, clock)
    clock.now = pages.MIN_INTERVAL - 1
    ours.update()
    assert result == []


def test_a_report_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        atomic_write(tmp_path / "report.html", "page")
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


def test_a_failing_report_is_reported_once(tmp_path: Path) -> None:
    message: list[str] = []
    ours = pages.Pages(tmp_path / "no run", message.append)
    ours.write("running")
    ours.write("done")
    assert len(message) == 1


def test_training_rows_are_measured_after_training(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    valence.train(
        recipe(folder, tmp_path) | {"eval": {"every": 2, "train_examples": 5}}, quiet=True
    )
    result = json.loads((tmp_path / "run" / "eval" / "train.json").read_text())
    assert len(result["rows"]) == 5
    assert {row["source"] for row in result["rows"]} == {str(tmp_path / "train.jsonl")}
    texts = {row["completion"] for row in ROWS}
    assert all(
        row["completion"] in texts and {"reward", "label", "tokens"} <= row.keys()
        for row in result["rows"]
    )
    run = restore(tmp_path / "run")
    rewards = {row["id"]: row["reward"] for row in run.evaluate(name="train").rows}
    for row in result["rows"]:
        assert row["reward"] == pytest.approx(rewards[row["id"]], abs=1e-6)


def test_rows_that_cannot_be_measured_alone_are_reported(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """One thumb alone has no mismatched answer."""
    run = valence.train(
        recipe(folder, tmp_path) | {"eval": {"every": 2, "train_examples": 1}}, quiet=True
    )
    assert not (tmp_path / "run" / "eval" / "train.json").exists()
    assert (
        sum(f"{tmp_path / 'train.jsonl'}:1" in note for note in run.model_writer.facts["notes"])
        == 1
    )


def test_a_gpu_also_has_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_device():
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2_000_000_000)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 3_000_000_000)
        assert peak_memory(CUDA) == {"memory": 2.0, "memory_reserved": 3.0}
        monkeypatch.undo()
    assert list(peak_memory(torch.device("cpu"))) == ["memory"]


def test_the_log_records_time_and_memory(shared_runs: SharedRuns, tmp_path: Path) -> None:
    shared_runs.copy(tmp_path)
    records: list[dict[str, Any]] = logged(tmp_path / "run")
    assert all(0.1 < record["memory"] < 100 for record in records)
    evaluated = [record for record in records if "eval/loss" in record]
    assert evaluated
    assert all(record["seconds/evaluation"] > 0 for record in evaluated)
    assert any(record.get("seconds/saving", 0) > 0 for record in records)
    assert not any(
        name.startswith(("seconds", "memory")) for record in records for name in repeatable(record)
    )


def test_a_cpu_without_bfloat16_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for knows, message in ((True, ""), (False, "bfloat16")):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda knows=knows: knows
        )
        assert message in slow_dtype(cpu, torch.bfloat16)
        assert bool(slow_dtype(cpu, torch.bfloat16)) == bool(message)
        assert (
            slow_dtype(cpu, torch.float32) == slow_dtype(torch.device("cuda"), torch.bfloat16) == ""
        )
