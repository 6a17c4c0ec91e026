"""Sampled answers as rows: columns, resuming, appending to a file, and rejected options."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import valence
from tests.command import command
from tests.distributed.process_groups import run as run_in_processes
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.training.rounds import REWARDS, judge, prompts, sample
from tests.training.scoring import invoke, read, write
from valence.data.encode import Encoder
from valence.distributed.process_group import Group
from valence.jobs import sample_rows as module
from valence.models.build import load_model
from valence.rollouts.hf import HFGenerator
from valence.rollouts.protocol import Sampling
from valence.types import Chat, Completion


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models, prompts and rewards, which is the current one."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    prompts()
    Path("rewards.py").write_text(REWARDS)
    return tmp_path


def bytes_of(**options: Any) -> bytes:
    sample("whole.jsonl", **options)
    return Path("whole.jsonl").read_bytes()


def before_batches(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Calls ``act`` before the prompts of each batch are read."""
    inner = LlamaForCausalLM.forward

    def forward(
        *args: Any, past_key_values: Any = None, use_cache: bool = False, **more: Any
    ) -> Any:
        if use_cache and past_key_values is None:
            act()
        return inner(*args, past_key_values=past_key_values, use_cache=use_cache, **more)

    patch.setattr(LlamaForCausalLM, "forward", forward)


# What a row holds


def test_a_row_holds_the_answer_as_it_was_drawn(place: Path) -> None:
    counted = sample(temperature=1.0)
    rows, encoder = read("answers.jsonl"), Encoder(tiny_tokenizer(), max_length=99)
    assert counted.answers == len(rows) == 21
    assert [row["index"] for row in rows] == [0, 1, 2] * 7
    chat = Chat(({"role": "user", "content": "hello"},))
    assert rows[0]["prompt_ids"] == list(encoder.encode_prompt(rows[0]["prompt"]))
    assert rows[6]["prompt_ids"] == list(encoder.encode_prompt(chat))
    assert rows[6]["rendered"].endswith("<|im_start|>assistant\n")
    assert rows[0]["info"] == {"answer": 0}
    assert (rows[6]["info"], rows[6]["weight"], rows[6]["prompt"]) == (
        {"answer": 2, "label": True},
        0.5,
        [*chat.messages],
    )
    assert counted.truncated == sum(row["stop"] == "length" for row in rows)
    assert counted.tokens == sum(len(row["completion_ids"]) for row in rows)
    for row in rows:
        assert row["completion"] == tiny_tokenizer().decode(
            row["completion_ids"], skip_special_tokens=True
        )
        assert (row["stop"] == "eos") == (row["completion_ids"][-1] in encoder.end_ids)
    measured = valence.logprobs(
        load_model("model", dtype=torch.float32), rows, kind="demonstration"
    )
    for row, result in zip(rows, measured, strict=True):
        assert row["logps"] == pytest.approx(list(result.logps), abs=2e-4)


def test_sampling_settings_are_in_the_row_and_in_the_about_file(place: Path) -> None:
    sample(temperature=0.5, top_p=0.9, seed=4)
    row, about = read("answers.jsonl")[4], json.loads(Path("answers.jsonl.about.json").read_text())
    drawn = {
        "position": 1,
        "seed": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "vocabulary": about["vocabulary"],
    }
    assert {**row["sampled"], "by": ""} == {**drawn, "by": ""}
    assert {
        name: about[name] for name in ("answers", "temperature", "top_p", "max_new_tokens", "seed")
    } == {
        "answers": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_new_tokens": 6,
        "seed": 4,
    }
    assert len(about["model"]) == 32
    assert about["about"]["target"] == "model"


def test_texts_are_prompts_and_columns_may_have_other_names(place: Path) -> None:
    write("texts.jsonl", [{"text": "1 + 1 = ", "answer": 2}, {"text": "2 + 2 = "}])
    write("named.jsonl", [{"q": "1 + 1 = ", "prompt_id": 3}])
    sample(data=("texts.jsonl", "{path: named.jsonl, keys: {prompt: q}}"), n=1)
    assert [(row["prompt"], row.get("info")) for row in read("answers.jsonl")] == [
        ("1 + 1 = ", {"answer": 2}), ("2 + 2 = ", None), ("1 + 1 = ", {"prompt_id": 3}),
    ]  # fmt: skip


def test_the_answers_to_a_prompt_depend_on_the_seed_and_its_place_alone(place: Path) -> None:
    sample(at_once=1)
    one = [row["completion_ids"] for row in read("answers.jsonl")]
    sample("more.jsonl", at_once=64)
    assert [row["completion_ids"] for row in read("more.jsonl")] == one
    write("same.jsonl", [{"prompt": "again "}] * 3)
    sample("same.jsonl.jsonl", data=("same.jsonl",))
    same = [row["completion_ids"] for row in read("same.jsonl.jsonl")]
    assert len({tuple(ids) for ids in same}) > 6
    write("same.jsonl", [{"prompt": "other "}, *[{"prompt": "again "}] * 2])
    sample("other.jsonl", data=("same.jsonl",))
    assert [row["completion_ids"] for row in read("other.jsonl")][3:] == same[3:]


