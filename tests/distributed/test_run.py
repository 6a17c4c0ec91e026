"""A run of several processes equals that of one: every logged number, weights, rows of an
evaluation, and resuming.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import valence
from benchmarks.crash.cases import CASES, recipe
from tests.distributed.process_groups import run as run_in_processes
from tests.logs import repeatable
from valence.distributed.process_group import Group, SingleProcess
from valence.training.signals import Interrupted
from valence.training.trainer import Trainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CASE = {case.name: case for case in CASES}
LAYOUT_METRICS = {
    "tokens",
    "tokens_seen",
    "waste",
    "micro_batches",
    "ranks",
    "tokens/rank_max",
    "tokens/rank_min",
}
"""Numbers that depend on how a step was cut."""
SHORT = {"train": {"epochs": 1.6}, "run": {"save_every": 2, "log_every": 3, "keep": None}}
"""8 steps of 4 rows, one of them of 2; a save in the middle of the log's window."""
SIX_STEPS = {"epochs": 1.2}
"""One more than an epoch has."""


def written(
    case: str, place: Path, run: Path, /, dtype: str = "float64", **sections: Mapping[str, Any]
) -> dict[str, Any]:
    settings = recipe(CASE[case], place)
    for name, section in (
        {name: SHORT.get(name, {}) for name in ("train", "run")} | sections
    ).items():
        settings[name] = settings.get(name, {}) | SHORT.get(name, {}) | section
    settings["run"] |= {"dir": str(run)}
    settings["model"] |= {"dtype": dtype}
    return settings


def train(
    group: Group,
    recipes: Sequence[Mapping[str, Any]],
    stop_at: int | None = None,
    by: int = 0,
    **options: Any,
) -> list[str]:
    """Runs recipes one after another. stop_at: the step after which the process of rank ``by`` is
    sent SIGTERM.
    """
    ended: list[str] = []

    def act(run: Any, record: Mapping[str, Any]) -> None:
        if run.step == stop_at and group.rank == by:
            os.kill(os.getpid(), signal.SIGTERM)

    for item in recipes:
        try:
            valence.train(item, group=group, quiet=True, callbacks=[act], **options)
            ended.append("done")
        except Interrupted as stopped:
            ended.append(f"{stopped.status}")
    return ended


