"""The state of all runs below a folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.errors import raises_error
from valence.reports import run_record, runs
from valence.reports.runs import RunLine, as_json, list_runs, table
from valence.storage import Lock

nobody = nullcontext


@contextmanager
def somebody(folder: Path) -> Iterator[None]:
    """This process writes to all runs of a folder."""
    with ExitStack() as stack:
        for path in folder.rglob("run.json"):
            stack.enter_context(Lock(path.parent))
        yield


@contextmanager
def dead(folder: Path) -> Iterator[None]:
    """The process that wrote to a run was killed."""
    if (child := os.fork()) == 0:
        try:
            Lock(folder).take()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    yield


def a_run(
    folder: Path, *, log: Any = (), checkpoints: Any = (), age: float = 0.0, **facts: Any
) -> Path:
    """A run's folder as it is ``age`` seconds after it was last written to."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("method: dpo\nmodel:\n  name: m\nmix:\n- method: sft\n")
    (folder / "run.json").write_text(json.dumps({"status": "done", **facts}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir()
    for name in ("run.json", "metrics.jsonl", "checkpoints"):
        os.utime(folder / name, (2e9 - age,) * 2)
    return folder


def steps(*seconds: float, first: int = 1, every: int = 1, **other: Any) -> list[dict[str, Any]]:
    return [
        {"step": first + i * every, "seconds": s, "loss": 1 / (i + 1), **other}
        for i, s in enumerate(seconds)
    ]


def listed(folder: Path, holder: Any = nobody) -> list[RunLine]:
    with holder(folder):
        return list_runs(folder)


def only(folder: Path, holder: Any = nobody) -> RunLine:
    [line] = listed(folder, holder)
    return line


def shown(lines: list[RunLine], width: int = 160) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(lines))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_runs_are_found_newest_first_and_not_below_runs_links_or_hidden_folders(
    tmp_path: Path,
) -> None:
    old = a_run(tmp_path / "old", age=50)
    deep = a_run(tmp_path / "a/b/c/deep", age=10)
    a_run(tmp_path / "a/b/c/d/too_deep")
    a_run(tmp_path / "old/model/inside")
    a_run(tmp_path / ".hidden/run")
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "run.json.d").mkdir()
    (tmp_path / "a" / "file").write_text("")
    assert [line.path for line in listed(tmp_path)] == [deep, old]
    assert only(deep).path == deep
    with raises_error("run-not-found", where=str(tmp_path / "nowhere")):
        listed(tmp_path / "nowhere")
    assert listed(tmp_path / "run.json.d") == []


@pytest.mark.parametrize(("status", "holder", "state"), [
    ("running", somebody, "running"),
    ("running", dead, "killed"),
    ("running", nobody, "killed"),
    ("interrupted", nobody, "stopped"),
    ("interrupted", dead, "stopped"),
    ("interrupted", somebody, "running"),
    ("failed", nobody, "failed"),
    ("done", nobody, "done"),
    ("done", somebody, "done"),
    ("scored", nobody, "scored"),
    ("of a later version", nobody, "of a later version"),
])  # fmt: skip
def test_states(tmp_path: Path, status: str, holder: Any, state: str) -> None:
    line = only(a_run(tmp_path / "run", status=status), holder)
    assert (line.state, line.problem) == (state, None)


def test_the_state_of_a_running_run(tmp_path: Path) -> None:
    log = [{"step": 0, "eval/loss": 0.7}, *steps(5.0, 1.0, 1.0, 1.0, every=1)]
    log[2] |= {"eval/loss": 0.5, "eval/rewards/accuracies": 0.75, "rewards/accuracies": 1.0}
    names = ("step-2", "step-10", "step-9", ".step-12.part", "step-x", "best")
    # The number of steps is what an earlier start of the program wrote at its end.
    run = a_run(
        tmp_path / "run", log=log, checkpoints=names, status="running", steps=2, total_steps=10
    )
    line = only(run, somebody)
    assert (line.method, line.step, line.total, line.checkpoint, line.changed) == (
        "dpo",
        4,
        10,
        10,
        2e9,
    )
    assert line.left == 6 * 2.0
    assert line.metrics == {"loss": 0.25, "eval/loss": 0.5, "eval/rewards/accuracies": 0.75}
    assert only(run, dead).left is None
    assert only(run, dead).step == 4


def test_a_finished_run_records_its_last_step(tmp_path: Path) -> None:
    line = only(a_run(tmp_path / "run", log=steps(1.0), status="failed", steps=3, total_steps=4))
    assert (line.step, line.total, line.left, line.checkpoint) == (3, 4, None, None)
    assert only(a_run(tmp_path / "kto", method="kto")).method == "kto"
    line = only(a_run(tmp_path / "scored", status="scored", steps="many", total_steps=None))
    assert (line.step, line.total, line.metrics) == (0, None, {})


