"""Progress and numbers on the terminal."""

import contextlib
import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from valence.reports.console import Progress
from valence.reports.formatting import as_tables, compare, duration, number, rate, text, visible
from valence.terminal import Terminal, print_table


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=60)


def lines(console):
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (1234567, "1,234,567"),
        (1.23e-5, "1.23e-05"),
        (1e-5, "1e-05"),
        (-0.69314, "-0.6931"),
        (12.0, "12"),
        (999.96, "1000"),
        (54321.4, "54,321"),
        (2.5e9, "2.5e+09"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (192.4, "3m12s"),
        (3599.7, "1h00m"),
        (7384, "2h03m"),
        (86400 + 7200, "1d02h"),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_rates():
    assert rate(1234.4) == "1,234 tok/s"
    assert rate(3.14159, "it") == "3.14 it/s"
    assert rate(0.116, "it") == "8.62 s each"
    assert rate(0.116) == "0.116 tok/s"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "\N{EN DASH}"),
        ({}, "\N{EN DASH}"),
        ([], "\N{EN DASH}"),
        (0, "0"),
        (True, "yes"),
        (0.12345, "0.1235"),
        ([1, None, "a"], "1, \N{EN DASH}, a"),
        ({"up": 1, "down": 2.5}, "up 1, down 2.5"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_any_value_for_people(value, shown):
    assert text(value) == shown


def test_control_characters_become_visible():
    shown = "a\tb\n\N{SYMBOL FOR ESCAPE}[31m\N{SYMBOL FOR NULL}\ufffd\ufffd\ufffdé"
    assert visible("a\tb\n\x1b[31m\x00\x7f\x9b\ud800é") == shown


def test_no_text_changes_the_direction_of_following_text():
    turned = "".join(map(chr, (0x202A, 0x202E, 0x2066, 0x2069)))
    assert (
        visible(f"שלום {turned}abc\N{RIGHT-TO-LEFT MARK}")
        == "שלום \ufffd\ufffd\ufffd\ufffdabc\N{RIGHT-TO-LEFT MARK}"
    )


def test_plain_lines_are_few_and_hold_the_first_and_the_last():
    console, clock = plain_console(), Clock()
    with Progress(console, "train", 100, every=5.0, clock=clock) as progress:
        for done in range(1, 101):
            clock.now += 0.5
            metrics = {"loss": 0.5, "rewards/margins": 0.25, "kl": 1e-4, "lr": 1.0}
            progress.record(metrics)
            progress.update(done, tokens=600 * done)
    shown = lines(console)
    assert len(shown) == 11
    assert shown[0] == "train 1/100  1,200 tok/s  50s left  loss 0.5  margin 0.25  kl 0.0001"
    assert shown[1] == "train 11/100  1,200 tok/s  44s left  loss 0.5  margin 0.25  kl 0.0001"
    assert shown[-1] == "train 100/100  1,200 tok/s  50s  loss 0.5  margin 0.25  kl 0.0001"


def test_the_last_line_is_printed_once_and_an_interrupted_phase_shows_its_position():
    console, clock = plain_console(), Clock()
    with Progress(console, "eval", 1, clock=clock) as progress:
        clock.now += 1
        progress.update(1)
    assert lines(console) == ["eval 1/1  1 it/s  1.0s"]
    with (
        contextlib.suppress(KeyboardInterrupt),
        Progress(console, "train", 9, clock=clock) as progress,
    ):
        for done in (1, 2):
            clock.now += 1
            progress.update(done)
        raise KeyboardInterrupt
    assert lines(console)[1:] == ["train 1/9  1 it/s  8.0s left", "train 2/9  1 it/s  2.0s"]


def test_an_amount_reported_twice_counts_once():
    console, clock = plain_console(), Clock()
    with Progress(console, "train", 10, every=0.0, clock=clock) as progress:
        clock.now += 1
        progress.update(1)
        clock.now += 1
        progress.record({"loss": 0.5})
        progress.update(1)
    assert lines(console)[1] == "train 1/10  2 s each  18s left  loss 0.5"


def test_items_are_counted_until_a_batch_has_counted_its_tokens():
    console, clock = plain_console(), Clock()
    with Progress(console, "sampling", 4, every=0.0, clock=clock) as progress:
        for done, tokens in ((0, 0), (2, 0), (4, 100)):
            clock.now += 2
            progress.update(done, tokens=tokens)
    assert lines(console)[1:] == [
        "sampling 2/4  1 it/s  2.0s left",
        "sampling 4/4  25 tok/s  6.0s",
    ]


def test_a_slow_first_step_does_not_spoil_the_time_left():
    console, clock = plain_console(), Clock()
    with Progress(console, "train", 102, start=0, every=0.0, clock=clock) as progress:
        for done, seconds in ((1, 60), (2, 1)):
            clock.now += seconds
            progress.update(done, tokens=100 * done)
    assert lines(console)[1] == "train 2/102  100 tok/s  1m40s left"


def test_the_rate_of_a_resumed_phase_excludes_earlier_work():
    console, clock = plain_console(), Clock()
    with Progress(console, "train", 100, start=90, every=0.0, clock=clock) as progress:
        clock.now += 2
        progress.update(91, tokens=50)
    assert lines(console)[0] == "train 91/100  25 tok/s  18s left"


def test_time_away_does_not_count():
    console, clock = plain_console(), Clock()
    with Progress(console, "train", 4, every=0.0, clock=clock) as progress:
        for done in (1, 2):
            clock.now += 1
            progress.update(done)
        with progress.pause():
            clock.now += 1000
        clock.now += 1
        progress.update(3)
    assert lines(console)[2] == "train 3/4  1 it/s  1.0s left"


def test_no_progress_and_no_elapsed_time_do_not_divide_by_zero():
    console = plain_console()
    with Progress(console, "empty", 0, clock=Clock()) as progress:
        progress.update(0)
    assert lines(console) == ["empty 0/0"]


def test_quiet_prints_nothing():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        with Progress(console, "train", 2, quiet=True) as progress, progress.pause():
            progress.update(1, tokens=5)
        assert console.file.getvalue() == ""


def test_a_bar_on_a_terminal_shows_rate_time_left_and_metrics_and_gives_way_to_another():
    clock = Clock()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, legacy_windows=False, _environ={}
    )
    with Progress(console, "[b]train\x1b[2J", 4, clock=clock) as progress:
        for done in (1, 2):
            clock.now += 2
            progress.record({"loss": 0.25, "kl": "none"})
            progress.update(done, tokens=500 * done)
        with progress.pause(), Progress(console, "eval", 1, clock=clock) as inner:
            clock.now += 5
            inner.update(1)
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "[b]train\N{SYMBOL FOR ESCAPE}[2J" in written
    assert "250 tok/s  4.0s left  loss 0.25" in written
    assert "eval" in written
    assert written.rstrip().endswith("2/4 250 tok/s  4.0s  loss 0.25")


