"""A case's step by Valence, in this process, and by TRL, in a process with its own environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.cases import CASES, Case
from benchmarks.parity.stages import Stage
from benchmarks.peers import surroundings
from valence.dist.single import Single
from valence.engine.models import build_policy, build_reference, load_model
from valence.report.metrics import Meter
from valence.training.methods import METHODS
from valence.training.step import Objective
from valence.types import Encoded, Mean

Figures = Mapping[str, float]
BUDGET = 400
"""Tokens of a micro-batch of Valence: small, so that its step is cut where TRL's batch is whole."""


@dataclass(frozen=True)
class Theirs:
    """TRL's figures of every case, and the versions that gave them."""

    versions: Mapping[str, str]
    figures: tuple[Figures, ...]


def max_length(units: Sequence[Encoded]) -> int:
    """That of the longest row: only mismatched completions are cut."""
    return max(len(unit.prompt_ids) + len(answer.ids) for unit in units for answer in unit.answers)


def models(case: Case, stage: Stage) -> tuple[Path, Path]:
    """Folders of the policy and of the reference."""
    return (stage.second, stage.first) if case.swapped else (stage.first, stage.second)


def ours(case: Case, stage: Stage) -> Figures:
    """One step without an update, by the part of Valence that every training step runs."""
    method = METHODS[case.method]
    units = stage.rows(method.kind)
    policy_folder, reference_folder = models(case, stage)
    policy = build_policy(load_model(str(policy_folder), dtype=torch.float32), dtype=torch.float32)
    reference = None
    if method.needs_reference:
        other = load_model(str(reference_folder), dtype=torch.float32)
        reference = build_reference(policy, fresh_adapter=False, model=other, name="second")
    settings = method.resolve(case.ours)
    objective = Objective(method, settings, policy, reference, Single(), BUDGET, max_length(units))
    outcome = objective.run(units, backward=True)
    meter = Meter()
    for name, parts in outcome.metrics.items():
        for part in parts:
            meter.add({name: part})
    meter.add({"loss": Mean(outcome.loss, torch.ones(()))})
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    return meter.reduce(objective.group) | {"grad_norm": torch.nn.utils.get_total_norm(grads).item()}


def theirs(python: Path, stage: Stage, scratch: Path) -> Theirs:
    """All cases by TRL. Raises RuntimeError when TRL fails, or trains on other tokens than Valence."""
    jobs = [_job(case, stage) for case in CASES]
    job, results = scratch / "job.json", scratch / "results.json"
    job.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("trl_side.py")
    command = [str(python), str(script), str(job), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found = json.loads(results.read_text())
    for case, asked, got in zip(CASES, jobs, found["cases"], strict=True):
        _check_tokens(case, asked, got["rows"])
    return Theirs(found["versions"], tuple(got["figures"] for got in found["cases"]))


def _job(case: Case, stage: Stage) -> dict[str, Any]:
    units = stage.rows(METHODS[case.method].kind)
    policy, reference = models(case, stage)
    return {
        "trainer": case.trainer, "config": dict(case.theirs), "rows": [_row(unit) for unit in units], "batch": case.batch,
        "policy": str(policy), "reference": str(reference), "max_length": max_length(units), "eos": stage.eos,
    }  # fmt: skip


def _row(unit: Encoded) -> dict[str, Any]:
    if not all(all(answer.mask) for answer in unit.answers) or any(unit.prompt_mask):
        raise RuntimeError(f"{unit.origin}: TRL trains on all of a completion and nothing of a prompt")
    names = ("chosen", "rejected") if unit.kind == "preference" else ("completion",)
    texts = {name: list(answer.ids) for name, answer in zip(names, unit.answers, strict=True)}
    return {"prompt": list(unit.prompt_ids)} | texts | ({} if unit.label is None else {"label": unit.label})


def _check_tokens(case: Case, asked: Mapping[str, Any], got: Sequence[Mapping[str, Any]]) -> None:
    """TRL's prepared rows are the rows it was given, token by token."""
    for row, prepared in zip(asked["rows"], got, strict=True):
        if case.trainer == "sft":
            same = prepared["input_ids"] == row["prompt"] + row["completion"]
        else:
            same = all(prepared[f"{name}_ids"] == row[name] for name in row if name != "label")
        if not same:
            raise RuntimeError(f"{case.name}: TRL prepared other tokens than it was given")
