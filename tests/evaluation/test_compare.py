"""Comparing two models: answers, verdicts, the gate, and what happens when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.command import command, command_error, place
from tests.disk import full_disk
from tests.evaluation.judge_server import JudgeServer, always_first, judge_server, longer
from tests.programs import Program
from valence import cli, storage
from valence.apps.compare.compare_models import ModelComparison
from valence.cli import GATE_FAILED
from valence.evaluation.summary import JudgeSummary, Position, Rates
from valence.evaluation.win_rate import Estimate
from valence.jobs import sample_rows

__all__ = ["place"]

REWARDS = """
import json, os, time

def long(completions, **context):
    with open("calls.jsonl", "a") as file:
        file.writelines(json.dumps([c.prompt, c.text]) + "\\n" for c in completions)
    return [float(len(c.text)) for c in completions]

def alike(completions, **context):
    return [1.0 for c in completions]

def broken(completions, **context):
    return [None for c in completions]

def not_last(completions, **context):
    return [None if c.info["number"] == 32 else float(len(c.text)) for c in completions]

def half(completions, **context):
    return [None if c.info.get("number", 0) % 2 else float(len(c.text)) for c in completions]

def slow(completions, **context):
    time.sleep(0.02 * len(completions))
    return long(completions)
"""
SAMPLING = ("--prompts", "prompts.jsonl", "--max-new-tokens", "6", "--other-text", "off")


def write_prompts(count: int = 8, name: str = "prompts.jsonl") -> None:
    rows = [
        {"prompt": f"what about {'x' * i} ", "tags": ["odd" if i % 2 else "even"], "number": i}
        for i in range(count)
    ]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(place: Path) -> Path:
    """A folder with two models, prompts and rewards."""
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std())
    (place / "other").mkdir()
    for path in (place / "model").iterdir():
        (place / "other" / path.name).write_bytes(path.read_bytes())
    model.save_pretrained("other")
    (place / "my_rewards.py").write_text(REWARDS)
    write_prompts()
    return place


def compare(*words: str, judge: str = "my_rewards:long", status: int = 0) -> dict[str, Any]:
    assert command("compare", "model", "other", *SAMPLING, "--judge", judge, *words) == status
    return json.loads(Path("comparison/compare.json").read_text())


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def verdicts() -> list[Any]:
    (path,) = Path("comparison").glob("verdicts.*.jsonl")
    return lines(str(path))


def test_the_win_rate_is_that_of_the_answers(folder: Path) -> None:
    result = compare()
    sides = [lines(f"comparison/answers.{side}.jsonl") for side in ("baseline", "candidate")]
    lengths = [[len(row["completion"]) for row in rows] for rows in sides]
    preferences = [
        0.5 if a == b else float(b > a) for a, b in zip(lengths[0], lengths[1], strict=True)
    ]
    assert len(set(preferences)) > 1
    (judge,) = result["judges"]
    assert judge["judge"] == "long"
    assert judge["win_rate"]["value"] == pytest.approx(sum(preferences) / 8)
    assert judge["wins"] == preferences.count(1)
    assert judge["losses"] == preferences.count(0)
    assert judge["win_rate"]["low"] <= judge["win_rate"]["value"] <= judge["win_rate"]["high"]
    assert judge["tags"]["odd"]["win_rate"]["value"] == pytest.approx(sum(preferences[1::2]) / 4)
    assert [row["preference"] for row in verdicts()] == preferences
    best = max(b - a for a, b in zip(lengths[0], lengths[1], strict=True))
    assert judge["clearest"]["candidate"][0]["margin"] == best
    assert result["answers"]["baseline"]["mean_characters"] == pytest.approx(sum(lengths[0]) / 8)
    page = Path("comparison/report.html").read_text()
    assert "By tag: long" in page
    assert "Clearest wins of other: long" in page


def test_the_same_command_again_answers_and_judges_nothing(folder: Path) -> None:
    first = compare()
    calls = Path("calls.jsonl").read_bytes()
    assert compare() == first
    assert Path("calls.jsonl").read_bytes() == calls


def test_with_all_answers_no_model_is_loaded_unless_its_files_have_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = compare()
    capsys.readouterr()
    assert compare() == first
    assert compare(judge="my_rewards:alike")["judges"][0]["ties"] == 8
    assert "loading" not in capsys.readouterr().out
    path = Path("other/model.safetensors")
    path.write_bytes(path.read_bytes())  # the same weights in a file that was written again
    assert compare() == first
    printed = capsys.readouterr().out
    assert "loading other" in printed
    assert "loading model" not in printed
    path.write_bytes(Path("model/model.safetensors").read_bytes())
    error = command_error("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long")
    assert error.code == "output-settings-differ"
    answers = Path("comparison/answers.baseline.jsonl")
    answers.write_text(answers.read_text().replace("what about", "what is about", 1))
    error = command_error("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long")
    assert error.code == "output-line-damaged"


def test_a_moved_folder_is_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = compare()
    calls = Path("calls.jsonl").read_bytes()
    Path("elsewhere").mkdir()
    page = Path("comparison/report.html").read_text()
    assert "comparison/" not in page
    assert str(folder) not in page
    Path("comparison").rename("elsewhere/moved")
    capsys.readouterr()
    for out in ("elsewhere/moved", str(folder / "elsewhere/moved")):
        words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long", "--out", out)
        assert command(*words) == 0
        moved = json.loads(Path(out, "compare.json").read_text())
        assert {**moved, "folder": ""} == {**first, "folder": ""}
    assert "loading" not in capsys.readouterr().out
    assert Path("calls.jsonl").read_bytes() == calls


def test_a_model_against_itself_is_even_on_every_prompt(folder: Path) -> None:
    words = ("compare", "model", "model", *SAMPLING, "--judge", "my_rewards:long")
    assert command(*words, "--at-least", "0.5") == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    (judge,) = result["judges"]
    assert judge["ties"] == 8
    for name in ("win_rate", "length_controlled"):
        assert judge[name]["low"] < judge[name]["value"] == 0.5 < judge[name]["high"]
    assert result["baseline"] != result["candidate"]


def test_swapped_sides_have_the_rest(folder: Path) -> None:
    value = compare()["judges"][0]["win_rate"]["value"]
    words = (
        "compare",
        "other",
        "model",
        *SAMPLING,
        "--judge",
        "my_rewards:long",
        "--out",
        "swapped",
    )
    assert command(*words) == 0
    (judge,) = json.loads(Path("swapped/compare.json").read_text())["judges"]
    assert judge["win_rate"]["value"] == pytest.approx(1 - value)


def test_the_gate_sets_the_exit_status_for_every_judge(folder: Path) -> None:
    value = compare()["judges"][0]["win_rate"]["value"]
    assert 0 < value < 1
    compare("--at-least", str(value))
    compare("--at-least", str(value + 0.01), status=GATE_FAILED)
    second = ("--judge", "my_rewards:alike")
    compare(*second, "--at-least", str(min(value, 0.5)))
    compare(*second, "--at-least", "0.9", status=GATE_FAILED)


def test_the_output_for_programs_has_result_and_gate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compare("--json", "--at-least", "1", status=GATE_FAILED)
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("status") == "done"
    assert (printed.pop("at_least"), printed.pop("passed")) == (1.0, False)
    assert printed == result


def test_missing_verdicts_are_no_numbers(folder: Path) -> None:
    command_error_of("judge-failures", "--judge", "my_rewards:broken")
    command_error_of("verdicts-missing", "--judge", "my_rewards:half")
    result = compare("--max-failed", "0.5", judge="my_rewards:half")
    (judge,) = result["judges"]
    assert judge["failed"] == 4
    assert judge["tags"]["odd"]["win_rate"] is None
    lengths = [
        [len(row["completion"]) for row in lines(f"comparison/answers.{side}.jsonl")[::2]]
        for side in ("baseline", "candidate")
    ]
    wins = [0.5 if a == b else float(b > a) for a, b in zip(lengths[0], lengths[1], strict=True)]
    assert judge["win_rate"]["value"] == pytest.approx(sum(wins) / 4)


def test_a_failure_on_the_only_prompt_of_the_last_batch_is_counted(folder: Path) -> None:
    write_prompts(33)
    result = compare(judge="my_rewards:not_last")
    (judge,) = result["judges"]
    assert (judge["failed"], judge["wins"] + judge["ties"] + judge["losses"]) == (1, 32)
    assert compare(judge="my_rewards:not_last") == result


def test_each_judge_has_a_name_of_its_own(folder: Path) -> None:
    """Otherwise the gate would see one of them only."""
    words = [
        f"{{reward: contains, settings: {{words: [{word}]}}, name: {name}}}"
        for word, name in (("a", "one"), ("zzzz", "one"), ("zzzz", "two"))
    ]
    command_error_of("reward-name-duplicate", "--judge", words[0], "--judge", words[1])
    assert not Path("comparison").exists()
    result = compare("--judge", words[2], judge=words[0])
    assert [judge["judge"] for judge in result["judges"]] == ["one", "two"]


def test_a_column_of_tags_that_no_prompt_has_is_a_mistake(folder: Path) -> None:
    command_error_of("column-missing", "--judge", "my_rewards:long", "--tag", "tagz")
    assert compare("--tag", "number")["judges"][0]["tags"].keys() == {*map(str, range(8))}


def test_a_full_disk_is_a_mistake_that_loses_nothing(folder: Path) -> None:
    with full_disk(400):  # less than the prompts need
        command_error_of("file-not-writable", "--judge", "my_rewards:long")
    storage.part_path(Path("comparison/prompts.jsonl")).write_bytes(b"the start")
    compare()
    calls = Path("calls.jsonl").read_bytes()
    for name in ("compare.json", "report.html"):
        path = Path("comparison", name)
        path.unlink()
        part = storage.part_path(path)
        part.mkdir()  # where the file is written
        command_error_of("file-not-writable", "--judge", "my_rewards:long")
        part.rmdir()
        part.write_bytes(b"the start")
    assert compare()["prompts"] == 8
    assert Path("calls.jsonl").read_bytes() == calls


def command_error_of(code: str, *words: str) -> None:
    error = command_error("compare", "model", "other", *SAMPLING, *words)
    assert error.code == code, error


def test_wrong_requests_are_refused_before_a_model_is_loaded(folder: Path) -> None:
    judge = ("--judge", "my_rewards:long")
    assert command_error("compare", "model", "other", *judge).code == "rows-missing"
    command_error_of("judge-missing")
    command_error_of("reward-not-found", "--judge", "my_rewards:none")
    Path("empty.jsonl").write_text(json.dumps({"prompt": ""}) + "\n")
    error = command_error("compare", "model", "other", "--prompts", "empty.jsonl", *judge)
    assert (error.where or "").startswith("empty.jsonl:1")
    Path("taken").mkdir()
    Path("taken/thesis.txt").write_text("words")
    command_error_of("path-exists", *judge, "--out", "taken")
    command_error_of("path-is-file", *judge, "--out", "prompts.jsonl")
    assert not Path("comparison").exists()


def test_other_prompts_or_settings_are_not_mixed(folder: Path) -> None:
    compare()
    command_error_of("output-settings-differ", "--judge", "my_rewards:long", "--temperature", "0")
    write_prompts(9)
    command_error_of("output-settings-differ", "--judge", "my_rewards:long")
    result = compare("--fresh")
    assert result["prompts"] == 9
    assert len(lines("comparison.1/prompts.jsonl")) == 8


def test_duplicate_prompts_are_answered_once(folder: Path) -> None:
    rows = lines("prompts.jsonl")
    chat = {"prompt": [{"role": "user", "content": rows[0]["prompt"]}]}
    with Path("prompts.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in (rows[2], chat))
    result = compare()
    assert (result["prompts"], result["duplicates"]) == (8, 2)
    assert len(verdicts()) == 8


def test_prompts_of_the_training_data_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train", "recipe.yaml", "train.max_steps=1") == 0
    rows = lines("prompts.jsonl")
    rows[1] = {"prompt": "question 3"}  # as text; the row has it as a user message
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("compare", "model", "runs/first", *SAMPLING, "--judge", "my_rewards:long")
    assert command(*words) == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    assert result["trained"] == {"candidate": 1}
    assert "1 of 8 prompts are in the training data of the candidate" in capsys.readouterr().out
    Path("rows.jsonl").unlink()
    assert command(*words) == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    assert result["trained"] == {}
    assert len(result["notes"]) == 1


def test_killed_while_judging_nothing_that_is_written_is_judged_again(folder: Path) -> None:
    write_prompts(80)
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:slow")
    program, calls = Program(*words), Path("calls.jsonl")

    def has_verdicts() -> bool:
        paths = list(Path("comparison").glob("verdicts.*.jsonl"))
        return bool(paths) and paths[0].read_bytes().count(b"\n") >= 32

    program.wait_until(has_verdicts)
    assert program.kill() == -signal.SIGKILL
    answers = Path("comparison/answers.candidate.jsonl").read_bytes()
    num_written = len(verdicts()) - len(verdicts()) % 32
    before = lines("calls.jsonl")
    written = {json.dumps([row["prompt"], row["baseline"]]) for row in verdicts()[:num_written]}
    assert num_written >= 32
    assert command(*words) == 0
    assert Path("comparison/answers.candidate.jsonl").read_bytes() == answers
    after = lines("calls.jsonl")[len(before) :]
    assert not written & {json.dumps(call) for call in after}
    assert len(verdicts()) == 80
    assert calls.exists()


def test_killed_while_answering_no_prompt_is_answered_twice(folder: Path) -> None:
    write_prompts(60)
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long", "--at-once", "4")
    program, path = Program(*words), Path("comparison/answers.candidate.jsonl")
    program.wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 8)
    assert program.kill() == -signal.SIGKILL
    written = path.read_bytes()
    prefix = b"".join(written.splitlines(keepends=True)[: written.count(b"\n") // 4 * 4])
    assert command(*words) == 0
    assert path.read_bytes().startswith(prefix)
    assert len(lines(str(path))) == 60
    undisturbed = path.read_bytes()
    assert command(*words, "--out", "again") == 0
    rows = [lines(f"{name}/answers.candidate.jsonl") for name in ("comparison", "again")]
    assert [row["completion"] for row in rows[0]] == [row["completion"] for row in rows[1]]
    assert undisturbed


def kill_after_three() -> None:
    """``valence``, killed when the third answer has been stored."""
    add, num_added = sample_rows.PendingAnswers.add, 0

    def add_or_die(*words: Any) -> None:
        nonlocal num_added
        add(*words)
        num_added += 1
        if num_added == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    sample_rows.PendingAnswers.add = add_or_die  # type: ignore[method-assign]
    cli.main()


def test_killed_in_the_first_window_no_finished_answer_is_lost(folder: Path) -> None:
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long")
    assert Program(*words, main=kill_after_three).wait() == -signal.SIGKILL
    path = Path("comparison/.answers.baseline.jsonl.pending")
    records = lines(str(path))
    assert len(records) == 3
    assert Path("comparison/answers.baseline.jsonl").read_bytes() == b""
    # the text shows whether a stored answer was used or generated again
    records[0]["completion"]["text"] += " (stored)"
    record = json.dumps(storage.add_checksum(records[0]))
    cut = '{"by": "'  # by a crash
    path.write_text("\n".join([record, *path.read_text().splitlines()[1:], cut]))
    assert command(*words) == 0
    assert not path.exists()
    assert command(*words, "--out", "again") == 0
    completions, undisturbed = (
        [row["completion"] for row in lines(f"{name}/answers.baseline.jsonl")]
        for name in ("comparison", "again")
    )
    undisturbed[records[0]["position"]] += " (stored)"
    assert completions == undisturbed


def test_stored_answers_to_other_tokens_of_a_prompt_are_not_used(folder: Path) -> None:
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long")
    assert Program(*words, main=kill_after_three).wait() == -signal.SIGKILL
    state = json.loads(Path("model/tokenizer.json").read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": "y"}
    Path("model/tokenizer.json").write_text(json.dumps(state))
    assert command(*words) == 0
    assert command(*words, "--out", "again") == 0
    resumed, undisturbed = (
        [row["completion"] for row in lines(f"{name}/answers.baseline.jsonl")]
        for name in ("comparison", "again")
    )
    assert resumed == undisturbed


def test_two_comparisons_do_not_use_one_folder(folder: Path) -> None:
    write_prompts(80)
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:slow")
    program = Program(*words)
    program.wait_until(lambda: bool(list(Path("comparison").glob("verdicts.*.jsonl"))))
    assert program.poll() is None
    for more in ((), ("--fresh",)):
        error = command_error(*words, *more)
        assert (error.code, error.where) == ("run-locked", "comparison")
    assert program.wait() == 0
    assert not Path("comparison.1").exists()
    assert len(verdicts()) == 80
    result = json.loads(Path("comparison/compare.json").read_text())
    assert command(*words) == 0
    assert json.loads(Path("comparison/compare.json").read_text()) == result


def test_the_reward_model_of_a_run_is_a_judge(folder: Path) -> None:
    words = ("method=pointwise", "model.lora=null", "run.dir=runs/judge", "train.max_steps=1")
    assert command("train", "recipe.yaml", *words) == 0
    result = compare("--judge", "runs/judge")
    assert [judge["judge"] for judge in result["judges"]] == ["long", "judge"]


def test_rules_read_the_columns_of_prompts(folder: Path) -> None:
    judge = "{reward: contains, settings: {answer: tags}}"
    result = compare(judge=judge)
    assert result["judges"][0]["ties"] == 8


# LLM judges


def llm_judge(server: JudgeServer, **settings: Any) -> str:
    return json.dumps({"judge": server.url, "settings": {"model": "m", **settings}})


def test_a_language_model_judges_both_orders(folder: Path) -> None:
    with judge_server(longer) as server:
        result = compare("--judge", llm_judge(server))
        num_requests = len(server.requests)
        assert num_requests == len({json.dumps(shown) for shown in server.shown})
        compare("--judge", llm_judge(server))
        assert len(server.requests) == num_requests
    by_reward, by_model = result["judges"]
    assert by_model["judge"] == "m"
    assert by_model["win_rate"] == by_reward["win_rate"]
    position = by_model["position"]
    assert (position["first"], position["consistent"], position["num_followed"]) == (0.5, 1.0, 0)


def test_a_judge_of_positions_gives_even_results_and_shows_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with judge_server(always_first) as server:
        result = compare(judge=llm_judge(server))
    (judge,) = result["judges"]
    assert judge["win_rate"]["value"] == 0.5
    position = judge["position"]
    assert (position["first"], position["consistent"]) == (1.0, 0.0)
    assert position["num_followed"] == position["num_decided"] > 0
    assert "position" in capsys.readouterr().out


def test_a_judge_whose_verdicts_follow_the_position_passes_no_gate(folder: Path) -> None:
    with judge_server(always_first) as server:
        judge = llm_judge(server)
        compare("--at-least", "0.5", judge=judge, status=GATE_FAILED)
        compare("--at-least", "0", judge=judge, status=GATE_FAILED)
    with judge_server(longer) as server:
        compare("--at-least", "0", "--fresh", judge=llm_judge(server))


@pytest.mark.parametrize(
    ("num_followed", "num_decided", "is_refused"),
    [(0, 8, False), (2, 8, True), (30, 100, False), (45, 100, True), (100, 100, True)],
)
def test_the_bound_on_position_is_that_of_a_judge_that_guesses(
    num_followed: int, num_decided: int, is_refused: bool
) -> None:
    rates = Rates(Estimate(0.6, 0.5, 0.7), None, 60, 0, 40, 0)
    position = Position(0.5, 0.5, num_decided, num_followed)
    judge = JudgeSummary("m", rates, position=position)
    result = ModelComparison(models=("a", "b"), num_prompts=100, answers={}, judges=[judge])
    assert bool(result.failed_gates(0.5, None)) is is_refused
    assert not result.failed_gates(None, None)


@pytest.mark.parametrize("change", ["weight: -1", "clip: [0, 1]", "weight: 2"])
def test_verdicts_of_another_weight_or_clip_are_not_reused(folder: Path, change: str) -> None:
    compare(judge="{reward: my_rewards:long, name: long}")
    (before,) = Path("comparison").glob("verdicts.*.jsonl")
    compare(judge=f"{{reward: my_rewards:long, name: long, {change}}}")
    assert len(list(Path("comparison").glob("verdicts.*.jsonl"))) == 2
    compare(judge="{reward: my_rewards:long, name: long}")
    assert before in Path("comparison").glob("verdicts.*.jsonl")
    assert len(list(Path("comparison").glob("verdicts.*.jsonl"))) == 2


HELPER = "sign = 1\n\ndef value(text):\n    return sign * (sum(map(ord, text)) % 97)\n"


def test_a_changed_helper_of_a_judge_changes_the_verdicts(folder: Path) -> None:
    """The judge's file stays the same."""
    Path("helper_of_judge.py").write_text(HELPER)
    Path("imports_helper.py").write_text(
        "def judge(completions, **context):\n    import helper_of_judge\n"
        "    return [helper_of_judge.value(c.text) for c in completions]\n"
    )
    compare(judge="imports_helper:judge")
    before = [line["preference"] for line in verdicts() if "preference" in line]
    (path,) = Path("comparison").glob("verdicts.*.jsonl")
    path.rename("before.jsonl")
    Path("helper_of_judge.py").write_text(HELPER.replace("sign = 1", "sign = -1"))
    for name in ("helper_of_judge", "imports_helper"):  # as a new process would import them
        sys.modules.pop(name, None)
    compare(judge="imports_helper:judge")
    after = [line["preference"] for line in verdicts() if "preference" in line]
    assert {0.0, 1.0} <= set(before)
    assert after == [1 - preference for preference in before]
    (changed,) = Path("comparison").glob("verdicts.*.jsonl")
    assert changed.name != path.name