@pytest.mark.parametrize(("log", "left"), [
    (steps(3.0), 27.0),
    (steps(6.0, 4.0, first=2, every=2), 6 * 2.5),
    ([{"step": 4, "loss": 1.0}], None),
    ([{"step": 0, "seconds": 1.0}], None),
    ([], None),
    (steps(*[1.0] * 12), 0),
])  # fmt: skip
def test_time_left(tmp_path: Path, log: Any, left: float | None) -> None:
    assert (
        only(a_run(tmp_path / "run", log=log, status="running", total_steps=10), somebody).left
        == left
    )


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    note = "x" * (run_record.TAIL // 40)
    log = [*steps(*[100.0] * 50, note=note), *steps(*[2.0] * 50, first=51, note=note)]
    run = a_run(tmp_path / "run", log=log, status="running", total_steps=110)
    line = only(run, somebody)
    # At 2 s a step, as at the end; they took 51 s on average.
    assert (line.step, line.left) == (100, 20.0)


def test_no_damage_makes_the_list_fail(tmp_path: Path) -> None:
    torn = a_run(tmp_path / "torn", log=steps(1.0, 1.0), status="running", total_steps=4)
    full = (torn / "metrics.jsonl").read_bytes()
    (torn / "metrics.jsonl").write_bytes(
        b'\0\0\n[]\n{"step": "x"}\n\xff\xfe\n' + b"[" * 9999 + b"\n" + full + b'{"step": 3, "los'
    )
    assert only(torn, somebody).step == 2
    for i, content in enumerate(
        (
            b"",
            b"{",
            b"[]",
            b"3",
            b'"status"',
            b"\xff",
            b"{}",
            b'{"status": 4}',
            b'{"status": []}',
            b"[" * 9999,
        )
    ):
        run = a_run(tmp_path / f"bad/{i}")
        (run / "run.json").write_bytes(content)
    bad = listed(tmp_path / "bad")
    assert len(bad) == 10
    assert {line.state for line in bad} == {"unreadable"}
    assert all(line.problem and line.changed for line in bad)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "run.json").write_text('{"status": "done"}')
    assert (only(bare).method, only(bare).step, only(bare).checkpoint) == ("", 0, None)
    odd = a_run(
        tmp_path / "odd",
        log=[{"step": 1, "seconds": "nan", "loss": "nan", "eval/loss": [1]}],
        status="running",
        total_steps=2,
    )
    assert only(odd, somebody).metrics == {"loss": "nan"}
    assert json.dumps(as_json(listed(tmp_path, somebody)), allow_nan=False)
    assert len(shown(listed(tmp_path, somebody))) >= 13


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "run")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def guarded(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    results = {line.path.name: line for line in listed(tmp_path)}
    assert results["run"].state == "done"
    assert results["locked"].state == "unreadable"
    assert "Permission denied" in str(results["locked"].problem)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.time, "time", lambda: 2e9 + 130)
    monkeypatch.chdir(tmp_path)
    a_run(
        Path("runs/one"),
        log=steps(2.0, 2.0, **{"eval/rewards/auc": 0.75}),
        checkpoints=["step-2"],
        status="running",
        total_steps=50,
    )
    a_run(Path("runs/[b]two\x1b[31m"), age=7200, status="done", steps=5, total_steps=5)
    broken = a_run(Path("runs/three"), age=9000)
    (broken / "run.json").write_text("{")
    os.utime(broken / "run.json", (0, 0))
    header, *lines = shown(listed(Path("runs"), somebody))
    assert header.split() == [
        "run",
        "method",
        "state",
        "step",
        "left",
        "saved",
        "changed",
        "last",
        "metrics",
    ]
    assert lines[0].split() == [
        "runs/one",
        "dpo",
        "running",
        "2/50",
        "1m36s",
        "2",
        "2m10s",
        "ago",
        "loss",
        "0.5",
        "eval/auc",
        "0.75",
    ]
    assert lines[1].split() == ["runs/[b]two␛[31m", "dpo", "done", "5/5", "2h02m", "ago"]
    assert lines[2].split()[:5] == ["runs/three", "unreadable", "2h32m", "ago", "run.json"]
    assert len(shown([], 40)) == 1


def test_plain_values(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run",
        log=steps(2.0, 2.0),
        checkpoints=["step-2"],
        status="running",
        total_steps=50,
    )
    assert as_json(listed(tmp_path, somebody)) == [
        {
            "path": str(run),
            "state": "running",
            "problem": None,
            "method": "dpo",
            "step": 2,
            "total_steps": 50,
            "seconds_left": 96.0,
            "checkpoint": 2,
            "changed": "2033-05-18T03:33:20+00:00",
            "metrics": {"loss": 0.5},
        }
    ]
