"""Preparing the next step in a thread changes no results, errors, checkpoints or endings."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import valence
from tests.errors import check_error, raises_error
from tests.simulated_cuda import CUDA, simulated_device
from tests.training.online import recipes
from tests.training.resuming import Killed, killed, records, resumed_steps, weights
from tests.training.test_run import DEMONSTRATIONS, recipe, written
from tests.units import models_for, objective, units_for
from valence.api import build_run
from valence.batching import micro_batches
from valence.batching.micro_batches import StepPacker
from valence.data import column_files, example_store, tokenize
from valence.errors import UserError
from valence.training import trainer as trainer_module
from valence.training.signals import OUT_OF_TIME, Interrupted
from valence.training.trainer import Prefetcher, StepInputs, Trainer
from valence.types import MicroBatch

THREAD = "valence-prefetch"


def is_running() -> bool:
    """Whether a thread that prepares steps is alive."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    yield
    assert not is_running()


@dataclass
class Preparations:
    """Every preparation of a step, in order: (step, tokens per micro-batch, in the thread).

    before: called with the step before it is prepared.
    """

    calls: list[tuple[int, int, bool]] = field(default_factory=list[tuple[int, int, bool]])
    trainer: Trainer | None = None
    before: Callable[[int], None] = lambda _: None


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> Preparations:
    record, prepare = Preparations(), Trainer._prepare_inputs

    def recorded(self: Trainer, step: int, budgets: Any, get_examples: Any) -> StepInputs:
        is_in_thread = threading.current_thread().name.startswith(THREAD)
        record.trainer = self
        record.calls.append((step, budgets[0], is_in_thread))
        record.before(step)
        return prepare(self, step, budgets, get_examples)

    monkeypatch.setattr(Trainer, "_prepare_inputs", recorded)
    return record


def without_prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetcher, "start", lambda *_: None)


LOGGED = {"log_every": 1, "save_every": 1, "samples": {"prompts": 0}}


def offline(folder: Path, place: Path, method: str, **sections: Any) -> dict[str, Any]:
    """Six steps with an evaluation after every second one."""
    settings = recipe(folder, place, method, **sections)
    settings["run"] |= LOGGED
    return settings


def mixed(folder: Path, place: Path) -> dict[str, Any]:
    rows = written(place / "shown.jsonl", DEMONSTRATIONS)
    auxiliary = {"method": "sft", "train": rows, "batch_size": 3, "weight": 0.5}
    return offline(folder, place, "kto") | {"mix": [auxiliary]}


def online(place: Path, method: str) -> dict[str, Any]:
    """Two epochs of two steps per round: three of four steps can be prepared ahead."""
    recipes.make(place)
    return recipes.recipe(place, method, rollout={"steps": 2, "epochs": 2}, run=LOGGED)


CASES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "kto": lambda folder, place: offline(folder, place, "kto"),
    "kto in small micro-batches": lambda folder, place: offline(
        folder, place, "kto", train={"micro_batch_tokens": 40}
    ),
    "dpo": lambda folder, place: offline(folder, place, "dpo"),
    "sft": lambda folder, place: offline(folder, place, "sft"),
    "kto and sft": mixed,
    "grpo": lambda _, place: online(place, "grpo"),
    "online kto": lambda _, place: online(place, "online_kto"),
}


def train(settings: dict[str, Any], run: Path) -> Trainer:
    return valence.train(settings, overrides=[f"run.dir={run}"], quiet=True)


def assert_same(one: Trainer, other: Trainer) -> None:
    """The runs have the same log and the same weights, bit for bit."""
    assert records(one.directory) == records(other.directory)
    assert all(torch.equal(p, weights(other)[name]) for name, p in weights(one).items())