# Stopping and going on


def test_a_truncated_output_file_is_resumed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sampled twice."""
    expected = bytes_of()
    sample()
    for share in (0.2, 0.999, 1.0):
        if share == 1.0:
            before_batches(monkeypatch, lambda: pytest.fail("sampled again"))
        part = expected[: int(share * len(expected))]
        Path("answers.jsonl").write_bytes(part)
        counted = sample()
        assert Path("answers.jsonl").read_bytes() == expected, share
        assert counted.earlier == (21 if share == 1 else part.count(b"\n") // 6 * 6), share


def test_prompts_that_were_added_are_answered(place: Path) -> None:
    sample()
    prompts(count=10)
    assert sample().earlier == 18
    assert Path("answers.jsonl").read_bytes() == bytes_of()


def in_processes(group: Group, place: Path) -> None:
    os.chdir(place)
    sys.path.insert(0, str(place))
    sample("two.jsonl", group=group)
    judge("rewards:odd", data=("two.jsonl",), group=group)


@pytest.mark.dist
@pytest.mark.slow
def test_several_processes_write_the_same_as_one(place: Path) -> None:
    assert [item.error for item in run_in_processes(in_processes, 2, place, deadline=60.0)] == [
        "",
        "",
    ]
    assert Path("two.jsonl").read_bytes() == bytes_of()
    assert [row["score"] for row in read("scored.jsonl")] == [
        None if i // 3 == 1 else i % 3 for i in range(21)
    ]


# Adding to a file


def test_other_answers_of_the_same_model_are_added(place: Path) -> None:
    sample()
    first = Path("answers.jsonl").read_bytes()
    sample(seed=1, append=True)
    second = Path("answers.jsonl").read_bytes()
    assert second[: len(first)] == first
    assert len(read("answers.jsonl")) == 42
    Path("answers.jsonl").write_bytes(second[: len(first) + (len(second) - len(first)) // 2])
    counted = sample(seed=1, append=True)
    assert Path("answers.jsonl").read_bytes() == second
    assert 0 < counted.earlier < 21
    assert sample(seed=1).earlier == 21
    write("more.jsonl", [{"prompt": "more "}])
    sample(data=("more.jsonl",), append=True, n=2)
    rows = read("answers.jsonl")
    assert [
        len({row["sampled"]["by"] for row in part})
        for part in (rows[:21], rows[21:42], rows[42:], rows)
    ] == [1, 1, 1, 3]
    assert rows[:21] != rows[21:42]
    with raises_error("output-lines-duplicate", where="answers.jsonl", fix="--seed"):
        sample(append=True)


def test_nothing_is_added_to_what_is_not_complete(place: Path) -> None:
    sample()
    full = Path("answers.jsonl").read_bytes()
    Path("answers.jsonl").write_bytes(full[: len(full) // 2])
    with raises_error("output-lines-missing", where="answers.jsonl") as raised:
        sample(seed=1, append=True)
    there = full[: len(full) // 2].count(b"\n")
    assert re.findall(r"\d+", raised.error.message) == [f"{there}", "21"]
    sample()
    sample(seed=1, append=True)
    Path("answers.jsonl").write_bytes(full[: len(full) // 2])
    with raises_error("output-lines-missing", where="answers.jsonl") as raised:
        sample(seed=1, append=True)
    assert re.findall(r"\d+", raised.error.message) == [f"{21 - there}"]


def test_answers_of_another_model_do_not_mix(place: Path) -> None:
    sample()
    before = Path("answers.jsonl").read_bytes()
    for append in (False, True):
        with raises_error("output-settings-differ", where="answers.jsonl (model)"):
            sample(target="other", append=append)
    assert Path("answers.jsonl").read_bytes() == before
    sample(target="other", fresh=True)
    assert Path("answers.1.jsonl").read_bytes() == before


# What is refused


def test_answers_that_were_drawn_otherwise_do_not_mix(place: Path) -> None:
    sample()
    for mode, setting in (
        ({"seed": 1}, "seed"),
        ({"temperature": 0.5}, "temperature"),
        ({"n": 2}, "answers"),
        ({"max_new_tokens": 7}, "max_new_tokens"),
    ):
        where = f"answers.jsonl ({setting})"
        with raises_error("output-settings-differ", where=where, fix="--append") as raised:
            sample(**mode)
        assert str(mode.popitem()[1]) in raised.error.message  # the value of this call


def test_prompts_that_changed_are_seen(place: Path) -> None:
    sample()
    rows = read("prompts.jsonl")
    write("prompts.jsonl", [rows[0], {"prompt": "something else "}, *rows[2:]])
    with raises_error("output-rows-changed", where="prompts.jsonl:2") as raised:
        sample()
    assert "answers.jsonl:4" in raised.error.message
    write("prompts.jsonl", rows[:5])
    with raises_error("output-lines-extra", where="answers.jsonl") as raised:
        sample()
    assert re.findall(r"\d+", raised.error.message) == ["21", "15"]


@pytest.mark.parametrize(("words", "code", "where"), [
    (("model", "--out", "a.jsonl"), "rows-missing", "sample"),
    (("model", "--data", "prompts.jsonl", "--out", "a.json"), "output-not-jsonl", "a.json"),
    (("model", "--data", "prompts.jsonl", "--out", "prompts.jsonl"),
     "output-is-input", "prompts.jsonl"),
    (("model", "--data", "nothing.jsonl", "--out", "a.jsonl"), "file-not-found", "nothing.jsonl"),
    (("nowhere", "--prompt", "x", "--out", "a.jsonl"), "model-not-found", "model"),
    (("prompts.jsonl", "--prompt", "x", "--out", "a.jsonl"), "path-is-file", "prompts.jsonl"),
    (("model", "--prompt", "x", "--out", "a.jsonl", "--step", "3"), "option-unused", "--step"),
    (("model", "--prompt", "x", "--top-p", "2"), "sampling-value", "top_p"),
    (("model", "--prompt", "x", "--append"), "option-unused", "--append"),
    (("model", "--prompt", "x", "--fresh"), "option-unused", "--fresh"),
    (("model", "--prompt", "x", "--out", "a.jsonl", "--fresh", "--append"),
     "option-conflict", "--append"),
    ((".", "--prompt", "x"), "model-not-loadable", "."),
])  # fmt: skip
def test_a_mistake_is_refused(words: tuple[str, ...], code: str, where: str, place: Path) -> None:
    with raises_error(code, where=where):
        invoke("sample", *words)
    assert not Path("a.jsonl").exists()


def test_a_mistake_is_one_message(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sample", "model", "--data", "nothing.jsonl", "--out", "a.jsonl")
    with raises_error("file-not-found") as raised:
        invoke(*words)
    assert command(*words) == 2
    shown = capsys.readouterr()
    assert "".join(shown.err.split()) == "".join(f"valence: {raised.error}".split())
    assert shown.out == ""


def test_scoring_resumes_after_running_out_of_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [row["completion_ids"] for row in map(json.loads, bytes_of().splitlines())]
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        before_batches(patch, fail)
        with raises_error("out-of-memory", where="prompts.jsonl:3", fix="--at-once"):
            sample()
    assert sample(at_once=3).earlier == 6
    assert [row["completion_ids"] for row in read("answers.jsonl")] == expected


def test_a_recipe_with_a_reward_says_what_to_sample(place: Path) -> None:
    Path("recipe.yaml").write_text(
        "method: rejection\nmodel: {name: ./model}\ndata: {train: [{path: "
        "prompts.jsonl}]}\nreward: rewards:short\n"
        "rollout: {num_rollouts: 2, max_new_tokens: 3, temperature: 0.5}\n"
    )
    assert command("sample", "recipe.yaml", "--out", "answers.jsonl", "--quiet") == 0
    rows = read("answers.jsonl")
    assert len(rows) == 14
    assert max(len(row["completion_ids"]) for row in rows) == 3
    assert rows[0]["sampled"]["temperature"] == 0.5
    options = module.SampleOptions(out=Path("answers.jsonl"))
    assert module.sample_rows("recipe.yaml", options).earlier == 14


REWARDED = (
    "method: rejection\nmodel: {name: ./model}\ndata: {train: [{path: prompts.jsonl}]}\n"
    "reward: rewards:short\nrollout: {num_rollouts: 2, max_new_tokens: 3}\n"
)


@pytest.mark.parametrize(("words", "temperature", "longest"), [
    (["model"], 0.7, 256),
    (["model", "--temperature", "0"], 0.0, 256),
    (["model", "rollout.max_new_tokens=40"], 0.7, 40),
    (["recipe.yaml"], 1.0, 3),
    (["model", "--out", "answers.jsonl"], 1.0, 512),
])  # fmt: skip
def test_answers_to_read_are_sampled_colder_and_shorter_than_rows(
    words: list[str],
    temperature: float,
    longest: int,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("recipe.yaml").write_text(REWARDED)
    used: list[Sampling] = []

    def generate(
        self: Any, requests: Any, n: int, mode: Sampling, **_: Any
    ) -> list[list[Completion]]:
        used.append(mode)
        tokens = (5,) * mode.max_new_tokens
        cut = Completion("x", tokens, (0.0,) * len(tokens), "an answer", "length", 0)
        return [[cut] * n for _ in requests]

    monkeypatch.setattr(HFGenerator, "generate", generate)
    assert command("sample", *words, "--prompt", "hello") == 0
    assert [(mode.temperature, mode.max_new_tokens, mode.seed) for mode in used] == [
        (temperature, longest, 0)
    ]
    shown = capsys.readouterr().out
    assert ("an answer" in shown) == ("--max-new-tokens" in shown) == ("--out" not in words)
