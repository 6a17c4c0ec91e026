"""Help and shell completion: complete, and without importing torch."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from tests.arch.source import ROOT
from tests.command import command as valence
from valence import cli, completion
from valence.cli.guide import COMMANDS, HELP
from valence.methods import METHODS, ONLINE


def test_help_and_completion_do_not_wait_for_torch() -> None:
    """In a separate process, as this one has imported torch."""
    code = """
import sys
from valence import cli
from valence import completion
assert completion.methods("online_k") == ["online_kto"]
sys.argv = ["valence", "train", "--help"]
try:
    cli.main()
finally:
    assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_every_command_is_in_the_help_with_a_panel_a_plain_sentence_and_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


@pytest.fixture
def completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], list[str]]:
    """The completions that a shell receives for the last word of a line.

    In a folder with two recipes, and a run's folder with the settings it keeps.
    """

    def complete_line(shell: str, line: str) -> list[str]:
        words = line.replace("=", " = ")
        variables = {
            "_VALENCE_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "COLUMNS": "80",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # else it is pytest's
        valence()
        shown = capsys.readouterr().out
        if shell == "zsh":
            return re.findall(r'^(?:_arguments .\*: :\(\()?"([^"]*)"', shown, re.MULTILINE)
        return [line.split("\t")[0] for line in shown.splitlines() if line]

    for name in (
        "one.yaml",
        "more/two.yml",
        "more/rows.jsonl",
        "runs/first/run.json",
        "runs/first/config.yaml",
        ".hid/x.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return complete_line


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_names_of_settings(
    shell: str, completed: Callable[[str, str], list[str]]
) -> None:
    assert completed(shell, "valence tr") == ["train"]
    assert {"--fresh", "--json"} <= set(completed(shell, "valence train --"))
    assert completed(shell, "valence train one.yaml train.see") == ["train.seed="]


@pytest.mark.parametrize(("line", "results"), [
    ("valence check ", ["one.yaml", "more/two.yml"]),
    ("valence check ./mo", ["./more/two.yml"]),
    ("valence train ", ["runs/first", "one.yaml", "more/two.yml"]),
    ("valence train runs/first/", ["runs/first/"]),
    ("valence evaluate r", ["runs/first"]),
    ("valence docs online_k", ["online_kto"]),
    ("valence docs exact", ["exact_match"]),
    ("valence train one.yaml train.schedule=co", ["cosine", "constant"]),
    ("valence train one.yaml train.compile=o", ["on", "off"]),
    ("valence train nowhere/x", []),
])  # fmt: skip
def test_a_shell_completes_files_and_names(
    line: str, results: list[str], completed: Callable[[str, str], list[str]]
) -> None:
    assert completed("bash", line) == results


def test_methods_are_those_that_there_are() -> None:
    assert sorted(completion.methods("")) == sorted({*METHODS, *ONLINE})
