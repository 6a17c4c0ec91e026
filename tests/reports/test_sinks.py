"""Logs: strict JSON, whole lines, and sinks that fail without stopping a run."""

import json
import math
import sqlite3
import threading

import numpy as np
import pytest

from tests.errors import raises_error
from valence.reports import sinks as module
from valence.reports.sinks import FanOut, JsonlSink


class Memory:
    def __init__(self, fail_at=None):
        self.records, self.calls, self.closed, self.fail_at = [], 0, False, fail_at

    def log(self, record):
        self.calls += 1
        if self.calls == self.fail_at:
            raise ConnectionError("server gone")
        self.records.append(dict(record))

    def close(self):
        self.closed = True


def refuse_constants(name):
    raise AssertionError(f"{name} is not JSON")


def test_each_line_is_a_strict_json_object_and_is_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.log({"step": 1, "loss": 0.5, "note": "a\nb\ud800<é>"})
    sink.log(
        {
            "step": 2,
            "loss": math.nan,
            "kl": math.inf,
            "kl/raw": -math.inf,
            "grad_norm": np.float64(1.5),
        }
    )
    lines = (tmp_path / "new" / "metrics.jsonl").read_bytes().decode("utf-8").split("\n")
    first, second = (json.loads(line, parse_constant=refuse_constants) for line in lines[:2])
    assert lines[2:] == [""]
    assert first == {"step": 1, "loss": 0.5, "note": "a\nb\ud800<é>"}
    assert second == {"step": 2, "loss": "nan", "kl": "inf", "kl/raw": "-inf", "grad_norm": 1.5}
    assert math.isnan(float(second["loss"]))
    assert float(second["kl/raw"]) == -math.inf
    sink.close()


def test_a_second_sink_appends_after_whole_lines(tmp_path, recwarn):
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "m.jsonl")
        sink.log({"step": step})
        sink.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not recwarn


@pytest.mark.parametrize(
    ("before", "remaining"), [('{"step": 1}\n{"st', '{"step": 1}\n'), ('{"st', "")]
)
def test_a_torn_last_line_is_cut_off_with_a_warning(tmp_path, before, remaining):
    path = tmp_path / "m.jsonl"
    path.write_text(before)
    with pytest.warns(UserWarning, match=r"m\.jsonl: .* 4 "):
        sink = JsonlSink(path)
    sink.log({"step": 2})
    sink.close()
    assert path.read_text() == remaining + '{"step": 2}\n'


