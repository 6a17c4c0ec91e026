"""The run page: built from whatever a run has left, self-contained, and safe with any text in the data."""

import builtins
import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from tests.report.synthetic import write_run
from valence.errors import UserError
from valence.report import rundata
from valence.report.curves import BARS, POINTS, curves
from valence.report.figures import by_length, by_source, calibration, spreads
from valence.report.html import flatten
from valence.report.page import seconds_of_a_step, write_page
from valence.report.rundata import read_run

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> | **b** [red]x[/red] \x1b[2J \x00 \ud800 é 日本"

CONFIG = """\
method: kto
model: {name: org/tiny-chat, dtype: float32, lora: {rank: 16, alpha: null}}
data: {train: [{path: feedback.jsonl}], eval: [{path: held_out.jsonl}], max_length: 1024}
loss: {beta: 0.1}
train: {batch_size: 8, learning_rate: 2.0e-05, seed: 0}
"""
CHANGED = [
    {"setting": "train.batch_size", "value": 8, "origin": "recipe.yaml:7"},
    {"setting": "train.learning_rate", "value": 2.34567e-5, "origin": "command line"},
]
AUDIT = {
    "train": {
        "kind": "judgement",
        "units": 200,
        "classes": {"up": 104, "down": 96},
        "files": [
            {"path": "feedback.jsonl", "format": "judgement", "rows": 203, "classes": {"up": 104, "down": 96}, "too_long": 3}
        ],
        "unused": [
            {
                "kind": "too_long",
                "reason": "longer than max_length",
                "fix": "raise data.max_length",
                "count": 3,
                "rows": ["feedback.jsonl:7", HOSTILE],
            }
        ],
        "prompt_length": {"min": 4, "median": 31.0, "p95": 80, "max": 112},
        "answer_length": {"min": 2, "median": 96.5, "p95": 250, "max": 1300},
        "truncation": {"rows": 203, "too_long": 3},
        "findings": {
            "contradictions": {"count": 2, "rows": ["feedback.jsonl:12 against feedback.jsonl:9"]},
            "length_bias": {"count": 1, "rows": []},
        },
        "ignored_columns": {"judged_by": 203},
        "weights": None,
    },
    "eval": {"kind": "judgement", "units": 60, "classes": {"up": 30, "down": 30}, "unused": [], "findings": {}},
}


def evaluation(step, scale):
    rows = [
        {
            "id": f"{i:04x}",
            "origin": f"held_out.jsonl:{i + 1}",
            "label": i % 2 == 0,
            "reward": scale * (math.sin(i * 1.7) + (1 if i % 2 == 0 else -1)),
            "logp": -50.0 - i,
            "prompt": HOSTILE,
            "completion": HOSTILE,
        }
        for i in range(60)
    ]
    metrics = {"loss": 0.5 - 0.1 * scale, "rewards/margins": 2 * scale, "auc": 0.5 + 0.3 * scale}
    return {"step": step, "metrics": metrics, "rows": rows}


def metrics_lines(steps):
    for step in range(1, steps + 1):
        grow = step / steps
        yield {
            "step": step,
            "loss": 0.5 - 0.1 * grow + 0.03 * math.sin(step * 2.1),
            "rewards/chosen": 0.6 * grow,
            "rewards/rejected": -0.5 * grow,
            "rewards/margins": 1.1 * grow,
            "kl": max(0.0, 0.4 * grow - 0.05),
            "kl/raw": 0.4 * grow - 0.05,
            "grad_norm": 1.2 + 0.4 * math.cos(step),
            "lr": 2e-5 * (1 - grow),
            "tokens/s": 480 + 40 * math.sin(step * 0.7),
            "tokens": 900 + step,
            "tokens_seen": 900 * step,
            "micro_batches": 2,
            "padding": 0.1 + 0.01 * math.sin(step),
        }
        if step % 20 == 0:
            yield {"step": step, "eval/loss": 0.5 - 0.08 * grow, "eval/rewards/margins": 0.9 * grow, "eval/auc": 0.5 + 0.3 * grow}


@pytest.fixture
def run_dir(tmp_path):
    """A finished run with hostile text wherever data may come through."""
    folder = tmp_path / "first"
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics_lines(60)))
    for step, scale in ((0, 0.0), (20, 0.2), (60, 0.5), (100, 0.6)):
        (folder / "eval" / f"step-{step}.json").write_text(json.dumps(evaluation(step, scale)))
    samples = [{"prompt": HOSTILE, "before": "I I I I I", "after": "A short answer."}]
    (folder / "samples.json").write_text(json.dumps(samples))
    run = {
        "command": "valence train recipe.yaml train.batch_size=8",
        "valence": "0.1.0",
        "torch": "2.13",
        "python": "3.11.2",
        "transformers": "5.23",
        "seconds": 192.0,
        "status": "done",
        "changed": CHANGED,
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder


class Page(HTMLParser):
    """Text and tags of a page, as a browser would see them."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.attributes, self.text, self._inside = [], [], "", ""
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


def charts(page):
    return json.loads(page.source.split('id="charts">')[1].split("</script>")[0])


def test_a_finished_run_is_told_in_full(run_dir):
    path = write_page(run_dir)
    page = Page(path)
    assert path == run_dir / "report.html"
    assert path.stat().st_size < 8e6
    assert "kto trained a LoRA adapter of rank 16 of org/tiny-chat" in page.text
    assert "60 optimizer steps in 3m12s" in page.text
    assert "of all 203 rows: prompts of 4 to 112 tokens (median 31); answers of 2 to 1,300 tokens" in page.text
    assert "train: 3 rows were not used (too long; the first: longer than max_length); such as feedback.jsonl:7, " in page.text
    assert "train: contradictions (2); such as feedback.jsonl:12 against feedback.jsonl:9" in page.text
    assert "train: length bias" in page.text
    assert "prompt lengthmin4median31p9580max112" in page.text
    assert "judged by203" in page.text
    assert re.search(r"metricstep 0step 100change\s*loss0.50.44-0.06", page.text)
    assert "AUC" not in page.text  # of which the log has no number under that name
    assert "At step 0 the reward of every row is 0" in page.text
    assert "A short answer." in page.text
    assert "valence train recipe.yaml train.batch_size=8" in page.text
    assert "batch_size: 8, learning_rate: 2.0e-05" in page.text
    assert list(run_dir.glob("*.tmp")) == []


def test_changed_settings_are_told_exactly_with_their_place(run_dir):
    text = Page(write_page(run_dir)).text
    assert "train.batch_size8recipe.yaml:7train.learning_rate2.34567e-05command line" in text


def test_hostile_text_stays_text(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, HOSTILE: step}) + "\n" for step in (59, 60))
    (run_dir / "run.json").write_text(json.dumps({"command": HOSTILE, "status": HOSTILE, "notes": [HOSTILE]}))
    page = Page(write_page(run_dir))
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert not [a for a in page.attributes if a[1].startswith("on")]
    shown = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> | **b** [red]x[/red] ␛[2J ␀ \ufffd é 日本"
    assert page.text.count(shown) >= 5
    assert "<" not in page.source.split('id="charts">')[1].split("</script>")[0]
    assert any(trace.get("name", "").startswith("&lt;/pre&gt;") for c in charts(page).values() for trace in c["data"])


def test_the_page_asks_nothing_of_the_network(run_dir):
    page = Page(write_page(run_dir))
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] == "src"]
    assert [v for _, name, v in page.attributes if name == "href" and not v.startswith("#")] == []
    assert "default-src 'none'" in page.source
    assert "script-src 'sha256-" in page.source
    assert page.source.count("plotly.js v") == 1


def test_an_empty_folder_gives_a_page(tmp_path):
    page = Page(write_page(tmp_path))
    assert "unfinished" in page.text
    assert "holds no recipe" in page.text
    assert "No metrics were logged" in page.text


@pytest.mark.parametrize("name", ["config.yaml", "audit.json", "metrics.jsonl", "samples.json", "run.json", "eval/step-20.json"])
@pytest.mark.parametrize("damage", [b'{"rows": [1, ', b"[1]", b"\xff\xfe\x00", b"- [", b""])
def test_a_damaged_file_leaves_a_gap_that_is_told(run_dir, name, damage):
    (run_dir / name).write_bytes(damage)
    text = Page(write_page(run_dir)).text
    assert name.removeprefix("eval/") in text or (name == "metrics.jsonl" and not damage)


def test_a_torn_last_line_of_metrics_is_told_and_the_rest_is_used(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')
    run = read_run(run_dir)
    assert run.metrics[-1]["step"] == 60
    assert run.problems == (
        "metrics.jsonl:64 is not a whole record and was left out (the last line: the run was stopped while writing it)",
    )


def test_a_step_that_is_logged_again_replaces_the_first(tmp_path):
    lines = ['{"step": 2, "loss": 2.0}', '{"step": 1, "loss": 9.0}', '{"step": 1, "loss": 1.0}', '{"step": 1, "eval/loss": 3.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run(tmp_path).metrics == ({"step": 1, "loss": 1.0, "eval/loss": 3.0}, {"step": 2, "loss": 2.0})


def test_values_that_are_not_finite_are_gaps_in_the_curve_and_a_warning(tmp_path):
    losses = ("0.5", '"nan"', "NaN", "0.4")
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert curves(read_run(tmp_path))["Learning"]["Loss"]["data"][0]["y"] == [0.5, None, None, 0.4]
    assert "loss (at 2 of the steps, first at 2)" in Page(write_page(tmp_path)).text


def test_charts_hold_known_metrics_together_and_any_other_that_varies(run_dir):
    made = curves(read_run(run_dir))
    named = [t.get("name") for t in made["Learning"]["Rewards by class"]["data"]]
    assert named == ["chosen", None, "rejected", None]  # each with the band of the evaluations' rows
    margin = made["Learning"]["Margin"]["data"]
    assert [(t["name"], t["x"][:3]) for t in margin] == [("margins", [1, 2, 3]), ("margins, held out", [20, 40, 60])]
    assert {"padding", "auc"} == set(made["More"])
    assert "Divergence from the reference" not in made["Learning"]  # kl is kto's reference point


@pytest.mark.parametrize("kind", ["thumbs", "pairs", "own"])
def test_every_chart_is_one_that_plotly_knows(tmp_path, kind):
    from plotly.graph_objects import Figure

    found = charts(Page(write_page(write_run(tmp_path, kind))))
    assert len(found) > 12
    for chart in found.values():
        Figure(data=chart["data"], layout=chart["layout"])  # raises for a name or a value that it does not know


def test_the_reward_of_own_answers_and_its_divergence_have_charts(tmp_path):
    made = curves(read_run(write_run(tmp_path, "own")))
    reward = made["Learning"]["Reward of own answers"]
    assert [t.get("fill") for t in reward["data"]] == [None, "toself", None]
    assert reward["note"].endswith("10 to 90 % of the evaluation's rows")
    assert made["Learning"]["Divergence from the reference"]["data"][0]["name"] == "kl"
    assert "Drift on mismatched answers" not in made["Learning"]


def test_a_band_goes_from_a_tenth_to_nine_tenths_of_the_rows():
    rows = [{"label": True, "reward": float(i)} for i in range(11)] + [{"label": False, "reward": -2.0}]
    assert rundata.bands_of(rows) == {"chosen": (1.0, 9.0), "rejected": (-2.0, -2.0)}
    pairs = [{"reward_chosen": float(i), "reward_rejected": -1.0} for i in range(11)]
    assert rundata.bands_of(pairs) == {"chosen": (1.0, 9.0), "rejected": (-1.0, -1.0), "margins": (2.0, 10.0)}


def test_the_time_of_each_phase_is_stacked_and_nothing_of_it_lost(tmp_path):
    run = read_run(write_run(tmp_path, "own", steps=130, times=3))
    traces = {t["name"].split(" ")[0]: t for t in curves(run)["Machine"]["Time"]["data"]}
    assert set(traces) == {"training", "rollout", "reward", "measuring", "evaluation"}
    assert len(traces["training"]["x"]) <= BARS
    assert sum(traces["training"]["y"]) == pytest.approx(260)
    assert sum(traces["evaluation"]["y"]) == pytest.approx(12)


def test_seconds_of_a_record_are_means_over_its_rounds(tmp_path):
    """Ten rounds since the record before: a mean of 3 seconds each."""
    log = [{"step": 10 * i, "rounds": 10 * i, "seconds": 5.0, "seconds/rollout": 3.0} for i in range(1, 4)]
    log.append({"step": 35, "rounds": 30, "seconds": 2.5})
    assert seconds_of_a_step(log[:3]) == 3.5
    assert seconds_of_a_step(log) == pytest.approx(72.5 / 25)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    traces = curves(read_run(tmp_path))["Machine"]["Time"]["data"]
    assert {t["name"]: t["y"] for t in traces} == {
        "training (18s)": [5.0, 5.0, 5.0, 2.5],
        "rollout (1m30s)": [30.0, 30.0, 30.0, 0.0],
    }


def test_an_auc_says_of_how_many_thumbs_it_is(run_dir):
    path = run_dir / "eval" / "step-100.json"
    found = json.loads(path.read_text())
    labels = [row["label"] for row in found["rows"]]
    path.write_text(json.dumps(found | {"metrics": {"rewards/auc": 0.75}}))
    assert f"{labels.count(True)} up, {labels.count(False)} down; " in Page(write_page(run_dir)).text


def test_one_evaluation_is_shown_alone_and_the_test_rows_apart(run_dir):
    for step in (20, 60, 100):
        (run_dir / "eval" / f"step-{step}.json").unlink()
    (run_dir / "eval" / "step-20.json").write_text('{"step": 20, "rows": [], "metrics": {"auc": 0.75}}')
    (run_dir / "eval" / "step-0.json").unlink()
    (run_dir / "eval" / "test.json").write_text('{"step": 60, "rows": [], "metrics": {"auc": 0.5}}')
    text = Page(write_page(run_dir)).text
    assert re.search(r"metricstep 20\s*auc0\.75", text)
    assert "Test rows, after trainingmetricstep 60auc0.5" in text


def test_a_long_run_is_drawn_as_means_of_neighbouring_steps_between_their_extremes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {i % 2}}}\n' for i in range(4 * POINTS)))
    band, line = curves(read_run(tmp_path))["Learning"]["Loss"]["data"]
    assert len(line["x"]) == POINTS
    assert set(line["y"]) == {0.5}
    assert line["x"][0] == 2
    assert band["y"] == [0] * POINTS + [1] * POINTS


def test_rewards_are_told_apart_by_length_and_by_source():
    rows = [{"label": True, "reward": float(n), "tokens": n, "origin": f"{'a' if n < 3 else 'b'}.jsonl:{n}"} for n in range(8)]
    held = by_length(rows)
    assert list(held) == ["0 to 1 tokens", "2 to 3 tokens", "4 to 5 tokens", "6 to 7 tokens"]
    assert held["2 to 3 tokens"] == {"thumbs up": [2.0, 3.0]}
    assert {name: len(found["thumbs up"]) for name, found in by_source(rows).items()} == {"b.jsonl": 5, "a.jsonl": 3}
    ends = "_of_a_name_that_is_longer_than_what_is_shown.jsonl"  # the same end: none of them is lost
    far = [{**row, "source": f"{'a' if i < 3 else 'b'}{ends}"} for i, row in enumerate(rows)]
    assert {name: len(found["thumbs up"]) for name, found in by_source(far).items()} == {f"b{ends}": 5, f"a{ends}": 3}


def test_histograms_count_every_row_once_and_leave_out_a_start_without_rewards(tmp_path):
    run = read_run(write_run(tmp_path, "thumbs"))
    made = spreads(run.first, run.last)
    assert set(made) == {"By class", "By length of the answer", "By source"}
    assert {sum(sum(t["y"]) for t in figure["data"]) for figure in made.values()} == {60}
    own = read_run(write_run(tmp_path / "own", "own"))
    assert {"By class", "By length of the answer, step 0", "By length of the answer, step 60"} <= set(
        spreads(own.first, own.last)
    )


def test_calibration_is_the_share_that_came_true_in_bins_of_equally_many_rows():
    rows = [{"label": i % 4 == 0, "reward": -1.0 - i / 1000} for i in range(20)]
    rows += [{"label": i % 4 != 0, "reward": 1.0 + i / 1000} for i in range(20)]
    dots = calibration(rows)["data"][1]
    assert dots["y"] == [0.2, 0.3, 0.7, 0.8]  # of the tens in the order of the rewards
    assert dots["x"][0] == pytest.approx(1 / (1 + math.exp(1.0145)), rel=1e-3)
    assert dots["text"] == ["10 rows"] * 4
    pairs = [{"reward_chosen": 0.1 * i, "reward_rejected": 0.1 * i - (1 + i / 1000) * (1 if i % 5 else -1)} for i in range(40)]
    assert calibration(pairs)["data"][1]["y"] == [0.8] * 4
    assert calibration(rows[:15]) is None


@pytest.mark.parametrize("kind", ["thumbs", "pairs", "own"])
def test_a_long_run_makes_a_page_of_few_megabytes_in_a_few_seconds(tmp_path, kind, monkeypatch):
    folder = write_run(tmp_path / "long", kind, steps=10_000, rows=500, times=20)
    whole = rundata._evaluation
    read = []
    monkeypatch.setattr(rundata, "_evaluation", lambda text: read.append(len(text)) or whole(text))
    began = time.perf_counter()
    path = write_page(folder)
    took = time.perf_counter() - began
    assert path.stat().st_size < 8e6
    assert took < 10  # about two seconds on one core that has nothing else to do
    assert len(read) == (20 if kind == "own" else 21)
    write_page(folder)
    assert len(read) == (22 if kind == "own" else 24)  # those between the first and the last are not read again
    assert all(len(t["x"]) <= 2 * POINTS for c in charts(Page(path)).values() for t in c["data"])


def test_evaluations_between_are_left_out_when_they_are_too_much_to_read(tmp_path, monkeypatch):
    folder = write_run(tmp_path, "thumbs", times=7)
    assert len(read_run(folder).bands) == 7
    monkeypatch.setattr(rundata, "BETWEEN", 2)
    assert len(read_run(folder).bands) == 4
    monkeypatch.setattr(rundata, "BETWEEN_BYTES", 1)
    assert list(read_run(folder).bands) == [0, 60]


def test_a_run_that_goes_on_says_how_far_it_is_and_may_be_loaded_anew(tmp_path):
    folder = write_run(tmp_path, "thumbs", status="interrupted")
    page = Page(write_page(folder, "running"))
    assert "step 60 of 120" in page.text
    assert re.search(r"2\.\ds a step · 2m\d\ds left · written at \d\d:\d\d:\d\d UTC", page.text)
    assert ("input", "id", "reload") in page.attributes
    assert ("progress", "max", "120") in page.attributes
    page = Page(write_page(folder))
    assert "left" not in page.text.split("Results")[0]
    assert "input" not in page.tags


def test_the_time_of_a_step_has_every_phase_in_it():
    log = [
        {"step": 0, "seconds/evaluation": 9.0},
        {"step": 2, "seconds": 3.0},
        {"step": 4, "seconds": 3.0, "seconds/saving": 2.0},
    ]
    assert seconds_of_a_step(log) == 2.0
    assert seconds_of_a_step([]) is None
    assert seconds_of_a_step([{"step": 1, "loss": 1.0}, {"step": 2, "seconds": "nan"}]) is None


def test_lengths_of_the_data_are_drawn_and_not_tabled(tmp_path):
    page = Page(write_page(write_run(tmp_path, "thumbs")))
    assert "prompt tokens" in page.text
    assert "edges" not in page.text
    drawn = [c for c in charts(page).values() if c["layout"].get("xaxis", {}).get("title", {}).get("text") == "tokens"]
    assert [[t["name"] for t in c["data"]] for c in drawn] == [["all"], ["up", "down"]]
    assert drawn[0]["data"][0]["y"] == [30, 90, 40, 20, 15, 5]


def test_answers_of_own_are_shown_beside_the_first_ones_the_largest_change_first(tmp_path):
    folder = write_run(tmp_path, "own")
    rows = json.loads((folder / "eval/step-60.json").read_text())["rows"]
    first = {row["id"]: row["reward"] for row in json.loads((folder / "eval/step-0.json").read_text())["rows"]}
    most = max(rows, key=lambda row: abs(row["reward"] - first[row["id"]]))
    text = Page(write_page(folder)).text
    answers = text.split("those whose reward changed most come first.")[1]
    assert answers.startswith(most["prompt"])
    assert most["completion"] in answers.split("Question", 2)[1]


def test_long_texts_are_cut_where_the_page_is_full_and_that_is_said(tmp_path):
    folder = write_run(tmp_path, "thumbs", rows=200)
    found = json.loads((folder / "eval/step-60.json").read_text())
    for row in found["rows"]:
        row["completion"] = "<" * 50_000
    (folder / "eval/step-60.json").write_text(json.dumps(found))
    path = write_page(folder)
    assert path.stat().st_size < 8e6
    assert "and 42,000 more characters in eval/step-60.json" in Page(path).text


def test_without_plotly_the_page_says_how_to_get_the_curves(run_dir, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    path = write_page(run_dir)
    assert "pip install 'valence[report]'" in Page(path).text
    assert "A short answer." in Page(path).text
    assert path.stat().st_size < 2e5


def test_a_page_that_cannot_be_made_leaves_the_old_one(run_dir, monkeypatch):
    first = write_page(run_dir).read_text(encoding="utf-8")
    monkeypatch.setattr("valence.report.html.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_page(run_dir)
    assert (run_dir / "report.html").read_text(encoding="utf-8") == first


def test_a_folder_that_is_not_there_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        write_page(tmp_path / "absent")


def test_a_long_list_in_the_audit_is_cut_and_said(tmp_path):
    (tmp_path / "audit.json").write_text(json.dumps({"train": {"dropped": [{"line": i} for i in range(60)]}}))
    page = Page(write_page(tmp_path))
    assert "474849and 10 more in audit.json" in page.text


def test_flatten_gives_dotted_names():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}
