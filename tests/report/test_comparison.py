"""Several runs compared: what is read of them, what is marked and what is not, and the page and the Markdown made of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from valence.errors import UserError
from valence.report import comparison
from valence.report.compared import Compared, find_runs, read_compared, shortest_labels, trained_seconds
from valence.report.comparison import comparison_page, write_out
from valence.report.comparison_charts import COLOURS, curves, frontier, look, over_time
from valence.report.comparison_markdown import comparison_markdown, run_markdown
from valence.report.comparison_tables import BEST, LONGEST, MOST_ROWS, direction, disagreements, gaps, numbers, settings, summary
from valence.report.rundata import read_run

HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'> | **b** \x1b[2J \ud800"


def config(method: str = "kto", *, beta: float = 0.1, reward: str = "vader", train: str = "rows.jsonl", seed: int = 0) -> str:
    return json.dumps(
        {
            "method": method,
            "model": {"name": "org/tiny-chat", "lora": {"rank": 16, "alpha": None}},
            "data": {"train": [{"path": train, "keys": {}}], "eval": [{"path": "held_out.jsonl"}]},
            "loss": {"beta": beta},
            "reward": [{"name": reward}],
            "train": {"seed": seed},
        }
    )


def thumbs(step: int, rewards: Mapping[str, float] | None = None, **more: Any) -> dict[str, Any]:
    grown = step / 20
    metrics = {
        "loss": 0.5 - 0.1 * grown,
        "rewards/auc": 0.5 + 0.2 * grown,
        "rewards/margins": grown,
        "grad": 1.0,
        "kl/raw": -grown,
    }
    metrics |= {"logratio/chosen": grown, "logratio/rejected": -2 * grown, **more}
    rows = [
        {
            "id": id,
            "origin": f"held_out.jsonl:{i}",
            "label": i % 2 == 0,
            "reward": reward,
            "prompt": f"Ask {id}",
            "completion": "Yes.",
        }
        for i, (id, reward) in enumerate((rewards or {"a": 0.1, "b": 0.2, "c": 0.3}).items(), start=1)
    ]
    return {"step": step, "metrics": metrics, "rows": rows}


def own(step: int, reward: float, kl: float, said: str = "An answer.") -> dict[str, Any]:
    row = {"origin": "prompts.jsonl:1", "stop": "end", "tokens": 3, "prompt": "Ask", "completion": said}
    rows = [{"id": id, **row, "reward": worth} for id, worth in (("a", reward), ("b", 0.5))]
    return {"step": step, "metrics": {"reward/mean": reward, "kl": kl, "rollout/length": 3.0}, "rows": rows}


def a_run(folder: Path, *evaluations: Mapping[str, Any], settings: str | None = None, seconds: float = 2.0, **facts: Any) -> Path:
    """A finished run of 20 steps, logged every 10, with these evaluations."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings or config())
    log = [
        {"step": s, "loss": 0.6 - s / 100, "lr": 1e-4, "seconds": seconds, "tokens_seen": 1000 * s, "lag": 1.5} for s in (10, 20)
    ]
    for found in evaluations:
        (folder / f"eval/step-{found['step']}.json").write_text(json.dumps(found))
        log.append({"step": found["step"], **{f"eval/{name}": value for name, value in found["metrics"].items()}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in sorted(log, key=lambda r: r["step"])))
    versions = {"valence": "0.1.0", "torch": "2.13"}
    told = {"status": "done", "method": "kto", "steps": 20, "total_steps": 20, "seconds": 65.0, "versions": versions, **facts}
    (folder / "run.json").write_text(json.dumps(told))
    return folder


def read(*places: Path) -> list[Compared]:
    return read_compared(find_runs(places, lambda _: None))


@pytest.fixture
def two(tmp_path: Path) -> list[Compared]:
    """Two runs that differ in their seed alone; the second is better."""
    first = a_run(tmp_path / "first", thumbs(0), thumbs(20))
    other = thumbs(20, {"a": 0.9, "b": 0.2, "c": 0.3}, **{"rewards/auc": 0.8, "loss": 0.2, "rewards/margins": 0.4, "grad": 2.0})
    return read(first, a_run(tmp_path / "second", thumbs(0), other, settings=config(seed=1)))


