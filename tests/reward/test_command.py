"""The command that lists rules."""

from __future__ import annotations

import pytest

from tests.command import command
from valence import cli
from valence.reward.rules import RULES


def test_rules_are_listed_and_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.console, "width", 200)
    assert command("rewards") == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in RULES)
    assert command("rewards", "length") == 0
    explained = capsys.readouterr().out
    assert "settings.fall" in explained
    assert "over how many units it falls from 1 to 0 outside" in explained
    assert command("rewards", "lenth") == 2
    assert "did you mean length?" in capsys.readouterr().err
