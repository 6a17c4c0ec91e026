"""The reference cache in complete runs: filled before or during training, by several processes, for
every run of a sweep.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import valence
from tests.distributed.process_groups import run as run_in_processes
from tests.errors import raises_error
from tests.logs import repeatable
from tests.programs import Program
from valence.distributed.process_group import Group
from valence.models.reference import FrozenReference, LazyReference
from valence.training.open_run import restore
from valence.training.reference_cache import score

COUNT = 13
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i // 2}"}],
        "completion": f"answer {i * i}",
        "label": i % 3 == 0,
    }
    for i in range(COUNT)
]
PAIRS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(COUNT)
]


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows and a recipe for each method, which is the current one."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for method, rows in (("kto", ROWS), ("dpo", PAIRS)):
        (tmp_path / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{method}.yaml").write_text(
            f"method: {method}\n"
            "model: {name: ./model}\n"
            f"data: {{train: {method}.jsonl, eval: [{{path: {method}.jsonl, limit: 5}}], "
            f"max_length: 128}}\n"
            "train: {batch_size: 4, learning_rate: 1e-3, epochs: 2}\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(recipe: str, run: str, *settings: str) -> Any:
    return valence.train(recipe, overrides=[f"run.dir={run}", *settings], quiet=True)


def counts(run: str) -> tuple[int, int]:
    result = json.loads(Path(run, "run.json").read_text())["reference_cache"]
    return result["hits"], result["misses"]


def records(run: str) -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    return [repeatable(json.loads(line)) for line in lines]


FIRST: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "an adapter": ("model.lora.rank=2",),
    "another reference": ("reference.model=./other",),
}
LATER = (
    "loss.beta=0.5",
    "train.learning_rate=1e-4",
    "train.micro_batch_tokens=200",
    "train.weight_decay=0.1",
)


@pytest.mark.parametrize(("method", "kind"), [
    ("kto", "an adapter"),
    pytest.param("dpo", "another reference", marks=pytest.mark.slow),
    pytest.param("dpo", "all weights", marks=pytest.mark.slow),
    pytest.param("dpo", "an adapter", marks=pytest.mark.slow),
    pytest.param("kto", "all weights", marks=pytest.mark.slow),
    pytest.param("kto", "another reference", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_second_run_of_a_sweep_runs_no_reference(method: str, kind: str, place: Path) -> None:
    shared = ("reference.cache=kept", "train.epochs=1", *FIRST[kind])
    train(f"{method}.yaml", "runs/1", *shared)
    train(f"{method}.yaml", "runs/2", *shared, *LATER)
    hits, misses = counts("runs/2")
    assert (hits >= COUNT, misses) == (True, 0)
    assert records("runs/1") != records("runs/2")


@pytest.mark.slow
def test_another_seed_or_batch_size_finds_all_that_it_has_in_common(place: Path) -> None:
    """kto puts other answers behind the prompts; its own sequences are found."""
    once = ("reference.cache=kept", "train.epochs=1")
    train("kto.yaml", "runs/1", *once)
    run = train("kto.yaml", "runs/2", *once, "train.seed=5", "train.batch_size=3")
    assert run.reference.hits >= COUNT
    assert 0 < run.reference.misses <= COUNT


@pytest.mark.slow
def test_another_seed_and_more_epochs_of_pairs_run_no_reference(
    place: Path,
) -> None:
    train("dpo.yaml", "runs/1", "reference.cache=kept", "train.epochs=1")
    train(
        "dpo.yaml",
        "runs/2",
        "reference.cache=kept",
        "train.seed=5",
        "train.batch_size=3",
        "train.epochs=2",
    )
    assert counts("runs/2")[1] == 0


@pytest.mark.parametrize("method", ["kto", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_log_is_the_same_with_and_without_a_cache(method: str, place: Path) -> None:
    for run, where in {"off": "off", "first": "kept", "second": "kept"}.items():
        train(f"{method}.yaml", f"runs/{run}", f"reference.cache={where}", "train.epochs=1")
    expected = records("runs/off")
    for run in ("runs/first", "runs/second"):
        for result, line in zip(records(run), expected, strict=True):
            assert result == pytest.approx(line, rel=1e-3, abs=1e-5)
    assert "reference_cache" not in json.loads(Path("runs/off/run.json").read_text())


def test_a_run_has_a_separate_cache(place: Path) -> None:
    """Later epochs and evaluations compute nothing again, and other runs do not read it.

    Measuring the run adds nothing.
    """
    run = train("dpo.yaml", "runs/1")
    assert run.reference.misses == 2 * COUNT
    assert counts("runs/1")[0] > 2 * COUNT
    assert list(Path("runs/1/reference").rglob("*.index"))
    assert train("dpo.yaml", "runs/2", "train.epochs=1").reference.misses == 2 * COUNT
    before = {path: path.stat().st_size for path in Path("runs/1/reference").rglob("*")}
    again = restore(Path("runs/1"))
    assert again.evaluate().metrics == run.evaluate().metrics
    again.evaluate([PAIRS[0] | {"chosen": "something new"}])
    assert again.reference.hits > 0  # type: ignore[union-attr]
    assert {path: path.stat().st_size for path in Path("runs/1/reference").rglob("*")} == before


@pytest.mark.parametrize("more", [
    (),
    pytest.param(("model.lora.rank=2", "reference.model=./other"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_copy_that_is_not_needed_is_let_go_of_and_comes_back(
    more: tuple[str, ...],
    place: Path,
) -> None:
    """After full training against the starting policy, of which nothing is left in memory."""
    settings = ("reference.cache=kept", "train.epochs=1", *more)
    first = train("dpo.yaml", "runs/1", *settings)
    assert isinstance(first.reference.inner, FrozenReference)
    run = train("dpo.yaml", "runs/2", *settings, "loss.beta=0.3")
    assert isinstance(run.reference.inner, LazyReference)
    rows = [row | {"chosen": "something new"} for row in PAIRS[:2]]
    expected = [(row["ref_chosen"], row["ref_rejected"]) for row in first.evaluate(rows).rows]
    results = [(row["ref_chosen"], row["ref_rejected"]) for row in run.evaluate(rows).rows]
    assert results == expected


@pytest.mark.parametrize(("method", "remaining"), [
    ("dpo", "auto"),
    pytest.param("kto", "kept", marks=pytest.mark.slow),
    pytest.param("kto", "auto", marks=pytest.mark.slow),
    pytest.param("dpo", "kept", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_whose_rows_were_scored_runs_no_reference(
    method: str, remaining: str, place: Path
) -> None:
    settings = (f"reference.cache={remaining}", f"data.test={method}.jsonl")
    cached = score(f"{method}.yaml", [*settings, "run.dir=runs/1"], verify=6)
    assert cached.misses >= COUNT
    assert Path("runs/1").exists() == (remaining == "auto")
    run = train(f"{method}.yaml", "runs/1", *settings)
    assert run.reference.misses == 0
    assert [path.name for path in Path("runs").iterdir()] == ["1"]


def test_training_rows_that_are_measured_afterwards_are_scored_too(place: Path) -> None:
    """kto puts other answers behind the prompts of these few."""
    settings = ("reference.cache=kept", "eval.train_examples=7", "train.epochs=1", "run.dir=runs/1")
    score("kto.yaml", settings)
    assert train("kto.yaml", "runs/1", *settings).reference.misses == 0
    assert Path("runs/1/eval/train.json").is_file()


@pytest.mark.slow
def test_scoring_leaves_out_training_rows_that_cannot_be_measured(place: Path) -> None:
    """One thumb alone has no mismatched answer."""
    settings = ("reference.cache=kept", "eval.train_examples=1", "train.epochs=1", "run.dir=runs/1")
    score("kto.yaml", settings)
    assert train("kto.yaml", "runs/1", *settings).reference.misses == 0


def shared(group: Group, place: Path, settings: Sequence[str]) -> int:
    os.chdir(place)
    return score("kto.yaml", settings, group=group).misses


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_share_the_work(place: Path) -> None:
    """Together they score everything, and nothing twice."""
    settings = ("reference.cache=kept", "train.micro_batch_tokens=60")
    full = score("kto.yaml", ["reference.cache=alone", settings[1]]).misses
    ranks = run_in_processes(shared, 2, place, settings, deadline=60.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", full)] * 2
    assert score("kto.yaml", settings).misses == 0


def test_stopped_scoring_resumes_at_its_position(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = score("kto.yaml", ["reference.cache=whole", "train.micro_batch_tokens=60"]).misses
    computed: list[int] = []
    compute = FrozenReference.__call__

    def stopping(self: FrozenReference, batch: Any) -> Any:
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append(batch.sequences)
        return compute(self, batch)

    monkeypatch.setattr(FrozenReference, "__call__", stopping)
    settings = ["reference.cache=kept", "train.micro_batch_tokens=60"]
    with pytest.raises(KeyboardInterrupt):
        score("kto.yaml", settings)
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert score("kto.yaml", settings).misses == full - sum(computed)


@pytest.mark.slow
def test_the_command_survives_being_killed(place: Path) -> None:
    """kill -9 while it fills; then it is called again, and once more with nothing left to do."""
    words = ("score", "kto.yaml", "reference.cache=kept")
    program = Program(*words, "train.epochs=200")
    program.wait_until(
        lambda: any(path.stat().st_size > 3000 for path in Path("kept").rglob("*.index"))
    )
    assert program.kill() == -signal.SIGKILL
    assert Program(*words, "train.epochs=2", "--verify", "4", output="said").wait() == 0
    message = Path("said").read_text()
    assert re.search(r"\b4 sequences", message)  # what --verify asked for
    cached = score("kto.yaml", ["reference.cache=kept"])
    assert (cached.misses, cached.store.damaged) == (0, 0)


def test_values_that_drifted_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score("dpo.yaml", ["reference.cache=kept"])
    compute = FrozenReference.__call__
    monkeypatch.setattr(
        FrozenReference,
        "__call__",
        lambda self, batch: compute(self, batch) + 0.1 * batch.loss_mask,
    )
    with raises_error("reference-cache-stale", where="reference.cache: kept"):
        score("dpo.yaml", ["reference.cache=kept"], verify=4)


def test_a_cache_of_others_is_mentioned(place: Path) -> None:
    settings = ("reference.cache=kept", "train.epochs=1")
    score("dpo.yaml", [*settings, "reference.model=./other"])
    train("dpo.yaml", "runs/1", *settings)
    notes = json.loads(Path("runs/1/run.json").read_text())["notes"]
    words = [set(re.findall(r"[\w./]+", note)) for note in notes]
    assert sum({"26", "./other", "float32"} <= result for result in words) == 1


@pytest.mark.parametrize(("recipe", "settings", "code", "where"), [
    ("dpo.yaml", ["reference.cache=off"], "nothing-to-score", "reference.cache"),
    ("dpo.yaml", ["reference.cache=dpo.jsonl"], "path-is-file", "reference.cache"),
    ("dpo.yaml", ["reference.cache=dpo.jsonl/inside"],
     "reference-cache-unusable", "dpo.jsonl/inside"),
    ("kto.yaml", ["method=sft", "data.convert=null"], "nothing-to-score", "method"),
])  # fmt: skip
def test_a_recipe_without_a_cache_is_refused(
    recipe: str,
    settings: list[str],
    code: str,
    where: str,
    place: Path,
) -> None:
    with raises_error(code, where=where):
        score(recipe, settings)


def test_a_loss_without_a_reference_loads_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = LlamaForCausalLM.from_pretrained
    monkeypatch.setattr(
        LlamaForCausalLM,
        "from_pretrained",
        lambda name, *args, **options: loaded.append(name) or load(name, *args, **options),
    )
    (place / "sft.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"question {i} ", "completion": "x"}) + "\n" for i in range(4)
        )
    )
    run = train("kto.yaml", "runs/1", "method=sft", "data.train=sft.jsonl", "data.eval=[]")
    assert (run.reference, len(loaded)) == (None, 1)
    assert not Path("runs/1/reference").exists()


def test_passes_are_what_a_run_asks_for(place: Path) -> None:
    """Neither more nor less than the run's own keys, so that scoring computes nothing in vain."""
    scored = score("kto.yaml", ["reference.cache=scored"])
    run = train("kto.yaml", "runs/1", "reference.cache=trained")
    assert len(scored.store) == len(run.reference.store) > COUNT
