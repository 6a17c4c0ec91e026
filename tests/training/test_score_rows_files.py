"""The file that scores of rows are written to: nothing is lost, doubled or mixed up when a program is stopped, and no other lines
are gone on from."""

from __future__ import annotations

import fcntl
import json
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import command
from tests.programs import Program
from tests.training.scoring import ALL, FILES, read, score, whole, write
from valence import cli
from valence.checksums import add_checksum
from valence.data.load import stream
from valence.errors import UserError
from valence.training import score_rows as module

ROOT = Path(__file__).parents[2]


# Stopping and going on


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.77, 0.999, 1.0])
def test_a_file_that_was_cut_is_gone_on_with(share: float, place: Path) -> None:
    expected = whole()
    score()
    Path("out.jsonl").write_bytes(expected[: int(share * len(expected))])
    tally = score()
    assert Path("out.jsonl").read_bytes() == expected
    lines = expected[: int(share * len(expected))].count(b"\n")
    assert (tally.rows, tally.earlier) == (17, 17 if share == 1 else lines // 4 * 4)


def test_nothing_is_computed_twice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole()
    score()
    Path("out.jsonl").write_bytes(b"".join(expected.splitlines(keepends=True)[:13]))
    scored: list[int] = []
    inner = module._Window.score

    def watched(self: Any, *how: Any) -> Iterator[tuple[int, int]]:
        scored.append(len(self.units))
        return inner(self, *how)

    monkeypatch.setattr(module._Window, "score", watched)
    score()
    assert scored == [4, 1]
    score()
    assert scored == [4, 1]


def test_rows_that_were_added_to_the_data_are_scored(place: Path) -> None:
    score("judgement.jsonl")
    write("judgement.jsonl", FILES["judgement"] * 2)
    assert score("judgement.jsonl").rows == 10
    score("judgement.jsonl", out="anew.jsonl")
    assert Path("out.jsonl").read_bytes() == Path("anew.jsonl").read_bytes()


def small_windows() -> None:
    module.WINDOW = 8
    cli.main()


def test_a_program_that_is_killed_loses_a_window_at_most(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write("rows.jsonl", [{"prompt": f"question {i} ", "completion": f"{i * i} " * 20} for i in range(600)])
    out, program = Path("out.jsonl"), Program("score", "model", "--data", rows, "--out", "out.jsonl", main=small_windows)
    program.wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20)
    assert program.kill() == -signal.SIGKILL
    done = out.read_bytes().count(b"\n")
    monkeypatch.setattr(module, "WINDOW", 8)
    tally = score(rows)
    assert done - 8 < tally.earlier <= done < 600
    score(rows, out="whole.jsonl")
    assert out.read_bytes() == Path("whole.jsonl").read_bytes()


def test_the_command_can_be_stopped(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    expected = whole()
    lines: list[int] = []
    inner = module.Lines.write

    def stopping(self: Any, made: Any) -> None:
        if len(lines) == 2:
            raise KeyboardInterrupt
        lines.append(len(made))
        inner(self, made)

    monkeypatch.setattr(module.Lines, "write", stopping)
    words = ("score", "model", *(word for path in ALL for word in ("--data", path)), "--out", "out.jsonl")
    assert command(*words) == 130
    assert "the same command goes on from there" in capsys.readouterr().out
    assert len(read()) == 8
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr(module, "WINDOW", 4)
    assert command(*words) == 0
    assert Path("out.jsonl").read_bytes() == expected


def test_rows_are_read_as_they_are_scored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading counts them; in the second, no row is read before those of the windows before it are written."""
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


def test_what_does_not_fit_the_memory_can_be_gone_on_with(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module.load_judge.__globals__["LogProbs"], "__call__", fail)
    with pytest.raises(UserError, match="fewer --tokens"):
        score()
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr(module, "WINDOW", 4)
    score(tokens=60)
    assert len(read()) == expected.count(b"\n")


# What is refused


@pytest.mark.parametrize(("change", "said"), [
    ({"target": "other"}, "another model"),
    ({"overrides": ["reference.model=./other"]}, "another reference"),
    ({"overrides": ["model.dtype=float64"]}, "another model"),
    ({"overrides": ["data.max_length=99"]}, r"another max_length \(1024, and now 99\)"),
    ({"column": "more"}, "another column"),
])  # fmt: skip
def test_lines_of_different_settings_do_not_mix(change: dict[str, Any], said: str, place: Path) -> None:
    score("scored.jsonl")
    before = Path("out.jsonl").read_bytes()
    with pytest.raises(UserError, match=rf"(?s)out.jsonl: its lines were made with {said}.*--fresh"):
        score("scored.jsonl", **change)
    assert Path("out.jsonl").read_bytes() == before
    score("scored.jsonl", fresh=True, **change)
    assert Path("out.1.jsonl").read_bytes() == before
    assert Path("out.1.jsonl.about.json").exists()
    score("scored.jsonl", **change)


def test_another_beta_is_another_reward(place: Path) -> None:
    how: dict[str, Any] = {"overrides": ["reference.model=./other"]}
    score("scored.jsonl", beta=0.2, **how)
    with pytest.raises(UserError, match=r"another beta \(0.2, and now 0.1\)"):
        score("scored.jsonl", **how)
    with pytest.raises(UserError, match="no reward without a reference"):
        score("scored.jsonl", beta=0.2, out="new.jsonl")


def test_data_that_changed_is_seen(place: Path) -> None:
    score("scored.jsonl")
    rows = FILES["scored"]
    write("scored.jsonl", [*rows[:2], {**rows[2], "completion": "worlds"}])
    with pytest.raises(UserError, match="the data has changed"):
        score("scored.jsonl")
    write("scored.jsonl", [{**rows[0], "completion": "worlds"}, *rows[1:]])
    with pytest.raises(UserError, match=r"^scored.jsonl:1: out.jsonl:1 is not of this row, but of scored.jsonl:1 as that was"):
        score("scored.jsonl")
    write("scored.jsonl", [{**rows[0], "completion": ""}, *rows[1:]])
    with pytest.raises(UserError, match=r"^scored.jsonl:1: out.jsonl:1 is not of this row"):
        score("scored.jsonl")
    write("scored.jsonl", rows[:2])
    with pytest.raises(UserError, match="the file has 3 lines, and there are only 2 rows"):
        score("scored.jsonl")


@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize("line", [
    b"garbage", b"\xff\xfe", b"[1]", b"{}", b"", b"[" * 9999, b'{"origin": 1}', b'{"origin" nonsense', b'{"valence": 1}',
    b'{"origin": "rows.jsonl:1", "answers": []}', b'{"valence": {"origin": "rows.jsonl:1"}}',
    b'{"valence": {"origin": 1, "answers": []}}', b'{"valence": {"origin": [], "error": "", "fix": ""}}',
])  # fmt: skip
def test_lines_that_were_edited_are_refused(line: bytes, number: int, place: Path) -> None:
    rows = write("rows.jsonl", FILES["judgement"] * 3)
    score(rows)
    lines = Path("out.jsonl").read_bytes().split(b"\n")[:11]  # the last ones are no whole window
    lines[number] = line
    Path("out.jsonl").write_bytes(edited := b"\n".join(lines))
    with pytest.raises(UserError, match=rf"^out.jsonl:{number + 1}: .*\n.*--fresh"):
        score(rows)
    assert Path("out.jsonl").read_bytes() == edited
    assert score(rows, fresh=True).earlier == 0


def test_a_number_that_has_changed_is_refused_and_named(place: Path) -> None:
    """Also where the line is still one that this command could have written."""
    rows = write("rows.jsonl", FILES["judgement"] * 3)
    score(rows)
    whole = Path("out.jsonl").read_bytes().split(b"\n")[:11]
    lines = [*whole[:4], re.sub(rb'("logp": -?\d)', rb"\g<1>1", whole[4], count=1), *whole[5:]]
    Path("out.jsonl").write_bytes(b"\n".join(lines))
    assert lines[4] != whole[4]
    with pytest.raises(UserError, match=r"^out.jsonl:5: .*checksum"):
        score(rows)
    Path("out.jsonl").write_bytes(b"\n".join(whole[:4]) + b"\n")  # as the error advises
    assert score(rows).rows == len(FILES["judgement"]) * 3


def test_a_file_without_its_checksums_is_not_gone_on_with(place: Path) -> None:
    score("scored.jsonl")
    Path("out.jsonl.crc").unlink()
    kept = Path("out.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"out.jsonl.crc.*\n.*--fresh"):
        score("scored.jsonl")
    assert Path("out.jsonl").read_bytes() == kept


def test_facts_whose_checksum_is_wrong_are_refused(place: Path) -> None:
    score("scored.jsonl")
    about = Path("out.jsonl.about.json")
    about.write_text(about.read_text().replace('"long_rows": "', '"long_rows": "x', 1))
    with pytest.raises(UserError, match=r"^out.jsonl.about.json: .*checksum"):
        score("scored.jsonl")


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"about": {}}', '{"about": 1}', '{"m":', "[" * 9999])
def test_facts_that_were_edited_are_refused(text: str, place: Path) -> None:
    score("scored.jsonl")
    Path("out.jsonl.about.json").write_text(text)
    for target in ("model", "other"):
        with pytest.raises(UserError, match=r"^out.jsonl(.about.json)?: .*\n.*--fresh"):
            score("scored.jsonl", target=target)
    assert Path("out.jsonl.about.json").read_text() == text


@pytest.mark.parametrize("more", [{"reference": 1}, {"another": 1}, {"reference": None, "another": None}])
def test_facts_are_those_that_are_expected(more: dict[str, Any], place: Path) -> None:
    score("scored.jsonl")
    about = Path("out.jsonl.about.json")
    facts = json.loads(about.read_text())
    about.write_text(json.dumps(add_checksum({name: value for name, value in facts.items() if name != "reference"} | more)))
    with pytest.raises(UserError, match=r"another reference|does not say what the lines of out.jsonl depend on"):
        score("scored.jsonl")


@pytest.mark.parametrize(("out", "said"), [
    ("scored.jsonl", "is read and cannot be written as well"),
    ("judgement.jsonl", "was not written by this command"),
    ("new.json", "ends in .jsonl"),
    ("no/new.jsonl", "there is no folder no"),
])  # fmt: skip
def test_a_file_that_cannot_be_had_is_refused_before_a_model_is_loaded(
    out: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_judge", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=said):
        score("scored.jsonl", out=out)


def test_two_programs_do_not_write_one_file(place: Path) -> None:
    score("scored.jsonl")
    with Path("out.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another program is writing"):
            score("scored.jsonl")


def test_facts_that_change_while_a_model_is_loaded_are_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = module.load_judge

    def slow(*how: Any, **more: Any) -> Any:
        monkeypatch.setattr(module, "load_judge", inner)
        score("scored.jsonl", target="other")
        return inner(*how, **more)

    monkeypatch.setattr(module, "load_judge", slow)
    with pytest.raises(UserError, match="another model"):
        score("scored.jsonl")
    score("scored.jsonl", target="other")


def test_a_file_is_not_moved_aside_while_it_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, refused = module.Lines.write, list[str]()

    def meanwhile(self: Any, made: Any) -> None:
        inner(self, made)
        monkeypatch.setattr(module.Lines, "write", inner)
        with pytest.raises(UserError, match="another program is writing") as error:
            score(target="other", fresh=True)
        refused.append(str(error.value))

    monkeypatch.setattr(module.Lines, "write", meanwhile)
    score()
    assert len(refused) == 1
    assert (len(read()), list(place.glob("out.1*"))) == (17, [])


def test_a_file_that_was_moved_aside_before_its_lock_is_not_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score("scored.jsonl")
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        Path("out.jsonl").rename("moved.jsonl")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="another program is writing"):
        score("scored.jsonl")


def test_a_full_disk_is_said_so_and_gone_on_from(place: Path) -> None:
    rows = write("rows.jsonl", [{"prompt": f"{i} ", "completion": "yes", "more": "x" * 1000} for i in range(50)])
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"^out.jsonl: cannot write \(File too large\)"):
            score(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert 20 < score(rows).earlier < 50
    assert len(read()) == 50
