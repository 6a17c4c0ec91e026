"""The model behind docs/scale.md: its counts by hand, its bounds, and the constants that it derives
from timings.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.scale_model import __main__ as benchmark
from benchmarks.scale_model import cases, local_steps, measure
from benchmarks.scale_model.local_steps import Step
from benchmarks.scale_model.measure import NUM_PROCESSES
from benchmarks.scale_model.model import (
    Job,
    Layout,
    Machine,
    distribute_rows,
    seconds,
    sharded,
    volume,
)
from tests.distributed.process_groups import run
from valence.distributed.process_group import Group
from valence.models import speed
from valence.models.memory import Split
from valence.models.shape import Shape
from valence.models.speed import Work

SHAPE = Shape(
    parameters=1000,
    trained=1000,
    linear=800,
    layers=4,
    hidden=8,
    inner=16,
    heads=8,
    vocabulary=10,
    largest=200,
    outside=200,
)
WORK = Work(tokens=64.0, scored=32.0, pairs=500.0)
MACHINE = Machine(flops=1e6, memory=1e6, near=1e5, far=1e4, start=1e-3, near_hop=1e-4, far_hop=1e-2)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.5B", 0.494), ("1.5B", 1.54), ("8B", 8.03), ("70B", 70.6)]
)
def test_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    result = cases.shape(name)
    assert result.parameters == pytest.approx(billions * 1e9, rel=3e-3)
    assert result.largest * result.layers + result.outside == result.parameters


def test_transferred_bytes_counted_by_hand() -> None:
    job = Job(SHAPE, WORK, (WORK,), micro_batches=3)
    off = volume(job, Layout(4))
    assert off == {"weights": 0, "gradients": 0.75 * 2 * 4000, "within layers": 0}
    # layers of 800 weights in 2 bytes, others in 4; forward, backward and measured; 3 times
    full = volume(job, sharded(4))
    assert full == {
        "weights": 0.75 * 3 * (2 * 2400 + 1600),
        "gradients": 0.75 * 3 * 4000,
        "within layers": 0,
    }
    assert volume(job, sharded(4, reshard=False))["weights"] == 0.75 * 3 * 2 * 2400
    assert volume(job, sharded(4, sync_every_micro_batch=False))["gradients"] == 0.75 * 4000
    both = volume(job, sharded(4, tensor=2))  # 2 groups of rows, each of which has half the weights
    assert both["gradients"] == 0.5 * 3 * 2000
    assert both["within layers"] == 4 * (4 + 2) * 32 * 8 * 2  # layers; sums; tokens; numbers; bytes
    assert not any(volume(job, Layout(1)).values())


def test_an_adapter_sends_its_own_gradient_alone() -> None:
    job = Job(Shape(**{**vars_of(SHAPE), "parameters": 1040, "trained": 40}), WORK)
    assert volume(job, Layout(4))["gradients"] == 0.75 * 2 * 160
    assert volume(job, sharded(4))["weights"] == 0.75 * 2 * (2 * 800 + 200)


def vars_of(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in Shape.__slots__}


def test_seconds_of_one_process_are_products_and_the_update() -> None:
    result = seconds(Job(SHAPE, WORK, (WORK,), micro_batches=2), Layout(1), MACHINE)
    assert result.products == pytest.approx(speed.step(SHAPE, WORK, WORK) / 1e6)
    assert result.communication == 0
    assert result.total == pytest.approx(result.products + 28 * 1000 / 1e6)


def test_seconds_of_a_sum_over_processes() -> None:
    result = seconds(Job(SHAPE, WORK, balance=0.8), Layout(4), MACHINE)
    assert result.products == pytest.approx(speed.step(SHAPE, WORK) / 4e6 / 0.8)
    assert result.communication == pytest.approx(1e-3 + 2 * (3e-4 + 0.75 * 4000 / 1e5))
    assert result.total == pytest.approx(result.products + result.communication + 28 * 1000 / 1e6)
    over_hosts = MACHINE.seconds(1000, 16)
    assert over_hosts == pytest.approx(1e-3 + 14e-4 + 1e-2 + 15 / 16 * 1000 / 1e4)


@pytest.mark.parametrize(
    "layout",
    [
        sharded(8),
        sharded(64, sync_every_micro_batch=False),
        sharded(16, tensor=4),
        sharded(8, reshard=False),
    ],
)
@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_an_overlapping_step_takes_between_the_longer_part_and_the_sum(
    layout: Layout, slow: float
) -> None:
    machine = Machine(flops=1e6, memory=1e9, near=1e6 / slow, far=1e5 / slow, start=1e-5)
    job = Job(SHAPE, WORK, (WORK,), micro_batches=4)
    result = seconds(job, layout, machine)
    assert max(result.products, result.communication) <= result.total
    assert result.total <= result.products + result.communication + 28e-6
    separate = seconds(job, layout, Machine(**{**vars(machine), "overlaps": False}))
    assert separate.total == pytest.approx(result.products + result.communication, rel=1e-3)


def test_rows_are_dealt_as_a_step_deals_them() -> None:
    assert distribute_rows([4, 4, 4, 4], Layout(2), 4) == (2, 1.0)
    assert distribute_rows([4, 4, 4], Layout(2), 4) == (2, 0.75)
    assert distribute_rows([4, 2], Layout(4), 100) == (1, pytest.approx(6 / 4 / 4))
    assert distribute_rows([1] * 64, Layout(8), 4) == (2, 1.0)
    assert distribute_rows([8, 7, 6, 5], Layout(2), 8) == (2, 1.0)  # 8 and 5, 7 and 6
    # 8 and 7 in the first round, 6 and 5 in the second
    assert distribute_rows([8, 7, 6, 5], sharded(2), 8) == (
        2,
        pytest.approx(26 / 2 / (8 + 6)),
    )


@pytest.mark.slow
def test_weights_are_split_where_they_do_not_fit() -> None:
    assert cases.automatic_layout("8B", "dpo", 8, lora=True) == Layout(8, Split())
    assert cases.automatic_layout("8B", "sft", 8) == sharded(8)
    assert cases.automatic_layout("70B", "dpo", 64, lora=True) == sharded(
        64, sync_every_micro_batch=False
    )
    small, large = (cases.memory("8B", "dpo", layout) for layout in (sharded(8), Layout(8)))
    assert small.total(cases.MICRO_BATCH_TOKENS) < large.total(cases.MICRO_BATCH_TOKENS)


def test_a_machine_is_found_from_its_timings() -> None:
    small, large = measure.GRADIENT_BYTES
    selected = {f"sum, {size}": 2e-3 + size / 1e9 for size in (small, large)} | {
        "uncoupled, 2": 0.5,
        "update, 2": 0.25,
    }
    result = local_steps.machine({"seconds": selected, "uncoupled": 3e9}, 2)
    assert result.seconds(4e6, 2, 2) == pytest.approx(2e-3 + 4e6 / 1e9)
    assert result.flops == pytest.approx(3e9 / 0.5)
    assert result.memory == pytest.approx(28 * measure.UPDATED_WEIGHTS / 0.25)


@pytest.mark.parametrize(
    ("slower", "loss", "is_within_bars"),
    [(1.0, 2.0, True), (1.5, 2.0, False), (1.0, 2.00001, False)],
)
def test_the_last_line_and_the_status_agree(
    slower: float,
    loss: float,
    is_within_bars: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timings = {f"{name}, {n}": 1.0 for name in ("uncoupled", "update") for n in (1, 2)} | {
        f"sum, {n}": n * 1e-9 for n in measure.GRADIENT_BYTES
    }
    seconds = {"one process": 1.0, "two processes": 0.6 * slower, "two, sharded": 0.6}
    results = [
        Step("a", variant, 1.0 if variant == "one process" else 0.6, selected, 2.0)
        for variant, selected in seconds.items()
    ]
    monkeypatch.setattr(benchmark, "measure", lambda _: {"seconds": timings, "uncoupled": 1.0})
    monkeypatch.setattr(
        benchmark, "steps", lambda _: [*results[:2], replace(results[2], loss=loss)]
    )
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick"])
    assert benchmark.main() == (0 if is_within_bars else 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("short" not in last) == is_within_bars
    assert last.count("held") + last.count("short") == 7


def small(group: Group) -> dict[str, Any]:
    """The measurement, on steps that take no time."""
    measure.STEPS, measure.UNCOUPLED_TOKENS = {"few": 256}, 64
    measure.HIDDEN, measure.INNER, measure.VOCABULARY, measure.BUDGET = 32, 64, 128, 64
    return measure.measure_all(group, 1)


@pytest.mark.slow
@pytest.mark.dist
def test_predicted_steps_of_one_process_and_two_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = run(small, 2)
    assert [rank.error for rank in ranks] == ["", ""]
    monkeypatch.setattr(local_steps, "STEPS", {"few": 256})
    results = {step.variant: step for step in local_steps.steps(ranks[0].value)}
    assert list(results) == list(NUM_PROCESSES)
    assert [step.loss for step in results.values()] == pytest.approx(
        [results["one process"].loss] * 3, rel=1e-6
    )
    assert all(step.predicted > 0 and step.measured > 0 for step in results.values())
    shape, work = Shape(**ranks[0].value["shape"]), Work(*ranks[0].value["few"])
    for variant in NUM_PROCESSES:
        operations = ranks[0].value[f"few, {variant}"]["operations"]
        assert sum(map(sum, operations)) == pytest.approx(speed.step(shape, work), rel=1e-6)
        assert len(operations) == NUM_PROCESSES[variant]
