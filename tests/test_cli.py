"""The command line: output, files, and exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.command import ROWS, command_error, place
from tests.command import command as valence
from tests.errors import check_error
from tests.programs import Program
from tests.tiny import tiny_tokenizer
from valence import cli
from valence.cli.common import NOTHING_STARTED
from valence.methods import METHODS, ONLINE, WITHOUT_REWARD
from valence.reports.run_record import RunRecord
from valence.reports.verdict import held_out_verdict, outputs, run_verdict
from valence.training.plan import crowding
from valence.types import plural

__all__ = ["place"]


def test_train_then_evaluate_sample_and_export(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # which training warns of
    assert valence("train", "recipe.yaml", "train.epochs=2") == 0
    shown = capsys.readouterr().out
    assert "reference cache" not in shown  # its facts are in run.json
    for expected in ("at most --nproc", "data.train", "4/4", "run.samples.prompts"):
        assert expected in shown
    for file in ("model", "metrics.jsonl", "report.html"):
        assert f"runs/first/{file}" in shown
    assert (
        json.loads((place / "runs/first/run.json").read_text())["command"]
        == "valence train recipe.yaml train.epochs=2"
    )

    assert valence("evaluate", "runs/first", "--out", "found.json") == 0
    result = json.loads((place / "found.json").read_text())
    assert (
        result["metrics"]
        == json.loads((place / "runs/first/eval/step-4.json").read_text())["metrics"]
    )
    assert [row["in_train"] for row in result["rows"]] == [True] * 4
    assert run_verdict(RunRecord.read(place / "runs/first")).state == "unmeasured"
    assert valence("evaluate", "recipe.yaml", "--out", "start.json") == 0
    assert json.loads((place / "start.json").read_text())["metrics"][
        "rewards/margins"
    ] == pytest.approx(0, abs=1e-6)

    assert (
        valence(
            "sample",
            "runs/first",
            "--prompt",
            "question 1",
            "-n",
            "2",
            "--max-new-tokens",
            "4",
            "--out",
            "said.jsonl",
        )
        == 0
    )
    message = [json.loads(line) for line in (place / "said.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in message] == ["question 1"] * 2

    assert (
        valence(
            "sample",
            "runs/first",
            "--data",
            "rows.jsonl",
            "--max-new-tokens",
            "2",
            "--out",
            "more.jsonl",
        )
        == 0
    )
    assert len((place / "more.jsonl").read_text().splitlines()) == 10

    assert valence("export", "runs/first", "small", "--adapter") == 0
    assert (place / "small/adapter_model.safetensors").is_file()
    check_error(command_error("export", "runs/first", "small"), "path-exists", where="small")


def test_a_run_is_used_without_the_data_it_was_trained_on(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "eval.every=1",
        "eval.max_examples=3",
        "data.limit=5",
        "run.samples.prompts=1",
        "run.samples.max_new_tokens=3",
    )
    assert valence("train", "recipe.yaml", *settings, "--quiet") == 0
    assert not any("run.samples.prompts" in line for line in outputs(place / "runs/first"))
    (place / "rows.jsonl").rename(place / "heldé😀.jsonl")
    assert valence("sample", "runs/first", "--prompt", "hello", "--max-new-tokens", "2") == 0
    assert valence("export", "runs/first", "whole") == 0
    assert (place / "whole/model.safetensors").is_file()
    assert valence("evaluate", "runs/first", "--data", "heldé😀.jsonl", "--out", "all.json") == 0
    assert len(json.loads((place / "all.json").read_text())["rows"]) == 10
    capsys.readouterr()
    assert valence("check", "recipe.yaml", "data.train=heldé😀.jsonl", "data.eval=[]") == 0
    assert "heldé😀.jsonl" in capsys.readouterr().out
    error = command_error("evaluate", "runs/first", "data.eval=[]", "eval.max_examples=null")
    check_error(error, "rows-missing", where="runs/first", fix="--data")


KEYS = "{prompt: question, completion: answer, label: thumb}"


def test_files_of_a_command_are_read_with_the_keys_of_the_recipe(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "question,answer,thumb\n" + "".join(
        f"question {i},answer {i},{i % 2}\n" for i in range(6)
    )
    (place / "table.csv").write_text(table)
    (place / "recipe.yaml").write_text(
        f"method: kto\nmodel: ./model\ndata: {{train: {{path: table.csv, keys: {KEYS}}}}}\nrun: "
        f"{{dir: runs/first}}\n"
    )
    assert valence("train", "recipe.yaml", "--quiet") == 0
    (place / "table.csv").rename(place / "held_out.csv")
    results: list[object] = []
    for data in ("held_out.csv", f"{{path: held_out.csv, keys: {KEYS}}}"):
        capsys.readouterr()
        assert valence("evaluate", "runs/first", "--data", data, "--out", "found.json") == 0
        results.append(json.loads((place / "found.json").read_text()))
        report = json.loads((place / "found.json").read_text())
        sentence = held_out_verdict(None, report).sentence
        assert sentence in capsys.readouterr().out
        assert len(report["rows"]) == 6
    assert results[0] == results[1]
    assert (
        valence(
            "evaluate",
            "recipe.yaml",
            "data.train=[]",
            "--data",
            f"{{path: held_out.csv, keys: {KEYS}}}",
        )
        == 0
    )
    assert (
        valence("score", "runs/first", "--data", "held_out.csv", "--out", "scored.jsonl", "--quiet")
        == 0
    )
    scored = [json.loads(line) for line in (place / "scored.jsonl").read_text().splitlines()]
    assert [len(row["valence"]["answers"]) for row in scored] == [1] * 6
    words = (
        "score",
        "runs/first",
        "--reward",
        "length",
        "--data",
        "held_out.csv",
        "--out",
        "judged.jsonl",
    )
    assert valence(*words, "--quiet") == 0
    assert all(
        json.loads(line)["score"] > 0 for line in (place / "judged.jsonl").read_text().splitlines()
    )
    words = (
        "sample",
        "runs/first",
        "--data",
        "held_out.csv",
        "--out",
        "said.jsonl",
        "--max-new-tokens",
        "2",
    )
    assert valence(*words, "--quiet") == 0
    message = [
        json.loads(line)["prompt"] for line in (place / "said.jsonl").read_text().splitlines()
    ]
    assert message == [f"question {i}" for i in range(6)]
    (place / "held_out.csv").write_text("q,answer,thumb\n" + table.partition("\n")[2])
    error = command_error("evaluate", "runs/first", "--data", "held_out.csv")
    check_error(error, "format-unknown-columns", where="held_out.csv")


def test_mistakes_in_keys_are_listed_for_all_files_with_their_lines(place: Path) -> None:
    for name in ("rows.csv", "more.csv"):
        (place / name).write_text("question,answer,thumb\nwhy,because,up\nhow,so,down\n")
    (place / "recipe.yaml").write_text(
        "method: kto\nmodel: ./model\ndata:\n"
        "  train: {path: rows.csv, keys: {prompt: qestion, completion: answer, label: thumb}}\n"
        "  eval:\n    - path: more.csv\n      keys: {prompt: question, completion: answer, "
        "label: thum}\n"
    )
    error = command_error("check", "recipe.yaml")
    check_error(error, "settings-invalid", where="recipe.yaml")
    first, second = error.problems
    check_error(
        first, "keys-missing-column", where="recipe.yaml:4 (data.train.0.keys)", fix="'question'?"
    )
    check_error(
        second, "keys-missing-column", where="recipe.yaml:7 (data.eval.0.keys)", fix="'thumb'?"
    )
    alone = command_error("check", "recipe.yaml", "data.eval=[]")
    check_error(alone, "keys-missing-column", fix="'question'?")
    assert alone.where == "recipe.yaml:4 (data.train.0.keys)"


def test_check_prints_the_audit_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("check", "recipe.yaml") == 0
    shown = capsys.readouterr().out
    places = [
        shown.index(item)
        for item in ("data.train ", "data.eval ", "train.learning_rate", "steps:", "memory:")
    ]
    assert places == sorted(places)
    assert f"10 {plural('judgement')}" in shown
    with (place / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "a", "completion": "b", "label": None}) + "\n")
    check_error(command_error("check", "recipe.yaml"), "row-rating-missing", where="rows.jsonl:11")
    assert capsys.readouterr().out == ""
    assert valence("check", "recipe.yaml", "data.on_bad_row=skip") == 0
    shown = capsys.readouterr().out
    assert shown.index("rows.jsonl:11") < shown.index("rows.jsonl  judgement")


def test_check_reports_everything_except_training(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert valence("check", "recipe.yaml", "loss.beta=0.2") == 0
    short = capsys.readouterr().out
    assert "loss.beta" in short
    assert "train.seed" not in short
    assert "model.dtype" in short
    assert valence("check", "recipe.yaml", "train.learning_rate=auto") == 0
    rows = {
        line.split()[0]: line.split()[1:]
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    assert rows["train.learning_rate"][0] == "0.0001"
    assert {"kto", "adapter"} <= set(rows["train.learning_rate"])
    assert valence("check", "recipe.yaml", "loss.beta=0.2", "--all") == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["loss.beta"] == ["0.2", "command", "line"]
    assert rows["train.batch_size"] == ["5", "recipe.yaml:4"]
    assert rows["train.seed"] == ["0", "default"]
    assert rows["steps:"][0] == "2"
    assert rows["memory:"]
    assert not (place / "runs").exists()


def test_check_warns_of_rows_that_are_longer_than_the_positions_of_the_model(
    place: Path, recwarn: pytest.WarningsRecorder
) -> None:
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    long = {"prompt": "why? ", "completion": "word " * 80, "label": True}
    with Path("rows.jsonl").open("a") as file:
        file.writelines(f"{json.dumps({**long, 'prompt': f'why {i}? '})}\n" for i in range(3))
    assert valence("check", "recipe.yaml", "data.max_length=256") == 0
    (message,) = (str(w.message) for w in recwarn if "data.max_length: 64" in str(w.message))
    assert re.search(r"rows\.jsonl:\d+: 3 of \d+ rows .* 64", message)


@pytest.mark.parametrize(("cores", "gpus", "warns"), [(2, 0, True), (3, 0, False), (2, 3, False)])
def test_check_warns_of_more_processes_than_cores(
    cores: int,
    gpus: int,
    warns: bool,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert valence("check", "recipe.yaml", "--nproc", "3") == 0
    warning = crowding(3)
    assert bool(warning) == warns
    advice = f"--nproc {cores}"
    assert (advice in capsys.readouterr().out) == (advice in warning) == warns
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # 3 processes on two hosts
    assert not crowding(3)


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.usefixtures("place")
def test_offload_without_a_gpu_is_an_error(processes: str) -> None:
    error = command_error("check", "recipe.yaml", "parallel.offload=true", "--nproc", processes)
    check_error(error, "parallel-unsupported", where="(parallel.offload)")


def test_check_refuses_a_tokenizer_that_the_model_has_no_rows_for(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<more{n}>" for n in range(50)])
    tokenizer.save_pretrained(place / "larger")
    error = command_error("check", "recipe.yaml", "model.tokenizer=./larger")
    check_error(error, "tokenizer-mismatch", where="(model.tokenizer)")


@pytest.mark.usefixtures("place")
def test_check_names_evaluation_rows_that_are_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert valence("check", "recipe.yaml") == 0
    assert "rows.jsonl:1, :2, :3, :4" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_inspect_shows_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("inspect", "recipe.yaml", "--row", "2") == 0
    shown = capsys.readouterr().out
    assert "rows.jsonl:2" in shown
    assert "answer 7" in shown
    error = command_error("inspect", "recipe.yaml", "--row", "11")
    check_error(error, "row-number-out-of-range", where="--row 11", fix="from 1 to 10")


def test_inspect_counts_bad_rows_with_reasons(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        json.dumps(ROWS[0]),
        '{"prompt": ',
        json.dumps({**ROWS[1], "label": "maybe"}),
        json.dumps(ROWS[2]),
    ]
    (place / "rows[1].jsonl").write_text("\n".join(lines) + "\n")
    words = ("inspect", "recipe.yaml", "data.train=[{path: 'rows[1].jsonl'}]", "--row")
    assert valence(*words, "4") == 0
    shown = capsys.readouterr().out
    for expected in ("rows[1].jsonl:4", "answer 14", "answer·14<|im_end|>"):
        assert expected in shown
    check_error(command_error(*words, "2"), "json-syntax", where="rows[1].jsonl:2")
    error = command_error(*words, "3")
    check_error(error, "row-label-invalid", where="rows[1].jsonl:3")
    assert "maybe" in error.message
    assert "maybe" in capsys.readouterr().out


def test_inspect_shows_the_conversion_of_a_row(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"poor {i}"}
        for i in range(3)
    ]
    (place / "pairs.json").write_text(json.dumps(pairs))
    words = ("inspect", "recipe.yaml", "data.train=pairs.json", "data.convert=pairs_to_judgements")
    assert valence(*words, "--row", "2", "--stage", "example") == 0
    shown = capsys.readouterr().out
    assert [word in shown for word in ("good 1", "poor 1", "good 0", "good 2")] == [
        True,
        True,
        False,
        False,
    ]
    words = (
        "inspect",
        "recipe.yaml",
        "method=dpo",
        "data.convert=judgements_to_pairs",
        "--row",
        "1",
    )
    (place / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": p, "completion": c, "label": c == "a"}) + "\n"
            for p, c in ("pa", "pb", "qa")
        )
    )
    assert valence(*words) == 0
    assert "preference" in capsys.readouterr().out
    for row, code in (("2", "row-in-other-example"), ("3", "row-not-convertible")):
        error = command_error(*words[:-1], row, "data.train=[rows.jsonl]")
        check_error(error, code, where=f"rows.jsonl:{row}")


def test_losses_lists_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("docs") == 0
    assert "apo_zero_unpaired" in capsys.readouterr().out
    assert valence("docs", "kto") == 0
    shown = capsys.readouterr().out
    assert "2402.01306" in shown
    assert "loss.beta" in shown
    check_error(command_error("docs", "kot"), "argument-invalid", where="NAME", fix="kto")


@pytest.mark.parametrize(
    ("words", "code", "where"),
    [
        (("report",), "run-not-found", "runs/frist"),
        (("train",), "recipe-not-found", "runs/frist"),
        (("report", "--list"), "run-not-found", "runs/frist"),
        (("export", "out"), "run-not-found", "runs/frist"),
        (("evaluate",), "recipe-not-found", "runs/frist"),
        (("sample", "--prompt", "x"), "model-not-found", "model.name"),
    ],
)
def test_a_misspelled_run_folder_is_a_missing_folder_and_no_hub_id(
    words: tuple[str, ...], code: str, where: str, place: Path
) -> None:
    (place / "runs/first").mkdir(parents=True)
    shutil.copy(place / "recipe.yaml", place / "runs/first/config.yaml")
    command, *others = words
    for name in ("runs/frist", "run/first"):
        error = command_error(command, name, *others)
        if code != "model-not-found" or name == "runs/frist":
            check_error(error, code, where=where.replace("runs/frist", name))
            assert "does not exist" in error.message
        if code != "recipe-not-found" or name == "runs/frist":
            assert "runs/first" in str(error.fix)


def explained(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert valence("docs", name) == 0
    return capsys.readouterr().out


def test_a_setting_is_explained_in_full_and_a_section_in_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = explained("train.checkpointing", capsys)
    assert 'Default: "off".' in shown
    assert "selective: every second layer." in " ".join(shown.split())
    shown = explained("model.lora", capsys)
    assert "model.lora.rank" in shown
    assert "model.name" not in shown
    shown = " ".join(explained("loss.beta", capsys).split())
    assert "loss.beta of kto, online_kto: a number above 0. Default: 0.1." in shown
    assert "loss.beta of hindsight, distill, online_distill: a number of at least 0" in shown
    error = command_error("docs", "loss.betta")
    check_error(error, "argument-invalid", where="NAME", fix="valence docs loss.beta")


def test_losses_lists_the_methods_of_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("docs") == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert ", ".join(name for name in ONLINE if name not in WITHOUT_REWARD) in listed
    assert "Without a reward: online_distill." in listed


FEW = ("rejection", "ppo", "grpo", "online_dpo", "online_kto")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ONLINE]
)
def test_losses_explains_a_method_of_a_reward(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(name, capsys)
    assert "rollout.num_rollouts" in shown
    assert all(f"loss.{setting}" in shown for setting in ONLINE[name].settings.model_fields)


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("rejection", "sft", plural(METHODS["sft"].kind)),
        ("kto", "online_kto", "rejection"),
        ("sft", "rejection", "online"),
        ("bradley_terry", "pairs", "rollout.num_rollouts"),
    ],
)
def test_losses_explains_how_a_reward_changes_a_loss(
    name: str, has: str, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(name, capsys)
    assert has in shown
    assert lacks not in shown


@pytest.mark.parametrize(
    ("name", "added"),
    [("rloo", {"kl_beta"}), ("kto", {"thumbs_up", "thumbs_quantile"}), ("grpo", set[str]())],
)
def test_losses_lists_the_settings_that_a_reward_adds(
    name: str, added: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stored, actual = explained(name, capsys).split("rollout.num_rollouts")
    of_rewards = {"kl_beta", "thumbs_up", "thumbs_quantile", "pairs"}
    assert {setting for setting in of_rewards if f"loss.{setting}" in actual} == added
    assert not any(f"loss.{setting}" in stored for setting in added)


TRAIN, CHECK = ("train", "recipe.yaml"), ("check", "recipe.yaml")
SAMPLE = ("sample", "recipe.yaml", "--prompt", "x")
SCORE = ("score", "--reward", "exact_match")
PLACE = "recipe.yaml/model"


@pytest.mark.parametrize(("words", "code", "where", "fix"), [
    (("train", "nowhere.yaml"), "recipe-not-found", "nowhere.yaml", "recipe.yaml"),
    ((*TRAIN, "train.sed=1"), "setting-unknown", "(train.sed)", "train.seed"),
    ((*TRAIN, "model.name=./mdoel"), "model-not-found", "(model.name)", ""),
    ((*TRAIN, "reference.model=./mdoel"), "model-not-found", "(reference.model)", ""),
    ((*TRAIN, "data.train=[row.jsonl]"), "file-not-found", "(data.train.0.path)", "rows.jsonl"),
    ((*TRAIN, "method=ktoo"), "method-unknown", "(method)", "mean kto?"),
    ((*TRAIN, "method=thumbs"), "method-unknown", "(method)", "mean kto?"),
    ((*TRAIN, "method=Pairs"), "method-unknown", "(method)", "mean dpo?"),
    ((*TRAIN, "method=reward"), "method-unknown", "(method)", "mean grpo with a reward?"),
    ((*TRAIN, "method=poem"), "method-unknown", "(method)", "valence docs"),
    ((*TRAIN, "method=KTO"), "method-unknown", "(method)", "mean kto?"),
    ((*CHECK, "method=Robust-DPO"), "method-unknown", "(method)", "mean robust_dpo?"),
    ((*TRAIN, "--learning-rate", "1e-4"), "option-unknown", "", "train.learning_rate=1e-4"),
    ((*TRAIN, "--lr=1e-4"), "option-unknown", "", "train.learning_rate=1e-4"),
    ((*TRAIN, "--quite"), "option-unknown", "", "--quiet"),
    (("report", "--seed", "1"), "option-unknown", "", "valence report --help"),
    (("--foo",), "option-unknown", "", "valence --help"),
    (("kto",), "command-unknown", "", "valence train RECIPE method=kto"),
    (("thumbs",), "command-unknown", "", "valence docs kto"),
    (("resume", "runs/first"), "command-unknown", "", "valence train RUN"),
    (("losses",), "command-unknown", "", "valence docs"),
    (("trian", "r.yaml"), "command-unknown", "", "`valence train`"),
    (("recipe.yaml",), "command-unknown", "", "valence train recipe.yaml"),
    (("rows.jsonl",), "command-unknown", "", "valence init rows.jsonl"),
    (("poem",), "command-unknown", "", "valence --help"),
    (("train",), "argument-missing", "train", "valence train recipe.yaml"),
    (("sweep", "recipe.yaml"), "option-missing", "sweep", "--over"),
    (("sweep", "recipe.yaml", "lr=1,2"), "sweep-over-missing", "", "train.learning_rate=1,2"),
    (("sweep", "recipe.yaml", "x.y=1,2", "--out", "s"), "sweep-over-missing", "", "--over x.y=1"),
    ((*TRAIN, "--nproc", "x"), "usage-invalid", "train", "valence train --help"),
    (("docs", "a", "b"), "usage-invalid", "docs", "valence docs --help"),
    ((*TRAIN, "--train.seed=1"), "option-unknown", "command line", "train.seed=1"),
    (("train", "--train.seed", "1"), "option-unknown", "command line", "train.seed=1"),
    (("evaluate", "model"), "run-not-found", "model", ""),
    (("evaluate", "nowhere"), "recipe-not-found", "nowhere", ""),
    (("evaluate", "recipe.yaml", "--out", "no/a.json"), "file-not-writable", "no/a.json", ""),
    (("sample", "recipe.yaml"), "rows-missing", "sample", "--prompt"),
    ((*SAMPLE, "--seed", "9" * 30), "sampling-value", "seed", ""),
    ((*SAMPLE, "--max-new-tokens", "99999999999"), "sampling-value", "max_new_tokens", ""),
    (("export", "recipe.yaml", PLACE), "folder-not-writable", PLACE, ""),
    (("export", "recipe.yaml", "/proc/zz"), "folder-not-writable", "/proc/zz", ""),
    ((*CHECK, "train.epochs=1e308"), "setting-type", "(train.epochs)", ""),
    ((*CHECK, "reward=null"), "setting-type", "(reward)", "[]"),
    (("sample", "model", "rows.jsonl"), "override-syntax", "command line", "--data rows.jsonl"),
    ((*SCORE, "--out", "o.jsonl"), "option-missing", "score", "--data FILE"),
])  # fmt: skip
def test_a_mistake_is_one_message_and_status_2(
    words: tuple[str, ...],
    code: str,
    where: str,
    fix: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = command_error(*words)
    check_error(error, code, where=where, fix=fix)
    shown = capsys.readouterr()
    assert " ".join(shown.err.split()) == " ".join(f"valence: {error}".split())
    assert "Traceback" not in shown.out
    assert not (place / "runs").exists()


@pytest.mark.usefixtures("place")
def test_an_option_out_of_range_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence(*SAMPLE, "-n", "99999999999") == 2
    assert "-n" in capsys.readouterr().err


def test_a_second_run_in_the_same_folder_needs_a_word(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert valence("train", "recipe.yaml", "--quiet") == 0
    assert capsys.readouterr().out == ""
    log = (place / "runs/first/metrics.jsonl").read_bytes()
    weights = (place / "model/model.safetensors").rename("weights")  # they are not loaded again
    assert valence("train", "recipe.yaml") == 0
    weights.rename(place / "model/model.safetensors")
    shown = capsys.readouterr().out
    assert "--fresh" in shown
    assert "runs/first/model" in shown
    assert (place / "runs/first/metrics.jsonl").read_bytes() == log
    error = command_error("train", "recipe.yaml", "train.learning_rate=3e-3")
    check_error(error, "run-differs", where="runs/first", fix="--allow train.learning_rate")
    assert "0.001 -> 0.003" in error.message
    assert valence("train", "recipe.yaml", "--quiet", "--fresh") == 0
    (aside,) = [path for path in (place / "runs").iterdir() if path.name != "first"]
    assert (aside / "metrics.jsonl").read_bytes() == log


def test_quiet_shows_the_warnings_of_the_audit_on_standard_error(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {**ROWS[0], "label": not ROWS[0]["label"]}, {**ROWS[1], "label": "maybe"}]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("train", "recipe.yaml", "data.on_bad_row=skip", "loss.desirable_weight=9")
    assert valence(*words, "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    for expected in (
        "rows.jsonl:11",
        "rows.jsonl:12",
        "rows.jsonl:1, :2, :3, :4",
        "loss.desirable_weight",
    ):
        assert len([line for line in lines if expected in line]) == 1, expected
    warnings = json.loads((place / "runs/first/audit.json").read_text())["train"]
    assert len(warnings["unused"]) == 1


def test_quiet_scoring_still_reports_failed_rows(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "odd_reward.py").write_text(
        "def odd(prompts, completions, **_):\n    return ['?' if '14' in str(each) else 1.0 for "
        "each in completions]\n"
    )
    words = ("score", "model", "--data", "rows.jsonl", "--quiet", "--reward")
    assert valence(*words, "odd_reward:odd", "--out", "one.jsonl") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "rows.jsonl:3" in shown.err


@pytest.mark.slow
def test_an_interrupt_finishes_the_step_and_saves(place: Path) -> None:
    """SIGINT from outside, while a long run trains."""
    program = Program("train", "recipe.yaml", "train.epochs=100000", output=place / "said")
    log = place / "runs/first/metrics.jsonl"
    program.wait_until(lambda: log.is_file() and log.read_text().count("\n") > 3)
    program.send_signal(signal.SIGINT)
    status, output = program.wait(), (place / "said").read_text()
    assert status == 130, output
    assert "Traceback" not in output
    saved = [
        int(path.name.removeprefix("step-"))
        for path in (place / "runs/first/checkpoints").iterdir()
    ]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert max(saved) == records[-1]["step"]
    assert json.loads((place / "runs/first/run.json").read_text())["status"] == "interrupted"
    assert (place / "runs/first/report.html").is_file()


def test_an_interrupt_before_the_first_phase_is_reported(place: Path) -> None:
    """While torch is imported, in whose place a module of the current folder is."""
    (place / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    words = [sys.executable, "-m", "valence", "train", "recipe.yaml"]
    result = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False)
    assert result.returncode == 130, result.stderr
    assert NOTHING_STARTED in result.stdout
    assert not (place / "runs").exists()


@pytest.mark.parametrize(("options", "shown"), [([], 0), (["default"], 3)])
def test_deprecations_of_libraries_are_shown_only_on_request(
    options: list[str], shown: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    categories = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    (place / "warner.py").write_text(
        "import warnings\n"
        "def read(paths, options):\n"
        f"    for category in ({', '.join(c.__name__ for c in categories)}, UserWarning):\n"
        "        warnings.warn('something', category)\n"
        "    return []\n"
    )
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "warnoptions", options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        command_error("import", "warner:read", "rows.jsonl")
    assert len([item for item in caught if item.category in categories]) == shown
    assert len([item for item in caught if item.category is UserWarning]) == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("unable to mmap 100 bytes from file <x>: Cannot allocate memory (12)"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_lack_of_memory_is_no_bug(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ruamel.yaml.YAML.compose", fail)
    check_error(command_error("check", "recipe.yaml"), "out-of-memory", fix="ulimit")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_a_small_address_space_is_no_bug(place: Path) -> None:
    words = f"ulimit -v 400000; exec {sys.executable} -m valence check recipe.yaml"
    result = subprocess.run(
        ["bash", "-c", words], cwd=place, capture_output=True, text=True, check=False
    )
    assert result.returncode == cli.MISTAKE, result.stderr
    assert result.stderr.startswith("valence: out of memory")
    assert "Traceback" not in result.stderr
