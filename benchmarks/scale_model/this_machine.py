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

from benchmarks.scale_model.measure import SENT, STEPS, UPDATED, WAYS
from benchmarks.scale_model.model import UPDATE, Job, Layout, Machine, balance, seconds, sharded
from valence.distributed.launcher import launch
from valence.models.shape import Shape
from valence.models.speed import Work


@dataclass(frozen=True)
class Step:
    """A step in one of the layouts, in seconds, with its loss."""

    name: str
    way: str
    predicted: float
    measured: float
    loss: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def measured(rounds: int) -> dict[str, Any]:
    """Start two processes of one thread each, and return their measurements."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
    ):
        file = Path(folder) / "found.json"
        status = launch(
            [str(file), str(rounds)],
            2,
            program=[sys.executable, "-m", "benchmarks.scale_model.measure"],
        )
        if status:
            raise SystemExit(status)
        return json.loads(file.read_text(encoding="utf-8"))


def machine(values: Mapping[str, Any], processes: int) -> Machine:
    """This machine, with ``processes`` concurrent processes."""
    timings = values["seconds"]
    small, large = (timings[f"sum, {size}"] for size in SENT)
    # of two processes, an all-reduce brings each as many bytes as it sums
    bandwidth = (SENT[1] - SENT[0]) / (large - small)
    return Machine(
        flops=values["apart"] / timings[f"apart, {processes}"],
        memory=UPDATE * UPDATED / timings[f"update, {processes}"],
        near=bandwidth,
        far=bandwidth,
        start=small - SENT[0] / bandwidth,
        overlaps=False,
        scatters=2,  # gloo's is an all-reduce, of which each process keeps its part
    )


def steps(values: Mapping[str, Any]) -> list[Step]:
    shape, timings = Shape(**values["shape"]), values["seconds"]
    step_list: list[Step] = []
    for name in STEPS:
        for way, processes in WAYS.items():
            ran = values[f"{name}, {way}"]
            layout = sharded(processes) if way == "two, sharded" else Layout(processes)
            rounds, share = max(map(len, ran["operations"])), balance(ran["operations"], layout)
            job = Job(shape, Work(*values[name]), micro_batches=rounds, balance=share, width=4)
            predicted = seconds(job, layout, machine(values, processes)).total
            step_list.append(Step(name, way, predicted, timings[f"{name}, {way}"], ran["loss"]))
    return step_list
