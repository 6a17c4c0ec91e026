"""A case's step by Valence, by the formulas of HALOs, and by TRL in a separate process and
environment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.parity.cases import Case
from benchmarks.parity.halos_side import Side, halos
from benchmarks.parity.stages import Stage, as_kind, shortened
from benchmarks.peers import surroundings
from valence.distributed.process_group import SingleProcess
from valence.models.build import build_policy, build_reference, load_model
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.reports.metrics import Meter
from valence.trainer.methods import METHODS
from valence.trainer.step import Objective
from valence.types import Mean, TokenizedExample

Figures = Mapping[str, float]
BUDGET = 400
"""Tokens of a micro-batch of Valence: small, so that its step is cut where TRL's batch is whole."""


def folders(case: Case, stage: Stage) -> tuple[Path, Path]:
    """Folders of the policy and of the reference."""
    return (stage.second, stage.first) if case.swapped else (stage.first, stage.second)


def source_rows(case: Case, stage: Stage) -> tuple[TokenizedExample, ...]:
    """The rows that the other side reads."""
    rows = stage.rows(case.source)
    return shortened(rows) if case.short else rows


def max_length(units: Sequence[TokenizedExample]) -> int:
    """That of the longest row: only mismatched completions are cut."""
    return max(len(unit.prompt_ids) + len(answer.ids) for unit in units for answer in unit.answers)


class Here:
    """The sides that run in this process, with models that are loaded once.

    No case changes a weight.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.engines = cache(self._engines)
        self.plain = cache(self._plain)

    def _engines(self, policy: Path, reference: Path) -> tuple[PolicyModel, Reference]:
        engine = build_policy(load_model(str(policy), dtype=torch.float32), dtype=torch.float32)
        other = load_model(str(reference), dtype=torch.float32)
        return engine, build_reference(engine, fresh_adapter=False, model=other, name="second")

    def _plain(self, policy: Path, reference: Path) -> tuple[nn.Module, nn.Module]:
        """As transformers has them: a PolicyModel would replace the attention."""
        first, second = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for folder in (policy, reference)
        )
        return first.eval(), second.eval()

    def ours(self, case: Case) -> Figures:
        """One step without an update, by the part of Valence that every training step runs."""
        method = METHODS[case.method]
        source = source_rows(case, self.stage)
        units = as_kind(source, method.kind)
        policy, other = self.engines(*folders(case, self.stage))
        policy.zero_grad()
        reference = other if method.needs_reference else None
        objective = Objective(
            method,
            method.resolve(case.ours),
            policy,
            reference,
            SingleProcess(),
            BUDGET,
            max_length(source),
        )
        for _ in range(case.steps - 1):
            objective.update_statistics(objective.run(units, backward=False))
        outcome = objective.run(units, backward=True)
        meter = Meter()
        meter.pool(outcome.metrics)
        meter.add({"loss": Mean(outcome.loss, torch.ones(()))})
        return meter.reduce(objective.group) | {"grad_norm": grad_norm(policy)}

    def formulas(self, case: Case) -> Figures:
        """The step by the formulas of HALOs."""
        rows = source_rows(case, self.stage)
        policy, reference = self.plain(*folders(case, self.stage))
        figures = halos(Side(policy, reference, case.theirs, max_length(rows)), rows, case.batch)
        return figures | {"grad_norm": grad_norm(policy)}


def grad_norm(model: nn.Module) -> float:
    return torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ).item()


@dataclass(frozen=True)
class Theirs:
    """TRL's figures of every case, and the versions that gave them."""

    versions: Mapping[str, str]
    figures: tuple[Figures, ...]


def theirs(cases: Sequence[Case], python: Path, stage: Stage, scratch: Path) -> Theirs:
    """All cases by TRL.

    Raises RuntimeError when TRL fails, or trains on other tokens than Valence.
    """
    jobs = [_job(case, stage) for case in cases]
    job, results = scratch / "job.json", scratch / "results.json"
    job.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("trl_side.py")
    command = [str(python), str(script), str(job), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    output = json.loads(results.read_text())
    for case, job, got in zip(cases, jobs, output["cases"], strict=True):
        _check_tokens(case, job, got["rows"])
    return Theirs(output["versions"], tuple(got["figures"] for got in output["cases"]))


def _job(case: Case, stage: Stage) -> dict[str, Any]:
    units = source_rows(case, stage)
    policy, reference = folders(case, stage)
    return {
        "trainer": case.trainer,
        "config": dict(case.theirs),
        "rows": [_row(unit) for unit in units],
        "batch": case.batch,
        "policy": str(policy),
        "reference": str(reference),
        "max_length": max_length(units),
        "eos": stage.eos,
    }


def _row(unit: TokenizedExample) -> dict[str, Any]:
    if not all(all(answer.mask) for answer in unit.answers) or any(unit.prompt_mask):
        raise RuntimeError(
            f"{unit.origin}: TRL trains on all of a completion and nothing of a prompt"
        )
    names = ("chosen", "rejected") if unit.kind == "preference" else ("completion",)
    texts = {name: list(answer.ids) for name, answer in zip(names, unit.answers, strict=True)}
    return (
        {"prompt": list(unit.prompt_ids)}
        | texts
        | ({} if unit.label is None else {"label": unit.label})
    )


def _check_tokens(case: Case, job: Mapping[str, Any], got: Sequence[Mapping[str, Any]]) -> None:
    """TRL's prepared rows are the rows it was given, token by token."""
    for row, prepared in zip(job["rows"], got, strict=True):
        if case.trainer == "sft":
            same = prepared["input_ids"] == row["prompt"] + row["completion"]
        elif case.trainer in ("cpo", "orpo"):
            same = all(
                prepared[f"{side}_input_ids"] == row["prompt"] + row[side]
                for side in ("chosen", "rejected")
            )
        else:
            same = all(prepared[f"{name}_ids"] == row[name] for name in row if name != "label")
        if not same:
            raise RuntimeError(f"{case.name}: TRL prepared other tokens than it was given")
