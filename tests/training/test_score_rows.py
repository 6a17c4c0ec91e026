"""Scores written beside rows of any format: the numbers, and that nothing is lost, doubled or mixed up when it is stopped."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import valence
from tests.models import tiny
from tests.tiny import tiny_tokenizer
from valence import cli
from valence.config.schema import Lora, Source
from valence.data.load import load, stream
from valence.engine.adapters import with_adapter
from valence.engine.models import load_model
from valence.errors import UserError
from valence.training import score_rows as module
from valence.training.score_rows import score_rows

ROOT = Path(__file__).parents[2]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
FILES: dict[str, list[dict[str, Any]]] = {
    "judgement": [{"prompt": ASKED, "completion": f"answer {i}", "label": i % 2 == 0, "who": i} for i in range(5)],
    "preference": [{"prompt": f"question {i} ", "chosen": f"good {i} " * 3, "rejected": "bad"} for i in range(4)],
    "demonstration": [{"messages": [*ASKED, {"role": "assistant", "content": f"Paris {i}"}]} for i in range(3)],
    "ranking": [{"prompt": "1 + 1 = ", "completions": ["2", "3 or so", "hello"], "scores": [2.5, 1, 0]} for _ in range(2)],
    "scored": [{"prompt": f"hello {i} ", "completion": "world", "score": i / 2} for i in range(3)],
}


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return name


def read(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and a file of each kind of rows, which is the current one. Windows are small."""
    tokenizer = tiny_tokenizer()
    for name, seed in (("model", 0), ("other", 1)):
        tiny(vocab_size=len(tokenizer), dtype=torch.float32, seed=seed).save_pretrained(tmp_path / name)  # type: ignore[operator]
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setattr(cli, "console", cli.Console(width=200))
    for name, rows in FILES.items():
        write(f"{name}.jsonl", rows)
    return tmp_path


ALL = [f"{name}.jsonl" for name in FILES]


def score(*data: str, target: str = "model", out: str = "out.jsonl", **how: Any) -> module.Tally:
    return score_rows(target, data or ALL, Path(out), quiet=True, **how)


def one_by_one(name: str, kind: Any, row: dict[str, Any]) -> list[Any]:
    return valence.logprobs(load_model(name, dtype=torch.float32), [row], kind=kind)


# The numbers


def test_every_answer_of_every_kind_has_the_numbers_it_has_alone(place: Path) -> None:
    score(overrides=["reference.model=./other"], beta=0.3, tokens=150)
    expected = [(kind, row) for kind, rows in FILES.items() for row in rows]
    found = read()
    assert [len(line["valence"]["answers"]) for line in found] == [1] * 5 + [2] * 4 + [1] * 3 + [3] * 2 + [1] * 3
    for line, (kind, row) in list(zip(found, expected, strict=True))[::2]:
        assert list(line) == [*row, "valence"]
        assert {name: line[name] for name in row} == row
        alone = zip(one_by_one("model", kind, row), one_by_one("other", kind, row), strict=True)
        for answer, (policy, ref) in zip(line["valence"]["answers"], alone, strict=True):
            assert answer["tokens"] == len(policy.tokens)
            for name, value in {
                "logp": policy.total, "mean_logp": policy.total / len(policy.tokens), "ref": ref.total,
                "logratio": policy.total - ref.total, "reward": 0.3 * (policy.total - ref.total),
            }.items():  # fmt: skip
                assert answer[name] == pytest.approx(value, abs=2e-4), name
    assert [a["answer"] for a in found[5]["valence"]["answers"]] == ["chosen", "rejected"]
    assert found[6]["valence"]["origin"] == "preference.jsonl:2"


def test_a_model_has_no_reward_against_itself(place: Path) -> None:
    score("preference.jsonl", overrides=["reference.model=./model"])
    assert {answer["reward"] for line in read() for answer in line["valence"]["answers"]} == {0.0}


