"""Help, and what a shell completes: all that there is, without waiting for torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tests.command import command as valence
from valence import cli
from valence.cli import complete
from valence.cli.guide import COMMANDS, HELP
from valence.training.methods import METHODS, ONLINE


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, valence.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_every_command_is_in_the_help_with_a_panel_a_plain_sentence_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {command.name: command for command in get_command(cli.app).commands.values()}  # type: ignore[attr-defined]
    assert list(commands) == list(COMMANDS)
    assert valence("--help") == 0
    shown = capsys.readouterr().out
    for name, command in commands.items():
        panel, example = COMMANDS[str(name)]
        assert f"{panel} " in shown
        assert command.help.split("\n")[0][0].isupper()
        words = shlex.split(example)
        assert words[:2] == ["valence", name]
        command.make_context(str(name), words[2:])  # the command takes these words
        assert example in command.epilog
    assert all(f"`{name}`" in HELP for name in ("kto", "dpo", "sft", "grpo"))


SHELLS = ("bash", "zsh", "fish")


def completed(shell: str, line: str, place: Path) -> list[str]:
    """What a shell is told when the last word of a line is to be completed, by a process that may load no torch."""
    code = (
        "import sys, valence.cli\nsys.argv = ['valence']\ntry:\n    valence.cli.main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    asked = {
        "_VALENCE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line.replace("=", " = "), "_TYPER_COMPLETE_ARGS": line,
        "COMP_CWORD": str(len(line.replace("=", " = ").split(" ")) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    if shell == "zsh":
        return re.findall(r'^(?:_arguments .\*: :\(\()?"([^"]*)"', done.stdout, re.MULTILINE)
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two recipes, and a run's folder with the settings it keeps."""
    for name in ("one.yaml", "more/two.yml", "more/rows.jsonl", "runs/first/run.json", "runs/first/config.yaml", ".hid/x.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_names_of_settings(shell: str, files: Path) -> None:
    assert completed(shell, "valence tr", files) == ["train"]
    assert {"--fresh", "--json"} <= set(completed(shell, "valence train --", files))
    assert completed(shell, "valence train one.yaml train.see", files) == ["train.seed="]


@pytest.mark.parametrize(("line", "found"), [
    ("valence check ", ["one.yaml", "more/two.yml"]),
    ("valence check ./mo", ["./more/two.yml"]),
    ("valence resume ", ["runs/first"]),
    ("valence resume runs/first/", ["runs/first/"]),
    ("valence evaluate r", ["runs/first"]),
    ("valence losses online_k", ["online_kto"]),
    ("valence rewards ex", ["exact_match"]),
    ("valence train one.yaml train.schedule=co", ["cosine", "constant"]),
    ("valence train one.yaml train.compile=o", ["on", "off"]),
    ("valence train nowhere/x", []),
])  # fmt: skip
def test_a_shell_completes_files_and_names(line: str, found: list[str], files: Path) -> None:
    assert completed("bash", line, files) == found


def test_methods_are_those_that_there_are() -> None:
    assert sorted(complete.methods("")) == sorted({*METHODS, *ONLINE})
