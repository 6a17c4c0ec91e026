"""The report: built from any files of a run, self-contained, and safe with any text in the data."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.errors import raises_error
from tests.reports.hostile import HOSTILE, Page, charts
from tests.reports.synthetic import write_run
from valence.reports import run_record
from valence.reports.charts import MAX_POINTS
from valence.reports.formatting import flatten
from valence.reports.page import HEADLINES, report_markdown, write_page
from valence.reports.run_record import RunRecord


def test_the_page_of_a_finished_run_has_everything(run_dir):
    path = write_page(run_dir)
    page = Page(path)
    assert path == run_dir / "report.html"
    assert path.stat().st_size < 8e6
    assert re.search(r"kto .* 16 of org/tiny-chat.* 60 .* 3m12s", page.text)
    # Rows; lengths of prompts and answers.
    assert re.search(r"\b203\D+\b4\D+\b112\D+\b31\D+\b2\D+\b1,300\b", page.text)
    train = [item for item in page.items if item.startswith("train: ")]
    assert [item.split("(")[0].strip() for item in train[1:]] == [
        "train: contradictions",
        "train: length bias",
    ]
    assert all(
        fact in train[0] for fact in ("3 rows", "longer than max_length", "feedback.jsonl:7, ")
    )
    assert re.search(r"\(2\).*feedback.jsonl:12 against feedback.jsonl:9", train[1])
    assert "prompt lengthmin4median31p9580max112" in page.text
    assert "judged by203" in page.text
    assert re.search(r"metricstep 0step 100change\s*loss0.50.44-0.06", page.text)
    # Of which the log has no number under that name.
    assert f"{HEADLINES['rewards/auc']}, held out" not in page.text
    assert page.section("Rewards").startswith("<p>")
    assert "step 0 " in page.section("Rewards").split("</p>")[0]  # where all rewards are 0
    assert "A short answer." in page.text
    assert "valence train recipe.yaml train.batch_size=8" in page.text
    assert "batch_size: 8, learning_rate: 2.0e-05" in page.text
    assert list(run_dir.glob("*.tmp")) == []


def test_changed_settings_are_exact_and_have_their_place(run_dir):
    text = Page(write_page(run_dir)).text
    assert "train.batch_size8recipe.yaml:7train.learning_rate2.34567e-05command line" in text


def test_hostile_text_stays_text(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, HOSTILE: step}) + "\n" for step in (59, 60))
    (run_dir / "run.json").write_text(
        json.dumps({"command": HOSTILE, "status": HOSTILE, "notes": [HOSTILE]})
    )
    page = Page(write_page(run_dir))
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert not [a for a in page.attributes if a[1].startswith("on")]
    shown = (
        "</pre><script>alert(1)</script><img src=x onerror=alert(2)> | **b** [red]x[/red] "
        "␛[2J ␀ \ufffd é 日本"
    )
    assert page.text.count(shown) >= 5
    assert "<" not in page.source.split('id="charts">')[1].split("</script>")[0]
    assert any(
        trace.get("name", "").startswith("&lt;/pre&gt;")
        for c in charts(page).values()
        for trace in c["data"]
    )


def test_the_page_needs_no_network(run_dir):
    page = Page(write_page(run_dir))
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] == "src"]
    assert [v for _, name, v in page.attributes if name == "href" and not v.startswith("#")] == []
    assert "default-src 'none'" in page.source
    assert "script-src 'sha256-" in page.source
    assert page.source.count("plotly.js v") == 1


def test_an_empty_folder_gives_a_page(tmp_path):
    page = Page(write_page(tmp_path))
    assert ("span", "class", "status bad") in page.attributes
    assert "config.yaml" in page.text
    assert charts(page) == {}


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "audit.json", "metrics.jsonl", "samples.json", "run.json", "eval/step-20.json"],
)
@pytest.mark.parametrize("damage", [b'{"rows": [1, ', b"[1]", b"\xff\xfe\x00", b"- [", b""])
def test_a_damaged_file_leaves_a_gap_and_is_named(run_dir, name, damage):
    (run_dir / name).write_bytes(damage)
    text = Page(write_page(run_dir)).text
    assert name.removeprefix("eval/") in text or (name == "metrics.jsonl" and not damage)


def test_a_torn_last_line_of_metrics_is_named_and_the_rest_is_used(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')
    run = RunRecord.read(run_dir)
    assert run.metrics[-1]["step"] == 60
    [problem] = run.problems
    assert problem.startswith("metrics.jsonl:64 ")


def test_a_step_that_is_logged_again_replaces_the_first(tmp_path):
    lines = [
        '{"step": 2, "loss": 2.0}',
        '{"step": 1, "loss": 9.0}',
        '{"step": 1, "loss": 1.0}',
        '{"step": 1, "eval/loss": 3.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert RunRecord.read(tmp_path).metrics == (
        {"step": 1, "loss": 1.0, "eval/loss": 3.0},
        {"step": 2, "loss": 2.0},
    )


def test_an_auc_shows_its_number_of_thumbs(run_dir):
    path = run_dir / "eval" / "step-100.json"
    result = json.loads(path.read_text())
    labels = [row["label"] for row in result["rows"]]
    path.write_text(json.dumps(result | {"metrics": {"rewards/auc": 0.75}}))
    assert (
        f"{labels.count(True)} up, {labels.count(False)} down; " in Page(write_page(run_dir)).text
    )


def test_a_run_without_samples_explains_how_to_get_some(tmp_path):
    run = write_run(tmp_path / "run", "thumbs")
    setting = "run.samples.prompts"
    assert setting not in Page(write_page(run)).text.split("Answers")[0]
    assert setting not in report_markdown(RunRecord.read(run))
    (run / "samples.json").unlink()
    assert setting in Page(write_page(run)).text.split("Warnings")[0]
    assert setting in report_markdown(RunRecord.read(run)).splitlines()[2]


def test_one_evaluation_is_shown_alone_and_the_test_rows_apart(run_dir):
    for step in (20, 60, 100):
        (run_dir / "eval" / f"step-{step}.json").unlink()
    (run_dir / "eval" / "step-20.json").write_text(
        '{"step": 20, "rows": [], "metrics": {"auc": 0.75}}'
    )
    (run_dir / "eval" / "step-0.json").unlink()
    (run_dir / "eval" / "test.json").write_text('{"step": 60, "rows": [], "metrics": {"auc": 0.5}}')
    text = Page(write_page(run_dir)).text
    assert re.search(r"metricstep 20\s*auc0\.75", text)
    assert "metricstep 60auc0.5" in text


SLOW = {"steps": 10_000, "rows": 500}


@pytest.mark.parametrize(("kind", "size"), [
    ("thumbs", {"steps": 2 * MAX_POINTS + 100, "rows": 40}),
    ("own", {"steps": 2 * MAX_POINTS + 100, "rows": 40}),
    *(pytest.param(kind, SLOW, marks=pytest.mark.slow) for kind in ("thumbs", "pairs", "own")),
])  # fmt: skip
def test_a_long_run_makes_a_page_of_few_megabytes_and_reads_old_evaluations_once(
    tmp_path,
    kind,
    size,
    monkeypatch,
):
    folder = write_run(tmp_path / "long", kind, times=20, **size)
    read_bytes, read = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    path = write_page(folder)
    evaluations = sorted((folder / "eval").iterdir())
    assert path.stat().st_size < 8e6
    assert sorted(item for item in read if item in evaluations) == evaluations
    read.clear()
    write_page(folder)
    again = [item.name for item in read if item in evaluations]
    # Those between the first and the last are not read again.
    ends = ["step-0.json", f"step-{size['steps']}.json"]
    assert sorted(again) == (ends if kind == "own" else [*ends, "train.json"])
    assert all(
        len(t["x"]) <= 2 * MAX_POINTS for c in charts(Page(path)).values() for t in c["data"]
    )


def test_evaluations_between_are_left_out_when_they_are_too_much_to_read(tmp_path):
    times = 2 * run_record.BETWEEN + 2
    folder = write_run(tmp_path / "many", "thumbs", steps=times - 1, rows=1, times=times)
    assert len(RunRecord.read(folder).bands) == run_record.BETWEEN + 2
    folder = write_run(tmp_path / "large", "thumbs", times=7)
    assert len(RunRecord.read(folder).bands) == 7
    os.truncate(folder / "eval/step-30.json", 6 * run_record.BETWEEN_BYTES)
    assert list(RunRecord.read(folder).bands) == [0, 60]


def test_the_page_of_a_running_run_shows_progress_and_reloads(tmp_path):
    folder = write_run(tmp_path, "thumbs", status="interrupted")
    page = Page(write_page(folder, "running"))
    assert re.search(r"60 of 120\b.*\b2\.\ds\b.*\b2m\d\ds\b.*\b\d\d:\d\d:\d\d UTC", page.text)
    assert ("input", "id", "reload") in page.attributes
    assert ("progress", "max", "120") in page.attributes
    page = Page(write_page(folder))
    assert not {"progress", "input"} & set(page.tags)


def test_samples_are_shown_next_to_the_first_ones_by_largest_change(tmp_path):
    folder = write_run(tmp_path, "own")
    rows = json.loads((folder / "eval/step-60.json").read_text())["rows"]
    first = {
        row["id"]: row["reward"]
        for row in json.loads((folder / "eval/step-0.json").read_text())["rows"]
    }
    largest = max(rows, key=lambda row: abs(row["reward"] - first[row["id"]]))
    _, answer, *_ = re.split(r"(?=Question \d+\?)", Page(write_page(folder)).section("Answers"))
    assert answer.startswith(largest["prompt"])
    assert largest["completion"] in answer


def test_long_texts_are_cut_where_the_page_is_full_with_the_number_of_characters(tmp_path):
    folder = write_run(tmp_path, "thumbs", rows=200)
    result = json.loads((folder / "eval/step-60.json").read_text())
    for row in result["rows"]:
        row["completion"] = "<" * 50_000
    (folder / "eval/step-60.json").write_text(json.dumps(result))
    path = write_page(folder)
    assert path.stat().st_size < 8e6
    assert re.search(r"\b42,000\D+eval/step-60.json", Page(path).text)


@pytest.mark.usefixtures("no_plotly")
def test_without_plotly_the_page_explains_how_to_get_curves(run_dir):
    path = write_page(run_dir)
    assert "pip install plotly" in Page(path).text
    assert "A short answer." in Page(path).text
    assert path.stat().st_size < 2e5


def test_a_page_that_cannot_be_made_leaves_the_old_one(run_dir, monkeypatch):
    first = write_page(run_dir).read_text(encoding="utf-8")
    monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_page(run_dir)
    assert (run_dir / "report.html").read_text(encoding="utf-8") == first


def test_a_folder_that_is_not_there_is_a_user_error(tmp_path):
    with raises_error("run-not-found", where=str(tmp_path / "absent"), fix="run.dir"):
        write_page(tmp_path / "absent")


def test_a_long_list_in_the_audit_is_cut_with_the_number_of_its_rows(tmp_path):
    (tmp_path / "audit.json").write_text(
        json.dumps({"train": {"dropped": [{"line": i} for i in range(60)]}})
    )
    page = Page(write_page(tmp_path))
    assert re.search(r"474849\D*\b10\D+audit.json", page.text)


def test_flatten_gives_dotted_names():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_come_first_unless_they_are_random_draws(run_dir, temperature):
    path = run_dir / "config.yaml"
    path.write_text(path.read_text() + f"run: {{samples: {{temperature: {temperature}}}}}\n")
    page = Page(write_page(run_dir))
    places = [page.source.index(f"<h2>{title}</h2>") for title in ("Answers", "Metrics")]
    assert (places[0] < places[1]) is (temperature == 0)
    assert page.source.count("<h2>Answers</h2>") == 1