def ended(size: int, recipes: Sequence[Mapping[str, Any]], *stop: int) -> list[list[str]]:
    """What ``train`` returns in each of ``size`` processes."""
    if size == 1:
        return [train(SingleProcess(), recipes, *stop)]
    ranks = run_in_processes(train, size, recipes, *stop, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    return [rank.value for rank in ranks]


def records(run: Path) -> list[dict[str, Any]]:
    return [
        repeatable(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def same(run: Path, other: Path, rel: float = 1e-9, of_logps: float = 0.0) -> None:
    """The same numbers in the same steps, the same rows, and the same weights. of_logps: what they
    may differ by besides, as a part of the largest mean log-probability, of which some are small
    differences.
    """
    ours, theirs = records(run), records(other)
    assert [item["step"] for item in ours] == [item["step"] for item in theirs]
    largest = max(
        (abs(value) for record in theirs for name, value in record.items() if "logps/" in name),
        default=1.0,
    )
    about = partial(pytest.approx, rel=rel, abs=1e-9 + of_logps * largest)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() - LAYOUT_METRICS == its.keys() - LAYOUT_METRICS
        odd = {
            name: (mine[name], its[name])
            for name in its.keys() - LAYOUT_METRICS
            if mine[name] != about(its[name])
        }
        assert not odd, (run.name, mine["step"])
    for file in ("eval/test.json", "eval/step-4.json"):
        for mine, its in zip(
            *(json.loads((folder / file).read_text())["rows"] for folder in (run, other)),
            strict=True,
        ):
            assert mine == {
                name: about(value) if isinstance(value, float) else value
                for name, value in its.items()
            }, file
    mine, its = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert mine.keys() == its.keys()
    for name, value in its.items():
        torch.testing.assert_close(mine[name], value, rtol=rel, atol=1e-9 + of_logps, msg=name)


SHARDED = {"parallel": {"shard": "full"}}
HYBRID = {"parallel": {"shard": "full", "shard_size": 2}}
"""Of four processes, two share a copy of the weights."""
REPLICATED: dict[str, Any] = {}
SHARED = {"parallel": {"context": 2}}
BOTH = {"parallel": {"context": 2, "shard": "full"}}
RUNS = {
    2: (
        ("kto, lora", SHARDED),
        ("sft, whole models", SHARDED),
        ("aot", REPLICATED),
        ("pointwise, lora, models", REPLICATED),
        ("kto + sft, lora", REPLICATED),
        ("dpo that follows", SHARDED),
        ("kto, lora", SHARED),
        ("sft, whole models", SHARED),
        ("pointwise, lora, models", SHARED),
        ("grpo, lora", SHARED),
        ("dpo that follows", BOTH),
    ),
    4: (
        ("dpo", REPLICATED),
        ("aot", SHARDED),
        ("pointwise, lora, models", SHARDED),
        ("aot", SHARED),
    ),
}
"""Number of processes -> what is run, each process with all weights or with its part of them, and
with all tokens of its rows or a part of them. Tests of resumed runs compare every number of other
layouts with those of one process.
"""


def test_every_number_is_that_of_one_process(place: Path, tmp_path: Path) -> None:
    """Of 18 rows in steps of 4 the last has two: two of four processes have none."""
    cases = {case for runs in RUNS.values() for case, _ in runs}
    assert set(
        train(
            SingleProcess(),
            [written(case, place, tmp_path / f"one {case}", train=SIX_STEPS) for case in cases],
        )
    ) == {"done"}
    for size, message in RUNS.items():
        runs = [tmp_path / f"{size} {number} {case}" for number, (case, _) in enumerate(message)]
        recipes = [
            written(case, place, run, train=SIX_STEPS, **options)
            for run, (case, options) in zip(runs, message, strict=True)
        ]
        for rank in run_in_processes(train, size, recipes, deadline=60.0):
            assert (rank.error, rank.value) == ("", ["done"] * len(runs))
        for run, (case, options) in zip(runs, message, strict=True):
            same(run, tmp_path / f"one {case}")
            logged = [record for record in records(run) if "ranks" in record]
            ranks = size // options.get("parallel", {}).get("context", 1)
            assert {item["ranks"] for item in logged} == ({ranks} if ranks > 1 else set())
            assert all(
                item["tokens"] / ranks <= item["tokens/rank_max"] <= item["tokens"]
                for item in logged
            )
            assert all(0 <= item["tokens/rank_min"] <= item["tokens"] / ranks for item in logged)


def test_online_runs_that_share_tokens_are_those_of_one_process(
    place: Path, tmp_path: Path
) -> None:
    """The policy is sampled in each process alone, or by all if its weights are sharded."""

    def settings(name: str, parallel: Mapping[str, Any]) -> dict[str, Any]:
        written = recipe(CASE["own answers, dapo, lora"], place) | {"parallel": parallel}
        written["model"] |= {"dtype": "float64"}
        return written | {"run": {"dir": str(tmp_path / name), "log_every": 1}}

    assert train(SingleProcess(), [settings("one", {})]) == ["done"]
    for size, options in ((2, SHARED), (2, BOTH), (4, SHARED)):
        name = f"{size} {len(options['parallel'])}"
        for rank in run_in_processes(
            train, size, [settings(name, options["parallel"])], deadline=60.0
        ):
            assert (rank.error, rank.value) == ("", ["done"])
        ours, theirs = records(tmp_path / name), records(tmp_path / "one")
        assert len(ours) == len(theirs) > 3
        for mine, its in zip(ours, theirs, strict=True):
            exact = {key: value for key, value in its.items() if key not in LAYOUT_METRICS}
            assert {key: mine[key] for key in exact} == pytest.approx(
                exact, rel=1e-9, abs=1e-9, nan_ok=True
            ), (name, its["step"])


def test_in_float32_numbers_are_as_close_as_log_probabilities_are_known(
    place: Path, tmp_path: Path
) -> None:
    """Loss and gradient norm to a millionth; other numbers to a millionth of the log-probabilities
    of which they are differences (dev/decisions/0027-a-millionth-in-float32.md).
    """
    message = (
        (2, REPLICATED, ("kto, lora", "sft, whole models", "aot")),
        (4, SHARDED, ("dpo", "pointwise, lora, models")),
    )
    alone = [
        written(case, place, tmp_path / f"one {case}", "float32")
        for *_, cases in message
        for case in cases
    ]
    assert set(train(SingleProcess(), alone)) == {"done"}
    for size, mode, cases in message:
        runs = {case: tmp_path / f"{size} {case}" for case in cases}
        recipes = [written(case, place, run, "float32", **mode) for case, run in runs.items()]
        assert [rank.error for rank in run_in_processes(train, size, recipes, deadline=60.0)] == [
            ""
        ] * size
        for case, run in runs.items():
            same(run, tmp_path / f"one {case}", rel=1e-6, of_logps=1e-6)
            for mine, its in zip(records(run), records(tmp_path / f"one {case}"), strict=True):
                exact = {
                    name: value for name, value in its.items() if name in ("loss", "grad_norm")
                }
                assert {name: mine[name] for name in exact} == pytest.approx(
                    exact, rel=1e-6, abs=1e-9
                ), (run.name, its["step"])


def test_a_signal_to_one_process_stops_all_and_any_number_resumes(
    place: Path, tmp_path: Path
) -> None:
    """Saved by four, it goes on with one, two and three; saved by one, with four."""
    cases = {"kto, lora": (REPLICATED, (2, 4)), "dpo": (SHARDED, (1, 3, 4))}
    runs = {case: tmp_path / case for case in cases}

    def settings(name: int | str) -> dict[str, dict[str, Any]]:
        return {
            case: written(case, place, runs[case] / str(name), **options)
            for case, (options, _) in cases.items()
        }

    assert train(SingleProcess(), list(settings("alone").values())) == ["done"] * 2
    assert train(SingleProcess(), list(settings("of 1").values()), 3) == ["143"] * 2
    stopped = list(settings("of 4").values())
    assert ended(4, stopped, 3, 2) == [["143"] * 2] * 4
    for size in (1, 2, 3, 4):
        resumed = [case for case, (_, sizes) in cases.items() if size in sizes]
        for case in resumed:
            shutil.copytree(runs[case] / ("of 1" if size == 4 else "of 4"), runs[case] / str(size))
        assert ended(size, [settings(size)[case] for case in resumed]) == (
            [["done"] * len(resumed)] * size
        )
        for case in resumed:
            same(runs[case] / str(size), runs[case] / "alone")


def test_tokens_may_be_shared_by_other_processes_after_a_stop(place: Path, tmp_path: Path) -> None:
    """Saved by two that share tokens, it goes on with one, and with two pairs."""
    cases = {"kto, lora": SHARED, "dpo": BOTH}
    runs = {case: tmp_path / case for case in cases}
    alone, one = (
        [written(case, place, runs[case] / name) for case in cases] for name in ("alone", "1")
    )
    two, four = (
        [written(case, place, runs[case] / name, **options) for case, options in cases.items()]
        for name in ("of 2", "4")
    )
    assert train(SingleProcess(), alone) == ["done"] * 2
    assert ended(2, two, 3, 1) == [["143"] * 2] * 2
    for run in runs.values():
        for name in ("1", "4"):
            shutil.copytree(run / "of 2", run / name)
    assert train(SingleProcess(), one) == ["done"] * 2
    assert ended(4, four) == [["done"] * 2] * 4
    for run in runs.values():
        for name in ("1", "4"):
            same(run / name, run / "alone")


def test_replicas_resume_in_another_layout(place: Path, tmp_path: Path) -> None:
    """Two copies on two processes each, then one copy on four, then one process; and back."""
    cases = ("kto, lora", "dpo")

    def settings(name: str, **options: Any) -> list[dict[str, Any]]:
        return [written(case, place, tmp_path / f"{case} {name}", **options) for case in cases]

    assert train(SingleProcess(), settings("alone")) == ["done"] * 2
    for options, stop in ((HYBRID, 3), (SHARDED, 6)):
        assert ended(4, settings("run", **options), stop, 2) == [["143"] * 2] * 4
    assert train(SingleProcess(), settings("run")) == ["done"] * 2
    assert train(SingleProcess(), settings("reverse"), 3) == ["143"] * 2
    assert ended(4, settings("reverse", **HYBRID)) == [["done"] * 2] * 4
    for case in cases:
        for name in ("run", "reverse"):
            same(tmp_path / f"{case} {name}", tmp_path / f"{case} alone")


def train_and_stop(group: Group, settings: Mapping[str, Any]) -> list[str]:
    """As ``train``; rank 1 is sent SIGTERM after the test's evaluation, between phases."""
    evaluate = Trainer.evaluate

    def act(self: Trainer, rows: Any = None, *, name: str = "eval") -> Any:
        outcome = evaluate(self, rows, name=name)
        if name == "test" and group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return outcome

    with mock.patch.object(Trainer, "evaluate", act):
        return train(group, [settings])


def test_a_signal_to_one_process_behind_the_training_stops_all(place: Path, tmp_path: Path) -> None:
    alone, inputs = (written("kto, lora", place, tmp_path / name) for name in ("alone", "two"))
    assert train(SingleProcess(), [alone]) == ["done"]
    assert [
        (rank.error, rank.value)
        for rank in run_in_processes(train_and_stop, 2, inputs, deadline=60.0)
    ] == [("", ["143"])] * 2
    facts = json.loads((tmp_path / "two/run.json").read_text())
    assert (facts["status"], (tmp_path / "two/model").exists()) == ("interrupted", False)
    assert [
        (rank.error, rank.value) for rank in run_in_processes(train, 2, [inputs], deadline=60.0)
    ] == [("", ["done"])] * 2
    same(tmp_path / "two", tmp_path / "alone")


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (
            2,
            (
                ("kto, lora", REPLICATED),
                ("kto, lora", SHARED),
                ("dpo, lora with dropout", REPLICATED),
                ("dpo that follows", SHARDED),
            ),
        ),
        (4, (("dpo that follows", HYBRID),)),
    ],
)
def test_the_same_number_of_processes_resumes_bit_for_bit(
    size: int, cases: Sequence[tuple[str, dict[str, Any]]], place: Path, tmp_path: Path
) -> None:
    alone, stopped = (
        [
            written(case, place, tmp_path / f"{number} {name}", **mode)
            for number, (case, mode) in enumerate(cases)
        ]
        for name in ("alone", "stopped")
    )
    assert ended(size, alone) == [["done"] * len(cases)] * size
    assert ended(size, stopped, 3, 1) == [["143"] * len(cases)] * size
    assert ended(size, stopped) == [["done"] * len(cases)] * size
    for number in range(len(cases)):
        same(tmp_path / f"{number} alone", tmp_path / f"{number} stopped", rel=0.0)


def gradients(group: Group, settings: Mapping[str, Any]) -> list[bool]:
    """Whether the gradient of a batch is added to that of an earlier call, for each weight."""
    run = valence.build_run(settings, group=group, quiet=True)
    batch = next(run.batches())
    run.loss_and_gradient(batch)
    weights = [p for p in run.policy.parameters() if p.grad is not None]
    once = [p.grad.clone() for p in weights if p.grad is not None]
    run.loss_and_gradient(batch)
    run.close()
    return [
        torch.allclose(p.grad, 2 * grad, rtol=1e-9, atol=1e-15)
        for p, grad in zip(weights, once, strict=True)
        if p.grad is not None
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_gradients_of_a_loop_add_up(processes: int, place: Path, tmp_path: Path) -> None:
    ranks = run_in_processes(gradients, processes, written("kto, lora", place, tmp_path / "run"))
    assert [rank.error for rank in ranks] == [""] * processes
    assert all(rank.value and all(rank.value) for rank in ranks)
