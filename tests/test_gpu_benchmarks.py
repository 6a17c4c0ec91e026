"""The benchmarks for GPUs, on the CPU and on the simulated device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.device import measure
from benchmarks.device.measure import SMALL_VARIANTS, measure_steps
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import correctness
from benchmarks.gpu.__main__ import NEXT_STEPS, Result
from benchmarks.gpu.correctness import long_batch
from tests.simulated_cuda import CUDA, simulated_device
from valence.models.flex import Visible
from valence.models.layout import segment_table, segments_of
from valence.trainer.step import Objective

HOST = torch.device("cpu")


def test_a_case_that_runs_out_of_memory_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Objective.run

    def run_out_of_memory(self: Objective, *arguments: Any, **options: Any) -> Any:
        if self.method.name == "dpo":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        return run(self, *arguments, **options)

    monkeypatch.setattr(Objective, "run", run_out_of_memory)
    figures = list(measure_steps(SMALL_VARIANTS[2], HOST, 1e12, repeats=1))
    assert [item.failure for item in figures] == ["", "out of memory", ""]
    assert [math.isfinite(item.loss) for item in figures] == [True, False, True]
    assert "out of memory" in str(figures[1])


def test_a_model_that_does_not_fit_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "make_policy", run_out_of_memory)
    figures = list(measure_steps(SMALL_VARIANTS[0], HOST, 1e12, repeats=1))
    assert len(figures) == 3
    assert all(item.failure for item in figures)


@pytest.mark.slow
def test_steps_of_a_device_have_the_losses_of_the_host() -> None:
    expected = [item.loss for item in measure_steps(SMALL_VARIANTS[2], HOST, 1e12, repeats=1)]
    with simulated_device():
        figures = list(measure_steps(SMALL_VARIANTS[2], CUDA, 1e12, repeats=1))
    assert [item.loss for item in figures] == pytest.approx(expected, abs=0.02)


def test_the_long_batch_has_full_and_partial_blocks_and_two_passes() -> None:
    batch = long_batch(128, HOST)
    assert 1500 <= len(batch.tokens) <= 3000
    assert 0 < sum(batch.requires_grad) < batch.sequences
    mask = Visible(segments_of(segment_table(batch.segments)), (0,), HOST).masks[0]
    assert mask.full_kv_num_blocks is not None
    assert int(mask.full_kv_num_blocks.sum()) > 20
    assert int(mask.kv_num_blocks.sum()) > 20


@pytest.fixture
def is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark chooses its device itself."""
    monkeypatch.setattr(gpu, "best_device", lambda: CUDA)


@pytest.mark.slow
@pytest.mark.usefixtures("is_simulated")
def test_all_steps_complete_on_the_simulated_device(capsys: pytest.CaptureFixture[str]) -> None:
    with simulated_device():
        assert gpu.main([]) == 0
    table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    rows = [line for line in table if line[:1] in "ABCD" and line[1:2] == " "]
    assert {line[0] for line in rows} == set("ABCD")
    assert all(line.endswith(" ok") for line in rows if line[0] == "A")
    assert any("loss against a CPU" in line and line.endswith(" ok") for line in rows)


@pytest.mark.usefixtures("is_simulated")
def test_the_first_wrong_number_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def errors(*_: Any) -> Any:
        yield "flex", torch.float32, 1e-6, 1e-6
        yield "sdpa", torch.float32, float("nan"), 1e-6
        raise AssertionError("it continues")

    monkeypatch.setattr(correctness, "measure_errors", errors)
    assert gpu.main(["--steps", "AB"]) == 1
    table = capsys.readouterr().out.splitlines()
    assert NEXT_STEPS["packed"] in table[-1]
    assert "WRONG" in table[-1]
    assert not any(line.startswith("B ") for line in table)


@pytest.mark.parametrize(
    ("value", "is_minimum", "expected"),
    [(0.5, False, True), (1.5, False, False), (1.5, True, True), (0.5, True, False)],
)
def test_numbers_and_bars(value: float, is_minimum: bool, expected: bool) -> None:
    result = Result("B", "name", value, 1.0, "dynamic", is_minimum)
    assert result.is_within is expected
    assert (result.verdict(is_compared=True) == "ok") is expected
    assert result.verdict(is_compared=False) == "not compared"


def test_every_kind_of_number_says_what_a_miss_means() -> None:
    assert not Result("A", "name", float("nan"), 1.0, "packed").is_within
    assert not Result("A", "name", float("nan"), 1.0, "packed", is_minimum=True).is_within
    assert all(NEXT_STEPS.values())
