"""How much worse a model predicts other texts: the number, the texts, the gate, and a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command import command, command_error, place
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.training.resuming import facts, killed, train, weights
from tests.training.test_run import folder, recipe
from valence.cli import GATE_FAILED
from valence.evaluation.forgetting import (
    SHIPPED,
    TextLoss,
    TextLosses,
    measure_forgetting,
    read_texts,
)
from valence.reports.verdict import forgetting_line
from valence.statistics import student_interval
from valence.training.text_losses import FILE

__all__ = ["folder", "place"]

TEXTS = "The sun is a star.\n\nThe moon goes round\nthe earth.\n\n\nhello world, you and I\n"


def losses(*texts: tuple[float, int, int], vocabulary: str = "a") -> TextLosses:
    return TextLosses(vocabulary, {str(i): TextLoss(*text) for i, text in enumerate(texts)})


def compare(*words: str, status: int = 0) -> dict[str, Any]:
    assert command("compare", "model", *words, "--other-text", "texts.txt") == status
    return json.loads(Path("comparison/compare.json").read_text())["forgetting"]


@pytest.fixture
def models(place: Path) -> Path:
    """A folder with a model, the same with noise on its weights, and texts."""
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(5 * torch.randn_like(weight) * weight.std())
    shutil.copytree("model", "noisy")
    model.save_pretrained("noisy")
    Path("texts.txt").write_text(TEXTS)
    return place


def mean_loss(folder: str, texts: list[str]) -> float:
    """The mean negative log-likelihood per token, by a softmax in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = num_tokens = 0.0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for i, target in enumerate(ids[1:]):
            shares = torch.exp(logits[i] - logits[i].max())
            total -= math.log(float(shares[target] / shares.sum()))
            num_tokens += 1
    return total / num_tokens


def test_the_difference_is_that_of_a_softmax_by_hand(models: Path) -> None:
    result = compare("noisy")
    texts = ["The sun is a star.", "The moon goes round\nthe earth.", "hello world, you and I"]
    before, after = mean_loss("model", texts), mean_loss("noisy", texts)
    assert result["before"] == pytest.approx(before, abs=1e-5)
    assert result["after"] == pytest.approx(after, abs=1e-5)
    assert result["difference"] == pytest.approx(after - before, abs=1e-5)
    assert result["perplexity_ratio"] == pytest.approx(math.exp(after - before), rel=1e-4)
    assert (result["unit"], result["num_texts"]) == ("token", 3)
    assert result["difference"] > 0


def test_a_model_has_forgotten_nothing_of_itself(models: Path) -> None:
    result = compare("model", "--max-forgetting", "0")
    assert (result["difference"], result["low"], result["high"]) == (0, 0, 0)


def test_the_gate_sets_the_exit_status(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    difference = compare("noisy")["difference"]
    compare("noisy", "--max-forgetting", str(difference + 0.001))
    capsys.readouterr()
    limit = str(difference - 0.001)
    result = compare("noisy", "--max-forgetting", limit, "--json", status=GATE_FAILED)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["max_forgetting"], printed["passed"]) == (float(limit), False)
    assert printed["forgetting"] == result
    assert forgetting_line(result)
    assert forgetting_line(result) in Path("comparison/report.html").read_text()


def test_a_comparison_of_answers_measures_the_shipped_texts(models: Path) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n')
    words = ("compare", "model", "noisy", "--prompts", "prompts.jsonl", "--max-new-tokens", "2")
    words = (*words, "--judge", "{reward: length, settings: {max_length: 2}}")
    assert command(*words) == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    assert result["forgetting"]["num_texts"] == 40
    assert command(*words, "--other-text", "off") == 0
    assert "forgetting" not in json.loads(Path("comparison/compare.json").read_text())


def test_other_tokenizers_are_compared_per_byte(models: Path) -> None:
    tiny_tokenizer(chatml_tokens=False).save_pretrained("noisy")
    result = compare("noisy")
    assert result["unit"] == "byte"
    compare("noisy", "--max-forgetting", "100", status=GATE_FAILED)


def test_a_damaged_file_of_losses_is_written_again(models: Path) -> None:
    result = compare("noisy")
    (path,) = Path("comparison").glob("other_text.baseline.*.json")
    content = path.read_text()
    path.write_text(content.replace("1", "2", 1))
    assert compare("noisy") == result
    assert path.read_text() == content


