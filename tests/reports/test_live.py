"""What is drawn on a terminal while a model trains."""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from valence.reports import console as console_module
from valence.reports.console import (
    DASHBOARDS,
    MAX_POINTS,
    NOT_FINITE,
    Dashboard,
    Progress,
    sparkline,
)
from valence.terminal import Terminal

RECORD = {
    "step": 3,
    "loss": 0.25,
    "rewards/margins": 0.5,
    "kl": 1e-3,
    "grad_norm": 1.5,
    "lr": 2e-4,
    "tokens/s": 1234.5,
}
HELD_OUT = {"eval/loss": 0.75, "eval/rewards/auc": 0.875}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        legacy_windows=False,
        _environ={},
        color_system=None,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return ESCAPES.sub("", console.file.getvalue())


def screen(board: Dashboard, width: int = 100, height: int = 30) -> list[str]:
    """The lines of a board on a terminal of this size."""
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False)
    console.print(board)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def board_of(console: Console, **more: object) -> Dashboard:
    return Dashboard(console, "training", 40, clock=Clock(), **more)  # type: ignore[arg-type]


def drawn(width: int = 100, height: int = 30, **record: object) -> list[str]:
    board = board_of(terminal(width, height))
    with board:
        board.record({**RECORD, **HELD_OUT, **record})
        return screen(board, width, height)


@pytest.mark.parametrize(("values", "shown"), [
    ((), ""), ((1.0,), "▅"), ((2.0, 2.0), "▅▅"), ((0.0, 1.0), "▁█"), (tuple(range(8)), "▁▂▃▄▅▆▇█"),
    ((0.0, float("nan"), 1.0), f"▁{NOT_FINITE}█"), ((float("inf"),), NOT_FINITE),
    ((-1e308, 1e308), "▅▅"), ((0.0, 5e-324), "▅▅"),
])  # fmt: skip
def test_curves_reach_from_the_lowest_to_the_highest(values: tuple[float, ...], shown: str) -> None:
    assert sparkline(values) == shown


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert sparkline((0.0, float("nan"), 1.0), ascii_only=True) == "_x#"


def test_only_metrics_that_exist_are_shown_and_the_main_ones_with_curves() -> None:
    shown = drawn()
    assert re.match(r"loss +0\.25  ▅", shown[3])
    text = "\n".join(shown)
    for word in ("held-out loss", "margin", "kl", "grad norm", "lr", "1,234", "held-out auc"):
        assert word in text
    for word in ("memory", "reward", "accuracy", "answer"):
        assert word not in text
    assert "memory GB" in "\n".join(drawn(memory=1.5))


def test_a_curve_goes_back_a_fixed_number_of_records_and_keeps_the_last_held_out_value() -> None:
    board = board_of(terminal())
    with board:
        board.record(RECORD | HELD_OUT)
        for n in range(3 * MAX_POINTS):
            board.record({"loss": float(n)})
        loss, held_out = screen(board)[3:5]
    assert loss.split()[2] == sparkline([float(n) for n in range(2 * MAX_POINTS, 3 * MAX_POINTS)])
    assert held_out.split() == ["held-out", "loss", "0.75", "▅"]