def test_a_value_that_is_no_number_and_no_text_is_refused_without_a_torn_line(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(TypeError):
        sink.log({"loss": object()})
    sink.close()
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_log_that_cannot_be_opened_is_a_user_error(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with raises_error("file-not-writable", where=str(tmp_path / "m.jsonl"), fix="run.dir"):
        JsonlSink(tmp_path / "m.jsonl")


def test_an_optional_sink_that_fails_is_named_once_and_left_alone():
    text = []
    required, good, bad = Memory(), Memory(), Memory(fail_at=2)
    sinks = FanOut([required], [bad, good], warn=text.append)
    for step in range(4):
        sinks.log({"step": step})
    sinks.close()
    assert (
        [r["step"] for r in required.records] == [r["step"] for r in good.records] == [0, 1, 2, 3]
    )
    assert bad.calls == 2
    [message] = text
    assert "Memory" in message
    assert "server gone" in message
    assert required.closed
    assert good.closed


def test_a_required_sink_that_fails_stops_the_run():
    with pytest.raises(ConnectionError):
        FanOut([Memory(fail_at=1)]).log({"step": 0})


# What a sink may have besides


class CompleteSink(Memory):
    """One with every method."""

    def __init__(self) -> None:
        super().__init__()
        self.events = []

    def start(self, config, folder, resumed):
        self.events.append(("start", dict(config), folder, resumed))

    def table(self, name, step, rows):
        self.events.append((name, step, [dict(row) for row in rows]))

    def end(self, status):
        self.events.append(status)


def test_methods_that_a_sink_has_are_called_and_the_others_are_not_missed(tmp_path):
    message = []
    plain, full = Memory(), CompleteSink()
    sinks = FanOut([], [plain, full], warn=message.append)
    for _ in range(2):
        sinks.start({"a.b": 1}, tmp_path, True)
    rows = [
        {
            "id": "x",
            "logp": -1.0,
            "reward_chosen": 2.0,
            "chosen": "ab" * 4000,
            "prompt": "p",
            "scores": {"a": 1},
        }
    ] * 30
    sinks.table("eval/samples", 3, rows)
    sinks.close("interrupted")
    start, (name, step, shown), status = full.events
    assert start == ("start", {"a.b": 1}, tmp_path, True)
    assert (name, step, status, message) == ("eval/samples", 3, "interrupted", [])
    assert len(shown) == 20
    assert list(shown[0]) == ["prompt", "chosen", "reward_chosen", "scores"]
    assert shown[0]["chosen"].endswith("b ... (4000 more characters)")
    assert shown[0]["scores"] == '{"a": 1}'
    assert plain.closed
    assert full.closed


@pytest.mark.parametrize("method", ["start", "log", "table", "end", "close"])
def test_an_error_of_a_sink_is_reported_once_and_others_continue(method, tmp_path):
    text, good = [], CompleteSink()
    bad = CompleteSink()

    def fails(*_):
        raise SystemError("no more")

    setattr(bad, method, fails)
    sinks = FanOut([], [bad, good], warn=text.append)
    sinks.start({}, tmp_path, False)
    for step in range(2):
        sinks.table("eval/samples", step, [{"prompt": "p"}])
        sinks.log({"step": step})
    sinks.close()
    [message] = text
    assert "CompleteSink" in message
    assert "no more" in message
    assert [r["step"] for r in good.records] == [0, 1]
    assert good.closed


class Slow(Memory):
    """Has ``left`` records to send when it is closed: one less at each query, if it gets on.
    On the clock each query takes ``takes`` times CLOSING."""

    def __init__(self, monkeypatch, *, left, takes=0.7, gets_on=True):
        super().__init__()
        self.left, self.takes, self.gets_on = left, takes, gets_on
        self.now, self.done = 0.0, threading.Event()
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    @property
    def waiting(self):
        self.now += self.takes * module.CLOSING
        self.left -= self.gets_on
        if self.left <= 0:
            self.done.set()
        return self.left

    def close(self):
        self.done.wait()
        super().close()


def test_sinks_that_hang_at_the_end_are_left_together(monkeypatch):
    message, required, slow = [], Memory(), Slow(monkeypatch, left=8, gets_on=False)

    class Hangs(Memory):
        def close(self):
            slow.done.wait()

    FanOut([required], [Hangs(), slow], warn=message.append).close()
    assert slow.now < 3 * module.CLOSING
    assert [name for line in message for name in ("Hangs", "Slow") if name in line] == [
        "Hangs",
        "Slow",
    ]
    assert all(f"{module.CLOSING:g}" in line for line in message)
    assert required.closed
    assert not slow.closed
    slow.done.set()


def test_one_that_gets_on_has_longer(monkeypatch):
    message, slow = [], Slow(monkeypatch, left=8)
    FanOut([], [slow], warn=message.append).close()
    assert slow.now > 5 * module.CLOSING
    assert slow.closed
    assert message == []


def test_one_that_gets_on_has_no_longer_than_six_times_that(monkeypatch):
    message, slow = [], Slow(monkeypatch, left=100)
    FanOut([], [slow], warn=message.append).close()
    assert 6 * module.CLOSING <= slow.now < 7 * module.CLOSING
    assert len(message) == 1
    slow.done.set()


def test_thread_local_resources_are_closed_in_their_thread(tmp_path):
    message = []

    class Database:
        def __init__(self):
            self.database = sqlite3.connect(tmp_path / "log.db")
            self.database.execute("create table log (step)")

        def log(self, record):
            self.database.execute("insert into log values (?)", [record["step"]])

        def close(self):
            self.database.commit()
            self.database.close()

    sinks = FanOut([], [Database()], warn=message.append)
    sinks.log({"step": 3})
    sinks.close()
    assert message == []
    with sqlite3.connect(tmp_path / "log.db") as database:
        assert database.execute("select step from log").fetchall() == [(3,)]
