"""The output file of scored rows: a stopped program loses, duplicates or reorders no line, and
resuming accepts only its own lines.
"""

from __future__ import annotations

import fcntl
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaModel

from tests.command import command
from tests.disk import full_disk
from tests.errors import raises_error
from tests.programs import Program
from tests.training.scoring import ALL, FILES, read, score, score_all, write
from valence import cli
from valence.data.load import stream
from valence.errors import UserError
from valence.jobs import score_rows as module
from valence.jobs.row_job import OutputFile
from valence.storage import add_checksum
from valence.training.scorers import LogProbScorer
from valence.types import MicroBatch

# Stopping and going on


def test_a_truncated_output_file_is_resumed(place: Path) -> None:
    expected = score_all()
    score()
    for share in (0.0, 0.1, 0.77, 0.999, 1.0):
        part = expected[: int(share * len(expected))]
        Path("out.jsonl").write_bytes(part)
        tally = score()
        assert Path("out.jsonl").read_bytes() == expected, share
        remaining = 17 if share == 1 else part.count(b"\n") // 4 * 4
        assert (tally.rows, tally.earlier) == (17, remaining), share


def test_no_score_is_computed_twice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score_all()
    score()
    Path("out.jsonl").write_bytes(b"".join(expected.splitlines(keepends=True)[:13]))
    scored: list[int] = []
    inner = LogProbScorer.__call__

    def watched(self: LogProbScorer, batch: MicroBatch) -> Any:
        scored.append(batch.sequences)
        return inner(self, batch)

    monkeypatch.setattr(LogProbScorer, "__call__", watched)
    score()
    assert sum(scored) == 3 + 3 + 1 + 1 + 1  # of the rows from the 13th on: 12 are whole windows
    scored.clear()
    score()
    assert scored == []


def test_rows_that_were_added_to_the_data_are_scored(place: Path) -> None:
    score("judgement.jsonl")
    write("judgement.jsonl", FILES["judgement"] * 2)
    assert score("judgement.jsonl").rows == 10
    score("judgement.jsonl", out="anew.jsonl")
    assert Path("out.jsonl").read_bytes() == Path("anew.jsonl").read_bytes()


def small_windows() -> None:
    module.WINDOW = 4
    cli.main()


@pytest.mark.slow
def test_a_program_that_is_killed_loses_a_window_at_most(place: Path) -> None:
    rows = write(
        "rows.jsonl",
        [{"prompt": f"question {i} ", "completion": f"{i * i} " * 20} for i in range(600)],
    )
    out, program = (
        Path("out.jsonl"),
        Program("score", "model", "--data", rows, "--out", "out.jsonl", main=small_windows),
    )
    program.wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20)
    assert program.kill() == -signal.SIGKILL
    done = out.read_bytes().count(b"\n")
    tally = score(rows)
    assert done - 4 < tally.earlier <= done < 600
    score(rows, out="whole.jsonl")
    assert out.read_bytes() == Path("whole.jsonl").read_bytes()


def test_the_command_can_be_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score_all()
    lines: list[int] = []
    inner = OutputFile.write

    def stopping(self: Any, result: Any) -> None:
        if len(lines) == 2:
            raise KeyboardInterrupt
        lines.append(len(result))
        inner(self, result)

    words = (
        "score",
        "model",
        *(word for path in ALL for word in ("--data", path)),
        "--out",
        "out.jsonl",
    )
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "write", stopping)
        assert command(*words) == 130
    assert len(read()) == 8
    assert command(*words) == 0
    assert Path("out.jsonl").read_bytes() == expected