class Page(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.text, self._inside = "", ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


# Which runs


def test_runs_are_found_once_in_the_order_given_and_by_name_within_a_folder(tmp_path: Path) -> None:
    for name in ("runs/b", "runs/a", "c"):
        a_run(tmp_path / name)
    found = find_runs([tmp_path / "c", tmp_path / "runs", tmp_path / "runs/../c"], lambda _: None)
    assert [line.path.name for line in found] == ["c", "a", "b"]


@pytest.mark.parametrize(("name", "said"), [("nowhere", "no such folder"), ("file", "is a file"), ("empty", "holds none")])
def test_what_is_no_run_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said) as caught:
        find_runs([tmp_path / name], lambda _: None)
    assert name in str(caught.value)
    assert "name a run's folder" in str(caught.value)


def test_labels_are_the_shortest_that_tell_runs_apart() -> None:
    paths = [Path("/runs/kto/seed/0"), Path("/runs/dpo/seed/0"), Path("/runs/dpo/seed/1")]
    assert shortest_labels(paths) == ["kto/seed/0", "dpo/seed/0", "1"]
    assert shortest_labels([Path("/x"), Path("/y/x")]) == ["//x", "y/x"]


# Tables


def test_the_summary_marks_the_best_of_each_column_by_its_direction(two: list[Compared]) -> None:
    part = summary(two)
    cells = [dict(zip(part.header, row, strict=True)) for row in part.rows]
    assert [row["run"] for row in cells] == ["first", "second"]
    assert cells[0]["steps"] == "20"
    assert (cells[0]["tokens"], cells[0]["time"], cells[0]["state"]) == ("20,000", "1m05s", "done")
    assert [row["eval/loss"] for row in cells] == ["0.4", f"{BEST} 0.2"]
    assert [row["eval/rewards/auc"] for row in cells] == ["0.7", f"{BEST} 0.8"]
    assert [row["eval/rewards/margins"] for row in cells] == [f"{BEST} 1", "0.4"]


def test_a_number_whose_direction_is_not_known_is_not_marked(two: list[Compared]) -> None:
    [part] = numbers(two)
    lines = {row[0]: row[1:] for row in part.rows}
    assert lines["grad"] == ["1", "2"]
    assert lines["rewards/auc"] == ["0.7", f"{BEST} 0.8"]


@pytest.mark.parametrize(("name", "sign"), [
    ("loss", -1), ("sft/loss", -1), ("rewards/auc", 1), ("rewards/pearson/clarity", 1), ("rewards/brier", -1), ("reward/mean", 1),
    ("reward/std", 0), ("kl", 0), ("grad_norm", 0), ("rewards/chosen", 0), ("value/loss", -1),
])  # fmt: skip
def test_directions(name: str, sign: int) -> None:
    assert direction(name) == sign


def test_numbers_on_scales_of_their_own_are_not_marked_and_that_is_said(tmp_path: Path) -> None:
    runs = read(
        a_run(tmp_path / "one", thumbs(20)),
        a_run(tmp_path / "two", thumbs(20, None, **{"loss": 0.1, "rewards/auc": 0.9}), settings=config(beta=0.5)),
    )
    part = summary(runs)
    cells = [dict(zip(part.header, row, strict=True)) for row in part.rows]
    assert cells[1]["eval/loss"] == "0.1"
    assert cells[1]["eval/rewards/auc"] == f"{BEST} 0.9"
    assert any("not marked: eval/rewards/margins, eval/loss" in note for note in part.notes)


def test_rewards_that_are_not_the_same_are_not_ranked(tmp_path: Path) -> None:
    def marks(reward: str) -> bool:
        places = (tmp_path / reward / "x", tmp_path / reward / "y")
        runs = read(a_run(places[0], own(20, 1.0, 2.0)), a_run(places[1], own(20, 2.0, 2.0), settings=config(reward=reward)))
        return any(BEST in cell for row in summary(runs).rows for cell in row)

    assert marks("vader")
    assert not marks("exact_match")


def test_different_held_out_rows_are_said_and_nothing_is_marked(tmp_path: Path) -> None:
    other = thumbs(20, {"a": 0.1, "z": 0.2}, **{"rewards/auc": 0.9})
    runs = read(a_run(tmp_path / "one", thumbs(20)), a_run(tmp_path / "two", other))
    assert gaps(runs)[0].startswith("The runs were measured on different held-out rows (one 3, two 2; 1 of them are in all)")
    assert not any(BEST in cell for part in (summary(runs), *numbers(runs)) for row in part.rows for cell in row)