def test_a_judge_file_is_an_entry_of_a_reward_section(folder: Path) -> None:
    with judge_server(longer) as server:
        Path("judge.yaml").write_text(
            f"judge: {server.url}\nname: mine\nsettings:\n  model: m\n  rubric: |\n    Be fair.\n"
        )
        result = compare(judge="judge.yaml")
        assert "Be fair." in server.requests[0]["messages"][0]["content"]
    assert result["judges"][0]["judge"] == "mine"
    assert command_error("compare", "model", "other", *SAMPLING, "--judge", "no.yaml").code


def test_killed_while_a_language_model_judges_no_reply_is_paid_for_twice(folder: Path) -> None:
    write_prompts(40)
    with judge_server(lambda shown: (0.02, longer(shown))) as server:
        words = ("compare", "model", "other", *SAMPLING, "--judge", llm_judge(server))
        program = Program(*words)
        program.wait_until(lambda: len(server.requests) >= 40)
        assert program.kill() == -signal.SIGKILL
        (log,) = Path("comparison/replies").glob("judge-*.jsonl")
        stored = sum("valid" in line for line in log.read_text().splitlines())
        in_flight = len(server.requests) - stored
        assert in_flight <= 8 + 1
        assert command(*words) == 0
        contents = [json.dumps(shown) for shown in server.shown]
        assert len(contents) - len(set(contents)) <= in_flight
    assert len(verdicts()) == 40


def test_the_cost_limit_ends_a_comparison_which_a_larger_one_resumes(folder: Path) -> None:
    with judge_server(longer) as server:
        paid = {"prices": [1000, 0], "max_cost": 0.5}
        error = command_error(
            "compare", "model", "other", *SAMPLING, "--judge", llm_judge(server, **paid)
        )
        assert error.code == "judge-cost-limit"
        assert 5 <= len(server.requests) <= 5 + 8
        paid["max_cost"] = 50
        result = compare(judge=llm_judge(server, **paid))
        assert len(server.requests) <= 16
    assert result["judges"][0]["cost"] == pytest.approx(len(server.requests) / 10)


def test_models_are_checked_before_an_answer_is_sampled(folder: Path) -> None:
    words = ("--prompts", "prompts.jsonl", "--judge")
    for arguments in (("model", "./none", *words, "length"), ("model", "other", *words, "./none")):
        assert command_error("compare", *arguments).code == "model-not-found"
        assert not Path("comparison").exists()
