"""Tasks of lm-eval that `valence compare` runs: their numbers against independent ones, resuming,
and mistakes.

The tasks read local files. The models are tiny and random.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command import command, command_error, place
from tests.errors import check_error
from tests.programs import Program
from valence.apps.compare import run_benchmarks

__all__ = ["place"]

pytest.importorskip("lm_eval")

CITIES = [
    *("Paris", "Rome", "Bern", "Oslo", "Tokyo", "Cairo"),
    *("Lima", "Kiev", "Doha", "Riga", "Baku", "Male"),
]
QUESTIONS: list[dict[str, Any]] = [
    {
        "question": f"Which city has the number {i}, and is not {CITIES[-1 - i % 7]}?",
        "choices": [CITIES[(i * 5 + k * 3) % 12] for k in range(4)],
        "answer": i * 7 % 4,
    }
    for i in range(24)
]
CHOICES = """
task: cities
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/cities.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1}
"""
REPLIES = """
task: replies
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/cities.jsonl}}
test_split: test
output_type: generate_until
generation_kwargs: {until: ["q"], max_gen_toks: 6}
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
metric_list:
  - {metric: !function utils.has_e, aggregation: mean, higher_is_better: true}
metadata: {version: 1}
"""
SLOW = CHOICES.replace("task: cities", "task: slow").replace(
    'doc_to_text: "{{question}}"', "doc_to_text: !function utils.wait"
)
UTILS = """
import glob, os, time

def has_e(references, predictions, **settings):
    return float("e" in predictions[0])

def wait(row):
    if os.path.exists("block") and glob.glob("benchmarks/lm_eval/baseline.cities.*"):
        open("blocked", "w").close()
        time.sleep(600)
    return row["question"]
"""
RUN = ("--lm-eval-include", "tasks", "--out", "benchmarks")


def write_rows(rows: Sequence[Any] = QUESTIONS) -> None:
    Path("tasks/cities.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with two models and tasks."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    torch.manual_seed(6)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 2 * weight.std())
    model.save_pretrained("other")
    AutoTokenizer.from_pretrained("model").save_pretrained("other")
    (place / "tasks").mkdir()
    for name, text in (("cities", CHOICES), ("replies", REPLIES), ("slow", SLOW)):
        Path(f"tasks/{name}.yaml").write_text(text)
    Path("tasks/utils.py").write_text(UTILS)
    write_rows()
    return place


def compare(*words: str, tasks: str = "cities", models: Sequence[str] = ("model", "other")) -> Any:
    assert command("compare", *models, "--lm-eval-tasks", tasks, *RUN, *words) == 0
    return json.loads(Path("benchmarks/compare.json").read_text())["benchmarks"]


def result_files() -> dict[str, int]:
    """The stored results, and when they were written."""
    files = Path("benchmarks/lm_eval").glob("*.json")
    return {path.name: path.stat().st_mtime_ns for path in files}


def log_likelihoods(
    folder: str, *, as_chat: bool, questions: Sequence[dict[str, Any]] = QUESTIONS
) -> list[list[float]]:
    """The log-probability of each choice behind its question, one sequence at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    results: list[list[float]] = []
    for row in questions:
        results.append([])
        for choice in row["choices"]:
            prompt, answer = row["question"], f" {choice}"
            if as_chat:
                messages = [{"role": "user", "content": prompt}]
                prompt = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                answer = choice
            # lm-eval counts whitespace at the end of a prompt as a part of the answer
            size = len(tokenizer.encode(prompt.rstrip()))
            ids = torch.tensor([tokenizer.encode(prompt + answer)])
            with torch.no_grad():
                logps = model(ids).logits[0].log_softmax(-1)
            results[-1].append(
                sum(logps[i - 1, ids[0, i]].item() for i in range(size, ids.shape[1]))
            )
    return results


