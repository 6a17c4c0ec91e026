"""A run goes on when what it prints cannot be written, or not in the terminal's encoding."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.arch.source import ROOT
from tests.command import command, place
from valence import terminal

__all__ = ["place"]

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def no_earlier_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "stream_errors", {})


class Failing(io.StringIO):
    """A stream that takes some characters and then fails."""

    name = "<stdout>"

    def __init__(self, code: int, room: int = 200) -> None:
        super().__init__()
        self.code, self.room, self.failures = code, room, 0

    def write(self, text: str) -> int:
        self.room -= len(text)
        if self.room < 0:
            self.failures += 1
            raise OSError(self.code, os.strerror(self.code))
        return super().write(text)

    def flush(self) -> None:
        if self.room < 0:
            raise OSError(self.code, os.strerror(self.code))


def warnings_of(folder: Path) -> list[str]:
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert facts["status"] == "done"
    assert (folder / "model").is_dir()
    return facts.get("warnings", [])


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow), errno.EPIPE]
)
def test_a_run_ends_well_when_its_output_fails(
    code: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stream = Failing(code)
    monkeypatch.setattr(sys, "stdout", stream)
    assert command("train", "recipe.yaml") == 0
    assert stream.failures > 1  # each line is tried again: there may be room by then
    (message,) = warnings_of(place / "runs/first")
    assert os.strerror(code) in message
    assert capsys.readouterr().err.count(os.strerror(code)) == (code != errno.EPIPE)


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.slow), ("--json",)])
def test_records_for_programs_that_cannot_be_written_end_no_run(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Failing(errno.ENOSPC))
    assert command("train", "recipe.yaml", *words) == 0
    assert warnings_of(place / "runs/first")


class FullSink:
    name = "full"
    calls = 0

    def log(self, record: Any) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, "no space left")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "no space left")


def test_the_python_interface_goes_on_without_a_terminal_and_a_tracker(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream := Failing(errno.ENOSPC))
    valence.train("recipe.yaml", sinks=[sink := FullSink()])
    assert sink.calls == 1
    warnings = warnings_of(place / "runs/first")
    assert len(warnings) == 2
    assert len([line for line in warnings if sink.name in line and "no space left" in line]) == 1
    assert len([line for line in warnings if os.strerror(stream.code) in line]) == 1


def program(place: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHONUTF8", "PYTHONIO"))
    }
    ours |= {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | environment
    line = f"exec {sys.executable} -m valence {shell}"
    return subprocess.run(["sh", "-c", line], cwd=place, env=ours, capture_output=True, timeout=250)


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_behind_the_output_ends_no_run(place: Path) -> None:
    done = program(place, "train recipe.yaml >/dev/full")
    assert done.returncode == 0, done.stderr
    assert os.strerror(errno.ENOSPC).encode() in done.stderr
    assert warnings_of(place / "runs/first")
    assert program(place, "train recipe.yaml --fresh >/dev/full 2>&1").returncode == 0
    assert warnings_of(place / "runs/first")


UNUSUAL = "é 日本 \u202e"
LATIN_1 = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "latin-1",
}


@pytest.mark.slow
def test_a_run_in_another_locale_than_utf8(place: Path) -> None:
    """From rows to the report: files are UTF-8 everywhere, and what the terminal lacks is
    escaped.
    """
    rows = [
        json.loads(line) for line in (place / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        row["completion"] += UNUSUAL
    lines = [json.dumps({**row, "naïve": 1}, ensure_ascii=False) for row in rows]
    (place / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    settings = "eval.every=1 run.samples.prompts=1 run.samples.max_new_tokens=4 run.export=merged"
    done = program(place, f"train recipe.yaml {settings}", **LATIN_1)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    folder = place / "runs/first"
    assert warnings_of(folder) == []
    for name in ("report.html", "model/README.md", "config.yaml", "audit.json", "eval/step-0.txt"):
        (folder / name).read_text(encoding="utf-8")
    assert "日本" in (folder / "eval/step-0.json").read_text(encoding="utf-8")
    shown = program(place, "inspect recipe.yaml", **LATIN_1)
    assert shown.returncode == 0, shown.stderr
    assert b"\\u65e5" in shown.stdout
    assert "é".encode("latin-1") in shown.stdout
    assert b"Traceback" not in done.stderr + shown.stderr
    assert program(place, "report runs/first --md", **LATIN_1).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(encoding: str) -> None:
    raw = io.BytesIO()
    stream = terminal.resilient(io.TextIOWrapper(raw, encoding=encoding))
    terminal.Terminal(file=stream).print("é 日 \ud800")
    written = raw.getvalue().decode(encoding)
    assert written == "é 日 <U+D800>\n".encode(encoding, "backslashreplace").decode(encoding)


def test_warnings_of_valence_have_no_source_line() -> None:
    """In a separate process, since pytest records warnings before they are printed."""
    script = (
        "import warnings; from valence import terminal\n"
        "with terminal.safe_streams():\n"
        "    warnings.warn_explicit('a \\x1b[31mcheckpoint is damaged', UserWarning, "
        "terminal.__file__, 7)\n"
        "    warnings.warn_explicit('from elsewhere', UserWarning, 'other.py', 7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        cwd=ROOT,
    )
    actual, other = done.stderr.splitlines()
    assert actual.startswith("valence: warning: a ")
    assert "\x1b" not in done.stderr
    assert other == "other.py:7: UserWarning: from elsewhere"
