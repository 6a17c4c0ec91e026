"""The command that lists rules."""

from __future__ import annotations

import pytest

from tests.command import command
from valence import cli
from valence.rewards.rules import RULES, settings_of


def test_rules_are_listed_and_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.console, "width", 200)
    assert command("rewards") == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in RULES)
    assert command("rewards", "length") == 0
    explained = capsys.readouterr().out
    settings = settings_of("length").model_fields
    assert all(f"settings.{name}" in explained for name in settings)
    assert str(settings["fall"].description) in explained
    assert command("rewards", "lenth") == 2
    assert "length?" in capsys.readouterr().err