def test_what_is_written_is_data_again(place: Path) -> None:
    score("preference.jsonl", out="once.jsonl")
    before, after = (load([Source(path=path)], "preference").examples for path in ("preference.jsonl", "once.jsonl"))
    assert [example.id for example in after] == [example.id for example in before]
    with pytest.raises(UserError, match=r"once.jsonl:1: the row has a column 'valence' already\n.*--column"):
        score("once.jsonl")
    with pytest.raises(UserError, match="formats of rows have a column 'scores'"):
        score("once.jsonl", column="scores")
    score("once.jsonl", column="second", target="other")
    assert [*read()[0]] == ["prompt", "chosen", "rejected", "valence", "second"]
    assert read()[0]["second"]["answers"] != read()[0]["valence"]["answers"]


def test_rows_that_stand_in_one_line_are_told_apart(place: Path) -> None:
    rows = [{"prompt": "hello", "completion": " " + "a" * n} for n in (1, 2)]
    Path("rows.json").write_text(f"[\n{json.dumps(rows[0])}, {json.dumps(rows[1])}\n]")
    score("rows.json", "rows.json")
    tokens = [line["valence"]["answers"][0]["logp"] for line in read()]
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]


def test_columns_of_other_names_are_given_with_the_file(place: Path) -> None:
    write("named.jsonl", [{"q": f"question {i}", "a": " yes", "prompt": None} for i in range(3)])
    score("{path: named.jsonl, keys: {prompt: q, completion: a}, limit: 2}")
    assert [line["q"] for line in read()] == ["question 0", "question 1"]
    with pytest.raises(UserError, match="no row has a column 'b'"):
        score("{path: named.jsonl, keys: {prompt: q, completion: a, weight: b}}", out="2.jsonl")
    write("both.jsonl", [{"prompt": "1", "completion": "2", "chosen": "3", "rejected": "4"}])
    score("both.jsonl", out="3.jsonl", format="preference")
    assert len(read("3.jsonl")[0]["valence"]["answers"]) == 2


# Rows without numbers


def test_rows_that_cannot_be_scored_say_why_in_their_place(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"prompt": "hello", "completion": " world", "label": True}
    rows: list[Any] = ['{"prompt": ', good, {**good, "label": "maybe"}, good, {**good, "completion": " a b" * 99}]
    write("rows.jsonl", rows)
    write("good.jsonl", [good])
    tally = score_rows("model", ["rows.jsonl", "good.jsonl"], Path("out.jsonl"), overrides=["data.max_length=64"])
    assert (tally.rows, tally.failed) == (6, 3)
    lines = read()
    assert list(lines[0]) == ["origin", "error", "fix"]
    assert [{**line, "valence": None} for line in lines[2::2]] == [{**row, "valence": None} for row in rows[2::2]]
    errors = [lines[0], lines[2]["valence"], lines[4]["valence"]]
    assert [list(said) for said in errors[1:]] == [["origin", "error", "fix"], ["origin", "id", "error", "fix"]]
    assert [said["origin"] for said in errors] == [f"rows.jsonl:{n}" for n in (1, 3, 5)]
    for found, said in zip(errors, ("not valid JSON", "label is 'maybe'", "data.max_length is 64"), strict=True):
        assert said in found["error"]
    alone = one_by_one("model", "judgement", good)[0].total
    for line in lines[1::2]:
        assert [answer["logp"] for answer in line["valence"]["answers"]] == pytest.approx([alone], abs=2e-4)
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 of 6 rows are scored in out.jsonl" in shown
    assert "3 have an error there instead: rows.jsonl:1: the line is not valid JSON" in shown
    again = score("rows.jsonl", "good.jsonl", overrides=["data.max_length=64"])
    assert (again.rows, again.failed, again.earlier) == (6, 3, 6)