@pytest.mark.parametrize(("other", "best"), [("abc", True), ("def", False)])
def test_the_best_on_test_rows_is_marked_where_they_are_the_same(other: str, best: bool, tmp_path: Path) -> None:
    for name, digest, auc in (("one", "abc", 0.6), ("two", other, 0.7)):
        run = a_run(tmp_path / name, thumbs(20), rows={"data.test": {"rows": 3, "digest": digest}})
        (run / "eval" / "test.json").write_text(json.dumps(thumbs(20, None, **{"rewards/auc": auc})))
    part = next(part for part in numbers(read(tmp_path / "one", tmp_path / "two")) if part.title.startswith("Test rows"))
    assert next(row for row in part.rows if row[0] == "rewards/auc")[2] == (f"{BEST} 0.7" if best else "0.7")
    assert any("different test rows" in note for note in part.notes) is not best


def test_only_settings_that_differ_are_shown_with_digests_and_versions(tmp_path: Path) -> None:
    def rows(digest: str) -> dict[str, Any]:
        return {"data.train": {"rows": 9, "digest": digest}}

    runs = read(
        a_run(tmp_path / "one", rows=rows("abc")),
        a_run(
            tmp_path / "two",
            rows=rows("def"),
            versions={"valence": "0.1.0", "torch": "2.14"},
            settings=config(train="more.jsonl"),
        ),
        a_run(tmp_path / "three", rows=rows("abc"), settings='{"method": "dpo"}'),
    )
    part = settings(runs)
    lines = {row[0]: row[1:] for row in part.rows}
    assert lines["data.train.0.path"] == ["rows.jsonl", "more.jsonl", ""]
    assert lines["method"] == ["kto", "kto", "dpo"]
    assert lines["model.lora.alpha"] == ["null", "null", ""]
    assert lines["rows.data.train.digest"] == ["abc", "def", "abc"]
    assert lines["versions.torch"] == ["2.13", "2.14", "2.13"]
    assert not {"versions.valence", "rows.data.train.rows"} & set(lines)


def test_settings_that_are_the_same_are_said_to_be(tmp_path: Path) -> None:
    part = settings(read(a_run(tmp_path / "one"), a_run(tmp_path / "two")))
    assert [row[0] for row in part.rows] == ["none"]
    assert "the same" in part.notes[0]


def test_what_a_run_lacks_is_named_and_the_rest_compared(tmp_path: Path) -> None:
    whole = a_run(tmp_path / "whole", thumbs(0), thumbs(20))
    killed = a_run(tmp_path / "killed", thumbs(0), status="running", total_steps=50)
    torn = a_run(tmp_path / "torn", thumbs(20))
    with (torn / "metrics.jsonl").open("a") as log:
        log.write('{"step": 21, "lo')
    (torn / "config.yaml").write_text("- [")
    (torn / "eval/step-20.json").write_text("{")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text(config())
    nan = a_run(tmp_path / "nan", thumbs(20, loss="nan"))
    runs = read(whole, killed, torn, bare, nan)
    said = "\n".join(gaps(runs))
    for expected in (
        "killed: it is not finished: killed at step 20 of 50",
        "torn: its settings are not known",
        "torn: the rows of its last evaluation (step 20) are not there",
        "torn: config.yaml could not be read",
        "torn: metrics.jsonl:4 is not a whole record",
        "bare: run.json is missing",
        "bare: it has logged nothing",
        "bare: it was not evaluated",
        "nan: its last eval/loss is nan",
        "after different numbers of steps (0, 20)",
    ):
        assert expected in said
    assert "whole:" not in said
    cells = [dict(zip(summary(runs).header, row, strict=True)) for row in summary(runs).rows]
    # The trained ones are level, and do not win over one that was not measured after training.
    assert "only measured before their first step" in said
    assert [row["eval/rewards/auc"] for row in cells] == ["0.7", "0.5", "0.7", "", "0.7"]
    assert cells[4]["eval/loss"] == "nan"
    assert cells[1]["steps"] == "20 of 50"
    assert "none" in str(settings(runs).rows[0])  # the settings that are not known do not differ
    assert "5 runs compared" in comparison_page(runs)


# Charts