def test_two_evaluations_side_by_side():
    before, after = {"loss": 0.5, "auc": None, "old": 1}, {"loss": 0.44, "auc": 0.75, "[red]x": 2.0}
    assert compare(before, after) == [
        ("loss", "0.5", "0.44", "-0.06"),
        ("auc", "\N{EN DASH}", "0.75", ""),
        ("old", "1", "\N{EN DASH}", ""),
        ("[red]x", "\N{EN DASH}", "2", ""),
    ]


def test_a_mapping_of_any_shape_becomes_tables():
    value = {
        "a_b": 1,
        "b_a": {"x": {"n": 1}, "y": {"n": 2, "m": [1]}},
        "c": ({"k": 1},),
        "d": {"e": {"f": {"g": 3}}},
        "none": {},
    }
    assert as_tables(value) == [
        ("", ("", ""), [["a b", 1], ["none", {}]]),
        ("b a", ["", "n", "m"], [["x", 1, ""], ["y", 2, [1]]]),
        ("c", ["k"], [[1]]),
        ("d: e", ["", "g"], [["f", 3]]),
    ]


@pytest.mark.parametrize("columns", [None, "40"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_tables_in_a_pipe_have_complete_cells_on_one_line(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    table = Table("run", "state", box=None)
    path = "runs/" + 200 * "a"
    table.add_row(path, "done")
    print_table(Terminal(file=file, force_terminal=is_terminal), table)
    assert (path in file.getvalue()) == (not is_terminal and columns is None)