def test_numbers_that_are_not_finite_are_an_error_of_the_row(place: Path) -> None:
    model: Any = load_model("model", dtype=torch.float32)
    model.get_output_embeddings().weight.data[5:] = float("nan")
    model.save_pretrained("broken")
    tiny_tokenizer().save_pretrained("broken")
    with pytest.raises(UserError, match="none of 3 rows could be scored.*not finite"):
        score_rows("broken", ["scored.jsonl"], Path("out.jsonl"))
    assert all("not finite" in line["valence"]["error"] and line["valence"]["id"] for line in read())
    again, first = (load([Source(path=path)], "scored").examples for path in ("out.jsonl", "scored.jsonl"))
    assert [example.id for example in again] == [example.id for example in first]


def test_a_row_that_json_cannot_hold_has_an_error_alone(place: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"{i} ", "completion": "yes", "more": float("nan") if i == 1 else i} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    score("rows.parquet")
    assert [list(line) for line in read()[:2]] == [[*rows[0], "valence"], ["origin", "id", "error", "fix"]]
    assert "cannot be written as JSON" in read()[1]["error"]
    assert score("rows.parquet").earlier == 3


def test_what_has_been_cut_is_noted(place: Path) -> None:
    write("long.jsonl", [{"prompt": "hello", "completion": " a b" * 50}])
    score("long.jsonl", overrides=["data.max_length=20", "data.long_rows=cut_completion"])
    assert read()[0]["valence"]["notes"] == ["cut_completion"]


# Stopping and going on


def whole() -> bytes:
    score(out="whole.jsonl")
    return Path("whole.jsonl").read_bytes()


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