@pytest.mark.parametrize("name", CASES)
def test_prefetching_changes_no_bit(
    name: str,
    folder: Path,
    tmp_path: Path,
    preparations: Preparations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = CASES[name](folder, tmp_path)
    ahead = train(settings, tmp_path / "ahead")
    calls, preparations.calls = preparations.calls, []
    steps_per_round = 4 if ahead.prepared.method.online else 100
    assert [(step, is_in_thread) for step, _, is_in_thread in calls] == [
        (step, step % steps_per_round != 0) for step in range(ahead.total_steps)
    ]  # each step once
    without_prefetching(monkeypatch)
    alone = train(settings, tmp_path / "alone")
    assert [(step, is_in_thread) for step, _, is_in_thread in preparations.calls] == [
        (step, False) for step in range(ahead.total_steps)
    ]
    assert_same(ahead, alone)


@pytest.mark.parametrize("name", CASES)
def test_a_step_builds_one_prefix_tree_per_loss(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its preparation; none when it runs."""
    num_trees = {"preparation": 0, "step": 0}
    current = threading.local()  # the stage that each thread is in
    build, prepare = micro_batches.build_prefix_tree, Trainer._prepare_inputs
    optimizer_step = trainer_module.optimizer_step

    def counted(*arguments: Any) -> Any:
        if stage := getattr(current, "stage", None):
            num_trees[stage] += 1
        return build(*arguments)

    def during(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            current.stage = stage
            try:
                return function(*arguments, **options)
            finally:
                current.stage = None

        return run

    monkeypatch.setattr(micro_batches, "build_prefix_tree", counted)
    monkeypatch.setattr(Trainer, "_prepare_inputs", during("preparation", prepare))
    monkeypatch.setattr(trainer_module, "optimizer_step", during("step", optimizer_step))
    result = train(CASES[name](folder, tmp_path), tmp_path / "run")
    num_losses = 2 if name == "kto and sft" else 1
    assert num_trees == {"preparation": num_losses * result.total_steps, "step": 0}


@pytest.mark.parametrize("name", ["kto", "kto and sft", "grpo"])
def test_a_run_killed_with_a_prepared_step_resumes_with_the_step_that_was_not_done(
    name: str,
    folder: Path,
    tmp_path: Path,
    preparations: Preparations,
) -> None:
    settings = CASES[name](folder, tmp_path)
    undisturbed = train(settings, tmp_path / "undisturbed")

    def kill(*_: Any) -> None:
        """End the run in step 3, once step 4 is prepared. The checkpoint is of step 2."""
        assert preparations.trainer is not None
        if preparations.trainer.step == 2:
            deadline = time.monotonic() + 30
            while (3, True) not in [(step, thread) for step, _, thread in preparations.calls]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            preparations.trainer.state.is_consistent = False  # no state is saved any more
            raise Killed

    preparations.calls.clear()
    with pytest.raises(Killed), register_optimizer_step_pre_hook(kill):
        train(settings, tmp_path / "killed")
    assert not is_running()

    resumed = train(settings, tmp_path / "killed")
    assert resumed_steps(resumed.directory) == [2]
    assert_same(resumed, undisturbed)


def test_a_killed_run_that_reads_rows_from_files_has_the_bits_of_one_in_memory(
    folder: Path, tmp_path: Path, preparations: Preparations, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CASES["kto and sft"](folder, tmp_path)
    in_memory = train(settings, tmp_path / "in memory")
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(tmp_path / "cache"))
    for module, name, value in (
        (tokenize, "MIN_EXAMPLES", 2),
        (tokenize, "CHUNK_SIZE", 3),
        (column_files, "MAX_MEMORY_BYTES", 0),
        (example_store, "MAX_MEMORY_BYTES", 0),
    ):
        monkeypatch.setattr(module, name, value)
    run = tmp_path / "from files"
    killed(settings, 3, overrides=[f"run.dir={run}"])
    from_files = train(settings, run)
    assert resumed_steps(run) == [2]
    for corpus in from_files.prepared.corpora.values():
        tokens = corpus.units.columns["tokens"]
        assert isinstance(tokens.base, np.memmap)
        assert not tokens.flags.writeable
    assert any(is_in_thread for _, _, is_in_thread in preparations.calls)
    assert_same(from_files, in_memory)


BROKEN = UserError("this step cannot be prepared", code="kl-pairs-missing", where="x", fix="y")


def fail_at(broken_step: int) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step == broken_step:
            raise BROKEN

    return fail


@pytest.mark.parametrize("is_ahead", [True, False])
def test_an_error_surfaces_at_the_step_that_cannot_be_prepared(
    is_ahead: bool,
    folder: Path,
    tmp_path: Path,
    preparations: Preparations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same message, log and checkpoint as without prefetching."""
    if not is_ahead:
        without_prefetching(monkeypatch)
    preparations.before = fail_at(3)
    settings = offline(folder, tmp_path, "kto")
    with pytest.raises(UserError) as info:
        valence.train(settings, quiet=True)
    assert info.value is BROKEN
    assert preparations.calls[-1][0::2] == (3, is_ahead)
    assert records(tmp_path / "run")[-1]["step"] == 3
    assert (tmp_path / "run/checkpoints/step-3").is_dir()

    preparations.before = lambda _: None
    assert valence.train(settings, quiet=True).step == 6


def test_an_error_of_a_step_that_is_never_run_is_none(
    folder: Path, tmp_path: Path, preparations: Preparations
) -> None:
    preparations.before = fail_at(3)

    def stop(*_: Any) -> None:
        if preparations.trainer is not None and preparations.trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as info, register_optimizer_step_pre_hook(stop):
        valence.train(offline(folder, tmp_path, "kto"), quiet=True)
    assert info.value.status == 128 + signal.SIGTERM
    assert (tmp_path / "run/checkpoints/step-3").is_dir()
    assert preparations.calls[-1][0::2] == (3, True)


@pytest.mark.parametrize("status", [128 + signal.SIGINT, 128 + signal.SIGTERM, OUT_OF_TIME])
def test_a_stop_waits_for_a_preparation_and_leaves_no_thread(
    status: int, folder: Path, tmp_path: Path, preparations: Preparations
) -> None:
    num_prepared = 0

    def stop_and_prepare_slowly(step: int) -> None:
        nonlocal num_prepared
        if step == 1:
            if status == OUT_OF_TIME:
                assert preparations.trainer is not None
                preparations.trainer.stop.local._ends_at = 0.0
            else:
                signal.raise_signal(status - 128)
            time.sleep(0.3)
        num_prepared += 1

    preparations.before = stop_and_prepare_slowly
    with pytest.raises(Interrupted) as info:
        valence.train(offline(folder, tmp_path, "dpo"), quiet=True)
    assert info.value.status == status
    assert num_prepared == 2
    assert not is_running()


def test_a_step_that_runs_out_of_memory_is_prepared_again_with_the_next_one(
    folder: Path, tmp_path: Path, preparations: Preparations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In smaller micro-batches, for the same result as without prefetching."""
    is_ahead = True

    def fail_once(*_: Any) -> None:
        run = preparations.trainer
        assert run is not None
        if run.step == 2 and run.state.objective.micro_batch_tokens == 80:
            while is_ahead and (3, 80, True) not in preparations.calls:
                time.sleep(0.01)  # the thread may not have started with the next step
            raise torch.OutOfMemoryError("CUDA out of memory.")

    settings = offline(folder, tmp_path, "dpo", train={"micro_batch_tokens": 80, "epochs": 3})
    with register_optimizer_step_pre_hook(fail_once):
        ahead = train(settings, tmp_path / "ahead")
    assert ahead.state.budget.changes == [(0, "evaluation", 80), (2, "training", 40)]
    calls, preparations.calls = preparations.calls, []
    assert calls == [
        (0, 80, False), (1, 80, True), (2, 80, True), (3, 80, True),
        (2, 40, False), (3, 40, True), (4, 40, True), (5, 40, True),
    ]  # fmt: skip
    is_ahead = False
    without_prefetching(monkeypatch)
    with register_optimizer_step_pre_hook(fail_once):
        alone = train(settings, tmp_path / "alone")
    assert_same(ahead, alone)


def test_a_prepared_step_is_discarded_when_a_state_is_loaded(
    folder: Path, tmp_path: Path, preparations: Preparations
) -> None:
    settings = offline(folder, tmp_path, "kto")
    one, other = (build_run(settings, quiet=True) for _ in range(2))

    def fail() -> StepInputs:
        raise BROKEN

    other._prefetcher.start((0, (other.state.objective.micro_batch_tokens,)), fail)
    other.load_state_dict(one.state_dict())
    assert other.fit()
    assert preparations.calls[0][0::2] == (0, False)


class Silent:
    """A group of two ranks that must not communicate."""

    size, rank = 2, 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} in the preparation of a step")


@pytest.mark.parametrize("name", ["kto", "dpo", "aot", "grpo"])
def test_planning_communicates_with_no_other_rank(name: str) -> None:
    actual = objective(name, *models_for(name), budget=60)
    actual.group = Silent()  # type: ignore[assignment]
    plan = actual.plan(units_for(name), (), backward=True)
    assert plan.batches.local


def test_the_batches_of_cuda_wait_in_pinned_memory_and_are_copied_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated_device() as waits:
        num_pinned: list[int] = []

        def pin(values: torch.Tensor) -> torch.Tensor:
            num_pinned.append(values.numel())
            return values

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        packer = StepPacker(units_for("kto"), device=CUDA)
        host = packer.host_micro_batch(packer.example_indices)
        assert not host.tokens.is_cuda
        assert len(num_pinned) >= 11
        batch = packer.micro_batch(packer.example_indices)
        tensors = {n: v for n in MicroBatch.__slots__ if torch.is_tensor(v := getattr(batch, n))}
        assert [name for name, v in tensors.items() if not v.is_cuda] == [
            "cpu_tokens",
            "cpu_scored",
        ]
        assert waits == []


# The prefetcher alone


def test_a_prefetcher_returns_what_was_started_and_prepares_anything_else_now() -> None:
    prefetcher = Prefetcher[str]()
    threads: list[str] = []

    def prepare(value: str) -> Callable[[], str]:
        def run() -> str:
            threads.append(threading.current_thread().name.partition("_")[0])
            return value

        return run

    assert prefetcher.take(0, prepare("now")) == "now"
    prefetcher.start(1, prepare("ahead"))
    assert prefetcher.take(1, prepare("unused")) == "ahead"
    prefetcher.start(2, prepare("discarded"))
    assert prefetcher.take((2, "otherwise"), prepare("now")) == "now"
    assert prefetcher.take(2, prepare("again")) == "again"
    main = threading.current_thread().name.partition("_")[0]
    assert [name for name in threads if name != THREAD] == [main] * 3
    prefetcher.close()
    assert not is_running()
    prefetcher.start(3, prepare("after close"))
    assert prefetcher.take(3, prepare("unused")) == "after close"
    prefetcher.close()


def test_a_prefetcher_raises_an_error_once_and_forgets_that_of_a_discarded_value() -> None:
    prefetcher = Prefetcher[int]()

    def fail() -> int:
        raise BROKEN

    prefetcher.start(1, fail)
    with raises_error("kl-pairs-missing") as raised:
        prefetcher.take(1, lambda: 1)
    check_error(raised.error, "kl-pairs-missing", where="x", fix="y")
    prefetcher.start(1, fail)
    assert prefetcher.take(2, lambda: 2) == 2
    assert prefetcher.take(1, lambda: 1) == 1
    prefetcher.close()


def test_only_one_value_is_prepared_at_any_time() -> None:
    prefetcher = Prefetcher[None]()
    num_running, largest = 0, 0

    def prepare() -> None:
        nonlocal num_running, largest
        num_running += 1
        largest = max(largest, num_running)
        time.sleep(0.02)
        num_running -= 1

    for key in range(5):
        prefetcher.start(key, prepare)
        prefetcher.take(key if key % 2 else "other", prepare)
    assert largest == 1
    prefetcher.close()
