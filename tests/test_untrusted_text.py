"""Untrusted text (rows, file names, settings, model output, errors) cannot control the terminal."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.command import command, place
from valence import terminal
from valence.errors import UserError
from valence.types import Completion

__all__ = ["place"]

CONTROLS = "\x1b[2J\x1b]0;title\x07\x08\r\x7f\x9b31m\u202e\u2066\u200f\u200b\u2028"
MARKUP = "[/x][bold][link=http://x]:smile:"
HOSTILE = f"{MARKUP} {CONTROLS} end"
NAME = f"{MARKUP.replace('/', '')}{CONTROLS}"
"""The same as a file name."""


def assert_harmless(shown: str) -> None:
    """No character of the text steers a terminal or hides, and no markup was interpreted on the way
    to an error.
    """
    raw = {c for c in shown if unicodedata.category(c) in terminal.UNPRINTABLE and c not in "\n\t"}
    assert not raw, f"{raw} in {shown}"
    assert "MarkupError" not in shown
    assert "Traceback" not in shown


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert command(*words) == status, capsys.readouterr().err
    captured = capsys.readouterr()
    assert_harmless(captured.out + captured.err)
    return captured.out + captured.err


@pytest.fixture
def hostile_place(place: Path) -> Path:
    """A recipe whose file names, run folder, rows and columns are hostile."""
    rows = [
        {
            "prompt": f"{HOSTILE} {i}",
            "completion": f"{HOSTILE} {i * 7}",
            "label": i % 2 == 0,
            HOSTILE: HOSTILE,
            "info": {HOSTILE: HOSTILE},
        }
        for i in range(8)
    ]  # fmt: skip
    rows += [{**rows[0], "label": HOSTILE}, rows[1], {**rows[2], "label": not rows[2]["label"]}]
    (place / f"{NAME}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    recipe = {
        "method": "kto",
        "model": {"name": "./model", "lora": {"rank": 2}},
        "data": {
            "train": [{"path": f"{NAME}.jsonl"}],
            "eval": [{"path": f"{NAME}.jsonl", "limit": 6}],
            "max_length": 500,
            "on_bad_row": "skip",
        },
        "train": {"batch_size": 5},
        "run": {"dir": f"runs/{NAME}", "samples": {"prompts": 1, "max_new_tokens": 8}},
    }
    (place / f"{NAME}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return place


def test_no_command_prints_what_rows_names_and_columns_hold(
    hostile_place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = f"{NAME}.yaml", f"runs/{NAME}"
    assert "[/x]" in run(capsys, "check", recipe, "--all")
    for row, status in ((1, 0), (9, 2), (99, 2)):
        run(capsys, "inspect", recipe, "--row", str(row), status=status)
    run(capsys, "doctor", recipe)
    run(capsys, "doctor", recipe, "--json")
    run(capsys, "train", recipe)
    run(capsys, "train", recipe)
    shutil.copytree(hostile_place / folder, hostile_place / "runs/other")
    for words in (
        ("report",),
        ("report", "--json"),
        ("report", folder),
        ("report", folder, "--md"),
        ("report", folder, "runs/other"),
        ("report", folder, "runs/other", "--md"),
        ("evaluate", folder),
    ):
        run(capsys, *words)
    run(capsys, "sample", folder, "--prompt", HOSTILE, "--max-new-tokens", "24", "-n", "3")
    run(
        capsys,
        "sample",
        folder,
        "--prompt",
        HOSTILE,
        "--max-new-tokens",
        "2",
        "--out",
        f"{NAME}-answers.jsonl",
    )
    run(
        capsys,
        "score",
        "model",
        "--data",
        f"{NAME}.jsonl",
        "--out",
        f"{NAME}-scores.jsonl",
        status=2,
    )
    run(capsys, "export", folder, f"{NAME}-model")
    hostile_answer = Completion("x", (1,), (0.0,), HOSTILE, "eos")
    monkeypatch.setattr(
        "valence.jobs.sample_rows.answers", lambda *_, **__: [(HOSTILE, hostile_answer)]
    )
    assert "[/x]" in run(capsys, "sample", folder, "--prompt", "x")


def test_streamed_records_and_errors_are_harmless(
    hostile_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = f"{NAME}.yaml"
    out = run(capsys, "train", recipe, "--json", "--quiet", "train.epochs=0.5")
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert records[0]["run"] == f"runs/{NAME}"
    for words in (
        ("check", f"{HOSTILE}.yaml"),
        ("check", recipe, f"train.{HOSTILE}=1"),
        ("check", recipe, f"method={HOSTILE}"),
        ("check", recipe, f"model.name=./{HOSTILE}"),
        ("check", recipe, f"train.optimizer={HOSTILE}"),
        ("check", recipe, f"--{HOSTILE}"),
        ("check", recipe, "--nproc", HOSTILE),
        (HOSTILE,),
        ("docs", HOSTILE),
        ("report", HOSTILE),
        ("evaluate", HOSTILE),
        ("sample", HOSTILE, "--prompt", "x"),
        ("train", HOSTILE),
        ("export", HOSTILE, HOSTILE),
        ("export", f"runs/{NAME}", "to", "--step", HOSTILE),
        ("score", "--reward", HOSTILE, "--data", f"{NAME}.jsonl", "--out", "o.jsonl"),
        ("train", recipe, "train.seed=3"),
        ("doctor", HOSTILE),
    ):
        run(capsys, *words, status=2)


def test_errors_of_a_reward_are_harmless(
    hostile_place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(hostile_place))
    (hostile_place / "hostile_reward.py").write_text(
        f"def fails(prompts, completions, **_):\n    raise ValueError({HOSTILE!r})\n"
        f"def some(prompts, completions, **_):\n    return [1.0 if i else {HOSTILE!r} for i, _ "
        f"in enumerate(completions)]\n",
        encoding="utf-8",
    )
    answers = [{"prompt": f"{i}{HOSTILE}", "completion": f"{i}{HOSTILE}"} for i in range(4)]
    (hostile_place / "answers.jsonl").write_text(
        "".join(json.dumps(answer) + "\n" for answer in answers)
    )
    for name, status in (("fails", 2), ("some", 0)):
        reward = f"{{reward: 'hostile_reward:{name}', retries: 0}}"
        words = (
            "score",
            "model",
            "--reward",
            reward,
            "--data",
            "answers.jsonl",
            "--out",
            f"{name}.jsonl",
        )
        assert "[/x]" in run(capsys, *words, status=status)


def test_a_traceback_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError(HOSTILE)
    terminal.print_traceback(ValueError, error, None)
    shown = capsys.readouterr().err
    assert_harmless(shown.replace("Traceback", ""))
    assert "[/x]" in shown


@pytest.mark.parametrize(
    "pattern",
    [
        "[/x]",
        pytest.param("[bold", marks=pytest.mark.slow),
        pytest.param(r"\[a-z]+[/]", marks=pytest.mark.slow),
        pytest.param(":smile:", marks=pytest.mark.slow),
    ],
)
def test_check_shows_a_setting_that_looks_like_markup(
    pattern: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(6))
    )
    reward = json.dumps(
        [{"reward": "regex", "settings": {"pattern": pattern if pattern != "[bold" else r"\[bold"}}]
    )
    words = (
        "check",
        "recipe.yaml",
        "method=grpo",
        "data.train=prompts.jsonl",
        "data.eval=[]",
        "rollout.max_new_tokens=8",
        f"reward={reward}",
    )
    assert pattern.split("+")[0] in run(capsys, *words).replace("\\\\", "\\")


def test_a_console_escapes_whatever_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal.Terminal()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for item in (HOSTILE, Text(HOSTILE), table):
        console.print(item)
    console.rule(HOSTILE)
    terminal.print_message(Console(), HOSTILE)
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert shown.count("[/x]") >= 6


def test_styles_stay_on_their_characters() -> None:
    text = Text.assemble("a\x1b", ("b\u202ec", "red"), "d")
    escaped = terminal.escape_text(text)
    assert escaped.plain == "a␛b<U+202E>cd"
    assert [escaped.plain[span.start : span.end] for span in escaped.spans] == ["b<U+202E>c"]


def test_json_lines_say_the_same_without_raw_controls() -> None:
    value = {HOSTILE: [HOSTILE, "日本 é"], "surrogate": "\ud800"}
    line = terminal.json_line(value)
    assert_harmless(line)
    assert "日本 é" in line
    assert json.loads(line) == value


def test_an_error_cannot_add_lines_of_its_own() -> None:
    shown = str(UserError("bad\nvalence: all is well", code="x", where="a\nvalence: b", fix="look"))
    assert [line for line in shown.splitlines() if line.startswith("valence:")] == []
