"""The benchmarks for GPUs, on the CPU and on the simulated device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.device import measure
from benchmarks.device.measure import SMALL_VARIANTS, measure_steps
from tests.pretend import CUDA, pretended
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
    with pretended():
        figures = list(measure_steps(SMALL_VARIANTS[2], CUDA, 1e12, repeats=1))
    assert [item.loss for item in figures] == pytest.approx(expected, abs=0.02)
