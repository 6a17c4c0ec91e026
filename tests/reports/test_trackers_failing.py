"""A tracker's library that fails or hangs: it is reported once, and no step waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.reports.tracked_runs import CONFIG, Killed, home, record
from valence.reports import sinks as sinks_module
from valence.reports import trackers as trackers_module
from valence.reports.tracker_backends import BACKENDS
from valence.reports.trackers import Tracker

__all__ = ["home"]


class Fake:
    """A stand-in for a tracker's library."""

    def __init__(self, at: str = "", does: Callable[[], None] = lambda: None) -> None:
        self.at, self.does, self.got = at, does, list[Any]()

    def __call__(self, run: Any) -> Fake:
        self._do("open", None)
        run.state["id"] = 1
        run.save_state()
        return self

    def _do(self, kind: str, value: Any) -> None:
        if kind == self.at:
            self.does()
        self.got.append((kind, value))

    def has(self, name: str, step: int) -> bool:
        return False

    def log(self, step: int, numbers: Any, tables: Any) -> None:
        for _ in tables:
            self._do("table", step)
        self._do("log", step)

    def finish(self, status: str) -> None:
        self._do("finish", status)


Use = Callable[[Fake], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Puts a fake in the place of TensorBoard."""
    return partial(monkeypatch.setitem, BACKENDS, "tensorboard")


def fails() -> None:
    raise ConnectionError("nobody there")


@pytest.mark.parametrize("at", ["open", "log", "table", "finish"])
def test_a_library_that_fails_is_reported_once(at: str, use: Use, tmp_path: Path) -> None:
    use(Fake(at, fails))
    run = Killed(tmp_path)
    run.log_steps(0, 5)
    (message,) = run.warnings
    assert "tensorboard" in message
    assert "nobody there" in message
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_library_that_hangs_holds_up_no_step_and_not_the_end(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(sinks_module, "CLOSING", 0.3)
    monkeypatch.setattr(trackers_module, "MAX_WAITING", 50)
    use(Fake("log", lambda: never.wait() and None))
    run = Killed(tmp_path)
    run.log_steps(0, 5)
    (unclosed,) = run.warnings
    assert "tensorboard" in unclosed
    assert "0.3" in unclosed
    run.warnings.clear()
    run.log_steps(6, 200)
    never.set()
    (behind,) = run.warnings
    assert "50" in behind


def test_a_resumed_run_sends_records_that_a_tracker_missed(use: Use, tmp_path: Path) -> None:
    use(Fake("open", fails))
    run = Killed(tmp_path)
    run.log_steps(0, 4)
    use(fake := Fake())
    run.log_steps(4, 6, keep=4)
    assert [step for kind, step in fake.got if kind == "log"] == [0, 1, 2, 3, 4, 5, 6]
    assert [step for kind, step in fake.got if kind == "table"] == [0, 3, 6]
    assert fake.got[-1] == ("finish", "done")


def test_a_step_passes_its_record_on_without_waiting(use: Use, tmp_path: Path) -> None:
    go_on = threading.Event()
    use(fake := Fake("log", lambda: go_on.wait() and None))
    tracker = Tracker({"kind": "tensorboard"}, print)
    tracker.start(CONFIG, tmp_path, False)
    for step in range(50):
        tracker.log(record(step))
    assert tracker.waiting >= 49
    go_on.set()
    tracker.close()
    assert [step for kind, step in fake.got if kind == "log"] == list(range(50))