def test_a_bad_line_is_an_error_with_its_place(models: Path) -> None:
    Path("bad.jsonl").write_text('{"text": "The sun is a star."}\n{"text": 3}\n')
    error = command_error("compare", "model", "noisy", "--other-text", "bad.jsonl")
    assert (error.where or "").startswith("bad.jsonl:2")
    error = command_error("train", "recipe.yaml", "eval.other_text=bad.jsonl")
    assert (error.where or "").startswith("bad.jsonl:2")
    Path("bad.txt").write_bytes(b"sun\n\nmoon \xff\n")
    with raises_error("file-encoding", where="bad.txt:3"):
        read_texts("bad.txt")
    Path("chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "hello"}]}\n')
    with raises_error("row-not-scorable", where="chats.jsonl:1"):
        read_texts("chats.jsonl")
    assert (
        command_error("train", "recipe.yaml", "eval.other_text=none.txt").code == "file-not-found"
    )


def test_rows_of_any_format_are_texts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a?", "completion": "b", "label": False},
        {"prompt": "a?", "chosen": "c", "rejected": "d"},
        {"prompt": "a?", "completions": ["e", "f"], "scores": [0, 1]},
        {"prompt": "a?", "completion": "g"},
        {"text": "h"},
    ]
    completions: list[object] = []
    for row in rows:
        path = tmp_path / "rows.jsonl"
        path.write_text(f"{json.dumps(row)}\n" * 2)
        (text,) = read_texts(str(path))
        completions.append(text.completion)
    assert completions == ["b", "c", "f", "g", "h"]


def test_the_shipped_texts_are_short_and_differ() -> None:
    texts = [str(text.completion) for text in read_texts(SHIPPED)]
    assert len(texts) == 40
    sizes = [len(text.split()) for text in texts if text.isascii()]
    assert len(sizes) > 25
    assert 60 <= min(sizes) <= max(sizes) <= 120


def test_the_interval_is_that_of_a_ratio() -> None:
    """It contains the difference, and is Student's for texts of one size."""
    before = losses((10, 5, 20), (12, 5, 20), (9, 5, 20))
    after = losses((12, 5, 20), (13, 5, 20), (9, 5, 20))
    result = measure_forgetting(before, after)
    assert (result.before, result.after, result.difference) == (31 / 15, 34 / 15, 3 / 15)
    assert (result.low, result.high) == pytest.approx(student_interval([2 / 5, 1 / 5, 0]))
    mixed = measure_forgetting(losses((10, 5, 20), (40, 20, 9)), losses((11, 5, 20), (44, 20, 9)))
    assert mixed.difference == pytest.approx(0.2)
    assert (mixed.low, mixed.high) == pytest.approx((0.2, 0.2))


def test_texts_that_one_model_has_not_read_are_left_out() -> None:
    before, after = losses((10, 5, 20), (12, 5, 20)), losses((11, 5, 20))
    result = measure_forgetting(before, after)
    assert (result.difference, result.num_texts, result.low) == (1 / 5, 1, None)
    with raises_error("no-usable-rows"):
        measure_forgetting(before, losses())


def test_bytes_are_those_before_training() -> None:
    result = measure_forgetting(losses((10, 5, 20)), losses((12, 6, 19), vocabulary="b"))
    assert (result.unit, result.difference) == ("byte", 2 / 20)


# Runs


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "texts.txt").write_text(TEXTS)
    result = recipe(folder, tmp_path, model={"lora": {"rank": 2, "dropout": 0.5}})
    result["eval"] = {"other_text": str(tmp_path / "texts.txt")}
    result["run"]["save_every"] = 1
    return result


def test_a_run_reports_it_and_is_otherwise_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run, printed = train(settings)
    result = facts(tmp_path / "run")["forgetting"]
    line = forgetting_line(result)
    assert result["num_texts"] == 3
    assert result["difference"] != 0
    assert line in " ".join(printed.split())
    assert line in run.report.read_text()
    plain: dict[str, Any] = {
        **settings,
        "eval": {},
        "run": {**settings["run"], "dir": str(tmp_path / "plain")},
    }
    other, _ = train(plain)
    assert "forgetting" not in facts(tmp_path / "plain")
    for name, weight in weights(run).items():
        assert torch.equal(weight, weights(other)[name])


def test_a_killed_run_reports_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    train(settings)
    expected = facts(tmp_path / "run")["forgetting"]
    settings["run"]["dir"] = str(tmp_path / "again")
    killed(settings, 2)
    train(settings)
    assert facts(tmp_path / "again")["forgetting"] == expected
    assert [entry["step"] for entry in facts(tmp_path / "again")["resumes"]]


def test_losses_that_are_missing_when_a_run_is_resumed_are_no_failure(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    killed(settings, 2)
    (tmp_path / "run" / FILE).unlink()
    run, printed = train(settings)
    assert "forgetting is not measured" in " ".join(printed.split())
    assert "forgetting" not in facts(tmp_path / "run")
    assert run.model_dir.is_dir()
    assert forgetting_line(None) == ""


def test_a_reward_model_predicts_no_text(settings: dict[str, Any]) -> None:
    with raises_error("setting-conflict", where="eval.other_text"):
        train({**settings, "method": "pointwise"})
