"""A complete run on a tiny model, from files to a folder that other libraries can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.api import build_run
from valence.training.open_run import restore
from valence.training.trainer import Trainer

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "completion": f"{'good' if i % 2 else 'bad'} answer {i}",
        "label": i % 2,
    }
    for i in range(12)
]
PAIRS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(8)
]
DEMONSTRATIONS = [{"prompt": f"question {i} ", "completion": f"good {i}"} for i in range(8)]
DATA = {"kto": ROWS, "apo_zero_unpaired": ROWS, "dpo": PAIRS, "sft": DEMONSTRATIONS}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model folder with its tokenizer, as a user has one."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def without_weights(model: Path, copy: Path) -> Path:
    """A copy of a model folder that cannot be loaded."""
    shutil.copytree(model, copy)
    (copy / "model.safetensors").unlink()
    return copy


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(folder: Path, tmp_path: Path, method: str = "kto", **sections: Any) -> dict[str, Any]:
    return {
        "method": method,
        "model": {"name": str(folder), **sections.get("model", {})},
        "data": {
            "train": [{"path": written(tmp_path / "train.jsonl", DATA[method])}],
            "eval": [{"path": written(tmp_path / "eval.jsonl", DATA[method][:5])}],
            "max_length": 128,
        },
        "train": {"batch_size": 4, "learning_rate": 1e-3, "epochs": 2, **sections.get("train", {})},
        "eval": {"every": 2},
        "run": {"dir": str(tmp_path / "run"), **sections.get("run", {})},
    }


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


FULL, LORA = None, {"rank": 4}
METHOD_CASES = [("kto", LORA), ("dpo", FULL), ("sft", LORA)]
ALL_CASES = [(method, lora) for method in DATA for lora in (FULL, LORA)]
SLOW_CASES = [case for case in ALL_CASES if case not in METHOD_CASES]
FinishedRuns = Callable[[str, bool], Trainer]


@pytest.fixture(scope="session")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """A finished run of a method, with an adapter or not. Only to be read."""

    @cache
    def train(method: str, adapter: bool) -> Trainer:
        model = {"lora": LORA} if adapter else {}
        samples = {"samples": {"prompts": 2, "max_new_tokens": 4}}
        return valence.train(
            recipe(folder, tmp_path_factory.mktemp("finished"), method, model=model, run=samples),
            quiet=True,
        )

    return train


@pytest.mark.parametrize(
    ("method", "lora"),
    [*METHOD_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_a_run_leaves_a_model_a_log_and_a_report(
    method: str,
    lora: Any,
    finished: FinishedRuns,
) -> None:
    run = finished(method, lora is not None)
    out = run.directory
    for name in (
        "config.yaml",
        "audit.json",
        "metrics.jsonl",
        "run.json",
        "report.html",
        "samples.json",
        "eval/step-0.json",
        "eval/step-0.txt",
        "model/config.json",
        "model/README.md",
        "model/tokenizer.json",
    ):
        assert (out / name).is_file(), name
    records = logged(out)
    steps = -(-len(DATA[method]) // 4) * 2
    assert [r["step"] for r in records] == list(range(steps + 1))
    first, last = records[0], records[-1]
    assert last["eval/loss"] < first["eval/loss"]
    if method != "sft":
        assert first["eval/rewards/margins"] == pytest.approx(0, abs=1e-6)
        assert last["eval/rewards/margins"] > 0
    assert {
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_seen",
        "tokens/s",
        "micro_batches",
        "waste",
    } <= last.keys()
    assert json.loads((out / "run.json").read_text())["status"] == "done"
    # What others load says the same as the policy that was trained.
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.chat_template
    assert set(loaded.generation_config.eos_token_id) == {
        *run.prepared.encoder.end_ids,
        loaded.config.eos_token_id,
    }
    text = [{"prompt": "question 1", "completion": "good answer"}]
    ours = valence.logprobs(run.policy.model, text, tokenizer=tokenizer)
    theirs = valence.logprobs(loaded, text)  # with the tokenizer of the folder it was loaded from
    assert theirs[0].logps == pytest.approx(ours[0].logps, abs=1e-4)


def test_measuring_leaves_a_model_as_it_was() -> None:
    tokenizer = tiny_tokenizer()
    model: Any = tiny("gpt2", vocab_size=len(tokenizer), dtype=torch.float32, resid_pdrop=0.3)
    model.train()
    model.lm_head.eval()
    before = [(module.training, getattr(module, "p", None)) for module in model.modules()]
    valence.logprobs(model, [{"prompt": "question", "completion": " answer"}], tokenizer=tokenizer)
    assert [(module.training, getattr(module, "p", None)) for module in model.modules()] == before
    assert (True, 0.3) in before


def test_a_run_writes_what_each_held_out_row_measured(finished: FinishedRuns) -> None:
    out = finished("kto", True).directory
    result = json.loads((out / "eval/step-6.json").read_text())
    assert [row["origin"].rsplit(":", 1)[1] for row in result["rows"]] == ["1", "2", "3", "4", "5"]
    for row, value in zip(result["rows"], ROWS, strict=False):
        assert row["prompt"] == value["prompt"][0]["content"]
        assert row["completion"] == value["completion"]
        assert row["reward"] == pytest.approx(0.1 * (row["logp"] - row["ref"]))
    assert "good answer 1" in (out / "eval/step-6.txt").read_text()


def test_a_restored_run_measures_what_it_measured(finished: FinishedRuns) -> None:
    run = finished("kto", True)
    again = restore(run.directory)
    assert again.evaluate().metrics == run.evaluate().metrics
    assert again.evaluate(ROWS[:2]).rows == run.evaluate(ROWS[:2]).rows


def test_one_continues_an_adapter_against_a_copy_of_it(folder: Path, tmp_path: Path) -> None:
    """The reference of a continued adapter is that adapter as it starts, not the bare model."""
    train: dict[str, Any] = {"train": {"epochs": 1}}
    first = recipe(
        folder, tmp_path, model={"lora": {"rank": 4}}, run={"export": "adapter"}, **train
    )
    valence.train(first, quiet=True)
    model = {"adapter": str(tmp_path / "run/model")}
    second = recipe(folder, tmp_path, model=model, run={"dir": str(tmp_path / "next")}, **train)
    valence.train(second, quiet=True)
    records = logged(tmp_path / "next")
    assert records[0]["eval/rewards/margins"] == pytest.approx(0, abs=1e-7)
    assert records[-1]["eval/rewards/margins"] > 0  # the adapter was not loaded frozen


def test_objects_given_replace_those_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    observed: list[int] = []
    run = valence.train(
        {
            "method": "kto",
            "model": {"name": "not-a-model"},
            "run": {"dir": str(tmp_path / "run")},
            "train": {"batch_size": 6},
        },
        model=tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32),
        tokenizer=tiny_tokenizer(),
        reference=tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32, seed=1),
        train=ROWS,
        eval=ROWS[:4],
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        callbacks=[lambda _, record: observed.append(record["step"])],
        quiet=True,
    )
    assert observed == [0, 1, 2]
    assert isinstance(run.state.optimizer, torch.optim.SGD)
    assert logged(tmp_path / "run")[0]["eval/logratio/chosen"] != 0


def test_a_step_that_is_not_finite_changes_nothing_and_names_its_rows(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    run = build_run(recipe(folder, tmp_path, train={"max_skipped": 2}), quiet=True)
    before = {name: p.clone() for name, p in run.policy.named_parameters()}
    reference = run.reference
    assert reference is not None

    def broken(batch: Any) -> torch.Tensor:
        return reference(batch) * float("nan")

    run.state.objective.reference = broken  # type: ignore[assignment]
    with raises_error("loss-not-finite", where="step 2"):
        run.fit()
    assert run.step == 2
    assert all(torch.equal(p, before[name]) for name, p in run.policy.named_parameters())
    assert not run.state.optimizer.state
    assert "train.jsonl:" in capsys.readouterr().err.replace("\n", "")


def test_a_folder_that_holds_a_run_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    settings = recipe(folder, tmp_path, "sft", train={"max_steps": 1})
    valence.train(settings, quiet=True)
    log = (tmp_path / "run/metrics.jsonl").read_text()
    valence.train(settings, quiet=True, fresh=True)
    (old,) = [p for p in tmp_path.iterdir() if p.name.startswith("run.")]
    assert (old / "metrics.jsonl").read_text() == log


@pytest.mark.parametrize(("change", "code", "where"), [
    ({"train": {"batch_size": 100, "drop_last": True}}, "step-larger-than-data", "train.drop_last"),
    ({"model": {"name": "./nowhere"}}, "model-not-found", "model.name"),
])  # fmt: skip
def test_mistakes_are_found_before_a_model_is_loaded(
    change: Any, code: str, where: str, folder: Path, tmp_path: Path
) -> None:
    settings = recipe(without_weights(folder, tmp_path / "model"), tmp_path)
    for section, values in change.items():
        settings[section] = settings[section] | values
    with raises_error(code, where=where):
        valence.train(settings, quiet=True)


def test_kto_needs_two_distinct_completions(folder: Path, tmp_path: Path) -> None:
    rows = [row | {"completion": "the same"} for row in ROWS]
    with raises_error("kl-pairs-missing", where="rows in memory:1"):
        valence.train(recipe(folder, tmp_path), train=rows, eval=rows, quiet=True)


def test_policy_and_reference_must_share_a_vocabulary(folder: Path, tmp_path: Path) -> None:
    with raises_error("vocabulary-mismatch", where="reference.model"):
        valence.train(
            recipe(folder, tmp_path), reference=tiny(vocab_size=50, dtype=torch.float32), quiet=True
        )


def test_rows_beyond_a_table_of_positions_are_refused_before_training(tmp_path: Path) -> None:
    """A model with learned positions would fail in the middle; one with rotary positions only
    warns.
    """
    rows = [row | {"completion": "word " * (40 + i)} for i, row in enumerate(ROWS)]
    settings = {
        "method": "sft",
        "model": {"name": "given"},
        "run": {"dir": str(tmp_path / "run")},
        "data": {"max_length": 512},
    }
    rows = [{"prompt": "question ", "completion": row["completion"]} for row in rows]
    vocabulary = len(tiny_tokenizer())
    short = {"vocab_size": vocabulary, "dtype": torch.float32}
    with raises_error(
        "row-too-long-for-model",
        where="rows in memory:12",
        fix="data.max_length: 64",
    ):
        valence.train(
            settings,
            model=tiny("gpt2", n_positions=64, max_position_embeddings=64, **short),
            tokenizer=tiny_tokenizer(),
            train=rows,
            quiet=True,
        )
    rotary = tiny("llama", max_position_embeddings=64, **short)
    with pytest.warns(UserWarning, match=r"rows in memory:12: .*data\.max_length: 64"):
        valence.train(settings, model=rotary, tokenizer=tiny_tokenizer(), train=rows, quiet=True)


def test_kl_pairs_longer_than_the_positions_of_the_model_are_refused(tmp_path: Path) -> None:
    """Each row fits, but not a prompt with the completion of another row."""
    rows = [
        {
            "prompt": "word " * 22 if i % 2 else f"question {i}",
            "completion": f"yes {i}" if i % 2 else "word " * 22,
            "label": i < 2,
        }
        for i in range(4)
    ]
    short: dict[str, Any] = {"vocab_size": len(tiny_tokenizer()), "dtype": torch.float32}
    with raises_error("max-length-too-large", where="data.max_length", fix="data.max_length: 80"):
        valence.train(
            {"method": "kto", "model": {"name": "object"}, "run": {"dir": str(tmp_path / "run")}},
            model=tiny("gpt2", n_positions=80, max_position_embeddings=80, **short),
            tokenizer=tiny_tokenizer(),
            train=rows,
            quiet=True,
        )