def test_curves_are_those_that_two_runs_share_and_that_vary(two: list[Compared], tmp_path: Path) -> None:
    third = a_run(tmp_path / "third", own(0, 1.0, 0.0), own(20, 2.0, 1.0))
    runs = [*two, *read(third)]
    held_out, training = curves(runs)
    assert {"eval/loss", "eval/rewards/auc"} <= set(held_out)
    assert "eval/reward/mean" not in held_out
    assert set(training) == {"loss"}  # lr and lag are the same everywhere, the others only count
    assert [trace["x"] for trace in held_out["eval/loss"]["data"]] == [[0, 20], [0, 20]]


def test_charts_have_words_for_titles_and_say_where_sizes_do_not_compare(tmp_path: Path) -> None:
    evaluations = thumbs(0), thumbs(20, {"1": 2.0})
    runs = read(*(a_run(tmp_path / str(beta), *evaluations, settings=config(beta=beta)) for beta in (0.1, 0.5)))
    held_out, _ = curves(runs)
    assert "sizes do not" in held_out["eval/rewards/margins"]["note"]
    assert held_out["eval/rewards/auc"]["note"] == "eval/rewards/auc"
    page = comparison_page(runs)
    assert "Margin, held out" in page
    assert "Accuracy and AUC: auc, held out" in page


def test_a_run_looks_the_same_in_every_chart_and_no_two_are_alike(tmp_path: Path) -> None:
    runs = read(*(a_run(tmp_path / f"run{i:02}", *([] if i == 1 else [thumbs(0), thumbs(20)])) for i in range(12)))
    held_out, training = curves(runs)
    looks = {
        (trace["name"], trace["line"]["color"], trace["line"]["dash"])
        for figure in (*held_out.values(), *training.values())
        for trace in figure["data"]
    }
    assert len(looks) == 12
    assert len({look(i) for i in range(5 * len(COLOURS))}) == 5 * len(COLOURS)
    assert ("run02", *look(2)) in looks


def test_time_is_drawn_where_runs_take_different_times(tmp_path: Path) -> None:
    evaluations = thumbs(0), thumbs(20)
    same = read(a_run(tmp_path / "a", *evaluations), a_run(tmp_path / "b", *evaluations, seconds=2.1))
    assert over_time(same) == {}
    slower = read(tmp_path / "a", a_run(tmp_path / "c", *evaluations, seconds=30.0))
    assert [trace["x"] for trace in over_time(slower)["loss"]["data"]] == [
        [pytest.approx(2 / 60, 1e-5), pytest.approx(4 / 60, 1e-5)],
        [0.5, 1.0],
    ]
    assert over_time(slower)["eval/loss"]["data"][1]["x"] == [0.0, 1.0]


def test_seconds_of_rounds_are_part_of_training() -> None:
    log = [
        {"step": 0},
        {"step": 2, "seconds": 1.0, "rounds": 2, "seconds/rollout": 10.0, "seconds/reward": 1.0},
        {"step": 3, "seconds": 1.0, "rounds": 2, "seconds/evaluation": 50.0},
        {"step": 4, "eval/loss": 1.0},
    ]
    assert trained_seconds(log) == [0.0, 23.0, 24.0, None]