def test_a_program_that_is_killed_loses_a_window_at_most(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write("rows.jsonl", [{"prompt": f"question {i} ", "completion": f"{i * i} " * 20} for i in range(600)])
    call = f"from valence.training import score_rows as m; m.WINDOW = 8; m.score_rows('model', ['{rows}'], m.Path('out.jsonl'))"
    process = subprocess.Popen(
        [sys.executable, "-c", call], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    out, until = Path("out.jsonl"), time.monotonic() + 200
    while time.monotonic() < until and not (out.exists() and out.read_bytes().count(b"\n") > 20) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
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
    with pytest.raises(UserError, match=rf"^out.jsonl:{number + 1}: this line was not written by this command\n.*--fresh"):
        score(rows)
    assert Path("out.jsonl").read_bytes() == edited
    assert score(rows, fresh=True).earlier == 0


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
    about.write_text(json.dumps({name: value for name, value in facts.items() if name != "reference"} | more))
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


def test_rows_without_answers_are_refused(place: Path) -> None:
    write("prompts.jsonl", [{"prompt": "hello", "said": "world"}])
    with pytest.raises(UserError, match=r"prompts.jsonl:1: the rows are prompts.*\n.*keys: {completion: COLUMN}"):
        score("prompts.jsonl")


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


def test_a_reference_of_other_tokens_is_refused(place: Path) -> None:
    tokenizer = tiny_tokenizer(chatml_tokens=False)
    tokenizer.save_pretrained("other")
    with pytest.raises(UserError, match="different tokenizers"):
        score("scored.jsonl", overrides=["reference.model=./other"])


def test_a_table_of_positions_is_not_overrun(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny("gpt2", vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained("gpt2")  # type: ignore[operator]
    tokenizer.save_pretrained("gpt2")
    with pytest.raises(UserError, match=r"positions for 256 tokens\n.*--max-length 256"):
        score("scored.jsonl", target="gpt2")
    score("scored.jsonl", target="gpt2", overrides=["data.max_length=256"])


# Targets


RECIPE = (
    "method: apo_zero_unpaired\n"
    "model: {name: ./model, lora: {rank: 2, dropout: 0.3}}\n"
    "loss: {beta: 0.4}\n"
    "data: {train: judgement.jsonl, max_length: 128}\n"
    "train: {batch_size: 5, learning_rate: 1e-2, epochs: 2}\n"
    "run: {dir: run, export: adapter}\n"
)


def answers(name: str) -> list[dict[str, float]]:
    return [answer for line in read(name) for answer in line["valence"]["answers"]]


def test_a_run_is_scored_with_its_weights_and_its_reference(place: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    run = valence.train("recipe.yaml", quiet=True)
    score("judgement.jsonl", target="run", out="run.jsonl")
    rewards = [row["reward"] for row in run.evaluate(FILES["judgement"]).rows]
    assert [answer["reward"] for answer in answers("run.jsonl")] == pytest.approx(rewards, abs=1e-4)
    assert any(rewards)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*packed sequences")
        score("judgement.jsonl", target="run/model", out="adapter.jsonl", overrides=["reference.model=./model"], beta=0.4)
    score("judgement.jsonl", target="run/model", out="narrow.jsonl", overrides=["model.dtype=bfloat16"])
    close = pytest.approx([a["logp"] for a in answers("adapter.jsonl")], abs=2.0)
    assert [a["logp"] for a in answers("narrow.jsonl")] == close
    assert [answer["reward"] for answer in answers("adapter.jsonl")] == pytest.approx(rewards, abs=1e-4)
    score("judgement.jsonl", target="model", out="model.jsonl")
    assert [answer["logp"] for answer in answers("model.jsonl")] == pytest.approx(
        [a["ref"] for a in answers("run.jsonl")], abs=1e-4
    )
    score("judgement.jsonl", target="run", out="against.jsonl", overrides=["reference.model=./other"])
    assert answers("against.jsonl")[0]["ref"] != answers("run.jsonl")[0]["ref"]


def test_a_recipe_says_what_the_call_leaves_open(place: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE + "reference: {model: ./other}\n")
    score("judgement.jsonl", target="recipe.yaml", out="recipe.jsonl")
    score("judgement.jsonl", out="plain.jsonl", overrides=["reference.model=./other"], beta=0.4)
    assert answers("recipe.jsonl") == answers("plain.jsonl")
    assert json.loads(Path("recipe.jsonl.about.json").read_text())["max_length"] == 128
    assert not Path("run").exists()


@pytest.mark.parametrize("named", [("reward",), ("clear", "kind")])
def test_a_reward_model_scores_answers(named: tuple[str, ...], place: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained("model", num_labels=len(named), id2label=dict(enumerate(named)))
    config.update({"reward_mean": [0.5] * len(named), "reward_std": [2.0] * len(named)})
    model: Any = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained("judge")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained("judge")
    score("preference.jsonl", "judgement.jsonl", target="judge")
    lines = read()
    assert [len(line["valence"]["answers"]) for line in lines] == [2] * 4 + [1] * 5
    for line in lines[:4]:
        for answer in line["valence"]["answers"]:
            texts = line["prompt"], line[answer["answer"]]
            ids = [token for text in texts for token in tokenizer(text).input_ids] + [tokenizer.eos_token_id]
            expected = model(torch.tensor([ids])).logits[0].tolist()
            found = [answer["score"]] if len(named) == 1 else [answer["score"][name] for name in named]
            assert found == pytest.approx(expected, abs=1e-4)
            scaled = [answer["normalised"]] if len(named) == 1 else [answer["normalised"][name] for name in named]
            assert scaled == pytest.approx([(value - 0.5) / 2 for value in expected], abs=1e-4)
    with pytest.raises(UserError, match="compared with no other"):
        score("preference.jsonl", target="judge", out="2.jsonl", overrides=["reference.model=./model"])


def test_a_reward_model_is_scored_as_a_run_and_as_what_it_wrote(place: Path) -> None:
    Path("recipe.yaml").write_text(
        "method: pointwise\n"
        "model: {name: ./model}\n"
        "data: {train: judgement.jsonl}\n"
        "train: {batch_size: 5, learning_rate: 1e-2, epochs: 2}\n"
        "run: {dir: run}\n"
    )
    with pytest.raises(UserError, match="random head"):
        score("judgement.jsonl", target="recipe.yaml")
    valence.train("recipe.yaml", quiet=True)
    score("judgement.jsonl", target="run", out="run.jsonl")
    score("judgement.jsonl", target="run/model", out="model.jsonl")
    assert [a["score"] for a in answers("run.jsonl")] == pytest.approx([a["score"] for a in answers("model.jsonl")], abs=1e-4)
    scaled = torch.tensor([a["normalised"] for a in answers("model.jsonl")])
    assert scaled.mean().item() == pytest.approx(0, abs=1e-3)
    assert scaled.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_an_adapter_of_a_reward_model_is_refused(place: Path) -> None:
    scores = load_model("model", dtype=torch.float32, attributes=("good",))
    with_adapter(scores, Lora(rank=2), None).save_pretrained("adapter")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"'adapter' is of a reward model, and the model has no head for scores\n.*merged"):
        score("scored.jsonl", target="adapter")


@pytest.mark.parametrize(("method", "loss"), [("simpo", "beta: 2.5"), ("ipo", "tau: 0.3"), ("dpo_norm", "beta: 3.0")])
def test_a_run_is_scored_with_the_reward_that_it_trains(method: str, loss: str, place: Path) -> None:
    Path("recipe.yaml").write_text(
        f"method: {method}\n"
        "model: {name: ./model}\n"
        f"loss: {{{loss}}}\n"
        "data: {train: preference.jsonl}\n"
        "train: {batch_size: 4, learning_rate: 1e-2, max_steps: 2}\n"
        "run: {dir: run}\n"
    )
    run = valence.train("recipe.yaml", quiet=True)
    score("preference.jsonl", target="run")
    rewards = [row[f"reward_{side}"] for row in run.evaluate(FILES["preference"]).rows for side in ("chosen", "rejected")]
    assert [answer["reward"] for answer in answers("out.jsonl")] == pytest.approx(rewards, abs=1e-4)
    assert min(map(abs, rewards)) > 1e-3
    facts = json.loads(Path("out.jsonl.about.json").read_text())
    assert [f"{name}: {facts[name]}" for name in ("beta", "tau") if name in facts] == [loss]
    with pytest.raises(UserError, match=rf"--beta: a run of {method} is scored with the reward that it trains"):
        score("preference.jsonl", target="run", out="2.jsonl", beta=0.1)


# The command


def command(*words: str) -> int:
    before, sys.argv = sys.argv, ["valence", *words]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("score", "./model", "--data", "preference.jsonl", "--data", "scored.jsonl", "--out", "out.jsonl")
    more = ("--reference", "./other", "--beta", "0.5", "--dtype", "float64", "--max-length", "99", "--tokens", "64")
    assert command(*words, *more) == 0
    shown = capsys.readouterr().out
    assert "7 rows; loading and checking ./model" in shown
    assert "scoring 7/7" in shown
    assert "7 of 7 rows are scored in out.jsonl" in shown
    answer = read()[0]["valence"]["answers"][0]
    assert answer["reward"] == pytest.approx(0.5 * (answer["logp"] - answer["ref"]), abs=1e-5)
    assert command(*words, "--fresh", "--quiet", "--column", "seen") == 0
    assert "seen" in read()[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [
    ("model",), ("model", "--data", "scored.jsonl"), ("model", "--out", "out.jsonl"), ("recipe.yaml", "--reference", "other"),
    ("model", "--data", "scored.jsonl", "--out", "out.jsonl", "--verify", "3"),
])  # fmt: skip
def test_half_a_command_is_refused(words: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", *words) == 2
    assert "--data FILE and --out FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "said"), [
    ("scored.jsonl", "this is a file"), ("./nowhere", "there is no folder"), ("no.yaml", "there is no such recipe"),
])  # fmt: skip
def test_a_target_that_is_none(target: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", target, "--data", "scored.jsonl", "--out", "out.jsonl") == 2
    assert said in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
