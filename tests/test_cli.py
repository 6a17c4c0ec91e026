"""The command line, as a user types it: what is printed, what is written, what the exit status is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from tests.command import command as valence
from tests.models import tiny
from tests.programs import Program
from tests.tiny import tiny_tokenizer
from valence import cli
from valence.cli import complete
from valence.cli.guide import COMMANDS, HELP
from valence.cli.stream import Stream
from valence.training.methods import METHODS, ONLINE

ROWS = [
    {"prompt": [{"role": "user", "content": f"question {i}"}], "completion": f"answer {i * 7}", "label": i % 3 == 0}
    for i in range(10)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows and a recipe, which is the current one."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        "method: kto\n"
        "model: {name: ./model, lora: {rank: 2}}\n"
        "data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl, limit: 4}], max_length: 128}\n"
        "train: {batch_size: 5, learning_rate: 1e-3}\n"
        "run: {dir: runs/first}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 160)
    return tmp_path


def test_train_then_evaluate_sample_and_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("train", "recipe.yaml", "train.epochs=2") == 0
    shown = capsys.readouterr().out
    for expected in ("data.train", "training 4/4", "runs/first/model", "runs/first/metrics.jsonl", "runs/first/report.html"):
        assert expected in shown
    assert json.loads((place / "runs/first/run.json").read_text())["command"] == "valence train recipe.yaml train.epochs=2"

    assert valence("evaluate", "runs/first", "--out", "found.json") == 0
    found = json.loads((place / "found.json").read_text())
    assert found["metrics"] == json.loads((place / "runs/first/eval/step-4.json").read_text())["metrics"]
    assert valence("evaluate", "runs/first", "--data", "rows.jsonl", "--out", "all.json") == 0
    assert len(json.loads((place / "all.json").read_text())["rows"]) == 10
    assert valence("evaluate", "recipe.yaml", "--out", "start.json") == 0
    assert json.loads((place / "start.json").read_text())["metrics"]["rewards/margins"] == pytest.approx(0, abs=1e-6)

    assert (
        valence("sample", "runs/first", "--prompt", "question 1", "-n", "2", "--max-new-tokens", "4", "--out", "said.jsonl") == 0
    )
    said = [json.loads(line) for line in (place / "said.jsonl").read_text().splitlines()]
    assert [line["prompt"][0]["content"] for line in said] == ["question 1"] * 2

    assert valence("sample", "runs/first", "--data", "rows.jsonl", "--max-new-tokens", "2", "--out", "more.jsonl") == 0
    assert len((place / "more.jsonl").read_text().splitlines()) == 10

    assert valence("export", "runs/first", "whole") == 0
    assert (place / "whole/model.safetensors").is_file()
    assert valence("export", "runs/first", "small", "--adapter") == 0
    assert (place / "small/adapter_model.safetensors").is_file()
    assert valence("export", "runs/first", "small") == 2


def test_a_run_is_used_without_the_data_it_was_trained_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("eval.every=1", "eval.max_examples=3", "data.limit=5", "run.samples.prompts=1", "run.samples.max_new_tokens=3")
    assert valence("train", "recipe.yaml", *settings, "--quiet") == 0
    (place / "rows.jsonl").rename(place / "heldé😀.jsonl")
    assert valence("sample", "runs/first", "--prompt", "hello", "--max-new-tokens", "2") == 0
    assert valence("export", "runs/first", "whole") == 0
    assert valence("evaluate", "runs/first", "--data", "heldé😀.jsonl", "--out", "all.json") == 0
    assert len(json.loads((place / "all.json").read_text())["rows"]) == 10
    capsys.readouterr()
    assert valence("check", "recipe.yaml", "data.train=heldé😀.jsonl", "data.eval=[]") == 0
    assert "heldé😀.jsonl" in capsys.readouterr().out
    assert valence("evaluate", "runs/first", "data.eval=[]", "eval.max_examples=null") == 2
    assert "--data" in capsys.readouterr().err


def test_check_says_everything_short_of_training(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("check", "recipe.yaml", "loss.beta=0.2") == 0
    short = capsys.readouterr().out
    assert "loss.beta" in short
    assert "train.seed" not in short
    assert "that have their defaults" in short
    assert valence("check", "recipe.yaml", "loss.beta=0.2", "--all") == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["loss.beta"] == ["0.2", "command", "line"]
    assert rows["train.batch_size"] == ["5", "recipe.yaml:4"]
    assert rows["train.seed"] == ["0", "default"]
    assert rows["steps:"][0] == "2"
    assert "memory: about" in shown
    assert not (place / "runs").exists()


def test_check_refuses_a_tokenizer_that_the_model_has_no_rows_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<more{n}>" for n in range(50)])
    tokenizer.save_pretrained(place / "larger")
    assert valence("check", "recipe.yaml", "model.tokenizer=./larger") == 2
    assert "the tokenizer knows" in capsys.readouterr().err


def test_check_names_evaluation_rows_that_are_trained_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("check", "recipe.yaml") == 0
    assert "4  of these rows are also in data.train" in capsys.readouterr().out


def test_inspect_shows_each_stage(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("inspect", "recipe.yaml", "--row", "2") == 0
    shown = capsys.readouterr().out
    assert "rows.jsonl:2" in shown
    assert "answer 7" in shown
    assert valence("inspect", "recipe.yaml", "--row", "11") == 2
    assert "10 rows" in capsys.readouterr().err


def test_inspect_counts_bad_rows_and_says_why_they_are_bad(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(ROWS[0]), '{"prompt": ', json.dumps({**ROWS[1], "label": "maybe"}), json.dumps(ROWS[2])]
    (place / "rows[1].jsonl").write_text("\n".join(lines) + "\n")
    words = ("inspect", "recipe.yaml", "data.train=[{path: 'rows[1].jsonl'}]", "--row")
    assert valence(*words, "4") == 0
    shown = capsys.readouterr().out
    for expected in ("rows[1].jsonl:4", "answer 14", "answer·14<|im_end|>"):
        assert expected in shown
    assert valence(*words, "2") == 2
    assert "rows[1].jsonl:2: the line is not valid JSON" in capsys.readouterr().err
    assert valence(*words, "3") == 2
    shown = capsys.readouterr()
    assert "maybe" in shown.out
    assert "rows[1].jsonl:3: label is 'maybe'" in shown.err


def test_inspect_shows_what_a_conversion_makes_of_a_row(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"poor {i}"} for i in range(3)]
    (place / "pairs.json").write_text(json.dumps(pairs))
    words = ("inspect", "recipe.yaml", "data.train=pairs.json", "data.convert=pairs_to_judgements")
    assert valence(*words, "--row", "2", "--stage", "example") == 0
    shown = capsys.readouterr().out
    assert [word in shown for word in ("good 1", "poor 1", "good 0", "good 2")] == [True, True, False, False]
    words = ("inspect", "recipe.yaml", "method=dpo", "data.convert=judgements_to_pairs", "--row", "1")
    (place / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "completion": c, "label": c == "a"}) + "\n" for p, c in ("pa", "pb", "qa"))
    )
    assert valence(*words) == 0
    assert "preference" in capsys.readouterr().out
    for row, why in (("2", "under another row"), ("3", "no other answer judged down")):
        assert valence(*words[:-1], row, "data.train=[rows.jsonl]") == 2
        assert why in capsys.readouterr().err


def test_losses_lists_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("losses") == 0
    assert "apo_zero_unpaired" in capsys.readouterr().out
    assert valence("losses", "kto") == 0
    shown = capsys.readouterr().out
    assert "2402.01306" in shown
    assert "loss.beta" in shown
    assert valence("losses", "kot") == 2
    assert "kto" in capsys.readouterr().err


def test_losses_explains_what_a_reward_makes_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("losses") == 0
    assert "rejection, online_dpo" in " ".join(capsys.readouterr().out.split())
    for name in ONLINE:
        assert valence("losses", name) == 0
        shown = capsys.readouterr().out
        assert "With a reward" in shown
        assert "prompts alone" in shown
        assert all(f"loss.{setting}" in shown for setting in ONLINE[name].settings.model_fields)
    for name, has, lacks in (("rejection", "The loss is sft", "answers to imitate"), ("kto", "online_kto", "rejection"),
                             ("sft", "rejection", "online"), ("bradley_terry", "pairs", "With a reward")):  # fmt: skip
        assert valence("losses", name) == 0
        shown = capsys.readouterr().out
        assert has in shown
        assert lacks not in shown


def test_losses_tells_the_settings_that_a_reward_adds(capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("rloo", {"kl_beta"}), ("kto", {"thumbs_up", "thumbs_quantile"}), ("grpo", set[str]())):
        assert valence("losses", name) == 0
        stored, own = capsys.readouterr().out.split("With a reward")
        assert {setting for setting in ("kl_beta", "thumbs_up", "thumbs_quantile", "pairs") if f"loss.{setting}" in own} == more
        assert not any(f"loss.{setting}" in stored for setting in more)


@pytest.mark.parametrize(("words", "said"), [
    (("train", "nowhere.yaml"), "nowhere.yaml"),
    (("train", "recipe.yaml", "train.sed=1"), "seed"),
    (("train", "recipe.yaml", "model.name=./mdoel"), "command line (model.tokenizer or model.name): there is no folder"),
        (("train", "recipe.yaml", "reference.model=./mdoel"), "command line (reference.model)"),
    (("train", "recipe.yaml", "data.train=[{path: row.jsonl}]"), "rows.jsonl"),
    (("train", "recipe.yaml", "method=ktoo"), "kto"),
    (("evaluate", "model"), "holds no run"),
    (("evaluate", "nowhere"), "nowhere"),
    (("sample", "recipe.yaml"), "--prompt"),
    (("sample", "recipe.yaml", "--prompt", "x", "--seed", "9" * 30), "seed"),
    (("sample", "recipe.yaml", "--prompt", "x", "--max-new-tokens", "99999999999"), "max_new_tokens"),
    (("sample", "recipe.yaml", "--prompt", "x", "-n", "99999999999"), "-n"),
    (("export", "recipe.yaml", "recipe.yaml/model"), "cannot be made"),
    (("export", "recipe.yaml", "/proc/zz"), "cannot be made"),
    (("check", "recipe.yaml", "train.epochs=1e308"), "train.epochs"),
    (("check", "recipe.yaml", "reward=null"), "write [] for none"),
    (("sample", "model", "rows.jsonl", "--out", "answers.jsonl"), "--data rows.jsonl"),
    (("score", "--reward", "exact_match", "--out", "scored.jsonl"), "give --data FILE"),
])  # fmt: skip
def test_a_mistake_is_one_message_and_status_2(
    words: tuple[str, ...], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert valence(*words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert not (place / "runs").exists()


def test_a_second_run_in_the_same_folder_needs_a_word(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert valence("train", "recipe.yaml", "--quiet") == 0
    assert capsys.readouterr().out == ""
    log = (place / "runs/first/metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("valence.api.build_models", lambda *_, **__: pytest.fail("a model is loaded for nothing"))
        assert valence("train", "recipe.yaml") == 0
    shown = capsys.readouterr().out
    assert "is finished" in shown
    assert "--fresh" in shown
    assert "runs/first/model" in shown
    assert (place / "runs/first/metrics.jsonl").read_bytes() == log
    assert valence("train", "recipe.yaml", "train.learning_rate=3e-3") == 2
    assert "train.learning_rate: " in (refused := capsys.readouterr().err)
    assert "--allow train.learning_rate" in refused
    assert valence("train", "recipe.yaml", "--quiet", "--fresh") == 0
    (aside,) = [path for path in (place / "runs").iterdir() if path.name != "first"]
    assert (aside / "metrics.jsonl").read_bytes() == log


def test_an_interrupt_finishes_the_step_and_saves(place: Path) -> None:
    """SIGINT from outside, while a long run trains."""
    program = Program("train", "recipe.yaml", "train.epochs=100000", said=place / "said")
    log = place / "runs/first/metrics.jsonl"
    program.wait_until(lambda: log.is_file() and log.read_text().count("\n") > 3)
    program.send_signal(signal.SIGINT)
    status, output = program.wait(), (place / "said").read_text()
    assert status == 130, output
    assert "Traceback" not in output
    saved = [int(path.name.removeprefix("step-")) for path in (place / "runs/first/checkpoints").iterdir()]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert max(saved) == records[-1]["step"]
    assert json.loads((place / "runs/first/run.json").read_text())["status"] == "interrupted"
    assert (place / "runs/first/report.html").is_file()


def test_json_is_one_object_a_record_and_the_rest_goes_to_stderr(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert valence("train", "recipe.yaml", "--json") == 0
    shown = capsys.readouterr()
    first, *records, last = [json.loads(line, parse_constant=_refuse) for line in shown.out.splitlines()]
    assert first == {"event": "started", "run": "runs/first", "resumed": False}
    assert records == [json.loads(line) for line in (place / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert last == {
        "event": "done", "run": "runs/first", "model": "runs/first/model", "report": "runs/first/report.html",
        "status": "done", "exit_status": 0,
    }  # fmt: skip
    assert "training 2/2" in shown.err
    assert valence("resume", "runs/first", "--json", "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    (done,) = map(json.loads, shown.out.splitlines())
    assert (done["event"], done["run"], done["status"]) == ("done", str(place / "runs/first"), "done")


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


def test_json_ends_with_a_mistake_or_a_stop(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert valence("train", "recipe.yaml", "train.sed=1", "--json") == 2
    shown = capsys.readouterr()
    (line,) = map(json.loads, shown.out.splitlines())
    assert (line["event"], line["status"], line["exit_status"], line["run"]) == ("done", "failed", 2, None)
    assert "train.sed" in line["error"]
    assert "train.sed" in shown.err
    log = Stream.log

    def stopped(stream: Stream, record: dict[str, float]) -> None:
        log(stream, record)
        if record["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "log", stopped)
        assert valence("train", "recipe.yaml", "train.epochs=3", "--json") == 130
    *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (last["status"], last["exit_status"], last["run"], last["model"]) == ("interrupted", 130, "runs/first", None)
    assert records[-1]["step"] == 3
    assert valence("train", "recipe.yaml", "train.epochs=3", "--json") == 0
    first, *records, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["resumed"], last["status"]) == (True, "done")
    assert [record["step"] for record in records] == [4, 5, 6]

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("valence.api.train_in_folder", broken)
    with pytest.raises(ValueError, match="a defect"):
        valence("train", "recipe.yaml", "--json")
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["status"], line["exit_status"]) == ("failed", 1)


def in_a_shell(place: Path, words: str, behind: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        f"set -o pipefail; '{sys.executable}' -m valence {words} {behind}",
        cwd=place, shell=True, executable=shutil.which("bash"), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip


def test_that_nobody_reads_is_no_mistake_and_that_nobody_can_is_one(place: Path) -> None:
    (place / "runs/none").mkdir(parents=True)
    (place / "runs/none/run.json").write_text("{}")
    unread = in_a_shell(place, "runs --json", "| true")
    assert (unread.returncode, unread.stderr) == (0, "")
    closed = in_a_shell(place, "train recipe.yaml --json", ">&-")
    assert closed.returncode == 2
    assert "--json: the standard output is closed" in closed.stderr
    assert not (place / "runs/first").exists()


def test_an_interrupt_before_anything_is_begun_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("valence.dist.processes.start", stopped)  # as while torch is imported
    assert valence("train", "recipe.yaml") == 130
    assert "stopped before anything was begun" in capsys.readouterr().out
    assert not (place / "runs").exists()


def test_a_run_goes_on_when_nobody_reads_its_json_any_more(place: Path) -> None:
    done = in_a_shell(place, "train recipe.yaml --json --quiet", "| head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["event"] == "started"
    assert json.loads((place / "runs/first/run.json").read_text())["status"] == "done"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, valence.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_every_command_is_in_the_help_with_a_panel_a_plain_sentence_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {command.name: command for command in get_command(cli.app).commands.values()}  # type: ignore[attr-defined]
    assert list(commands) == list(COMMANDS)
    assert valence("--help") == 0
    shown = capsys.readouterr().out
    for name, command in commands.items():
        panel, example = COMMANDS[str(name)]
        assert f"{panel} " in shown
        assert command.help.split("\n")[0][0].isupper()
        words = shlex.split(example)
        assert words[:2] == ["valence", name]
        command.make_context(str(name), words[2:])  # the command takes these words
        assert example in command.epilog
    assert all(f"`{name}`" in HELP for name in ("kto", "dpo", "sft", "grpo"))


SHELLS = ("bash", "zsh", "fish")


def completed(shell: str, line: str, place: Path) -> list[str]:
    """What a shell is told when the last word of a line is to be completed, by a process that may load no torch."""
    code = (
        "import sys, valence.cli\nsys.argv = ['valence']\ntry:\n    valence.cli.main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    asked = {
        "_VALENCE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line.replace("=", " = "), "_TYPER_COMPLETE_ARGS": line,
        "COMP_CWORD": str(len(line.replace("=", " = ").split(" ")) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    if shell == "zsh":
        return re.findall(r'^(?:_arguments .\*: :\(\()?"([^"]*)"', done.stdout, re.MULTILINE)
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two recipes, and a run's folder with the settings it keeps."""
    for name in ("one.yaml", "more/two.yml", "more/rows.jsonl", "runs/first/run.json", "runs/first/config.yaml", ".hid/x.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_names_of_settings(shell: str, files: Path) -> None:
    assert completed(shell, "valence tr", files) == ["train"]
    assert {"--fresh", "--json"} <= set(completed(shell, "valence train --", files))
    assert completed(shell, "valence train one.yaml train.see", files) == ["train.seed="]


@pytest.mark.parametrize(("line", "found"), [
    ("valence check ", ["one.yaml", "more/two.yml"]),
    ("valence check ./mo", ["./more/two.yml"]),
    ("valence resume ", ["runs/first"]),
    ("valence resume runs/first/", ["runs/first/"]),
    ("valence evaluate r", ["runs/first"]),
    ("valence losses online_k", ["online_kto"]),
    ("valence rewards ex", ["exact_match"]),
    ("valence train one.yaml train.schedule=co", ["cosine", "constant"]),
    ("valence train one.yaml train.compile=o", ["on", "off"]),
    ("valence train nowhere/x", []),
])  # fmt: skip
def test_a_shell_completes_files_and_names(line: str, found: list[str], files: Path) -> None:
    assert completed("bash", line, files) == found


def test_methods_are_those_that_there_are() -> None:
    assert complete.methods("") == list(dict.fromkeys((*METHODS, *(name for name in sorted(ONLINE, key=_apart)))))


def _apart(name: str) -> int:
    """rejection, then the others as the table of losses has them."""
    return -1 if name == "rejection" else [*METHODS].index(name.removeprefix("online_"))