def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    lines = [
        {"eval/loss": 0.5},
        *({"loss": float(n)} for n in range(2 * MAX_POINTS)),
        {"loss": "nan"},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    board = board_of(terminal())
    board.recall(log)
    with board:
        board.record({"loss": 1000.0})
        loss, held_out = screen(board)[3:5]
    assert loss.split()[1:] == [
        "1,000",
        sparkline([*map(float, range(MAX_POINTS + 1, 2 * MAX_POINTS)), 1000.0]),
    ]
    assert held_out.split()[2:] == ["0.5", "▅"]
    for damaged in ("{", "[1]\n7\nnull\n"):
        log.write_text(damaged)
        board_of(terminal()).recall(log)
    board_of(terminal()).recall(tmp_path / "none")


@pytest.mark.parametrize(
    ("width", "height"),
    [(200, 60), (100, 30), (80, 24), (60, 24), (60, 12), (40, 6), (20, 4), (8, 3)],
)
def test_it_fits_any_terminal(width: int, height: int) -> None:
    board = board_of(terminal(width, height), warnings=lambda: ["a warning that is long " * 9] * 5)
    with board:
        board.record(RECORD | HELD_OUT)
        board.answer("a question " * 30, "答案 " * 200, 0.5)
        with Progress(terminal(), "evaluating (eval)", 9):
            lines = screen(board, width, height)
    assert len(lines) <= height
    if width >= 20:
        assert max(map(cell_len, lines)) <= width


def test_the_height_stays_when_phases_come_and_go() -> None:
    console = terminal()
    board = board_of(console)
    with board:
        board.record(RECORD)
        heights = [len(screen(board))]
        with Progress(console, "evaluating (eval)", 9) as inner:
            inner.update(3)
            lines = screen(board)
            assert "evaluating (eval)" in lines[1]
            assert "3/9" in lines[1]
            heights.append(len(lines))
        with board.during("saving"):
            assert screen(board)[1].startswith("saving")
        heights.append(len(screen(board)))
    assert len(set(heights)) == 1
    assert "evaluating" not in "\n".join(screen(board))


def test_the_innermost_phase_is_the_one_that_is_shown() -> None:
    console = terminal()
    board = board_of(console)
    with board, Progress(console, "outer", 2):
        with Progress(console, "inner", 2):
            assert screen(board)[1].startswith("inner")
        assert screen(board)[1].startswith("outer")


def test_warnings_are_the_last_ones_with_their_number() -> None:
    message: list[str] = []
    board = board_of(terminal(), warnings=lambda: message)
    with board:
        before = screen(board)
        message += [f"warning {n}\n\x1b[2J" for n in range(5)]
        shown = "\n".join(screen(board))
    assert "warning" not in "\n".join(before)
    assert re.search(r"\b5\b", shown)
    assert [f"warning {n}" in shown for n in range(5)] == [False, False, True, True, True]
    assert "\x1b" not in shown


def test_an_answer_is_cut_to_two_lines_and_can_steer_no_terminal() -> None:
    board = board_of(terminal())
    with board:
        board.answer("Why is\nthe sky blue?", "Air \x1b[2J scatters. " * 50, 0.75)
        shown = screen(board)
        at = next(n for n, line in enumerate(shown) if line.startswith("last answer"))
        assert "> Why is the sky blue?" in shown[at]
        assert shown[at + 1].startswith("reward 0.75")
        assert shown[at + 2].rstrip().endswith("…")
        assert "\x1b" not in "".join(shown)
        board.answer("x", "", None)
        shown = screen(board)
        assert "reward" not in shown[at + 1]
        assert not any("scatters" in line for line in shown)


def test_the_end_leaves_the_last_state_and_lines_of_others_above_it() -> None:
    console, clock = terminal(), Clock()
    with Dashboard(console, "training", 4, clock=clock) as board:
        for done in (1, 2):
            clock.now += 2
            board.update(done, tokens=500 * done)
            board.record(RECORD | {"loss": done / 4})
        console.print("printed meanwhile")
        print("printed by a reward")
    text = written(console)
    assert (
        text.index("printed meanwhile")
        < text.index("printed by a reward")
        < text.rindex("training")
    )
    last = text[text.rindex("training") :]
    assert "2/4" in last
    assert "250 tok/s  4.0s" in last
    assert "left" not in last
    assert re.search(r"loss +0\.5 +▁█", last)
    assert console not in DASHBOARDS


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_is_cleaned_up_when_something_stops_it(error: type[BaseException]) -> None:
    console, threads = terminal(), set(threading.enumerate())
    with contextlib.suppress(error), board_of(console) as board:
        board.record(RECORD)
        with Progress(console, "evaluating (eval)", 9):
            raise error
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()
    assert (
        console.file.getvalue().count("\x1b[?25l")
        == console.file.getvalue().count("\x1b[?25h")
        == 1
    )  # type: ignore[attr-defined]
    assert console not in DASHBOARDS
    assert "0.25" in written(console)
    with Progress(console, "testing", 2) as after:  # a bar of its own again
        after.update(2)
    assert "testing" in written(console)


def test_elsewhere_it_is_plain_lines() -> None:
    for console in (
        Console(file=io.StringIO(), width=80),
        Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "dumb"}),
    ):
        with board_of(console) as board:
            board.record(RECORD)
            board.answer("x", "y", 1.0)
            board.update(1)
            with (
                Progress(console, "evaluating (eval)", 2, clock=Clock()) as inner,
                board.during("saving"),
            ):
                inner.update(1)
        assert isinstance(console.file, io.StringIO)
        message = console.file.getvalue().splitlines()
        assert message[:2] == [
            "training 1/40  loss 0.25  margin 0.5  kl 0.001",
            "evaluating (eval) 1/2",
        ]
        assert len(message) == 4


def test_a_console_for_warnings_shows_no_dashboard() -> None:
    output = io.StringIO()
    console = Terminal(warnings_only=True, file=output, force_terminal=True)
    with board_of(console) as board, Progress(console, "evaluating (eval)", 2):
        board.record(RECORD)
        board.update(1)
    assert output.getvalue() == ""


def test_unchanged_content_is_not_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        console_module, "MAX_TIME_SHARE", float("inf")
    )  # it does not rest after a drawing
    console = terminal()
    with board_of(console) as board:
        board.record(RECORD)
        assert board.live is not None
        board.live.refresh()
        size = len(written(console))
        board.live.refresh()
        assert len(written(console)) == size
        board.mark_changed()
        board.live.refresh()
        assert len(written(console)) > size


def test_a_narrower_terminal_is_drawn_over_although_it_has_wrapped_the_lines() -> None:
    """Counted by how far up the cursor goes: to the first of the lines that were drawn, each on as
    many as it takes by now.
    """
    console = terminal(width=100)
    with board_of(console) as board:
        assert isinstance(console.file, io.StringIO)
        board.record(RECORD)
        console.print("first")
        lines = list(board.line_widths)
        console.width = 60
        start = len(console.file.getvalue())
        console.print("second")
        up = console.file.getvalue()[start:].split("second")[0].count("\x1b[1A")
    assert lines[0] == 100
    assert up == sum(max(1, -(-line // 60)) for line in lines) - 1


def test_a_run_inside_a_run_is_a_phase_of_it() -> None:
    console = terminal()
    with board_of(console) as board, Dashboard(console, "inner run", 5) as inner:
        inner.record(RECORD)
        assert screen(board)[1].startswith("inner run")
