"""Predicted and measured times of steps on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.scale_model.measure import GRADIENT_BYTES, NUM_PROCESSES, STEPS, UPDATED_WEIGHTS
from benchmarks.scale_model.model import UPDATE, Job, Layout, Machine, balance, seconds, sharded
from valence.distributed.launcher import launch
from valence.models.shape import Shape
from valence.models.speed import Work


@dataclass(frozen=True)
class Step:
    """Predicted and measured time (s) of a step in one variant, and its loss."""

    name: str
    variant: str
    predicted: float
    measured: float
    loss: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted / self.measured


def measure(rounds: int) -> dict[str, Any]:
    """Start two processes of one thread each, and return their measurements."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
    ):
        file = Path(folder) / "measurements.json"
        status = launch(
            [str(file), str(rounds)],
            2,
            program=[sys.executable, "-m", "benchmarks.scale_model.measure"],
        )
        if status:
            raise SystemExit(status)
        return json.loads(file.read_text(encoding="utf-8"))


def machine(values: Mapping[str, Any], processes: int) -> Machine:
    """Rates of this machine when ``processes`` processes compute at the same time."""
    timings = values["seconds"]
    small, large = (timings[f"sum, {size}"] for size in GRADIENT_BYTES)
    # with two processes, each one receives as many bytes as it sums in an all-reduce
    bandwidth = (GRADIENT_BYTES[1] - GRADIENT_BYTES[0]) / (large - small)
    return Machine(
        flops=values["uncoupled"] / timings[f"uncoupled, {processes}"],
        memory=UPDATE * UPDATED_WEIGHTS / timings[f"update, {processes}"],
        near=bandwidth,
        far=bandwidth,
        start=small - GRADIENT_BYTES[0] / bandwidth,
        overlaps=False,
        scatters=2,  # gloo reduce-scatters by an all-reduce
    )


def steps(values: Mapping[str, Any]) -> list[Step]:
    """Predict each measured step. values: the result of ``measure``."""
    shape, timings = Shape(**values["shape"]), values["seconds"]
    step_list: list[Step] = []
    for name in STEPS:
        for variant, processes in NUM_PROCESSES.items():
            result = values[f"{name}, {variant}"]
            layout = sharded(processes) if variant == "two, sharded" else Layout(processes)
            rounds, step_balance = (
                max(map(len, result["operations"])),
                balance(result["operations"], layout),
            )
            job = Job(
                shape, Work(*values[name]), micro_batches=rounds, balance=step_balance, width=4
            )
            predicted = seconds(job, layout, machine(values, processes)).total
            step_list.append(
                Step(name, variant, predicted, timings[f"{name}, {variant}"], result["loss"])
            )
    return step_list
