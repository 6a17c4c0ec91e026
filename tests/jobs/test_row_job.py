"""The job by itself, with a transform that needs no model: resuming, its facts, its outcomes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.programs import Program
from valence.jobs.row_job import RowJob, Tally, check_output, refuse_inputs

ITEMS = list(range(11))
ABOUT = {"by": "a test"}


class Squares:
    """An item becomes two lines: itself, and its square; 7 fails."""

    num_tokens = None

    def __init__(self) -> None:
        self.computed: list[int] = []

    def compute(self, batch: Sequence[int], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        self.computed += batch
        advance(2 * len(batch))
        return [
            {"item": item, "power": power, **({"error": "seven"} if item == 7 else {})}
            for item in batch
            for power in (1, 2)
        ]

    def origin(self, item: int) -> str:
        return f"item {item}"

    def is_valid(self, line: Any, index: int) -> bool:
        return line.get("power") == index + 1

    def is_line_of(self, line: Any, item: int) -> bool:
        return line["item"] == item

    def error_in(self, line: Any) -> str | None:
        return line.get("error")


def run(
    out: Path, items: Sequence[int] = ITEMS, seed: int = 0, **options: Any
) -> tuple[Tally, list[int]]:
    """The outcomes, and the items that were computed."""
    squares = Squares()
    with RowJob(out, [], window=3, lines_per_item=2, **options) as job:
        job.check_facts({"seed": seed})
        return job.run(squares, items, len(items), "squaring", ABOUT), squares.computed


def test_a_file_cut_at_any_byte_is_completed_from_its_last_window(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    tally, computed = run(out)
    assert (tally.rows, tally.earlier, tally.failed) == (22, 0, 2)
    assert tally.first == ["item 7: seven", "item 7: seven"]
    assert computed == ITEMS
    content, checksums = out.read_bytes(), out.with_name("out.jsonl.crc").read_bytes()
    for length in range(0, len(content) + 1, 7):
        out.write_bytes(content[:length])
        tally, computed = run(out)
        num_lines = content[:length].count(b"\n")
        num_reused = 22 if num_lines == 22 else num_lines // 6 * 6
        assert (tally.rows, tally.earlier, tally.failed) == (22, num_reused, 2), length
        assert computed == ITEMS[num_reused // 2 :], length
        assert out.read_bytes() == content, length
        assert out.with_name("out.jsonl.crc").read_bytes() == checksums, length


def test_lines_of_other_items_or_facts_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(out)
    content = out.read_bytes()
    with raises_error("output-rows-changed", where="item 99"):
        run(out, [0, 1, 99, *ITEMS[3:]])
    with raises_error("output-settings-differ", where=f"{out} (seed)"):
        run(out, seed=1)
    with raises_error("output-lines-extra", where=str(out)):
        run(out, ITEMS[:5])
    out.write_bytes(content.replace(b'"item": 1,', b'"item": 2,', 1))
    with raises_error("output-line-damaged", where=f"{out}:3"):
        run(out)
    out.write_bytes(content)
    assert run(out)[1] == []


def test_other_lines_are_appended_to_complete_ones(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(out)
    first = out.read_bytes()
    tally, computed = run(out, ITEMS[:4], seed=1, append=())
    assert (tally.rows, computed) == (8, ITEMS[:4])
    both = out.read_bytes()
    assert both.startswith(first)
    for length in range(len(first), len(both), 5):
        out.write_bytes(both[:length])
        run(out, ITEMS[:4], seed=1, append=())
        assert out.read_bytes() == both, length
    out.write_bytes(first[:-2])
    with raises_error("output-lines-missing", where=str(out)):
        run(out, ITEMS[:4], seed=2, append=())


def test_a_batch_may_have_several_windows(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Watched(Squares):
        def compute(self, batch: Sequence[int], advance: Any) -> Any:
            sizes.append(len(batch))
            return super().compute(batch, advance)

    with RowJob(tmp_path / "out.jsonl", [], window=3, lines_per_item=2) as job:
        job.run(Watched(), ITEMS, len(ITEMS), "squaring", ABOUT, batch_size=6)
    assert sizes == [6, 5]
    run(tmp_path / "other.jsonl")
    contents = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "other.jsonl")]
    assert contents[0] == contents[1]


def slow() -> None:
    import time

    class Slow(Squares):
        def compute(self, batch: Sequence[int], advance: Any) -> Any:
            time.sleep(0.02)
            return super().compute(batch, advance)

    with RowJob(Path("out.jsonl"), [], window=3, lines_per_item=2) as job:
        job.check_facts({"seed": 0})
        job.run(Slow(), range(900), 900, "squaring", ABOUT)


def test_kill_9_loses_one_window_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, program = Path("out.jsonl"), Program(main=slow)
    program.wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20)
    assert program.kill() == -signal.SIGKILL
    num_lines = out.read_bytes().count(b"\n")
    tally, _ = run(out, range(900))
    assert num_lines - 6 < tally.earlier <= num_lines < 1800
    run(Path("undisturbed.jsonl"), range(900))
    assert out.read_bytes() == Path("undisturbed.jsonl").read_bytes()
    about = json.loads(Path("out.jsonl.about.json").read_text())["about"]
    assert (about["by"], about["lines"]) == ("a test", 1800)


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with raises_error("output-is-input", where=str(path)):
        refuse_inputs([link], [str(path)])
    refuse_inputs([tmp_path / "new.jsonl"], [str(path), "no-such-file.jsonl"])
    for name, code in (
        ("rows.json", "output-not-jsonl"),
        ("none/rows.jsonl", "path-invalid-output"),
        ("rows.jsonl", "path-exists"),
    ):
        with raises_error(code, where=str(tmp_path / name)):
            check_output(tmp_path / name, is_new=True)
    check_output(path)