def test_the_frontier_joins_evaluations_of_own_answers(tmp_path: Path) -> None:
    runs = read(
        a_run(tmp_path / "x", own(0, 0.1, 0.0), own(10, 0.5, 2.0), own(20, 0.4, 1.0)),
        a_run(tmp_path / "y", thumbs(0), thumbs(20)),
    )
    made = frontier(runs)
    _, figure = made["Reward against divergence"]
    [trace] = figure["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("x", [0, 2, 1], [0.1, 0.5, 0.4])
    assert trace["text"] == ["step 0", "step 10", "step 20"]
    _, figure = made["Margin against drift"]
    [trace] = figure["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("y", [0, 1], [0, 3])
    assert trace["line"]["color"] == look(1)[0]


# Rows


def test_rows_that_runs_place_differently_come_first(two: list[Compared]) -> None:
    found = disagreements(two)
    assert [each.origin for each in found] == ["held_out.jsonl:1", "held_out.jsonl:2", "held_out.jsonl:3"]
    assert found[0].places == {"first": (0.0, 0.1), "second": (1.0, 0.9)}
    assert found[0].texts == {"prompt": "Ask a", "completion": "Yes."}
    assert found[0].answers == {}


def test_places_are_among_a_runs_own_rows_whatever_the_scale_and_the_same_count_half(tmp_path: Path) -> None:
    runs = read(
        a_run(tmp_path / "one", thumbs(20, {"a": 0.1, "b": 0.2, "c": 0.2})),
        a_run(tmp_path / "two", thumbs(20, {"c": 30.0, "a": -5.0, "b": 30.0, "d": 99.0})),
    )
    found = disagreements(runs)
    assert [each.origin for each in found] == ["held_out.jsonl:2", "held_out.jsonl:3"]  # both give a the smallest reward
    assert [each.places for each in found] == [{"one": (0.75, 0.2), "two": (0.5, 30.0)}] * 2


def test_own_answers_are_shown_of_each_run_and_cut(tmp_path: Path) -> None:
    runs = read(a_run(tmp_path / "x", own(20, 1.0, 0.0, "Short.")), a_run(tmp_path / "y", own(20, 0.0, 0.0, "w" * (LONGEST + 7))))
    first = disagreements(runs)[0]
    assert first.answers == {"x": "Short.", "y": f"{'w' * LONGEST}\N{HORIZONTAL ELLIPSIS} (7 more characters)"}
    assert first.texts == {"prompt": "Ask"}


def test_of_pairs_the_gap_counts_and_of_several_answers_each(tmp_path: Path) -> None:
    def found(one: float, other: float) -> dict[str, Any]:
        pairs = [
            {"id": "p", "chosen": "c", "rejected": "r", "reward_chosen": one, "reward_rejected": 1.0, "prompt": "Pair"},
            {"id": "q", "chosen": "c", "rejected": "r", "reward_chosen": 3.0, "reward_rejected": 0.0, "prompt": "Pair"},
            {"id": "s", "reward_0": other, "reward_1": 5.0, "completion_0": "zero", "completion_1": "one", "prompt": "Several"},
        ]
        return {"step": 20, "metrics": {"loss": 1.0}, "rows": pairs}

    runs = read(a_run(tmp_path / "x", found(2.0, 4.0)), a_run(tmp_path / "y", found(9.0, -4.0)))
    by_reward = {each.places["x"][1]: each for each in disagreements(runs)}
    assert by_reward[1.0].places["y"][1] == 8.0
    assert by_reward[4.0].texts == {"prompt": "Several", "completion 0": "zero"}


def test_no_more_rows_than_can_be_read(tmp_path: Path) -> None:
    several = {str(i): math.sin(i) for i in range(100)}
    runs = read(
        a_run(tmp_path / "x", thumbs(20, several)),
        a_run(tmp_path / "y", thumbs(20, {id: -reward for id, reward in several.items()})),
    )
    assert len(disagreements(runs)) == MOST_ROWS


# The page and the Markdown


def poisoned(folder: Path) -> list[Compared]:
    for name in ("x", "y"):
        found = thumbs(20, {"a": 1.0 if name == "x" else 0.0, "b": 0.5}, **{HOSTILE: 1.0})
        for row in found["rows"]:
            row |= {"origin": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE + name}
        run = a_run(
            folder / HOSTILE.replace("/", "").replace("\ud800", "") / name,
            thumbs(0, None, **{HOSTILE: 2.0}),
            found,
            versions={HOSTILE: HOSTILE + name},
        )
        (run / "config.yaml").write_text(json.dumps({"method": HOSTILE, HOSTILE: HOSTILE + name}))
        with (run / "metrics.jsonl").open("a") as log:
            log.writelines(json.dumps({"step": step, HOSTILE: step}) + "\n" for step in (10, 20))
    return read(folder)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    runs = poisoned(tmp_path)
    source = comparison_page(runs)
    source.encode("utf-8")
    page = Page(source)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert page.handlers == []
    assert page.text.count("<img src=x onerror=") > 5
    assert "\x1b" not in source
    out = comparison_markdown(runs)
    out.encode("utf-8")
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(out)
    assert "<script" not in shown
    assert "<img" not in shown
    assert "\x1b" not in shown


def test_the_page_asks_nothing_of_the_network_and_says_all(two: list[Compared]) -> None:
    source = comparison_page(two)
    page = Page(source)
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    for heading in (
        "Summary",
        "Settings that differ",
        "Held-out numbers",
        "Curves of held-out rows",
        "Rows on which the runs disagree",
    ):
        assert f"{heading}" in page.text
    assert "train.seed01" in page.text
    assert "held_out.jsonl:1: first 0 %, second 100 %" in page.text


def test_without_plotly_the_page_says_how_to_get_the_curves(two: list[Compared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "plotly_js", lambda: "")
    page = Page(comparison_page(two))
    assert "pip install 'valence[report]'" in page.text
    assert "train.seed" in page.text


def test_the_markdown_has_the_same_tables(two: list[Compared]) -> None:
    out = comparison_markdown(two)
    for line in (
        "| train.seed | 0 | 1 |",
        f"| rewards/auc | 0.7 | {BEST} 0.8 |",
        "| held\\_out.jsonl:1 | Ask a | 0 % | 100 % | completion: Yes. |".replace("\\_", "_"),
    ):
        assert line in out.splitlines()


def test_a_run_in_markdown_for_a_pull_request(tmp_path: Path) -> None:
    run = a_run(tmp_path / "first", thumbs(0), thumbs(20), command="valence train x.yaml", warnings=["loss <jumped>"])
    out = run_markdown(read_run(run))
    assert (
        "**kto** trained a LoRA adapter of rank 16 of org/tiny-chat with the rows of rows.jsonl: 20 optimizer steps in 1m05s."
        in out
    )
    assert "| held-out rows | before (step 0) | after (step 20) | change |" in out
    assert "| rewards/auc | 0.5 | 0.7 | +0.2 |" in out
    assert "- loss &lt;jumped&gt;" in out
    assert "```sh\nvalence train x.yaml\n```" in out
    assert out.splitlines()[-1] == "valence 0.1.0, torch 2.13"
    assert "not done" not in out


def test_an_audit_of_another_program_in_markdown(tmp_path: Path) -> None:
    (a_run(tmp_path / "one") / "audit.json").write_text('{"train": {"findings": ["none"]}}')
    assert "train: its findings in audit.json could not be read" in MarkdownIt().render(run_markdown(read_run(tmp_path / "one")))


def test_a_run_of_which_little_is_there_in_markdown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "first", status="interrupted")
    out = run_markdown(read_run(run))
    assert "The run is not done: interrupted." in out
    assert "It was not evaluated on held-out rows." in out
    (tmp_path / "empty").mkdir()
    assert "not known" in run_markdown(read_run(tmp_path / "empty"))


def test_only_what_the_command_wrote_is_written_over(tmp_path: Path, two: list[Compared]) -> None:
    page = tmp_path / "comparison.html"
    write_out(page, comparison_page(two))
    write_out(page, comparison_markdown(two))
    write_out(page, "anything")
    with pytest.raises(UserError, match="nothing that `valence report` wrote"):
        write_out(page, comparison_page(two))
    assert page.read_text() == "anything"
    with pytest.raises(UserError, match="cannot be written"):
        write_out(tmp_path / "nowhere/page.html", "")
    with pytest.raises(UserError, match="nothing that"):
        write_out(tmp_path, "")


def test_what_is_no_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no end, and a pipe may have no beginning."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(UserError, match="nothing that"):
        write_out(Path("/dev/zero"), "")


# In a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("plotly", reason="plotly is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--no-first-run"])
        yield found
        found.close()


def test_the_page_works_in_a_browser(tmp_path: Path, browser: Any) -> None:
    own_answers = [a_run(tmp_path / f"own{i}", own(0, 0.1, 0.0), own(20, 0.4 + i, 1.0)) for i in range(2)]
    path = tmp_path / "comparison.html"
    path.write_text(comparison_page([*poisoned(tmp_path / "poisoned"), *read(*own_answers)]), encoding="utf-8")
    for width in (390, 1200):
        page = browser.new_page(viewport={"width": width, "height": 800})
        failed: list[str] = []
        page.on("console", lambda said: failed.append(said.text) if said.type in ("error", "warning") else None)  # noqa: B023
        page.on("pageerror", lambda error: failed.append(str(error)))  # noqa: B023
        page.goto(path.as_uri())
        charts = page.locator(".chart")
        for i in range(charts.count()):
            charts.nth(i).scroll_into_view_if_needed()
            charts.nth(i).locator(".main-svg").first.wait_for()
        assert failed == []
        assert charts.count() > 4
        assert page.evaluate("window.ran") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