@pytest.mark.parametrize("as_chat", [True, False])
def test_the_numbers_are_those_of_an_independent_computation(folder: Path, as_chat: bool) -> None:
    results = {
        row["metric"]: row for row in compare("--lm-eval-chat" if as_chat else "--no-lm-eval-chat")
    }
    scores: dict[str, dict[str, list[float]]] = {"acc": {}, "acc_norm": {}}
    for side, model in (("baseline", "model"), ("candidate", "other")):
        expected = log_likelihoods(model, as_chat=as_chat)
        (path,) = Path("benchmarks/lm_eval").glob(f"{side}.cities.*.json")
        samples = json.loads(path.read_text())["samples"]["cities"]
        assert len(samples) == len(QUESTIONS)
        for sample, logps in zip(samples, expected, strict=True):
            values = [value for value, _ in sample["filtered_resps"]]
            assert values == pytest.approx(logps, abs=1e-3)
        for metric in scores:
            lengths = [
                [len(choice) if metric == "acc_norm" else 1 for choice in row["choices"]]
                for row in QUESTIONS
            ]
            scores[metric][side] = [
                float(max(range(4), key=lambda k: logps[k] / size[k]) == row["answer"])
                for row, logps, size in zip(QUESTIONS, expected, lengths, strict=True)
            ]
    for metric, sides in scores.items():
        number, n = results[metric], len(QUESTIONS)
        for side, values in sides.items():
            p = statistics.mean(values)
            assert number[side] == pytest.approx(p)
            assert number[f"{side}_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
        differences = [b - a for a, b in zip(sides["baseline"], sides["candidate"], strict=True)]
        assert any(differences)
        error = 1.96 * statistics.stdev(differences) / math.sqrt(n)
        mean = statistics.mean(differences)
        assert (number["low"], number["high"]) == pytest.approx((mean - error, mean + error))
        assert number["is_paired"]
    independent = 1.96 * math.hypot(*(results["acc"][f"{s}_stderr"] for s in scores["acc"]))
    assert (results["acc"]["high"] - results["acc"]["low"]) / 2 != pytest.approx(independent)


def test_replies_are_those_of_greedy_sampling(folder: Path) -> None:
    (result,) = compare(tasks="replies")
    assert result["metric"] == "has_e"
    for side, name in (("baseline", "model"), ("candidate", "other")):
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        texts: list[str] = []
        for row in QUESTIONS:
            messages = [{"role": "user", "content": row["question"]}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            output = model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=0)
            ids = output[0, inputs["input_ids"].shape[1] :]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            texts.append(text.partition("q")[0])
        (path,) = Path("benchmarks/lm_eval").glob(f"{side}.replies.*.json")
        samples = json.loads(path.read_text())["samples"]["replies"]
        assert [sample["filtered_resps"] for sample in samples] == [[text] for text in texts]
        assert result[side] == pytest.approx(statistics.mean("e" in text for text in texts))


@pytest.mark.slow
def test_the_numbers_are_those_of_lm_eval(folder: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = compare("--lm-eval-fewshot", "2", "--lm-eval-limit", "9", tasks="cities,replies")
    for side, name in (("baseline", "model"), ("candidate", "other")):
        expected: Any = simple_evaluate(
            "hf",
            {"pretrained": name, "dtype": "float32"},
            ["cities", "replies"],
            num_fewshot=2,
            limit=9,
            device="cpu",
            apply_chat_template=True,
            task_manager=TaskManager(include_path="tasks", include_defaults=False),
        )
        for row in results:
            values = expected["results"][row["task"]]
            assert row[side] == values[f"{row['metric']},none"]
            assert row[f"{side}_stderr"] == values[f"{row['metric']}_stderr,none"]


@pytest.mark.slow
def test_a_lora_run_has_the_results_of_its_exports(folder: Path) -> None:
    assert command("train", "recipe.yaml", "train.learning_rate=0.05", "train.epochs=3") == 0
    assert command("export", "runs/first", "merged", "--no-verify") == 0
    assert command("export", "runs/first", "adapter", "--adapter", "--no-verify") == 0
    results: dict[str, Any] = {}
    for target in ("runs/first", "merged", "adapter"):
        compare("--fresh", models=("model", target))
        (path,) = Path("benchmarks/lm_eval").glob("candidate.*.json")
        samples = json.loads(path.read_text())["samples"]["cities"]
        results[target] = [value for s in samples for value, _ in s["filtered_resps"]]
    (path,) = Path("benchmarks/lm_eval").glob("baseline.*.json")
    samples = json.loads(path.read_text())["samples"]["cities"]
    base = [value for s in samples for value, _ in s["filtered_resps"]]
    assert results["runs/first"] != pytest.approx(base, abs=0.1)
    assert results["merged"] == pytest.approx(results["runs/first"], abs=1e-3)
    assert results["adapter"] == pytest.approx(results["runs/first"], abs=1e-4)


# Resuming


@pytest.mark.slow
def test_a_killed_comparison_evaluates_no_finished_task_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("compare", "model", "other", "--lm-eval-tasks", "cities,slow", *RUN)
    Path("block").touch()
    program = Program(*words, output="printed")
    until = time.monotonic() + 120
    while not Path("blocked").exists():
        assert program.poll() is None, Path("printed").read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
    assert program.kill() == -signal.SIGKILL
    first = result_files()
    assert [name.rpartition(".")[0][:-9] for name in first] == ["baseline.cities"]
    Path("block").unlink()
    assert command(*words) == 0
    printed = capsys.readouterr().out
    assert "baseline: 1 of 2 results are from an earlier call" in printed
    assert "cities (baseline)" not in printed
    assert "slow (baseline)" in printed
    assert {name: when for name, when in result_files().items() if name in first} == first
    assert len(result_files()) == 4
    results = json.loads(Path("benchmarks/compare.json").read_text())["benchmarks"]
    cities, slow = ([row for row in results if row["task"] == t] for t in ("cities", "slow"))
    assert [{**row, "task": "slow"} for row in cities] == slow


@pytest.mark.slow
def test_results_are_reused_until_something_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def open_run(target: str, *words: Any, **options: Any) -> Any:
        loaded.append(target)
        return original(target, *words, **options)

    original = run_benchmarks.open_run
    monkeypatch.setattr(run_benchmarks, "open_run", open_run)
    first = compare()
    assert loaded == ["model", "other"]
    loaded.clear()
    assert compare() == first
    assert loaded == []
    shorter = compare("--lm-eval-limit", "5")
    assert loaded == ["model", "other"]
    assert shorter != first
    loaded.clear()
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    model.save_pretrained("other")  # the candidate has other weights now
    assert all(row["difference"] == 0 for row in compare())
    assert loaded == ["other"]
    loaded.clear()
    write_rows([{**row, "answer": 0} for row in QUESTIONS])
    compare()
    assert loaded == ["model", "other"]
    loaded.clear()
    Path("tasks/cities.yaml").write_text(CHOICES.replace("{{question}}", "{{question}} Think."))
    compare()
    assert loaded == ["model", "other"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"{}", b'"text"', b"\xff\xfe", None])
def test_a_damaged_result_is_reported_and_computed_again(
    folder: Path, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = compare()
    (path,) = Path("benchmarks/lm_eval").glob("candidate.*.json")
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"acc": 0.0', b'"acc": 1.0') if damage is None else damage)
    capsys.readouterr()
    assert compare() == first
    printed = capsys.readouterr().out
    assert f"{path} is damaged" in printed
    assert "cities (baseline)" not in printed
    assert path.read_bytes() == content


# What is printed


def test_json_is_all_that_standard_output_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare("--json")
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "done"
    assert len(result["benchmarks"]) == 2


def test_quiet_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare("--quiet")
    assert capfd.readouterr() == ("", "")


def test_the_table_and_the_page_have_the_standard_errors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, _ = compare()
    shown = f"{row['candidate']:.3f} ± {row['candidate_stderr']:.3f}"
    printed = capsys.readouterr().out
    assert shown in printed
    assert "questions are asked with the chat template" in printed
    assert shown in Path("benchmarks/report.html").read_text()


# Mistakes


def mistake(*words: str, tasks: str = "cities", models: Sequence[str] = ("model", "other")) -> Any:
    return command_error("compare", *models, "--lm-eval-tasks", tasks, *RUN, *words)


def test_an_unknown_task_is_named_before_a_model_is_loaded(folder: Path) -> None:
    Path("other/model.safetensors").write_bytes(b"damaged")
    error = mistake(tasks="cities,citees")
    check_error(error, "benchmark-unknown", where="--lm-eval-tasks", fix="cities")
    assert "'citees'" in error.message


def test_tasks_may_be_files_and_have_wildcards(folder: Path) -> None:
    assert {row["task"] for row in compare(tasks="tasks/cities.yaml")} == {"cities"}
    assert {row["task"] for row in compare(tasks="cit*,repl*")} == {"cities", "replies"}


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    error = mistake()
    check_error(error, "library-missing", where="--lm-eval-tasks", fix="valence-align[lm-eval]")
    assert not Path("benchmarks").exists()


def test_options_that_cannot_apply_are_refused(folder: Path) -> None:
    check_error(mistake(tasks=" ,"), "benchmark-missing", where="--lm-eval-tasks")
    check_error(mistake("--lm-eval-include", "none"), "path-missing", where="none")
    zero = CHOICES.replace("task: cities", "task: zero\nnum_fewshot: 0")
    Path("tasks/zero.yaml").write_text(zero)
    error = mistake("--lm-eval-fewshot", "2", tasks="zero")
    check_error(error, "benchmark-option", where="--lm-eval-fewshot")
    words = ("compare", "model", "other", "--lm-eval-limit", "3", "--out", "benchmarks")
    check_error(command_error(*words), "option-unused", where="--lm-eval-limit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("{{question}}", "{{question.missing.part}}"),
        ("tasks/cities.jsonl", "tasks/none.jsonl"),
        ("metric: acc,", "metric: no_such_metric,"),
    ],
)
def test_a_task_that_fails_is_named_with_its_log(folder: Path, change: tuple[str, str]) -> None:
    Path("tasks/cities.yaml").write_text(CHOICES.replace(*change))
    error = mistake()
    check_error(error, "benchmark-failed", where="--lm-eval-tasks cities", fix="log.txt")
    log = Path("benchmarks/lm_eval/log.txt").read_text()
    assert ("no_such_metric" if "metric" in change[1] else "Traceback") in log


def test_models_with_and_without_a_template_are_not_compared(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained("other")
    tokenizer.chat_template = None
    for path in Path("other").glob("*.jinja"):
        path.unlink()
    tokenizer.save_pretrained("other")
    error = mistake()
    check_error(error, "benchmarks-differ", where="--lm-eval-tasks", fix="--no-lm-eval-chat")
    error = mistake("--lm-eval-chat")
    check_error(error, "chat-template-missing", where="--lm-eval-chat")
    assert len(compare("--no-lm-eval-chat")) == 2


def test_weights_that_are_not_finite_are_an_error(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained("other")
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 0] = math.nan
    model.save_pretrained("other")
    check_error(mistake(), "weights-not-finite", where="other")