def test_rows_are_read_as_they_are_scored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading counts them; in the second, no row is read before those of the windows
    before it are written.
    """
    write("rows.jsonl", FILES["judgement"] * 8)
    readings: list[int] = []

    def watched(source: Any) -> Iterator[Any]:
        readings.append(0)
        for number, row in enumerate(stream(source)):
            written = len(read()) if Path("out.jsonl").exists() else 0
            assert len(readings) == 1 or written >= number // 4 * 4
            yield row

    monkeypatch.setattr(module, "stream", watched)
    score("rows.jsonl")
    assert (len(readings), len(read())) == (2, 40)


def test_scoring_resumes_after_running_out_of_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = score_all()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LogProbScorer, "__call__", fail)
        with raises_error("out-of-memory", where="judgement.jsonl:1", fix="--tokens"):
            score()
    score(tokens=60)
    assert len(read()) == expected.count(b"\n")


# What is refused


def test_lines_of_different_settings_do_not_mix(place: Path) -> None:
    score("scored.jsonl")
    before = Path("out.jsonl").read_bytes()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"target": "other"}, "model"),
        ({"overrides": ["model.dtype=float64"]}, "model"),
        ({"overrides": ["data.max_length=99"]}, "max_length"),
        ({"column": "more"}, "column"),
        ({"overrides": ["reference.model=./other"]}, "reference"),
    ]
    for change, setting in changes:
        with raises_error("output-settings-differ", where=f"out.jsonl ({setting})", fix="--fresh"):
            score("scored.jsonl", **change)
        assert Path("out.jsonl").read_bytes() == before
    last, _ = changes[-1]
    score("scored.jsonl", fresh=True, **last)
    assert Path("out.1.jsonl").read_bytes() == before
    assert Path("out.1.jsonl.about.json").exists()
    score("scored.jsonl", **last)


def test_another_beta_is_another_reward(place: Path) -> None:
    options: dict[str, Any] = {"overrides": ["reference.model=./other"]}
    score("scored.jsonl", beta=0.2, **options)
    with raises_error("output-settings-differ", where="out.jsonl (beta)") as raised:
        score("scored.jsonl", **options)
    assert re.findall(r"\d\.\d", raised.error.message) == ["0.2", "0.1"]
    with raises_error("beta-needs-reference", where="--beta"):
        score("scored.jsonl", beta=0.2, out="new.jsonl")


def test_data_that_changed_is_seen(place: Path) -> None:
    score("scored.jsonl")
    rows = FILES["scored"]
    write("scored.jsonl", [*rows[:2], {**rows[2], "completion": "worlds"}])
    with raises_error("output-rows-changed", where="scored.jsonl:3"):
        score("scored.jsonl")
    for completion in ("worlds", ""):  # another answer; a row that cannot be scored
        write("scored.jsonl", [{**rows[0], "completion": completion}, *rows[1:]])
        with raises_error("output-rows-changed", where="scored.jsonl:1") as raised:
            score("scored.jsonl")
        assert "out.jsonl:1" in raised.error.message
    write("scored.jsonl", rows[:2])
    with raises_error("output-lines-extra", where="out.jsonl") as raised:
        score("scored.jsonl")
    assert re.findall(r"\d+", raised.error.message) == ["3", "2"]


FOREIGN = (
    b"garbage",
    b"\xff\xfe",
    b"[1]",
    b"{}",
    b"",
    b"[" * 9999,
    b'{"origin": 1}',
    b'{"origin" nonsense',
    b'{"valence": 1}',
    b'{"origin": "rows.jsonl:1", "answers": []}',
    b'{"valence": {"origin": "rows.jsonl:1"}}',
    b'{"valence": {"origin": 1, "answers": []}}',
    b'{"valence": {"origin": [], "error": "", "fix": ""}}',
)
"""Lines that this command does not write."""


@pytest.mark.parametrize(("number", "foreign"), [
    (1, FOREIGN[::3]),
    pytest.param(7, FOREIGN, marks=pytest.mark.slow),
])  # fmt: skip
def test_lines_that_were_edited_are_refused(
    number: int,
    foreign: tuple[bytes, ...],
    place: Path,
) -> None:
    """Also with a checksum that fits, in the first window and in the second."""
    rows = write("rows.jsonl", FILES["judgement"] * 3)
    score(rows)
    out, sums = Path("out.jsonl"), Path("out.jsonl.crc")
    lines = out.read_bytes().split(b"\n")[:11]  # the last ones are no whole window
    checksums = sums.read_bytes().splitlines()
    for line in foreign:
        edited = b"\n".join([*lines[:number], line, *lines[number + 1 :]])
        out.write_bytes(edited)
        if line == foreign[0]:
            with raises_error(
                "output-line-damaged",
                where=f"out.jsonl:{number + 1}",
                fix="--fresh",
            ):
                score(rows)
        checksums[number] = b"%08x" % crc32(line + b"\n")
        sums.write_bytes(b"\n".join(checksums) + b"\n")
        with raises_error("output-line-foreign", where=f"out.jsonl:{number + 1}", fix="--fresh"):
            score(rows)
        assert out.read_bytes() == edited
    assert score(rows, fresh=True).earlier == 0


def test_a_number_that_has_changed_is_refused_and_named(place: Path) -> None:
    """Also where the line is still one that this command could have written."""
    rows = write("rows.jsonl", FILES["judgement"] * 3)
    score(rows)
    full = Path("out.jsonl").read_bytes().split(b"\n")[:11]
    lines = [*full[:4], re.sub(rb'("logp": -?\d)', rb"\g<1>1", full[4], count=1), *full[5:]]
    Path("out.jsonl").write_bytes(b"\n".join(lines))
    assert lines[4] != full[4]
    with raises_error("output-line-damaged", where="out.jsonl:5"):
        score(rows)
    Path("out.jsonl").write_bytes(b"\n".join(full[:4]) + b"\n")  # as the error advises
    assert score(rows).rows == len(FILES["judgement"]) * 3


def test_a_file_without_checksums_is_not_resumed(place: Path) -> None:
    score("scored.jsonl")
    Path("out.jsonl.crc").unlink()
    saved = Path("out.jsonl").read_bytes()
    with raises_error("output-foreign", where="out.jsonl", fix="--fresh") as raised:
        score("scored.jsonl")
    assert "out.jsonl.crc" in raised.error.message
    assert Path("out.jsonl").read_bytes() == saved


def test_facts_that_were_edited_are_refused(place: Path) -> None:
    """Whether they are no facts, have a wrong checksum, or one that fits."""
    score("scored.jsonl")
    about = Path("out.jsonl.about.json")
    original = about.read_text()
    damaged, differ = (
        ("output-state-damaged", about.name),
        ("output-settings-differ", "out.jsonl ("),
    )
    unreadable = ("file-not-readable", about.name)
    without = {name: value for name, value in json.loads(original).items() if name != "reference"}
    for text, (code, where) in {
        "[]": damaged,
        "null": damaged,
        "{}": damaged,
        '{"about": 1}': damaged,
        '{"about": {}}': differ,
        '{"m":': unreadable,
        "[" * 9999: unreadable,
        original.replace('"long_rows": "', '"long_rows": "x', 1): unreadable,  # a wrong checksum
        json.dumps(add_checksum(without | {"reference": 1})): (
            "output-settings-differ",
            "out.jsonl (reference)",
        ),
        json.dumps(add_checksum(without | {"another": 1})): damaged,
        json.dumps(add_checksum(without | {"reference": None, "another": None})): damaged,
    }.items():
        about.write_text(text)
        with raises_error(code, where=where, fix="--fresh"):
            score("scored.jsonl")
        assert about.read_text() == text


@pytest.mark.parametrize(("out", "code"), [
    ("scored.jsonl", "output-is-input"),
    ("judgement.jsonl", "output-foreign"),
    ("new.json", "output-not-jsonl"),
    ("no/new.jsonl", "path-invalid-output"),
])  # fmt: skip
def test_a_file_that_cannot_be_had_is_refused_before_a_model_is_loaded(
    out: str, code: str, place: Path
) -> None:
    (place / "model/model.safetensors").unlink()
    with raises_error(code, where=out):
        score("scored.jsonl", out=out)


def test_two_programs_do_not_write_one_file(place: Path) -> None:
    score("scored.jsonl")
    with Path("out.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with raises_error("output-locked", where="out.jsonl"):
            score("scored.jsonl")


def test_facts_that_change_while_a_model_is_loaded_are_seen(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = LlamaForCausalLM.from_pretrained
    with monkeypatch.context() as patch:

        def slow(*mode: Any, **more: Any) -> Any:
            patch.undo()
            score("scored.jsonl", target="other")
            return inner(*mode, **more)

        patch.setattr(LlamaForCausalLM, "from_pretrained", slow)
        with raises_error("output-settings-differ", where="out.jsonl (model)"):
            score("scored.jsonl")
    score("scored.jsonl", target="other")


def test_a_file_is_not_moved_aside_while_it_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[UserError] = []
    with monkeypatch.context() as patch:

        def meanwhile(*args: Any, **more: Any) -> Any:
            if not (Path("out.jsonl").exists() and read()):
                return forward(*args, **more)
            patch.undo()
            with raises_error("output-locked", where="out.jsonl") as raised:
                score(target="other", fresh=True)
            refused.append(raised.error)
            return forward(*args, **more)

        forward = LlamaModel.forward
        patch.setattr(LlamaModel, "forward", meanwhile)
        score()
    assert len(refused) == 1
    assert (len(read()), list(place.glob("out.1*"))) == (17, [])


def test_a_file_that_was_moved_aside_before_its_lock_is_not_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score("scored.jsonl")
    flock = fcntl.flock

    def late(file: Any, mode: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        Path("out.jsonl").rename("moved.jsonl")
        flock(file, mode)

    monkeypatch.setattr(fcntl, "flock", late)
    with raises_error("output-locked", where="out.jsonl"):
        score("scored.jsonl")


def test_a_full_disk_is_reported_and_scoring_resumes(place: Path) -> None:
    rows = write(
        "rows.jsonl",
        [{"prompt": f"{i} ", "completion": "yes", "more": "x" * 1000} for i in range(50)],
    )
    with full_disk(40_000), raises_error("file-not-writable", where="out.jsonl"):
        score(rows)
    assert 20 < score(rows).earlier < 50
    assert len(read()) == 50
