"""`--json`: a strict JSON object per record and per outcome, and readers that disconnect."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.arch.source import ROOT
from tests.command import command as valence
from tests.command import place

__all__ = ["place"]


def test_json_is_one_object_a_record_and_the_rest_goes_to_stderr(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert valence("train", "recipe.yaml", "--json") == 0
    shown = capsys.readouterr()
    first, *records, last = [
        json.loads(line, parse_constant=_refuse) for line in shown.out.splitlines()
    ]
    assert first == {"event": "started", "run": "runs/first", "resumed": False}
    assert records == [
        json.loads(line) for line in (place / "runs/first/metrics.jsonl").read_text().splitlines()
    ]
    assert last == {
        "event": "done",
        "run": "runs/first",
        "model": "runs/first/model",
        "report": "runs/first/report.html",
        "status": "done",
        "exit_status": 0,
    }
    assert "2/2" in shown.err
    assert valence("train", "runs/first", "--json", "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    (done,) = map(json.loads, shown.out.splitlines())
    assert (done["event"], done["run"], done["status"]) == (
        "done",
        str(place / "runs/first"),
        "done",
    )


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


def test_json_ends_with_a_mistake_or_a_stop(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert valence("train", "recipe.yaml", "train.sed=1", "--json") == 2
    shown = capsys.readouterr()
    (line,) = map(json.loads, shown.out.splitlines())
    assert (line["event"], line["status"], line["exit_status"], line["run"]) == (
        "done",
        "failed",
        2,
        None,
    )
    assert line["code"] == "setting-unknown"
    assert "train.sed" in line["error"]
    assert "train.sed" in shown.err
    backward, calls = torch.autograd.backward, count(1)

    def stopped(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr("torch.autograd.backward", stopped)
        assert valence("train", "recipe.yaml", "train.epochs=3", "--json") == 130
    *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (last["status"], last["exit_status"], last["run"], last["model"]) == (
        "interrupted",
        130,
        "runs/first",
        None,
    )
    assert records[-1]["step"] == 3
    saved = [path.name for path in (place / "runs/first/checkpoints").iterdir()]
    assert "step-3" in saved
    assert json.loads((place / "runs/first/run.json").read_text())["status"] == "interrupted"
    assert (place / "runs/first/report.html").is_file()
    assert valence("train", "recipe.yaml", "train.epochs=3", "--json") == 0
    first, *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["resumed"], last["status"]) == (True, "done")
    assert [record["step"] for record in records] == [4, 5, 6]

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("torch.autograd.backward", broken)
    with pytest.raises(ValueError, match="a defect"):
        valence("train", "recipe.yaml", "run.dir=runs/other", "--json")
    *_, line = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["status"], line["exit_status"]) == ("failed", 1)


def in_a_shell(place: Path, words: str, behind: str) -> subprocess.CompletedProcess[str]:
    """Python with these words, and ``behind`` them what the shell does with its output."""
    return subprocess.run(
        f"set -o pipefail; '{sys.executable}' {words} {behind}",
        cwd=place,
        shell=True,
        executable=shutil.which("bash"),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_that_nobody_reads_is_no_mistake_and_that_nobody_can_is_one(tmp_path: Path) -> None:
    (tmp_path / "runs/none").mkdir(parents=True)
    (tmp_path / "runs/none/run.json").write_text("{}")
    unread = in_a_shell(tmp_path, "-m valence report --json", "| true")
    assert (unread.returncode, unread.stderr) == (0, "")
    closed = in_a_shell(tmp_path, "-m valence train recipe.yaml --json", ">&-")
    assert closed.returncode == 2
    assert closed.stderr.startswith("valence: --json: ")


STREAMS = """
import os, subprocess
from pathlib import Path
from valence.cli.stream import streaming
from valence.terminal import safe_streams
with safe_streams(), streaming(True) as stream:
    for _ in range(2000):  # more than a pipe holds
        stream.start({}, Path("runs/first"), False)
    print("printed")
    subprocess.run(["echo", "by another program"])
    os.write(1, b"without a line break")
    stream.done(Path("runs/first"))
"""
"""Records of a run and what others print meanwhile, without a run."""
PRINTED = ("printed", "by another program", "without a line break")


@pytest.mark.parametrize("behind", ["", pytest.param("2>&-", marks=pytest.mark.slow)])
def test_what_others_print_is_not_among_the_records(tmp_path: Path, behind: str) -> None:
    (tmp_path / "streams.py").write_text(STREAMS)
    done = in_a_shell(tmp_path, "streams.py", behind)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["started"] * 2000 + ["done"]
    assert [text in done.stderr for text in PRINTED] == [not behind] * 3


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "streams.py").write_text(STREAMS)
    done = in_a_shell(tmp_path, "streams.py", "| head -1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["event"] == "started"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_json_any_more(place: Path) -> None:
    done = in_a_shell(place, "-m valence train recipe.yaml --json --quiet", "| head -1")
    assert done.returncode == 0
    assert not any(text in done.stderr for text in ("Traceback", "it/s", "step 1"))
    assert json.loads(done.stdout)["event"] == "started"
    assert json.loads((place / "runs/first/run.json").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("behind", ["", "2>&-"])
def test_what_processes_of_a_reward_print_is_not_among_the_records(
    place: Path, behind: str
) -> None:
    (place / "talks.py").write_text(
        "import os, subprocess\nos.write(1, b'imported')\n"
        "def f(completions):\n"
        "    print('printed')\n"
        "    subprocess.run(['echo', 'by another program'])\n"
        "    os.write(1, b'without a line break')\n"
        "    return [1.0 * len(c.tokens) for c in completions]\n"
    )
    (place / "recipe.yaml").write_text(
        "method: rloo\n"
        "model: {name: ./model, lora: {rank: 2}}\n"
        "data: {train: [{path: rows.jsonl, format: prompt, limit: 2}], max_length: 128}\n"
        "reward: talks:f\n"
        "rollout: {num_rollouts: 2, max_new_tokens: 4}\n"
        "train: {batch_size: 4, max_steps: 1, learning_rate: 1e-3}\n"
        "run: {dir: runs/first}\n"
    )
    done = in_a_shell(place, "-m valence train recipe.yaml --json", behind)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line).get("event") for line in done.stdout.splitlines()]
    assert (events[0], events[-1]) == ("started", "done")
    for text in ("imported", *PRINTED):
        assert (text in done.stderr) == (not behind)
